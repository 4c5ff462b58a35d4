"""A fitted model as ONNX: what it predicts of instances without context. Needs ``headcount[onnx]``.

input   "instances"      (n, D) float32 (a table or a text after its encoding), or (n, H, W, channels) uint8
output  "probabilities"  (n, C) float32, the instance temperature applied
metadata "headcount"     JSON: the classes, and how a table becomes numbers
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.io import atomic_write
from headcount.majority.calibration import apply_temperature
from headcount.models.backbones import backbone_name
from headcount.models.fitted import FittedModel
from headcount.models.network import FrozenBackbone, Model
from headcount.models.trees import LinearModel, SklearnModel, Trees, round_down

TOLERANCE = 1e-4
_OPSET = 18
_TEST_INSTANCES = 64


def export_onnx(model: FittedModel, path: Path) -> float:
    """Write the file if onnxruntime gives what ``model.predict(..., use_context=False)`` does; returns the largest difference."""
    onnx, runtime = _import_onnx()
    if isinstance(model.estimator, Model):
        config = model.estimator.config
        if model.estimator.instance_depends_on_bag:
            why = "judges an instance by its bag; ONNX takes single instances, so it cannot be exported"
            raise HeadcountError(f"head {config.head} {why}")
        what = f"head {config.head} on {backbone_name(config.backbone)}"
        network = _SingleInstances(model.estimator, model.instance_temperature)
        graph = _export_module(network, config.shape, "probabilities", what)
    elif isinstance(model.estimator, SklearnModel):
        raise HeadcountError("only the networks, forests and logistic regressions of `headcount fit` can become ONNX")
    else:
        features = model.preprocessor.shape[0] if model.frozen_backbone is None else model.frozen_backbone.dim
        graph = _estimator_graph(model.estimator, features, model.instance_temperature, onnx)
    if model.frozen_backbone is not None:
        graph = _prepend_backbone(model.frozen_backbone, graph, onnx)
    metadata = {"classes": list(model.classes), "preprocessor": model.preprocessor.to_json()}
    onnx.helper.set_model_props(graph, {"headcount": json.dumps(metadata)})
    data = graph.SerializeToString()
    difference = _max_difference(model, data, runtime)
    if not difference <= TOLERANCE:
        raise HeadcountError(f"onnxruntime predicts otherwise than the model, by {difference:.2g}; nothing was written")
    atomic_write(path, lambda f: f.write(data))
    return difference


def _import_onnx() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as e:
        raise HeadcountError(f"ONNX needs {e.name}: pip install 'headcount[onnx]'") from None
    return onnx, onnxruntime


class _SingleInstances(nn.Module):
    """Every instance as a bag of one, as in ``predict_instances``."""

    def __init__(self, model: Model, temperature: float) -> None:
        super().__init__()
        self.model, self.temperature = model, temperature

    def forward(self, instances: Tensor) -> Tensor:
        n = instances.shape[0]
        segments = Segments(torch.arange(n, device=instances.device), n, size=1)
        p = self.model.tta_output(self.model.tta_features(instances), segments).instance.softmax(1)
        return apply_temperature(p, self.temperature)


def _export_module(module: nn.Module, shape: tuple[int, ...], output: str, what: str) -> Any:
    example = torch.zeros((3, *shape), dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    logger = logging.getLogger("torch.onnx")  # it names every library that the exporter could have used
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module.eval(), (example,), dynamo=True, opset_version=_OPSET, verbose=False,
                input_names=["instances"], output_names=[output],
                dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            )  # fmt: skip
    except Exception as e:  # the exporter has many exceptions of its own
        why = " ".join(str(e).split())[:200]
        raise HeadcountError(f"torch cannot export {what}: {why}") from None
    finally:
        logger.setLevel(level)
    return program.model_proto


class _ToFloat32(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.float()


def _prepend_backbone(frozen_backbone: FrozenBackbone, estimator_graph: Any, onnx: Any) -> Any:
    """The backbone's graph, followed by the estimator's."""
    features = nn.Sequential(frozen_backbone, _ToFloat32())  # rounded to half precision, as the estimator was trained on
    features_graph = _export_module(features, frozen_backbone.shape, "features", f"the frozen backbone {frozen_backbone.name}")
    estimator_graph = onnx.compose.add_prefix(estimator_graph, "estimator/")  # both may have a node of the same name
    features_graph.ir_version = estimator_graph.ir_version = max(features_graph.ir_version, estimator_graph.ir_version)
    model = onnx.compose.merge_models(features_graph, estimator_graph, io_map=[("features", "estimator/instances")])
    output = model.graph.output[0].name
    for node in model.graph.node:
        node.output[:] = ["probabilities" if name == output else name for name in node.output]
    model.graph.output[0].name = "probabilities"
    return model


def _estimator_graph(estimator: Trees | LinearModel, features: int, temperature: float, onnx: Any) -> Any:
    h, float_ = onnx.helper, onnx.TensorProto.FLOAT
    x = h.make_tensor_value_info("instances", float_, ["n", features])
    classes = estimator.value.shape[1] if isinstance(estimator, Trees) else len(estimator.bias)
    p = h.make_tensor_value_info("probabilities", float_, ["n", classes])
    nodes, initializers = _tree_nodes(estimator, h) if isinstance(estimator, Trees) else _linear_nodes(estimator, onnx)
    if temperature != 1:  # as apply_temperature does
        nodes[-1].output[0] = "p"
        steps = [
            ("Clip", ["p", "least"], "clipped"),
            ("Log", ["clipped"], "log_p"),
            ("Div", ["log_p", "temperature"], "scaled"),
        ]
        nodes += [h.make_node(kind, given, [out]) for kind, given, out in steps]
        nodes.append(h.make_node("Softmax", ["scaled"], ["probabilities"], axis=1))
        constants = {"least": 1e-30, "temperature": temperature}
        initializers += [onnx.numpy_helper.from_array(np.array(v, np.float32), name) for name, v in constants.items()]
    graph = h.make_graph(nodes, "headcount", [x], [p], initializers)
    opsets = [h.make_opsetid("", _OPSET), h.make_opsetid("ai.onnx.ml", 3)]
    model = h.make_model(graph, opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    return model


def _linear_nodes(estimator: LinearModel, onnx: Any) -> tuple[list[Any], list[Any]]:
    h, constant = onnx.helper, onnx.numpy_helper.from_array
    nodes = [
        h.make_node("Gemm", ["instances", "weight", "bias"], ["logits"], transB=1),
        h.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    arrays = {"weight": estimator.weight, "bias": estimator.bias}
    return nodes, [constant(a.astype(np.float32), name) for name, a in arrays.items()]


def _tree_nodes(estimator: Trees, h: Any) -> tuple[list[Any], list[Any]]:
    """One TreeEnsembleRegressor with C outputs: the sum of the leaves, each divided by the number of trees."""
    m, (_, classes) = len(estimator.feature), estimator.value.shape
    tree = np.repeat(np.arange(len(estimator.roots)), np.diff(np.append(estimator.roots, m)))
    within = np.arange(m) - estimator.roots[tree]
    leaf = estimator.feature < 0
    leaves = np.flatnonzero(leaf)
    ids = lambda a: a.astype(int).tolist()  # noqa: E731
    node = h.make_node(
        "TreeEnsembleRegressor", ["instances"], ["probabilities"], domain="ai.onnx.ml",
        n_targets=classes, aggregate_function="SUM", post_transform="NONE",
        nodes_treeids=ids(tree), nodes_nodeids=ids(within),
        nodes_featureids=ids(np.maximum(estimator.feature, 0)), nodes_values=round_down(estimator.threshold).tolist(),
        nodes_modes=["LEAF" if v else "BRANCH_LEQ" for v in leaf],
        nodes_truenodeids=ids(np.where(leaf, 0, estimator.left - estimator.roots[tree])),
        nodes_falsenodeids=ids(np.where(leaf, 0, estimator.right - estimator.roots[tree])),
        nodes_hitrates=[1.0] * m, nodes_missing_value_tracks_true=[0] * m,
        target_treeids=ids(np.repeat(tree[leaves], classes)), target_nodeids=ids(np.repeat(within[leaves], classes)),
        target_ids=ids(np.tile(np.arange(classes), len(leaves))),
        target_weights=(estimator.value[leaves].astype(np.float64) / len(estimator.roots)).ravel().astype(np.float32).tolist(),
    )  # fmt: skip
    return [node], []


def _max_difference(model: FittedModel, data: bytes, runtime: Any) -> float:
    """The largest difference of the two on instances of many kinds: usual, extreme, and a single one."""
    rng, shape, n = np.random.default_rng(0), model.preprocessor.shape, _TEST_INSTANCES
    estimator = model.estimator
    if len(shape) == 3:
        x = rng.integers(0, 256, (n, *shape), dtype=np.uint8)
    else:
        x = (rng.normal(size=(n, *shape)) * np.repeat([0.3, 1, 3, 30], n // 4)[:, None]).astype(np.float32)
        if isinstance(estimator, Model):
            std = estimator.normalize.std.cpu().numpy()
            x = (x * std + estimator.normalize.mean.cpu().numpy()).astype(np.float32)
        elif isinstance(estimator, Trees) and (used := np.flatnonzero(estimator.feature >= 0)).size:
            nodes = rng.choice(used, n // 2)  # on the edge of a decision
            x[np.arange(len(nodes)), estimator.feature[nodes]] = round_down(estimator.threshold[nodes])
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    largest = 0.0
    for part in (x, x[:1]):
        singles = Bags.of(Pool(part), sizes=[1] * len(part), labels=[-1] * len(part), classes=model.classes)
        expected = model.predict(singles, use_context=False, level=None).instance_probabilities
        got = session.run(["probabilities"], {"instances": part})[0]
        largest = max(largest, float(np.abs(got - expected).max()) if got.shape == expected.shape else math.inf)
    return largest

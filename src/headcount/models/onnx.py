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
from collections.abc import Callable
from functools import partial
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
from headcount.models.network import Model
from headcount.models.trees import BoostedTrees, LinearModel, Trees, round_down

TOLERANCE = 1e-4
_OPSET = 18
_TEST_INSTANCES = 64


def export_onnx(model: FittedModel, path: Path) -> float:
    """Write the file if onnxruntime gives what ``model.predict(..., use_context=False)`` does; returns the largest difference."""
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter needs it)
    except ImportError as e:
        raise HeadcountError(f"ONNX needs {e.name}: pip install 'headcount[onnx]'") from None
    estimator, backbone = model.estimator, model.frozen_backbone
    temperature = _Function(partial(apply_temperature, temperature=model.instance_temperature))
    width = model.preprocessor.shape[0] if backbone is None else backbone.dim
    if isinstance(estimator, Model):
        config = estimator.config
        if estimator.instance_depends_on_bag:
            why = "judges an instance by its bag; ONNX takes single instances, so it cannot be exported"
            raise HeadcountError(f"head {config.head} {why}")
        what = f"head {config.head} on {backbone_name(config.backbone)}"
        graphs = [_export_module(nn.Sequential(_SingleInstances(estimator), temperature), config.shape, what)]
    elif isinstance(estimator, LinearModel):
        graphs = [_export_module(nn.Sequential(_linear_module(estimator), temperature), (width,), "the linear model")]
    elif isinstance(estimator, Trees):
        graphs = [_export_trees(estimator, width, onnx)]
        if model.instance_temperature != 1:
            graphs.append(_export_module(temperature, (len(model.classes),), "the temperature"))
    else:
        raise HeadcountError("only the networks, forests and logistic regressions of `headcount fit` can become ONNX")
    if backbone is not None:
        features = nn.Sequential(backbone, _Function(Tensor.float))  # in half precision, as the estimator was trained on
        graphs.insert(0, _export_module(features, backbone.shape, f"the frozen backbone {backbone.name}"))
    graph = _chain(graphs, onnx)
    metadata = {"classes": list(model.classes), "preprocessor": model.preprocessor.to_json()}
    onnx.helper.set_model_props(graph, {"headcount": json.dumps(metadata)})
    data = graph.SerializeToString()
    difference = _max_difference(model, data, onnxruntime)
    if not difference <= TOLERANCE:
        raise HeadcountError(f"onnxruntime predicts otherwise than the model, by {difference:.2g}; nothing was written")
    atomic_write(path, lambda f: f.write(data))
    return difference


class _SingleInstances(nn.Module):
    """Every instance as a bag of one, as in ``predict_instances``."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, instances: Tensor) -> Tensor:
        n = instances.shape[0]
        segments = Segments(torch.arange(n, device=instances.device), n, size=1)
        return self.model.tta_output(self.model.tta_features(instances), segments).instance.softmax(1)


class _Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _export_module(module: nn.Module, shape: tuple[int, ...], what: str) -> Any:
    example = torch.zeros((3, *shape), dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    logger = logging.getLogger("torch.onnx")  # it names every library that the exporter could have used
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module.eval(), (example,), dynamo=True, opset_version=_OPSET, verbose=False,
                input_names=["instances"], output_names=["probabilities"],
                dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            )  # fmt: skip
    except Exception as e:  # the exporter has many exceptions of its own
        why = " ".join(str(e).split())[:200]
        raise HeadcountError(f"torch cannot export {what}: {why}") from None
    finally:
        logger.setLevel(level)
    return program.model_proto


def _chain(graphs: list[Any], onnx: Any) -> Any:
    """One graph, in which the output of each is the input of the next."""
    *earlier, chained = graphs
    for number, graph in reversed(list(enumerate(earlier))):
        prefix = f"part{number}/"  # the parts may have nodes of the same names
        graph, name = onnx.compose.add_prefix(graph, prefix), graph.graph.input[0].name
        _rename_input(graph, name)
        graph.ir_version = chained.ir_version = max(graph.ir_version, chained.ir_version)
        _rename_input(chained, "input")
        chained = onnx.compose.merge_models(graph, chained, io_map=[(f"{prefix}probabilities", "input")])
    return chained


def _rename_input(model: Any, name: str) -> None:
    old, model.graph.input[0].name = model.graph.input[0].name, name
    for node in model.graph.node:
        node.input[:] = [name if edge == old else edge for edge in node.input]


def _linear_module(estimator: LinearModel) -> nn.Module:
    linear = nn.Linear(*reversed(estimator.weight.shape))
    linear.load_state_dict({k: torch.from_numpy(a).float() for k, a in estimator.arrays().items()})
    return nn.Sequential(linear, nn.Softmax(1))


def _export_trees(estimator: Trees, features: int, onnx: Any) -> Any:
    """One TreeEnsembleRegressor with C outputs: the sum of the leaves, each divided by the number of trees; of boosted trees the
    scores, and their softmax."""
    h, float_ = onnx.helper, onnx.TensorProto.FLOAT
    m, scores = len(estimator.feature), "scores" if isinstance(estimator, BoostedTrees) else "probabilities"
    tree = np.repeat(np.arange(len(estimator.roots)), np.diff(np.append(estimator.roots, m)))
    within = np.arange(m) - estimator.roots[tree]
    leaf = estimator.feature < 0
    leaves = np.flatnonzero(leaf)
    if isinstance(estimator, BoostedTrees):
        classes, target_nodes, target = len(estimator.bias), leaves, estimator.target[tree[leaves]]
        value, more = estimator.value[leaves], {"base_values": estimator.bias.tolist()}
    else:
        classes, more = estimator.value.shape[1], {}
        target_nodes, target = np.repeat(leaves, classes), np.tile(np.arange(classes), len(leaves))
        value = (estimator.value[leaves].astype(np.float64) / len(estimator.roots)).ravel()
    ids = lambda a: a.astype(int).tolist()  # noqa: E731
    nodes = [h.make_node(
        "TreeEnsembleRegressor", ["instances"], [scores], domain="ai.onnx.ml",
        n_targets=classes, aggregate_function="SUM", post_transform="NONE",
        nodes_treeids=ids(tree), nodes_nodeids=ids(within),
        nodes_featureids=ids(np.maximum(estimator.feature, 0)), nodes_values=round_down(estimator.threshold).tolist(),
        nodes_modes=["LEAF" if v else "BRANCH_LEQ" for v in leaf],
        nodes_truenodeids=ids(np.where(leaf, 0, estimator.left - estimator.roots[tree])),
        nodes_falsenodeids=ids(np.where(leaf, 0, estimator.right - estimator.roots[tree])),
        nodes_hitrates=[1.0] * m, nodes_missing_value_tracks_true=[0] * m,
        target_treeids=ids(tree[target_nodes]), target_nodeids=ids(within[target_nodes]), target_ids=ids(target),
        target_weights=value.astype(np.float32).tolist(), **more,
    )]  # fmt: skip
    nodes += [h.make_node("Softmax", [scores], ["probabilities"], axis=1)] if scores == "scores" else []
    x = h.make_tensor_value_info("instances", float_, ["n", features])
    p = h.make_tensor_value_info("probabilities", float_, ["n", classes])
    opsets = [h.make_opsetid("", _OPSET), h.make_opsetid("ai.onnx.ml", 3)]
    model = h.make_model(h.make_graph(nodes, "headcount", [x], [p]), opset_imports=opsets, ir_version=9)
    onnx.checker.check_model(model)
    return model


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

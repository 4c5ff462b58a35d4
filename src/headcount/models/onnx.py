"""A fitted model as ONNX: prepared instances in, class probabilities out, checked before the file is put in its place.

    input   "instances"      (n, D) float32 (a table or a text after its encoding), or (n, H, W, channels) uint8
    output  "probabilities"  (n, C) float32

Networks go through torch's exporter; forests and linear models are written node by node; a frozen backbone (models/frozen_backbone.py) is
exported by itself and put in front. Classes, and how a table becomes numbers, travel as metadata ("headcount", JSON). Needs
``headcount[onnx]``.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError
from headcount.io import atomic_write
from headcount.models.fitted import FittedModel, SklearnModel
from headcount.models.frozen_backbone import FrozenBackbone
from headcount.models.network import Model, tta_features, tta_output
from headcount.models.trees import LinearModel, Trees

TOLERANCE = 1e-4
_OPSET = 18
_PROBE = 64


def export_onnx(model: FittedModel, path: Path) -> float:
    """Write the file if onnxruntime answers the same; the largest difference."""
    onnx, runtime = _import_onnx()
    if isinstance(model.estimator, Model):
        made = _network_graph(model.estimator)
    elif isinstance(model.estimator, SklearnModel):
        raise HeadcountError("only the networks, forests and logistic regressions of `headcount fit` can become ONNX")
    else:
        features = model.preprocessor.shape[0] if model.frozen_backbone is None else model.frozen_backbone.dim
        made = _classifier_graph(model.estimator, features, onnx)
    if model.frozen_backbone is not None:
        made = _prepend_backbone(model.frozen_backbone, made, onnx)
    about = {"classes": list(model.classes), "preparation": model.preprocessor.to_json()}
    onnx.helper.set_model_props(made, {"headcount": json.dumps(about)})
    data = made.SerializeToString()
    off = _max_difference(model, data, runtime)
    if not off <= TOLERANCE:
        raise HeadcountError(f"onnxruntime answers otherwise than the model, by {off:.2g}; nothing was written")
    atomic_write(path, lambda f: f.write(data))
    return off


def _import_onnx() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter speaks through it)
    except ImportError as e:
        raise HeadcountError(f"ONNX needs {e.name}: pip install 'headcount[onnx]'") from None
    return onnx, onnxruntime


# -- networks -----------------------------------------------------------------------------------------------------------------


class _SingleInstances(nn.Module):
    """Every instance a bag of its own, as ``say_alone`` asks."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, instances: Tensor) -> Tensor:
        n = instances.shape[0]
        ones = Segments(torch.arange(n, device=instances.device), n, size=1)
        return tta_output(self.model, tta_features(self.model, instances), ones).instance.softmax(1)


def _network_graph(model: Model) -> Any:
    if model.instance_depends_on_bag:
        raise HeadcountError(
            f"head {model.config.head} judges an instance by its bag; ONNX takes instances alone, so it cannot be exported"
        )
    what = f"head {model.config.head} on {model.config.backbone}"
    return _export_module(_SingleInstances(model), model.config.shape, "probabilities", what)


def _export_module(module: nn.Module, shape: tuple[int, ...], gives: str, what: str) -> Any:
    example = torch.zeros((3, *shape), dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    try:
        with warnings.catch_warnings(), _quiet_logger("torch.onnx"), torch.no_grad():
            warnings.simplefilter("ignore")
            program: Any = torch.onnx.export(
                module.eval(), (example,), dynamo=True, opset_version=_OPSET, verbose=False,
                input_names=["instances"], output_names=[gives],
                dynamic_shapes=({0: torch.export.Dim("n", min=1)},),
            )  # fmt: skip
    except Exception as e:  # the exporter has a dozen exceptions of its own
        why = " ".join(str(e).split())[:200]
        raise HeadcountError(f"torch cannot export {what}: {why}") from None
    return program.model_proto


# -- a frozen backbone in front -----------------------------------------------------------------------------------------------


class _HalfPrecisionFeatures(nn.Module):
    """Features as the body was trained on: rounded to half precision."""

    def __init__(self, eye: FrozenBackbone) -> None:
        super().__init__()
        self.frozen_backbone = eye

    def forward(self, instances: Tensor) -> Tensor:
        return self.frozen_backbone(instances).float()


def _prepend_backbone(frozen_backbone: FrozenBackbone, estimator_graph: Any, onnx: Any) -> Any:
    """The body's graph behind the eye's."""
    features_graph = _export_module(
        _HalfPrecisionFeatures(frozen_backbone),
        frozen_backbone.shape,
        "features",
        f"the frozen backbone {frozen_backbone.name}",
    )
    estimator_graph = onnx.compose.add_prefix(estimator_graph, "body/")  # both may have a node of the same name
    features_graph.ir_version = estimator_graph.ir_version = max(features_graph.ir_version, estimator_graph.ir_version)
    made = onnx.compose.merge_models(features_graph, estimator_graph, io_map=[("features", "body/instances")])
    gives = made.graph.output[0].name
    for node in made.graph.node:
        node.output[:] = ["probabilities" if name == gives else name for name in node.output]
    made.graph.output[0].name = "probabilities"
    return made


@contextmanager
def _quiet_logger(name: str) -> Iterator[None]:
    """The exporter tells of every library it could have used."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


# -- forests and lines --------------------------------------------------------------------------------------------------------


def _classifier_graph(body: Trees | LinearModel, features: int, onnx: Any) -> Any:
    h, float_ = onnx.helper, onnx.TensorProto.FLOAT
    x = h.make_tensor_value_info("instances", float_, ["n", features])
    classes = body.value.shape[1] if isinstance(body, Trees) else len(body.bias)
    p = h.make_tensor_value_info("probabilities", float_, ["n", classes])
    nodes, initializers = _tree_nodes(body, h) if isinstance(body, Trees) else _linear_nodes(body, onnx)
    graph = h.make_graph(nodes, "headcount", [x], [p], initializers)
    imports = [h.make_opsetid("", _OPSET), h.make_opsetid("ai.onnx.ml", 3)]
    made = h.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.checker.check_model(made)
    return made


def _linear_nodes(body: LinearModel, onnx: Any) -> tuple[list[Any], list[Any]]:
    h, keep = onnx.helper, onnx.numpy_helper.from_array
    nodes = [
        h.make_node("Gemm", ["instances", "weight", "bias"], ["logits"], transB=1),
        h.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    return nodes, [keep(body.weight.astype(np.float32), "weight"), keep(body.bias.astype(np.float32), "bias")]


def _tree_nodes(body: Trees, h: Any) -> tuple[list[Any], list[Any]]:
    """One TreeEnsembleRegressor with C outputs: the sum of the leaves, each divided by the number of trees."""
    m, (_, classes) = len(body.feature), body.value.shape
    tree = np.repeat(np.arange(len(body.roots)), np.diff(np.append(body.roots, m)))
    within = np.arange(m) - body.roots[tree]
    leaf = body.feature < 0
    leaves = np.flatnonzero(leaf)
    ids = lambda a: a.astype(int).tolist()  # noqa: E731
    node = h.make_node(
        "TreeEnsembleRegressor", ["instances"], ["probabilities"], domain="ai.onnx.ml",
        n_targets=classes, aggregate_function="SUM", post_transform="NONE",
        nodes_treeids=ids(tree), nodes_nodeids=ids(within),
        nodes_featureids=ids(np.maximum(body.feature, 0)), nodes_values=_round_down(body.threshold).tolist(),
        nodes_modes=["LEAF" if v else "BRANCH_LEQ" for v in leaf],
        nodes_truenodeids=ids(np.where(leaf, 0, body.left - body.roots[tree])),
        nodes_falsenodeids=ids(np.where(leaf, 0, body.right - body.roots[tree])),
        nodes_hitrates=[1.0] * m, nodes_missing_value_tracks_true=[0] * m,
        target_treeids=ids(np.repeat(tree[leaves], classes)), target_nodeids=ids(np.repeat(within[leaves], classes)),
        target_ids=ids(np.tile(np.arange(classes), len(leaves))),
        target_weights=(body.value[leaves].astype(np.float64) / len(body.roots)).ravel().astype(np.float32).tolist(),
    )  # fmt: skip
    return [node], []


def _round_down(threshold: np.ndarray) -> np.ndarray:
    """(M,) float32, the largest that is not above: x <= it, for a float32 x, just where x <= threshold."""
    near = threshold.astype(np.float32)
    return np.where(near.astype(np.float64) > threshold, np.nextafter(near, np.float32(-math.inf)), near)


# -- the check ----------------------------------------------------------------------------------------------------------------


def _max_difference(fitted: FittedModel, data: bytes, runtime: Any) -> float:
    """How far the two are apart on instances of every sort: usual, extreme, and one alone."""
    rng, shape = np.random.default_rng(0), fitted.preprocessor.shape
    if len(shape) == 3:
        x = rng.integers(0, 256, (_PROBE, *shape), dtype=np.uint8)
    else:
        x = (rng.normal(size=(_PROBE, *shape)) * np.repeat([0.3, 1, 3, 30], _PROBE // 4)[:, None]).astype(np.float32)
        if isinstance(fitted.estimator, Model):
            std = fitted.estimator.normalize.std.cpu().numpy()
            x = (x * std + fitted.estimator.normalize.mean.cpu().numpy()).astype(np.float32)
        elif isinstance(fitted.estimator, Trees) and (used := np.flatnonzero(fitted.estimator.feature >= 0)).size:
            at = rng.choice(used, _PROBE // 2)  # on the edge of a decision
            x[np.arange(len(at)), fitted.estimator.feature[at]] = _round_down(fitted.estimator.threshold[at])
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    off = 0.0
    for part in (x, x[:1]):
        given = torch.from_numpy(part)
        want = fitted.instance_probabilities(
            given if fitted.frozen_backbone is None else fitted.frozen_backbone(given)
        ).numpy()
        got = session.run(["probabilities"], {"instances": part})[0]
        off = max(off, float(np.abs(got - want).max()) if got.shape == want.shape else math.inf)
    return off

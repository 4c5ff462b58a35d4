"""A fitted model as ONNX: prepared instances in, class probabilities out, checked before the file is put in its place.

    input   "instances"      (n, D) float32 (a table or a text after its encoding), or (n, H, W, channels) uint8
    output  "probabilities"  (n, C) float32

Networks go through torch's exporter; forests and linear models are written node by node; a frozen backbone (models/eye.py) is
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
from headcount.files import write_whole
from headcount.models.eye import Eye
from headcount.models.fitted import Fitted, Held
from headcount.models.forest import Forest, Linear
from headcount.models.model import Model, answer, faces

CLOSE = 1e-4
_OPSET = 18
_PROBE = 64


def export(fitted: Fitted, path: Path) -> float:
    """Write the file if onnxruntime answers the same; the largest difference."""
    onnx, runtime = _libraries()
    if isinstance(fitted.body, Model):
        made = _network(fitted.body)
    elif isinstance(fitted.body, Held):
        raise HeadcountError("only the networks, forests and logistic regressions of `headcount fit` can become ONNX")
    else:
        features = fitted.learned.shape[0] if fitted.eye is None else fitted.eye.dim
        made = _classifier(fitted.body, features, onnx)
    if fitted.eye is not None:
        made = _behind(fitted.eye, made, onnx)
    about = {"classes": list(fitted.classes), "preparation": fitted.learned.to_json()}
    onnx.helper.set_model_props(made, {"headcount": json.dumps(about)})
    data = made.SerializeToString()
    off = _difference(fitted, data, runtime)
    if not off <= CLOSE:
        raise HeadcountError(f"onnxruntime answers otherwise than the model, by {off:.2g}; nothing was written")
    write_whole(path, lambda f: f.write(data))
    return off


def _libraries() -> tuple[Any, Any]:
    try:
        import onnx
        import onnxruntime
        import onnxscript  # noqa: F401  (torch's exporter speaks through it)
    except ImportError as e:
        raise HeadcountError(f"ONNX needs {e.name}: pip install 'headcount[onnx]'") from None
    return onnx, onnxruntime


# -- networks -----------------------------------------------------------------------------------------------------------------


class _Alone(nn.Module):
    """Every instance a bag of its own, as ``say_alone`` asks."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, instances: Tensor) -> Tensor:
        n = instances.shape[0]
        ones = Segments(torch.arange(n, device=instances.device), n, size=1)
        return answer(self.model, faces(self.model, instances), ones).instance.softmax(1)


def _network(model: Model) -> Any:
    if model.by_bag:
        raise HeadcountError(
            f"head {model.design.head} judges an instance by its bag; ONNX takes instances alone, so it cannot be exported"
        )
    what = f"head {model.design.head} on {model.design.backbone}"
    return _exported(_Alone(model), model.design.shape, "probabilities", what)


def _exported(module: nn.Module, shape: tuple[int, ...], gives: str, what: str) -> Any:
    example = torch.zeros((3, *shape), dtype=torch.uint8 if len(shape) == 3 else torch.float32)
    try:
        with warnings.catch_warnings(), _hushed("torch.onnx"), torch.no_grad():
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


class _Sees(nn.Module):
    """Features as the body was trained on: rounded to half precision."""

    def __init__(self, eye: Eye) -> None:
        super().__init__()
        self.eye = eye

    def forward(self, instances: Tensor) -> Tensor:
        return self.eye(instances).float()


def _behind(eye: Eye, body: Any, onnx: Any) -> Any:
    """The body's graph behind the eye's."""
    seen = _exported(_Sees(eye), eye.shape, "features", f"the frozen backbone {eye.name}")
    body = onnx.compose.add_prefix(body, "body/")  # both may have a node of the same name
    seen.ir_version = body.ir_version = max(seen.ir_version, body.ir_version)
    made = onnx.compose.merge_models(seen, body, io_map=[("features", "body/instances")])
    gives = made.graph.output[0].name
    for node in made.graph.node:
        node.output[:] = ["probabilities" if name == gives else name for name in node.output]
    made.graph.output[0].name = "probabilities"
    return made


@contextmanager
def _hushed(name: str) -> Iterator[None]:
    """The exporter tells of every library it could have used."""
    log = logging.getLogger(name)
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


# -- forests and lines --------------------------------------------------------------------------------------------------------


def _classifier(body: Forest | Linear, features: int, onnx: Any) -> Any:
    h, float_ = onnx.helper, onnx.TensorProto.FLOAT
    x = h.make_tensor_value_info("instances", float_, ["n", features])
    classes = body.value.shape[1] if isinstance(body, Forest) else len(body.bias)
    p = h.make_tensor_value_info("probabilities", float_, ["n", classes])
    nodes, held = _trees(body, h) if isinstance(body, Forest) else _line(body, onnx)
    graph = h.make_graph(nodes, "headcount", [x], [p], held)
    imports = [h.make_opsetid("", _OPSET), h.make_opsetid("ai.onnx.ml", 3)]
    made = h.make_model(graph, opset_imports=imports, ir_version=9)
    onnx.checker.check_model(made)
    return made


def _line(body: Linear, onnx: Any) -> tuple[list[Any], list[Any]]:
    h, keep = onnx.helper, onnx.numpy_helper.from_array
    nodes = [
        h.make_node("Gemm", ["instances", "weight", "bias"], ["logits"], transB=1),
        h.make_node("Softmax", ["logits"], ["probabilities"], axis=1),
    ]
    return nodes, [keep(body.weight.astype(np.float32), "weight"), keep(body.bias.astype(np.float32), "bias")]


def _trees(body: Forest, h: Any) -> tuple[list[Any], list[Any]]:
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
        nodes_featureids=ids(np.maximum(body.feature, 0)), nodes_values=_below(body.threshold).tolist(),
        nodes_modes=["LEAF" if v else "BRANCH_LEQ" for v in leaf],
        nodes_truenodeids=ids(np.where(leaf, 0, body.left - body.roots[tree])),
        nodes_falsenodeids=ids(np.where(leaf, 0, body.right - body.roots[tree])),
        nodes_hitrates=[1.0] * m, nodes_missing_value_tracks_true=[0] * m,
        target_treeids=ids(np.repeat(tree[leaves], classes)), target_nodeids=ids(np.repeat(within[leaves], classes)),
        target_ids=ids(np.tile(np.arange(classes), len(leaves))),
        target_weights=(body.value[leaves].astype(np.float64) / len(body.roots)).ravel().astype(np.float32).tolist(),
    )  # fmt: skip
    return [node], []


def _below(threshold: np.ndarray) -> np.ndarray:
    """(M,) float32, the largest that is not above: x <= it, for a float32 x, just where x <= threshold."""
    near = threshold.astype(np.float32)
    return np.where(near.astype(np.float64) > threshold, np.nextafter(near, np.float32(-math.inf)), near)


# -- the check ----------------------------------------------------------------------------------------------------------------


def _difference(fitted: Fitted, data: bytes, runtime: Any) -> float:
    """How far the two are apart on instances of every sort: usual, extreme, and one alone."""
    rng, shape = np.random.default_rng(0), fitted.learned.shape
    if len(shape) == 3:
        x = rng.integers(0, 256, (_PROBE, *shape), dtype=np.uint8)
    else:
        x = (rng.normal(size=(_PROBE, *shape)) * np.repeat([0.3, 1, 3, 30], _PROBE // 4)[:, None]).astype(np.float32)
        if isinstance(fitted.body, Model):
            std = fitted.body.prepare.std.cpu().numpy()
            x = (x * std + fitted.body.prepare.mean.cpu().numpy()).astype(np.float32)
        elif isinstance(fitted.body, Forest) and (used := np.flatnonzero(fitted.body.feature >= 0)).size:
            at = rng.choice(used, _PROBE // 2)  # on the edge of a decision
            x[np.arange(len(at)), fitted.body.feature[at]] = _below(fitted.body.threshold[at])
    options = runtime.SessionOptions()
    options.log_severity_level = 3
    session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    off = 0.0
    for part in (x, x[:1]):
        given = torch.from_numpy(part)
        want = fitted._part(given if fitted.eye is None else fitted.eye(given)).numpy()
        got = session.run(["probabilities"], {"instances": part})[0]
        off = max(off, float(np.abs(got - want).max()) if got.shape == want.shape else math.inf)
    return off

"""What a file says of a model, looked at before it is believed: the file may be anybody's."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from headcount.errors import HeadcountError

MAX_JSON = 1 << 27  # bytes
MAX_CLASSES = 1 << 16
_MAX_OPTION = 1 << 14
_MAX_LAYERS = 64

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def build_with_weights(factory: Callable[[], ModuleT], weights: Mapping[str, Tensor]) -> ModuleT:
    """A module with these weights. First without memory: nothing is made that the file does not fill to the last number."""
    with torch.device("meta"):
        wanted = {k: (tuple(v.shape), v.dtype) for k, v in factory().state_dict().items()}
    given = {k: (tuple(v.shape), v.dtype) for k, v in weights.items()}
    for name in sorted(wanted.keys() | given.keys()):
        if wanted.get(name) != given.get(name):
            raise HeadcountError(f"weights {name[:80]!r} are {given.get(name)}, the design needs {wanted.get(name)}")
    module = factory()
    module.load_state_dict(dict(weights))
    return module.eval()


def check_options(given: Any) -> tuple[tuple[str, Any], ...]:
    """Names with plain values of a sensible size: a design from a file must not ask for a network as large as the machine."""
    if not isinstance(given, dict) or len(given) > 64:
        raise HeadcountError("options are names with values")
    for name, value in given.items():
        values = value if isinstance(value, list) and len(value) <= 16 else [value]
        for v in values:
            plain = v is None or isinstance(v, (bool, int, float)) or (isinstance(v, str) and len(v) <= 64)
            most = _MAX_LAYERS if name in ("layers", "iterations", "heads", "networks") else _MAX_OPTION
            if not plain or (isinstance(v, (int, float)) and not isinstance(v, bool) and not abs(v) <= most):
                raise HeadcountError(f"option {name[:40]!r} is {str(value)[:40]!r}")
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in given.items())


def check_keys(data: Any, expected: set[str], what: str = "model.json") -> None:
    if not isinstance(data, dict) or set(data) != expected:
        odd = sorted(map(str, set(data) ^ expected))[:4] if isinstance(data, dict) else [type(data).__name__]
        raise HeadcountError(f"{what} lacks or adds {', '.join(o[:40] for o in odd)}")


def check_names(given: Any, what: str) -> tuple[str, ...]:
    good = isinstance(given, list) and 2 <= len(given) <= MAX_CLASSES and all(isinstance(v, str) for v in given)
    if not good or len(set(given)) < len(given):
        raise HeadcountError(f"{what} must be two or more different names")
    return tuple(given)


def check_number(given: Any, what: str, low: float, high: float) -> float:
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise HeadcountError(f"{what} must be a number, got {str(given)[:40]}")
    if not low <= given <= high:
        raise HeadcountError(f"{what} is {given}, not from {low:g} to {high:g}")
    return float(given)


def check_counted(given: Any, classes: int) -> tuple[bool, ...]:
    if not isinstance(given, list) or len(given) != classes or not all(isinstance(v, bool) for v in given):
        raise HeadcountError(f"counted is one true or false for each of {classes} classes")
    if sum(given) < 2:
        raise HeadcountError("at least two classes must count")
    return tuple(given)

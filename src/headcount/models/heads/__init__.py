"""HEADS: the table of methods. A new one is a file here and a line below."""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.additive import Additive
from headcount.models.heads.additive_trans import AdditiveTrans
from headcount.models.heads.attention import Attention
from headcount.models.heads.base import BagStats, Batch, Head, Output, Pass, SumHead, nll
from headcount.models.heads.count import Count
from headcount.models.heads.election import Election
from headcount.models.heads.feature import FeatureLSE, FeatureMax, FeatureMean, FeaturePNorm
from headcount.models.heads.mctformer import MCTformer
from headcount.models.heads.millet import Millet
from headcount.models.heads.noisy import NoisyLabel
from headcount.models.heads.output import OutputMean
from headcount.models.heads.supervised import Supervised
from headcount.models.heads.tilt import TiltHead
from headcount.models.heads.weno import Weno

HEADS: dict[str, type[Head]] = {
    "count": Count,
    "output_mean": OutputMean,
    "feature_mean": FeatureMean,
    "feature_max": FeatureMax,
    "feature_pnorm": FeaturePNorm,
    "feature_lse": FeatureLSE,
    "attention": Attention,
    "additive": Additive,
    "additive_trans": AdditiveTrans,
    "millet": Millet,
    "mctformer": MCTformer,
    "weno": Weno,
    "election": Election,
    "tilt": TiltHead,
    "noisy_label": NoisyLabel,
    "supervised": Supervised,
}


def find_head(name: str) -> type[Head]:
    """By name, or by ``path/to/file.py:Class`` for a head of one's own."""
    if not isinstance(name, str):  # a class has no name that a record, or a second process, could find it by
        raise HeadcountError(f"a head is named, got {name!r}; give one of {', '.join(HEADS)}, or path/to/file.py:Class")
    if ":" not in name:
        return HEADS[check_choice("head", name, HEADS)]
    path, _, own = name.rpartition(":")
    return _from_file(path, os.path.abspath(path), own, head_code(name))


def head_code(name: str) -> bytes:
    """What the file of a head of one's own says today; nothing for ours. It is read, and not run."""
    path, colon, _ = name.rpartition(":")
    if colon and not Path(path).is_file():
        raise HeadcountError(f"no file {path} for head {name}; give path/to/file.py:Class")
    return Path(path).read_bytes() if colon else b""


def head_options(name: str) -> dict[str, Any]:
    """The options a head takes, with their defaults."""
    parameters = inspect.signature(find_head(name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an option the head does not take."""
    known = head_options(name)
    for option in options:
        if not known:
            raise HeadcountError(f"head {name} takes no options, got {option!r}")
        check_choice(f"option of head {name}", option, known)


def build_head(name: str, dim: int, classes: int, options: Mapping[str, Any], counted: Tensor | None = None) -> Head:
    """A head for features of ``dim`` numbers.

    >>> build_head("count", 512, 10, {"t1": 1.0}).t1
    1.0
    """
    check_options(name, options)
    found = find_head(name)
    for option, kind in inspect.get_annotations(found.__init__).items():
        given = options.get(option, 0)
        if kind in ("int", "float") and (isinstance(given, bool) or not isinstance(given, int | float)):
            raise HeadcountError(f"option {option} of head {name} is a number, got {given!r}")
    try:
        return found(dim, classes, counted, **options)
    except (TypeError, ArithmeticError, RuntimeError) as e:  # a width below zero, a share for each of no heads
        raise HeadcountError(f"head {name} cannot be built with {dict(options)}: {e}") from None


@lru_cache
def _from_file(path: str, whole: str, name: str, code: bytes) -> type[Head]:
    """``whole`` (the path from the root) and ``code`` are there so that another file, or one written anew, is run anew."""
    spec = importlib.util.spec_from_file_location(f"headcount_head_{Path(path).stem}", path)
    if spec is None:
        raise HeadcountError(f"{path} is not a Python file; give path/to/file.py:Class")
    module = importlib.util.module_from_spec(spec)
    try:
        exec(compile(code, path, "exec"), module.__dict__)  # these bytes: Python's own cache goes by the second
    except Exception as e:
        raise HeadcountError(f"{path} does not run: {type(e).__name__}: {e}") from e
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, Head)):
        raise HeadcountError(f"{path} has no class {name!r} derived from headcount's Head")
    return found


__all__ = [
    "HEADS",
    "BagStats",
    "Batch",
    "Head",
    "Output",
    "Pass",
    "SumHead",
    "build_head",
    "check_options",
    "find_head",
    "head_code",
    "head_options",
    "nll",
]

"""The methods: heads that map the features of instances to predictions. A new one is a file here and a line in HEADS."""

import importlib
import inspect
import os
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.additive import Additive, AdditiveTrans, Millet
from headcount.models.heads.base import Batch, ChunkedHead, Head, Output, Pass, SumHead, Teacher, nll, why_not_chunkable
from headcount.models.heads.count import Count, Election
from headcount.models.heads.feature import Attention, FeatureLSE, FeatureMax, FeatureMean, FeaturePNorm
from headcount.models.heads.mctformer import MCTformer
from headcount.models.heads.output import NoisyLabel, OutputMean, Supervised
from headcount.models.heads.proportion import Proportion
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
    "proportion": Proportion,
    "tilt": TiltHead,
    "noisy_label": NoisyLabel,
    "supervised": Supervised,
}


TRUSTED_HEADS: dict[str, type[Head]] = {}  # custom heads that the user's own code gave to this process, by name


def trust_head(head: Any, trusted: bool = True) -> Any:
    """The name by which a custom head is found from now on: given as a class, or, if ``trusted``, as ``module:Class`` or
    ``path/to/file.py:Class``, which runs its code. Anything else stays as it is."""
    if isinstance(head, type) and issubclass(head, Head):
        name = next((name for name, known in HEADS.items() if known is head), f"{head.__module__}:{head.__qualname__}")
        if ":" in name:
            TRUSTED_HEADS[name] = head
        return name
    if trusted and isinstance(head, str) and ":" in head and head not in TRUSTED_HEADS:
        module, _, class_name = head.rpartition(":")
        try:
            in_file = module.endswith(".py")
            TRUSTED_HEADS[head] = find_head(head) if in_file else _head_in(importlib.import_module(module), module, class_name)
        except ImportError as e:
            raise HeadcountError(f"no head {head} ({e}); give module:Class or path/to/file.py:Class") from None
    return head


def find_head(name: str) -> type[Head]:
    """The class of a head, by its name in HEADS or, for a custom head, by ``path/to/file.py:Class`` or that of trust_head."""
    if not isinstance(name, str):  # neither a record nor a second process could find a class
        raise HeadcountError(f"a head is given by name, got {name!r}; give one of {', '.join(HEADS)}, or path/to/file.py:Class")
    if ":" not in name:
        return HEADS[check_choice("head", name, HEADS)]
    if name in TRUSTED_HEADS:
        return TRUSTED_HEADS[name]
    path, _, class_name = name.rpartition(":")
    return _load_class(path, os.path.abspath(path), class_name, head_code(name))


def head_code(name: str) -> bytes:
    """The source file of a custom head (of a class, its source), read but not run; empty for those in HEADS."""
    if name in TRUSTED_HEADS:
        with suppress(OSError, TypeError):  # a class that was typed into a console has no source
            return inspect.getsource(TRUSTED_HEADS[name]).encode()
        return b""
    path, colon, _ = name.rpartition(":")
    if colon and not Path(path).is_file():
        raise HeadcountError(f"no file {path} for head {name}; give path/to/file.py:Class")
    return Path(path).read_bytes() if colon else b""


def head_options(name: str) -> dict[str, Any]:
    """The options of a head with their defaults."""
    parameters = inspect.signature(find_head(name).__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an option that the head does not have."""
    known = head_options(name)
    for option in options:
        if not known:
            raise HeadcountError(f"head {name} takes no options, got {option!r}")
        check_choice(f"option of head {name}", option, known)


def build_head(name: str, dim: int, classes: int, options: Mapping[str, Any], counted: Tensor | None = None) -> Head:
    """A head with fresh weights.

    Parameters
    ----------
    name : str
        A name in HEADS, or ``path/to/file.py:Class``.
    dim, classes : int
        The number of features of an instance, and of classes.
    options : mapping
        Options of the head; see :func:`head_options`.
    counted : Tensor, optional
        (C,) booleans: classes that are False cannot be the majority.

    Examples
    --------
    >>> build_head("count", 512, 10, {"t1": 1.0}).t1
    1.0
    """
    check_options(name, options)
    head = find_head(name)
    for option, annotation in inspect.get_annotations(head.__init__).items():
        value = options.get(option, 0)
        if annotation in (int, float, "int", "float") and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise HeadcountError(f"option {option} of head {name} is a number, got {value!r}")
    try:
        return head(dim, classes, counted, **options)
    except (TypeError, ArithmeticError, RuntimeError) as e:  # a negative width, or one not divisible by the heads
        raise HeadcountError(f"head {name} cannot be built with {dict(options)}: {e}") from None


@lru_cache
def _load_class(path: str, absolute_path: str, class_name: str, code: bytes) -> type[Head]:
    """``absolute_path`` and ``code`` are part of the cache's key, so that another file, or a changed one, is run again."""
    module = ModuleType(f"headcount_head_{Path(path).stem}")
    module.__file__ = absolute_path
    try:
        exec(compile(code, path, "exec"), module.__dict__)  # these bytes: Python's bytecode cache has a resolution of 1 s
    except Exception as e:
        raise HeadcountError(f"{path} does not run: {type(e).__name__}: {e}") from e
    return _head_in(module, path, class_name)


def _head_in(module: ModuleType, origin: str, class_name: str) -> type[Head]:
    head = getattr(module, class_name, None)
    if not (isinstance(head, type) and issubclass(head, Head)):
        raise HeadcountError(f"{origin} has no class {class_name!r} derived from headcount's Head")
    return head


__all__ = [
    "HEADS", "TRUSTED_HEADS", "Batch", "ChunkedHead", "Head", "Output", "Pass", "SumHead", "Teacher",
    "build_head", "check_options", "find_head", "head_code", "head_options", "nll", "trust_head", "why_not_chunkable",
]  # fmt: skip

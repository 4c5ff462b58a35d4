"""Arrays: .npz and .npy files, lists of arrays, numpy and torch, with one bag number per instance or one array per bag.

a list or a dict of arrays   one (n, D) or (n, H, W, channels) uint8 array per bag; a dict's keys name the bags
an array (B, S, D)           B bags of S instances; uint8 (B, S, H, W, channels) for pictures
.npz or a dict with these    features or images (N, ...), and bag (N,) or sizes (B,) or offsets (B+1,); optionally
                             labels, names, group (B,), votes (B, C), classes, weight, truth, known (N,), coords (N, 2)

What is said once per bag is said in the order of the bags: of their numbers where ``bag`` holds 0 to B-1, of ``names`` where
these are the ids in ``bag``, else of the ids, which must then appear sorted: who is the first is never guessed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.bags.pool import array_of
from headcount.data.columns import Columns
from headcount.data.read.found import Asked, Found, Said, some
from headcount.data.read.labels import beside, is_numpy
from headcount.data.read.places import PER_BAG, grouped
from headcount.data.read.rows import heavy
from headcount.data.read.targets import classes_among
from headcount.data.values import plain, texts
from headcount.errors import HeadcountError

INSTANCES = ("features", "images", "instances", "X")
_PER_ROW = ("bag", "weight", "truth", "known", "coords")
KEYS = {*INSTANCES, *_PER_ROW, *PER_BAG, "sizes", "offsets", "classes"}


def read_file(path: Path, asked: Asked) -> Found:
    """.npy is mapped and .npz read, neither with pickle."""
    is_numpy(path)
    try:
        if path.suffix.lower() == ".npy":
            return read_array(np.load(path, mmap_mode="r", allow_pickle=False), asked, str(path))
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
            held = {name: z[name] for name in z.files if name in KEYS}
            other = [name for name in z.files if name not in KEYS]
    except HeadcountError:
        raise
    except Exception as e:  # zip, zlib and header errors of many kinds
        raise HeadcountError(f"cannot read {path}: {e or type(e).__name__}") from None
    return read_keys(held, asked, str(path), other)


def read_array(array: Any, asked: Asked, where: str = "the array") -> Found:
    """(B, S, ...): bags of one size."""
    a = _numpy(array, where)
    if a.ndim not in (3, 5) or (a.ndim == 5) != (a.dtype == np.uint8):
        want = "bags of features (B, S, D), or of pictures uint8 (B, S, H, W, channels)"
        raise HeadcountError(f"{where} holds {a.dtype} of shape {a.shape}; one array alone is {want}")
    if 0 in a.shape:
        raise HeadcountError(f"{where} of shape {a.shape} holds nothing")
    names = [str(b) for b in range(len(a))]
    bag = np.repeat(np.arange(len(a)), a.shape[1])
    return _found(a.reshape(-1, *a.shape[2:]), bag, names, {}, asked, where)


def read_list(arrays: Sequence[Any] | Mapping[Any, Any], asked: Asked) -> Found:
    """One array per bag."""
    where = "the list of bags"
    keys = list(arrays) if isinstance(arrays, Mapping) else range(len(arrays))
    names = [plain(k) or "" for k in keys]
    held = []
    for k, name in zip(keys, names, strict=True):
        a = _numpy(arrays[k], f"bag {name!r}")
        first = held[0] if held else a
        if a.ndim not in (2, 4) or a.ndim != first.ndim or a.shape[1:] != first.shape[1:] or not len(a):
            raise HeadcountError(
                f"bag {name!r} has shape {a.shape}; give (n, D), or pictures (n, H, W, channels), all alike"
            )
        held.append(a)
    if not held:
        raise HeadcountError("the list of bags is empty; give one array per bag")
    kinds = {a.dtype for a in held}
    if len(kinds) > 1 and np.dtype(np.uint8) in kinds and held[0].ndim == 4:
        raise HeadcountError(f"{where} mixes {', '.join(map(str, kinds))}; pictures are uint8")
    bag = np.repeat(np.arange(len(held)), [len(a) for a in held])
    return _found(np.concatenate(held), bag, names, {}, asked, where)


def keyed(given: Mapping[Any, Any]) -> bool:
    """Whether a dict holds a flat array and who is in which bag, under the names an .npz has, and no bags nor columns."""
    there = [k for k in INSTANCES if k in given]
    flat = any(getattr(given[k], "ndim", 1) >= 2 for k in there) and any(
        k in given for k in ("bag", "sizes", "offsets")
    )
    return bool(there) and (flat or set(given) <= KEYS)


def read_dict(given: Mapping[Any, Any], asked: Asked) -> Found:
    """As an .npz is read: what has another name is left aside, and said."""
    held = {k: v for k, v in given.items() if k in KEYS}
    return read_keys(held, asked, other=[str(k) for k in given if k not in KEYS])


def read_keys(given: Mapping[str, Any], asked: Asked, where: str = "the dict", other: Sequence[str] = ()) -> Found:
    """A flat array of instances and who is in which bag; ``other``: arrays beside them that nobody asks for."""
    there = [k for k in INSTANCES if k in given]
    if len(there) != 1:
        every = some([*other, *given], 24)  # the misnamed one among them
        raise HeadcountError(f"{where} has {every}; it needs one of {', '.join(INSTANCES)}")
    held = {k: _numpy(v, f"{k} of {where}", words=k not in INSTANCES) for k, v in given.items()}
    x = held[there[0]]
    if x.ndim not in (2, 3, 4) or not len(x):
        raise HeadcountError(
            f"{there[0]} of {where} is {x.dtype} of shape {x.shape}; give (N, D) or (N, H, W, channels)"
        )
    for k in _PER_ROW:
        if k in held and (held[k].ndim != 1 + (k == "coords") or len(held[k]) != len(x)):
            raise HeadcountError(
                f"{k} of {where} has shape {held[k].shape} for {len(x)} instances; give one per instance"
            )
    for k in ("labels", "names", "group", "classes"):
        if k in held and held[k].ndim != 1 and not (k == "labels" and held[k].ndim == 2):
            raise HeadcountError(f"{k} of {where} has shape {held[k].shape}; give a list")
    bag, names = grouped(held, len(x), where, asked)
    for k in PER_BAG:
        if k in held and (held[k].ndim == 0 or len(held[k]) != len(names)):
            shape, nobody = held[k].shape, _empty(names, held[k])
            raise HeadcountError(f"{k} of {where} has shape {shape} for {len(names)} bags{nobody}; give one per bag")
    found = _found(x, bag, names, held, asked, where)
    found.notes += [f"left aside in {where}: {some(other)}"] if other else []
    return found


def _empty(names: list[str], spoken_of: np.ndarray) -> str:
    """Which numbered bags are spoken of and have no instance, if that is what went wrong."""
    there, numbers = set(names), [str(b) for b in range(len(np.atleast_1d(spoken_of)))]
    missing = [b for b in numbers if b not in there]
    return f" (no instance is in bag {some(missing)})" if there < set(numbers) else ""


def _found(
    x: np.ndarray, bag: np.ndarray, names: list[str], held: Mapping[str, np.ndarray], asked: Asked, where: str
) -> Found:
    x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    pictures = x.ndim == 4
    if (pictures and (x.dtype != np.uint8 or x.shape[-1] not in (1, 3))) or x.ndim not in (2, 4) or 0 in x.shape:
        raise HeadcountError(
            f"{where} holds {x.dtype} of shape {x.shape}; pictures are uint8 (N, H, W, 1 or 3), features (N, D)"
        )
    wrong = np.zeros(len(x), bool) if pictures else _not_finite(x, bag, names, where, asked)
    kind = "images" if pictures else "features"
    shape = "x".join(map(str, x.shape[1:]))
    named = [plain(v) or "" for v in held["classes"].tolist()] if "classes" in held else None
    asked = replace(asked, classes=asked.classes or (tuple(named) if named else None))
    start = np.concatenate([[0], np.cumsum(np.bincount(bag[bag >= 0], minlength=len(names)))])
    order = np.argsort(bag, kind="stable")
    within = np.empty(len(bag), np.int64)
    within[order] = np.arange(len(bag)) - (bag < 0).sum() - start[bag[order]]
    codes = pa.array(bag, mask=bag < 0)
    found = Found(
        kind=kind, how=f"read {where}: {len(x):,} {kind} of {shape}", where=where, columns=Columns(kind, shape=x.shape[1:]),
        content=x, bag=bag, names=names, said=_labels(held, asked, names, where),
        ids=pa.table({"bag": pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string())), "instance": within}),
        digest=_digest(x), classes=asked.classes,
    )  # fmt: skip
    if "weight" in held:
        found.weight = (
            held["weight"].astype(np.float64) if held["weight"].dtype.kind in "iufb" else np.full(len(x), np.nan)
        )
        wrong = wrong | heavy(found.weight, "weight", where, asked)
        found.weight = np.where(wrong, 1, found.weight)
    for what in ("truth", "known"):
        if what in held:
            code, values, notes = classes_among(*_classes_of(held[what], asked, what, where), what, "instances", asked)
            setattr(found, what, (code, values))
            found.notes += notes
    if "coords" in held:
        found.coords = _coords(held["coords"], len(x), where)
    if "group" in held:
        found.group = tuple(plain(v) or f"only {names[b]}" for b, v in enumerate(held["group"].tolist()))
    found.bag, found.checked = np.where(wrong, -1, bag), not wrong.any()
    return found


def _labels(held: Mapping[str, np.ndarray], asked: Asked, names: list[str], where: str) -> Said:
    given = asked.labels if asked.labels is not None else held.get("votes", held.get("labels"))
    if given is None and asked.miss_labels("truth" in held):
        raise HeadcountError(f"{where} has no labels; give labels=, one per bag")
    return Said(code=np.full(len(names), -1)) if given is None else beside(asked, names, "bag", given)


def _classes_of(a: np.ndarray, asked: Asked, what: str, where: str) -> tuple[np.ndarray, list[str]]:
    """Names, or class numbers with -1 where unknown."""
    if a.ndim != 1:
        raise HeadcountError(f"{what} of {where} has shape {a.shape}; give one class per instance")
    code, values = texts(pa.chunked_array([pa.array(a)]))
    if a.dtype.kind in "iu":
        classes = asked.classes or ()
        numbered = not set(values) - {"-1"} <= set(classes)
        inside = [v for v in values if v.isdigit() and int(v) < len(classes)]
        if numbered and classes and len(inside) < len([v for v in values if v != "-1"]):
            raise HeadcountError(f"{what} of {where} has classes {some(values, 8)}; there are {len(classes)}")
        values = [classes[int(v)] if numbered and v in inside else v for v in values]
        code = np.where(np.array([v == "-1" and v not in classes for v in [*values, ""]])[code], -1, code)
    return code, values


def _coords(a: np.ndarray, n: int, where: str) -> np.ndarray:
    if a.shape != (n, 2) or a.dtype.kind not in "iuf" or not np.isfinite(a).all():
        raise HeadcountError(
            f"coords of {where} are {a.dtype} of shape {a.shape}; give two finite numbers per instance"
        )
    return a.astype(np.float64)


def _not_finite(x: np.ndarray, bag: np.ndarray, names: list[str], where: str, asked: Asked) -> np.ndarray:
    if x.dtype.kind != "f":
        return np.zeros(len(x), bool)
    most = np.finfo(np.float32).max  # beyond it, a double becomes infinite in the pool
    with np.errstate(invalid="ignore"):
        wrong = np.concatenate([~(np.abs(x[i : i + 65536]) <= most).all(1) for i in range(0, len(x), 65536)])
    return asked.bad.rows(
        wrong, lambda r: f"{where} row {r + 1} (bag {names[bag[r]]!r}) has a number that is not finite"
    )


def _numpy(given: Any, what: str, words: bool = False) -> np.ndarray:
    try:
        a = np.asarray(array_of(given) if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"{what} is not an array: {e}") from None
    if a.dtype == object and words:
        a = np.array([plain(v) or "" for v in a.ravel().tolist()]).reshape(a.shape) if a.size else a.astype(str)
    if a.dtype.kind not in ("biuf" + "US" * words) or (a.dtype.itemsize > 8 and a.dtype.kind == "f"):
        raise HeadcountError(f"{what} holds {a.dtype}; give numbers")
    return a.astype(a.dtype.newbyteorder("="), copy=False)


def _digest(x: np.ndarray) -> str:
    digest = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    for start in range(0, len(x), 4096):
        digest.update(np.ascontiguousarray(x[start : start + 4096]).tobytes())
    return digest.hexdigest()

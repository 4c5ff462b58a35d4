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

from headcount.bags.pool import to_numpy
from headcount.errors import HeadcountError
from headcount.readers.columns import FeatureSchema
from headcount.readers.grouping import PER_BAG_KEYS, group_instances
from headcount.readers.labels import check_numpy_magic, join_labels
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, preview
from headcount.readers.rows import check_weights
from headcount.readers.targets import drop_missing_classes
from headcount.readers.values import clean_name, factorize

INSTANCE_KEYS = ("features", "images", "instances", "X")
_PER_INSTANCE_KEYS = ("bag", "weight", "truth", "known", "coords")
ARRAY_KEYS = {*INSTANCE_KEYS, *_PER_INSTANCE_KEYS, *PER_BAG_KEYS, "sizes", "offsets", "classes"}


def read_array_file(path: Path, options: ReadOptions) -> RawData:
    """.npy is mapped and .npz read, neither with pickle."""
    check_numpy_magic(path)
    try:
        if path.suffix.lower() == ".npy":
            return read_array(np.load(path, mmap_mode="r", allow_pickle=False), options, str(path))
        with open(path, "rb") as f, np.load(f, allow_pickle=False) as z:
            arrays = {name: z[name] for name in z.files if name in ARRAY_KEYS}
            other = [name for name in z.files if name not in ARRAY_KEYS]
    except HeadcountError:
        raise
    except Exception as e:  # zip, zlib and header errors of many kinds
        raise HeadcountError(f"cannot read {path}: {e or type(e).__name__}") from None
    return read_named_arrays(arrays, options, str(path), other)


def read_array(array: Any, options: ReadOptions, origin: str = "the array") -> RawData:
    """(B, S, ...): bags of one size."""
    a = _to_numpy(array, origin)
    if a.ndim not in (3, 5) or (a.ndim == 5) != (a.dtype == np.uint8):
        want = "bags of features (B, S, D), or of pictures uint8 (B, S, H, W, channels)"
        raise HeadcountError(f"{origin} holds {a.dtype} of shape {a.shape}; one array alone is {want}")
    if 0 in a.shape:
        raise HeadcountError(f"{origin} of shape {a.shape} holds nothing")
    names = [str(b) for b in range(len(a))]
    bag = np.repeat(np.arange(len(a)), a.shape[1])
    return _build_raw_data(a.reshape(-1, *a.shape[2:]), bag, names, {}, options, origin)


def read_list(arrays: Sequence[Any] | Mapping[Any, Any], options: ReadOptions) -> RawData:
    """One array per bag."""
    origin = "the list of bags"
    keys = list(arrays) if isinstance(arrays, Mapping) else range(len(arrays))
    names = [clean_name(k) or "" for k in keys]
    held = []
    for k, name in zip(keys, names, strict=True):
        a = _to_numpy(arrays[k], f"bag {name!r}")
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
        raise HeadcountError(f"{origin} mixes {', '.join(map(str, kinds))}; pictures are uint8")
    bag = np.repeat(np.arange(len(held)), [len(a) for a in held])
    return _build_raw_data(np.concatenate(held), bag, names, {}, options, origin)


def is_array_dict(given: Mapping[Any, Any]) -> bool:
    """Whether a dict holds a flat array and who is in which bag, under the names an .npz has, and no bags nor columns."""
    there = [k for k in INSTANCE_KEYS if k in given]
    flat = any(getattr(given[k], "ndim", 1) >= 2 for k in there) and any(
        k in given for k in ("bag", "sizes", "offsets")
    )
    return bool(there) and (flat or set(given) <= ARRAY_KEYS)


def read_dict(given: Mapping[Any, Any], options: ReadOptions) -> RawData:
    """As an .npz is read: what has another name is left aside, and said."""
    arrays = {k: v for k, v in given.items() if k in ARRAY_KEYS}
    return read_named_arrays(arrays, options, other=[str(k) for k in given if k not in ARRAY_KEYS])


def read_named_arrays(
    given: Mapping[str, Any], options: ReadOptions, origin: str = "the dict", other: Sequence[str] = ()
) -> RawData:
    """A flat array of instances and who is in which bag; ``other``: arrays beside them that nobody asks for."""
    there = [k for k in INSTANCE_KEYS if k in given]
    if len(there) != 1:
        every = preview([*other, *given], 24)  # the misnamed one among them
        raise HeadcountError(f"{origin} has {every}; it needs one of {', '.join(INSTANCE_KEYS)}")
    arrays = {k: _to_numpy(v, f"{k} of {origin}", words=k not in INSTANCE_KEYS) for k, v in given.items()}
    x = arrays[there[0]]
    if x.ndim not in (2, 3, 4) or not len(x):
        raise HeadcountError(
            f"{there[0]} of {origin} is {x.dtype} of shape {x.shape}; give (N, D) or (N, H, W, channels)"
        )
    for k in _PER_INSTANCE_KEYS:
        if k in arrays and (arrays[k].ndim != 1 + (k == "coords") or len(arrays[k]) != len(x)):
            raise HeadcountError(
                f"{k} of {origin} has shape {arrays[k].shape} for {len(x)} instances; give one per instance"
            )
    for k in ("labels", "names", "group", "classes"):
        if k in arrays and arrays[k].ndim != 1 and not (k == "labels" and arrays[k].ndim == 2):
            raise HeadcountError(f"{k} of {origin} has shape {arrays[k].shape}; give a list")
    bag, names = group_instances(arrays, len(x), origin, options)
    for k in PER_BAG_KEYS:
        if k in arrays and (arrays[k].ndim == 0 or len(arrays[k]) != len(names)):
            shape, nobody = arrays[k].shape, _note_empty_bags(names, arrays[k])
            raise HeadcountError(f"{k} of {origin} has shape {shape} for {len(names)} bags{nobody}; give one per bag")
    raw = _build_raw_data(x, bag, names, arrays, options, origin)
    raw.notes += [f"left aside in {origin}: {preview(other)}"] if other else []
    return raw


def _note_empty_bags(names: list[str], per_bag: np.ndarray) -> str:
    """Which numbered bags are spoken of and have no instance, if that is what went wrong."""
    there, numbers = set(names), [str(b) for b in range(len(np.atleast_1d(per_bag)))]
    missing = [b for b in numbers if b not in there]
    return f" (no instance is in bag {preview(missing)})" if there < set(numbers) else ""


def _build_raw_data(
    x: np.ndarray,
    bag: np.ndarray,
    names: list[str],
    arrays: Mapping[str, np.ndarray],
    options: ReadOptions,
    origin: str,
) -> RawData:
    x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    pictures = x.ndim == 4
    if (pictures and (x.dtype != np.uint8 or x.shape[-1] not in (1, 3))) or x.ndim not in (2, 4) or 0 in x.shape:
        raise HeadcountError(
            f"{origin} holds {x.dtype} of shape {x.shape}; pictures are uint8 (N, H, W, 1 or 3), features (N, D)"
        )
    wrong = np.zeros(len(x), bool) if pictures else _find_not_finite(x, bag, names, origin, options)
    kind = "images" if pictures else "features"
    shape = "x".join(map(str, x.shape[1:]))
    class_names = [clean_name(v) or "" for v in arrays["classes"].tolist()] if "classes" in arrays else None
    options = replace(options, classes=options.classes or (tuple(class_names) if class_names else None))
    start = np.concatenate([[0], np.cumsum(np.bincount(bag[bag >= 0], minlength=len(names)))])
    order = np.argsort(bag, kind="stable")
    within = np.empty(len(bag), np.int64)
    within[order] = np.arange(len(bag)) - (bag < 0).sum() - start[bag[order]]
    codes = pa.array(bag, mask=bag < 0)
    raw = RawData(
        kind=kind, summary=f"read {origin}: {len(x):,} {kind} of {shape}", origin=origin, schema=FeatureSchema(kind, shape=x.shape[1:]),
        content=x, bag=bag, names=names, labels=_labels(arrays, options, names, origin),
        ids=pa.table({"bag": pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string())), "instance": within}),
        digest=_digest(x), classes=options.classes,
    )  # fmt: skip
    if "weight" in arrays:
        raw.weight = (
            arrays["weight"].astype(np.float64) if arrays["weight"].dtype.kind in "iufb" else np.full(len(x), np.nan)
        )
        wrong = wrong | check_weights(raw.weight, "weight", origin, options)
        raw.weight = np.where(wrong, 1, raw.weight)
    for what in ("truth", "known"):
        if what in arrays:
            code, values, notes = drop_missing_classes(
                *_parse_classes(arrays[what], options, what, origin), what, "instances", options
            )
            setattr(raw, what, (code, values))
            raw.notes += notes
    if "coords" in arrays:
        raw.coords = _check_coords(arrays["coords"], len(x), origin)
    if "group" in arrays:
        raw.group = tuple(clean_name(v) or f"only {names[b]}" for b, v in enumerate(arrays["group"].tolist()))
    raw.bag, raw.all_finite = np.where(wrong, -1, bag), not wrong.any()
    return raw


def _labels(arrays: Mapping[str, np.ndarray], options: ReadOptions, names: list[str], origin: str) -> BagLabels:
    given = options.labels if options.labels is not None else arrays.get("votes", arrays.get("labels"))
    if given is None and options.requires_labels("truth" in arrays):
        raise HeadcountError(f"{origin} has no labels; give labels=, one per bag")
    return BagLabels(codes=np.full(len(names), -1)) if given is None else join_labels(options, names, "bag", given)


def _parse_classes(a: np.ndarray, options: ReadOptions, what: str, origin: str) -> tuple[np.ndarray, list[str]]:
    """Names, or class numbers with -1 where unknown."""
    if a.ndim != 1:
        raise HeadcountError(f"{what} of {origin} has shape {a.shape}; give one class per instance")
    code, values = factorize(pa.chunked_array([pa.array(a)]))
    if a.dtype.kind in "iu":
        classes = options.classes or ()
        numbered = not set(values) - {"-1"} <= set(classes)
        inside = [v for v in values if v.isdigit() and int(v) < len(classes)]
        if numbered and classes and len(inside) < len([v for v in values if v != "-1"]):
            raise HeadcountError(f"{what} of {origin} has classes {preview(values, 8)}; there are {len(classes)}")
        values = [classes[int(v)] if numbered and v in inside else v for v in values]
        code = np.where(np.array([v == "-1" and v not in classes for v in [*values, ""]])[code], -1, code)
    return code, values


def _check_coords(a: np.ndarray, n: int, origin: str) -> np.ndarray:
    if a.shape != (n, 2) or a.dtype.kind not in "iuf" or not np.isfinite(a).all():
        raise HeadcountError(
            f"coords of {origin} are {a.dtype} of shape {a.shape}; give two finite numbers per instance"
        )
    return a.astype(np.float64)


def _find_not_finite(x: np.ndarray, bag: np.ndarray, names: list[str], origin: str, options: ReadOptions) -> np.ndarray:
    if x.dtype.kind != "f":
        return np.zeros(len(x), bool)
    most = np.finfo(np.float32).max  # beyond it, a double becomes infinite in the pool
    with np.errstate(invalid="ignore"):
        wrong = np.concatenate([~(np.abs(x[i : i + 65536]) <= most).all(1) for i in range(0, len(x), 65536)])
    return options.errors.report_rows(
        wrong, lambda r: f"{origin} row {r + 1} (bag {names[bag[r]]!r}) has a number that is not finite"
    )


def _to_numpy(given: Any, what: str, words: bool = False) -> np.ndarray:
    try:
        a = np.asarray(to_numpy(given) if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"{what} is not an array: {e}") from None
    if a.dtype == object and words:
        a = np.array([clean_name(v) or "" for v in a.ravel().tolist()]).reshape(a.shape) if a.size else a.astype(str)
    if a.dtype.kind not in ("biuf" + "US" * words) or (a.dtype.itemsize > 8 and a.dtype.kind == "f"):
        raise HeadcountError(f"{what} holds {a.dtype}; give numbers")
    return a.astype(a.dtype.newbyteorder("="), copy=False)


def _digest(x: np.ndarray) -> str:
    digest = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    for start in range(0, len(x), 4096):
        digest.update(np.ascontiguousarray(x[start : start + 4096]).tobytes())
    return digest.hexdigest()

"""Arrays: .npz and .npy files, lists of arrays, numpy and torch, with one bag number per instance or one array per bag.

a list or a dict of arrays   one (n, D) or (n, H, W, channels) uint8 array per bag; the keys of a dict name the bags
an array (B, S, D)           B bags of S instances; uint8 (B, S, H, W, channels) for images
.npz or a dict with these    features or images (N, ...), and bag (N,) or sizes (B,) or offsets (B+1,); optionally
                             labels, names, group (B,), votes (B, C), classes, weight, truth, known (N,), coords (N, 2)

Values per bag are in the order of the bags: by number where ``bag`` holds 0 to B-1, in the order of ``names`` where these are
the values of ``bag``, else sorted by value, and the values must then appear sorted, so that the order is never a guess.
"""

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
from headcount.loading import load_npy, open_npz
from headcount.readers.columns import Codes, abbreviate, clean_name, drop_values, factorize, preview
from headcount.readers.dataset import NO_BAGS, RawData, ReadOptions
from headcount.readers.labels import are_positional, drop_missing_classes, join_labels
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.rows import check_weights

Arrays = Mapping[str, np.ndarray]
_INSTANCE_KEYS = ("features", "images", "instances", "X")
_PER_BAG_KEYS = ("labels", "votes", "names", "group")
_PER_INSTANCE_KEYS = ("bag", "weight", "truth", "known", "coords")
_ARRAY_KEYS = {*_INSTANCE_KEYS, *_PER_INSTANCE_KEYS, *_PER_BAG_KEYS, "sizes", "offsets", "classes"}


def read_array_file(path: Path, options: ReadOptions) -> RawData:
    if path.suffix.lower() == ".npy":
        return read_array(load_npy(path, mapped=True), options, str(path))
    with open_npz(path, "an .npz file written by numpy.savez") as npz:
        arrays = {name: npz[name] for name in npz.files if name in _ARRAY_KEYS}
        other = [name for name in npz.files if name not in _ARRAY_KEYS]
    return read_named_arrays(arrays, options, str(path), other)


def read_array(array: Any, options: ReadOptions, origin: str = "the array") -> RawData:
    """(B, S, ...): bags of one size."""
    a = as_array(array, origin)
    if options.bags_optional and (a.ndim in (2, 4) or (a.ndim == 3 and a.dtype == np.uint8)):
        return read_named_arrays({"X": a}, options, origin)
    if a.ndim not in (3, 5) or (a.ndim == 3 and a.dtype == np.uint8) or 0 in a.shape:
        want = "bags of features (B, S, D), or of images uint8 (B, S, H, W, channels)"
        advice = "" if a.ndim == 3 else "; give the bag of each row with bags="
        raise HeadcountError(f"{origin} holds {a.dtype} of shape {a.shape}; one array alone is {want}{advice}")
    flat = {"X": a.reshape(-1, *a.shape[2:]), "sizes": np.full(len(a), a.shape[1])}
    return read_named_arrays(flat, options, origin)


def read_list(bags: Sequence[Any] | Mapping[Any, Any], options: ReadOptions) -> RawData:
    """One array per bag."""
    keys = list(bags) if isinstance(bags, Mapping) else range(len(bags))
    names, arrays = [clean_name(k) or "" for k in keys], list[np.ndarray]()
    for key, name in zip(keys, names, strict=True):
        a = as_array(bags[key], f"bag {name!r}")
        first = arrays[0] if arrays else a
        if a.ndim not in (2, 4) or a.shape[1:] != first.shape[1:] or not len(a):
            raise HeadcountError(f"bag {name!r} has shape {a.shape}; give (n, D), or images (n, H, W, channels), all alike")
        arrays.append(a)
    if not arrays:
        raise HeadcountError("the list of bags is empty; give one array per bag")
    flat = {"X": np.concatenate(arrays), "sizes": np.array(list(map(len, arrays))), "names": np.array(names)}
    return read_named_arrays(flat, options, "the list of bags")


def is_array_dict(data: Mapping[Any, Any]) -> bool:
    """Whether a dict has the keys of an .npz, rather than being one array per bag, or the columns of a table."""
    instances = [data[k] for k in _INSTANCE_KEYS if k in data]
    is_flat = any(getattr(a, "ndim", 1) >= 2 for a in instances) and not {"bag", "sizes", "offsets"}.isdisjoint(data)
    return bool(instances) and (is_flat or set(data) <= _ARRAY_KEYS)


def read_named_arrays(
    data: Mapping[Any, Any], options: ReadOptions, origin: str = "the dict", other: Sequence[str] = ()
) -> RawData:
    """A flat array of instances and their bags; ``other`` are the keys that are ignored."""
    other = [*other, *(str(k) for k in data if k not in _ARRAY_KEYS)]
    data = {k: v for k, v in data.items() if k in _ARRAY_KEYS}
    present = [k for k in _INSTANCE_KEYS if k in data]
    if len(present) != 1:
        has = preview([*other, *data], 24)  # a misspelt key among them
        raise HeadcountError(f"{origin} has {has}; it needs one of {', '.join(_INSTANCE_KEYS)}")
    arrays = {k: as_array(v, f"{k} of {origin}", texts=k not in _INSTANCE_KEYS) for k, v in data.items()}
    x = arrays[present[0]]
    if x.ndim not in (2, 3, 4) or not len(x):
        raise HeadcountError(f"{present[0]} of {origin} is {x.dtype} of shape {x.shape}; give (N, D) or (N, H, W, channels)")
    for k, a in arrays.items():
        problem = f"{k} of {origin} has shape {a.shape}"
        if k in _PER_INSTANCE_KEYS and (a.ndim != 1 + (k == "coords") or len(a) != len(x)):
            raise HeadcountError(f"{problem} for {len(x)} instances; give one per instance")
        if k in ("labels", "names", "group", "classes") and a.ndim != 1 and not (k == "labels" and a.ndim == 2):
            raise HeadcountError(f"{problem}; give a list")
    bag, names = group_instances(arrays, len(x), origin, options)
    for k in _PER_BAG_KEYS:
        is_per_row = k == "labels" and k in arrays and arrays[k].shape == (len(x),)
        if k in arrays and not is_per_row and (arrays[k].ndim == 0 or len(arrays[k]) != len(names)):
            numbers = [str(b) for b in range(len(np.atleast_1d(arrays[k])))]
            empty = [b for b in numbers if b not in names] if set(names) < set(numbers) else []
            why = f" (no instance is in bag {preview(empty)})" if empty else ""
            raise HeadcountError(f"{k} of {origin} has shape {arrays[k].shape} for {len(names)} bags{why}; give one per bag")
    x = x[..., None] if x.dtype == np.uint8 and x.ndim == 3 else x
    kind = "images" if x.ndim == 4 else "features"
    x = _as_images(x, options.notes) if kind == "images" else x
    if (kind == "images" and (x.dtype != np.uint8 or x.shape[-1] not in (1, 3))) or x.ndim not in (2, 4) or 0 in x.shape:
        problem = f"{origin} holds {x.dtype} of shape {x.shape}"
        raise HeadcountError(f"{problem}; images are uint8 (N, H, W, 1 or 3), features (N, D)")
    excluded = np.zeros(len(x), bool)
    if x.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            most, step = np.finfo(np.float32).max, 1 << 16
            excluded = np.concatenate([~(np.abs(x[i : i + step]) <= most).all(1) for i in range(0, len(x), step)])
        message = lambda r: f"{origin} row {r + 1} (bag {names[bag[r]]!r}) has a number that is not finite"  # noqa: E731
        options.errors.report_rows(excluded, message)
    if options.classes is None and "classes" in arrays:
        options = replace(options, classes=tuple(clean_name(v) or "" for v in arrays["classes"].tolist()) or None)
    labels = options.labels if options.labels is not None else arrays.get("votes", arrays.get("labels"))
    if labels is None and options.requires_labels("truth" in arrays):
        raise HeadcountError(f"{origin} has no labels; give labels=, one per bag")
    raw = RawData(
        summary=f"read {origin}: {len(x):,} {kind} of {'x'.join(map(str, x.shape[1:]))}", origin=origin,
        schema=Preprocessor(kind, shape=x.shape[1:]), content=x, bag=bag, names=names,
        labels=join_labels(labels, options, names, bag_column="bag", bag=bag), ids=_ids(bag, names), digest=_digest(x), classes=options.classes,
    )  # fmt: skip
    options.notes.extend([f"ignored in {origin}: {preview(other)}"] if other else [])
    if "weight" in arrays:
        weight = arrays["weight"].astype(np.float64) if arrays["weight"].dtype.kind in "iufb" else np.full(len(x), np.nan)
        excluded |= check_weights(weight, "weight", origin, options.errors)
        raw.weight = np.where(excluded, 1, weight)
    for key in [k for k in ("truth", "known") if k in arrays]:
        setattr(raw, key, _classes(arrays[key], key, origin, options))
    if "coords" in arrays:
        a = arrays["coords"]
        if a.shape != (len(x), 2) or a.dtype.kind not in "iuf" or not np.isfinite(a).all():
            raise HeadcountError(f"coords of {origin} are {a.dtype} of shape {a.shape}; give two finite numbers per instance")
        raw.coords = a.astype(np.float64)
    if "group" in arrays:
        raw.group = tuple(clean_name(v) or f"only {names[b]}" for b, v in enumerate(arrays["group"].tolist()))
    options.notes.extend([] if {"bag", "sizes", "offsets"} & set(arrays) else [NO_BAGS])
    raw.bag, raw.all_finite = np.where(excluded, -1, bag), not excluded.any()
    return raw


def _as_images(x: np.ndarray, notes: list[str]) -> np.ndarray:
    """Images (N, H, W, channels) of bytes from such images or (N, channels, H, W), of bytes or from 0 to 1."""
    if x.shape[1] in (1, 3) and x.shape[-1] not in (1, 3):
        x = np.moveaxis(x, 1, -1)
        notes.append(f"images with {x.shape[-1]} channels first, as in PyTorch: moved last")
    if x.dtype != np.uint8 and x.size:
        least, most = float(x.min()), float(x.max())  # NaN fails both comparisons
        if x.dtype.kind == "f" and least >= 0 and most <= 1:
            x = np.round(x * 255).astype(np.uint8)
            notes.append("images with numbers from 0 to 1: kept as bytes, 0 to 255")
        elif least >= 0 and most <= 255 and (x == (whole := x.astype(np.uint8))).all():
            x = whole
    return x


def _ids(bag: np.ndarray, names: list[str]) -> pa.Table:
    """The bag of each instance and its number in the bag."""
    order = np.argsort(bag, kind="stable")
    number = np.empty(len(bag), np.int64)
    number[order] = np.arange(len(bag)) - np.searchsorted(ordered := bag[order], ordered)
    codes = pa.array(bag, mask=bag < 0)
    return pa.table({"bag": pa.DictionaryArray.from_arrays(codes, pa.array(names, pa.string())), "instance": number})


def _classes(a: np.ndarray, key: str, origin: str, options: ReadOptions) -> Codes:
    """Codes and names of classes given by name, or by number with -1 where unknown."""
    codes, values = factorize(pa.chunked_array([pa.array(a)]))
    if a.dtype.kind in "iu":
        classes = options.classes or ()
        codes, values = drop_values(codes, values, {"-1"} - {*classes})
        if not set(values) <= {*classes} and classes:  # numbers of classes rather than their names
            if not all(v.isdigit() and int(v) < len(classes) for v in values):
                raise HeadcountError(f"{key} of {origin} has classes {preview(values, 8)}; there are {len(classes)}")
            values = [classes[int(v)] for v in values]
    return drop_missing_classes(codes, values, key, "instances", options)


def as_array(data: Any, what: str, texts: bool = False) -> np.ndarray:
    """An array of numbers, or where ``texts`` are allowed also of texts, in native byte order."""
    try:
        data = data.toarray() if hasattr(data, "toarray") else data  # sparse
        a = np.asarray(to_numpy(data) if isinstance(data, torch.Tensor) else data)
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"{what} is not an array: {e}") from None
    if a.dtype == object and texts:
        a = np.array([clean_name(v) or "" for v in a.ravel().tolist()]).reshape(a.shape) if a.size else a.astype(str)
    if a.dtype.kind not in ("biufUS" if texts else "biuf") or (a.dtype.itemsize > 8 and a.dtype.kind == "f"):
        raise HeadcountError(f"{what} holds {a.dtype}; give numbers")
    return a.astype(a.dtype.newbyteorder("="), copy=False)


def _digest(x: np.ndarray) -> str:
    digest = hashlib.sha256(f"{x.dtype}{x.shape}".encode())
    for start in range(0, len(x), 4096):
        digest.update(np.ascontiguousarray(x[start : start + 4096]).tobytes())
    return digest.hexdigest()


def group_instances(arrays: Arrays, n: int, origin: str, options: ReadOptions) -> Codes:
    """(n,) bag of each instance (-1: none), and the names of the bags in the order of their labels."""
    keys = [k for k in ("bag", "sizes", "offsets") if k in arrays]
    if not keys and options.bags_optional:
        return np.arange(n), _bag_names(arrays, n, origin) or list(map(str, range(n)))
    if len(keys) != 1:
        has = ", ".join(keys) or "none"
        raise HeadcountError(f"{origin} must define the bags by one of bag, sizes or offsets; it has {has}")
    key, a = keys[0], arrays[keys[0]]
    if key == "bag":
        bag, ids = factorize(pa.chunked_array([pa.array(a)]))
        options.errors.report_rows(bag < 0, lambda r: f"{origin} row {r + 1} is in no bag")
        if not ids:
            raise HeadcountError(f"{origin}: no instance is in a bag")
        return _order_bags(bag, ids, arrays, origin, options)
    if a.ndim != 1 or a.dtype.kind not in "iu" or len(a) == 0:
        raise HeadcountError(f"{key} of {origin} must be whole numbers, got {a.dtype} of shape {a.shape}")
    sizes = a.astype(np.int64) if key == "sizes" else np.diff(a.astype(np.int64))
    start = 0 if key == "sizes" else int(a[0])
    if start != 0 or len(sizes) == 0 or (sizes < 0).any() or (sizes > n).any() or int(sizes.sum()) != n:
        raise HeadcountError(f"{key} of {origin} do not add up: {abbreviate(a[:8].tolist())} for {n} instances")
    names = _bag_names(arrays, len(sizes), origin) or list(map(str, range(len(sizes))))
    advice = "take it out, its label too, or leave it out with skip_bad="
    for b in np.flatnonzero(sizes == 0).tolist():
        name = f" ({names[b]!r})" if "names" in arrays else ""
        options.errors.report(f"{key} of {origin}: bag {b + 1} of {len(sizes)}{name} is empty; {advice}")
    return np.repeat(np.arange(len(sizes)), sizes), names


def _bag_names(arrays: Arrays, n_bags: int, origin: str) -> list[str]:
    """The names of the bags, if given; an empty one is replaced by its number."""
    names = [clean_name(v) or str(b) for b, v in enumerate(arrays["names"].tolist())] if "names" in arrays else []
    if names and len(names) != n_bags:
        raise HeadcountError(f"names of {origin} are {len(names)} for {n_bags} bags; give one per bag")
    return names


def _order_bags(bag: np.ndarray, ids: list[str], arrays: Arrays, origin: str, options: ReadOptions) -> Codes:
    """(N,) bags and their names, in the order of the values per bag; ``ids`` are in order of appearance."""
    names, numbers = _bag_names(arrays, len(ids), origin), list(map(str, range(len(ids))))
    if set(names) == set(ids):
        order = names
    elif set(ids) == set(numbers):
        order, names = numbers, names or numbers
    else:
        order = ids
        keys = ("names", "group") if options.labels is not None else _PER_BAG_KEYS
        ordered = [k for k in keys if k in arrays and arrays[k].shape[:1] == (len(ids),)]  # labels may be those of rows
        ordered += ["labels"] if options.labels is not None and are_positional(options.labels, ids, len(bag)) else []
        try:
            in_order = ids == sorted(ids, key=float)
        except ValueError:
            in_order = ids == sorted(ids)
        if ordered and (not in_order or set(names) & set(ids)):
            question = f"which of the bags {preview(ids)} (in order of appearance) is the first in {ordered[0]}?"
            advice = f"Number them 0 to {len(ids) - 1}, sort the instances by bag"
            listed = f"let names list the values of bag in the order of {ordered[0]}"
            raise HeadcountError(f"{origin}: {question} {advice}, or {listed}")
        names = names or ids
    position = {name: b for b, name in enumerate(order)}
    return np.array([*(position[name] for name in ids), -1])[bag], names

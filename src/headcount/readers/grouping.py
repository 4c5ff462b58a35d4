"""Which instances of an array are in which bag, and which bag the first label belongs to: refused where it would be a guess."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.labels import are_positional
from headcount.readers.raw_data import ReadOptions
from headcount.readers.values import abbreviate, clean_name, factorize, preview

PER_BAG_KEYS = ("labels", "votes", "names", "group")


def group_instances(
    arrays: Mapping[str, np.ndarray], n: int, origin: str, options: ReadOptions
) -> tuple[np.ndarray, list[str]]:
    """(n,) bag of each instance (-1: none), and the names of the bags in the order of their labels."""
    keys = [k for k in ("bag", "sizes", "offsets") if k in arrays]
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
    names = _bag_names(arrays, len(sizes), origin) or [str(b) for b in range(len(sizes))]
    for b in np.flatnonzero(sizes == 0).tolist():
        name = f" ({names[b]!r})" if "names" in arrays else ""
        options.errors.report(
            f"{key} of {origin}: bag {b + 1} of {len(sizes)}{name} is empty; "
            "take it out, its label too, or leave it out with skip_bad="
        )
    return np.repeat(np.arange(len(sizes)), sizes), names


def _bag_names(arrays: Mapping[str, np.ndarray], n_bags: int, origin: str) -> list[str]:
    """The names of the bags, if there are any; an empty one is replaced by its number."""
    names = [clean_name(v) or str(b) for b, v in enumerate(arrays["names"].tolist())] if "names" in arrays else []
    if names and len(names) != n_bags:
        raise HeadcountError(f"names of {origin} are {len(names)} for {n_bags} bags; give one per bag")
    return names


def _order_bags(
    bag: np.ndarray, ids: list[str], arrays: Mapping[str, np.ndarray], origin: str, options: ReadOptions
) -> tuple[np.ndarray, list[str]]:
    """(N,) bags and their names, in the order of the values per bag; ``ids`` are in order of appearance."""
    names, numbers = _bag_names(arrays, len(ids), origin), [str(b) for b in range(len(ids))]
    if set(names) == set(ids):
        order = names
    elif set(ids) == set(numbers):
        order, names = numbers, names or numbers
    else:
        order = ids
        ordered = [k for k in PER_BAG_KEYS if k in arrays and (k in ("names", "group") or options.labels is None)]
        ordered += ["labels"] if options.labels is not None and are_positional(options.labels, ids) else []
        if ordered and (ids != _sort_ids(ids) or set(names) & set(ids)):
            raise HeadcountError(
                f"{origin}: which of the bags {preview(ids)} (in order of appearance) is the first in {ordered[0]}? "
                f"Number them 0 to {len(ids) - 1}, sort the instances by bag, or let names list the values of bag in the "
                f"order of {ordered[0]}"
            )
        names = names or ids
    position = {name: b for b, name in enumerate(order)}
    return np.array([*(position[name] for name in ids), -1])[bag], names


def _sort_ids(ids: list[str]) -> list[str]:
    """By number if all of them are numbers."""
    try:
        return sorted(ids, key=float)
    except ValueError:
        return sorted(ids)

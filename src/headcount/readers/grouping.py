"""Arrays: who is in which bag, and whose the first label is. Where that could be guessed only, it is refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.labels import are_positional
from headcount.readers.raw_data import ReadOptions, abbreviate, preview
from headcount.readers.values import clean_name, factorize

PER_BAG_KEYS = ("labels", "votes", "names", "group")


def group_instances(
    arrays: Mapping[str, np.ndarray], n: int, origin: str, options: ReadOptions
) -> tuple[np.ndarray, list[str]]:
    """(N,) bag of each of n instances (-1: in none), and the bags' names in the order of what is said of them."""
    ways = [k for k in ("bag", "sizes", "offsets") if k in arrays]
    if len(ways) != 1:
        raise HeadcountError(
            f"{origin} must say the bags by one of bag, sizes or offsets; it has {', '.join(ways) or 'none'}"
        )
    a = arrays[ways[0]]
    if ways[0] == "bag":
        if a.ndim != 1:
            raise HeadcountError(f"bag of {origin} has shape {a.shape}; give one name or number per instance")
        bag, names = factorize(pa.chunked_array([pa.array(a)]))
        options.errors.report_rows(bag < 0, lambda r: f"{origin} row {r + 1} is in no bag")
        if not names:
            raise HeadcountError(f"{origin}: no instance is in a bag")
        return _order_bags(bag, names, arrays, origin, options)
    if a.ndim != 1 or a.dtype.kind not in "iu" or len(a) == 0:
        raise HeadcountError(f"{ways[0]} of {origin} must be whole numbers, got {a.dtype} of shape {a.shape}")
    sizes = a.astype(np.int64) if ways[0] == "sizes" else np.diff(a.astype(np.int64))
    start = 0 if ways[0] == "sizes" else int(a[0])
    if start != 0 or len(sizes) == 0 or (sizes < 0).any() or (sizes > n).any() or int(sizes.sum()) != n:
        raise HeadcountError(f"{ways[0]} of {origin} do not add up: {abbreviate(a[:8].tolist())} for {n} instances")
    names = _bag_names(arrays, len(sizes), origin) or [str(b) for b in range(len(sizes))]
    for b in np.flatnonzero(sizes == 0).tolist():
        called = f" ({names[b]!r})" if "names" in arrays else ""
        options.errors.report(
            f"{ways[0]} of {origin}: bag {b + 1} of {len(sizes)}{called} is empty; "
            "take it out, its label too, or leave it out with skip_bad="
        )
    return np.repeat(np.arange(len(sizes)), sizes), names


def _bag_names(arrays: Mapping[str, np.ndarray], bags: int, origin: str) -> list[str]:
    """The bags' names, if there are any; one that says nothing is its number."""
    names = [clean_name(v) or str(b) for b, v in enumerate(arrays["names"].tolist())] if "names" in arrays else []
    if names and len(names) != bags:
        raise HeadcountError(f"names of {origin} are {len(names)} for {bags} bags; give one per bag")
    return names


def _order_bags(
    bag: np.ndarray, ids: list[str], arrays: Mapping[str, np.ndarray], origin: str, options: ReadOptions
) -> tuple[np.ndarray, list[str]]:
    """(N,) bags and their names in the order in which labels and the like speak of them; ``ids`` are in order of appearance."""
    names, numbers = _bag_names(arrays, len(ids), origin), [str(b) for b in range(len(ids))]
    if set(names) == set(ids):
        order = names
    elif set(ids) == set(numbers):
        order, names = numbers, names or numbers
    else:
        order = ids
        ambiguous = [k for k in PER_BAG_KEYS if k in arrays and (k in ("names", "group") or options.labels is None)]
        ambiguous += ["labels"] if options.labels is not None and are_positional(options.labels, ids) else []
        if ambiguous and (ids != _sort_ids(ids) or set(names) & set(ids)):
            shown = f"the bags {preview(ids)} (in order of appearance)"
            raise HeadcountError(
                f"{origin}: which of {shown} is the first in {ambiguous[0]}? Number them 0 to {len(ids) - 1}, sort the instances by "
                f"bag, or let names list the values of bag in the order of {ambiguous[0]}"
            )
        names = names or ids
    place = {name: b for b, name in enumerate(order)}
    return np.array([*(place[name] for name in ids), -1])[bag], names


def _sort_ids(ids: list[str]) -> list[str]:
    """As numbers if all of them are."""
    try:
        return sorted(ids, key=float)
    except ValueError:
        return sorted(ids)

"""Arrays: who is in which bag, and whose the first label is. Where that could be guessed only, it is refused."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from headcount.data.read.found import Asked, short, some
from headcount.data.read.labels import in_order
from headcount.data.values import plain, texts
from headcount.errors import HeadcountError

PER_BAG = ("labels", "votes", "names", "group")


def grouped(held: Mapping[str, np.ndarray], n: int, where: str, asked: Asked) -> tuple[np.ndarray, list[str]]:
    """(N,) bag of each of n instances (-1: in none), and the bags' names in the order of what is said of them."""
    ways = [k for k in ("bag", "sizes", "offsets") if k in held]
    if len(ways) != 1:
        raise HeadcountError(
            f"{where} must say the bags by one of bag, sizes or offsets; it has {', '.join(ways) or 'none'}"
        )
    a = held[ways[0]]
    if ways[0] == "bag":
        if a.ndim != 1:
            raise HeadcountError(f"bag of {where} has shape {a.shape}; give one name or number per instance")
        bag, names = texts(pa.chunked_array([pa.array(a)]))
        asked.bad.rows(bag < 0, lambda r: f"{where} row {r + 1} is in no bag")
        if not names:
            raise HeadcountError(f"{where}: no instance is in a bag")
        return _ordered(bag, names, held, where, asked)
    if a.ndim != 1 or a.dtype.kind not in "iu" or len(a) == 0:
        raise HeadcountError(f"{ways[0]} of {where} must be whole numbers, got {a.dtype} of shape {a.shape}")
    sizes = a.astype(np.int64) if ways[0] == "sizes" else np.diff(a.astype(np.int64))
    start = 0 if ways[0] == "sizes" else int(a[0])
    if start != 0 or len(sizes) == 0 or (sizes < 0).any() or (sizes > n).any() or int(sizes.sum()) != n:
        raise HeadcountError(f"{ways[0]} of {where} do not add up: {short(a[:8].tolist())} for {n} instances")
    names = _given(held, len(sizes), where) or [str(b) for b in range(len(sizes))]
    for b in np.flatnonzero(sizes == 0).tolist():
        called = f" ({names[b]!r})" if "names" in held else ""
        asked.bad.say(
            f"{ways[0]} of {where}: bag {b + 1} of {len(sizes)}{called} is empty; "
            "take it out, its label too, or leave it out with skip_bad="
        )
    return np.repeat(np.arange(len(sizes)), sizes), names


def _given(held: Mapping[str, np.ndarray], bags: int, where: str) -> list[str]:
    """The bags' names, if there are any; one that says nothing is its number."""
    names = [plain(v) or str(b) for b, v in enumerate(held["names"].tolist())] if "names" in held else []
    if names and len(names) != bags:
        raise HeadcountError(f"names of {where} are {len(names)} for {bags} bags; give one per bag")
    return names


def _ordered(
    bag: np.ndarray, ids: list[str], held: Mapping[str, np.ndarray], where: str, asked: Asked
) -> tuple[np.ndarray, list[str]]:
    """(N,) bags and their names in the order in which labels and the like speak of them; ``ids`` are in order of appearance."""
    names, numbers = _given(held, len(ids), where), [str(b) for b in range(len(ids))]
    if set(names) == set(ids):
        order = names
    elif set(ids) == set(numbers):
        order, names = numbers, names or numbers
    else:
        order = ids
        said = [k for k in PER_BAG if k in held and (k in ("names", "group") or asked.labels is None)]
        said += ["labels"] if asked.labels is not None and in_order(asked.labels, ids) else []
        if said and (ids != _sorted(ids) or set(names) & set(ids)):
            shown = f"the bags {some(ids)} (in order of appearance)"
            raise HeadcountError(
                f"{where}: which of {shown} is the first in {said[0]}? Number them 0 to {len(ids) - 1}, sort the instances by "
                f"bag, or let names list the values of bag in the order of {said[0]}"
            )
        names = names or ids
    place = {name: b for b, name in enumerate(order)}
    return np.array([*(place[name] for name in ids), -1])[bag], names


def _sorted(ids: list[str]) -> list[str]:
    """As numbers if all of them are."""
    try:
        return sorted(ids, key=float)
    except ValueError:
        return sorted(ids)

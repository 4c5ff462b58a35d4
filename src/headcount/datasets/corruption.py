"""Corruption of bags as it occurs in practice. Training and validation bags are corrupted; test bags stay as they are.

wrong    the fraction of bags that get another class's label, chosen at random
unequal  how many times rarer the last class's label is than the first's: bags are dropped, by a constant ratio from class to class
never    the number of a class that is never the majority: bags with its label are dropped
merge    this many training bags with the same label become one, and a remainder is dropped; the label stays true, since the
         largest class of each is the largest of all

The recipe's field and the errors call it ``trouble``.

>>> check_corruption({"wrong": 0.2})
>>> check_corruption({"wrogn": 0.2})
Traceback (most recent call last):
headcount.errors.HeadcountError: no trouble 'wrogn'; there are wrong, unequal, never, merge (did you mean 'wrong'?)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.errors import HeadcountError, check_choice

_RANGES = {"wrong": (0, 1), "unequal": (1, 1e6), "never": (0, 1 << 20), "merge": (1, 1 << 20)}


def check_corruption(corruption: Mapping[str, Any]) -> None:
    """Raise for an unknown name or a value out of range."""
    for name, value in corruption.items():
        check_choice("trouble", name, _RANGES)
        low, high = _RANGES[name]
        integer = name in ("never", "merge")
        types = int if integer else (int, float)
        if not isinstance(value, types) or isinstance(value, bool) or not low <= value <= high:
            kind = "the number of a class" if name == "never" else f"a {'whole ' * integer}number from {low} to {high:g}"
            raise HeadcountError(f"trouble {name} is {kind}, got {value!r}")


def corrupt(bags: Mapping[str, Bags], corruption: Mapping[str, Any], seed: int) -> dict[str, Bags]:
    """The corrupted bags; the same for the same seed."""
    check_corruption(corruption)
    corrupted = dict(bags)
    for i, split in enumerate(("train", "valid")):
        rng = np.random.default_rng([seed, i, 7])
        kept = _drop_bags(bags[split], corruption, rng)
        corrupted[split] = _change_labels(kept, float(corruption.get("wrong", 0)), rng)
    rng = np.random.default_rng([seed, 2, 7])
    corrupted["train"] = _merge_bags(corrupted["train"], int(corruption.get("merge", 1)), rng)
    return corrupted


def _drop_bags(bags: Bags, corruption: Mapping[str, Any], rng: np.random.Generator) -> Bags:
    label, classes = bags.label.cpu().numpy(), len(bags.classes)
    keep = np.ones(len(bags), bool)
    if "never" in corruption:
        if corruption["never"] >= classes:
            raise HeadcountError(f"trouble never is a class from 0 to {classes - 1}, got {corruption['never']}")
        keep &= label != corruption["never"]
    ratio = float(corruption.get("unequal", 1))
    for c in range(classes):
        members = np.flatnonzero(label == c)
        n_dropped = len(members) - round(len(members) * ratio ** (-c / (classes - 1)))
        keep[rng.permutation(members)[:n_dropped]] = False
    if not keep.any():
        raise HeadcountError("after this trouble no bag is left")
    return bags if keep.all() else bags.take(np.flatnonzero(keep))


def _change_labels(bags: Bags, fraction: float, rng: np.random.Generator) -> Bags:
    if not fraction:
        return bags
    classes = len(bags.classes)
    changed = rng.permutation(len(bags))[: round(fraction * len(bags))]
    target = bags.target.clone()
    for b, shift in zip(changed.tolist(), rng.integers(1, classes, len(changed)).tolist(), strict=True):
        target[b] = torch.roll(target[b], shift)
    return replace(bags, target=target)


def _merge_bags(bags: Bags, count: int, rng: np.random.Generator) -> Bags:
    if count == 1:
        return bags
    label = bags.label.cpu().numpy()
    groups = []
    for c in np.unique(label):
        members = rng.permutation(np.flatnonzero(label == c))
        groups.append(members[: len(members) // count * count])
    order = np.concatenate(groups)
    if not len(order):
        raise HeadcountError(f"no label has {count} training bags to merge")
    ordered = bags.take(order)
    offsets, target = ordered.offsets[::count], ordered.target[::count]
    return replace(ordered, offsets=offsets, target=target, group=None, names=None)

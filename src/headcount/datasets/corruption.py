"""Trouble: what real bags suffer and the protocol's do not. Training and validation bags get it; test bags stay as they are.

wrong    the share of bags that carry another class's label, drawn by lot
unequal  how many times rarer the last class's label is than the first's: bags are left out, class by class at one ratio
never    the number of a class that is never the majority: bags with its label are left out
merge    so many training bags of one label become one; what is left over stays out. No trouble for truth: the largest class
         of each is the largest of all

>>> check({"wrong": 0.2})
>>> check({"wrogn": 0.2})
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
    """Refuse what cannot be meant."""
    for name, value in corruption.items():
        check_choice("trouble", name, _RANGES)
        low, high = _RANGES[name]
        whole = name in ("never", "merge")
        good = (
            isinstance(value, int if whole else (int, float)) and not isinstance(value, bool) and low <= value <= high
        )
        if not good:
            kind = "the number of a class" if name == "never" else f"a {'whole ' * whole}number from {low} to {high:g}"
            raise HeadcountError(f"trouble {name} is {kind}, got {value!r}")


def corrupt(bags: Mapping[str, Bags], corruption: Mapping[str, Any], seed: int) -> dict[str, Bags]:
    """The same bags in trouble; the same lots for the same seed."""
    check_corruption(corruption)
    made = dict(bags)
    for i, split in enumerate(("train", "valid")):
        rng = np.random.default_rng([seed, i, 7])
        held = _left(bags[split], corruption, rng)
        made[split] = _mislabelled(held, float(corruption.get("wrong", 0)), rng)
    made["train"] = _merged(made["train"], int(corruption.get("merge", 1)), np.random.default_rng([seed, 2, 7]))
    return made


def _left(bags: Bags, trouble: Mapping[str, Any], rng: np.random.Generator) -> Bags:
    label, classes = bags.label.cpu().numpy(), len(bags.classes)
    keep = np.ones(len(bags), bool)
    if "never" in trouble:
        if trouble["never"] >= classes:
            raise HeadcountError(f"trouble never is a class from 0 to {classes - 1}, got {trouble['never']}")
        keep &= label != trouble["never"]
    for c in range(classes):
        own = np.flatnonzero(label == c)
        gone = len(own) - round(len(own) * float(trouble.get("unequal", 1)) ** (-c / (classes - 1)))
        keep[rng.permutation(own)[:gone]] = False
    if not keep.any():
        raise HeadcountError("after this trouble no bag is left")
    return bags if keep.all() else bags.take(np.flatnonzero(keep))


def _mislabelled(bags: Bags, share: float, rng: np.random.Generator) -> Bags:
    if not share:
        return bags
    classes = len(bags.classes)
    which = rng.permutation(len(bags))[: round(share * len(bags))]
    target = bags.target.clone()
    for b, step in zip(which.tolist(), rng.integers(1, classes, len(which)).tolist(), strict=True):
        target[b] = torch.roll(target[b], step)
    return replace(bags, target=target)


def _merged(bags: Bags, many: int, rng: np.random.Generator) -> Bags:
    if many == 1:
        return bags
    label = bags.label.cpu().numpy()
    whole = []
    for c in np.unique(label):
        own = rng.permutation(np.flatnonzero(label == c))
        whole.append(own[: len(own) // many * many])
    order = np.concatenate(whole)
    if not len(order):
        raise HeadcountError(f"no label has {many} training bags to merge")
    held = bags.take(order)
    return replace(held, offsets=held.offsets[::many], target=held.target[::many], group=None, names=None)

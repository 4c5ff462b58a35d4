"""Metrics: pure functions of what is true and what was said, in that order.

``*_accuracy`` and ``*_rate``: high is good. Instances lie flat with their bag's number beside them:

    true, said   (N,) or (B,) class numbers
    bag          (N,) the bag of each instance
    label        (B,) the bags' labels
    removed      (N,) true where MPEM took the instance out of the count

A rate over nothing is NaN; a tie for the most votes goes to the lowest class.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def instance_accuracy(true: Array, said: Array) -> float:
    """The share of instances said right; instances of unknown truth (-1) are left out.

    >>> instance_accuracy(np.array([0, 1, 2, -1]), np.array([0, 1, 1, 0]))
    0.6666666666666666
    """
    known = true >= 0
    return _mean(true[known] == said[known])


def bag_accuracy(label: Array, said: Array) -> float:
    """The share of bags said right."""
    return instance_accuracy(label, said)


def right_bags(target: Array, said: Array) -> Array:
    """(B,) whether the class said has most of the bag's target (B, C); of a tie, each winner is right.

    >>> right_bags(np.array([[0.5, 0.5, 0], [0.6, 0.4, 0]]), np.array([1, 1])).tolist()
    [True, False]
    """
    return np.take_along_axis(target, said[:, None], 1)[:, 0] >= target.max(1) - 1e-6


def votes(said: Array, bag: Array, bags: int, classes: int, kept: Array | None = None) -> Array:
    """(B, C) how many instances of each bag were said to be of each class; the unknown (-1) do not vote."""
    kept = said >= 0 if kept is None else kept & (said >= 0)
    said, bag = said[kept], bag[kept]
    return np.bincount(bag * classes + said, minlength=bags * classes).reshape(bags, classes)


def consistency_rate(label: Array, bag_said: Array, instance_said: Array, bag: Array, classes: int) -> float:
    """Among the bags said right: how often the instances' counted majority is that class too."""
    counted = votes(instance_said, bag, len(label), classes).argmax(1)
    right = bag_said == label
    return _mean(counted[right] == bag_said[right])


def share(true_or_said: Array, label: Array, bag: Array, kept: Array | None = None) -> Array:
    """(B,) the share of each bag's instances that are (or are said to be) of the bag's label; NaN if none is known."""
    known = true_or_said >= 0 if kept is None else kept & (true_or_said >= 0)
    hits = np.bincount(bag[known], weights=(true_or_said == label[bag])[known], minlength=len(label))
    heads = np.bincount(bag[known], minlength=len(label))
    return np.where(heads > 0, hits / np.maximum(heads, 1), np.nan)


def share_difference(true: Array, said: Array, label: Array, bag: Array) -> Array:
    """(B,) estimated minus true share of the label's class; above zero the majority is over-estimated."""
    return share(said, label, bag) - share(true, label, bag)


def purity(true: Array, label: Array, bag: Array, removed: Array) -> float:
    """The share of removed instances that really are not of their bag's class."""
    removed = removed & (true >= 0)
    return _mean(true[removed] != label[bag[removed]])


def agreement_rate(true: Array, label: Array, bag: Array, removed: Array, classes: int) -> float:
    """How often the true majority of what is left is still the bag's label; bags without label or truth are left out."""
    left = votes(true, bag, len(label), classes, kept=~removed)
    asked = (label >= 0) & (left.sum(1) > 0)
    return _mean(left.argmax(1)[asked] == label[asked])


def random_removal(bag: Array, removed: Array, rng: np.random.Generator) -> Array:
    """The control: as many removed from each bag, chosen from all its instances alike."""
    quota = np.bincount(bag[removed], minlength=bag.max() + 1)
    order = np.lexsort((rng.random(len(bag)), bag))  # bag by bag, shuffled inside
    starts = np.searchsorted(bag[order], np.arange(len(quota)))
    rank = np.arange(len(bag)) - starts[bag[order]]
    control = np.zeros(len(bag), dtype=bool)
    control[order] = rank < quota[bag[order]]
    return control


def confusion(true: Array, said: Array, classes: int) -> Array:
    """(C, C) counts, a row per true class."""
    known = true >= 0
    return np.bincount(true[known] * classes + said[known], minlength=classes**2).reshape(classes, classes)


def miou(counts: Array, balanced: bool = True) -> float:
    """Mean intersection over union. ``balanced`` (the official form) gives every true class the same weight first.

    >>> round(miou(np.array([[8, 2, 0], [1, 6, 3], [0, 0, 10]])), 6)
    0.665501
    """
    m = counts.astype(float)
    if balanced:
        m = m / np.maximum(m.sum(1, keepdims=True), 1e-12)
    hit, union = np.diag(m), m.sum(0) + m.sum(1) - np.diag(m)
    return _mean((hit / np.maximum(union, 1e-12))[union > 0])


def _mean(values: Array) -> float:
    return float(np.mean(values)) if len(values) else float("nan")

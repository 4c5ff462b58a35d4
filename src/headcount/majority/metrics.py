"""Metrics: pure functions of the truth and the predictions, in that order.

For ``*_accuracy`` and ``*_rate`` higher is better. Instances are stored flat, with the number of their bag:

    true, predicted  (N,) or (B,) class numbers
    bag              (N,) the bag of each instance
    label            (B,) the labels of the bags
    removed          (N,) true where MPEM removed the instance from the count

A rate over nothing is NaN; a tie for the most votes goes to the lowest class.
"""

from __future__ import annotations

import numpy as np

Array = np.ndarray


def instance_accuracy(true: Array, predicted: Array) -> float:
    """The share of instances predicted correctly, without instances of unknown class (-1).

    >>> instance_accuracy(np.array([0, 1, 2, -1]), np.array([0, 1, 1, 0]))
    0.6666666666666666
    """
    known = true >= 0
    return _mean(true[known] == predicted[known])


def bag_accuracy(label: Array, predicted: Array) -> float:
    """The share of bags predicted correctly."""
    return instance_accuracy(label, predicted)


def correct_bags(target: Array, predicted: Array) -> Array:
    """(B,) whether the predicted class has the most of the bag's target (B, C); of a tie, each winner is correct.

    >>> correct_bags(np.array([[0.5, 0.5, 0], [0.6, 0.4, 0]]), np.array([1, 1])).tolist()
    [True, False]
    """
    return np.take_along_axis(target, predicted[:, None], 1)[:, 0] >= target.max(1) - 1e-6


def count_votes(predicted: Array, bag: Array, n_bags: int, n_classes: int, kept: Array | None = None) -> Array:
    """(B, C) how many instances of each bag were predicted to be of each class; unknown classes (-1) do not count."""
    kept = predicted >= 0 if kept is None else kept & (predicted >= 0)
    predicted, bag = predicted[kept], bag[kept]
    return np.bincount(bag * n_classes + predicted, minlength=n_bags * n_classes).reshape(n_bags, n_classes)


def consistency_rate(
    label: Array, bag_predicted: Array, instance_predicted: Array, bag: Array, n_classes: int
) -> float:
    """Among correctly predicted bags, how often the counted majority of the instances is the same class."""
    majority = count_votes(instance_predicted, bag, len(label), n_classes).argmax(1)
    correct = bag_predicted == label
    return _mean(majority[correct] == bag_predicted[correct])


def label_share(classes: Array, label: Array, bag: Array, kept: Array | None = None) -> Array:
    """(B,) the share of each bag's instances of the label's class; NaN if no class is known. True or predicted ``classes``."""
    known = classes >= 0 if kept is None else kept & (classes >= 0)
    hits = np.bincount(bag[known], weights=(classes == label[bag])[known], minlength=len(label))
    instances = np.bincount(bag[known], minlength=len(label))
    return np.where(instances > 0, hits / np.maximum(instances, 1), np.nan)


def share_difference(true: Array, predicted: Array, label: Array, bag: Array) -> Array:
    """(B,) estimated minus true share of the label's class; above zero the majority is overestimated."""
    return label_share(predicted, label, bag) - label_share(true, label, bag)


def purity(true: Array, label: Array, bag: Array, removed: Array) -> float:
    """The share of removed instances that are truly not of their bag's class."""
    removed = removed & (true >= 0)
    return _mean(true[removed] != label[bag[removed]])


def agreement_rate(true: Array, label: Array, bag: Array, removed: Array, n_classes: int) -> float:
    """How often the true majority of the remaining instances is the bag's label; bags without label or truth are ignored."""
    remaining_votes = count_votes(true, bag, len(label), n_classes, kept=~removed)
    scored = (label >= 0) & (remaining_votes.sum(1) > 0)
    return _mean(remaining_votes.argmax(1)[scored] == label[scored])


def random_removal(bag: Array, removed: Array, rng: np.random.Generator) -> Array:
    """The control for MPEM: as many instances removed from each bag, chosen at random."""
    quota = np.bincount(bag[removed], minlength=bag.max() + 1)
    order = np.lexsort((rng.random(len(bag)), bag))  # bag by bag, shuffled within
    starts = np.searchsorted(bag[order], np.arange(len(quota)))
    rank = np.arange(len(bag)) - starts[bag[order]]
    control = np.zeros(len(bag), dtype=bool)
    control[order] = rank < quota[bag[order]]
    return control


def confusion_matrix(true: Array, predicted: Array, n_classes: int) -> Array:
    """(C, C) counts, a row per true class."""
    known = true >= 0
    pairs = true[known] * n_classes + predicted[known]
    return np.bincount(pairs, minlength=n_classes**2).reshape(n_classes, n_classes)


def mean_iou(counts: Array, balanced: bool = True) -> float:
    """Mean intersection over union. ``balanced`` (the official form) first gives every true class the same weight.

    >>> round(mean_iou(np.array([[8, 2, 0], [1, 6, 3], [0, 0, 10]])), 6)
    0.665501
    """
    m = counts.astype(float)
    if balanced:
        m = m / np.maximum(m.sum(1, keepdims=True), 1e-12)
    hit, union = np.diag(m), m.sum(0) + m.sum(1) - np.diag(m)
    return _mean((hit / np.maximum(union, 1e-12))[union > 0])


def _mean(values: Array) -> float:
    return float(np.mean(values)) if len(values) else float("nan")

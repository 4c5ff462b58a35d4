"""Metrics: pure functions of the truth and the predictions, in that order; and confidence intervals of accuracies.

For ``*_accuracy`` and ``*_rate`` higher is better. Class numbers ``true`` and ``predicted`` are (N,) or (B,), ``bag`` (N,) is the bag
of each instance, ``label`` (B,) the labels of the bags, ``removed`` (N,) true where MPEM removed the instance from the count. A rate
over nothing is NaN; a tie for the most votes goes to the lowest class.

All intervals are those of Wilson (1927). Predictions in groups (instances in bags, bags of patients) count as p (1 - p) / v
independent ones, with v the variance of the ratio between groups, with Student's quantile for few groups.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from headcount.errors import HeadcountError

Array = np.ndarray
LEVEL = 0.95


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


def consistency_rate(label: Array, bag_predicted: Array, instance_predicted: Array, bag: Array, n_classes: int) -> float:
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
    rank = np.arange(len(bag)) - np.searchsorted(bag[order], bag[order])
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


class Estimate(NamedTuple):
    """A share, its interval, and how many predictions it is based on."""

    value: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """As JSON; numbers that are not finite are null."""
        return {k: round(v, 6) if math.isfinite(v) else None for k, v in self._asdict().items()}

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})" if self.count else "not available"


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan, 0)


def check_level(level: float) -> float:
    """Return ``level`` if it is one of an interval."""
    if not 0.5 <= level < 1:
        raise HeadcountError(f"the level of an interval is from 0.5 to below 1, such as 0.95; got {level}")
    return level


def wilson_interval(share: float, count: float, level: float = LEVEL, quantile: float | None = None) -> tuple[float, float]:
    """The interval of a share of ``count`` independent predictions.

    >>> low, high = wilson_interval(0.9, 100)
    >>> round(low, 3), round(high, 3)
    (0.826, 0.945)
    """
    z = float(stats.norm.ppf((1 + level) / 2)) if quantile is None else quantile
    shrink = 1 + z * z / count
    centre = (share + z * z / (2 * count)) / shrink
    half_width = z / shrink * math.sqrt(share * (1 - share) / count + z * z / (4 * count**2))
    return max(0.0, min(centre - half_width, share)), min(1.0, max(centre + half_width, share))


def clustered_estimate(correct: Array, counts: Array, level: float = LEVEL) -> Estimate:
    """The accuracy of predictions that come in G groups: the ``correct`` ones and all of them, (G,) ``counts``.

    >>> clustered_estimate(np.array([1, 1, 0, 1]), np.array([1, 1, 1, 1])).value
    0.75
    """
    nonempty = counts > 0
    correct, counts = correct[nonempty].astype(float), counts[nonempty].astype(float)
    total, groups = float(counts.sum()), len(counts)
    if total == 0:
        return NO_ESTIMATE
    p = float(correct.sum() / total)
    if groups == 1:  # the variance between groups is unknown
        return Estimate(p, 0.0, 1.0, round(total))
    variance = groups / (groups - 1) * float(((correct - p * counts) ** 2).sum()) / total**2
    effective_count = p * (1 - p) / variance if variance > 1e-12 else float(groups)
    t = float(stats.t.ppf((1 + level) / 2, groups - 1))
    return Estimate(p, *wilson_interval(p, min(effective_count, total), quantile=t), round(total))


def grouped_estimate(correct: Array, group: Any = None, level: float = LEVEL) -> Estimate:
    """The accuracy of predictions of which some are ``correct`` (n,), in groups if ``group`` (n,) names one for each."""
    if group is None:
        value = float(correct.mean())
        return Estimate(value, *wilson_interval(value, len(correct), level), len(correct))
    _, number = np.unique(np.asarray(group).astype(str), return_inverse=True)
    return clustered_estimate(np.bincount(number, weights=correct), np.bincount(number), level)

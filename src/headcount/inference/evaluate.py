"""How good a model is on data whose labels are known: bags by their labels, shares by votes, instances by truth or an audit.

Every share of right answers has an interval that knows what hangs together: bags of one group (patient, county) and instances
of one bag are not independent witnesses (majority/metrics.py). Nothing here is seen by a training.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headcount.bags import Bags
from headcount.inference import audit
from headcount.majority import metrics
from headcount.majority.metrics import LEVEL, Estimate
from headcount.models.predictions import Predictions

_BINS = 10


def evaluate_bags(bags: Bags, predictions: Predictions, level: float = LEVEL) -> dict[str, Any]:
    """Bag accuracy, and whether the bags' probabilities can be believed. A tied bag is right if one of its winners is said."""
    target = bags.target.numpy()
    labelled = bags.labelled.numpy()
    if not labelled.any():
        return {"bags": 0}
    target, p = target[labelled], predictions.bag_probabilities[labelled]
    right = metrics.correct_bags(target, p.argmax(1))
    group = None if bags.group is None else np.array(bags.group, dtype=object)[labelled]
    accuracy = metrics.grouped_estimate(right, group, level)
    label = target.argmax(1)
    won = target >= target.max(1, keepdims=True) - 1e-6  # votes too are foretold by their winner; a tie by either half
    won = won / won.sum(1, keepdims=True)
    return {
        "bags": int(labelled.sum()),
        "accuracy": accuracy.to_json(),
        "interval": "Wilson" if group is None else "Wilson at the effective number of groups",
        "chance": round(float(np.bincount(label).max() / len(label)), 6),
        "log_loss": round(0.0 - float((won * np.log(np.maximum(p, 1e-12))).sum(1).mean()), 6),
        "calibration": calibration_table(p.max(1), right),
        "confusion": metrics.confusion_matrix(label, p.argmax(1), p.shape[1]).tolist(),
    }


def calibration_table(confidence: np.ndarray, right: np.ndarray) -> dict[str, Any]:
    """Of the answers given with probability 0.8, four of five should be right: the mean gap, and the table behind it.

    >>> calibration(np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, True, True, False]))["error"]
    0.1
    """
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    count = np.bincount(bins, minlength=_BINS)
    there = np.flatnonzero(count)
    means = np.bincount(bins, weights=confidence, minlength=_BINS)[there] / count[there]
    hits = np.bincount(bins, weights=right, minlength=_BINS)[there] / count[there]
    rows = [
        {"answers": int(n), "said": round(float(s), 4), "right": round(float(h), 4)}
        for n, s, h in zip(count[there], means, hits, strict=True)
    ]
    gap = float((count[there] * np.abs(means - hits)).sum() / count.sum())
    return {
        "error": round(gap, 6),
        "said": round(float(confidence.mean()), 6),
        "right": round(float(right.mean()), 6),
        "table": rows,
    }


def has_votes(bags: Bags) -> bool:
    """Whether the targets are shares: some bag's classes have unequal parts (equal ones are a tie)."""
    target = bags.target.numpy()
    inner = (target > 0) & (target < target.max(1, keepdims=True) - 1e-6)
    return bool(inner.any())


def evaluate_shares(bags: Bags, predictions: Predictions) -> dict[str, Any]:
    """The shares against the votes: mean and largest error, lean of the majority's share, and how often intervals hold."""
    target = bags.target.numpy()
    labelled = bags.labelled.numpy()
    true, share, low, high = (
        a[labelled] for a in (target, predictions.shares, predictions.shares_low, predictions.shares_high)
    )
    error = np.abs(share - true)
    top = np.arange(len(true)), true.argmax(1)
    return {
        "bags": int(labelled.sum()),
        "mean_error": round(float(error.mean()), 6),
        "largest_error": round(float(error.max()), 6),
        "majority_lean": round(float((share[top] - true[top]).mean()), 6),
        "inside_90_interval": round(float(((low <= true + 1e-6) & (true <= high + 1e-6)).mean()), 6),
    }


def evaluate_instances(bags: Bags, predictions: Predictions, level: float = LEVEL) -> dict[str, Any]:
    """Against the truth of single instances, where there is one; the interval goes by groups, or by bags if there are none."""
    assert bags.truth is not None
    true, predicted = bags.truth.numpy(), predictions.instance_prediction
    known = true >= 0
    if not known.any():
        return {"instances": 0}
    right, apart = (true == predicted)[known], "bags" if bags.group is None else "groups"
    whole = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    group = whole[bags.bag.numpy()[known]]
    accuracy = metrics.clustered_estimate(np.bincount(group, weights=right), np.bincount(group), level)
    counts = metrics.confusion_matrix(true, predicted, len(predictions.classes))
    own = np.maximum(predictions.instance_probabilities[known, true[known]].astype(float), 1e-12)
    return {
        "instances": int(known.sum()),
        "accuracy": accuracy.to_json(),
        "interval": f"Wilson at the effective number of instances, by {apart}",
        "balanced_accuracy": round(float(np.mean([counts[k, k] / n for k, n in enumerate(counts.sum(1)) if n])), 6),
        "miou": round(metrics.mean_iou(counts), 6),
        "log_loss": round(float(-np.log(own).mean()), 6),
        "calibration_error": calibration_table(predictions.confidence[known], right)["error"],
        "classes": class_scores(counts, predictions.classes),
        "confusion": counts.tolist(),
    }


def class_scores(counts: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """Recall and precision of each class; null where there is nothing to divide by."""
    true, answer, hit = counts.sum(1), counts.sum(0), np.diag(counts)
    part = lambda a, b: round(float(a / b), 6) if b else None  # noqa: E731
    return {
        c: {"instances": int(true[k]), "recall": part(hit[k], true[k]), "precision": part(hit[k], answer[k])}
        for k, c in enumerate(classes)
    }


def evaluate_audit(
    true: np.ndarray,
    predicted: np.ndarray,
    stratum: np.ndarray,
    stratum_sizes: np.ndarray,
    classes: tuple[str, ...],
    level: float,
) -> dict[str, Any]:
    """From n instances labelled by hand: ``true`` and ``answer`` (n,), -1 where nobody filled in a class."""
    filled = true >= 0
    right = (true == predicted)[filled]
    accuracy = audit.stratified_accuracy(right, stratum[filled], stratum_sizes, level)
    weight = audit.AuditSample(np.arange(int(filled.sum())), stratum[filled], stratum_sizes).weight
    predicted_filled = predicted[filled]
    by_class = {}
    for k, c in enumerate(classes):
        mine = predicted_filled == k
        if mine.any():
            share = float(np.average(right[mine], weights=weight[mine]))
            worth = float(weight[mine].sum() ** 2 / (weight[mine] ** 2).sum())
            by_class[c] = Estimate(share, *metrics.wilson_interval(share, worth, level), int(mine.sum())).to_json()
    return {
        "labelled": int(filled.sum()),
        "left_blank": int((~filled).sum()),
        "accuracy": accuracy.to_json(),
        "interval": "Wilson at the effective sample size of the stratified estimate",
        "right_when_said": by_class,
    }

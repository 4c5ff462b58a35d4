"""How good a model is on data whose labels are known: bags by their labels, shares by votes, instances by truth or an audit.

Every accuracy has an interval that accounts for correlated errors, of bags in one group (patient, county) and of instances in one
bag (majority/metrics.py).
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
    """Accuracy and calibration of the predicted labels. Of a tied bag either winner is correct."""
    labelled = bags.labelled.numpy()
    if not labelled.any():
        return {"bags": 0}
    target, p = bags.target.numpy()[labelled], predictions.bag_probabilities[labelled]
    correct = metrics.correct_bags(target, p.argmax(1))
    group = None if bags.group is None else np.array(bags.group, dtype=object)[labelled]
    label = target.argmax(1)
    won = target >= target.max(1, keepdims=True) - 1e-6  # votes count for their winner, a tie for each half
    won = won / won.sum(1, keepdims=True)
    return {
        "bags": int(labelled.sum()),
        "accuracy": metrics.grouped_estimate(correct, group, level).to_json(),
        "interval": "Wilson" if group is None else "Wilson at the effective number of groups",
        "chance": round(float(np.bincount(label).max() / len(label)), 6),
        "log_loss": round(0.0 - float((won * np.log(np.maximum(p, 1e-12))).sum(1).mean()), 6),
        "calibration": calibration_table(p.max(1), correct),
        "confusion": metrics.confusion_matrix(label, p.argmax(1), p.shape[1]).tolist(),
    }


def calibration_table(confidence: np.ndarray, correct: np.ndarray) -> dict[str, Any]:
    """Of predictions with probability 0.8, four of five should be correct: the mean gap, and the table behind it.

    >>> calibration_table(np.array([0.9, 0.9, 0.6, 0.6]), np.array([True, True, True, False]))["error"]
    0.1
    """
    bins = np.minimum((confidence * _BINS).astype(int), _BINS - 1)
    used, count = np.unique(bins, return_counts=True)
    means, rates = (np.bincount(bins, weights=x, minlength=_BINS)[used] / count for x in (confidence, correct))
    rows = [
        {"predictions": int(n), "confidence": round(float(c), 4), "accuracy": round(float(r), 4)}
        for n, c, r in zip(count, means, rates, strict=True)
    ]
    return {
        "error": round(float((count * np.abs(means - rates)).sum() / count.sum()), 6),
        "confidence": round(float(confidence.mean()), 6),
        "accuracy": round(float(correct.mean()), 6),
        "table": rows,
    }


def has_votes(bags: Bags) -> bool:
    """Whether the targets are shares: some bag's classes have unequal parts (equal ones are a tie)."""
    target = bags.target.numpy()
    return bool(((target > 0) & (target < target.max(1, keepdims=True) - 1e-6)).any())


def evaluate_shares(bags: Bags, predictions: Predictions) -> dict[str, Any]:
    """The shares against the votes: errors, the bias of the majority's share, and how often the intervals hold."""
    labelled = bags.labelled.numpy()
    estimates = (bags.target.numpy(), predictions.shares, predictions.shares_low, predictions.shares_high)
    votes, share, low, high = (a[labelled] for a in estimates)
    error = np.abs(share - votes)
    majority = np.arange(len(votes)), votes.argmax(1)
    return {
        "bags": int(labelled.sum()),
        "mean_error": round(float(error.mean()), 6),
        "largest_error": round(float(error.max()), 6),
        "majority_lean": round(float((share[majority] - votes[majority]).mean()), 6),
        "inside_90_interval": round(float(((low <= votes + 1e-6) & (votes <= high + 1e-6)).mean()), 6),
    }


def evaluate_instances(bags: Bags, predictions: Predictions, level: float = LEVEL) -> dict[str, Any]:
    """Against the true classes of single instances, where known; intervals are clustered by group, or else by bag."""
    assert bags.truth is not None
    truth, predicted = bags.truth.numpy(), predictions.instance_prediction
    known = truth >= 0
    if not known.any():
        return {"instances": 0}
    correct = (truth == predicted)[known]
    cluster = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    cluster = cluster[bags.bag.numpy()[known]]
    accuracy = metrics.clustered_estimate(np.bincount(cluster, weights=correct), np.bincount(cluster), level)
    counts = metrics.confusion_matrix(truth, predicted, len(predictions.classes))
    p_truth = np.maximum(predictions.instance_probabilities[known, truth[known]].astype(float), 1e-12)
    unit = "bags" if bags.group is None else "groups"
    return {
        "instances": int(known.sum()),
        "accuracy": accuracy.to_json(),
        "interval": f"Wilson at the effective number of instances, by {unit}",
        "balanced_accuracy": round(float(np.mean([counts[k, k] / n for k, n in enumerate(counts.sum(1)) if n])), 6),
        "miou": round(metrics.mean_iou(counts), 6),
        "log_loss": round(float(-np.log(p_truth).mean()), 6),
        "calibration_error": calibration_table(predictions.confidence[known], correct)["error"],
        "classes": class_scores(counts, predictions.classes),
        "confusion": counts.tolist(),
    }


def class_scores(counts: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """Recall and precision of each class; null where there is nothing to divide by."""
    truth, predicted, correct = counts.sum(1), counts.sum(0), np.diag(counts)
    ratio = lambda a, b: round(float(a / b), 6) if b else None  # noqa: E731
    return {
        c: {"instances": int(truth[k]), "recall": ratio(correct[k], truth[k]), "precision": ratio(correct[k], predicted[k])}
        for k, c in enumerate(classes)
    }


def evaluate_audit(
    truth: np.ndarray, predicted: np.ndarray, stratum: np.ndarray, stratum_sizes: np.ndarray,
    classes: tuple[str, ...], level: float,
) -> dict[str, Any]:  # fmt: skip
    """From n instances labelled by hand: ``truth`` and ``predicted`` (n,), -1 where the truth was left blank."""
    filled = truth >= 0
    correct, predicted, stratum = (truth == predicted)[filled], predicted[filled], stratum[filled]
    weight = audit.AuditSample(np.arange(len(stratum)), stratum, stratum_sizes).weight
    precision = {}
    for k, c in enumerate(classes):
        of_class = predicted == k
        if of_class.any():
            rate = float(np.average(correct[of_class], weights=weight[of_class]))
            n_effective = float(weight[of_class].sum() ** 2 / (weight[of_class] ** 2).sum())
            interval = metrics.wilson_interval(rate, n_effective, level)
            precision[c] = Estimate(rate, *interval, int(of_class.sum())).to_json()
    return {
        "labelled": int(filled.sum()),
        "left_blank": int((~filled).sum()),
        "accuracy": audit.stratified_accuracy(correct, stratum, stratum_sizes, level).to_json(),
        "interval": "Wilson at the effective sample size of the stratified estimate",
        "precision": precision,
    }

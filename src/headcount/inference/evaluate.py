"""How good a model is on data whose labels are known: bags by their labels, shares by votes, instances by truth or an audit.
Every accuracy has an interval that accounts for correlated errors, of bags in one group and of instances in one bag.

An *audit* estimates the accuracy on single instances from about a hundred that a person labels. They are drawn in strata (the
predicted class, cut into bands of confidence), more where the model is uncertain, n_h of N_h, and each stands for the ``weight`` =
N_h / n_h instances of its stratum; the accuracy is sum_h (N_h / N) (accuracy in stratum h).

Interval: Wilson's at the effective sample size  p (1 - p) / v,  v = sum_h (N_h / N)^2 q_h (1 - q_h) / n_h (1 - n_h / N_h),
where q_h is stratum h's accuracy with one more instance at the overall accuracy added (two correct instances do not prove a stratum
correct). If all are correct, or all wrong, the effective size is Kish's, 1 / sum_h (N_h / N)^2 / n_h.
"""

from typing import Any, NamedTuple

import numpy as np

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.majority import metrics
from headcount.majority.metrics import LEVEL, NO_ESTIMATE, Estimate
from headcount.models.predictions import Predictions

BANDS = 3  # of confidence, in an audit
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
    return {
        "error": round(float((count * np.abs(means - rates)).sum() / count.sum()), 6),
        "confidence": round(float(confidence.mean()), 6),
        "accuracy": round(float(correct.mean()), 6),
        "table": [
            {"predictions": int(n), "confidence": round(float(c), 4), "accuracy": round(float(r), 4)}
            for n, c, r in zip(count, means, rates, strict=True)
        ],
    }


def has_votes(bags: Bags) -> bool:
    """Whether the targets are shares: some bag's classes have unequal parts (equal ones are a tie)."""
    target = bags.target.numpy()
    return bool(((target > 0) & (target < target.max(1, keepdims=True) - 1e-6)).any())


def evaluate_shares(bags: Bags, predictions: Predictions) -> dict[str, Any]:
    """The shares against the votes: errors, the bias of the majority's share, and how often the intervals hold."""
    estimates = (bags.target.numpy(), predictions.shares, predictions.shares_low, predictions.shares_high)
    votes, share, low, high = (a[bags.labelled.numpy()] for a in estimates)
    error = np.abs(share - votes)
    majority = np.arange(len(votes)), votes.argmax(1)
    return {
        "bags": len(votes),
        "mean_error": round(float(error.mean()), 6),
        "largest_error": round(float(error.max()), 6),
        "majority_lean": round(float((share[majority] - votes[majority]).mean()), 6),
        "inside_90_interval": round(float(((low <= votes + 1e-6) & (votes <= high + 1e-6)).mean()), 6),
        "interval_width": round(float((high - low).mean()), 6),
    }


def evaluate_instances(bags: Bags, predictions: Predictions, level: float = LEVEL) -> dict[str, Any]:
    """Against the true classes of single instances, where known; intervals are clustered by group, or else by bag."""
    assert bags.truth is not None
    truth, predicted = bags.truth.numpy(), predictions.instance_prediction
    known = truth >= 0
    if not known.any():
        return {"instances": 0}
    correct = (truth == predicted)[known]
    bag = bags.bag.numpy()[known]
    accuracy = metrics.grouped_estimate(correct, bag if bags.group is None else np.array(bags.group)[bag], level)
    counts = metrics.confusion_matrix(truth, predicted, len(predictions.classes))
    sums = counts.sum(1).tolist(), counts.sum(0).tolist(), np.diag(counts).tolist()
    p_truth = np.maximum(predictions.instance_probabilities[known, truth[known]].astype(float), 1e-12)
    return {
        "instances": int(known.sum()),
        "accuracy": accuracy.to_json(),
        "interval": f"Wilson at the effective number of instances, by {'bags' if bags.group is None else 'groups'}",
        "balanced_accuracy": round(float(np.mean([counts[k, k] / n for k, n in enumerate(counts.sum(1)) if n])), 6),
        "miou": round(metrics.mean_iou(counts), 6),
        "log_loss": round(float(-np.log(p_truth).mean()), 6),
        "calibration_error": calibration_table(predictions.confidence[known], correct)["error"],
        "classes": {  # null where there is nothing to divide by
            c: {"instances": n, "recall": round(hits / n, 6) if n else None, "precision": round(hits / m, 6) if m else None}
            for c, n, m, hits in zip(predictions.classes, *sums, strict=True)
        },
        "confusion": counts.tolist(),
    }


class AuditSample(NamedTuple):
    """Which instances to label, in an order independent of the strata."""

    instance: np.ndarray  # (n,) instance numbers
    stratum: np.ndarray  # (n,)
    stratum_sizes: np.ndarray  # (H,) N_h


def stratum_weights(stratum: np.ndarray, stratum_sizes: np.ndarray) -> np.ndarray:
    """(n,) how many instances each drawn one stands for."""
    return (stratum_sizes / np.maximum(np.bincount(stratum, minlength=len(stratum_sizes)), 1))[stratum]


def assign_strata(predicted: np.ndarray, confidence: np.ndarray, count: int) -> np.ndarray:
    """(N,) the stratum of each instance: its predicted class, then its band of confidence. There are at most ``count`` / 4
    strata: first there are fewer bands, then the classes are pooled.

    >>> assign_strata(np.array([0, 0, 0, 0, 1, 1]), np.array([0.9, 0.5, 0.6, 0.8, 0.7, 0.9]), count=16).tolist()
    [1, 0, 0, 1, 2, 3]
    """
    _, predicted = np.unique(predicted, return_inverse=True)
    bands, limit = BANDS, max(1, count // 4)
    if predicted.max() + 1 > limit:
        predicted, bands = np.zeros_like(predicted), min(limit, 10)
    bands = max(1, min(bands, limit // int(predicted.max() + 1)))
    order, size = np.lexsort((confidence, predicted)), np.bincount(predicted)
    rank = np.empty(len(predicted), np.int64)
    rank[order] = np.arange(len(predicted)) - (size.cumsum() - size)[predicted[order]]
    return np.unique(predicted * bands + rank * bands // size[predicted], return_inverse=True)[1]


def allocate(stratum_sizes: np.ndarray, deviation: np.ndarray, count: int) -> np.ndarray:
    """(H,) how many to draw of each stratum: two each, the rest by N_h x deviation (Neyman), at most N_h.

    >>> allocate(np.array([100, 100, 1]), np.array([0.1, 0.3, 0.5]), 13).tolist()
    [3, 9, 1]
    """
    count = min(count, int(stratum_sizes.sum()))
    drawn = np.minimum(stratum_sizes, 2)
    if drawn.sum() > count:
        raise HeadcountError(f"{count} instances are too few for {len(stratum_sizes)} strata of two; draw more")
    optimum = stratum_sizes * np.maximum(deviation, 1e-3)
    while drawn.sum() < count:  # one at a time, where most are missing
        drawn[np.argmax(np.where(drawn < stratum_sizes, optimum / (drawn + 1), -1.0))] += 1
    return drawn


def draw_sample(predicted: np.ndarray, confidence: np.ndarray, count: int, rng: np.random.Generator) -> AuditSample:
    """Draw ``count`` instances, or all if there are fewer, by what is predicted of each, ``predicted`` and ``confidence`` (N,)."""
    if count < 2:
        raise HeadcountError(f"an audit draws at least 2 instances, asked for {count}")
    stratum = assign_strata(predicted, confidence, min(count, len(predicted)))
    stratum_sizes = np.bincount(stratum)
    expected = np.clip(np.bincount(stratum, weights=confidence) / stratum_sizes, 0.05, 0.95)
    drawn = allocate(stratum_sizes, np.sqrt(expected * (1 - expected)), count)
    picked = [rng.choice(np.flatnonzero(stratum == h), n, replace=False) for h, n in enumerate(drawn.tolist())]
    instance = rng.permutation(np.concatenate(picked))
    return AuditSample(instance, stratum[instance], stratum_sizes)


def stratified_accuracy(correct: np.ndarray, stratum: np.ndarray, stratum_sizes: np.ndarray, level: float = LEVEL) -> Estimate:
    """The accuracy on all N instances, from n drawn ones: ``correct`` and ``stratum`` (n,), ``stratum_sizes`` (H,). Strata of
    which no instance was labelled are pooled with the nearest one."""
    if not len(correct):
        return NO_ESTIMATE
    drawn = np.bincount(stratum, minlength=len(stratum_sizes)).astype(float)
    hits = np.bincount(stratum, weights=correct.astype(float), minlength=len(stratum_sizes))
    used = np.flatnonzero(drawn > 0)
    nearest = used[np.abs(np.arange(len(stratum_sizes))[:, None] - used).argmin(1)]
    size = np.bincount(nearest, weights=stratum_sizes, minlength=len(stratum_sizes))[used]
    drawn, hits = drawn[used], hits[used]
    part = size / size.sum()
    p = float((part * hits / drawn).sum())
    if (drawn >= size).all():  # every instance was labelled
        return Estimate(p, p, p, len(correct))
    q = (hits + p) / (drawn + 1)
    variance = float((part**2 * q * (1 - q) / drawn * np.maximum(0, 1 - drawn / size)).sum())
    n_effective = float(1 / (part**2 / drawn).sum()) if p * (1 - p) < 1e-12 else p * (1 - p) / variance
    return Estimate(p, *metrics.wilson_interval(p, n_effective, level), len(correct))


def evaluate_audit(
    truth: np.ndarray, predicted: np.ndarray, stratum: np.ndarray, stratum_sizes: np.ndarray,
    classes: tuple[str, ...], level: float,
) -> dict[str, Any]:  # fmt: skip
    """From n instances labelled by hand: ``truth`` and ``predicted`` (n,), -1 where the truth was left blank."""
    filled = truth >= 0
    correct, predicted, stratum = (truth == predicted)[filled], predicted[filled], stratum[filled]
    weight = stratum_weights(stratum, stratum_sizes)
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
        "accuracy": stratified_accuracy(correct, stratum, stratum_sizes, level).to_json(),
        "interval": "Wilson at the effective sample size of the stratified estimate",
        "precision": precision,
    }

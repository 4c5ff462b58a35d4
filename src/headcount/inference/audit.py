"""An audit: a model's accuracy on single instances, from about a hundred that a person labels by hand.

Instances are drawn in strata (the predicted class, cut into bands of confidence), more where the model is uncertain, and each
stands for the ``weight`` = N_h / n_h instances of its stratum:

    accuracy  =  sum_h  (N_h / N) (accuracy in stratum h)

Interval: Wilson's at the effective sample size  p (1 - p) / v,  v = sum_h (N_h / N)^2 q_h (1 - q_h) / n_h (1 - n_h / N_h),
where q_h is stratum h's accuracy with one more instance at the overall accuracy added (two correct instances do not prove a stratum
correct). If all are correct, or all wrong, the effective size is Kish's, 1 / sum_h (N_h / N)^2 / n_h.

Letters: N instances, H strata; n_h of the N_h instances of stratum h are drawn.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from headcount.errors import HeadcountError
from headcount.majority.metrics import LEVEL, NO_ESTIMATE, Estimate, wilson_interval

BANDS = 3


class AuditSample(NamedTuple):
    """Which instances to label, in an order independent of the strata."""

    instance: np.ndarray  # (n,) instance numbers
    stratum: np.ndarray  # (n,)
    stratum_sizes: np.ndarray  # (H,) N_h

    @property
    def weight(self) -> np.ndarray:
        """(n,) how many instances each drawn one stands for."""
        drawn = np.bincount(self.stratum, minlength=len(self.stratum_sizes))
        return (self.stratum_sizes / np.maximum(drawn, 1))[self.stratum]


def assign_strata(predicted: np.ndarray, confidence: np.ndarray, count: int, bands: int = BANDS) -> np.ndarray:
    """(N,) the stratum of each instance: its predicted class, then its band of confidence.

    There are at most ``count`` / 4 strata: first there are fewer bands, then the classes are pooled.

    >>> assign_strata(np.array([0, 0, 0, 0, 1, 1]), np.array([0.9, 0.5, 0.6, 0.8, 0.7, 0.9]), count=100, bands=2).tolist()
    [1, 0, 0, 1, 2, 3]
    """
    _, predicted = np.unique(predicted, return_inverse=True)
    limit = max(1, count // 4)
    if predicted.max() + 1 > limit:
        predicted, bands = np.zeros_like(predicted), min(limit, 10)
    bands = max(1, min(bands, limit // int(predicted.max() + 1)))
    order = np.lexsort((confidence, predicted))
    starts = np.searchsorted(predicted[order], np.arange(predicted.max() + 2))
    rank = np.empty(len(predicted), np.int64)
    rank[order] = np.arange(len(predicted)) - starts[predicted[order]]
    size = np.diff(starts)[predicted]
    return np.unique(predicted * bands + rank * bands // size, return_inverse=True)[1]


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


def draw_sample(
    predicted: np.ndarray, confidence: np.ndarray, count: int, rng: np.random.Generator, bands: int = BANDS
) -> AuditSample:
    """Draw ``count`` instances, or all if there are fewer, by what is predicted of each, ``predicted`` and ``confidence`` (N,)."""
    if count < 2:
        raise HeadcountError(f"an audit draws at least 2 instances, asked for {count}")
    stratum = assign_strata(predicted, confidence, min(count, len(predicted)), bands)
    stratum_sizes = np.bincount(stratum)
    expected = np.clip(np.bincount(stratum, weights=confidence) / stratum_sizes, 0.05, 0.95)
    drawn = allocate(stratum_sizes, np.sqrt(expected * (1 - expected)), count)
    picked = [rng.choice(np.flatnonzero(stratum == h), n, replace=False) for h, n in enumerate(drawn.tolist())]
    instance = rng.permutation(np.concatenate(picked))
    return AuditSample(instance, stratum[instance], stratum_sizes)


def stratified_accuracy(correct: np.ndarray, stratum: np.ndarray, stratum_sizes: np.ndarray, level: float = LEVEL) -> Estimate:
    """The accuracy on all N instances, from n drawn ones: ``correct`` and ``stratum`` (n,), ``stratum_sizes`` (H,).

    Strata of which no instance was labelled are pooled with the nearest one.
    """
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
    return Estimate(p, *wilson_interval(p, n_effective, level), len(correct))

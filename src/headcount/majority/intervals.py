"""Confidence intervals of accuracies.

All are intervals of Wilson (1927), at the effective number of independent predictions:

    wilson_interval     n independent predictions
    clustered_estimate  predictions in groups (instances in bags, bags of patients): n is p (1 - p) / v, with v the variance of
                        the ratio between groups, and Student's quantile for few groups
    stratified          inference/audit.py

Coverage is measured in tests/test_audit.py.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from headcount.errors import HeadcountError

LEVEL = 0.95


class Estimate(NamedTuple):
    """A share, its interval, and how many predictions it is based on."""

    value: float
    low: float
    high: float
    count: int

    def to_json(self) -> dict[str, Any]:
        """As JSON; numbers that are not finite are null."""
        data = {k: round(v, 6) if math.isfinite(v) else None for k, v in self._asdict().items()}
        return {**data, "count": self.count}

    def __str__(self) -> str:
        if not self.count:
            return "not available"
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


NO_ESTIMATE = Estimate(math.nan, math.nan, math.nan, 0)


def check_level(level: float) -> float:
    """Return ``level`` if it is one of an interval."""
    if not 0.5 <= level < 1:
        raise HeadcountError(f"the level of an interval is from 0.5 to below 1, such as 0.95; got {level}")
    return level


def wilson_interval(
    share: float, count: float, level: float = LEVEL, quantile: float | None = None
) -> tuple[float, float]:
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


def clustered_estimate(correct: np.ndarray, counts: np.ndarray, level: float = LEVEL) -> Estimate:
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


def grouped_estimate(correct: np.ndarray, group: Any = None, level: float = LEVEL) -> Estimate:
    """The accuracy of predictions of which some are ``correct`` (n,), in groups if ``group`` (n,) names one for each."""
    if group is None:
        value = float(correct.mean())
        return Estimate(value, *wilson_interval(value, len(correct), level), len(correct))
    _, number = np.unique(np.asarray(group).astype(str), return_inverse=True)
    return clustered_estimate(np.bincount(number, weights=correct), np.bincount(number), level)

"""Confidence intervals of predictions in groups, against the formula written out."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from headcount.majority.metrics import clustered_estimate, grouped_estimate, wilson_interval


def test_the_interval_of_groups_is_wilsons_at_the_effective_count():
    correct, counts = np.array([3, 5, 1, 4]), np.array([4, 5, 5, 6])
    p = 13 / 20
    variance = 4 / 3 * sum((c - p * n) ** 2 for c, n in zip(correct, counts, strict=True)) / 20**2
    low, high = wilson_interval(p, p * (1 - p) / variance, quantile=float(stats.t.ppf(0.975, 3)))
    estimate = clustered_estimate(correct, counts)
    assert estimate == (p, pytest.approx(low), pytest.approx(high), 20)
    flags = np.concatenate([np.arange(n) < c for c, n in zip(correct, counts, strict=True)])
    assert grouped_estimate(flags, np.repeat(list("abcd"), counts)) == estimate
    assert grouped_estimate(flags)[:3] == (p, *wilson_interval(p, 20))

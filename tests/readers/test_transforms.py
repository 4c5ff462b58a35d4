"""Standardisation: mean 0 and deviation 1 in every column that varies, and nothing undefined in those that do not."""

from __future__ import annotations

import numpy as np
import pytest

from headcount.readers.transforms import StandardScaler


def test_columns_are_standardised_whatever_their_size():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(500, 4)) * [1.0, 1e-3, 1e100, 5.0] + [0.0, 1.0, 0.0, 1e6]
    z = StandardScaler.fit(x).transform(x)
    assert z.mean(0) == pytest.approx(0, abs=1e-5)
    assert z.std(0) == pytest.approx(1, abs=1e-5)


def test_numbers_beyond_all_measure_leave_the_moments_finite():
    scaler = StandardScaler.fit(np.array([[1.7e308], [1.7e308], [-1.0]]))
    assert np.isfinite([scaler.mean_, scaler.scale_]).all()
    assert np.isfinite(scaler.transform(np.array([[1.7e308]]))).all()


def test_constant_columns_are_only_centred():
    scaler = StandardScaler.fit(np.array([[0.0, 7.0, 1.0], [0.0, 7.0, 3.0]]))
    np.testing.assert_array_equal(scaler.mean_, [0.0, 7.0, 2.0])
    np.testing.assert_array_equal(scaler.scale_, [1.0, 1.0, 1.0])


def test_chunks_have_the_moments_of_the_whole():
    x = np.random.default_rng(1).normal(3.0, 2.0, size=(101, 3))
    whole, parts = StandardScaler.fit(x), StandardScaler.fit_chunks(lambda: iter(np.array_split(x, 4)))
    np.testing.assert_allclose(parts.mean_, whole.mean_, rtol=1e-12)
    np.testing.assert_allclose(parts.scale_, whole.scale_, rtol=1e-12)

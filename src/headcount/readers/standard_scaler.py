"""Standardisation: the one place where a mean is subtracted and a standard deviation divided out.

A time stamp (1.7e9) has no digits left in float32 until its mean is gone, so that everything is computed in float64 and
only the result is rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

_MAX_DEVIATIONS = 1e6  # an outlier stays finite in float32, and so do the squares taken of it
_COLUMNS_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class StandardScaler:
    """(x - mean) / scale for each of D columns, in float64.

    Parameters
    ----------
    mean_, scale_
        (D,) float64; the scale of a column that does not vary is 1.

    Examples
    --------
    >>> scaler = StandardScaler.fit(np.array([[1.0, 7.0], [3.0, 7.0]]))
    >>> scaler.mean_, scaler.scale_
    (array([2., 7.]), array([1., 1.]))
    >>> scaler.transform(np.array([[4.0, 8.0]]))
    array([[2., 1.]], dtype=float32)
    """

    mean_: np.ndarray
    scale_: np.ndarray

    @classmethod
    def fit(cls, x: np.ndarray, min_deviation: float = 0.0) -> StandardScaler:
        """Mean and standard deviation of the columns of (N, D) finite numbers, however large these are.

        A column whose deviation is not above ``min_deviation``, or not above the rounding error of its mean, is constant.
        """
        mean, scale = np.zeros(x.shape[1]), np.ones(x.shape[1])
        for start in range(0, x.shape[1], _COLUMNS_AT_ONCE):
            part = slice(start, start + _COLUMNS_AT_ONCE)
            columns = _columns(x[:, part])
            largest = np.abs(columns).max(1)
            largest[largest == 0] = 1.0
            mean[part], scale[part] = _moments(lambda columns=columns: [columns], largest, min_deviation)
        return cls(mean, scale)

    @classmethod
    def fit_chunks(cls, chunks: Callable[[], Iterable[np.ndarray]], min_deviation: float = 0.0) -> StandardScaler:
        """The same for numbers that need not be in memory at once: ``chunks()`` yields (n, D) arrays, and is called twice."""
        return cls(*_moments(lambda: map(_columns, chunks()), np.ones(1), min_deviation))

    def deviations(self, x: np.ndarray) -> np.ndarray:
        """(n, D) float64: how many standard deviations each number lies from the mean; NaN stays NaN."""
        with np.errstate(over="ignore", invalid="ignore"):
            return x / self.scale_ - self.mean_ / self.scale_

    def transform(self, x: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        """(n, D) standardised numbers, at most a million deviations from the mean; NaN becomes 0, the mean."""
        z = np.nan_to_num(self.deviations(np.asarray(x, np.float64)), nan=0.0)
        return np.clip(z, -_MAX_DEVIATIONS, _MAX_DEVIATIONS).astype(dtype)


def _columns(x: np.ndarray) -> np.ndarray:
    """(n, D) -> (D, n) float64, so that every sum runs over contiguous numbers."""
    return np.ascontiguousarray(x.T, np.float64)


def _moments(
    chunks: Callable[[], Iterable[np.ndarray]], largest: np.ndarray, min_deviation: float
) -> tuple[np.ndarray, np.ndarray]:
    """Mean and scale of (D, n) chunks, divided by ``largest`` meanwhile so that squares of very large numbers stay finite."""
    total, squares, count = np.zeros(1), np.zeros(1), 0
    for chunk in chunks():
        total = total + (chunk / largest[:, None]).sum(1)
        count += chunk.shape[1]
    mean = total / count
    for chunk in chunks():
        squares = squares + np.square(chunk / largest[:, None] - mean[:, None]).sum(1)
    mean, deviation = mean * largest, np.sqrt(squares / count) * largest
    varies = np.isfinite(deviation) & (deviation > np.maximum(1e-12 * np.abs(mean), max(min_deviation, 1e-300)))
    return mean, np.where(varies, deviation, 1.0)

"""Who is in which bag, in every way scikit-learn's users may say it: ids, a column of X, or a list of bags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from headcount.errors import HeadcountError


@dataclass(frozen=True)
class Membership:
    """Who is in which bag: rows in ``order`` lie bag after bag, bags in order of first appearance."""

    order: np.ndarray
    sizes: list[int]
    names: np.ndarray
    spoken: bool = True  # somebody said so
    listed: bool = False

    @classmethod
    def of(cls, sizes: list[int]) -> Membership:
        return cls(np.arange(sum(sizes)), sizes, np.arange(len(sizes)), listed=True)

    @classmethod
    def single(cls, n: int) -> Membership:
        return cls(np.arange(n), [1] * n, np.arange(n), spoken=False)

    @classmethod
    def among(cls, ids: Any, n: int) -> Membership:
        ids = column_or_1d(np.asarray(ids))
        if len(ids) != n:
            raise HeadcountError(f"{len(ids)} bag ids for {n} rows; give one per row")
        names, first, code = np.unique(ids, return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))[code]
        return cls(np.argsort(rank, kind="stable"), np.bincount(rank).tolist(), names[np.argsort(first)])


def as_list(X: Any) -> list[np.ndarray] | None:
    """The arrays of a list of bags, or of an array (B, S, D); None if X is anything else."""
    if isinstance(X, torch.Tensor):
        X = X.detach().cpu().numpy()
    several = isinstance(X, (list, tuple)) or (isinstance(X, np.ndarray) and (X.ndim in (3, 5) or X.dtype == object))
    if not several or not len(X) or np.ndim(X[0]) not in (2, 4):
        return None
    held = [np.asarray(b) for b in X]
    for i, b in enumerate(held):
        if b.ndim != held[0].ndim or b.shape[1:] != held[0].shape[1:] or not len(b):
            raise HeadcountError(f"bag {i} has shape {b.shape}; all bags are (n, D), n above zero and D the same")
    return held


def without(X: Any, column: str | int) -> tuple[Any, np.ndarray]:
    """X without a column, and the column."""
    if isinstance(column, str):
        if not hasattr(X, "columns") or column not in list(X.columns):
            raise HeadcountError(f"X has no column {column!r}; give a DataFrame that has, or bags=ids")
        kept = [c for c in X.columns if c != column]
        return X[kept], np.asarray(X[column])
    x = np.asarray(X)
    if x.ndim != 2 or not -x.shape[1] <= column < x.shape[1]:
        raise HeadcountError(f"X of shape {x.shape} has no column {column}")
    return np.delete(x, column, 1), x[:, column]


def labels_of(y: Any, ids: Membership, n: int) -> np.ndarray:
    """(B,) the label of each bag; per row it must be the same all over a bag."""
    y = column_or_1d(y, warn=True)
    assert_all_finite(y, input_name="y")
    check_classification_targets(y)
    if ids.listed and len(y) == len(ids.sizes):
        return y
    if len(y) != n:
        raise HeadcountError(f"{len(y)} labels for {n} rows; give each row its bag's label")
    y = y[ids.order]
    starts = np.concatenate([[0], np.cumsum(ids.sizes)[:-1]])
    first = np.repeat(starts, ids.sizes)
    odd = np.flatnonzero(y != y[first])
    if len(odd):
        where = ids.names[int(np.searchsorted(starts, odd[0], side="right")) - 1]
        raise HeadcountError(f"bag {where!r} has two labels, {y[first[odd[0]]]!r} and {y[odd[0]]!r}; a bag has one")
    return y[starts]

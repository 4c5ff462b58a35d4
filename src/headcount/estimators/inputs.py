"""The rows and bags that the estimator's methods take: ids, a column of X, or a list of bags."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import Any, Literal

import numpy as np
import torch
from scipy.sparse import issparse
from sklearn.utils import check_array
from sklearn.utils.validation import validate_data

from headcount.bags.pool import DatasetPool, to_numpy as tensor_to_numpy
from headcount.errors import HeadcountError
from headcount.readers.columns import unify_unicode

FLOAT_TYPES = [np.float64, np.float32]  # kept as they are; everything else becomes the first


@dataclass(frozen=True)
class BagIds:
    """The bag of each row: the rows in ``order`` are sorted by bag, bags in order of first appearance."""

    order: np.ndarray  # (N,) row numbers
    sizes: list[int]  # of the B bags
    names: np.ndarray  # (B,) ids, or numbers
    given: bool = True  # False: every row is a bag of its own
    from_list: bool = False

    @classmethod
    def from_ids(cls, ids: Any, n: int) -> BagIds:
        """The bags of n rows; without ids every row is one."""
        if ids is None:
            return cls(np.arange(n), [1] * n, np.arange(n), given=False)
        names, first, code = np.unique(check_ids(ids, n), return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))[code]
        return cls(np.argsort(rank, kind="stable"), np.bincount(rank).tolist(), names[np.argsort(first)])


@dataclass(frozen=True)
class BagShares:
    """The shares of the classes in each of B bags, with intervals: (B, C) each, in the order of ``bags``."""

    bags: np.ndarray  # (B,) ids in order of first appearance; numbers, for a list of bags
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray


def to_numpy(value: Any) -> Any:
    """A tensor, a sparse matrix, the items of a Dataset or a list of these as arrays; anything else as it is."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) or issparse(v) for v in value):
        return [to_numpy(v) for v in value]
    if issparse(value):
        return value.toarray()
    if isinstance(value, torch.utils.data.Dataset):
        return tensor_to_numpy(DatasetPool(value).take(torch.arange(len(value))))
    return tensor_to_numpy(value) if isinstance(value, torch.Tensor) else value


def bag_column(bags: Any) -> str | int | None:
    """The column that holds the bag, if ``bags`` names one; None if it is None, or ids."""
    if bags is None or isinstance(bags, str):
        return bags
    if isinstance(bags, Integral) and not isinstance(bags, bool):
        return int(bags)
    if np.ndim(bags) == 0:
        raise HeadcountError(f"bags is the name or number of a column, or one id per row, got {bags!r}")
    return None


def resolve_bag_column(constructor_bags: Any, fit_bags: Any) -> str | int | None:
    """The column that holds the bag, by the argument of fit, or else by that of the constructor."""
    if constructor_bags is not None and bag_column(constructor_bags) is None:
        raise HeadcountError("MajorityClassifier(bags=...) names a column of X, not ids; give ids to fit: fit(X, y, bags=ids)")
    if fit_bags is not None and bag_column(fit_bags) is None and constructor_bags is not None:
        raise HeadcountError(f"the bags are given twice: column {constructor_bags!r} in the constructor, ids in fit; give one")
    return bag_column(constructor_bags if fit_bags is None else fit_bags)


def check_ids(ids: Any, n: int) -> np.ndarray:
    """(n,) ids that are complete and comparable."""
    ids = np.asarray(to_numpy(ids))
    if ids.ndim != 1 and ids.shape != (len(ids), 1):
        raise HeadcountError(f"bag ids have shape {ids.shape}; give one id per row")
    ids = ids.ravel()
    if len(ids) != n:
        raise HeadcountError(f"{len(ids)} bag ids for {n} rows; give one per row")
    missing = [is_missing(v) for v in ids] if ids.dtype == object else ids != ids  # NaN and NaT differ from themselves
    if np.any(missing):
        row = int(np.flatnonzero(missing)[0])
        raise HeadcountError(f"row {row} is in no bag (its id is {ids[row]}); give it an id, or leave the row out")
    try:
        np.sort(ids)
    except TypeError as e:
        raise HeadcountError(f"bag ids of several kinds ({e}); give all as text, or all as numbers") from None
    return unify_unicode(ids)


def is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):  # pandas.NA has no truth value
        return True


def pop_column(X: Any, column: str | int, width: int | None = None, required: bool = True) -> tuple[Any, np.ndarray | None]:
    """X without a column, and the column; X and None where X lacks it, unless it is ``required``. An array of ``width`` columns
    lacks it."""
    names, shape = list(X.columns) if hasattr(X, "columns") else None, np.shape(X)
    if names is not None and len(set(names)) < len(names):
        duplicate = next(c for i, c in enumerate(names) if c in names[:i])
        raise HeadcountError(f"X has the column {duplicate!r} twice; give each column its own name")
    if isinstance(column, str):
        present = names is not None and column in names
    else:
        present = len(shape) == 2 and -shape[1] <= column < shape[1] and shape[1] != width
    if present and names is not None:
        name = column if isinstance(column, str) else names[column]
        return X[[c for c in names if c != name]], np.asarray(X[name])
    if present and not isinstance(column, str):
        x = np.asarray(X)
        return np.delete(x, column, 1), x[:, column]
    if required:
        kind = f"DataFrame with {', '.join(map(repr, names[:8]))}" if names is not None else f"shape {shape}"
        problem = f"X ({kind}) has no column {column!r}, which holds the bag"
        raise HeadcountError(f"{problem}; add it, or give bags=ids. Only predict and predict_proba work without it")
    return X, None


@contextmanager
def numeric_errors(X: Any, names: Sequence[Any] = ()) -> Iterator[None]:
    """Errors that name the column and the row, while a DataFrame, or rows of DataFrames with these ``names``, become numbers."""
    try:
        yield
    except (TypeError, ValueError):
        for j, name in enumerate(X.columns if hasattr(X, "columns") else names):
            for row, value in enumerate(X[name] if hasattr(X, "columns") else X[:, j]):
                with suppress(TypeError, ValueError):
                    if isfinite(float(value)):
                        continue
                what = "no value" if is_missing(value) else f"{str(value)!r}, which is no finite number,"
                advice = "fill or encode it in a Pipeline, or use headcount.read"
                raise HeadcountError(f"column {name!r} of X has {what} in row {row}; {advice}") from None
        raise


def as_bag_list(X: Any) -> list[Any] | None:
    """The arrays (DataFrames) of a list of bags, or of an array (B, S, D); None if X is anything else."""
    X = to_numpy(X)
    is_list = isinstance(X, (list, tuple)) or (isinstance(X, np.ndarray) and (X.ndim in (3, 5) or X.dtype == object))
    if not is_list or not len(X) or np.ndim(X[0]) not in (2, 4):
        return None
    return [b if hasattr(b, "columns") else np.asarray(b) for b in X]


def stack_bags(
    bags: list[Any], column: str | int | None, width: int | None, feature_names: Sequence[str] | None
) -> tuple[np.ndarray, list[Any] | None]:
    """(N, ...) the rows of all bags without the column that holds the bag, and the names of the columns: in the order of
    ``feature_names``, or of the first DataFrame."""
    parts, names = [], None if feature_names is None else list(feature_names)
    for i, bag in enumerate(bags):
        is_frame = hasattr(bag, "columns")
        if is_frame != hasattr(bags[0], "columns"):
            raise HeadcountError(f"bag {i} is a {type(bag).__name__}, bag 0 a {type(bags[0]).__name__}; give one kind")
        if column is not None and np.ndim(bag) == 2:
            bag, ids = pop_column(bag, column, width, required=False)
            if ids is not None and len(bag) and len(found := np.unique(check_ids(ids, len(bag)))) > 1:
                both = " and ".join(repr(v) for v in found.tolist()[:2])
                raise HeadcountError(f"bag {i} of the list has {both} in column {column!r}; a bag has one id there")
        if is_frame:
            columns = list(bag.columns)
            names = columns if names is None else names
            if sorted(map(str, columns)) != sorted(map(str, names)):
                problems = [f"lacks column {n!r}" for n in names if n not in columns]
                problems += [f"has an additional column {n!r}" for n in columns if n not in names]
                problem = next(iter(problems), "has a column twice")
                raise HeadcountError(f"bag {i} {problem}; all bags need the columns {', '.join(map(str, names[:8]))}")
            bag = bag[names]
        part = np.asarray(bag)
        first = parts[0] if parts else part
        if part.ndim != first.ndim or part.shape[1:] != first.shape[1:] or not len(part):
            raise HeadcountError(f"bag {i} has shape {part.shape}; all bags are (n, D), n above zero and D the same")
        parts.append(part)
    return np.concatenate(parts), names if hasattr(bags[0], "columns") else None


def read_rows(
    estimator: Any, X: Any, bags: Any, fitting: bool = False, use: Literal["required", "optional", "ignored"] = "required"
) -> tuple[np.ndarray, BagIds]:
    """(N, D) numbers and the bag of each row. ``use``: whether X must have the column that holds the bag, if one is named."""
    X, bags = to_numpy(X), to_numpy(bags)
    column = bag_column(bags)
    ids, column = (bags, estimator.bags_) if column is None else (None, column)
    if (bag_list := as_bag_list(X)) is not None:
        if ids is not None:
            raise HeadcountError("X is a list of bags, and bags= gives ids besides; leave the ids out")
        return _read_list(estimator, bag_list, column, fitting)
    if column is not None:
        width, required = None if fitting else estimator.n_features_in_, use == "required" and ids is None
        X, values = pop_column(X, column, width, required=required)
        ids = values if ids is None and use != "ignored" else ids
    if isinstance(X, np.ndarray) and X.ndim == 4:  # images (N, H, W, channels)
        return X, BagIds.from_ids(ids, len(X))
    with numeric_errors(X):
        x = validate_data(estimator, X, reset=fitting, dtype=FLOAT_TYPES, ensure_min_samples=2 if fitting else 1)
    return x, BagIds.from_ids(ids, len(x))


def _read_list(estimator: Any, bag_list: list[Any], column: str | int | None, fitting: bool) -> tuple[np.ndarray, BagIds]:
    width = None if fitting else getattr(estimator, "n_features_in_", None)
    known = None if fitting else getattr(estimator, "feature_names_in_", None)
    x, names = stack_bags(bag_list, column, width, known)
    ids = BagIds(np.arange(len(x)), list(map(len, bag_list)), np.arange(len(bag_list)), from_list=True)
    if x.ndim == 4:
        return x, ids
    if names is None or not all(isinstance(n, str) for n in names):
        return validate_data(estimator, x, reset=fitting, dtype=FLOAT_TYPES), ids
    with numeric_errors(x, names):  # the stacked array has lost its names, so scikit-learn cannot check them
        x = check_array(x, dtype=FLOAT_TYPES, estimator=estimator, input_name="X")
    if fitting:
        estimator.n_features_in_, estimator.feature_names_in_ = x.shape[1], np.asarray(names, dtype=object)
    elif known is None and x.shape[1] != estimator.n_features_in_:
        raise HeadcountError(f"X has {x.shape[1]} columns, and the model was fitted on {estimator.n_features_in_}")
    return x, ids

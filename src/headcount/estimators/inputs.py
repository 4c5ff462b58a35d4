"""The arguments of the estimator's methods, checked: bags (as ids, a column of X, or a list), labels and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from typing import Any

import numpy as np
import torch
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from headcount.bags.pool import to_numpy as tensor_to_numpy
from headcount.errors import HeadcountError
from headcount.readers.columns import unify_unicode


@dataclass(frozen=True)
class BagIds:
    """The bag of each row: the rows in ``order`` are sorted by bag, bags in order of first appearance."""

    order: np.ndarray  # (N,) row numbers
    sizes: list[int]  # of the B bags
    names: np.ndarray  # (B,) ids, or numbers
    given: bool = True  # False: every row is a bag of its own
    from_list: bool = False

    @classmethod
    def of_list(cls, bags: list[Any]) -> BagIds:
        sizes = list(map(len, bags))
        return cls(np.arange(sum(sizes)), sizes, np.arange(len(sizes)), from_list=True)

    @classmethod
    def from_ids(cls, ids: Any, n: int) -> BagIds:
        """The bags of n rows; without ids every row is one."""
        if ids is None:
            return cls(np.arange(n), [1] * n, np.arange(n), given=False)
        names, first, code = np.unique(check_ids(ids, n), return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))[code]
        return cls(np.argsort(rank, kind="stable"), np.bincount(rank).tolist(), names[np.argsort(first)])


def to_numpy(value: Any) -> Any:
    """A tensor as an array, a list of tensors as a list of arrays; anything else as it is."""
    if isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
        return [to_numpy(v) for v in value]
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
        raise HeadcountError(
            "MajorityClassifier(bags=...) names a column of X, a name or a number, and got ids; give ids to fit: "
            "fit(X, y, bags=ids)"
        )
    if fit_bags is not None and bag_column(fit_bags) is None and constructor_bags is not None:
        raise HeadcountError(
            f"the bags are given twice: column {constructor_bags!r} in the constructor, and ids in fit; give one"
        )
    return bag_column(constructor_bags if fit_bags is None else fit_bags)


def check_ids(ids: Any, n: int) -> np.ndarray:
    """(n,) ids that are complete and comparable."""
    ids = np.asarray(to_numpy(ids))
    if ids.ndim != 1 and ids.shape != (len(ids), 1):
        raise HeadcountError(f"bag ids have shape {ids.shape}; give one id per row")
    ids = ids.ravel()
    if len(ids) != n:
        raise HeadcountError(f"{len(ids)} bag ids for {n} rows; give one per row")
    missing = [_is_missing(v) for v in ids] if ids.dtype == object else ids != ids  # NaN and NaT differ from themselves
    if np.any(missing):
        row = int(np.flatnonzero(missing)[0])
        raise HeadcountError(f"row {row} is in no bag (its id is {ids[row]}); give it an id, or leave the row out")
    try:
        np.sort(ids)
    except TypeError as e:
        raise HeadcountError(f"bag ids of several kinds ({e}); give all as text, or all as numbers") from None
    return unify_unicode(ids)


def _is_missing(value: Any) -> bool:
    try:
        return value is None or bool(value != value)
    except (TypeError, ValueError):  # pandas.NA has no truth value
        return True


def pop_column(X: Any, column: str | int, width: int | None = None, required: bool = True) -> tuple[Any, np.ndarray | None]:
    """X without a column, and the column; X and None where X lacks it, unless it is ``required``. An array of ``width`` columns
    lacks it."""
    if hasattr(X, "toarray"):
        raise HeadcountError(f"X is sparse, and its column {column!r} is to hold the bag; give X.toarray()")
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
        raise HeadcountError(
            f"X ({kind}) has no column {column!r}, which holds the bag; add it, or give bags=ids. Only predict and "
            "predict_proba work without it"
        )
    return X, None


@contextmanager
def numeric_errors(X: Any, names: Sequence[Any] = ()) -> Iterator[None]:
    """Errors that name the column and the row, while a DataFrame, or rows of DataFrames with these ``names``, become numbers."""
    try:
        yield
    except (TypeError, ValueError):
        for j, name in enumerate(X.columns if hasattr(X, "columns") else names):
            column = X[name] if hasattr(X, "columns") else X[:, j]
            for row, value in enumerate(column):
                with suppress(TypeError, ValueError):
                    if isfinite(float(value)):
                        continue
                what = "no value" if _is_missing(value) else f"{str(value)!r}, which is no finite number,"
                raise HeadcountError(
                    f"column {name!r} of X has {what} in row {row}; fill or encode it in a Pipeline, or give the table to "
                    "headcount.read, which handles words, dates and missing values"
                ) from None
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
            names = list(bag.columns) if names is None else names
            bag = _reorder_columns(bag, names, i)
        part = np.asarray(bag)
        first = parts[0] if parts else part
        if part.ndim != first.ndim or part.shape[1:] != first.shape[1:] or not len(part):
            raise HeadcountError(f"bag {i} has shape {part.shape}; all bags are (n, D), n above zero and D the same")
        parts.append(part)
    return np.concatenate(parts), names if hasattr(bags[0], "columns") else None


def _reorder_columns(bag: Any, names: list[Any], i: int) -> Any:
    columns = list(bag.columns)
    if sorted(map(str, columns)) != sorted(map(str, names)):
        problems = [f"lacks column {n!r}" for n in names if n not in columns]
        problems += [f"has an additional column {n!r}" for n in columns if n not in names]
        problem = next(iter(problems), "has a column twice")
        raise HeadcountError(f"bag {i} {problem}; all bags need the columns {', '.join(map(str, names[:8]))}")
    return bag if columns == names else bag[names]


def bag_labels(y: Any, ids: BagIds, n: int) -> np.ndarray:
    """(B,) the label of each bag, from one label per row (the same in all rows of a bag) or per bag of a list."""
    y = column_or_1d(to_numpy(y), warn=True)
    missing = [i for i, v in enumerate(y) if _is_missing(v)] if y.dtype == object else []
    if missing:
        what = "bag" if ids.from_list and len(y) == len(ids.sizes) else "row"
        raise HeadcountError(
            f"{what} {missing[0]} has no label ({y[missing[0]]}); leave unlabelled bags out, or give them to headcount.read and "
            "headcount.fit"
        )
    assert_all_finite(y, input_name="y")
    try:
        check_classification_targets(y)
        np.sort(y)
    except TypeError as e:
        raise HeadcountError(f"labels of several kinds ({e}); give all as text, or all as numbers") from None
    y = unify_unicode(y)
    if ids.from_list and len(y) == len(ids.sizes):
        return y
    if len(y) != n:
        expected = f"{len(ids.sizes)} bags; give one per bag" if ids.from_list else f"{n} rows; give each row its bag's label"
        raise HeadcountError(f"{len(y)} labels for {expected}")
    y, bag = y[ids.order], np.repeat(np.arange(len(ids.sizes)), ids.sizes)
    labels = y[np.cumsum([0, *ids.sizes[:-1]])]
    if len(conflicts := np.flatnonzero(y != labels[bag])):
        row = conflicts[0]  # tolist: the repr of numpy's values is np.int64(0)
        name, one, other = ids.names.tolist()[bag[row]], labels[bag].tolist()[row], y.tolist()[row]
        raise HeadcountError(f"bag {name!r} has two labels, {one!r} and {other!r}; a bag has one")
    return labels


def check_weights(weight: Any, ids: BagIds, n: int) -> np.ndarray | None:
    """(N,) float32 weights of the rows, from one number per row or one array per bag of a list."""
    if (weight := to_numpy(weight)) is None:
        return None
    if ids.from_list and isinstance(weight, (list, tuple)) and len(weight) and np.ndim(weight[0]) == 1:
        if len(weight) != len(ids.sizes):
            raise HeadcountError(f"weight has {len(weight)} arrays for {len(ids.sizes)} bags; give one per bag")
        for i, (w, rows) in enumerate(zip(weight, ids.sizes, strict=True)):
            if len(w) != rows:
                raise HeadcountError(f"weight has {len(w)} numbers for the {rows} rows of bag {i}; give one per row")
        weight = np.concatenate(weight)
    try:
        weights = np.asarray(weight, dtype=np.float64)
    except (TypeError, ValueError):
        raise HeadcountError("weight holds a value that is no number; give one number per row") from None
    if weights.shape != (n,):
        got = f"{len(weights)} numbers" if weights.ndim == 1 else f"shape {weights.shape}"
        raise HeadcountError(f"weight has {got} for {n} rows; give one number per row")
    invalid = np.flatnonzero(~((weights >= 0) & np.isfinite(weights)))
    if len(invalid):
        raise HeadcountError(f"row {invalid[0]} has weight {weights[invalid[0]]:g}; weights are finite and not negative")
    return weights.astype(np.float32)

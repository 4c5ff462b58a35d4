"""The labels and weights that the estimator's methods take, by row or by bag of a list; and the names of its methods."""

import warnings
from numbers import Number
from typing import Any

import numpy as np
from sklearn.utils import assert_all_finite
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from headcount.bags import validation
from headcount.errors import HeadcountError, HeadcountWarning, check_choice
from headcount.estimators.inputs import BagIds, is_missing, to_numpy
from headcount.models.heads import HEADS, TRUSTED_HEADS, find_head
from headcount.readers.columns import unify_unicode
from headcount.selection.methods import METHODS, reject_custom_head


def factorize_labels(y: Any) -> tuple[np.ndarray, np.ndarray]:
    """The classes, sorted, and (n,) their numbers, -1 for None and NaN."""
    y = column_or_1d(to_numpy(y), warn=True)
    missing = np.array([is_missing(v) for v in y], bool) if y.dtype == object else y != y
    codes, labels = np.full(len(y), -1), y[~missing]
    if not len(labels):
        raise HeadcountError("no bag has a label; give at least two bags different labels")
    if labels.dtype == object and all(isinstance(v, Number) for v in labels):  # scikit-learn refuses numbers as objects
        labels = np.array(labels.tolist())
    assert_all_finite(labels, input_name="y")
    try:
        check_classification_targets(labels)
        values, codes[~missing] = np.unique(unify_unicode(labels), return_inverse=True)
    except TypeError as e:
        raise HeadcountError(f"labels of several kinds ({e}); give all as text, or all as numbers") from None
    return values, codes


def bag_labels(y: Any, ids: BagIds, n: int, classes: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """The classes, sorted, and (B,) the class number of each bag: from one label per row, or per bag of a list. In place of labels
    (n, C) votes or probabilities, of which (B, C) are returned.

    None and NaN mean unlabelled (-1), and so does -1, unless it is one of ``classes``; in ``fit``, where these are unknown, unless
    it stands beside fewer than two class numbers, as in {-1, 1}. Rows of a bag may lack the label that others have.
    """
    if classes is None and len(getattr(y, "shape", ())) == 2 and y.shape[1] > 1:
        return _bag_votes(y, ids, n)
    values, full = factorize_labels(y)
    if values.dtype.kind in "iuf" and -1 in values:
        others = values[values != -1]
        numbers = len(others) >= 2 and bool(((others >= 0) & (others == others.round())).all())
        unlabelled = numbers if classes is None else -1 not in classes.tolist()
        if unlabelled and classes is None:
            count, advice = (values[full[full >= 0]] == -1).sum(), "if it is a class, give the classes other numbers, or names"
            message = f"label -1 is taken for no label ({count} of {len(full)}), as None and NaN are; {advice}"
            warnings.warn(message, HeadcountWarning, stacklevel=3)
        if unlabelled:
            kept = values != -1
            full, values = np.append(np.where(kept, kept.cumsum() - 1, -1), -1)[full], others
    if ids.from_list and len(full) == len(ids.sizes):
        return values, full
    if len(full) != n:
        expected = f"{len(ids.sizes)} bags; give one per bag" if ids.from_list else f"{n} rows; give each row its bag's label"
        raise HeadcountError(f"{len(full)} labels for {expected}")
    full, bag = full[ids.order], np.repeat(np.arange(len(ids.sizes)), ids.sizes)
    labels = np.full(len(ids.sizes), -1)
    np.maximum.at(labels, bag, full)
    if len(conflicts := np.flatnonzero((full >= 0) & (full != labels[bag]))):
        row, names = conflicts[0], values.tolist()  # the repr of numpy's values is np.int64(0)
        name, one, other = ids.names.tolist()[bag[row]], names[full[row]], names[labels[bag[row]]]
        raise HeadcountError(f"bag {name!r} has two labels, {one!r} and {other!r}; a bag has one")
    return values, labels


def _bag_votes(y: Any, ids: BagIds, n: int) -> tuple[np.ndarray, np.ndarray]:
    votes = np.asarray(to_numpy(y), np.float64)
    classes = np.asarray(y.columns) if hasattr(y, "columns") else np.arange(votes.shape[1])
    if ids.from_list and len(votes) == len(ids.sizes):
        return classes, votes
    if len(votes) != n:
        raise HeadcountError(f"y has {len(votes)} rows of votes for {n} rows of X; give one per row, or one per bag of a list")
    votes, first = votes[ids.order], np.cumsum(ids.sizes) - ids.sizes
    if len(odd := np.flatnonzero((votes != np.repeat(votes[first], ids.sizes, axis=0)).any(1))):
        bag = np.repeat(ids.names, ids.sizes).tolist()[odd[0]]
        raise HeadcountError(f"bag {bag!r} has rows with different votes; each row has those of its bag")
    return classes, votes[first]


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
    return validation.check_weights(weight, n).numpy()


def bag_weights(weight: Any, ids: BagIds, n: int) -> np.ndarray:
    """(B,) weights of bags, from one number per row (their mean counts) or per bag of a list."""
    if weight is None:
        return np.ones(len(ids.sizes))
    if ids.from_list and np.ndim(weight) == 1 and len(weight) == len(ids.sizes):
        return np.asarray(weight, np.float64)
    rows = np.asarray(check_weights(weight, ids, n))[ids.order]
    return np.bincount(np.repeat(np.arange(len(ids.sizes)), ids.sizes), rows) / ids.sizes


def class_weights(given: Any, classes: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """(C,) the weight of each class in a decision; ``prior``: how frequent the classes are."""
    if isinstance(given, str) and given == "balanced":
        return 1 / np.maximum(prior, 1e-6)
    names = classes.tolist()
    if not isinstance(given, dict | None) or (given and not set(given) <= set(names)):
        raise HeadcountError(f"class_weight is None, 'balanced', or a dict of weights by class ({names}), got {given!r}")
    return validation.check_weights([(given or {}).get(name, 1.0) for name in names], len(names)).numpy()


def check_method(name: str) -> None:
    """Refuse a name that is not one method, and methods that need more than bag labels."""
    if "," in name:
        problem = f"MajorityClassifier fits one method, got {name!r}; headcount.fit takes several"
        raise HeadcountError(f"{problem}; give auto or one of {', '.join(METHODS)}")
    reject_custom_head(name)
    check_choice("estimator", name, ["auto", *METHODS, *TRUSTED_HEADS])
    if name in {*HEADS, *TRUSTED_HEADS} and find_head(name).uses_instance_labels:
        raise HeadcountError(f"{name!r} learns from known instance classes, which read(..., known=) and headcount.fit take")

"""BagKFold: folds that split no bag, for scikit-learn's searches and ``cross_val_score``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn import get_config

from headcount.bags.splits import assign_group_folds
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.estimators.inputs import as_bag_list, bag_column, check_ids, pop_column
from headcount.readers.values import unify_unicode


class BagKFold:
    """Folds of whole bags, labels spread evenly: for scikit-learn's searches and ``cross_val_score``.

    ``bags``: ids, or the column of X that is the bag; a list of bags needs neither. ``groups`` are refused: a search hands
    them to the splitter only, and the estimator would see no bags. Ids given here stay here too, so that they are warned of:
    they are for a loop of one's own, or for scikit-learn's metadata routing, which hands them to the estimator as well.

    >>> BagKFold(3, bags="street")
    BagKFold(n_splits=3, bags='street', random_state=0)
    """

    def __init__(self, n_splits: int = 5, *, bags: Any = None, random_state: int = 0) -> None:
        if isinstance(n_splits, bool) or not isinstance(n_splits, (int, np.integer)) or n_splits < 2:
            raise HeadcountError(f"n_splits is a whole number from 2, got {n_splits!r}")
        self.n_splits, self.bags, self.random_state = n_splits, bags, random_state

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Row numbers (for a list: bag numbers) of training and test part."""
        ids = self._bag_ids(X, groups)
        _, first, bag = np.unique(ids, return_index=True, return_inverse=True)
        label = (
            np.zeros(len(bag), int) if y is None else np.unique(unify_unicode(np.asarray(y)), return_inverse=True)[1]
        )
        if len(label) != len(bag):
            raise HeadcountError(f"{len(bag)} rows have bags and {len(label)} have labels")
        fold = assign_group_folds(
            np.eye(label.max() + 1)[label[first]], np.arange(len(first)), self.n_splits, self.random_state
        )
        for k in range(self.n_splits):
            test = fold[bag] == k
            yield np.flatnonzero(~test), np.flatnonzero(test)

    def _bag_ids(self, X: Any, groups: Any) -> np.ndarray:
        """(n,) the bag of each row."""
        if as_bag_list(X) is not None:
            return np.arange(len(X))
        if self.bags is None:
            heard = "groups reach the splitter only, and the estimator would see no bags" if groups is not None else ""
            raise HeadcountError(
                f"{heard or 'BagKFold does not know the bags'}; give the column that is the bag to both, "
                "MajorityClassifier(bags=...) and BagKFold(bags=...), or a list of bags"
            )
        column = bag_column(self.bags)
        if column is None and not get_config().get("enable_metadata_routing", False):
            warnings.warn(
                "BagKFold keeps its ids to itself: in a search or cross_val_score the estimator takes every row for a bag. "
                "Give both the column that is the bag, or a list of bags, or switch on metadata routing (docs/how-to/estimator.md); in"
                " a loop of your own give fit and score bags=ids[rows]",
                HeadcountWarning,
                stacklevel=3,
            )
        ids = self.bags if column is None else pop_column(X, column)[1]
        return check_ids(ids, X.shape[0] if hasattr(X, "shape") else len(X))

    def __repr__(self) -> str:
        bags = repr(self.bags) if np.ndim(self.bags) == 0 else f"<{len(self.bags)} ids>"
        return f"BagKFold(n_splits={self.n_splits}, bags={bags}, random_state={self.random_state})"

"""What scikit-learn's searches need: BagKFold, folds that split no bag, and BagScorer, scores of whole bags."""

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import BaseEstimator
from sklearn.pipeline import Pipeline
from sklearn.utils.metadata_routing import UNUSED

from headcount.bags.splits import assign_group_folds
from headcount.errors import HeadcountError, HeadcountWarning, check_choice, check_number
from headcount.estimators.inputs import as_bag_list, bag_column, check_ids, pop_column
from headcount.estimators.targets import factorize_labels

METRICS = ("accuracy", "log_loss", "criterion")


class BagKFold:
    """Folds of whole bags with evenly spread labels, for scikit-learn's searches and ``cross_val_score``.

    Parameters
    ----------
    n_splits : int
        Number of folds.
    bags : str, int or array, optional
        The column of X that holds the bag, or the bag of each row; a list of bags needs neither. Ids given here do not reach the
        estimator, except by scikit-learn's metadata routing: a warning says so. ``groups`` are refused for the same reason.
    random_state : int
        Seed of the folds.

    Examples
    --------
    >>> bag = np.repeat(np.arange(4), 2)
    >>> table = np.column_stack([bag, np.zeros(8)])  # the first column holds the bag
    >>> [test.tolist() for _, test in BagKFold(2, bags=0).split(table, bag % 2)]
    [[0, 1, 6, 7], [2, 3, 4, 5]]
    """

    def __init__(self, n_splits: int = 5, *, bags: Any = None, random_state: int = 0) -> None:
        self.n_splits = check_number("n_splits", n_splits, 2, 1 << 24, integer=True)
        self.bags, self.random_state = bags, random_state

    def get_n_splits(self, X: Any = None, y: Any = None, groups: Any = None) -> int:
        return self.n_splits

    def split(self, X: Any, y: Any = None, groups: Any = None) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Row numbers (bag numbers, for a list of bags) of the training and the test part of each fold."""
        _, first, bag = np.unique(self._bag_ids(X, groups), return_index=True, return_inverse=True)
        label = np.zeros(len(bag), int) if y is None else factorize_labels(y)[1]
        if len(label) != len(bag):
            raise HeadcountError(f"{len(bag)} rows have bags and {len(label)} have labels")
        target = (label[first][:, None] == np.arange(label.max() + 1)).astype(float)
        fold = assign_group_folds(target, np.arange(len(first)), self.n_splits, self.random_state)
        for k in range(self.n_splits):
            test = fold[bag] == k
            yield np.flatnonzero(~test), np.flatnonzero(test)

    def _bag_ids(self, X: Any, groups: Any) -> np.ndarray:
        if as_bag_list(X) is not None:
            return np.arange(len(X))
        if self.bags is None:
            groups_only = "groups reach the splitter only, and the estimator would see no bags"
            problem = "BagKFold does not know the bags" if groups is None else groups_only
            both = "both MajorityClassifier(bags=...) and BagKFold(bags=...)"
            raise HeadcountError(f"{problem}; give the column that holds the bag to {both}, or give a list of bags")
        column = bag_column(self.bags)
        if column is None and not get_config().get("enable_metadata_routing", False):
            warnings.warn(
                "the ids of BagKFold do not reach the estimator, which makes every row a bag in a search or cross_val_score. Give "
                "both the column that holds the bag, or a list of bags, or enable metadata routing (docs/how-to/estimator.md); in "
                "your own loop give fit and score bags=ids[rows]",
                HeadcountWarning,
                stacklevel=3,
            )
        ids = self.bags if column is None else pop_column(X, column)[1]
        return check_ids(ids, X.shape[0] if hasattr(X, "shape") else len(X))

    def __repr__(self) -> str:
        bags = repr(self.bags) if np.ndim(self.bags) == 0 else f"<{len(self.bags)} ids>"
        return f"BagKFold(n_splits={self.n_splits}, bags={bags}, random_state={self.random_state})"


class BagScorer(BaseEstimator):
    """Scores of whole bags, for ``scoring=`` of scikit-learn's searches and ``cross_validate``; higher is better.

    scikit-learn's own scorers compare the predicted class of each instance with the label of its bag, which prefers models that
    repeat the bag's label; :class:`MajorityClassifier` refuses them in a search.

    Parameters
    ----------
    metric : {"accuracy", "log_loss", "criterion"}
        The fraction of bags whose label is predicted correctly (as ``MajorityClassifier.score``); the mean log-probability of the
        labels; or minus the criterion by which :func:`headcount.fit` chooses a method, which judges the predictions of instances
        by the labels of their bags.

    Examples
    --------
    >>> from headcount import MajorityClassifier
    >>> bags = [np.random.default_rng(b).normal(b % 2, 0.3, (5, 1)) for b in range(20)]
    >>> model = MajorityClassifier("logistic").fit(bags, [0, 1] * 10)
    >>> BagScorer("log_loss")(model, bags, [0, 1] * 10) > -0.1
    True
    """

    __metadata_request__score = {"estimator": UNUSED}  # noqa: RUF012  (what can be routed to the scorer: bags, sample_weight)

    def __init__(self, metric: str = "accuracy") -> None:
        self.metric = metric

    def score(self, estimator: Any, X: Any, y: Any, bags: Any = None, sample_weight: Any = None) -> float:
        """The score of a fitted MajorityClassifier, or of a Pipeline or search that ends in one."""
        estimator = getattr(estimator, "best_estimator_", estimator)
        if isinstance(estimator, Pipeline):
            X = estimator[:-1].transform(X) if len(estimator) > 1 else X
            estimator = estimator[-1]
        if not hasattr(estimator, "score_bags"):
            raise HeadcountError(f"BagScorer scores a MajorityClassifier, got {type(estimator).__name__}")
        return estimator.score_bags(X, y, bags, sample_weight, metric=check_choice("metric", self.metric, METRICS))

    __call__ = score  # scikit-learn calls a scorer, and reads from the signature of score what can be routed to it


def refuse_instance_scorers() -> None:
    """Called by ``predict``: one of scikit-learn's scorers would compare the answer with bag labels, and cannot tell us."""
    frame, modules = sys._getframe(1), set[str]()
    while frame is not None:
        modules.add(str(frame.f_globals.get("__name__")))
        frame = frame.f_back
    if "sklearn.metrics._scorer" not in modules:
        return
    problem = "a scorer of scikit-learn compares predictions for single instances with y"
    if any(name.startswith("sklearn.model_selection.") for name in modules):
        scorers = "scoring=headcount.BagScorer('accuracy'), 'log_loss' or 'criterion'"
        raise HeadcountError(f"{problem}, which here holds the labels of bags; leave it out (bag accuracy), or give {scorers}")
    message = f"{problem}: right if y holds the classes of the instances; the labels of bags need headcount.BagScorer"
    warnings.warn(message, HeadcountWarning, stacklevel=4)

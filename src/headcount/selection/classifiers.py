"""The scikit-learn classifiers that are methods of ``headcount fit``: a new one is a function and a line in CLASSIFIERS."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from headcount.readers.transforms import StandardScaler

MAX_FIT_INSTANCES = 50_000  # that a classifier is fitted to; more teach it little
N_TREES = 200  # more than usual: labels of bags are noisy labels of instances, and trees average the noise out
BOOSTING_TREES = 100
INSTANCES_PER_TREE = 10_000
EM_ROUNDS = 6
BOOSTING_ROUNDS = 50  # of small trees, in each round of EM


def random_forest(instances: int = 0) -> Any:
    """A random forest; if there are many instances, each tree sees a part of them."""
    from sklearn.ensemble import RandomForestClassifier

    part = INSTANCES_PER_TREE / max(1, min(instances, MAX_FIT_INSTANCES))
    limits = {"max_samples": part} if part < 1 else {}
    return RandomForestClassifier(N_TREES, min_samples_leaf=3, n_jobs=torch.get_num_threads(), **limits)


def boosting(instances: int = 0) -> Any:
    """Gradient boosting as scikit-learn has it."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(max_iter=min(BOOSTING_TREES, N_TREES))


def small_boosting(instances: int = 0) -> Any:
    """Gradient boosting with few and small trees, for it is fitted many times, and large ones learn the noise of the labels."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(
        max_iter=min(BOOSTING_ROUNDS, N_TREES), max_leaf_nodes=8, max_bins=64, early_stopping=False
    )


def logistic_regression(instances: int = 0) -> Any:
    """Logistic regression on standardised columns, with coefficients for the columns as they are."""
    from sklearn.linear_model import LogisticRegression

    class Logistic(LogisticRegression):
        def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Any:
            scaler = StandardScaler.fit(X, min_deviation=1e-9)
            super().fit(scaler.transform(X, np.float64), y, sample_weight)
            self.coef_ = self.coef_ / scaler.scale_
            self.intercept_ = self.intercept_ - self.coef_ @ scaler.mean_
            return self

    return Logistic(max_iter=300, tol=1e-3)


def vote_logistic(instances: int = 0) -> Any:
    """Logistic regression by the likelihood of the vote."""
    from headcount.training.vote_logistic import VoteLogistic

    return VoteLogistic()


# name: title, a function of the number of instances that makes the classifier, and whether it learns by EM
CLASSIFIERS = {
    "em_forest": ("EM, random forest", random_forest, True),
    "em_boosting": ("EM, gradient boosting", small_boosting, True),
    "forest": ("Random forest on the bag's label", random_forest, False),
    "boosting": ("Gradient boosting on the bag's label", boosting, False),
    "logistic": ("Logistic regression on the bag's label", logistic_regression, False),
    "vote_logistic": ("Logistic regression by the vote", vote_logistic, False),
}

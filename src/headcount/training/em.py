"""EM under the tilt: any scikit-learn classifier with ``predict_proba`` learns instances from majority labels.

    E  q(k | x, label)  ~  p(k | x) P(k | label) / P(k)     p from a copy of the classifier that never saw the instance's bag
    M  fit again: an instance stands once for every class it may be of, with that class's q as its weight
    T  one step of the tilt's own EM (majority/transition_em.py) on validation bags, begun low: the classifier must earn every bit of it

Cross-fitting by bags (by groups, where there are any) keeps a forest, which knows its own training set by heart, from
confirming itself. The folds are dealt anew in every round: with the same ones, what A's labels taught B would come back to A
two rounds later, and the tilt would come out too steep. The round is chosen on validation bags by their labels alone
(criterion.py). Known instance classes replace their q. A bag without a label says nothing here: a classifier learns nothing
from its own opinion. Same seed, same answer.

Letters: N instances, B bags, C classes, D features.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.bags.pool import to_feature_array
from headcount.bags.splits import assign_folds, count_groups
from headcount.errors import HeadcountError
from headcount.majority import transition as tilt
from headcount.majority import transition_em
from headcount.majority.criterion import fit_transition_loss
from headcount.models.trees import SklearnModel
from headcount.seeds import seed_for

MIN_PROBABILITY = 0.01  # a class less likely than that gets no copy
VALIDATION_FOLDS = 5  # one bag of so many chooses the round, where nobody gave validation bags
CROSS_FIT_FOLDS = 3  # of the cross-fitting
N_COPIES = 5  # of each instance, where a classifier takes no weights


@dataclass(frozen=True)
class EM:
    """What came out: a classifier fitted on all training bags, the tilt, and how the rounds went."""

    classifier: Any  # its classes_ are class numbers
    transition: tilt.Transition
    best_round: int  # the one kept, from 0: the bag's label taken as the instance's
    curve: list[float]  # the validation loss of each round


def em(
    classifier: Any,
    train: Bags,
    valid: Bags | None = None,
    *,
    rounds: int = 10,
    folds: int = CROSS_FIT_FOLDS,
    form: str = "full",
    patience: int = 3,
    seed: int = 0,
    on_progress: Callable[[int, float], None] | None = None,
) -> EM:
    """Fit copies of ``classifier`` (an unfitted one of scikit-learn) on blind bags.

    ``valid``: bags that choose the round and carry the tilt; None: a fifth of the training bags, or all of them, cross-fitted,
    where there are not five groups. ``rounds`` 0 is the baseline: the bag's label as the label of every instance.
    """
    check_classifier(classifier)
    if train.truth is not None or (valid is not None and valid.truth is not None):
        raise HeadcountError("these bags carry truth, and training must not see it; pass bags.blind()")
    train, valid = _apart(_telling(train), valid, seed)
    task = _Task(classifier, train, folds, seed)
    if rounds == 0 and valid is not None:
        return _believed(task, valid, form, on_progress)
    q, best, best_q = task.first(), EM(None, task.first_tilt(), 0, [math.inf]), task.first()
    now, curve = best.transition, list[float]()
    for number in range(rounds + 1):
        p, valid_p = task.cross_fitted(q, valid, number)
        judged, by = (p, train) if valid_p is None or valid is None else (valid_p, valid)
        now = _step(now, judged, by, form, train)
        curve.append(fit_transition_loss(judged, by, form)[0])
        if on_progress:
            on_progress(number, curve[-1])
        if number == 0 or curve[-1] < curve[best.best_round]:
            best, best_q = EM(None, now, number, curve), q
        if number - best.best_round >= patience or number == rounds:
            break
        q = task.posterior(p, now)
    return replace(best, classifier=task.fit(best_q, "all"), transition=_single(best.transition))


def _believed(task: _Task, valid: Bags, form: str, watch: Callable[[int, float], None] | None) -> EM:
    """Round 0 alone. Nobody's answer is learned from, so nothing is cross-fitted: one fit, judged on the validation bags."""
    fitted = task.fit(task.first(), "all")
    heard = torch.from_numpy(probabilities(fitted, features(valid), task.classes))
    now = _step(task.first_tilt(), heard, valid, form, task.train)
    loss, _ = fit_transition_loss(heard, valid, form)
    if watch:
        watch(0, loss)
    return EM(fitted, _single(now), 0, [loss])


def check_classifier(classifier: Any) -> None:
    if not all(hasattr(classifier, part) for part in ("fit", "get_params", "predict_proba")):
        raise HeadcountError(
            f"{classifier!r} has no fit or no predict_proba; give a scikit-learn classifier that says probabilities"
        )


def probabilities(classifier: Any, x: np.ndarray, classes: int) -> np.ndarray:
    """(n, D) -> (n, C)."""
    return SklearnModel(classifier, classes).predict_proba(x)


class _Task:
    """The training bags as scikit-learn wants them."""

    def __init__(self, classifier: Any, train: Bags, folds: int, seed: int) -> None:
        from sklearn.utils.validation import has_fit_parameter

        self.classifier, self.train, self.seed = classifier, train, seed
        self.folds, self.classes = min(folds, count_groups(train)), len(train.classes)
        self.segments = train.segments()
        self.x = features(train)
        self.rows = self.segments.broadcast(train.target.double())  # (N, C); the removed have zeros
        known = torch.full((len(self.x),), -1) if train.known is None else train.known
        self.known = known.masked_fill(self.segments.removed, -1)
        weight = torch.ones(len(self.x)) if train.weight is None else train.weight
        told = (self.rows.sum(1) > 0) | (self.known >= 0)
        self.weight = torch.where(told, weight, 0.0).double().masked_fill(self.segments.removed, 0)
        self.weighted = has_fit_parameter(classifier, "sample_weight")
        if not self.weighted and float(weight.amax()) > float(weight.amin()):
            raise HeadcountError(f"{type(classifier).__name__} takes no weights, and the instances have some")

    def first_tilt(self) -> tilt.Transition:
        guess = torch.tensor(transition_em.initial_share(_size(self.train), self.classes), dtype=torch.float64)
        labels = transition_em.label_prior_from_counts((self.rows * self.weight[:, None]).sum(0), self.train.counted)
        return tilt.Transition(tilt.mix_from_shares(guess, self.classes), labels)

    def first(self) -> Tensor:
        """(N, C) the bag's label as everybody's; what is known as it is known."""
        return self._told(self.rows.clone())

    def posterior(self, p: Tensor, now: tilt.Transition) -> Tensor:
        return self._told(tilt.posterior(p.clamp_min(1e-30).log(), self.rows, now.mix, now.label_prior))

    def _told(self, q: Tensor) -> Tensor:
        sure = self.known >= 0
        q[sure] = torch.eye(self.classes, dtype=q.dtype)[self.known[sure]]
        return q

    def cross_fitted(self, q: Tensor, valid: Bags | None, number: int) -> tuple[Tensor, Tensor | None]:
        """(N, C) what is said of each instance by who did not see its bag, and their mean on the validation bags."""
        p = np.empty((len(self.x), self.classes))
        x = None if valid is None else features(valid)
        fold = assign_folds(self.train, self.folds, seed_for(self.seed, "em folds", number))
        fold, heard = fold[self.train.bag.numpy()], []
        for k in range(self.folds):
            out = fold == k
            fitted = self.fit(q, number, k, among=~out if self.folds > 1 else None)
            p[out] = probabilities(fitted, self.x[out], self.classes)
            if x is not None:
                heard.append(probabilities(fitted, x, self.classes))
        return torch.from_numpy(p), torch.from_numpy(np.mean(heard, 0)) if heard else None

    def fit(self, q: Tensor, *purpose: Any, among: np.ndarray | None = None) -> Any:
        from sklearn.base import clone
        from sklearn.dummy import DummyClassifier

        fresh = clone(self.classifier)
        names = [n for n in fresh.get_params() if n == "random_state" or n.endswith("__random_state")]
        fresh.set_params(**{n: seed_for(self.seed, "em", n, *purpose) % (1 << 31) for n in names})
        weight = (q * self.weight[:, None]).numpy()
        if among is not None:
            weight = weight * among[:, None]
        if self.weighted:
            row, label = np.nonzero((weight > 0) & (q.numpy() >= MIN_PROBABILITY))
            how = {"sample_weight": weight[row, label]}
        else:
            row, label = _places(q.numpy(), weight.sum(1) > 0)
            how = {}
        if label.min() == label.max():  # a few bags of one label: many classifiers refuse to learn a single class
            fresh, how = DummyClassifier(), {}
        return fresh.fit(self.x[row], label, **how)


def _places(q: np.ndarray, here: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each instance stands COPIES times, its classes in proportion to q."""
    row = np.flatnonzero(here)
    ends = np.cumsum(q[row] / q[row].sum(1, keepdims=True), 1)
    at = (np.arange(N_COPIES) + 0.5) / N_COPIES
    label = (ends[:, None, :-1] < at[None, :, None]).sum(2)  # (n, COPIES)
    return np.repeat(row, N_COPIES), label.ravel()


def features(bags: Bags) -> np.ndarray:
    """(N, D) float32, or float64 where the pool kept it."""
    if bags.pool.kind != "features":
        raise HeadcountError("a scikit-learn classifier takes features, and these are pictures; use a network")
    return to_feature_array(bags.pool.take(bags.index))


def _size(bags: Bags) -> float:
    return transition_em.effective_bag_size(bags.segments(), bags.target)


def _single(found: tilt.Transition) -> tilt.Transition:
    return tilt.Transition(found.mix.float(), found.label_prior.float())


def _telling(bags: Bags) -> Bags:
    """The bags that have a label or a known class. The others teach nobody here, and a fold of them alone would be no fold."""
    told = bags.labelled
    if bags.known is not None:
        told = told | (torch.bincount(bags.bag[bags.known >= 0], minlength=len(bags)) > 0)
    if not bool(told.any()):
        raise HeadcountError(
            f"none of the {len(bags)} bags has a label or a known class; at least two labels are needed"
        )
    return bags if bool(told.all()) else bags.take(told)


def _apart(train: Bags, valid: Bags | None, seed: int) -> tuple[Bags, Bags | None]:
    if valid is not None and bool(valid.target.any()):
        return train, valid
    if valid is not None or count_groups(train) < VALIDATION_FOLDS:
        return train, None
    fold = assign_folds(train, VALIDATION_FOLDS, seed)
    learned, held = train.take(np.flatnonzero(fold > 0)), train.take(np.flatnonzero(fold == 0))
    enough = bool(held.target.any()) and int((learned.target.sum(0) > 0).sum()) == int((train.target.sum(0) > 0).sum())
    return (learned, held) if enough else (train, None)


def _step(now: tilt.Transition, p: Tensor, bags: Bags, form: str, train: Bags) -> tilt.Transition:
    """One step of the tilt's EM on these bags."""
    least = transition_em.min_majority_share(_size(train), len(train.classes), train.counted)
    heap = transition_em.e_step(
        p, transition_em.instance_targets(bags.segments(), bags.target), now.mix, now.label_prior
    )
    return tilt.Transition(
        transition_em.m_step(heap, bags.target.double().sum(0), form, least, train.counted), now.label_prior
    )

"""EM with a transition: any scikit-learn classifier with ``predict_proba`` learns instances from majority labels.

    E  q(k | x, label)  ~  p(k | x) P(k | label) / P(k)     p by a copy of the classifier that was not fitted on the bag
    M  fit again, to an instance once for every class it may be of, with that class's q as its weight
    T  one step of the transition's own EM (majority/transition.py) on validation bags, from a low initial share

Cross-fitting by bags (by groups, where there are any) keeps a forest, which memorises its training set, from confirming itself.
The folds are drawn anew in every round: otherwise what copy A's labels taught copy B would come back to A two rounds later, and
the estimated shares would be too high. The round is chosen on validation bags by their labels alone (majority/calibration.py).
Known instance classes replace their q. Bags without a label are left out: a classifier learns nothing from its own predictions.
Where labels are noised (majority/label_noise.py), the label in E is the winner's posterior by the votes of the bag's instances.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.bags.pool import to_feature_array
from headcount.bags.seeds import seed_for
from headcount.bags.splits import assign_folds, count_groups
from headcount.errors import HeadcountError
from headcount.majority import label_noise, transition
from headcount.majority.calibration import fit_transition_loss, fit_vote_loss
from headcount.majority.ragged_votes import election_log_probs
from headcount.majority.transition import Transition
from headcount.majority.vote_counts import posterior_given_votes
from headcount.models.trees import SklearnModel

MIN_PROBABILITY = 0.01  # a less probable class gets no copy of the instance
ROUND_TREES = 100  # of all copies of a forest in a round, at most; the last fit has all its trees
N_COPIES = 5  # of each instance, where a classifier takes no weights


@dataclass(frozen=True)
class EM:
    """A classifier fitted on all training bags, the transition, and the rounds."""

    classifier: Any  # its classes_ are class numbers
    transition: Transition
    best_round: int  # the round that was kept; in round 0 the label of the bag is that of its instances
    curve: list[float]  # the validation loss of each round


def em(
    classifier: Any, train: Bags, valid: Bags, *, rounds: int = 10, folds: int = 3, patience: int = 3, seed: int = 0,
    on_progress: Callable[[int, float], None] | None = None,
) -> EM:  # fmt: skip
    """Fit copies of an unfitted scikit-learn classifier on bags without truth. The bags ``valid`` choose the round and estimate the
    transition. ``rounds=0`` is the baseline: the bag's label for every instance."""
    check_classifier(classifier)
    if train.truth is not None or valid.truth is not None:
        raise HeadcountError("these bags carry truth, and training must not see it; pass bags.blind()")
    train = _informative_bags(train)
    task, valid_x = _Task(classifier, train, folds, seed), features(valid)
    # the label of a bag of one is that of its instance, unless that is a sample and its weight stands for others
    rounds = rounds if task.bag_size > 1 else 0
    current, q = task.initial_transition, task.with_known(task.rows.clone())
    # without rounds no prediction is learned from, so there is nothing to cross-fit
    fitted = None if rounds else task.fit(q, "all")
    best_round, best_q, best, curve = 0, q, current, list[float]()
    for i in range(rounds + 1):
        train_p, p = task.cross_fit(q, valid_x, i) if fitted is None else (q, torch.from_numpy(fitted.predict_proba(valid_x)))
        current = task.update(current, p, valid)
        # the criterion of methods without an instance temperature: that is found when the rounds are over
        curve.append(float((fit_transition_loss(p, valid)[0] + fit_vote_loss(p, valid)[0]).mean()))
        if on_progress:
            on_progress(i, curve[-1])
        if i == 0 or curve[-1] < curve[best_round]:
            best_round, best_q, best = i, q, current
        if i - best_round >= patience or i == rounds:
            break
        q = task.posterior(train_p, current)
    fitted = fitted or task.fit(best_q, "all")
    return EM(fitted.classifier, Transition(best.mix.float(), best.label_prior.float()), best_round, curve)


def check_classifier(classifier: Any) -> None:
    if not all(hasattr(classifier, part) for part in ("fit", "get_params", "predict_proba")):
        advice = "give a scikit-learn classifier with probabilities"
        raise HeadcountError(f"{classifier!r} has no fit or no predict_proba; {advice}")


class _Task:
    """The training bags as arrays for scikit-learn."""

    def __init__(self, classifier: Any, train: Bags, folds: int, seed: int) -> None:
        from sklearn.utils.validation import has_fit_parameter

        self.classifier, self.train, self.seed = classifier, train, seed
        self.folds, self.classes = min(folds, count_groups(train)), len(train.classes)
        segments = train.segments()
        self.bag_size = transition.effective_bag_size(segments, train.target)
        self.x = features(train)
        self.rows = segments.broadcast(train.target.double())  # (N, C); zeros for the removed
        known = torch.full((len(self.x),), -1) if train.known is None else train.known
        self.known = known.masked_fill(segments.removed, -1)
        weight = torch.ones(len(self.x)) if train.weight is None else train.weight
        supervised = (self.rows.sum(1) > 0) | (self.known >= 0)
        self.weight = torch.where(supervised, weight, 0.0).double().masked_fill(segments.removed, 0)
        share = torch.tensor(transition.initial_share(self.bag_size, self.classes), dtype=torch.float64)
        prior = transition.label_prior_from_counts((self.rows * self.weight[:, None]).sum(0), train.counted)
        self.noise = train.label_noise, train.counted
        prior = label_noise.winner_prior(prior, *self.noise)
        self.initial_transition = Transition(transition.mix_from_shares(share, self.classes), prior)
        self.takes_weights = has_fit_parameter(classifier, "sample_weight")
        if not self.takes_weights and float(weight.amax()) > float(weight.amin()):
            raise HeadcountError(f"{type(classifier).__name__} takes no weights, and the instances have some")

    def update(self, current: Transition, p: Tensor, valid: Bags) -> Transition:
        """One step of the transition's EM on validation bags."""
        min_share = transition.min_majority_share(self.bag_size, self.classes, self.train.counted)
        targets = transition.instance_targets(valid.segments(), valid.target)
        counts = transition.e_step(p, targets, current.mix, current.label_prior, *self.noise)
        mix = transition.m_step(counts, valid.target.double().sum(0), "full", min_share, self.train.counted)
        return Transition(mix, current.label_prior)

    def posterior(self, p: Tensor, current: Transition) -> Tensor:
        """(N, C) the class probabilities of instances given the label of their bag, or its votes where these were counted."""
        log_p, rows, segments = p.clamp_min(1e-30).log(), self.rows, self.train.segments()
        if self.noise[0]:  # the instances of a bag decide together whether its label is that of the winner
            elected = election_log_probs(log_p, segments, "auto", self.train.counted)
            rows = segments.broadcast(label_noise.winner_posterior(elected, self.train.target.double(), *self.noise))
        q = self.with_known(transition.posterior(log_p, rows, current.mix, current.label_prior))
        if self.train.votes is None:
            return q
        by_votes = posterior_given_votes(self.with_known(p.clone()), segments, self.train.votes, self.train.counted)
        return torch.where(by_votes.sum(1, keepdim=True) > 0, by_votes, q)

    def with_known(self, q: Tensor) -> Tensor:
        """(N, C) q, replaced by the known class where there is one."""
        known = self.known >= 0
        q[known] = torch.nn.functional.one_hot(self.known[known], self.classes).to(q.dtype)
        return q

    def cross_fit(self, q: Tensor, valid_x: np.ndarray, i: int) -> tuple[Tensor, Tensor]:
        """(N, C) out-of-fold predictions, and the mean of the copies' predictions for the validation bags."""
        p, valid_p = np.empty((len(self.x), self.classes)), []
        fold = assign_folds(self.train, self.folds, seed_for(self.seed, "em folds", i))[self.train.bag.numpy()]
        for k in range(self.folds):
            held_out = fold == k
            fitted = self.fit(q, i, k, among=~held_out if self.folds > 1 else None)
            p[held_out] = fitted.predict_proba(self.x[held_out])
            valid_p.append(fitted.predict_proba(valid_x))
        return torch.from_numpy(p), torch.from_numpy(np.mean(valid_p, 0))

    def fit(self, q: Tensor, *purpose: Any, among: np.ndarray | None = None) -> SklearnModel:
        from sklearn.base import clone
        from sklearn.dummy import DummyClassifier

        copy = clone(self.classifier)
        names = [n for n in copy.get_params() if n == "random_state" or n.endswith("__random_state")]
        copy.set_params(**{n: seed_for(self.seed, "em", n, *purpose) % (1 << 31) for n in names})
        weight, options = (q * self.weight[:, None]).numpy(), {}
        if among is not None:
            weight = weight * among[:, None]
            if "oob_score" in copy.get_params():  # a forest: the copies of a round together
                copy.set_params(n_estimators=-(-min(copy.n_estimators, ROUND_TREES) // self.folds))
        if self.takes_weights:
            row, label = np.nonzero((weight > 0) & (q.numpy() >= MIN_PROBABILITY))
            weight = weight[row, label]
            # weights of one change nothing in histogram boosting (in a forest they do), but its bins then take seconds
            if "max_bins" not in copy.get_params() or (weight != 1).any():
                options["sample_weight"] = weight
        else:
            row, label = _copies(q.numpy(), weight.sum(1) > 0)
        if label.min() == label.max():  # few bags of one label: many classifiers refuse a single class
            copy, options = DummyClassifier(), {}
        return SklearnModel(copy.fit(self.x[row], label, **options), self.classes)


def _copies(q: np.ndarray, present: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """N_COPIES of each present instance, their classes in proportion to q."""
    row = np.flatnonzero(present)
    ends = np.cumsum(q[row] / q[row].sum(1, keepdims=True), 1)
    at = (np.arange(N_COPIES) + 0.5) / N_COPIES
    label = (ends[:, None, :-1] < at[None, :, None]).sum(2)  # (n, N_COPIES)
    return np.repeat(row, N_COPIES), label.ravel()


def features(bags: Bags) -> np.ndarray:
    """(N, D) numbers of N instances; float32, or float64 where the pool has it."""
    if bags.pool.kind != "features":
        raise HeadcountError("a scikit-learn classifier takes features, and these are images; use a network")
    return to_feature_array(bags.pool.take(bags.index))


def _informative_bags(bags: Bags) -> Bags:
    """The bags that have a label or a known class; a fold of others alone would be no fold."""
    known = bags.bag[:0] if bags.known is None else bags.bag[bags.known >= 0]
    informative = bags.labelled | (torch.bincount(known, minlength=len(bags)) > 0)
    if not bool(informative.any()):
        raise HeadcountError(f"none of the {len(bags)} bags has a label or a known class; at least two labels are needed")
    return bags if bool(informative.all()) else bags.take(informative)

"""The one measure by which methods are compared: how well answers about held-out instances foretell the labels of their bags.

    loss(p)  =  witness + vote

    witness  min over tilts T and a temperature:  mean over instances of  -log sum_k p(k | x) T[k, label of its bag]
    vote     min over a temperature:              mean over bags of       -log P(label),  P(c) ~ (mean of p(c | x))^(1/t)

Both are log-likelihoods of the label a bag really has, in nats, and no instance's class is looked at. Each method's answers are
read through the few numbers that suit them best, fitted on the same held-out bags: so a method that says classes, one that
says labels, a timid and a bold one are read alike, and what remains is what they know. *Witness* alone is a proper score of
P(label | x), which an invertible tilt turns into P(y | x): every instance tells something, but in close elections very
little. *Vote* is the other way round: decisive where elections are close, and nought for everybody where all are landslides.
Measured on digits, wine and breast cancer as bags: benchmarks/tables.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from scipy import stats
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.majority import transition as tilt
from headcount.majority import transition_em
from headcount.models.fitted import apply_temperature, log_mean_shares

INSTANCE_TEMPERATURES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)
SIGNIFICANCE = 0.977  # how sure a gain must be to be no chance: two standard errors of many bags, more of few


@dataclass(frozen=True)
class CriterionResult:
    """The loss, its parts, and how the answers were read."""

    loss: float
    loss_per_bag: np.ndarray = field(
        repr=False
    )  # (b,) the loss of each labelled bag, so that methods can be compared bag by bag
    prior_loss_per_bag: np.ndarray = field(
        repr=False
    )  # (b,) the loss of one who knows only how often each label occurs
    instance_temperature: float  # under which the labels are explained best
    transition: tilt.Transition  # under that temperature: timid answers under none would make it look too steep
    bag_temperature: float


def evaluate_criterion(p: Tensor, bags: Bags, sample: tuple[Tensor, Bags] | None = None) -> CriterionResult:
    """Judge instance probabilities ``p`` (N, C) on bags their method never saw.

    ``witnesses``: which of the N are enough, where they are many, and the same bags with these alone (``thinned`` of
    bags/subsample.py). A vote is always that of the whole bag: two of its ten do not tell who won."""
    p = p.double().clamp_min(1e-12)
    rows, sampled_bags = (slice(None), bags) if sample is None else sample
    fits = {t: fit_transition_loss(apply_temperature(p[rows], t), sampled_bags) for t in INSTANCE_TEMPERATURES}
    best = min(INSTANCE_TEMPERATURES, key=lambda t: (round(fits[t][0], 9), abs(math.log(t))))
    witness_loss = instance_losses(apply_temperature(p[rows], best), sampled_bags, fits[best][1])
    log_p = log_mean_shares(p, bags.segments(), bags.counted)
    t = fit_bag_temperature(log_p, bags.target)
    vote_loss = bag_losses((log_p / t).log_softmax(1), bags.target)
    loss_per_bag = (witness_loss + vote_loss).numpy()
    return CriterionResult(
        float(loss_per_bag.mean()), loss_per_bag, prior_loss(bags.target).numpy(), best, fits[best][1], t
    )


def fit_transition_loss(p: Tensor, bags: Bags, form: str = "full") -> tuple[float, tilt.Transition]:
    """The witnesses' loss of ``p`` (N, C) as it is, and the tilt that suits it."""
    transition = transition_em.estimate_transition(p, bags.segments(), bags.target, form=form, counted=bags.counted)
    return float(instance_losses(p, bags, transition).mean()), transition


def instance_losses(p: Tensor, bags: Bags, transition: tilt.Transition) -> Tensor:
    """(b,) the mean loss of each labelled bag's instances."""
    return instance_label_losses(p.double().clamp_min(1e-30).log(), bags.segments(), bags.target, transition)


def instance_label_losses(log_p: Tensor, segments: Segments, target: Tensor, transition: tilt.Transition) -> Tensor:
    """(b,) -log P(label | x) from ``log_p`` (N, C), log P(y | x), averaged over the instances of each labelled bag."""
    each = -(
        segments.broadcast(target.double())
        * tilt.forward_correct(log_p, transition.mix.double(), transition.label_prior.double())
    ).sum(1)
    return segments.mean(each)[target.sum(1) > 0]


def bag_losses(log_p: Tensor, target: Tensor) -> Tensor:
    """(b,) -log P(label) of the labelled bags; nothing is believed to be impossible."""
    log_p = log_p.double().clamp_min(math.log(1e-12))
    return -(target.double() * log_p).sum(1)[target.sum(1) > 0]


def fit_bag_temperature(log_p: Tensor, target: Tensor) -> float:
    """What the bags' log-probabilities are best divided by: the least loss on a grid from a fiftieth to fifty."""
    grid = np.exp(np.linspace(math.log(0.02), math.log(50), 81)).tolist()
    return min(grid, key=lambda t: float(bag_losses((log_p.double() / t).log_softmax(1), target).mean()))


def prior_loss(target: Tensor) -> Tensor:
    """(b,) what each labelled bag costs somebody, in both parts, who knows nothing but how often each label occurs."""
    labelled = target.double()[target.sum(1) > 0]
    return 2 * bag_losses(labelled.mean(0).clamp_min(1e-12).log().expand_as(labelled), labelled)


def gain_over_prior(result: CriterionResult) -> tuple[float, float]:
    """Nats a bag by which held-out labels are explained better than by their frequencies, and the standard error over bags."""
    gains = result.prior_loss_per_bag - result.loss_per_bag
    return float(gains.mean()), standard_error(gains)


def is_significant(result: CriterionResult) -> bool:
    """Whether held-out labels are surely foretold better than by chance."""
    mean_gain, error = gain_over_prior(result)
    return mean_gain >= float(stats.t.ppf(SIGNIFICANCE, max(1, len(result.loss_per_bag) - 1))) * error


def standard_error(x: np.ndarray) -> float:
    """The standard error of a mean."""
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.inf

"""The criterion by which methods are compared: how well predictions for held-out instances explain the labels of their bags.

::

    loss(p)  =  instance loss + vote loss

    instance loss   min over transitions T and a temperature:  mean over instances of  -log sum_k p(k | x) T[k, bag's label]
    vote loss       min over a temperature:                    mean over bags of       -log P(label),
                                                               P(c) ~ (mean of p(c | x))^(1/t)

Both are log-likelihoods, in nats, of the labels of held-out bags; no instance's class is used. T and the temperatures are fitted
for each method, so that methods which predict classes or bag labels, overconfident or underconfident, are compared by what they
know. The instance loss is a proper score of P(label | x), which an invertible T turns into P(y | x): it uses every instance, but
distinguishes little in close elections. The vote loss is decisive there, and zero for every method where all are landslides.
Measured on digits, wine and breast cancer as bags: benchmarks/tables.py. (N instances, B bags, C classes; b labelled bags.)
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy import stats
from torch import Tensor

from headcount.bags import Bags
from headcount.majority.calibration import (
    apply_temperature,
    bag_losses,
    fit_bag_temperature,
    fit_temperature,
    log_mean_shares,
    standard_error,
)
from headcount.majority.transition import Transition, instance_label_losses
from headcount.majority.transition_em import estimate_transition

INSTANCE_TEMPERATURES = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)
SIGNIFICANCE = 0.977  # one-sided: two standard errors for many bags, more for few


@dataclass(frozen=True)
class CriterionResult:
    """The loss, its parts by bag, and what was fitted."""

    loss: float
    loss_per_bag: np.ndarray = field(repr=False)  # (b,)
    prior_loss_per_bag: np.ndarray = field(repr=False)  # (b,) the loss of predicting the label frequencies
    instance_temperature: float
    transition: Transition  # under that temperature: without one, underconfident predictions make it too steep
    bag_temperature: float


def evaluate_criterion(p: Tensor, bags: Bags, sample: tuple[Tensor, Bags] | None = None) -> CriterionResult:
    """Evaluate instance probabilities ``p`` (N, C) on bags that their method was not trained on.

    ``sample`` limits the instance loss where instances are many: some of the N rows, and the bags of these rows alone
    (``sample_rows`` and ``subsample_instances`` of bags/splits.py). The vote loss always takes whole bags.
    """
    p = p.double().clamp_min(1e-12)
    rows, sampled_bags = (slice(None), bags) if sample is None else sample
    fits: dict[float, tuple[Tensor, Transition]] = {}

    def losses_at(temperature: float) -> Tensor:
        fits[temperature] = _fit_transition(apply_temperature(p[rows], temperature), sampled_bags)
        return fits[temperature][0]

    instance_temperature = fit_temperature(losses_at, INSTANCE_TEMPERATURES, tolerance=lambda excess: 5e-10)
    instance_loss, transition = fits[instance_temperature]
    log_p = log_mean_shares(p, bags.segments(), bags.counted)
    bag_temperature = fit_bag_temperature(log_p, bags.target)
    vote_loss = bag_losses((log_p / bag_temperature).log_softmax(1), bags.target)
    loss = (instance_loss + vote_loss).numpy()
    return CriterionResult(
        loss=float(loss.mean()),
        loss_per_bag=loss,
        prior_loss_per_bag=prior_loss(bags.target).numpy(),
        instance_temperature=instance_temperature,
        transition=transition,
        bag_temperature=bag_temperature,
    )


def fit_transition_loss(p: Tensor, bags: Bags, form: str = "full") -> tuple[float, Transition]:
    """The mean instance loss of ``p`` (N, C) under the transition that suits it best, and that transition."""
    losses, transition = _fit_transition(p, bags, form)
    return float(losses.mean()), transition


def _fit_transition(p: Tensor, bags: Bags, form: str = "full") -> tuple[Tensor, Transition]:
    transition = estimate_transition(p, bags.segments(), bags.target, form=form, counted=bags.counted)
    return instance_losses(p, bags, transition), transition


def instance_losses(p: Tensor, bags: Bags, transition: Transition) -> Tensor:
    """(b,) the mean loss of each labelled bag's instances, from P(y | x) (N, C)."""
    return instance_label_losses(p.double().clamp_min(1e-30).log(), bags.segments(), bags.target, transition)


def prior_loss(target: Tensor) -> Tensor:
    """(b,) the loss, both parts, of predicting how frequent each label is."""
    labelled = target.double()[target.sum(1) > 0]
    return 2 * bag_losses(labelled.mean(0).clamp_min(1e-12).log().expand_as(labelled), labelled)


def gain_over_prior(result: CriterionResult) -> tuple[float, float]:
    """By how many nats a bag held-out labels are explained better than by their frequencies, and its standard error."""
    gains = result.prior_loss_per_bag - result.loss_per_bag
    return float(gains.mean()), standard_error(gains)


def is_significant(result: CriterionResult) -> bool:
    """Whether held-out labels are explained significantly better than by their frequencies."""
    gain, error = gain_over_prior(result)
    return gain >= float(stats.t.ppf(SIGNIFICANCE, max(1, len(result.loss_per_bag) - 1))) * error

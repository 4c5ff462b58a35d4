"""Bag context at prediction: calibrated probabilities, an instance seen with its bag, shares of single bags with intervals.

All of it is learned from validation bags and their labels; no instance's truth is looked at:

    temperature  makes the probabilities fit the bags' labels, the tilt estimated anew for each candidate
    alike        how alike bags are, by how much one half of a bag tells of the other
    helps        whether an instance's bag should be listened to: off unless the halves tell of each other for certain,
                 and the bags' labels are explained no worse with the context than without: errors that a bag's
                 instances have in common look like shares, but not to the labels

The mathematics is in majority/transition.py, majority/transition_em.py and majority/proportions.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.errors import HeadcountError
from headcount.majority.criterion import instance_label_losses
from headcount.majority.proportions import (
    Proportions,
    estimate_proportions,
    fit_concentration,
    posterior_in_context,
    prior_means,
)
from headcount.majority.ragged_votes import election_log_probs
from headcount.majority.transition import Transition
from headcount.majority.transition_em import estimate_transition
from headcount.seeds import make_generator

TEMPERATURES = tuple(2 ** (e / 4) for e in range(-4, 9))  # candidates for the temperature, 1/2 to 4
MIN_STANDARD_ERRORS = 2.0  # standard errors that make a difference


@dataclass(frozen=True)
class ContextAssessment:
    """What instances tell of the others in their bag."""

    concentration: float  # how alike bags are whose label is not known
    gain: float  # nats per bag that halves tell of each other
    gain_error: float  # its standard error
    bag_loss: float  # -log P(the label wins) of the bags, votes of instances alone
    bag_loss_in_context: float
    bag_loss_error: float  # the standard error of their difference

    @property
    def helps(self) -> bool:
        """Whether the context is to be used."""
        worse = self.bag_loss_in_context - self.bag_loss
        return self.gain > MIN_STANDARD_ERRORS * self.gain_error and worse <= MIN_STANDARD_ERRORS * self.bag_loss_error


@dataclass(frozen=True)
class Calibration:
    """What validation bags taught about answering."""

    transition: Transition
    temperature: float
    concentration_labelled: float  # how alike bags of one label are
    assessment: ContextAssessment

    @property
    def concentration(self) -> float:
        return self.assessment.concentration

    @property
    def helps(self) -> bool:
        return self.assessment.helps


def fit_calibration(logits: Tensor, valid: Bags, *, form: str = "full") -> Calibration:
    """From what a model said (N, C) of validation bags, and their labels."""
    if len(logits) != len(valid.index) or logits.shape[1] != len(valid.classes):
        raise HeadcountError(
            f"{len(valid.index)} instances of {len(valid.classes)} classes need as many logits, got {tuple(logits.shape)}"
        )
    z, where = logits.double(), logits.device
    segments, target = valid.segments().to(where), valid.target.double().to(where)
    counted = None if valid.counted is None else valid.counted.to(where)
    temperature = fit_instance_temperature(z, segments, target, form=form, counted=counted)
    log_p = (z / temperature).log_softmax(1)
    transition = estimate_transition(log_p.exp(), segments, target, form=form, counted=counted)
    concentration_labelled, _ = fit_concentration(
        log_p, segments, prior_means(transition, target), transition.prior.double()
    )
    return Calibration(
        transition,
        temperature,
        concentration_labelled,
        assess_context(log_p, segments, target, transition.prior.double(), counted),
    )


def assess_context(
    log_p: Tensor, segments: Segments, target: Tensor, prior: Tensor, counted: Tensor | None = None
) -> ContextAssessment:
    """From log P(y | x) (N, C) of instances alone, in bags they were not learned from."""
    concentration, gain = fit_concentration(log_p, segments, prior.expand(segments.n_bags, -1), prior)
    labelled = target.sum(1) > 0
    loss_alone, loss_in_context = (
        _bag_loss(votes, segments, target, counted)[labelled]
        for votes in (log_p, posterior_in_context(log_p, segments, prior, concentration))
    )
    return ContextAssessment(
        *(concentration, float(gain.mean()), _error(gain)),
        *(float(loss_alone.mean()), float(loss_in_context.mean()), _error(loss_in_context - loss_alone)),
    )


def fit_instance_temperature(
    logits: Tensor, segments: Segments, target: Tensor, *, form: str = "full", counted: Tensor | None = None
) -> float:
    """What to divide the logits by, so that they explain the bags' labels: the forward-corrected loss, with the tilt estimated
    anew for each candidate. Of those that explain them as well as the best, within one standard error over bags, the one
    nearest to 1: where classes hardly overlap the labels say little of it."""
    losses = []
    for candidate in TEMPERATURES:
        log_p = (logits.double() / candidate).log_softmax(1)
        transition = estimate_transition(log_p.exp(), segments, target, form=form, counted=counted, max_iterations=50)
        losses.append(instance_label_losses(log_p, segments, target, transition))
    best = min(losses, key=lambda loss: float(loss.mean()))
    eligible = [
        h for h, loss in zip(TEMPERATURES, losses, strict=True) if float((loss - best).mean()) <= _error(loss - best)
    ]
    return min(eligible, key=lambda h: abs(math.log(h)))


def calibrated_probabilities(
    calibration: Calibration, logits: Tensor, bags: Bags, *, use_context: bool | None = None
) -> Tensor:
    """(N, C) calibrated probabilities of instances seen with their bags; labels of the bags are not used. ``listen``: to the
    bag; the default is what the check decided."""
    log_p = (logits.double() / calibration.temperature).log_softmax(1)
    if not (calibration.helps if use_context is None else use_context):
        return log_p.exp().float()
    return (
        posterior_in_context(
            log_p, bags.segments().to(logits.device), calibration.transition.prior.double(), calibration.concentration
        )
        .exp()
        .float()
    )


def calibrated_proportions(
    calibration: Calibration, logits: Tensor, bags: Bags, *, use_labels: bool = True, level: float = 0.9, seed: int = 0
) -> Proportions:
    """Shares of each bag with intervals; a bag's label, where it has one and may be used, makes them sharper. They are drawn on
    the processor, whatever device said the logits."""
    bags = bags.to("cpu")
    log_p = (logits.cpu().double() / calibration.temperature).log_softmax(1)
    target = bags.target if use_labels else torch.zeros_like(bags.target)
    labelled = target.sum(1) > 0
    concentration = torch.where(labelled, calibration.concentration_labelled, calibration.concentration)[:, None]
    generator = make_generator(seed, "census")
    return estimate_proportions(
        log_p,
        bags.segments(),
        target,
        calibration.transition,
        concentration,
        generator,
        counted=bags.counted,
        level=level,
    )


def _bag_loss(votes: Tensor, segments: Segments, target: Tensor, counted: Tensor | None) -> Tensor:
    """(B,) -log P(the label wins), if every instance votes by lot."""
    won = election_log_probs(votes, segments, "auto", counted)
    won = won if counted is None else won.masked_fill(~counted, -torch.inf)
    return -torch.where(target > 0, target * won.log_softmax(1), 0.0).sum(1)


def _error(x: Tensor) -> float:
    return float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.inf

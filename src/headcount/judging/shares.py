"""Bag context at prediction: calibrated probabilities, an instance seen with its bag, shares of single bags with intervals.

All of it is learned from validation bags and their labels; no instance's truth is looked at:

    temperature  makes the probabilities fit the bags' labels, the tilt estimated anew for each candidate
    alike        how alike bags are, by how much one half of a bag tells of the other
    helps        whether an instance's bag should be listened to: off unless the halves tell of each other for certain,
                 and the bags' labels are explained no worse with the context than without: errors that a bag's
                 instances have in common look like shares, but not to the labels

The mathematics is in bags/tilt.py, bags/steepness.py and bags/census.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.bags.census import Census, census, centres, heard, how_alike
from headcount.bags.steepness import estimate
from headcount.bags.tilt import Tilt
from headcount.errors import HeadcountError
from headcount.models.heads.election import scores
from headcount.training.criterion import witness_losses
from headcount.training.seeds import generator

HEATS = tuple(2 ** (e / 4) for e in range(-4, 9))  # candidates for the temperature, 1/2 to 4
SURE = 2.0  # standard errors that make a difference


@dataclass(frozen=True)
class Overheard:
    """What instances tell of the others in their bag."""

    alike: float  # how alike bags are whose label is not known
    gain: float  # nats per bag that halves tell of each other
    gain_error: float  # its standard error
    bag_loss: float  # -log P(the label wins) of the bags, votes of instances alone
    bag_loss_in_context: float
    bag_loss_error: float  # the standard error of their difference

    @property
    def helps(self) -> bool:
        """Whether the context is to be used."""
        worse = self.bag_loss_in_context - self.bag_loss
        return self.gain > SURE * self.gain_error and worse <= SURE * self.bag_loss_error


@dataclass(frozen=True)
class Context:
    """What validation bags taught about answering."""

    tilt: Tilt
    temperature: float
    alike_labelled: float  # how alike bags of one label are
    overheard: Overheard

    @property
    def alike(self) -> float:
        return self.overheard.alike

    @property
    def helps(self) -> bool:
        return self.overheard.helps


def learn_context(logits: Tensor, valid: Bags, *, form: str = "full") -> Context:
    """From what a model said (N, C) of validation bags, and their labels."""
    if len(logits) != len(valid.index) or logits.shape[1] != len(valid.classes):
        raise HeadcountError(
            f"{len(valid.index)} instances of {len(valid.classes)} classes need as many logits, got {tuple(logits.shape)}"
        )
    z, where = logits.double(), logits.device
    segments, target = valid.segments().to(where), valid.target.double().to(where)
    counted = None if valid.counted is None else valid.counted.to(where)
    heat = temperature(z, segments, target, form=form, counted=counted)
    log_p = (z / heat).log_softmax(1)
    tilt = estimate(log_p.exp(), segments, target, form=form, counted=counted)
    labelled, _ = how_alike(log_p, segments, centres(tilt, target), tilt.prior.double())
    return Context(tilt, heat, labelled, overheard(log_p, segments, target, tilt.prior.double(), counted))


def overheard(
    log_p: Tensor, segments: Segments, target: Tensor, prior: Tensor, counted: Tensor | None = None
) -> Overheard:
    """From log P(y | x) (N, C) of instances alone, in bags they were not learned from."""
    alike, gain = how_alike(log_p, segments, prior.expand(segments.bags, -1), prior)
    told = target.sum(1) > 0
    alone, joined = (
        _bag_loss(votes, segments, target, counted)[told] for votes in (log_p, heard(log_p, segments, prior, alike))
    )
    return Overheard(
        *(alike, float(gain.mean()), _error(gain)),
        *(float(alone.mean()), float(joined.mean()), _error(joined - alone)),
    )


def temperature(
    logits: Tensor, segments: Segments, target: Tensor, *, form: str = "full", counted: Tensor | None = None
) -> float:
    """What to divide the logits by, so that they explain the bags' labels: the forward-corrected loss, with the tilt estimated
    anew for each candidate. Of those that explain them as well as the best, within one standard error over bags, the one
    nearest to 1: where classes hardly overlap the labels say little of it."""
    losses = []
    for heat in HEATS:
        log_p = (logits.double() / heat).log_softmax(1)
        tilt = estimate(log_p.exp(), segments, target, form=form, counted=counted, rounds=50)
        losses.append(witness_losses(log_p, segments, target, tilt))
    best = min(losses, key=lambda loss: float(loss.mean()))
    fair = [h for h, loss in zip(HEATS, losses, strict=True) if float((loss - best).mean()) <= _error(loss - best)]
    return min(fair, key=lambda h: abs(math.log(h)))


def answer(context: Context, logits: Tensor, bags: Bags, *, listen: bool | None = None) -> Tensor:
    """(N, C) calibrated probabilities of instances seen with their bags; labels of the bags are not used. ``listen``: to the
    bag; the default is what the check decided."""
    log_p = (logits.double() / context.temperature).log_softmax(1)
    if not (context.helps if listen is None else listen):
        return log_p.exp().float()
    return heard(log_p, bags.segments().to(logits.device), context.tilt.prior.double(), context.alike).exp().float()


def count(
    context: Context, logits: Tensor, bags: Bags, *, use_labels: bool = True, level: float = 0.9, seed: int = 0
) -> Census:
    """Shares of each bag with intervals; a bag's label, where it has one and may be used, makes them sharper. They are drawn on
    the processor, whatever device said the logits."""
    bags = bags.to("cpu")
    log_p = (logits.cpu().double() / context.temperature).log_softmax(1)
    target = bags.target if use_labels else torch.zeros_like(bags.target)
    told = target.sum(1) > 0
    alike = torch.where(told, context.alike_labelled, context.alike)[:, None]
    lot = generator(seed, "census")
    return census(log_p, bags.segments(), target, context.tilt, alike, lot, counted=bags.counted, level=level)


def _bag_loss(votes: Tensor, segments: Segments, target: Tensor, counted: Tensor | None) -> Tensor:
    """(B,) -log P(the label wins), if every instance votes by lot."""
    won = scores(votes, segments, "auto", counted)
    won = won if counted is None else won.masked_fill(~counted, -torch.inf)
    return -torch.where(target > 0, target * won.log_softmax(1), 0.0).sum(1)


def _error(x: Tensor) -> float:
    return float(x.std() / math.sqrt(len(x))) if len(x) > 1 else math.inf

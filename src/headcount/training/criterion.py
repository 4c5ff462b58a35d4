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

from headcount.bags import Bags, Segments, steepness, tilt
from headcount.models.fitted import log_shares, tempered

GRID = (0.05, 0.1, 0.2, 0.4, 0.7, 1.0, 1.5, 2.5)
CLEAR = 0.977  # how sure a gain must be to be no chance: two standard errors of many bags, more of few


@dataclass(frozen=True)
class Judgement:
    """The loss, its parts, and how the answers were read."""

    loss: float
    each: np.ndarray = field(
        repr=False
    )  # (b,) the loss of each labelled bag, so that methods can be compared bag by bag
    chance: np.ndarray = field(repr=False)  # (b,) the loss of one who knows only how often each label occurs
    instance_temperature: float  # under which the labels are explained best
    tilt: tilt.Tilt  # under that temperature: timid answers under none would make it look too steep
    bag_temperature: float


def judge(p: Tensor, bags: Bags, witnesses: tuple[Tensor, Bags] | None = None) -> Judgement:
    """Judge instance probabilities ``p`` (N, C) on bags their method never saw.

    ``witnesses``: which of the N are enough, where they are many, and the same bags with these alone (``thinned`` of
    judging/fewer.py). A vote is always that of the whole bag: two of its ten do not tell who won."""
    p = p.double().clamp_min(1e-12)
    rows, few = (slice(None), bags) if witnesses is None else witnesses
    found = {t: label_loss(tempered(p[rows], t), few) for t in GRID}
    best = min(GRID, key=lambda t: (round(found[t][0], 9), abs(math.log(t))))
    witness = instance_losses(tempered(p[rows], best), few, found[best][1])
    log_p = log_shares(p, bags.segments(), bags.counted)
    t = best_temperature(log_p, bags.target)
    vote = bag_losses((log_p / t).log_softmax(1), bags.target)
    each = (witness + vote).numpy()
    return Judgement(float(each.mean()), each, by_chance(bags.target).numpy(), best, found[best][1], t)


def label_loss(p: Tensor, bags: Bags, form: str = "full") -> tuple[float, tilt.Tilt]:
    """The witnesses' loss of ``p`` (N, C) as it is, and the tilt that suits it."""
    found = steepness.estimate(p, bags.segments(), bags.target, form=form, counted=bags.counted)
    return float(instance_losses(p, bags, found).mean()), found


def instance_losses(p: Tensor, bags: Bags, found: tilt.Tilt) -> Tensor:
    """(b,) the mean loss of each labelled bag's instances."""
    return witness_losses(p.double().clamp_min(1e-30).log(), bags.segments(), bags.target, found)


def witness_losses(log_p: Tensor, segments: Segments, target: Tensor, found: tilt.Tilt) -> Tensor:
    """(b,) -log P(label | x) from ``log_p`` (N, C), log P(y | x), averaged over the instances of each labelled bag."""
    each = -(segments.spread(target.double()) * tilt.tilted(log_p, found.mix.double(), found.labels.double())).sum(1)
    return segments.mean(each)[target.sum(1) > 0]


def bag_losses(log_p: Tensor, target: Tensor) -> Tensor:
    """(b,) -log P(label) of the labelled bags; nothing is believed to be impossible."""
    log_p = log_p.double().clamp_min(math.log(1e-12))
    return -(target.double() * log_p).sum(1)[target.sum(1) > 0]


def best_temperature(log_p: Tensor, target: Tensor) -> float:
    """What the bags' log-probabilities are best divided by: the least loss on a grid from a fiftieth to fifty."""
    grid = np.exp(np.linspace(math.log(0.02), math.log(50), 81)).tolist()
    return min(grid, key=lambda t: float(bag_losses((log_p.double() / t).log_softmax(1), target).mean()))


def by_chance(target: Tensor) -> Tensor:
    """(b,) what each labelled bag costs somebody, in both parts, who knows nothing but how often each label occurs."""
    told = target.double()[target.sum(1) > 0]
    return 2 * bag_losses(told.mean(0).clamp_min(1e-12).log().expand_as(told), told)


def gain(found: Judgement) -> tuple[float, float]:
    """Nats a bag by which held-out labels are explained better than by their frequencies, and the standard error over bags."""
    won = found.chance - found.each
    return float(won.mean()), error_of(won)


def clear(found: Judgement) -> bool:
    """Whether held-out labels are surely foretold better than by chance."""
    told, error = gain(found)
    return told >= float(stats.t.ppf(CLEAR, max(1, len(found.each) - 1))) * error


def error_of(x: np.ndarray) -> float:
    """The standard error of a mean."""
    return float(x.std(ddof=1) / math.sqrt(len(x))) if len(x) > 1 else math.inf

"""Prospects: what bags let one expect of learning instances from their labels, before any training. Truth is never needed.

    shares      P(y = c | label = c), read from a quick look's answers (quick.py) at every temperature that explains held-out
                labels about as well as the best one: a steeper tilt with a more doubtful classifier is as good an explanation
                (docs/theory.md, section 4), so this ridge, not the noise alone, is the uncertainty. With votes they are known
    conditions  how far T is from not being invertible (sections 1 to 3, and 5 where a class never wins)
    accuracy    two witnesses of the quick look's error: its own doubt (1 - confidence, at those temperatures) sees classes
                that overlap; the dispute between regressions of other bags sees that bags are few (two fits that err by
                chance disagree about as often as one of them errs). The lower end believes the worse of the two, the upper
                end the least doubt, and that a training may settle most of the dispute; benchmarks/check.py measures how
                often that holds
    bags        by section 3 the error goes as 1 / (pull sqrt(bags)): a bag is worth its pull squared

Letters: N instances, B bags, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, steepness, tilt
from headcount.judging.coverage import won_shares
from headcount.judging.quick import Look
from headcount.models.fitted import tempered
from headcount.training.criterion import GRID, clear, error_of, gain, instance_losses, label_loss
from headcount.training.seeds import seed_for

SURE = 1.645  # standard errors: intervals are of 90 %
DRAWS = 24
# measured by benchmarks/check.py
WORSE, SLACK, SETTLED = 1.5, 0.06, 3.0  # how the range is widened; a training settles at most so much of the dispute
ENOUGH = 4.0  # bags of a class, were its majorities whole


# -- the matrix ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """How well T can be inverted, among the classes that win bags."""

    smallest: float  # singular value
    condition: float  # the largest over the smallest
    amplification: float  # of the error of P(label | x), at most: equation (2) of docs/theory.md
    pair: tuple[int, int]  # the two classes whose labels lean most alike
    apart: float  # total variation between their rows of T, from 0 (nothing tells them apart) to 1
    whole: bool  # whether every class wins somewhere; if not, T as a whole is singular (section 5)


def conditions(found: tilt.Tilt, wins: np.ndarray) -> Conditions:
    """Of a tilt, given (C,) which classes win bags. At least two do.

    >>> even = tilt.Tilt(tilt.mix_of(0.6, 3), torch.ones(3) / 3)
    >>> said = conditions(even, np.array([True, True, True]))
    >>> round(said.smallest, 3), round(said.condition, 3), round(said.apart, 3)
    (0.4, 2.5, 0.4)
    """
    here = np.flatnonzero(wins)
    matrix = found.matrix.double().numpy()[np.ix_(here, here)]
    matrix = matrix / matrix.sum(1, keepdims=True)
    values = np.linalg.svd(matrix, compute_uv=False)
    singular = values[-1] < 1e-9
    amplification = math.inf if singular else float(np.abs(np.linalg.inv(matrix.T)).sum(0).max())
    rows = np.abs(matrix[:, None] - matrix[None]).sum(2) / 2 + 2 * np.eye(len(here))
    i, j = sorted(np.unravel_index(int(rows.argmin()), rows.shape))
    return Conditions(
        float(values[-1]), math.inf if singular else float(values[0] / values[-1]), amplification,
        (int(here[i]), int(here[j])), float(rows[i, j]), bool(wins.all()),
    )  # fmt: skip


def confused(p: Tensor) -> tuple[tuple[int, int], float]:
    """The two classes that answers (N, C) take for each other most, and the share of all instances that is in doubt so."""
    both = (p.double().T @ p.double() / len(p)).fill_diagonal_(0)
    i, j = sorted(divmod(int(both.argmax()), len(both)))
    return (i, j), float(2 * both[i, j])


# -- shares -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """How a quick look's answers, read at one temperature, explain held-out labels."""

    tilt: tilt.Tilt
    confidence: float  # mean of the largest probability: the accuracy, if the probabilities are right
    behind: float  # nats by which it explains held-out labels worse than the best
    error: float  # the standard error of that, over bags


def explanations(look: Look, bags: Bags, known: tilt.Tilt | None = None) -> list[Explanation]:
    """The answers at every temperature that explains held-out labels as well as the best one, within chance."""
    p, weight = look.p.clamp_min(1e-12), bags.segments().weight
    found = []
    for heat in GRID:
        q = tempered(p, heat)
        own = known or label_loss(q, bags)[1]
        sure = q.max(1).values
        sure = float(sure.mean() if weight is None else (sure * weight).sum() / weight.sum())
        found.append((own, sure, instance_losses(q, bags, own).numpy()))
    best = min((losses for _, _, losses in found), key=lambda losses: losses.mean())
    rows = [Explanation(own, sure, float((e - best).mean()), error_of(e - best)) for own, sure, e in found]
    return sorted((r for r in rows if r.behind <= SURE * r.error + 1e-12), key=lambda r: r.behind)


def from_votes(bags: Bags) -> tilt.Tilt:
    """The tilt of bags whose votes are the shares of their instances: counted, not estimated.

    A label drawn from a bag's votes is what the instance loss sees: mix[c] is the mean of the shares, weighed by those of c.
    """
    share, size = bags.target.double(), bags.segments().total().double()
    heap = share.T @ (share * size[:, None])
    labels = heap.sum(1)
    mix = (heap + 1e-9) / (heap + 1e-9).sum(1, keepdim=True)
    return tilt.Tilt(mix.float(), (labels / labels.sum()).float())


def heard(bags: Bags) -> Bags:
    """Bags with votes as one knows them who hears of the winners alone. Where instances resemble their neighbours, answers far
    too sure of themselves explain known shares best; shares that are open as well do not lead astray so far."""
    share = bags.target
    won = (share >= share.amax(1, keepdim=True) - 1e-6) & bags.labelled[:, None]
    return replace(bags, target=won.to(share.dtype) / won.sum(1, keepdim=True).clamp_min(1))


def share_errors(look: Look, bags: Bags, start: tilt.Tilt, seed: int = 0) -> np.ndarray:
    """(C,) standard errors of the estimated shares: groups of bags drawn again with replacement, the answers kept."""
    rng = np.random.default_rng(seed_for(seed, "shares drawn again"))
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    groups, segments = int(group.max()) + 1, bags.segments()
    p = tempered(look.p.clamp_min(1e-12), look.judgement.instance_temperature)
    rows = steepness.witnesses(segments, bags.target)
    least = steepness.floor(steepness.size_of(segments, bags.target), len(bags.classes), bags.counted)
    shares = []
    for _ in range(DRAWS):
        times = torch.from_numpy(np.bincount(rng.integers(0, groups, groups), minlength=groups)[group]).double()
        count, drawn = (bags.target.double() * times[:, None]).sum(0), rows * segments.spread(times)[:, None]
        mix, labels = start.mix.double(), steepness.labels_of(drawn.sum(0), bags.counted)
        for _ in range(25):
            mix = steepness.settled(steepness.heaped(p, drawn, mix, labels), count, "full", least, bags.counted)
        shares.append(mix.diagonal().numpy())
    return np.std(shares, axis=0, ddof=1)


# -- what follows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prospect:
    """What a quick look lets one expect."""

    tilt: tilt.Tilt
    share: np.ndarray  # (C,) expected majority share, NaN for a class that wins no bag
    share_low: np.ndarray  # (C,) the interval, of 90 %
    share_high: np.ndarray
    conditions: Conditions
    confused: tuple[tuple[int, int], float]
    dispute: float  # how often regressions fitted to other bags name another class
    doubt: tuple[float, float]  # 1 - confidence, least and most of the explanations within one standard error
    accuracy: tuple[float, float]  # the range for instances
    gain: tuple[float, float]  # nats a bag over chance, and the standard error
    clear: bool  # whether held-out labels are surely foretold better than by chance


def prospect(look: Look, bags: Bags, votes: bool, wins: np.ndarray, seed: int = 0) -> Prospect:
    """Of what strangers said of labelled bags. ``votes``: the targets are the shares; ``wins`` (C,): who wins bags."""
    known = from_votes(bags) if votes else None
    read = explanations(look, bags, known)
    if votes:
        share, error = won_shares(bags)
        low, high, error = share, share, np.where(np.isnan(error), 1.0, error)  # of one bag nothing is known
    else:
        shares = np.stack([r.tilt.share.double().numpy() for r in read])
        share, low, high = shares[0], shares.min(0), shares.max(0)
        error = share_errors(look, bags, read[0].tilt, seed)
    foretold = clear(look.judgement)
    if not votes and not foretold:  # labels by lot, or features that show nothing: nobody knows which
        low, high, error = np.full_like(share, 1 / len(wins)), np.ones_like(share), np.zeros_like(share)
    answers = tempered(look.p.clamp_min(1e-12), look.judgement.instance_temperature)
    blank = np.where(wins, 0.0, np.nan)
    low, high = np.maximum(low - SURE * error, 0), np.minimum(high + SURE * error, 1)
    sure = explanations(look, heard(bags)) if votes else read
    doubts = [1 - r.confidence for r in sure if r.behind <= r.error]  # as judging/shares.py does: within one
    doubt = (min(doubts), max(doubts))
    return Prospect(
        read[0].tilt, share + blank, low + blank, high + blank, conditions(read[0].tilt, wins), confused(answers),
        look.dispute, doubt, accuracy(look.dispute, doubt, wins, share), gain(look.judgement), foretold,
    )  # fmt: skip


def accuracy(dispute: float, doubt: tuple[float, float], wins: np.ndarray, share: np.ndarray) -> tuple[float, float]:
    """The range in which the instance accuracy of a trained model is expected."""
    chance = 1 / len(wins)
    low = 1 - (WORSE * max(dispute, doubt[1]) + SLACK)
    high = 1 - max(0.0, max(dispute / SETTLED, doubt[0]) - SLACK)
    # a class that never wins is never learned: all of what the majorities leave it may be lost
    lost = (1 - float(np.nanmean(share[wins]))) * float((~wins).sum()) / max(1, len(wins) - 1)
    return max(chance / 2, low * (1 - lost)), high  # what was learned from too little may be worse than a guess


def pull(share: float, classes: int) -> float:
    """From 0 (a label says nothing of an instance) to 1 (it is its class)."""
    return min(1.0, max(0.0, (share - 1 / classes) / (1 - 1 / classes)))


def more_bags(share: float, have: int, classes: int) -> int:
    """About how many more bags a class wants, at this majority share; 0 if it has enough.

    >>> more_bags(0.9, 2, 10), more_bags(0.5, 2, 10), more_bags(0.5, 20, 10), more_bags(0.25, 2, 10)
    (4, 19, 1, 142)
    """
    return max(0, math.ceil(ENOUGH / max(pull(share, classes), 1e-2) ** 2) - have)

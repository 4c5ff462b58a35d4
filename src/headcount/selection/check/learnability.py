"""Prospects: what bags let one expect of learning instances from their labels, before any training. Truth is never needed.

    shares      P(y = c | label = c), read from a quick look's answers (quick.py) at every temperature that explains held-out
                labels about as well as the best one: a steeper tilt with a more doubtful classifier is as good an explanation
                (docs/explanation/theory.md, section 4), so this ridge, not the noise alone, is the uncertainty. With votes they are known
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

from headcount.bags import Bags
from headcount.majority import transition as tilt
from headcount.majority import transition_em
from headcount.majority.calibration import apply_temperature, standard_error
from headcount.majority.criterion import (
    INSTANCE_TEMPERATURES,
    fit_transition_loss,
    gain_over_prior,
    instance_losses,
    is_significant,
)
from headcount.seeds import seed_for
from headcount.selection.check.coverage import mean_winner_share
from headcount.selection.check.linear_baseline import LinearBaseline

Z_90 = 1.645  # standard errors: intervals are of 90 %
BOOTSTRAP_DRAWS = 24
# measured by benchmarks/check.py
ERROR_FACTOR, ERROR_MARGIN, MAX_IMPROVEMENT = (
    1.5,
    0.06,
    3.0,
)  # how the range is widened; a training settles at most so much of the dispute
SUFFICIENT_BAGS = 4.0  # bags of a class, were its majorities whole


# -- the matrix ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditioning:
    """How well T can be inverted, among the classes that win bags."""

    smallest: float  # singular value
    condition: float  # the largest over the smallest
    amplification: float  # of the error of P(label | x), at most: equation (2) of docs/explanation/theory.md
    hardest_pair: tuple[int, int]  # the two classes whose labels lean most alike
    distance: float  # total variation between their rows of T, from 0 (nothing tells them apart) to 1
    all_win: bool  # whether every class wins somewhere; if not, T as a whole is singular (section 5)


def conditioning(transition: tilt.Transition, wins: np.ndarray) -> Conditioning:
    """Of a tilt, given (C,) which classes win bags. At least two do.

    >>> even = tilt.Tilt(tilt.mix_of(0.6, 3), torch.ones(3) / 3)
    >>> said = conditions(even, np.array([True, True, True]))
    >>> round(said.smallest, 3), round(said.condition, 3), round(said.apart, 3)
    (0.4, 2.5, 0.4)
    """
    here = np.flatnonzero(wins)
    matrix = transition.matrix.double().numpy()[np.ix_(here, here)]
    matrix = matrix / matrix.sum(1, keepdims=True)
    values = np.linalg.svd(matrix, compute_uv=False)
    singular = values[-1] < 1e-9
    amplification = math.inf if singular else float(np.abs(np.linalg.inv(matrix.T)).sum(0).max())
    rows = np.abs(matrix[:, None] - matrix[None]).sum(2) / 2 + 2 * np.eye(len(here))
    i, j = sorted(np.unravel_index(int(rows.argmin()), rows.shape))
    return Conditioning(
        float(values[-1]), math.inf if singular else float(values[0] / values[-1]), amplification,
        (int(here[i]), int(here[j])), float(rows[i, j]), bool(wins.all()),
    )  # fmt: skip


def most_confused_pair(p: Tensor) -> tuple[tuple[int, int], float]:
    """The two classes that answers (N, C) take for each other most, and the share of all instances that is in doubt so."""
    both = (p.double().T @ p.double() / len(p)).fill_diagonal_(0)
    i, j = sorted(divmod(int(both.argmax()), len(both)))
    return (i, j), float(2 * both[i, j])


# -- shares -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """How a quick look's answers, read at one temperature, explain held-out labels."""

    transition: tilt.Transition
    confidence: float  # mean of the largest probability: the accuracy, if the probabilities are right
    loss_gap: float  # nats by which it explains held-out labels worse than the best
    error: float  # the standard error of that, over bags


def plausible_explanations(
    baseline: LinearBaseline, bags: Bags, known: tilt.Transition | None = None
) -> list[Explanation]:
    """The answers at every temperature that explains held-out labels as well as the best one, within chance."""
    p, weight = baseline.p.clamp_min(1e-12), bags.segments().weight
    found = []
    for heat in INSTANCE_TEMPERATURES:
        q = apply_temperature(p, heat)
        own = known or fit_transition_loss(q, bags)[1]
        sure = q.max(1).values
        sure = float(sure.mean() if weight is None else (sure * weight).sum() / weight.sum())
        found.append((own, sure, instance_losses(q, bags, own).numpy()))
    best = min((losses for _, _, losses in found), key=lambda losses: losses.mean())
    rows = [Explanation(own, sure, float((e - best).mean()), standard_error(e - best)) for own, sure, e in found]
    return sorted((r for r in rows if r.loss_gap <= Z_90 * r.error + 1e-12), key=lambda r: r.loss_gap)


def transition_from_votes(bags: Bags) -> tilt.Transition:
    """The tilt of bags whose votes are the shares of their instances: counted, not estimated.

    A label drawn from a bag's votes is what the instance loss sees: mix[c] is the mean of the shares, weighed by those of c.
    """
    share, size = bags.target.double(), bags.segments().total_weight().double()
    heap = share.T @ (share * size[:, None])
    labels = heap.sum(1)
    mix = (heap + 1e-9) / (heap + 1e-9).sum(1, keepdim=True)
    return tilt.Transition(mix.float(), (labels / labels.sum()).float())


def winners_only(bags: Bags) -> Bags:
    """Bags with votes as one knows them who hears of the winners alone. Where instances resemble their neighbours, answers far
    too sure of themselves explain known shares best; shares that are open as well do not lead astray so far."""
    share = bags.target
    won = (share >= share.amax(1, keepdim=True) - 1e-6) & bags.labelled[:, None]
    return replace(bags, target=won.to(share.dtype) / won.sum(1, keepdim=True).clamp_min(1))


def bootstrap_share_errors(baseline: LinearBaseline, bags: Bags, start: tilt.Transition, seed: int = 0) -> np.ndarray:
    """(C,) standard errors of the estimated shares: groups of bags drawn again with replacement, the answers kept."""
    rng = np.random.default_rng(seed_for(seed, "shares drawn again"))
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    groups, segments = int(group.max()) + 1, bags.segments()
    p = apply_temperature(baseline.p.clamp_min(1e-12), baseline.criterion.instance_temperature)
    rows = transition_em.instance_targets(segments, bags.target)
    least = transition_em.min_majority_share(
        transition_em.effective_bag_size(segments, bags.target), len(bags.classes), bags.counted
    )
    shares = []
    for _ in range(BOOTSTRAP_DRAWS):
        times = torch.from_numpy(np.bincount(rng.integers(0, groups, groups), minlength=groups)[group]).double()
        count, drawn = (bags.target.double() * times[:, None]).sum(0), rows * segments.broadcast(times)[:, None]
        mix, labels = start.mix.double(), transition_em.label_prior_from_counts(drawn.sum(0), bags.counted)
        for _ in range(25):
            mix = transition_em.m_step(transition_em.e_step(p, drawn, mix, labels), count, "full", least, bags.counted)
        shares.append(mix.diagonal().numpy())
    return np.std(shares, axis=0, ddof=1)


# -- what follows -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnability:
    """What a quick look lets one expect."""

    transition: tilt.Transition
    share: np.ndarray  # (C,) expected majority share, NaN for a class that wins no bag
    share_low: np.ndarray  # (C,) the interval, of 90 %
    share_high: np.ndarray
    conditioning: Conditioning
    most_confused: tuple[tuple[int, int], float]
    fold_disagreement: float  # how often regressions fitted to other bags name another class
    uncertainty: tuple[float, float]  # 1 - confidence, least and most of the explanations within one standard error
    accuracy: tuple[float, float]  # the range for instances
    gain: tuple[float, float]  # nats a bag over chance, and the standard error
    is_significant: bool  # whether held-out labels are surely foretold better than by chance


def assess_learnability(
    baseline: LinearBaseline, bags: Bags, votes: bool, wins: np.ndarray, seed: int = 0
) -> Learnability:
    """Of what strangers said of labelled bags. ``votes``: the targets are the shares; ``wins`` (C,): who wins bags."""
    known = transition_from_votes(bags) if votes else None
    read = plausible_explanations(baseline, bags, known)
    if votes:
        share, error = mean_winner_share(bags)
        low, high, error = share, share, np.where(np.isnan(error), 1.0, error)  # of one bag nothing is known
    else:
        shares = np.stack([r.transition.share.double().numpy() for r in read])
        share, low, high = shares[0], shares.min(0), shares.max(0)
        error = bootstrap_share_errors(baseline, bags, read[0].transition, seed)
    foretold = is_significant(baseline.criterion)
    if not votes and not foretold:  # labels by lot, or features that show nothing: nobody knows which
        low, high, error = np.full_like(share, 1 / len(wins)), np.ones_like(share), np.zeros_like(share)
    answers = apply_temperature(baseline.p.clamp_min(1e-12), baseline.criterion.instance_temperature)
    blank = np.where(wins, 0.0, np.nan)
    low, high = np.maximum(low - Z_90 * error, 0), np.minimum(high + Z_90 * error, 1)
    sure = plausible_explanations(baseline, winners_only(bags)) if votes else read
    doubts = [1 - r.confidence for r in sure if r.loss_gap <= r.error]  # as majority/context.py does: within one
    doubt = (min(doubts), max(doubts))
    return Learnability(
        read[0].transition, share + blank, low + blank, high + blank, conditioning(read[0].transition, wins), most_confused_pair(answers),
        baseline.fold_disagreement, doubt, expected_accuracy(baseline.fold_disagreement, doubt, wins, share), gain_over_prior(baseline.criterion), foretold,
    )  # fmt: skip


def expected_accuracy(
    fold_disagreement: float, uncertainty: tuple[float, float], wins: np.ndarray, share: np.ndarray
) -> tuple[float, float]:
    """The range in which the instance accuracy of a trained model is expected."""
    chance = 1 / len(wins)
    low = 1 - (ERROR_FACTOR * max(fold_disagreement, uncertainty[1]) + ERROR_MARGIN)
    high = 1 - max(0.0, max(fold_disagreement / MAX_IMPROVEMENT, uncertainty[0]) - ERROR_MARGIN)
    # a class that never wins is never learned: all of what the majorities leave it may be lost
    lost = (1 - float(np.nanmean(share[wins]))) * float((~wins).sum()) / max(1, len(wins) - 1)
    return max(chance / 2, low * (1 - lost)), high  # what was learned from too little may be worse than a guess


def signal_strength(share: float, classes: int) -> float:
    """From 0 (a label says nothing of an instance) to 1 (it is its class)."""
    return min(1.0, max(0.0, (share - 1 / classes) / (1 - 1 / classes)))


def additional_bags(share: float, have: int, classes: int) -> int:
    """About how many more bags a class wants, at this majority share; 0 if it has enough.

    >>> more_bags(0.9, 2, 10), more_bags(0.5, 2, 10), more_bags(0.5, 20, 10), more_bags(0.25, 2, 10)
    (4, 19, 1, 142)
    """
    return max(0, math.ceil(SUFFICIENT_BAGS / max(signal_strength(share, classes), 1e-2) ** 2) - have)

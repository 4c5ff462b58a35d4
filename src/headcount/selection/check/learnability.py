"""Learnability: what can be expected of learning instances from the labels of these bags, before any training.

    shares        P(y = c | label = c), estimated from the linear baseline's predictions at every temperature that explains
                  held-out labels about as well as the best one: a steeper transition with a less confident classifier explains
                  them equally well (docs/explanation/theory.md, section 4), so the interval spans these explanations. With votes
                  the shares are counted
    conditioning  how far T is from being singular (sections 1 to 3, and 5 where a class never wins)
    accuracy      two estimates of the baseline's error need no truth. Its uncertainty (1 - confidence, at those temperatures)
                  measures how much classes overlap; the disagreement between folds measures how few bags there are (two fits
                  that err by chance disagree about as often as one of them errs). The lower end takes the larger of the two;
                  the upper end takes the least uncertainty and assumes that training removes most of the disagreement.
                  benchmarks/check.py measures how often the range holds
    bags          by section 3 the error goes as 1 / (signal sqrt(bags)): a bag is worth its signal strength squared

Letters: N instances, B bags, C classes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.majority import transition_em
from headcount.majority.calibration import apply_temperature, standard_error
from headcount.majority.criterion import (
    INSTANCE_TEMPERATURES,
    fit_transition_loss,
    gain_over_prior,
    instance_losses,
    is_significant,
)
from headcount.majority.transition import Transition
from headcount.seeds import seed_for
from headcount.selection.check.coverage import mean_winner_share
from headcount.selection.check.linear_baseline import LinearBaseline

Z_90 = 1.645  # standard errors: intervals are of 90 %
BOOTSTRAP_DRAWS = 24
# The next three were chosen with benchmarks/check.py.
ERROR_FACTOR, ERROR_MARGIN = 1.5, 0.06  # how the range is widened
MAX_IMPROVEMENT = 3.0  # training divides the disagreement between folds by at most this
SUFFICIENT_BAGS = 4.0  # bags of a class that suffice where majorities are unanimous


# -- the matrix ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditioning:
    """How well T can be inverted, among the classes that win bags."""

    smallest: float  # singular value
    condition: float  # the largest over the smallest
    amplification: float  # largest factor from an error in P(label | x): equation (2) of docs/explanation/theory.md
    hardest_pair: tuple[int, int]  # the two classes with the most similar rows of T
    distance: float  # total variation between these rows, from 0 (labels cannot separate them) to 1
    all_win: bool  # whether every class wins a bag; if not, T as a whole is singular (section 5)


def conditioning(transition: Transition, wins: np.ndarray) -> Conditioning:
    """The conditioning of a transition, given (C,) which classes win bags (at least two do).

    >>> from headcount.majority.transition import mix_from_shares
    >>> even = Transition(mix_from_shares(0.6, 3), torch.ones(3) / 3)
    >>> result = conditioning(even, np.array([True, True, True]))
    >>> round(result.smallest, 3), round(result.condition, 3), round(result.distance, 3)
    (0.4, 2.5, 0.4)
    """
    winners = np.flatnonzero(wins)
    matrix = transition.matrix.double().numpy()[np.ix_(winners, winners)]
    matrix = matrix / matrix.sum(1, keepdims=True)
    values = np.linalg.svd(matrix, compute_uv=False)
    singular = values[-1] < 1e-9
    amplification = math.inf if singular else float(np.abs(np.linalg.inv(matrix.T)).sum(0).max())
    distances = np.abs(matrix[:, None] - matrix[None]).sum(2) / 2 + 2 * np.eye(len(winners))
    i, j = sorted(np.unravel_index(int(distances.argmin()), distances.shape))
    return Conditioning(
        smallest=float(values[-1]),
        condition=math.inf if singular else float(values[0] / values[-1]),
        amplification=amplification,
        hardest_pair=(int(winners[i]), int(winners[j])),
        distance=float(distances[i, j]),
        all_win=bool(wins.all()),
    )


def most_confused_pair(p: Tensor) -> tuple[tuple[int, int], float]:
    """The two classes that predictions (N, C) confuse most, and the share of all instances confused in this way."""
    joint = (p.double().T @ p.double() / len(p)).fill_diagonal_(0)
    i, j = sorted(divmod(int(joint.argmax()), len(joint)))
    return (i, j), float(2 * joint[i, j])


# -- shares -------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Explanation:
    """How the baseline's predictions, at one temperature, explain held-out labels."""

    transition: Transition
    confidence: float  # mean of the largest probability: the accuracy, if the probabilities are right
    loss_gap: float  # nats by which held-out labels are explained worse than by the best
    error: float  # standard error of loss_gap, over bags


def plausible_explanations(baseline: LinearBaseline, bags: Bags, known: Transition | None = None) -> list[Explanation]:
    """Explanations at all temperatures that explain held-out labels as well as the best one, up to chance; the best first."""
    p, weight = baseline.p.clamp_min(1e-12), bags.segments().weight
    fits = []
    for temperature in INSTANCE_TEMPERATURES:
        q = apply_temperature(p, temperature)
        transition = known or fit_transition_loss(q, bags)[1]
        top = q.max(1).values
        confidence = float(top.mean() if weight is None else (top * weight).sum() / weight.sum())
        fits.append((transition, confidence, instance_losses(q, bags, transition).numpy()))
    best = min((losses for _, _, losses in fits), key=lambda losses: losses.mean())
    rows = [Explanation(t, c, float((losses - best).mean()), standard_error(losses - best)) for t, c, losses in fits]
    return sorted((r for r in rows if r.loss_gap <= Z_90 * r.error + 1e-12), key=lambda r: r.loss_gap)


def transition_from_votes(bags: Bags) -> Transition:
    """The transition of bags whose votes are the shares of their instances: counted, not estimated.

    To the instance loss, a label is drawn from the bag's votes: mix[c] is the mean of the shares, weighted by those of c.
    """
    share, size = bags.target.double(), bags.segments().total_weight().double()
    joint = share.T @ (share * size[:, None])
    labels = joint.sum(1)
    mix = (joint + 1e-9) / (joint + 1e-9).sum(1, keepdim=True)
    return Transition(mix.float(), (labels / labels.sum()).float())


def winners_only(bags: Bags) -> Bags:
    """The bags with votes reduced to their winners.

    Where instances resemble the others in their bag, overconfident predictions explain known shares best. If the shares have to
    be estimated too, the bias is smaller.
    """
    share = bags.target
    won = (share >= share.amax(1, keepdim=True) - 1e-6) & bags.labelled[:, None]
    return replace(bags, target=won.to(share.dtype) / won.sum(1, keepdim=True).clamp_min(1))


def bootstrap_share_errors(baseline: LinearBaseline, bags: Bags, start: Transition, seed: int = 0) -> np.ndarray:
    """(C,) standard errors of the estimated shares: a bootstrap over groups of bags, the predictions fixed."""
    rng = np.random.default_rng(seed_for(seed, "shares drawn again"))
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    groups, segments = int(group.max()) + 1, bags.segments()
    p = apply_temperature(baseline.p.clamp_min(1e-12), baseline.criterion.instance_temperature)
    targets = transition_em.instance_targets(segments, bags.target)
    size = transition_em.effective_bag_size(segments, bags.target)
    min_share = transition_em.min_majority_share(size, len(bags.classes), bags.counted)
    shares = []
    for _ in range(BOOTSTRAP_DRAWS):
        times = torch.from_numpy(np.bincount(rng.integers(0, groups, groups), minlength=groups)[group]).double()
        bags_won, drawn = (bags.target.double() * times[:, None]).sum(0), targets * segments.broadcast(times)[:, None]
        mix, prior = start.mix.double(), transition_em.label_prior_from_counts(drawn.sum(0), bags.counted)
        for _ in range(25):
            expected = transition_em.e_step(p, drawn, mix, prior)
            mix = transition_em.m_step(expected, bags_won, "full", min_share, bags.counted)
        shares.append(mix.diagonal().numpy())
    return np.std(shares, axis=0, ddof=1)


# -- expectations ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Learnability:
    """What the linear baseline lets us expect."""

    transition: Transition
    share: np.ndarray  # (C,) expected majority share, NaN for a class that wins no bag
    share_low: np.ndarray  # (C,) ends of the 90 % interval
    share_high: np.ndarray
    conditioning: Conditioning
    most_confused: tuple[tuple[int, int], float]
    fold_disagreement: float  # how often regressions fitted to other bags name another class
    uncertainty: tuple[
        float, float
    ]  # 1 - confidence: smallest and largest among the explanations within one standard error
    accuracy: tuple[float, float]  # expected range for instances
    gain: tuple[float, float]  # nats per bag over the label frequencies, and the standard error
    is_significant: bool  # whether held-out labels are predicted better than by their frequencies


def assess_learnability(
    baseline: LinearBaseline, bags: Bags, votes: bool, wins: np.ndarray, seed: int = 0
) -> Learnability:
    """Assess labelled bags by out-of-fold predictions. ``votes``: the targets are shares; ``wins`` (C,): which classes win."""
    known = transition_from_votes(bags) if votes else None
    explanations = plausible_explanations(baseline, bags, known)
    best = explanations[0].transition
    significant = is_significant(baseline.criterion)
    if votes:
        share, error = mean_winner_share(bags)
        low, high, error = share, share, np.where(np.isnan(error), 1.0, error)  # of one bag nothing is known
    elif significant:
        shares = np.stack([e.transition.share.double().numpy() for e in explanations])
        share, low, high = shares[0], shares.min(0), shares.max(0)
        error = bootstrap_share_errors(baseline, bags, best, seed)
    else:  # random labels, or features that carry no signal: the shares may be anything
        share = best.share.double().numpy()
        low, high, error = np.full_like(share, 1 / len(wins)), np.ones_like(share), np.zeros_like(share)
    blank = np.where(wins, 0.0, np.nan)
    # with votes the confidence comes from explanations in which the shares are estimated too
    unbiased = plausible_explanations(baseline, winners_only(bags)) if votes else explanations
    uncertain = [1 - e.confidence for e in unbiased if e.loss_gap <= e.error]  # as in majority/calibration.py
    uncertainty = (min(uncertain), max(uncertain))
    p = apply_temperature(baseline.p.clamp_min(1e-12), baseline.criterion.instance_temperature)
    return Learnability(
        transition=best,
        share=share + blank,
        share_low=np.maximum(low - Z_90 * error, 0) + blank,
        share_high=np.minimum(high + Z_90 * error, 1) + blank,
        conditioning=conditioning(best, wins),
        most_confused=most_confused_pair(p),
        fold_disagreement=baseline.fold_disagreement,
        uncertainty=uncertainty,
        accuracy=expected_accuracy(baseline.fold_disagreement, uncertainty, wins, share),
        gain=gain_over_prior(baseline.criterion),
        is_significant=significant,
    )


def expected_accuracy(
    fold_disagreement: float, uncertainty: tuple[float, float], wins: np.ndarray, share: np.ndarray
) -> tuple[float, float]:
    """The range in which the instance accuracy of a trained model is expected."""
    chance = 1 / len(wins)
    low = 1 - (ERROR_FACTOR * max(fold_disagreement, uncertainty[1]) + ERROR_MARGIN)
    high = 1 - max(0.0, max(fold_disagreement / MAX_IMPROVEMENT, uncertainty[0]) - ERROR_MARGIN)
    # a class that never wins is never learned: all instances outside the majorities may be lost
    lost = (1 - float(np.nanmean(share[wins]))) * float((~wins).sum()) / max(1, len(wins) - 1)
    return max(chance / 2, low * (1 - lost)), high  # a model of too few bags may be worse than chance


def signal_from_share(share: float, classes: int) -> float:
    """From 0 (the label says nothing about an instance) to 1 (it is the instance's class)."""
    return min(1.0, max(0.0, (share - 1 / classes) / (1 - 1 / classes)))


def additional_bags(share: float, available: int, classes: int) -> int:
    """About how many more bags a class needs, at this majority share; 0 if it has enough.

    >>> [additional_bags(s, n, 10) for s, n in [(0.9, 2), (0.5, 2), (0.5, 20), (0.25, 2)]]
    [4, 19, 1, 142]
    """
    return max(0, math.ceil(SUFFICIENT_BAGS / max(signal_from_share(share, classes), 1e-2) ** 2) - available)

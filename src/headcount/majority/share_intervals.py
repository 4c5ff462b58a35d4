"""Intervals of class shares that allow for errors of the assumptions, from the labels of held-out bags; and from known shares.

There are three estimates of a bag's shares: the overall frequencies (the features tell nothing), the mean of the instances'
probabilities (right if P(y | x) is the same in every bag), and the shares in context of proportions.py (right if P(x | y) is). The
true shares of a bag vary around an estimate s by its own variance v and, as bags differ in what the features do not show, by a
fraction rho, the *spread*, of all that is possible:

    variance  =  v + rho (s (1 - s) - v)

The labels of held-out bags show how often the estimate's largest class is truly the largest. P(label wins) under a Dirichlet
distribution with these moments gives each estimate and each rho a weight, with the prior (1 - rho)². Labels depend on the ratio of
the differences between estimates to the variance, not on both: bags beyond the first ``MAX_EVIDENCE`` do not make the weights
sharper. The final share is the mean of the weighted mixture, and its variance is that of the mixture.

Nor do labels tell how far all shares are from even ones: half as far, the same classes are the largest. The interval is that of
both, with equal weights: mean s + d / 2 and variance v + d² / 4, where d = (1 / C - s) / 2.

With known shares of some bags the interval is scaled by the quantile of their errors (conformal risk control: Angelopoulos et al.,
ICLR 2024), so that the expected fraction of true shares inside it is at least the level for further bags that are exchangeable
with these, whatever is wrong with the model.

Letters: B bags, C classes, E = 3 estimates, N instances.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import gammainc, gammaincinv
from torch import Tensor

from headcount.bags.seeds import make_generator
from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority.proportions import (
    Proportions,
    interval_from_moments,
    laplace_moments,
    laplace_proportions,
    mean_moments,
    mean_proportions,
)

SPREADS = (0.0, 0.005, 0.015, 0.04, 0.08, 0.15, 0.25, 0.4, 0.6)  # candidates of rho
MAX_BAGS = 300  # whose labels are explained
MAX_EVIDENCE = 5  # bags that the weights of the estimates count
WRONG_LABEL = 0.01  # of labels, whatever the shares are
MIN_BAGS_TO_CORRECT = 15  # of known shares; a third of them corrects the estimate, the others measure its errors
SHRINKAGE_BAGS = 10.0  # as many bags of known shares weigh as much as the estimate
MIN_HALF_WIDTH = 0.01  # of an interval that is scaled
_QUANTILES = np.array([1e-3, *((np.arange(20) + 0.5) / 20), 0.99, 0.999])


@dataclass(frozen=True)
class ShareModel:
    """What the labels of held-out bags say about the estimates: the overall frequencies, the mean, the shares in context."""

    weight: tuple[float, ...]  # (E,) of each estimate
    spread: tuple[float, ...]  # (E,) the mean rho of each

    @classmethod
    def from_json(cls, data: dict[str, list[float]] | None) -> ShareModel | None:
        """Read what a file says, checked."""
        if data is None:
            return None
        weight, spread = data["weight"], data["spread"]
        if len(weight) != 3 or len(spread) != 3 or not all(0 <= v <= 1 for v in (*weight, *spread)):
            raise HeadcountError("the share model needs three weights and three spreads from 0 to 1")
        if not math.isclose(sum(weight), 1, abs_tol=1e-3):
            raise HeadcountError("the weights of the share model do not add up to one")
        return cls(tuple(weight), tuple(spread))


def share_moments(log_p: Tensor, segments: Segments, prior: Tensor, concentration: float) -> tuple[tuple[Tensor, Tensor], ...]:
    """(E) estimates of the shares (B, C), each with its variance (B, C)."""
    prior, mean = prior.double(), mean_moments(log_p.exp(), segments)
    n = segments.n_instances().double().clamp_min(1)[:, None]
    frequencies = prior.expand_as(mean[0]), prior * (1 - prior) / n
    return frequencies, mean, laplace_moments(log_p, segments, prior, concentration)


def with_spread(share: Tensor, variance: Tensor, spread: float) -> Tensor:
    """(B, C) the variance between bags added."""
    return variance + spread * (share * (1 - share) - variance).clamp_min(0)


def win_probabilities(share: Tensor, variance: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) the probability of each class to have the largest share, where shares have a Dirichlet distribution with this mean
    and, summed over the classes, this variance. They are shares of independent gamma variables, of which the largest is
    between two points x_j with the difference of G = prod_k F_k, and is that of k with the part of log F_k in that of log G."""
    most = (share * (1 - share)).sum(1, keepdim=True).clamp_min(1e-9)
    precision = (most / variance.sum(1, keepdim=True).clamp_min(1e-9) - 1).clamp(1e-2, 1e5)
    shape = (share * precision).clamp_min(1e-4).numpy()
    shape = shape if counted is None else shape[:, counted.numpy()]
    x = gammaincinv(shape.max(1, keepdims=True), _QUANTILES)
    log_f = np.log(np.maximum(gammainc(shape[:, None, :], x[:, :, None]), 1e-300))
    log_f = np.concatenate([np.full_like(log_f[:, :1], -700), log_f, np.zeros_like(log_f[:, :1])], 1)  # (B, J, C)
    part = np.diff(log_f, axis=1) + 1e-12
    p = (np.diff(np.exp(log_f.sum(2)), axis=1)[:, :, None] * part / part.sum(2, keepdims=True)).sum(1)
    p = torch.from_numpy(p / p.sum(1, keepdims=True))
    return p if counted is None else torch.zeros_like(share).masked_scatter_(counted.expand_as(share), p)


def fit_share_model(
    log_p: Tensor, segments: Segments, target: Tensor, prior: Tensor, concentration: float, counted: Tensor | None = None
) -> ShareModel:
    """Fit to out-of-fold log P(y | x) (N, C), without context, and the labels ``target`` (B, C) of these bags."""
    rows = (target.sum(1) > 0).nonzero()[:, 0]
    rows = rows[torch.linspace(0, len(rows) - 1, min(MAX_BAGS, len(rows))).long()]
    won = (target >= target.amax(1, keepdim=True) - 1e-6)[rows]
    scores = torch.zeros(3, len(SPREADS), dtype=torch.float64)
    for i, (share, variance) in enumerate(share_moments(log_p, segments, prior, concentration)):
        for j, spread in enumerate(SPREADS):
            p = win_probabilities(share[rows], with_spread(share, variance, spread)[rows], counted)
            likelihood = (1 - WRONG_LABEL) * torch.where(won, p, 0.0).sum(1) + WRONG_LABEL / p.shape[1]
            scores[i, j] = likelihood.log().mean()
    rho = torch.tensor(SPREADS, dtype=torch.float64)
    weight = (min(len(rows), MAX_EVIDENCE) * scores + 2 * (1 - rho).log()).flatten().softmax(0).view_as(scores)
    total = weight.sum(1)
    spread = (weight @ rho) / total.clamp_min(1e-300)
    return ShareModel(tuple(total.tolist()), tuple(spread.tolist()))


@torch.no_grad()
def estimate_share_intervals(
    log_p: Tensor, segments: Segments, prior: Tensor, concentration: float | None, model: ShareModel | None, level: float = 0.9
) -> Proportions:
    """The shares of bags with intervals, from log P(y | x) (N, C) without context; labels are not used. Without a ``model`` the
    shares in context are trusted, and without a ``concentration`` the mean of the probabilities."""
    if concentration is None:
        return mean_proportions(log_p.exp(), segments, level)
    if model is None:
        return laplace_proportions(log_p, segments, prior, concentration, level)
    moments = share_moments(log_p.double(), segments, prior, concentration)
    share = sum((w * s for w, (s, _) in zip(model.weight, moments, strict=True)), torch.zeros_like(moments[0][0]))
    variance = torch.zeros_like(share)
    for weight, spread, (s, v) in zip(model.weight, model.spread, moments, strict=True):
        variance += weight * (with_spread(s, v, spread) + (s - share) ** 2)
    shift = (1 / share.shape[1] - share) / 2  # to shares that are half as far from even ones
    center, variance = share + shift / 2, variance + shift**2 / 4
    interval = interval_from_moments(center, variance, log_p, segments, level)
    share = torch.where(segments.n_instances()[:, None] == 1, interval.share, share.float())
    return Proportions(share, torch.minimum(interval.low, share), torch.maximum(interval.high, share))


@dataclass(frozen=True)
class ShareCalibration:
    """What known shares of some bags say: the corrected share is intercept + slope * share, and an interval extends to each side
    by a factor of the 90 % interval's half-width."""

    intercept: tuple[float, ...]  # (C,)
    slope: float
    scores: tuple[tuple[float, ...], ...]  # of each group of bags, or each bag: errors in half-widths, of every class

    @classmethod
    def from_json(cls, data: dict[str, Any] | None, classes: int) -> ShareCalibration | None:
        """Read what a file says, checked."""
        if data is None:
            return None
        intercept, slope, scores = data["intercept"], data["slope"], data["scores"]
        if len(intercept) != classes or not 0 <= slope <= 10 or not math.isclose(sum(intercept) + slope, 1, abs_tol=1e-3):
            raise HeadcountError(f"the calibration of shares needs {classes} intercepts that add up to one with the slope")
        if not scores or not all(row and all(0 <= score < 1e6 for score in row) for row in scores):
            raise HeadcountError("the calibration of shares needs errors from 0 of one group or more")
        return cls(tuple(intercept), slope, tuple(map(tuple, scores)))

    def factor(self, level: float) -> float:
        """How many half-widths hold the fraction ``level`` of true shares, in expectation; infinite if the groups are too few."""
        allowed = (1 - level) * (len(self.scores) + 1) - 1
        if allowed < 0:
            return math.inf
        score = np.concatenate([np.array(row) for row in self.scores])
        weight = np.concatenate([np.full(len(row), 1 / len(row)) for row in self.scores])
        order = np.argsort(-score)
        outside = np.concatenate([[0.0], weight[order].cumsum()])[:-1]  # if the factor is the score
        return float(score[order][np.flatnonzero(outside <= allowed + 1e-9)[-1]])

    def correct(self, share: Tensor) -> Tensor:
        """(B, C) corrected shares."""
        share = (torch.tensor(self.intercept, dtype=share.dtype) + self.slope * share).clamp_min(0)
        return share / share.sum(1, keepdim=True)

    def apply(self, estimate: Proportions, level: float) -> Proportions:
        """Corrected shares with intervals, from an estimate with 90 % intervals."""
        share, factor = self.correct(estimate.share), self.factor(level)
        below, above = _half_widths(estimate)
        if math.isinf(factor):
            return Proportions(share, torch.zeros_like(share), torch.ones_like(share))
        return Proportions(share, (share - factor * below).clamp_min(0), (share + factor * above).clamp_max(1))


def _half_widths(estimate: Proportions) -> tuple[Tensor, Tensor]:
    below, above = estimate.share - estimate.low, estimate.high - estimate.share
    return below.clamp_min(MIN_HALF_WIDTH), above.clamp_min(MIN_HALF_WIDTH)


def calibrate_shares(estimate: Proportions, known: Tensor, groups: Any = None, seed: int = 0) -> ShareCalibration:
    """Calibrate estimates with 90 % intervals by the ``known`` shares (B, C) of the same bags. ``groups`` (B,): of bags that are
    not independent. A random third of 15 groups or more corrects the estimate, with as much trust as their number deserves; the
    errors of the others, which the correction has not seen, measure it."""
    if known.shape != estimate.share.shape or not len(known):
        raise HeadcountError(f"known shares are (bags, classes) {tuple(estimate.share.shape)}, got {tuple(known.shape)}")
    _, group = np.unique(np.arange(len(known)) if groups is None else np.asarray(groups), return_inverse=True)
    order = torch.randperm(int(group.max()) + 1, generator=make_generator(seed, "calibrate shares")).numpy()
    used = len(order) // 3 if len(order) >= MIN_BAGS_TO_CORRECT else 0
    fitting = torch.from_numpy(np.isin(group, order[:used]))
    slope, intercept = 1.0, torch.zeros(known.shape[1], dtype=torch.float64)
    if used:
        s, t = estimate.share[fitting].double(), known[fitting].double()
        ds, dt, trust = s - s.mean(0), t - t.mean(0), used / (used + SHRINKAGE_BAGS)
        slope += trust * float(((ds * dt).sum() / (ds**2).sum().clamp_min(1e-9)).clamp(0, 2) - 1)
        # with no trust the intercept is that of the identity
        intercept = (1 - slope) * s.mean(0) + trust * (t - s).mean(0)
    calibration = ShareCalibration(tuple(intercept.tolist()), slope, ())
    below, above = _half_widths(estimate)
    error = known - calibration.correct(estimate.share)
    score = torch.where(error < 0, -error / below, error / above).double().numpy()
    rows = tuple(tuple(score[group == g].ravel().tolist()) for g in order[used:])
    return ShareCalibration(calibration.intercept, slope, rows)

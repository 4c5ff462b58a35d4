"""Who wins when every instance casts one vote by lot: the likelihood of a majority label, with no temperature in it.

Instance i votes for class k with probability p[i, k], by itself. N_k counts the votes for k; the counts together are
Poisson-multinomial. Wanted is P(N_c is the largest), ties shared. That is a sum over all outcomes of the vote, so:

    exact        that sum: for small bags, and to judge the others by
    independent  each count exactly (Poisson-binomial, Hong 2013), the classes taken as independent
    conditioned  each count exactly, and together they add up to the votes cast
    normal       from the counts' means and variances alone: for large bags

All of it is done with logarithms in float64. A class that 64 confident votes speak against has log P = -200, or -20,000, and
its slope still says which votes would help. Nothing here looks at a tensor's values, so it can be captured.

    log_p, log_q  (B, S, C)  log p and log(1 - p) at the S places of a bag; an empty place has NEVER and 0
    n             (B,)       votes cast
    law           (B, C, J)  log P(N_k = j), j = 0 .. S
    counted       (C,)       classes that can win; the others take votes, and are nobody's rivals

Measured errors and costs: docs/explanation/election.md.
"""

from __future__ import annotations

import itertools
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headcount.errors import HeadcountError

LOG_ZERO = -1e30  # the logarithm of nothing; finite, so that 0 times it is 0


def log_p_and_complement(z: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C) logits -> log p and log(1 - p), never infinite: 1 - p of the likeliest class is the sum of the others."""
    z = z.double()
    whole = z.logsumexp(1, keepdim=True)
    top = torch.zeros_like(z, dtype=torch.bool).scatter(1, z.argmax(1, keepdim=True), True)
    others = z.masked_fill(top, LOG_ZERO).logsumexp(1, keepdim=True) - whole
    log_p = z - whole
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))


# -- exact ------------------------------------------------------------------------------------------------------------------


def exact(log_p: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest): one pass over all outcomes for every voter.

    >>> exact(torch.tensor([[[0.5, 0.5], [0.8, 0.2]]]).log()).exp()  # 0.4 win, 0.1 lose, the rest tie
    tensor([[0.6500, 0.3500]])
    """
    bags, places, classes = log_p.shape
    outcomes, before = _enumerate_outcomes(places, classes, log_p.device)
    state = torch.full((bags, len(outcomes)), LOG_ZERO, dtype=log_p.dtype, device=log_p.device)
    state[:, 0] = 0  # nobody has voted
    for i in range(places):
        vote = log_p[:, i]
        options = (
            F.pad(state, (0, 1), value=LOG_ZERO).index_select(1, before).unflatten(1, (-1, classes)) + vote[:, None]
        )
        state = torch.where(vote[:, :1] > LOG_ZERO / 2, options.logsumexp(2), state)
    return (state[:, :, None] + _log_win_shares(outcomes, counted).to(state.dtype)).logsumexp(1)


def n_outcomes(slots: int, classes: int) -> int:
    """How many outcomes a vote of at most this many has."""
    return math.comb(slots + classes, classes)


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _enumerate_outcomes(places: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(outcomes, C) votes of each, first the one without votes; and (outcomes * C,) which it was before a vote for k."""
    bars = itertools.combinations(range(places + classes), classes)
    votes = [tuple(b - a - 1 for a, b in itertools.pairwise((-1, *bar))) for bar in bars]
    number = {v: i for i, v in enumerate(votes)}
    before = [number.get((*v[:k], v[k] - 1, *v[k + 1 :]), len(votes)) for v in votes for k in range(classes)]
    return torch.tensor(votes, device=device), torch.tensor(before, device=device)


def _log_win_shares(votes: Tensor, counted: Tensor | None) -> Tensor:
    """(..., C) votes -> log of what each class has of the win: all of it, an equal share of a tie, or nothing."""
    votes = votes if counted is None else votes.masked_fill(~counted, -1)
    top = votes == votes.amax(-1, keepdim=True)
    return torch.where(top, -top.sum(-1, keepdim=True).double().log(), LOG_ZERO)


# -- the counts, class by class ---------------------------------------------------------------------------------------------


def count_log_pmfs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(B, C, J) log P(N_k = j): the coefficients of the product of the voters' polynomials q + p x.

    Only positive numbers are added, so that the tails keep their digits; a Fourier transform would lose them.
    """
    return count_pmf_tree(log_p, log_q) if log_p.is_cuda else count_pmf_sequential(log_p, log_q)


def count_pmf_sequential(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The product voter by voter, those first who lean most to the class: for a processor (times of both: docs/explanation/election.md).

    Of all ways in which j voters can vote for a class, the likeliest is that the first j do. The others are counted beside
    it, each by how likely it is in comparison: numbers from 1 to 2^S, whatever the tails, and no logarithms on the way.
    """
    odds = (log_p - log_q).transpose(0, 1).flatten(1).sort(0, descending=True).values  # (S, B C)
    likeliest = torch.cat([torch.zeros_like(odds[:1]), odds.cumsum(0)])
    log_pmf = likeliest + _SequentialProduct.apply(odds)
    return log_pmf.T.unflatten(0, log_p.shape[::2]) + log_q.sum(1)[..., None]


class _SequentialProduct(torch.autograd.Function):
    """(S, M) falling log odds -> (S + 1, M) logs of the ways to get j votes, in units of the likeliest way.

    With o the odds: ways[j] += ways[j - 1] o[i] / o[j] for each voter i, the ratio never above 1. Odds beyond e^345 either way
    are taken as that much in the ratios, which alone are computed here.
    """

    @staticmethod
    def forward(ctx: Any, odds: Tensor) -> Tensor:
        here = odds > LOG_ZERO / 2  # an empty place gives nobody a vote
        up = odds.clamp(-345, 345).exp()
        up, down = up * here, 1 / up
        ways = F.pad(torch.ones_like(odds[:1]), (0, 0, 0, len(odds)))
        kept = []
        for i in range(len(odds)):
            kept.append(down[: i + 1] * ways[: i + 1])
            ways[1 : i + 2].addcmul_(up[i], kept[i])
        ways.clamp_min_(1e-300)
        ctx.kept = kept
        ctx.save_for_backward(up, down, ways)
        return ways.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        if torch.is_grad_enabled():  # what is kept forgets how it hangs on the odds: they would be wrong without a word
            raise HeadcountError(
                "an election has no second derivatives, and create_graph=True asks for them; leave it out"
            )
        up, down, ways = ctx.saved_tensors
        slope, out = grad / ways, torch.zeros_like(up)
        for i in reversed(range(len(up))):
            step = up[i] * slope[1 : i + 2]
            pull = step * ctx.kept[i]
            out[i] += pull.sum(0)
            out[: i + 1] -= pull
            slope[: i + 1].addcmul_(step, down[: i + 1])
        return out


def count_pmf_tree(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The product as a tree, in logarithms: for a card, where few large steps beat many small ones."""
    log_pmf = torch.stack([log_q, log_p], -1).transpose(1, 2)  # (B, C, S, 2)
    while log_pmf.shape[2] > 1:
        if log_pmf.shape[2] % 2:
            padding = F.pad(torch.zeros_like(log_pmf[:, :, :1, :1]), (0, log_pmf.shape[3] - 1), value=LOG_ZERO)
            log_pmf = torch.cat([log_pmf, padding], 2)
        log_pmf = _convolve(log_pmf[:, :, 0::2], log_pmf[:, :, 1::2])
    return log_pmf[:, :, 0, : log_p.shape[1] + 1]


def _convolve(a: Tensor, b: Tensor) -> Tensor:
    """(..., m) twice -> (..., 2m-1): the table a + b, each row shifted one further to the right, summed down."""
    m = a.shape[-1]
    table = F.pad(a[..., :, None] + b[..., None, :], (0, m), value=LOG_ZERO).flatten(-2)
    return table[..., : m * (2 * m - 1)].unflatten(-1, (m, 2 * m - 1)).logsumexp(-2)


def variance_shares(variance: Tensor, rounds: int = 4) -> Tensor:
    """(B, C) shares b, adding up to one, with b_k (1 - b_k) proportional to the variance of count k.

    Independent counts of variances D have variances D_k (1 - D_k / sum D) once their total is known. So that the counts come
    out as wide as they are, each must first be 1 / (1 - b_k) times as wide, b = D / sum D.
    """
    v = variance + 1e-12  # where nothing is uncertain, all are alike
    b = v / v.sum(1, keepdim=True)
    for _ in range(rounds):
        b = v / (1 - b).clamp_min(1e-3)
        b = b / b.sum(1, keepdim=True)
    return b


# -- the race ---------------------------------------------------------------------------------------------------------------


def independent(log_p: Tensor, log_q: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), less a constant of the bag, as if the counts knew nothing of each other."""
    return _log_win_probability(count_log_pmfs(log_p, log_q), None, counted)


def conditioned(log_p: Tensor, log_q: Tensor, n: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), less a constant of the bag, under the law

        P(n_1 .. n_C)  ~  prod_k P(N_k = n_k)^(1 - b_k)   where the n_k add up to n

    with b from :func:`surplus`. For two classes that is exact. What it does not know is which two classes a voter wavers
    between: all share the give and take, in proportion to their doubt.
    """
    log_pmf = count_log_pmfs(log_p, log_q)
    log_pmf = (1 - variance_shares((log_p + log_q).exp().sum(1)))[..., None] * log_pmf
    return (
        _enumerate_joint_counts(log_pmf, n, counted)
        if log_pmf.shape[1] in (2, 3)
        else _log_win_probability(log_pmf, n, counted)
    )


def _log_win_probability(log_pmf: Tensor, n: Tensor | None, counted: Tensor | None) -> Tensor:
    """(B, C). Class c wins with m votes if every rival stays below m, or meets it and loses the draw.

    A tie of r is shared 1/r each, which is the mean of u^(r-1) over u in (0, 1): three Gauss points (U) are exact up to ties
    of six. Given n, the other counts, each cut off at m, must add up to n - m; their sum is taken as normal.
    """
    votes = torch.arange(log_pmf.shape[2], dtype=log_pmf.dtype, device=log_pmf.device)
    t = torch.arange(-1, 2, dtype=log_pmf.dtype, device=log_pmf.device)[:, None, None, None]  # (U, 1, 1, 1)
    u, weight = (0.5 + math.sqrt(0.15) * t).log(), ((8 - 3 * t.square()) / 18).log()
    upto = log_pmf.logcumsumexp(2)
    tied = log_pmf + u
    below = torch.logaddexp(_shift_by_one(upto, LOG_ZERO), tied)  # (U, B, C, J) log P(k stays below m)
    mass = _where_counted(counted, below, upto)
    score = weight + log_pmf + mass.sum(2, keepdim=True) - mass
    if n is not None:
        height = (votes + 1).log()  # one more than the count: that has a logarithm
        mean = ((log_pmf + height).logcumsumexp(2) - upto).exp()
        spread = (((log_pmf + 2 * height).logcumsumexp(2) - upto).exp() - mean.square()).clamp_min(0)
        mean = mean - 1
        at, gap = (
            (tied - below).exp(),
            votes - _shift_by_one(mean, 0.0),
        )  # those who stand at m itself, and how far that is
        spread = _where_counted(counted, (1 - at) * (_shift_by_one(spread, 0.0) + at * gap.square()), spread)
        mean = _where_counted(counted, votes - (1 - at) * gap, mean)
        missing = n[:, None, None] - votes - (mean.sum(2, keepdim=True) - mean)
        score = score + _log_normal_density(
            missing, spread.sum(2, keepdim=True) - spread + 1 / 12
        )  # 1/12: counts are whole
    return score.logsumexp((0, 3))


def _shift_by_one(upto: Tensor, first: float) -> Tensor:
    """What holds up to m, said of all below m."""
    return F.pad(upto[..., :-1], (1, 0), value=first)


def _where_counted(counted: Tensor | None, below: Tensor, upto: Tensor) -> Tensor:
    """A class that cannot win need not stay below anything."""
    return below if counted is None else torch.where(counted[:, None], below, upto[..., -1:])


def _enumerate_joint_counts(log_pmf: Tensor, n: Tensor, counted: Tensor | None) -> Tensor:
    """(B, C): for two or three classes all counts that add up to n can be written down."""
    classes, counts = log_pmf.shape[1:]
    votes = torch.arange((classes - 1) * (counts - 1) + 1, device=log_pmf.device)
    last = n[:, None].long() - votes  # what is left to the last class, when the others have so many
    left = log_pmf[:, -1].gather(1, last.clamp(0, counts - 1)).masked_fill(last < 0, LOG_ZERO)
    if classes == 2:
        chance, outcome = log_pmf[:, 0] + left, [votes.expand_as(last), last]
    else:
        chance = log_pmf[:, 0, :, None] + log_pmf[:, 1, None] + left.unfold(1, counts, 1)  # (B, J, J)
        first = votes[:counts, None].expand(chance.shape)
        outcome = [first, first.transpose(1, 2), last.unfold(1, counts, 1)]
    return (chance[..., None] + _log_win_shares(torch.stack(outcome, -1), counted)).flatten(1, -2).logsumexp(1)


def _log_normal_density(x: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (x.square() / variance + variance.log())


# -- from means and variances alone -----------------------------------------------------------------------------------------


def normal(mean: Tensor, variance: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), less a constant of the bag, from the means and variances (B, C) of the counts.

    Differences of counts come out as wide as they are if normal counts, widened by :func:`surplus`, race independently; a tie
    broken by lot is a count blurred by a uniform of width one, 1/12 more variance. Counts are skew, but a race has the same
    winner on any scale: to the power 2/3 a Poisson count has no skew left.
    """
    wide, mean = variance / (1 - variance_shares(variance)) + 1 / 12, mean + 0.5
    wide, mean = (2 / 3) ** 2 * mean ** (-2 / 3) * wide, mean ** (2 / 3)
    rival = ~torch.eye(mean.shape[1], dtype=torch.bool, device=mean.device)
    rival = rival if counted is None else rival & counted
    centre, width = _find_peak(mean, wide, rival)
    x = centre + width * torch.linspace(-7, 7, 57, dtype=mean.dtype, device=mean.device)[:, None, None]  # (K, B, C)
    below = torch.special.log_ndtr((x[..., None] - mean[:, None]) / wide.sqrt()[:, None])  # (K, B, C, rivals)
    score = width.log() + _log_normal_density(x - mean, wide) + torch.where(rival, below, 0.0).sum(3)
    return score.logsumexp(0)


@torch.no_grad()
def _find_peak(mean: Tensor, wide: Tensor, rival: Tensor, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """(B, C) the count with which c wins, if it does, and how sharp that is: Newton's method on a concave function whose
    slope is convex, begun on the left of the peak, from where it never oversteps."""
    x, curve, s = mean, 1 / wide, wide.sqrt()[:, None]
    for _ in range(rounds):
        a = (x[..., None] - mean[:, None]) / s
        hazard = (-0.5 * a.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(a)).exp()
        hazard = torch.where(a < -1000, -a - 1 / a, hazard)  # far out the digits are gone, and the series is exact
        hazard = torch.where(rival, hazard, 0.0)
        curve = 1 / wide + (hazard * (a + hazard) / s.square()).clamp_min(0).sum(2)
        x = x + ((mean - x) / wide + (hazard / s).sum(2)) / curve
    return x, curve.rsqrt()

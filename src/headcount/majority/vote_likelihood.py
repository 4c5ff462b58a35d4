"""The likelihood of a majority label: who wins when every instance casts one random vote. No temperature is involved.

Instance i votes for class k with probability p[i, k], independently, and N_k counts the votes for k. P(N_c is the largest), ties
shared, takes one of four forms: exact, independent, conditioned, normal (formulas, errors, costs: docs/explanation/election.md).
All are computed with logarithms in float64: a class that 64 confident votes are against has log P = -200, or -20,000, and the
gradient still tells which votes would help. No function needs a tensor's value on the host, so all can be part of a CUDA graph.

    log_p, log_q  (B, S, C)  log p and log(1 - p) at the S slots of a bag; an empty slot has LOG_ZERO and 0
    n             (B,)       the number of votes
    log_pmf       (B, C, J)  log P(N_k = j), j = 0 .. S
    counted       (C,)       the classes that can win; the others take votes, and are never rivals
"""

import itertools
import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from headcount.errors import HeadcountError

LOG_ZERO = -1e30  # finite, so that 0 times it is 0


def log_p_and_complement(z: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C) logits -> log p and log(1 - p), both finite: 1 - p of the likeliest class is the sum of the others."""
    z = z.double()
    norm = z.logsumexp(1, keepdim=True)
    top = torch.zeros_like(z, dtype=torch.bool).scatter(1, z.argmax(1, keepdim=True), True)
    others = z.masked_fill(top, LOG_ZERO).logsumexp(1, keepdim=True) - norm
    log_p = z - norm
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))


def exact(log_p: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest): one pass over all outcomes per vote."""
    outcomes, log_joint = exact_counts(log_p)
    return (log_joint[:, :, None] + _log_win_shares(outcomes, counted).to(log_joint.dtype)).logsumexp(1)


def exact_counts(log_p: Tensor) -> tuple[Tensor, Tensor]:
    """(outcomes, C) all counts of at most S votes, and (B, outcomes) the log-probability of each."""
    bags, slots, classes = log_p.shape
    outcomes, before = _enumerate_outcomes(slots, classes, log_p.device)
    state = torch.full((bags, len(outcomes)), LOG_ZERO, dtype=log_p.dtype, device=log_p.device)
    state[:, 0] = 0  # no votes yet
    for i in range(slots):
        vote = log_p[:, i]
        options = F.pad(state, (0, 1), value=LOG_ZERO).index_select(1, before).unflatten(1, (-1, classes)) + vote[:, None]
        state = torch.where(vote[:, :1] > LOG_ZERO / 2, options.logsumexp(2), state)
    return outcomes, state


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _enumerate_outcomes(slots: int, classes: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(outcomes, C) the votes of each, first the one without votes; and (outcomes * C,) its number before a vote for k."""
    bars = itertools.combinations(range(slots + classes), classes)
    votes = [tuple(b - a - 1 for a, b in itertools.pairwise((-1, *bar))) for bar in bars]
    number = {v: i for i, v in enumerate(votes)}
    before = [number.get((*v[:k], v[k] - 1, *v[k + 1 :]), len(votes)) for v in votes for k in range(classes)]
    return torch.tensor(votes, device=device), torch.tensor(before, device=device)


def _log_win_shares(votes: Tensor, counted: Tensor | None) -> Tensor:
    """(..., C) votes -> log of each class's part of the win: one, an equal part of a tie, or zero."""
    votes = votes if counted is None else votes.masked_fill(~counted, -1)
    top = votes == votes.amax(-1, keepdim=True)
    return torch.where(top, -top.sum(-1, keepdim=True).double().log(), LOG_ZERO)


def count_log_pmfs(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(B, C, J) log P(N_k = j). Only positive numbers are added, so the tails keep their precision."""
    return count_pmf_tree(log_p, log_q) if log_p.is_cuda else count_pmf_sequential(log_p, log_q)


def count_pmf_sequential(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Vote by vote, the likeliest votes for the class first, in units of the likeliest way to get j votes: for a CPU."""
    odds = (log_p - log_q).transpose(0, 1).flatten(1).sort(0, descending=True).values  # (S, B C)
    likeliest = torch.cat([torch.zeros_like(odds[:1]), odds.cumsum(0)])
    log_pmf = likeliest + _SequentialProduct.apply(odds)
    return log_pmf.T.unflatten(0, log_p.shape[::2]) + log_q.sum(1)[..., None]


class _SequentialProduct(torch.autograd.Function):
    """(S, M) descending log odds -> (S + 1, M) logs of the ways to get j votes, in units of the likeliest way: with the odds o,
    clipped at e^345 and e^-345, ways[j] += ways[j - 1] o[i] / o[j] for each vote i, where the ratio is at most 1."""

    @staticmethod
    def forward(ctx: Any, odds: Tensor) -> Tensor:
        taken = odds > LOG_ZERO / 2  # an empty slot has no vote
        up = odds.clamp(-345, 345).exp()
        up, down = up * taken, 1 / up
        ways = F.pad(torch.ones_like(odds[:1]), (0, 0, 0, len(odds)))
        products = []
        for i in range(len(odds)):
            products.append(down[: i + 1] * ways[: i + 1])
            ways[1 : i + 2].addcmul_(up[i], products[i])
        ways.clamp_min_(1e-300)
        ctx.products = products
        ctx.save_for_backward(up, down, ways)
        return ways.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # ty: ignore[incompatible-method-override]
        if torch.is_grad_enabled():  # the saved products have no graph: second derivatives would be silently wrong
            raise HeadcountError("an election has no second derivatives, and create_graph=True asks for them; leave it out")
        up, down, ways = ctx.saved_tensors
        slope, out = grad / ways, torch.zeros_like(up)
        for i in reversed(range(len(up))):
            step = up[i] * slope[1 : i + 2]
            ratio_grad = step * ctx.products[i]
            out[i] += ratio_grad.sum(0)
            out[: i + 1] -= ratio_grad
            slope[: i + 1].addcmul_(step, down[: i + 1])
        return out


def count_pmf_tree(log_p: Tensor, log_q: Tensor) -> Tensor:
    """The product as a binary tree, in logarithms: for a GPU, where few large steps are faster than many small ones."""
    log_pmf = torch.stack([log_q, log_p], -1).transpose(1, 2)  # (B, C, S, 2)
    while log_pmf.shape[2] > 1:
        if log_pmf.shape[2] % 2:
            padding = F.pad(torch.zeros_like(log_pmf[:, :, :1, :1]), (0, log_pmf.shape[3] - 1), value=LOG_ZERO)
            log_pmf = torch.cat([log_pmf, padding], 2)
        m = log_pmf.shape[3]  # convolve pairs: the table of sums, each row shifted right by one more, added up over rows
        table = F.pad(log_pmf[:, :, 0::2, :, None] + log_pmf[:, :, 1::2, None], (0, m), value=LOG_ZERO).flatten(3)
        log_pmf = table[..., : m * (2 * m - 1)].unflatten(3, (m, 2 * m - 1)).logsumexp(3)
    return log_pmf[:, :, 0, : log_p.shape[1] + 1]


def variance_shares(variance: Tensor) -> Tensor:
    """(B, C) shares b that add up to one, with b_k (1 - b_k) proportional to the variance of count k."""
    v = variance + 1e-12  # where nothing is uncertain, equal shares
    b = v / v.sum(1, keepdim=True)
    for _ in range(4):
        b = v / (1 - b).clamp_min(1e-3)
        b = b / b.sum(1, keepdim=True)
    return b


def independent(log_p: Tensor, log_q: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), up to a constant of the bag, as if the counts were independent."""
    return _log_win_probability(count_log_pmfs(log_p, log_q), None, counted)


def conditioned(log_p: Tensor, log_q: Tensor, n: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), up to a constant of the bag, where P(n_1 .. n_C) ~ prod_k P(N_k = n_k)^(1 - b_k) and the n_k
    add up to n, with b from :func:`variance_shares`. For two classes this is exact."""
    log_pmf = count_log_pmfs(log_p, log_q)
    log_pmf = (1 - variance_shares((log_p + log_q).exp().sum(1)))[..., None] * log_pmf
    win_probability = _enumerate_joint_counts if log_pmf.shape[1] in (2, 3) else _log_win_probability
    return win_probability(log_pmf, n, counted)


def _log_win_probability(log_pmf: Tensor, n: Tensor | None, counted: Tensor | None) -> Tensor:
    """(B, C). Class c wins with m votes if every rival has fewer, or as many and loses the tie: three Gauss points (U) are exact up
    to ties of six. Given n, the other counts, truncated at m, must add up to n - m; their sum is taken as normal."""
    votes = torch.arange(log_pmf.shape[2], dtype=log_pmf.dtype, device=log_pmf.device)
    t = torch.arange(-1, 2, dtype=log_pmf.dtype, device=log_pmf.device)[:, None, None, None]  # (U, 1, 1, 1)
    u, weight = (0.5 + math.sqrt(0.15) * t).log(), ((8 - 3 * t.square()) / 18).log()
    log_cdf = log_pmf.logcumsumexp(2)
    tied = log_pmf + u
    below = torch.logaddexp(_shift_by_one(log_cdf, LOG_ZERO), tied)  # (U, B, C, J) log P(class k does not beat m)
    log_p = _where_counted(counted, below, log_cdf)
    score = weight + log_pmf + log_p.sum(2, keepdim=True) - log_p
    if n is not None:
        log_votes = (votes + 1).log()  # plus one: zero votes have no logarithm
        mean = ((log_pmf + log_votes).logcumsumexp(2) - log_cdf).exp()
        variance = (((log_pmf + 2 * log_votes).logcumsumexp(2) - log_cdf).exp() - mean.square()).clamp_min(0)
        mean = mean - 1
        p_tied = (tied - below).exp()
        gap = votes - _shift_by_one(mean, 0.0)  # from m to the mean of the counts below it
        below_variance = (1 - p_tied) * (_shift_by_one(variance, 0.0) + p_tied * gap.square())
        variance = _where_counted(counted, below_variance, variance)
        mean = _where_counted(counted, votes - (1 - p_tied) * gap, mean)
        missing = n[:, None, None] - votes - (mean.sum(2, keepdim=True) - mean)
        rest_variance = variance.sum(2, keepdim=True) - variance + 1 / 12  # 1/12: counts are whole numbers
        score = score + _log_normal_density(missing, rest_variance)
    return score.logsumexp((0, 3))


def _shift_by_one(cumulative: Tensor, first: float) -> Tensor:
    """A quantity of the counts up to m -> of those below m."""
    return F.pad(cumulative[..., :-1], (1, 0), value=first)


def _where_counted(counted: Tensor | None, below: Tensor, unlimited: Tensor) -> Tensor:
    """The count of a class that cannot win is not limited by the winner's."""
    return below if counted is None else torch.where(counted[:, None], below, unlimited[..., -1:])


def _enumerate_joint_counts(log_pmf: Tensor, n: Tensor, counted: Tensor | None) -> Tensor:
    """(B, C): for two or three classes all counts that add up to n can be enumerated."""
    classes, counts = log_pmf.shape[1:]
    votes = torch.arange((classes - 1) * (counts - 1) + 1, device=log_pmf.device)
    last = n[:, None].long() - votes  # the votes left to the last class
    log_p_last = log_pmf[:, -1].gather(1, last.clamp(0, counts - 1)).masked_fill(last < 0, LOG_ZERO)
    if classes == 2:
        log_joint, outcome = log_pmf[:, 0] + log_p_last, [votes.expand_as(last), last]
    else:
        log_joint = log_pmf[:, 0, :, None] + log_pmf[:, 1, None] + log_p_last.unfold(1, counts, 1)  # (B, J, J)
        first = votes[:counts, None].expand(log_joint.shape)
        outcome = [first, first.transpose(1, 2), last.unfold(1, counts, 1)]
    return (log_joint[..., None] + _log_win_shares(torch.stack(outcome, -1), counted)).flatten(1, -2).logsumexp(1)


def _log_normal_density(x: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (x.square() / variance + variance.log())


def normal(mean: Tensor, variance: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest), up to a constant of the bag, from the means and variances (B, C) of the counts, as if they
    were independent and normal on the scale (n + 1/2)^(2/3), with 1/12 more variance for ties."""
    variance, mean = variance / (1 - variance_shares(variance)) + 1 / 12, mean + 0.5
    variance, mean = (2 / 3) ** 2 * mean ** (-2 / 3) * variance, mean ** (2 / 3)
    rival = torch.ones(mean.shape[1], mean.shape[1], dtype=torch.bool, device=mean.device).fill_diagonal_(False)
    rival = rival if counted is None else rival & counted
    peak, width = _find_peak(mean, variance, rival)
    x = peak + width * torch.linspace(-7, 7, 57, dtype=mean.dtype, device=mean.device)[:, None, None]  # (K, B, C)
    below = torch.special.log_ndtr((x[..., None] - mean[:, None]) / variance.sqrt()[:, None])  # (K, B, C, rivals)
    score = width.log() + _log_normal_density(x - mean, variance) + torch.where(rival, below, 0.0).sum(3)
    return score.logsumexp(0)


@torch.no_grad()
def _find_peak(mean: Tensor, variance: Tensor, rival: Tensor, iterations: int = 8) -> tuple[Tensor, Tensor]:
    """(B, C) the likeliest count with which class c wins, and the width of that peak: Newton's method on a concave function
    with convex slope, which never overshoots from the left of the peak."""
    x, curvature, s = mean, 1 / variance, variance.sqrt()[:, None]
    for _ in range(iterations):
        a = (x[..., None] - mean[:, None]) / s
        hazard = (-0.5 * a.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(a)).exp()
        hazard = torch.where(a < -1000, -a - 1 / a, hazard)  # far out the precision is lost, and the series exact
        hazard = torch.where(rival, hazard, 0.0)
        curvature = 1 / variance + (hazard * (a + hazard) / s.square()).clamp_min(0).sum(2)
        x = x + ((mean - x) / variance + (hazard / s).sum(2)) / curvature
    return x, curvature.rsqrt()

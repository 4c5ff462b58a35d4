"""Who wins when every instance casts one vote by lot: the likelihood of a majority label, with no temperature in it.

Instance i votes for class k with probability p[i, k], on its own; N_k counts the votes, and the counts together are
Poisson-multinomial. Wanted is P(N_c is the largest), ties shared equally. That is a sum over (n+1)^(C-1) outcomes, so:

    exact        that sum: for small bags, and to judge the others by
    independent  each N_k exactly (Poisson-binomial; Hong 2013), the classes taken as independent
    conditioned  the same with the counts' own dependence: no vote goes to two classes, and all add up to n
    normal       conditioned, from the counts' means and variances alone: for large bags

Everything is done with logarithms in float64: a class that 64 confident votes speak against has log P of -200 or -20,000,
and its slope still says which votes would help. Nothing looks at a tensor's values, so all of it can be captured.

Letters: B bags, S places of a bag, C classes, J = S + 1 possible counts, U ways to share a tie.

    log_p, log_q  (B, S, C)  log p and log(1 - p); an empty place has NEVER and 0
    n             (B,)       votes cast in each bag
    counted       (C,)       classes that can win: the others take votes and are nobody's rivals
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

NEVER = -1e30  # the logarithm of nothing; finite, so that 0 times it is 0

# A tie of r is shared 1/r each, and 1/r is the integral of u^(r-1) over (0, 1): whoever has a rival's count wins with
# probability u, and u is averaged. Three Gauss-Legendre points are exact up to ties of six (0.1425 for 1/7, 0.0989 for 1/10).
TIE = ((0.5 - math.sqrt(0.15), 5 / 18), (0.5, 8 / 18), (0.5 + math.sqrt(0.15), 5 / 18))


def ballots(z: Tensor) -> tuple[Tensor, Tensor]:
    """(N, C) logits -> log p and log(1 - p), neither ever infinite: 1 - p of the likeliest class is the sum of the others."""
    z = z.double()
    whole = z.logsumexp(1, keepdim=True)
    top = torch.zeros_like(z, dtype=torch.bool).scatter(1, z.argmax(1, keepdim=True), True)
    others = z.masked_fill(top, NEVER).logsumexp(1, keepdim=True) - whole
    log_p = z - whole
    return log_p, torch.where(top, others, torch.log1p(-log_p.masked_fill(top, -1.0).exp()))


# -- exact ------------------------------------------------------------------------------------------------------------------


def exact(log_p: Tensor, n: Tensor, counted: Tensor | None = None) -> Tensor:
    """(B, C) log-probabilities of winning: one pass over all outcomes for every voter."""
    bags, places, classes = log_p.shape
    outcomes, before = _outcomes(places, classes, log_p.device)
    state = torch.full((bags, len(outcomes)), NEVER, dtype=log_p.dtype, device=log_p.device)
    state[:, 0] = 0
    for i in range(places):
        vote = log_p[:, i]
        ways = F.pad(state, (0, 1), value=NEVER).index_select(1, before).unflatten(1, (-1, classes)) + vote[:, None]
        state = torch.where(vote[:, :1] > NEVER / 2, ways.logsumexp(2), state)
    return (state[:, :, None] + _log_shares(outcomes, counted)).logsumexp(1)


def _outcomes(places: int, classes: int, device):
    stars = itertools.combinations(range(places + classes), classes)
    votes = torch.tensor([[b - a - 1 for a, b in itertools.pairwise((-1, *bars))] for bars in stars])
    number = {tuple(v): i for i, v in enumerate(votes.tolist())}
    before = []
    for v in votes.tolist():
        for k in range(classes):
            v[k] -= 1
            before.append(number.get(tuple(v), len(votes)))
            v[k] += 1
    return votes.to(device), torch.tensor(before, device=device)


def _log_shares(votes: Tensor, counted: Tensor | None) -> Tensor:
    """(..., C) votes -> the logarithm of what each class gets of the win: all of it, an equal share of a tie, or nothing."""
    able = votes if counted is None else votes.masked_fill(~counted, -1)
    top = able == able.amax(-1, keepdim=True)
    return torch.where(top, -top.sum(-1, keepdim=True).double().log(), NEVER)


# -- counts -----------------------------------------------------------------------------------------------------------------


def count_laws(log_p: Tensor, log_q: Tensor) -> Tensor:
    """(B, C, J) log P(N_k = j): the product of the polynomials q + p x of all voters, two by two.

    Only positive numbers are added, so the tails keep all their digits, as they would not in a Fourier transform.
    """
    places = log_p.shape[1]
    law = torch.stack([log_q, log_p], -1).transpose(1, 2)  # (B, C, S, 2)
    while law.shape[2] > 1:
        if law.shape[2] % 2:
            law = torch.cat([law, F.pad(torch.zeros_like(law[:, :, :1, :1]), (0, law.shape[3] - 1), value=NEVER)], 2)
        law = _convolve(law[:, :, 0::2], law[:, :, 1::2])
    return law[:, :, 0, : places + 1]


def _convolve(a: Tensor, b: Tensor) -> Tensor:
    """(..., m), (..., m) logarithms -> (..., 2m-1): each row of the table a + b one step further right, then summed down."""
    m = a.shape[-1]
    table = F.pad(a[..., :, None] + b[..., None, :], (0, m), value=NEVER).flatten(-2)
    return table[..., : m * (2 * m - 1)].unflatten(-1, (m, 2 * m - 1)).logsumexp(-2)


def surplus(variance: Tensor, rounds: int = 4) -> Tensor:
    """(B, C) b, adding up to one, with variance_k proportional to b_k (1 - b_k): the share of each class in the spread.

    Independent counts with variances D, once their total is known, have variances D_k (1 - D_k / sum D). So for the counts to
    come out as they should, each must first be spread wider by 1 / (1 - b_k), b = D / sum D.
    """
    v = variance + 1e-12  # where nothing is uncertain all are alike
    b = v / v.sum(1, keepdim=True)
    for _ in range(rounds):
        b = v / (1 - b).clamp_min(1e-3)
        b = b / b.sum(1, keepdim=True)
    return b


# -- the race ---------------------------------------------------------------------------------------------------------------


def race(law: Tensor, n: Tensor | None = None, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(N_c is the largest) up to a constant, for independent counts with log-laws (B, C, J); given that they
    add up to n, if n is given.

    Class c wins with m votes if each rival stays below m. That all then add up to n is one more event: the other counts,
    each cut off at m, must together make n - m, and their sum is taken as normal, with its own mean and variance.
    """
    votes = torch.arange(law.shape[2], dtype=law.dtype, device=law.device)
    t = torch.arange(-1, 2, dtype=law.dtype, device=law.device)[:, None, None, None]  # (U, 1, 1, 1)
    u, weight = (0.5 + math.sqrt(0.15) * t).log(), ((8 - 3 * t.square()) / 18).log()
    mass = _free(_below(law, u), law, counted)  # (U, B, C, J) log P(k stays below m)
    score = weight + law + mass.sum(2, keepdim=True) - mass
    if n is not None:
        height = (votes + 1).log()  # one more than the count, which has a logarithm
        mean = (_free(_below(law + height, u), law + height, counted) - mass).exp()
        square = (_free(_below(law + 2 * height, u), law + 2 * height, counted) - mass).exp()
        spread = (square - mean.square()).clamp_min(0)
        mean = mean - 1
        missing = n[:, None, None] - votes - (mean.sum(2, keepdim=True) - mean)
        score = score + _log_normal(missing, spread.sum(2, keepdim=True) - spread + 1 / 12)  # counts are whole: 1/12
    return score.logsumexp((0, 3))


def _below(law: Tensor, u: Tensor) -> Tensor:
    """(U, B, C, J) log of the sum of all j < m, and u of j = m."""
    before = F.pad(law.logcumsumexp(2)[..., :-1], (1, 0), value=NEVER)
    return torch.logaddexp(before, law + u)


def _free(below: Tensor, law: Tensor, counted: Tensor | None) -> Tensor:
    """A class that cannot win need not stay below anything."""
    return below if counted is None else torch.where(counted[:, None], below, law.logsumexp(2, keepdim=True))


def _log_normal(x: Tensor, variance: Tensor) -> Tensor:
    return -0.5 * (x.square() / variance + variance.log())


# -- from means and variances alone -----------------------------------------------------------------------------------------


def normal(mean: Tensor, variance: Tensor, counted: Tensor | None = None, conditioned: bool = True) -> Tensor:
    """(B, C) log P(N_c is the largest) up to a constant, from the means and variances (B, C) of the counts.

    The race above with normal counts. A tie broken by lot is a count blurred by a uniform of width one: 1/12 more variance.
    """
    wide = variance / (1 - surplus(variance)) + 1 / 12
    centre, scale = _peak(mean, wide, counted)  # where class c would win, if it does
    x = centre + scale * torch.linspace(-7, 7, 57, dtype=mean.dtype, device=mean.device)[:, None, None]  # (K, B, C)
    a = (x[..., None] - mean[:, None]) / wide.sqrt()[:, None]  # (K, B, C, C): the last axis are the rivals
    rival = _rivals(mean.shape[1], counted, mean.device)
    below = torch.where(rival, torch.special.log_ndtr(a), 0.0)
    score = scale.log() + _log_normal(x - mean, wide) + below.sum(3)
    if conditioned:
        hazard = torch.where(rival, _hazard(a), 0.0)
        rest = 1 - torch.eye(mean.shape[1], dtype=mean.dtype, device=mean.device)
        means = (mean[:, None] - wide.sqrt()[:, None] * hazard) * rest
        spread = wide[:, None] * (1 - hazard * (a + hazard)).clamp_min(0) * rest
        score = score + _log_normal(mean.sum(1)[:, None] - x - means.sum(3), spread.sum(3))
    return score.logsumexp(0)


@torch.no_grad()
def _peak(mean: Tensor, wide: Tensor, counted: Tensor | None, rounds: int = 8) -> tuple[Tensor, Tensor]:
    """(B, C) the count with which c most likely wins, and how sharp that is: Newton's method on a concave function whose
    slope is convex, begun on the left of the root, from where it never overshoots."""
    x, s = mean, wide.sqrt()[:, None]
    rival = _rivals(mean.shape[1], counted, mean.device)
    curve = 1 / wide
    for _ in range(rounds):
        a = (x[..., None] - mean[:, None]) / s
        hazard = torch.where(rival, _hazard(a), 0.0)
        slope = (mean - x) / wide + (hazard / s).sum(2)
        curve = 1 / wide + (hazard * (a + hazard) / s.square()).sum(2).clamp_min(0)
        x = x + slope / curve
    return x, curve.rsqrt()


def _rivals(classes: int, counted: Tensor | None, device: torch.device) -> Tensor:
    rival = ~torch.eye(classes, dtype=torch.bool, device=device)
    return rival if counted is None else rival & counted


def _hazard(a: Tensor) -> Tensor:
    """phi(a) / Phi(a)."""
    return (-0.5 * a.square() - 0.5 * math.log(2 * math.pi) - torch.special.log_ndtr(a)).exp()


def table(law: Tensor, n: Tensor, counted: Tensor | None = None) -> Tensor:
    bags, classes, counts = law.shape
    axis = torch.arange(counts, device=law.device)
    first = torch.stack(torch.meshgrid(*[axis] * (classes - 1), indexing="ij"), -1).flatten(0, -2)  # (O, C-1)
    last = n[:, None].long() - first.sum(1)
    w = law[:, -1].gather(1, last.clamp(0, counts - 1)).masked_fill((last < 0) | (last >= counts), NEVER)
    for k in range(classes - 1):
        w = w + law[:, k, first[:, k]]
    votes = torch.cat([first.expand(bags, -1, -1), last[..., None]], 2)
    return (w[..., None] + _log_shares(votes, counted)).logsumexp(1)

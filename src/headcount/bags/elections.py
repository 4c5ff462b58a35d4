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
    """(B, C) log-probabilities of winning, outcome by outcome: S passes over a table of (S+1)^(C-1) counts."""
    bags, places, classes = log_p.shape
    column = (bags,) + (1,) * (classes - 1)
    state = F.pad(log_p.new_zeros(column), (0, places) * (classes - 1), value=NEVER)
    last = log_p[
        ..., -1
    ]  # the last class needs no axis: it gets the votes that the others do not, and an empty place none
    stay = torch.where(last > NEVER / 2, last, torch.zeros_like(last))
    for i in range(places):
        ways = [state + stay[:, i].view(column)]
        for k in range(classes - 1):
            moved = state.narrow(k + 1, 0, places)
            edge = torch.full_like(state.narrow(k + 1, 0, 1), NEVER)
            ways.append(torch.cat([edge, moved], k + 1) + log_p[:, i, k].view(column))
        state = torch.stack(ways).logsumexp(0)
    share = _shares(places, classes, n, counted)  # (B, C, outcomes)
    return (state.view(bags, 1, -1) + share).logsumexp(2)


def _shares(places: int, classes: int, n: Tensor, counted: Tensor | None) -> Tensor:
    """(B, C, outcomes) the logarithm of what each class gets of the win, for every outcome of the first C-1 classes."""
    axis = torch.arange(places + 1, device=n.device)
    first = torch.stack(torch.meshgrid(*[axis] * (classes - 1), indexing="ij")).flatten(1)  # (C-1, outcomes)
    first = first.expand(len(n), *first.shape)
    votes = torch.cat([first, n[:, None, None].to(first.dtype) - first.sum(1, keepdim=True)], 1)
    if counted is not None:
        votes = votes.masked_fill(~counted[:, None], -places - 1)
    top = votes == votes.amax(1, keepdim=True)
    if counted is not None:
        top = top & counted[:, None]
    return torch.where(top, -top.sum(1, keepdim=True).double().log(), NEVER)


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
    u, weight = torch.tensor(TIE, dtype=law.dtype, device=law.device).log().T[:, :, None, None, None]  # (U, 1, 1, 1)
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

"""A test of the assumption that features depend only on the class and not on the bag, from bag labels alone; and how far class
shares move if it fails.

If P(x | y) is the same in every bag, the mean of any numbers g(x) over a bag is sum_k theta_k mu_k + noise: its differences between
bags lie in the space that differences of the C class means mu_k span. The mean over the bags of one label lies in it too, so the
labels show the space without any instance's class. What is left of the instances after projecting it out is independent within a
bag, and

    u_b  =  sum over pairs i != j of bag b of  e_i . e_j / (n_b (n_b - 1)),      statistic = sum_b n_b u_b

is zero on average. Its distribution under the assumption is that of the same sum with a random sign for every instance.

Letters: N instances, B bags, C classes, M numbers of each instance.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError

MIN_BAGS = 10
MAX_SHIFT = 20.0  # of log-odds
_BISECTIONS = 40


class Homogeneity(NamedTuple):
    """The result of the test."""

    excess: float  # of what is left of the features, the fraction that the instances of a bag have in common
    p_value: float  # small: features depend on the bag
    bags: int


def prediction_scores(p: Tensor) -> Tensor:
    """(N, M) what probabilities (N, C) of instances show of them: centred log-probabilities, their squares and products."""
    z = p.double().clamp_min(1e-4).log()
    z = (z - z.mean(1, keepdim=True))[:, : min(p.shape[1], 6)]
    z = z[:, :-1] if p.shape[1] <= 6 else z  # the last follows from the others
    rows, columns = torch.triu_indices(z.shape[1], z.shape[1])
    return torch.cat([z, z[:, rows] * z[:, columns]], 1)


@torch.no_grad()
def assess_homogeneity(
    scores: Tensor, segments: Segments, target: Tensor, *, generator: torch.Generator, draws: int = 499
) -> Homogeneity:
    """Test whether numbers of instances depend only on the class.

    Parameters
    ----------
    scores
        (N, M) any numbers of the instances that do not come from a model trained on their bags' labels: features, principal
        components, or :func:`prediction_scores` of out-of-fold probabilities without context.
    segments, target
        The bag of each instance, and the labels (B, C) of the bags; at least ten bags with a label.
    generator, draws
        Of the random signs; the least p-value is 1 / (draws + 1).
    """
    labelled = target.sum(1) > 0
    if int(labelled.sum()) < MIN_BAGS or len(scores) != len(segments.index):
        raise HeadcountError(
            f"the test takes numbers of {len(segments.index)} instances and at least {MIN_BAGS} labelled bags, got "
            f"{len(scores)} and {int(labelled.sum())}"
        )
    plain = Segments(segments.index, segments.n_bags)  # each instance is one observation, whatever its weight
    present, n = ~plain.removed, plain.total_weight().double()
    x = scores.double()
    x = x - x[present].mean(0)
    x = torch.where(present[:, None], x, 0.0)
    within = x - plain.broadcast(plain.mean(x))
    values, vectors = torch.linalg.eigh(within.T @ within / max(1, len(x) - len(n)))
    kept = values > 1e-8 * values.max().clamp_min(1e-30)
    x = x @ (vectors[:, kept] / values[kept].sqrt())
    rank = min(int((target.sum(0) > 0).sum()) - 1, x.shape[1] - 1)
    if rank < 1:
        raise HeadcountError("the test needs two labels, and more numbers of an instance than labels less one")
    of_label = target.double() / (target.double() * n[:, None]).sum(0).clamp_min(1e-9).sqrt()

    def fit(x: Tensor) -> tuple[Tensor, Tensor]:
        """What the labels' directions explain of ``x`` (N, M), and what the instances of a bag have in common beyond it."""
        sums = plain.sum(x)
        directions = torch.linalg.svd(of_label.T @ sums, full_matrices=False).Vh[:rank]
        residual_sums = sums - sums @ directions.T @ directions
        squares = (x**2).sum(1) - ((x @ directions.T) ** 2).sum(1)
        return directions, ((residual_sums**2).sum(1) - plain.sum(squares)) / (n - 1).clamp_min(1)

    directions, common = fit(x)
    explained, observed, exceeded = x @ directions.T @ directions, float(common.sum()), 0
    for _ in range(draws):  # the directions are estimated again, so that their error is part of the distribution
        sign = 2 * torch.randint(2, (len(x), 1), generator=generator).double() - 1
        exceeded += float(fit(explained + sign * (x - explained))[1].sum()) >= observed
    excess = observed / max(float(((x - explained) ** 2).sum()), 1e-30)
    return Homogeneity(excess, (1 + exceeded) / (1 + draws), len(n))


def share_range(p: Tensor, segments: Segments, delta: float) -> tuple[Tensor, Tensor]:
    """The least and the largest share (B, C) of each class in each segment if, in this segment, the log-odds of the class against
    all others differ by up to ``delta`` from those of ``p`` (N, C). Segments may be bags, groups, or groups within bags.

    >>> low, high = share_range(torch.tensor([[0.5, 0.5], [0.9, 0.1]]), Segments.from_sizes([2]), 0.5)
    >>> [round(float(v[0, 0]), 2) for v in (low, high)]
    [0.61, 0.78]
    """
    if not 0 <= delta < math.inf:
        raise HeadcountError(f"the shift of log-odds is a number from 0, got {delta}")
    logit = _logit(p)
    return segments.mean((logit - delta).sigmoid()), segments.mean((logit + delta).sigmoid())


def flip_shift(p: Tensor, segments: Segments) -> Tensor:
    """(B,) the smallest shift of log-odds, of the largest class against another, at which it is no longer the largest of its
    segment; infinite if 20 is not enough. ``p`` is (N, C).

    >>> flip_shift(torch.tensor([[0.6, 0.4], [0.6, 0.4]]), Segments.from_sizes([2])).round(decimals=3)
    tensor([0.4050], dtype=torch.float64)
    """
    log_p, most = p.double().clamp_min(1e-30).log(), segments.mean(p.double()).argmax(1)
    smallest = torch.full((segments.n_bags,), math.inf, dtype=torch.float64)
    leader = torch.nn.functional.one_hot(most, p.shape[1])
    for rival in range(p.shape[1]):
        direction = (torch.nn.functional.one_hot(torch.tensor(rival), p.shape[1]) - leader).double() / 2

        def lead(shift: Tensor, direction: Tensor = direction) -> Tensor:
            q = segments.mean((log_p + segments.broadcast(shift[:, None] * direction)).softmax(1))
            return -2 * (q * direction).sum(1)

        low, high = torch.zeros_like(smallest), torch.full_like(smallest, MAX_SHIFT)
        flips = (lead(high) <= 0) & (most != rival)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            ahead = lead(middle) > 0
            low, high = torch.where(ahead, middle, low), torch.where(ahead, high, middle)
        smallest = torch.where(flips, torch.minimum(smallest, high), smallest)
    return smallest


def _logit(p: Tensor) -> Tensor:
    p = p.double().clamp(1e-12, 1 - 1e-12)
    return p.log() - (-p).log1p()

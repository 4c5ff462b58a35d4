"""What a bag's label proves about its class shares, and instance probabilities that agree with known shares.

If m of C counted classes win a bag (m = 1, or more in a tie), no counted class is more frequent than they are:

    1 / C <= share of a winner <= 1 / m,        share of any other counted class <= 1 / (m + 1)

If some classes are not counted, a winner has one instance at least. The shares of n instances without weights are multiples of
1 / n, to which the bounds are rounded inwards. Votes are shares already. A group that is the part w of a bag (Duncan and Davis
1953) has at least what the others cannot hold, and at most all:

    max(0, (low - (1 - w)) / w) <= share in the group <= min(1, high / w)
"""

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.majority.proportions import project_to_majority

Bounds = tuple[Tensor, Tensor]


def share_bounds(bags: Bags, *, exact: bool = False, among_counted: bool = False) -> Bounds:
    """(B, C) the lowest and the highest share of each class that the labels and sizes of the bags allow.

    Parameters
    ----------
    bags
        Of which an unlabelled one proves nothing.
    exact
        The targets are votes, the shares of the counted classes, rather than labels; ``bags.votes`` says whether they are whole
        numbers, of which there may be fewer than instances.
    among_counted
        Shares of the instances of counted classes only, rather than of all.

    Examples
    --------
    >>> from headcount.bags import Pool
    >>> bags = Bags.of(Pool([[0.0]] * 7), sizes=[7], labels=[0], classes=3)
    >>> low, high = share_bounds(bags)
    >>> (7 * low).round().tolist(), (7 * high).round().tolist()
    ([[3.0, 0.0, 0.0]], [[7.0, 3.0, 3.0]])
    """
    target = bags.target.double()
    counted = torch.ones(target.shape[1], dtype=torch.bool) if bags.counted is None else bags.counted
    only_counted, labelled = among_counted or bool(counted.all()), bags.labelled[:, None]
    won = labelled & (target >= target.amax(1, keepdim=True) - 1e-6)
    winners = won.sum(1, keepdim=True)
    n = bags.segments().n_instances()[:, None].double()
    one = 1 / n if bags.weight is None else torch.zeros_like(n)
    low = torch.where(won, 1 / int(counted.sum()) if only_counted else one, torch.zeros_like(target))
    others = torch.where(counted, 1 / (winners + 1.0), torch.zeros_like(n) if only_counted else 1 - winners * one)
    high = torch.where(won, 1.0 / winners.clamp_min(1), others)
    if exact:
        low = torch.where(labelled, target if only_counted else torch.zeros_like(target), low)
        high = torch.where(labelled & counted, target, high)
        return (
            (low, high)
            if bags.votes is None or (among_counted and not counted.all())
            else _count_bounds(bags, counted, low, high)
        )
    if bags.weight is None and (not among_counted or bool(counted.all())):
        whole_low, whole_high = (low * n + 1 - 1e-9).floor() / n, (high * n + 1e-9).floor() / n
        possible = (whole_low <= whole_high).all(1) & (whole_low.sum(1) < 1 + 1e-9) & (whole_high.sum(1) > 1 - 1e-9)
        low, high = (torch.where(possible[:, None], *ends) for ends in ((whole_low, low), (whole_high, high)))
    return low, high


def _count_bounds(bags: Bags, counted: Tensor, low: Tensor, high: Tensor) -> Bounds:
    """The bounds ``low`` and ``high`` (B, C) of bags whose votes are not counts; those of the others by their counts. If these are
    fewer than the instances, the rest are of uncounted classes, or of any class; more prove nothing about the instances."""
    votes = torch.zeros_like(low) if bags.votes is None else bags.votes.double()
    size, total = bags.segments().total_weight().double()[:, None], votes.sum(1, keepdim=True)
    known, rest = votes / size, 1 - total / size
    most = torch.where(counted, known, rest) if not counted.all() else known + rest
    least, most = (torch.where(total > size + 0.5, end, v) for end, v in ((0.0, known), (1.0, most)))
    return torch.where(total > 0, least, low), torch.where(total > 0, most.clamp(0, 1), high)


def cell_bounds(low: np.ndarray, high: np.ndarray, part: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(P, C) the bounds of groups, each the ``part`` (P, 1) of a bag with bounds ``low`` and ``high`` (P, C)."""
    return np.clip((low - 1 + part) / part, 0, 1), np.clip(high / part, 0, 1)


def shares_given_labels(share: Tensor, bags: Bags, bounds: Bounds, *, exact: bool = False) -> Tensor:
    """(B, C) the shares changed as little as the label requires: in the ``bounds`` of :func:`share_bounds`, the label's class
    largest; of votes, the counted classes have their shares."""
    share, target = share.double(), bags.target.double()
    if exact:
        rest = torch.zeros_like(share) if bags.counted is None else share.masked_fill(bags.counted, 0).minimum(bounds[1])
        share = torch.where(bags.labelled[:, None], rest + target * (1 - rest.sum(1, keepdim=True)), share)
        return fit_to_bounds(share, bounds)
    return fit_to_bounds(project_to_majority(share, target, bags.counted), bounds)


def fit_to_bounds(share: Tensor, bounds: Bounds) -> Tensor:
    """(B, C) shares between the bounds that add up to one: those of a bag are multiplied by one factor, then clipped."""
    share = share.clamp_min(1e-9)
    least, most = torch.full((len(share), 1), -30.0, dtype=share.dtype), torch.full((len(share), 1), 30.0, dtype=share.dtype)
    for _ in range(60):  # bisection for the logarithm of the factor
        middle = (least + most) / 2
        too_small = (share * middle.exp()).clamp(*bounds).sum(1, keepdim=True) < 1
        least, most = torch.where(too_small, middle, least), torch.where(too_small, most, middle)
    return (share * most.exp()).clamp(*bounds)


def match_shares(p: Tensor, segments: Segments, share: Tensor, *, steps: int = 200, tolerance: float = 1e-7) -> Tensor:
    """(N, C) probabilities of instances whose mean in each bag is ``share`` (B, C): each class of a bag is multiplied by one
    factor, found by iterative proportional fitting. That is P(y | x, bag) for bags with these shares. Removed instances get
    zeros, and those of a bag without shares too. With a tolerance of 0 all steps are done, and no tensor's value is needed.

    >>> p = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    >>> match_shares(p, Segments.from_sizes([2]), torch.tensor([[0.5, 0.5]])).round(decimals=2).tolist()
    [[0.75, 0.25], [0.25, 0.75]]
    """
    p, factor = p.double().clamp_min(1e-9), torch.ones_like(share, dtype=torch.float64)
    for _ in range(steps):
        matched = p * segments.broadcast(factor)
        matched = matched / matched.sum(1, keepdim=True).clamp_min(1e-300)
        mean = segments.mean(matched)
        if tolerance and float((mean - share).abs().max()) < tolerance:
            break
        factor = factor * share / mean.clamp_min(1e-300)
        factor = factor / factor.amax(1, keepdim=True).clamp_min(1e-300)
    return matched

"""MPEM, the Majority Proportion Enhancement Module, as pure functions: features and votes in, whom to remove out.

In a bag labelled c, the instances a Counting Network does not vote c for are its dissenters; those farthest from c's
prototype are taken out of the count, so that the majority becomes clearer. (Learning from Majority Label, 2025.)

    h         (N, D) features      said      (N,) the vote of each instance
    bag       (N,) its bag         label     (B,) the bag's class, -1 if it has none
    bag_said  (B,) what the network said of the bag
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.errors import HeadcountError, check_choice

DISTANCES = ("euclidean", "mahalanobis")
PROTOTYPE_BAGS = ("correct", "all")


@dataclass(frozen=True)
class Prototypes:
    """One point per class in feature space; ``members`` says from how many instances, and 0 means there is none."""

    centre: Tensor  # (C, D) float64
    members: Tensor  # (C,)
    precision: Tensor | None = None  # (C, D, D) pseudo-inverse of the members' covariance


def prototypes(
    h: Tensor,
    votes: Tensor,
    bag: Tensor,
    label: Tensor,
    bag_prediction: Tensor,
    classes: int,
    bags: str = "correct",
    distance: str = "euclidean",
) -> Prototypes:
    """The mean feature of the instances that vote for their bag's class: in bags said right (``correct``, as released),
    or in all bags of the class (``all``, as the paper has it)."""
    check_choice("prototype bags", bags, PROTOTYPE_BAGS)
    check_choice("distance", distance, DISTANCES)
    loyal = votes == label[bag]
    if bags == "correct":
        loyal &= (bag_prediction == label)[bag]
    h = h.double()
    members = torch.bincount(votes[loyal], minlength=classes)
    centre = h.new_zeros(classes, h.shape[1]).index_add(0, votes[loyal], h[loyal])
    centre /= members.clamp_min(1)[:, None]
    if distance == "euclidean":
        return Prototypes(centre, members)
    # one instance has no covariance: nobody is removed for its class
    members = torch.where(members > 1, members, 0)
    spread = [
        h[loyal & (votes == c)].T.cov() if members[c] else h.new_zeros(h.shape[1], h.shape[1]) for c in range(classes)
    ]
    covariance = torch.stack([s.reshape(h.shape[1], h.shape[1]) for s in spread])
    return Prototypes(centre, members, torch.linalg.pinv(covariance, hermitian=True))


def distances(h: Tensor, bag: Tensor, label: Tensor, prototypes: Prototypes) -> Tensor:
    """(N,) how far each instance is from the prototype of its bag's class; NaN where there is no prototype."""
    own = label[bag]
    d = torch.full((len(h),), torch.nan, dtype=torch.float64, device=h.device)
    for c in prototypes.members.nonzero().flatten().tolist():
        away = h[own == c].double() - prototypes.centre[c]
        square = (away * (away if prototypes.precision is None else away @ prototypes.precision[c])).sum(1)
        d[own == c] = square.clamp_min(0).sqrt()
    return d


def dissenters(distance: Tensor, votes: Tensor, bag: Tensor, label: Tensor, removal: float) -> Tensor:
    """(N,) whom to remove: of each bag's a dissenters the int(a * removal) farthest from the prototype.

    A bag that would lose everybody keeps the instance nearest to the prototype. Instances lie bag by bag.
    """
    if not 0 <= removal <= 1:
        raise HeadcountError(f"removal is a share from 0 to 1, got {removal}")
    dissent = (votes != label[bag]) & torch.isfinite(distance) & (label[bag] >= 0)
    sizes = torch.bincount(bag, minlength=len(label))
    many = torch.bincount(bag[dissent], minlength=len(label))
    quota = torch.minimum((many.double() * removal).long(), sizes - 1)  # truncated, as released
    far = torch.where(dissent, distance, -torch.inf)
    order = torch.argsort(far, descending=True, stable=True)
    order = order[torch.argsort(bag[order], stable=True)]  # bag by bag, the farthest dissenter first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[bag[order]]
    return dissent & (rank < quota[bag])

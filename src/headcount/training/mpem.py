"""MPEM, the Majority Proportion Enhancement Module: which instances to remove, from features and votes.

In a bag labelled c, the instances for which a Counting Network does not vote c are its dissenters; those farthest from the
prototype of c are removed, so that the majority becomes clearer. (Learning from Majority Label, 2025.)

    h               (N, D)  features       votes  (N,)  the predicted class of each instance
    bag             (N,)    its bag        label  (B,)  the class of the bag, -1 if it has none
    bag_prediction  (B,)    the predicted class of the bag
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.errors import HeadcountError, check_choice

DISTANCES = ("euclidean", "mahalanobis")
PROTOTYPE_BAGS = ("correct", "all")


@dataclass(frozen=True)
class Prototypes:
    """One point per class in feature space, the mean of ``members`` instances; 0 members: there is no prototype."""

    centre: Tensor  # (C, D) float64
    members: Tensor  # (C,)
    precision: Tensor | None = None  # (C, D, D) pseudo-inverse of the members' covariance


def prototypes(
    h: Tensor, votes: Tensor, bag: Tensor, label: Tensor, bag_prediction: Tensor, classes: int,
    bags: str = "correct", distance: str = "euclidean",
) -> Prototypes:  # fmt: skip
    """The mean features of the instances that vote for the class of their bag: in correctly predicted bags (``correct``, as
    released), or in all bags of the class (``all``, as in the paper)."""
    check_choice("prototype bags", bags, PROTOTYPE_BAGS)
    check_choice("distance", distance, DISTANCES)
    agrees = votes == label[bag]
    if bags == "correct":
        agrees &= (bag_prediction == label)[bag]
    h = h.double()
    members = torch.bincount(votes[agrees], minlength=classes)
    centre = h.new_zeros(classes, h.shape[1]).index_add(0, votes[agrees], h[agrees]) / members.clamp_min(1)[:, None]
    if distance == "euclidean":
        return Prototypes(centre, members)
    members = torch.where(members > 1, members, 0)  # one instance has no covariance
    zeros = h.new_zeros(h.shape[1], h.shape[1])
    covariances = [h[agrees & (votes == c)].T.cov().reshape(zeros.shape) if members[c] else zeros for c in range(classes)]
    return Prototypes(centre, members, torch.linalg.pinv(torch.stack(covariances), hermitian=True))


def distances(h: Tensor, bag: Tensor, label: Tensor, prototypes: Prototypes) -> Tensor:
    """(N,) the distance of each instance from the prototype of the class of its bag; NaN where there is none."""
    bag_class = label[bag]
    d = torch.full((len(h),), torch.nan, dtype=torch.float64, device=h.device)
    for c in prototypes.members.nonzero().flatten().tolist():
        difference = h[bag_class == c].double() - prototypes.centre[c]
        scaled = difference if prototypes.precision is None else difference @ prototypes.precision[c]
        d[bag_class == c] = (difference * scaled).sum(1).clamp_min(0).sqrt()
    return d


def dissenters(distance: Tensor, votes: Tensor, bag: Tensor, label: Tensor, removal: float) -> Tensor:
    """(N,) which instances to remove: of the a dissenters of each bag the int(a * removal) farthest from the prototype.

    A bag that would lose all instances keeps the one nearest to the prototype. Instances are sorted by bag.
    """
    if not 0 <= removal <= 1:
        raise HeadcountError(f"removal must be from 0 to 1, got {removal}")
    dissents = (votes != label[bag]) & torch.isfinite(distance) & (label[bag] >= 0)
    sizes = torch.bincount(bag, minlength=len(label))
    n_dissenters = torch.bincount(bag[dissents], minlength=len(label))
    quota = torch.minimum((n_dissenters.double() * removal).long(), sizes - 1)  # truncated, as released
    order = torch.argsort(torch.where(dissents, distance, -torch.inf), descending=True, stable=True)
    order = order[torch.argsort(bag[order], stable=True)]  # by bag, the farthest dissenter first
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - (sizes.cumsum(0) - sizes)[bag[order]]
    return dissents & (rank < quota[bag])

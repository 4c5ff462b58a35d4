"""Fewer instances of the same bags, or bags cut into parts, where that is as good and cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headcount.bags import Bags
from headcount.seeds import seed_for

MAX_BAG_SIZE = 8192  # instances; an election of this many votes is hardly ever close
CONTEXT_BAG_SIZE = 200  # instances of a bag that show what they tell about each other


def split_large_bags(bags: Bags, max_size: int | None = None) -> Bags:
    """The same instances in the same order, with bags larger than ``max_size`` cut into equal parts of the same label.

    As good as the bag for methods that use one instance at a time. The groups and names of bags are dropped.
    """
    max_size = max_size or MAX_BAG_SIZE
    parts = [-(-size // max_size) for size in bags.sizes.tolist()]
    sizes = [size // n + (i < size % n) for size, n in zip(bags.sizes.tolist(), parts, strict=True) for i in range(n)]
    offsets = torch.tensor([0, *np.cumsum(sizes)], device=bags.offsets.device)
    target = bags.target.repeat_interleave(torch.tensor(parts, device=bags.target.device), 0)
    return replace(bags, offsets=offsets, target=target, group=None, names=None)


def subsample_instances(bags: Bags, max_instances: int, seed: int = 0) -> Bags:
    """At most ``max_instances``, the same fraction of every bag and at least one; instances of known class are all kept.

    The sampled instances are weighted to represent those left out, so that the size of a bag (from which follows how slight
    its majority can be) and the weight of its known classes stay the same.
    """
    if len(bags.index) <= max_instances:
        return bags
    rows = sample_rows(bags, max_instances, seed)
    subsample, bag = _keep_rows(bags, rows), bags.bag
    weight = torch.ones(len(bags.index), device=bag.device) if bags.weight is None else bags.weight
    drawn = (
        weight if bags.known is None else weight.masked_fill(bags.known >= 0, 0)
    )  # known classes represent themselves
    total, sampled = (torch.bincount(bag[r], drawn[r].double(), len(bags)) for r in (slice(None), rows))
    factor = (total / sampled.clamp_min(1e-30))[subsample.bag].to(weight.dtype)
    return replace(subsample, weight=weight[rows] - drawn[rows] + drawn[rows] * factor)


def sample_rows(bags: Bags, max_instances: int, seed: int = 0) -> torch.Tensor:
    """The instances that :func:`subsample_instances` keeps."""
    n = len(bags.index)
    if n <= max_instances:
        return torch.arange(n)
    quota = np.maximum(1, bags.sizes.cpu().numpy() * max_instances // n)
    return _draw_rows(bags, quota, np.random.default_rng(seed_for(seed, "thinned")))


def subsample_bags(bags: Bags, max_instances: int, seed: int = 0) -> tuple[Bags, torch.Tensor]:
    """Random bags with at most ``max_instances`` together, and the numbers of these instances.

    For what the instances of a bag tell about each other: a single one tells nothing, and a weighted one too much. So bags stay
    whole, and ``CONTEXT_BAG_SIZE`` instances, or more, of a larger bag represent it.
    """
    if len(bags.index) <= max_instances:
        return bags, torch.arange(len(bags.index))
    rng = np.random.default_rng(seed_for(seed, "some bags"))
    size = min(max_instances, max(CONTEXT_BAG_SIZE, max_instances // len(bags)))
    quota, order = bags.sizes.cpu().numpy().clip(max=size), rng.permutation(len(bags))
    quota[order[quota[order].cumsum() > max_instances]] = 0
    rows = _draw_rows(bags, quota, rng)
    return _keep_rows(bags, rows).take(quota > 0), rows


def _draw_rows(bags: Bags, quota: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Random instances of each bag, ``quota`` (B,) many; where that is not zero, also all of known class."""
    n, bag = len(bags.index), bags.bag.cpu().numpy()
    known = np.zeros(n, bool) if bags.known is None else bags.known.cpu().numpy() >= 0
    order = np.lexsort((rng.random(n), known, bag))  # known classes are kept anyway
    rank = np.arange(n) - bags.offsets[:-1].cpu().numpy()[bag[order]]
    keep = np.zeros(n, bool)
    keep[order] = rank < quota[bag[order]]
    return torch.from_numpy(np.flatnonzero(keep | (known & (quota > 0)[bag])))


def _keep_rows(bags: Bags, rows: torch.Tensor) -> Bags:
    """The bags with these instances only, blind."""
    per_instance = {k: None if (v := getattr(bags, k)) is None else v[rows] for k in ("known", "removed", "weight")}
    sizes = torch.bincount(bags.bag[rows], minlength=len(bags))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return replace(bags, index=bags.index[rows], offsets=offsets, truth=None, **per_instance)

"""Less of the same bags: some of their instances, or bags cut up, where that is as good and cheaper."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from headcount.bags import Bags
from headcount.seeds import seed_for

MAX_BAG_SIZE = 8192  # instances: a vote of so many is no close one
MAX_CONTEXT_INSTANCES = 200  # instances of a bag, to see what they tell of each other


def split_large_bags(bags: Bags, max_size: int | None = None) -> Bags:
    """The same instances in the same order, bags larger than ``most`` cut into equal parts with the bag's label: as good as
    the bag where only its instances are looked at. The groups and names of bags are left behind."""
    max_size = max_size or MAX_BAG_SIZE
    parts = [-(-size // max_size) for size in bags.sizes.tolist()]
    each = [size // n + (i < size % n) for size, n in zip(bags.sizes.tolist(), parts, strict=True) for i in range(n)]
    offsets = torch.tensor([0, *np.cumsum(each)], device=bags.offsets.device)
    target = bags.target.repeat_interleave(torch.tensor(parts, device=bags.target.device), 0)
    return replace(bags, offsets=offsets, target=target, group=None, names=None)


def subsample_instances(bags: Bags, max_instances: int, seed: int = 0) -> Bags:
    """At most so many instances, drawn alike from every bag; each bag keeps one at least. Known classes all stay.

    Those drawn stand for those of their bag that were left out, so that bags are as large as they were (how slight a majority
    can be follows from that) and hold as much of what is known."""
    if len(bags.index) <= max_instances:
        return bags
    rows = sample_rows(bags, max_instances, seed)
    subsample, bag = _keep_rows(bags, rows), bags.bag
    weight = torch.ones(len(bags.index), device=bag.device) if bags.weight is None else bags.weight
    drawn = weight if bags.known is None else weight.masked_fill(bags.known >= 0, 0)  # the known stand for themselves
    all_, here = (torch.bincount(bag[r], drawn[r].double(), len(bags)) for r in (slice(None), rows))
    more = (all_ / here.clamp_min(1e-30))[subsample.bag].to(weight.dtype)
    return replace(subsample, weight=weight[rows] - drawn[rows] + drawn[rows] * more)


def sample_rows(bags: Bags, max_instances: int, seed: int = 0) -> torch.Tensor:
    """The instances that :func:`thinned` keeps."""
    n = len(bags.index)
    if n <= max_instances:
        return torch.arange(n)
    quota = np.maximum(1, bags.sizes.cpu().numpy() * max_instances // n)
    return _draw_rows(bags, quota, np.random.default_rng(seed_for(seed, "thinned")))


def subsample_bags(bags: Bags, max_instances: int, seed: int = 0) -> tuple[Bags, torch.Tensor]:
    """Bags drawn by lot with at most so many instances together, and which instances these are.

    For what the instances of a bag tell of each other: one that is alone tells nothing, and one that stands for others is too
    sure of them. So bags stay whole, and ``ENOUGH`` drawn from a larger one are a bag like it."""
    if len(bags.index) <= max_instances:
        return bags, torch.arange(len(bags.index))
    rng = np.random.default_rng(seed_for(seed, "some bags"))
    each = min(max_instances, max(MAX_CONTEXT_INSTANCES, max_instances // len(bags)))
    quota, order = bags.sizes.cpu().numpy().clip(max=each), rng.permutation(len(bags))
    quota[order[quota[order].cumsum() > max_instances]] = 0
    rows = _draw_rows(bags, quota, rng)
    return _keep_rows(bags, rows).take(quota > 0), rows


def _draw_rows(bags: Bags, quota: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """So many instances of each bag, by lot; of a bag of which some are, all that are known."""
    n, bag = len(bags.index), bags.bag.cpu().numpy()
    known = np.zeros(n, bool) if bags.known is None else bags.known.cpu().numpy() >= 0
    order = np.lexsort((rng.random(n), known, bag))  # the known need not be drawn
    rank = np.arange(n) - bags.offsets[:-1].cpu().numpy()[bag[order]]
    keep = np.zeros(n, bool)
    keep[order] = rank < quota[bag[order]]
    return torch.from_numpy(np.flatnonzero(keep | (known & (quota > 0)[bag])))


def _keep_rows(bags: Bags, rows: torch.Tensor) -> Bags:
    """The bags with these instances alone, blind."""
    per_instance = {k: None if (v := getattr(bags, k)) is None else v[rows] for k in ("known", "removed", "weight")}
    sizes = torch.bincount(bags.bag[rows], minlength=len(bags))
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    return replace(bags, index=bags.index[rows], offsets=offsets, truth=None, **per_instance)

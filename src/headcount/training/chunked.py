"""Any size: a batch that does not fit is taken in groups of bags, a bag that does not fit in chunks; the gradient is the same.

Groups of whole bags add up their gradients, each by its mass. A bag too large for one group is gone through twice. First
without a graph: what the head notes of each chunk is kept, joined and decided, and the loss gives the slope of every note.
Then chunk by chunk with a graph, which is driven backwards from those slopes and forgotten. Dropout and views draw the same
again. So no more than ``chunk_instances`` instances are ever in work, and a few numbers per chunk.

Batch-norm cannot be learned so: its statistics are those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.bags.prefetch import release_large_blocks
from headcount.errors import HeadcountError
from headcount.models.heads import BagStats, Batch, Output, Pass
from headcount.models.network import Model
from headcount.training.accel import device as speed
from headcount.training.loader import BagLoader


def split_into_groups(feed: BagLoader, which: Tensor, over: str, views: int, budget: int) -> list[Tensor]:
    """A step's bags in groups of at most ``budget`` instances; a larger bag is a group of its own. Without budget: one."""
    if not budget:
        return [which]
    if over == "instances":
        return list(which.split(max(1, budget // views)))
    made, size = [0], 0
    for number, n in enumerate((feed.bags.sizes[which] * views).tolist()):
        if size and size + n > budget:
            made.append(number)
            size = 0
        size += n
    return list(which.tensor_split(made[1:]))


def read_order(
    feed: BagLoader, steps: Iterable[Tensor], over: str = "bags", views: int = 1, budget: int = 0, times: int = 1
) -> Iterator[Tensor]:
    """The places these steps will read, in order; a bag in chunks is read ``times`` times over."""
    for which in steps:
        for group in split_into_groups(feed, which, over, views, budget) if len(which) else ():
            place = group if over == "instances" else feed.bags._rows(group)
            if over == "bags" and budget and len(place) * views > budget:
                for _ in range(times):
                    yield from place.split(budget)
            else:
                yield place


class ChunkedStep:
    """Steps in pieces for one training. Made only where the recipe sets ``chunk_instances``."""

    def __init__(self, training: Any) -> None:
        self.training, self.budget = training, training.config.chunk_instances
        self.head, self.device = training.head, training.device
        self.times = 1 if self.head.uses_instance_labels and training.train_loader.bags.known is not None else 2
        self._check(training.train_loader, self.head.views, learns=True)
        self._check(training.valid_loader, 1, learns=False)

    def needed(self, feed: BagLoader, which: Tensor, over: str = "bags", views: int = 1) -> bool:
        size = len(which) if over == "instances" else int(feed.bags.sizes[which].sum())
        return size * views > self.budget

    def backward(self, one: Pass, which: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of the whole step in the parameters; its loss, and how much it is a mean over."""
        t = self.training
        views = t.views(one)
        parts = split_into_groups(t.train_loader, which, one.over, views, self.budget)
        masses = torch.stack(
            [self.head.loss_weight(t.train_loader.batch(g, one.over, views)[0]).float() for g in parts]
        )
        shares = masses / masses.sum().clamp_min(1e-12)
        t.model.zero_grad(set_to_none=True)
        losses = []
        for group, share in zip(parts, shares, strict=True):
            if self._cut(t.train_loader, group, one.over, views):
                losses.append(self._bag(t.model, t.train_loader, group, share))
            else:
                x, batch = t.train_loader.batch(group, one.over, views)
                loss = t.loss(x, batch, one.uses_teacher)
                (loss * share).backward()
                losses.append(loss.detach())
        return (torch.stack(losses) * shares).sum(), masses.sum()

    @torch.no_grad()
    def valid_loss(self, which: Tensor) -> Tensor:
        """The validation loss of a batch."""
        t = self.training
        parts = split_into_groups(t.valid_loader, which, "bags", 1, self.budget)
        masses = torch.stack([t.eval_model.head.loss_weight(t.valid_loader.batch(g)[0]).float() for g in parts])
        losses = [
            self._bag(t.eval_model, t.valid_loader, g, None)
            if self._cut(t.valid_loader, g)
            else t.batch_valid_loss(*t.valid_loader.batch(g))
            for g in parts
        ]
        return (torch.stack(losses) * masses).sum() / masses.sum().clamp_min(1e-12)

    # -- one bag, chunk by chunk ----------------------------------------------------------------------------------------

    def _bag(self, model: Model, feed: BagLoader, bag: Tensor, share: Tensor | None) -> Tensor:
        """The loss of one bag; with a ``share`` its gradient too, times that."""
        release_large_blocks()
        batch, place = feed.batch_info(bag)
        chunks = [_chunk(batch, rows) for rows in torch.arange(len(place)).split(self.budget)]
        places = place.split(self.budget)
        if model.head.uses_instance_labels and batch.known is not None:
            return self._told(model, feed, list(zip(chunks, places, strict=True)), share)
        seed = int(torch.randint(1 << 62, ()))
        noted = []
        for number, (chunk, at) in enumerate(zip(chunks, places, strict=True)):
            with torch.no_grad():
                noted.append(self._hear(model, feed.read(at), chunk.segments, seed + number))
        if share is None:
            return self._decided(model, noted, batch)
        leaves = [{k: v.requires_grad_(v.is_floating_point()) for k, v in one.items()} for one in noted]
        with torch.enable_grad():
            loss = self._decided(model, leaves, batch)
            (loss * share).backward()
        for number, (chunk, at) in enumerate(zip(chunks, places, strict=True)):
            x = feed.read(at)
            if bool(chunk.segments.removed.all()):
                continue  # nobody counts here: nothing was noted, and nothing has a slope
            again = self._hear(model, x, chunk.segments, seed + number)
            slopes = {k: leaves[number][k].grad for k, v in again.items() if v.requires_grad}
            driven = {k: slope for k, slope in slopes.items() if slope is not None}
            if driven:
                torch.autograd.backward([again[k] for k in driven], list(driven.values()))
        return loss.detach()

    def _hear(self, model: Model, x: Tensor, segments: Segments, seed: int) -> BagStats:
        t = self.training
        kind = t.config.views if model.training else "none"
        with replay_rng(seed, self.device), speed.autocast(t.config.precision, self.device):
            return model.head.accumulate(t.features(model, x, kind), segments)[1]

    def _decided(self, model: Model, noted: list[BagStats], batch: Batch) -> Tensor:
        with speed.autocast(self.training.config.precision, self.device):
            absent: Any = MissingLogits(self.training.model.config.head)
            output = Output(absent, *model.head.readout(model.head.merge(noted)))
            return model.head.loss(output, batch, None)

    def _told(self, model: Model, feed: BagLoader, chunks: list[tuple[Batch, Tensor]], share: Tensor | None) -> Tensor:
        """Instances that are told their own labels need no bag: chunks are groups like any other."""
        t, masses = self.training, torch.stack([model.head.loss_weight(chunk).float() for chunk, _ in chunks])
        part, losses = masses / masses.sum().clamp_min(1e-12), []
        for (chunk, at), weight in zip(chunks, part, strict=True):
            x = feed.read(at)
            if share is None:
                losses.append(t.batch_valid_loss(x, chunk))
            else:
                loss = t.loss(x, chunk)
                (loss * weight * share).backward()
                losses.append(loss.detach())
        return (torch.stack(losses) * part).sum()

    # -- what cannot be taken in pieces is told at once ------------------------------------------------------------------

    def _cut(self, feed: BagLoader, group: Tensor, over: str = "bags", views: int = 1) -> bool:
        return over == "bags" and len(group) == 1 and self.needed(feed, group, over, views)

    def _check(self, feed: BagLoader, views: int, learns: bool) -> None:
        sizes = feed.bags.sizes * views
        most = int(sizes.topk(min(feed.batch_bags, len(sizes))).values.sum())
        if learns and any(one.over == "instances" for one in self.head.passes):
            most = max(most, views * max(feed.step_sizes("instances")))
        if most <= self.budget:
            return  # every batch fits
        network = self.training.model.config
        sets = f"chunk_instances {self.budget} takes a batch in pieces, and"
        instead = "give chunk_instances 0 (and fewer batch_bags, if memory is short)"
        if learns and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.training.model.modules()):
            raise HeadcountError(
                f"{sets} batch-norm learns from whole batches (backbone {network.backbone}, head {network.head}); "
                f"use a backbone and head without it, such as mlp and count, or {instead}"
            )
        if self.head.requires_full_batch:
            raise HeadcountError(
                f"{sets} head {network.head} needs it whole: {self.head.requires_full_batch}; {instead}"
            )
        if self.head.batch_matters:
            raise HeadcountError(f"{sets} to head {network.head} the other bags of a batch matter; {instead}")
        large = (sizes > self.budget).nonzero().flatten()
        for bag in large:
            why = self.head.why_not_chunkable(feed.batch_info(bag[None])[0].segments)
            if learns and not why and (views > 1 or self.head.teacher is not None):
                why = "it asks for several views, or for a teacher"
            if why:
                raise HeadcountError(
                    f"bag {int(bag)} has {int(feed.bags.sizes[bag])} instances, more than chunk_instances {self.budget}, "
                    f"and head {network.head} cannot hear a bag in pieces: {why}; give a larger chunk_instances, or another "
                    "head, such as count"
                )


class MissingLogits:
    """Stands where the instances' logits would: they are never all there at once."""

    def __init__(self, head: str) -> None:
        self.__dict__["head"] = head

    def refuse(self) -> NoReturn:
        raise HeadcountError(
            f"the loss of head {self.__dict__['head']} reads the instances' logits, and a bag in pieces never has all of "
            "them; let hear note what the loss needs, or give chunk_instances 0"
        )

    def __getattr__(self, name: str) -> NoReturn:
        self.refuse()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        next(a for a in args if isinstance(a, MissingLogits)).refuse()


@contextmanager
def replay_rng(seed: int, device: torch.device) -> Iterator[None]:
    """Draws from this seed; afterwards whatever else is drawn goes on as if nothing had been."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def _chunk(batch: Batch, rows: Tensor) -> Batch:
    """A piece of a batch of one bag."""
    s, rows = batch.segments, rows.to(batch.position.device)
    weight = None if s.weight is None else s.weight[rows]
    known = None if batch.known is None else batch.known[rows]
    return replace(
        batch, segments=Segments(s.index[rows], 1, len(rows), weight), position=batch.position[rows], known=known
    )

"""Steps of any size: a batch that does not fit is split into groups of bags, a bag that does not fit into chunks.

The gradients of groups of whole bags are added, each weighted by its ``loss_weight``: they are those of the whole batch. A bag
too large for one group is processed twice. First without a graph: the statistics that the head accumulates of each chunk are
kept, merged and read out, and the loss gives the gradient with respect to them. Then chunk by chunk with a graph, through which
that gradient is propagated, with the same dropout and augmentation. Batch-norm cannot be trained this way: its statistics are
those of the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.bags.pool import release_large_blocks
from headcount.errors import HeadcountError
from headcount.models.heads import Batch, ChunkedHead, Head, Output, Pass, why_not_chunkable
from headcount.models.heads.base import BagStats
from headcount.models.network import Model
from headcount.training import accel
from headcount.training.loader import BagLoader

if TYPE_CHECKING:
    from headcount.training.trainer import Trainer


def split_into_groups(loader: BagLoader, ids: Tensor, over: str, views: int, budget: int) -> list[Tensor]:
    """The ids of a step in groups of at most ``budget`` instances; a larger bag is a group by itself. 0: one group."""
    if not budget:
        return [ids]
    if over == "instances":
        return list(ids.split(max(1, budget // views)))
    return [ids[group.start : group.stop] for group in loader.bags.take(ids).ranges(budget // views)]


def read_order(
    loader: BagLoader, steps: Iterable[Tensor], over: str = "bags", views: int = 1, budget: int = 0, times: int = 1
) -> Iterator[Tensor]:
    """The positions that these steps read, in order; those of a bag in chunks ``times`` times."""
    for ids in steps:
        for group in split_into_groups(loader, ids, over, views, budget) if len(ids) else ():
            position = group if over == "instances" else loader.bags.instances_of(group)
            if over == "bags" and budget and len(position) * views > budget:
                for _ in range(times):
                    yield from position.split(budget)
            else:
                yield position


class ChunkedStep:
    """The trainer's steps with at most ``budget`` instances at once (0: with whole batches)."""

    def __init__(self, trainer: Trainer, budget: int) -> None:
        self.trainer, self.budget = trainer, budget
        by_instance = trainer.head.uses_instance_labels and trainer.train_loader.bags.known is not None
        self.reads_per_bag = 1 if by_instance else 2
        if budget:
            self._check(trainer.train_loader, trainer.head.views, training=True)
            self._check(trainer.valid_loader, 1, training=False)

    def fits(self, loader: BagLoader, ids: Tensor, over: str = "bags", views: int = 1) -> bool:
        size = len(ids) if over == "instances" else int(loader.bags.sizes[ids].sum())
        return size * views <= self.budget

    def step(self, sweep: Pass, ids: Tensor) -> Tensor:
        if self.fits(self.trainer.train_loader, ids, sweep.over, self.trainer.n_views(sweep)):
            return self.trainer.step(sweep, ids)
        loss, _ = self.gradient(sweep, ids)
        self.trainer.optimizer_step(sweep)
        return loss

    def gradient(self, sweep: Pass, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the step, in the parameters. Returns the loss, and its weight (Head.loss_weight)."""
        trainer, loader = self.trainer, self.trainer.train_loader
        parts, weights = self._parts(trainer.head, loader, ids, sweep.over, trainer.n_views(sweep))
        trainer.zero_grad()
        shares, losses = weights / weights.sum().clamp_min(1e-12), []
        for (batch, position), share in zip(parts, shares, strict=True):
            if self._is_large(batch):
                losses.append(self._bag_loss(trainer.model, loader, batch, position, share))
                continue
            loss = trainer.loss(loader.read(position), batch, sweep.uses_teacher)
            (loss * share).backward()
            losses.append(loss.detach())
        return (torch.stack(losses) * shares).sum(), weights.sum()

    @torch.no_grad()
    def valid_step(self, ids: Tensor) -> Tensor:
        trainer, loader, model = self.trainer, self.trainer.valid_loader, self.trainer.eval_model
        if self.fits(loader, ids):
            return trainer.valid_step(ids)
        parts, weights = self._parts(model.head, loader, ids)
        losses = []
        for batch, position in parts:
            if self._is_large(batch):
                losses.append(self._bag_loss(model, loader, batch, position))
            else:
                losses.append(trainer.batch_valid_loss(loader.read(position), batch))
        return (torch.stack(losses) * weights).sum() / weights.sum().clamp_min(1e-12)

    def _parts(
        self, head: Head, loader: BagLoader, ids: Tensor, over: str = "bags", views: int = 1
    ) -> tuple[list[tuple[Batch, Tensor]], Tensor]:
        """Groups of bags, each with the positions to read, and the weights of their losses. With instance labels the chunks of
        a large bag are groups like any other."""
        parts = []
        for group in split_into_groups(loader, ids, over, views, self.budget):
            batch, position = loader.batch_info(group, over, views)
            if self._is_large(batch) and head.uses_instance_labels and batch.known is not None:
                parts += [(_chunk(batch, rows), position[rows]) for rows in torch.arange(len(position)).split(self.budget)]
            else:
                parts.append((batch, position))
        return parts, torch.stack([head.loss_weight(batch).float() for batch, _ in parts])

    def _is_large(self, batch: Batch) -> bool:
        """Whether it is a bag that must be processed in chunks."""
        return batch.over == "bags" and 0 < self.budget < len(batch.position)

    def _bag_loss(self, model: Model, loader: BagLoader, batch: Batch, position: Tensor, share: Tensor | None = None) -> Tensor:
        """The loss of one bag; with a ``share`` also its gradient, times that."""
        release_large_blocks()
        segments = [_chunk(batch, rows).segments for rows in torch.arange(len(position)).split(self.budget)]
        chunks = list(zip(segments, position.split(self.budget), strict=True))
        seed = int(torch.randint(1 << 62, ()))
        with torch.no_grad():
            stats = [self._accumulate(model, loader.read(rows), s, seed + i) for i, (s, rows) in enumerate(chunks)]
        if share is None:
            return self._read_out(model, stats, batch)
        leaves = [{k: v.requires_grad_(v.is_floating_point()) for k, v in chunk.items()} for chunk in stats]
        loss = self._read_out(model, leaves, batch)
        (loss * share).backward()
        for i, (chunk, rows) in enumerate(chunks):
            x = loader.read(rows)
            if bool(chunk.removed.all()):
                continue  # nothing was accumulated, and nothing has a gradient
            again = self._accumulate(model, x, chunk, seed + i)
            gradients = {k: leaves[i][k].grad for k, v in again.items() if v.requires_grad and leaves[i][k].grad is not None}
            if gradients:
                torch.autograd.backward([again[k] for k in gradients], list(gradients.values()))
        return loss.detach()

    def _accumulate(self, model: Model, x: Tensor, segments: Segments, seed: int) -> BagStats:
        """The head's statistics of a chunk. Random numbers come from this seed; outside, nothing has been drawn."""
        device, config = self.trainer.device, self.trainer.config
        views, head = config.views if model.training else "none", cast(ChunkedHead, model.head)  # all others were refused
        generators = torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])
        with generators, accel.autocast(config.precision, device):
            torch.manual_seed(seed)
            return head.accumulate(self.trainer.features(model, x, views), segments)[1]

    def _read_out(self, model: Model, stats: list[BagStats], batch: Batch) -> Tensor:
        head, no_logits = cast(ChunkedHead, model.head), cast(Tensor, None)  # those of all chunks are never in memory
        with accel.autocast(self.trainer.config.precision, self.trainer.device):
            try:
                return head.loss(head.report(Output(no_logits, *head.readout(head.merge(stats)))), batch, None)
            except (AttributeError, TypeError) as e:
                problem = f"the loss of head {model.config.head} uses the instances' logits, and a bag in chunks never has all"
                advice = "let accumulate return what the loss needs, or give chunk_instances 0"
                raise HeadcountError(f"{problem} of them ({e}); {advice}") from e

    def why_not_splittable(self) -> str:
        """Why the loss of a batch is not the weighted mean of those of its parts; empty if it is."""
        loader = self.trainer.train_loader
        try:
            self.trainer.head.loss_weight(loader.batch_info(loader.in_order()[0])[0])
        except NotImplementedError as reason:
            return str(reason)
        return ""

    def _check(self, loader: BagLoader, views: int, training: bool) -> None:
        head, network = self.trainer.head, self.trainer.model.config
        sizes = loader.bags.sizes * views
        largest_step = int(sizes.topk(min(loader.batch_bags, len(sizes))).values.sum())
        if training and any(sweep.over == "instances" for sweep in head.passes):
            largest_step = max(largest_step, views * max(loader.step_sizes("instances")))
        if largest_step <= self.budget:
            return
        problem = f"chunk_instances {self.budget} splits batches, and"
        instead = "give chunk_instances 0 (and fewer batch_bags, if memory is short)"
        if training and any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in self.trainer.model.modules()):
            why = f"batch-norm learns from whole batches (backbone {network.backbone}, head {network.head})"
            raise HeadcountError(f"{problem} {why}; use a backbone and head without it, such as mlp and count, or {instead}")
        if reason := self.why_not_splittable():
            raise HeadcountError(f"{problem} head {network.head} needs them whole: {reason}; {instead}")
        if head.depends_on_batch:
            raise HeadcountError(f"{problem} the predictions of head {network.head} depend on the whole batch; {instead}")
        for bag in (sizes > self.budget).nonzero().flatten():
            reason = why_not_chunkable(head, loader.batch_info(bag[None])[0].segments)
            if training and not reason and (views > 1 or head.teacher is not None):
                reason = "it needs several views, or a teacher"
            if reason:
                problem = f"bag {int(bag)} has {int(loader.bags.sizes[bag])} instances, more than chunk_instances {self.budget}"
                reason = f"head {network.head} cannot process a bag in chunks: {reason}"
                raise HeadcountError(f"{problem}, and {reason}; give a larger chunk_instances, or another head, such as count")


def _chunk(batch: Batch, rows: Tensor) -> Batch:
    """These rows of a batch of one bag."""
    s, rows = batch.segments, rows.to(batch.position.device)
    weight = None if s.weight is None else s.weight[rows]
    known = None if batch.known is None else batch.known[rows]
    segments = Segments(s.index[rows], 1, len(rows), weight)
    return replace(batch, segments=segments, position=batch.position[rows], known=known)

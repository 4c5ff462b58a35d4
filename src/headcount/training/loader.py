"""Batches that never leave the device: the pool lies there once, an epoch is a permutation, a batch is a gather.
A pool that lies elsewhere (mapped from a disk, too large for the card) is read ahead of the step instead.

Letters: b bags in the batch, S the size of a bag when all have one, N instances in the batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.bags.prefetch import DirectReader, open_reader
from headcount.errors import HeadcountError
from headcount.models.heads import Batch
from headcount.seeds import make_generator


class BagLoader:
    """Bags dealt out in steps of ``batch_bags``; a loose-instance pass deals as many instances as that many
    bags hold, or ``batch_instances``."""

    def __init__(
        self, bags: Bags, batch_bags: int, device: torch.device | None = None, batch_instances: int = 0
    ) -> None:
        if bags.truth is not None:
            raise HeadcountError("these bags carry truth, and training must not see it; pass bags.blind()")
        self.bags = bags
        self.batch_bags = batch_bags
        sizes = bags.sizes
        self.bag_size = int(sizes[0]) if bool((sizes == sizes[0]).all()) else None
        self.batch_instances = batch_instances or max(1, round(batch_bags * float(sizes.float().mean())))
        self.device = device or bags.index.device
        self.resident = not bags.pool.on_disk and bags.pool.device == self.device
        self.reader = DirectReader(bags.pool, self.device)
        self.stall_seconds = 0.0  # seconds that steps waited for reading
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        self.fraction_done = torch.zeros((), device=self.device)
        self.bag_of = bags.bag

    def n_steps(self, over: str) -> int:
        """How many steps a pass has; the last one may be short."""
        return len(self.step_sizes(over))

    def shuffled(self, over: str, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """The epoch's order, cut into steps: bag numbers, or places of instances."""
        lengths = self.step_sizes(over)
        order = torch.randperm(sum(lengths), generator=make_generator(seed, "order", over, epoch))
        return order.to(self.bags.index.device).split(lengths)

    def step_sizes(self, over: str) -> list[int]:
        """Of the steps of a pass. A last one of a single instance joins the one before: batch-norm cannot learn from it."""
        bags = over == "bags"
        total, size = (len(self.bags), self.batch_bags) if bags else (len(self.bags.index), self.batch_instances)
        lengths = [size] * (total // size) + [total % size] * (total % size > 0)
        if len(lengths) > 1 and lengths[-1] == 1 and not (bags and int(self.bags.sizes.min()) > 1):
            lengths[-2:] = [lengths[-2] + 1]
        return lengths

    def in_order(self) -> tuple[Tensor, ...]:
        return torch.arange(len(self.bags), device=self.bags.index.device).split(self.batch_bags)

    @contextmanager
    def prefetching(self, positions: Iterable[Tensor]) -> Iterator[None]:
        """While this holds, exactly these places are dealt, in this order; where it pays they are read ahead."""
        usual = self.reader
        with open_reader(self.bags.pool, self.device, (self.bags.index[place] for place in positions)) as self.reader:
            try:
                yield
            finally:
                self.stall_seconds += self.reader.stall_seconds
                self.reader = usual

    def read(self, position: Tensor) -> Tensor:
        """(n, ...) the stored instances at these places, on the device."""
        return self.reader.take(self.bags.index[position])

    def batch(self, which: Tensor, over: str = "bags", views: int = 1) -> tuple[Tensor, Batch]:
        """(n, ...) stored instances of these bags (or these loose instances), and what the loss may know of them."""
        batch, place = self.batch_info(which, over, views)
        return self.read(place), batch

    def batch_info(self, which: Tensor, over: str = "bags", views: int = 1) -> tuple[Batch, Tensor]:
        """What the loss may know of them, and the places to read."""
        bags = self.bags
        place, segments = self._loose(which) if over == "instances" else self._whole(which)
        bag = self.bag_of[which] if over == "instances" else which
        if bags.weight is not None:
            segments = segments.with_weight(bags.weight[place])
        batch = Batch(
            segments=segments.repeat(views),
            target=bags.target[bag].repeat(views, 1),
            bag=bag.repeat(views),
            position=place.repeat(views),
            known=None if bags.known is None else bags.known[place].repeat(views),
            epoch=self.epoch,
            fraction_done=self.fraction_done,
            over=over,
            views=views,
        )
        return (batch if self.device == bags.index.device else batch.to(self.device)), place

    def _whole(self, which: Tensor) -> tuple[Tensor, Segments]:
        b = len(which)
        if self.bag_size is not None:
            place = (which[:, None] * self.bag_size + torch.arange(self.bag_size, device=which.device)).flatten()
            row = torch.arange(b, device=which.device)[:, None].expand(b, self.bag_size).flatten()
        else:
            sizes = self.bags.sizes[which]
            place = self.bags._rows(which)
            row = torch.arange(b, device=which.device).repeat_interleave(sizes)
        if self.bags.removed is not None:
            row = torch.where(self.bags.removed[place], b, row)
        return place, Segments(row, b, len(place) if b == 1 else self.bag_size)  # one bag has one size

    def _loose(self, which: Tensor) -> tuple[Tensor, Segments]:
        """Each instance a bag of one; the removed keep their place in the batch and count for nothing."""
        row = torch.arange(len(which), device=which.device)
        if self.bags.removed is not None:
            row = torch.where(self.bags.removed[which], len(which), row)
        return which, Segments(row, len(which), 1)

"""BagLoader: batches that never leave the device. The pool is on the device, an epoch is a permutation, a batch is a gather.

A pool that is elsewhere (memory-mapped, or too large for the GPU) is read ahead of the steps instead.

    b  bags in the batch        S  the size of the bags where all have one        N  instances in the batch
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from headcount.bags import Bags, Segments
from headcount.bags.pool import DirectReader, open_reader
from headcount.bags.seeds import make_generator
from headcount.errors import HeadcountError
from headcount.models.heads import Batch


class BagLoader:
    """Bags in steps of ``batch_bags``; a pass over single instances has ``batch_instances`` a step, or as many as those bags hold.
    The ids of a step are bag indices, or positions of instances."""

    def __init__(self, bags: Bags, batch_bags: int, device: torch.device | None = None, batch_instances: int = 0) -> None:
        if bags.truth is not None:
            raise HeadcountError("these bags carry truth, and training must not see it; pass bags.blind()")
        self.bags, self.batch_bags, self.sizes = bags, batch_bags, bags.sizes
        self.bag_size = int(self.sizes[0]) if bool((self.sizes == self.sizes[0]).all()) else None
        self.batch_instances = batch_instances or max(1, round(batch_bags * float(self.sizes.float().mean())))
        self.device = device or bags.index.device
        self.resident = not bags.pool.on_disk and bags.pool.device == self.device
        self.reader = DirectReader(bags.pool, self.device)
        self.stall_seconds = 0.0  # for which steps waited for the reader
        self.epoch = torch.zeros((), dtype=torch.int64, device=self.device)
        self.fraction_done = torch.zeros((), device=self.device)
        self.bag_of = bags.bag

    def n_steps(self, over: str) -> int:
        """Steps of a pass; the last one may be short."""
        return len(self.step_sizes(over))

    def shuffled(self, over: str, seed: int, epoch: int) -> tuple[Tensor, ...]:
        """The ids of each step of an epoch, in random order."""
        sizes = self.step_sizes(over)
        order = torch.randperm(sum(sizes), generator=make_generator(seed, "order", over, epoch))
        return order.to(self.bags.index.device).split(sizes)

    def step_sizes(self, over: str) -> list[int]:
        """Ids in each step. A last step of a single instance is merged into the one before: batch-norm needs two."""
        bags = over == "bags"
        total, size = (len(self.bags), self.batch_bags) if bags else (len(self.bags.index), self.batch_instances)
        sizes = [size] * (total // size) + [total % size] * (total % size > 0)
        if len(sizes) > 1 and sizes[-1] == 1 and not (bags and int(self.bags.sizes.min()) > 1):
            sizes[-2:] = [sizes[-2] + 1]
        return sizes

    def in_order(self) -> tuple[Tensor, ...]:
        """The ids of each step, bags in order."""
        return torch.arange(len(self.bags), device=self.bags.index.device).split(self.batch_bags)

    @contextmanager
    def prefetching(self, positions: Iterable[Tensor]) -> Iterator[None]:
        """Inside, exactly these positions are read, in this order; where that is faster, ahead of the steps."""
        direct_reader = self.reader
        with open_reader(self.bags.pool, self.device, (self.bags.index[p] for p in positions)) as self.reader:
            try:
                yield
            finally:
                self.stall_seconds += self.reader.stall_seconds
                self.reader = direct_reader

    def read(self, position: Tensor) -> Tensor:
        """(n, ...) the stored instances at these positions, on the device."""
        return self.reader.take(self.bags.index[position])

    def batch(self, ids: Tensor, over: str = "bags", views: int = 1) -> tuple[Tensor, Batch]:
        """(n, ...) the stored instances of a step, and what the loss may use."""
        batch, position = self.batch_info(ids, over, views)
        return self.read(position), batch

    def batch_info(self, ids: Tensor, over: str = "bags", views: int = 1) -> tuple[Batch, Tensor]:
        """What the loss may use, and the positions to read."""
        bags = self.bags
        if over == "bags":
            bag, (position, segments) = ids, self._whole_bags(ids)
        else:  # each instance a bag of one; removed ones keep their row in the batch and count for nothing
            bag, position, segments = self.bag_of[ids], ids, Segments(torch.arange(len(ids), device=ids.device), len(ids), 1)
            segments = segments if bags.removed is None else segments.without(bags.removed[ids])
        if bags.weight is not None:
            segments = segments.with_weight(bags.weight[position])
        batch = Batch(
            segments=segments.repeat(views),
            target=_repeat(bags.target[bag], views),
            votes=None if bags.votes is None else _repeat(bags.votes[bag], views),
            bag=_repeat(bag, views),
            position=_repeat(position, views),
            known=None if bags.known is None else _repeat(bags.known[position], views),
            epoch=self.epoch,
            fraction_done=self.fraction_done,
            over=over,
            views=views,
        )
        return (batch if self.device == bags.index.device else batch.to(self.device)), position

    def _whole_bags(self, ids: Tensor) -> tuple[Tensor, Segments]:
        b, runs = len(ids), None
        if self.bag_size is not None:
            position = (ids[:, None] * self.bag_size + torch.arange(self.bag_size, device=ids.device)).flatten()
            row = torch.arange(b, device=ids.device)[:, None].expand(b, self.bag_size).flatten()
        elif b == 1:  # with a few operations less
            first, stop = self.bags.offsets[int(ids) : int(ids) + 2].tolist()
            position, row = torch.arange(first, stop, device=ids.device), ids.new_zeros(stop - first)
        else:
            position, sizes = self.bags.instances_of(ids), self.sizes[ids]
            row = torch.arange(b, device=ids.device).repeat_interleave(sizes, output_size=len(position))
            runs = sizes.tolist() if sizes.device.type == "cpu" else None
        if self.bags.removed is not None:
            row = torch.where(self.bags.removed[position], b, row)
        size = len(position) if b == 1 else self.bag_size  # one bag has one size
        return position, Segments(row, b, size, runs=runs, complete=self.bags.removed is None)


def _repeat(x: Tensor, times: int) -> Tensor:
    return x if times == 1 else x.repeat(times, *(1,) * (x.ndim - 1))

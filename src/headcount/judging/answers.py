"""What a fitted model says of a whole reading, a shard of bags at a time: the memory of one shard, whatever the data's size.

A shard is a range of consecutive bags; ``ask_shard`` needs nothing but the model and those bags, so shards may be asked in any
order, anywhere (judging/shards.py asks on other machines). What comes back is C numbers per instance; beyond ``ROOM`` bytes
they lie in a file without a name.

Letters: N instances, B bags, C classes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from headcount.bags import Bags, Pool
from headcount.data.learned import Learned
from headcount.data.read import Reading
from headcount.models.fitted import Fitted

SHARD = 1 << 16  # instances asked together; a larger bag is a shard of its own
SHARD_BYTES = 1 << 26  # and no more than so many bytes of them: a shard may have to travel
ROOM = 1 << 30  # bytes of answers kept in memory
_PART = 1 << 26  # bytes of prepared instances in front of the network at once

Watch = Callable[[int, int], None]  # (bags answered, bags in all)
# what is said of each shard, in order, by somebody who is told whether to listen to the bags
Each = Callable[[Iterator[Bags], bool | None], Generator["Shard", None, None]]


class Shard(NamedTuple):
    """What is said of n instances in b bags."""

    p: np.ndarray  # (n, C) float32
    bag: np.ndarray  # (b, C) probability of each class to be the bag's label
    share: np.ndarray  # (b, C)
    low: np.ndarray  # (b, C)
    high: np.ndarray  # (b, C)
    met: np.ndarray  # (b,) the model was trained on this bag


@dataclass(frozen=True, eq=False)
class Said:
    """What is said of a reading, in the order of its bags."""

    classes: tuple[str, ...]
    p: np.ndarray  # (N, C) float32, in memory or mapped
    bag: np.ndarray  # (B, C)
    share: np.ndarray  # (B, C)
    low: np.ndarray  # (B, C)
    high: np.ndarray  # (B, C)
    met: np.ndarray  # (B,) the model was trained on this bag

    @property
    def said(self) -> np.ndarray:
        """(N,) the class of each instance."""
        return self.p.argmax(1)

    @property
    def sure(self) -> np.ndarray:
        """(N,) the probability of that class."""
        return self.p.max(1)

    @property
    def bag_said(self) -> np.ndarray:
        """(B,) the label of each bag."""
        return self.bag.argmax(1)


def shards(sizes: Iterable[int], budget: int = SHARD) -> list[range]:
    """Consecutive bags of at most so many instances together.

    >>> shards([3, 4, 2, 9, 1], budget=7)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    found, start, held = [], 0, 0
    for b, size in enumerate(sizes):
        if b > start and held + size > budget:
            found.append(range(start, b))
            start, held = b, 0
        held += size
        last = b
    return [*found, range(start, last + 1)]


def part(reading: Reading, learned: Learned, which: range) -> Bags:
    """The bags of a shard, prepared: only their rows of a table become features."""
    bags = reading.laid.take(list(which))
    if not reading.columns.fields:
        return bags
    raw = reading.content.take(bags.index.numpy())
    return replace(bags, pool=Pool(learned.apply(raw)), index=torch.arange(len(bags.index)))


def ask_shard(fitted: Fitted, bags: Bags, listen: bool | None = None) -> Shard:
    """What the model says of these bags; ``listen`` as :meth:`Fitted.say` takes it."""
    batch = max(16, min(8192, _PART // (4 * math.prod(bags.pool.shape))))
    answer = fitted.say(bags, listen=listen, batch_instances=batch)
    share, low, high = fitted.shares(answer.alone, bags)
    numbers = (t.float().numpy() for t in (answer.instance, answer.bag.exp(), share, low, high))
    return Shard(*numbers, answer.met.numpy())


def ask(
    fitted: Fitted,
    reading: Reading,
    scratch: Path | None = None,
    watch: Watch | None = None,
    each: Each | None = None,
    listen: bool | None = None,
) -> Said:
    """What the model says of all of it. ``scratch``: a folder on a disk with room, for answers larger than ``ROOM``.
    ``each``: who asks; without it we do, here. The shards are the same, whoever does. ``listen``: as :meth:`Fitted.say`."""
    bags, c = len(reading.laid), len(fitted.classes)
    p = _sheet(len(reading.rows), c, scratch)
    per_bag = [*(np.empty((bags, c), np.float32) for _ in range(4)), np.zeros(bags, bool)]
    ends = reading.laid.offsets.tolist()
    plan = shards(reading.laid.sizes.tolist(), _budget(reading, fitted.learned))
    parts = (part(reading, fitted.learned, which) for which in plan)
    with closing(each(parts, listen) if each else (ask_shard(fitted, bags, listen) for bags in parts)) as answered:
        for which, said in zip(plan, answered, strict=True):
            p[ends[which.start] : ends[which.stop]] = said.p
            for whole, own in zip(per_bag, said[1:], strict=True):
                whole[which.start : which.stop] = own
            if watch is not None:
                watch(which.stop, bags)
    return Said(fitted.classes, p, *per_bag)


def _budget(reading: Reading, learned: Learned) -> int:
    """Instances in a shard."""
    each = 4 if reading.columns.fields else reading.laid.pool.data.element_size()  # a table becomes float32
    return max(1, min(SHARD, SHARD_BYTES // (each * math.prod(learned.shape))))


def _sheet(rows: int, classes: int, scratch: Path | None) -> np.ndarray:
    """(rows, classes) to write answers on; a file that is too large for memory has no name, so that it goes with us."""
    if rows * classes * 4 <= ROOM:
        return np.empty((rows, classes), np.float32)
    with tempfile.TemporaryFile(dir=scratch) as file:  # the map keeps it
        if hasattr(os, "posix_fallocate"):  # a disk that is too small says so now, and not by a signal later
            os.posix_fallocate(file.fileno(), 0, rows * classes * 4)
        return np.memmap(file, np.float32, "w+", shape=(rows, classes))

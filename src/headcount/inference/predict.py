"""What a fitted model says of a whole reading, a shard of bags at a time: the memory of one shard, whatever the data's size.

A shard is a range of consecutive bags; ``ask_shard`` needs nothing but the model and those bags, so shards may be asked in any
order, anywhere (inference/predict_ray.py asks on other machines). What comes back is C numbers per instance; beyond ``ROOM`` bytes
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
from headcount.models.fitted import FittedModel
from headcount.readers import BagDataset
from headcount.readers.preprocessing import Preprocessor

SHARD_INSTANCES = 1 << 16  # instances asked together; a larger bag is a shard of its own
SHARD_BYTES = 1 << 26  # and no more than so many bytes of them: a shard may have to travel
MEMORY_BYTES = 1 << 30  # bytes of answers kept in memory
_BATCH_BYTES = 1 << 26  # bytes of prepared instances in front of the network at once

ProgressCallback = Callable[[int, int], None]  # (bags answered, bags in all)
# what is said of each shard, in order, by somebody who is told whether to listen to the bags
ShardPredictor = Callable[[Iterator[Bags], bool | None], Generator["PredictionShard", None, None]]


class PredictionShard(NamedTuple):
    """What is said of n instances in b bags."""

    instance_probabilities: np.ndarray  # (n, C) float32
    bag_probabilities: np.ndarray  # (b, C) probability of each class to be the bag's label
    shares: np.ndarray  # (b, C)
    shares_low: np.ndarray  # (b, C)
    shares_high: np.ndarray  # (b, C)
    seen_in_training: np.ndarray  # (b,) the model was trained on this bag


@dataclass(frozen=True, eq=False)
class Predictions:
    """What is said of a reading, in the order of its bags."""

    classes: tuple[str, ...]
    instance_probabilities: np.ndarray  # (N, C) float32, in memory or mapped
    bag_probabilities: np.ndarray  # (B, C)
    shares: np.ndarray  # (B, C)
    shares_low: np.ndarray  # (B, C)
    shares_high: np.ndarray  # (B, C)
    seen_in_training: np.ndarray  # (B,) the model was trained on this bag

    @property
    def instance_prediction(self) -> np.ndarray:
        """(N,) the class of each instance."""
        return self.instance_probabilities.argmax(1)

    @property
    def confidence(self) -> np.ndarray:
        """(N,) the probability of that class."""
        return self.instance_probabilities.max(1)

    @property
    def bag_prediction(self) -> np.ndarray:
        """(B,) the label of each bag."""
        return self.bag_probabilities.argmax(1)


def plan_shards(sizes: Iterable[int], budget: int = SHARD_INSTANCES) -> list[range]:
    """Consecutive bags of at most so many instances together.

    >>> shards([3, 4, 2, 9, 1], budget=7)
    [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
    """
    ranges, start, instances = [], 0, 0
    for b, size in enumerate(sizes):
        if b > start and instances + size > budget:
            ranges.append(range(start, b))
            start, instances = b, 0
        instances += size
        last = b
    return [*ranges, range(start, last + 1)]


def shard_bags(dataset: BagDataset, preprocessor: Preprocessor, bag_range: range) -> Bags:
    """The bags of a shard, prepared: only their rows of a table become features."""
    bags = dataset.bags.take(list(bag_range))
    if not dataset.schema.fields:
        return bags
    raw = dataset.content.take(bags.index.numpy())
    return replace(bags, pool=Pool(preprocessor.transform(raw)), index=torch.arange(len(bags.index)))


def predict_shard(model: FittedModel, bags: Bags, use_context: bool | None = None) -> PredictionShard:
    """What the model says of these bags; ``listen`` as :meth:`Fitted.say` takes it."""
    batch = max(16, min(8192, _BATCH_BYTES // (4 * math.prod(bags.pool.shape))))
    predictions = model.predict(bags, use_context=use_context, batch_instances=batch)
    share, low, high = model.estimate_shares(predictions.instance_without_context, bags)
    numbers = (
        t.float().numpy()
        for t in (predictions.instance_probabilities, predictions.bag_log_probabilities.exp(), share, low, high)
    )
    return PredictionShard(*numbers, predictions.seen_in_training.numpy())


def predict(
    model: FittedModel,
    dataset: BagDataset,
    scratch: Path | None = None,
    on_progress: ProgressCallback | None = None,
    shard_predictor: ShardPredictor | None = None,
    use_context: bool | None = None,
) -> Predictions:
    """What the model says of all of it. ``scratch``: a folder on a disk with room, for answers larger than ``ROOM``.
    ``each``: who asks; without it we do, here. The shards are the same, whoever does. ``listen``: as :meth:`Fitted.say`."""
    bags, c = len(dataset.bags), len(model.classes)
    p = _allocate(len(dataset.rows), c, scratch)
    per_bag = [*(np.empty((bags, c), np.float32) for _ in range(4)), np.zeros(bags, bool)]
    ends = dataset.bags.offsets.tolist()
    plan = plan_shards(dataset.bags.sizes.tolist(), _shard_instances(dataset, model.preprocessor))
    parts = (shard_bags(dataset, model.preprocessor, which) for which in plan)
    with closing(
        shard_predictor(parts, use_context)
        if shard_predictor
        else (predict_shard(model, bags, use_context) for bags in parts)
    ) as predicted:
        for which, shard in zip(plan, predicted, strict=True):
            p[ends[which.start] : ends[which.stop]] = shard.instance_probabilities
            for whole, part in zip(per_bag, shard[1:], strict=True):
                whole[which.start : which.stop] = part
            if on_progress is not None:
                on_progress(which.stop, bags)
    return Predictions(model.classes, p, *per_bag)


def _shard_instances(dataset: BagDataset, preprocessor: Preprocessor) -> int:
    """Instances in a shard."""
    each = 4 if dataset.schema.fields else dataset.bags.pool.data.element_size()  # a table becomes float32
    return max(1, min(SHARD_INSTANCES, SHARD_BYTES // (each * math.prod(preprocessor.shape))))


def _allocate(rows: int, classes: int, scratch: Path | None) -> np.ndarray:
    """(rows, classes) to write answers on; a file that is too large for memory has no name, so that it goes with us."""
    if rows * classes * 4 <= MEMORY_BYTES:
        return np.empty((rows, classes), np.float32)
    with tempfile.TemporaryFile(dir=scratch) as file:  # the map keeps it
        if hasattr(os, "posix_fallocate"):  # a disk that is too small says so now, and not by a signal later
            os.posix_fallocate(file.fileno(), 0, rows * classes * 4)
        return np.memmap(file, np.float32, "w+", shape=(rows, classes))

"""What a fitted model predicts of a whole dataset, one shard of bags at a time, so that memory does not grow with its size. A shard
needs nothing but the model and its bags, so it may be predicted anywhere (predict_ray.py does so on other machines)."""

import math
import os
import tempfile
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headcount.bags import Bags, Pool
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.readers.dataset import BagDataset
from headcount.readers.preprocessing import Preprocessor

SHARD_INSTANCES = 1 << 16  # predicted together; a larger bag is a shard of its own
SHARD_BYTES = 1 << 26  # of instances in a shard, which may have to travel
MEMORY_BYTES = 1 << 30  # of predictions kept in memory

ProgressCallback = Callable[[int, int], None]  # (bags predicted, bags in all)
# predicts each shard, in order; the second argument is use_context, as FittedModel.predict takes it
ShardPredictor = Callable[[Iterator[Bags], bool | None], Generator[Predictions, None, None]]


def predict_dataset(
    model: FittedModel, dataset: BagDataset, *, use_context: bool | None = None, scratch: Path | None = None,
    on_progress: ProgressCallback | None = None, shard_predictor: ShardPredictor | None = None,
) -> Predictions:  # fmt: skip
    """What the model predicts of a dataset.

    Parameters
    ----------
    model, dataset
        The fitted model, and what ``model.read`` returned.
    use_context
        As in :meth:`FittedModel.predict`.
    scratch
        A folder on a disk with room, for predictions larger than ``MEMORY_BYTES``.
    on_progress
        Called with the number of bags predicted and of all bags.
    shard_predictor
        Predicts the shards, for instance on a cluster (:func:`headcount.inference.predict_ray.remote_predictor`); by default
        the model does, in this process. The shards are the same.

    Examples
    --------
    >>> predictions = predict_dataset(model, model.read("new.csv"))                     # doctest: +SKIP
    """
    bags, classes = len(dataset.bags), len(model.classes)
    instance_probabilities = _allocate(len(dataset.rows), classes, scratch)
    ranges = dataset.bags.ranges(shard_instances(dataset, model.preprocessor))
    shards = (_shard_bags(dataset, model.preprocessor, numbers) for numbers in ranges)
    per_bag, ends = [], dataset.bags.offsets.tolist()
    with ExitStack() as stack:
        if shard_predictor is None:
            predicted = map(partial(model.predict, use_context=use_context), shards)
        else:
            predicted = stack.enter_context(closing(shard_predictor(shards, use_context)))
        for numbers, shard in zip(ranges, predicted, strict=True):
            instance_probabilities[ends[numbers.start] : ends[numbers.stop]] = shard.instance_probabilities
            per_bag.append((shard.bag_probabilities, shard.shares, shard.shares_low, shard.shares_high, shard.seen_in_training))
            if on_progress is not None:
                on_progress(numbers.stop, bags)
    return Predictions(model.classes, instance_probabilities, *map(np.concatenate, zip(*per_bag, strict=True)))


def shard_instances(dataset: BagDataset, preprocessor: Preprocessor, max_bytes: int = SHARD_BYTES) -> int:
    """How many instances a shard holds: at most ``SHARD_INSTANCES``, and ``max_bytes``."""
    size = 4 if dataset.schema.fields else dataset.bags.pool.data.element_size()  # a table becomes float32
    return max(1, min(SHARD_INSTANCES, max_bytes // (size * math.prod(preprocessor.shape))))


def _shard_bags(dataset: BagDataset, preprocessor: Preprocessor, numbers: range) -> Bags:
    """These bags over preprocessed instances; of a table only their rows are."""
    bags = dataset.bags.take(list(numbers))
    if not dataset.schema.fields:
        return bags
    raw = dataset.content.take(bags.index.numpy())
    return replace(bags, pool=Pool(preprocessor.transform(raw)), index=torch.arange(len(bags.index)))


def _allocate(rows: int, classes: int, scratch: Path | None) -> np.ndarray:
    """(rows, classes) float32 to write to; if too large for memory, in an unnamed file, which goes with the process."""
    if rows * classes * 4 <= MEMORY_BYTES:
        return np.empty((rows, classes), np.float32)
    with tempfile.TemporaryFile(dir=scratch) as file:  # the map keeps it
        if hasattr(os, "posix_fallocate"):  # so a disk that is too small is an exception now, and not a signal later
            os.posix_fallocate(file.fileno(), 0, rows * classes * 4)
        return np.memmap(file, np.float32, "w+", shape=(rows, classes))

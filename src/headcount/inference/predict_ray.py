"""Prediction on a Ray cluster: bags in shards, each a task; the predictions come back in order. The model travels as its two files,
once, and shards with their instances; where the data are on the nodes, give functions that read a shard there instead."""

import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.inference.predict import ShardPredictor
from headcount.inference.ray_cluster import RayOptions, as_remote, connected, import_ray, task_error, task_slots
from headcount.models.fitted import FittedModel, load_model
from headcount.models.heads import Output
from headcount.models.network import Model
from headcount.models.predictions import Predictions, predict
from headcount.models.serialization import JSON_FILE, WEIGHTS_FILE
from headcount.training.distributed import require_single_process

ShardSource = Bags | Callable[[], Bags]
ModelFiles = tuple[bytes, ...]  # the weights, and the JSON
Arguments = dict[str, Any]  # of FittedModel.predict, or of predict for a Model


def predict_on_ray(
    folder: Path | str, bags: Bags | Iterable[ShardSource], *, shard_instances: int = 1 << 18,
    address: str | None = None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3, **arguments: Any,
) -> Generator[Predictions | Output, None, None]:  # fmt: skip
    """What the saved model predicts of each shard, in order, as it comes, so that the predictions need not fit in memory.

    Parameters
    ----------
    folder
        A saved FittedModel, which gives ``Predictions``, or a saved Model, which gives an ``Output``.
    bags
        Bags, which are split into shards of ``shard_instances``; or the shards: bags, or functions that make them on a node.
    address, gpus_each, cpus_each, retries
        See :class:`headcount.inference.ray_cluster.RayOptions`.
    arguments
        Of :meth:`FittedModel.predict`, or of :func:`headcount.models.predictions.predict` for a Model.

    Examples
    --------
    >>> for predictions in predict_on_ray("model", shards, address="auto"): ...         # doctest: +SKIP
    """
    load_model(folder)  # what is wrong with it is reported before anything travels
    options = RayOptions(address, gpus_each, cpus_each, retries)
    shards = split_bags(bags, shard_instances) if isinstance(bags, Bags) else bags
    return _predict_shards(folder, shards, arguments, options)


def remote_predictor(folder: Path | str, *, address: str | None = None, gpus_each: float = 0) -> ShardPredictor:
    """The model in this folder on a cluster, for ``predict_dataset(..., shard_predictor=)``. Wrong options are reported at once."""
    options = RayOptions(address, gpus_each)
    require_single_process("prediction on Ray")
    import_ray()

    def predict_shards(shards: Iterator[Bags], use_context: bool | None = None) -> Generator[Predictions, None, None]:
        return _predict_shards(folder, map(detach_bags, shards), {"use_context": use_context}, options)

    return predict_shards


def _predict_shards(
    folder: Path | str, shards: Iterable[ShardSource], arguments: Arguments, options: RayOptions
) -> Generator[Any, None, None]:
    """No more shards are submitted than keep the cluster busy, so that ``shards`` may be a generator that reads them one by one."""
    require_single_process("prediction on Ray")
    ray = import_ray()
    with connected(ray, options):
        send, files = as_remote(ray, predict_on_node, options), ray.put(model_files(folder))
        limit, submitted = 2 * task_slots(ray, options), deque()
        try:
            for shard in shards:
                if len(submitted) >= limit:
                    yield _fetch(ray, submitted.popleft(), options.retries)
                submitted.append(send.remote(files, shard, arguments, options))
            while submitted:
                yield _fetch(ray, submitted.popleft(), options.retries)
        finally:
            for reference in submitted:
                with suppress(Exception):
                    ray.cancel(reference)


def _fetch(ray: Any, reference: Any, retries: int) -> Predictions | Output:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as e:
        raise task_error(e) from e
    except ray.exceptions.RayError as e:
        why = f"{type(e).__name__}: {str(e).strip().partition(chr(10))[0]}"
        hint = "perhaps it is too large for the memory of a node: give it nodes with more, or in Python smaller shards"
        raise HeadcountError(f"a shard was lost {retries + 1} times ({why}); {hint}") from e


def split_bags(bags: Bags, shard_instances: int) -> Iterator[Bags]:
    """Consecutive bags in shards of this many instances, each over a pool of its own: nothing else travels."""
    if shard_instances < 1:
        raise HeadcountError(f"a shard holds at least one instance, got {shard_instances}")
    if not len(bags):
        raise HeadcountError("no bags to predict; give at least one")
    return (detach_bags(bags.take(numbers)) for numbers in bags.ranges(shard_instances))


def detach_bags(bags: Bags) -> Bags:
    """These bags over a pool of only their own instances, without truth."""
    addresses, index = bags.index.unique(return_inverse=True)
    pool = Pool(bags.pool.take(addresses).cpu())
    return replace(bags.to("cpu") if bags.pool.device.type != "cpu" else bags, pool=pool, index=index.cpu()).blind()


def model_files(folder: Path | str) -> ModelFiles:
    return tuple((Path(folder) / name).read_bytes() for name in (WEIGHTS_FILE, JSON_FILE))


def predict_on_node(files: ModelFiles, shard: ShardSource, arguments: Arguments, options: RayOptions) -> Predictions | Output:
    """What the model in these files predicts of a shard."""
    torch.set_num_threads(options.threads)
    bags = shard if isinstance(shard, Bags) else shard()
    model = _cached_model(files, options.device)
    return predict(model, bags, **arguments) if isinstance(model, Model) else model.predict(bags, **arguments)


@lru_cache(maxsize=2)  # a node builds each model once
def _cached_model(files: ModelFiles, device: str) -> FittedModel | Model:
    with tempfile.TemporaryDirectory(prefix="headcount-") as folder:
        for name, content in zip((WEIGHTS_FILE, JSON_FILE), files, strict=True):
            (Path(folder) / name).write_bytes(content)
        return load_model(Path(folder)).to(device)

"""Prediction over many machines: bags in shards, each a task on a Ray cluster; what is said comes back in order.

    said = say_many("model", bags, address="auto")            # what say(load("model"), bags) says
    said = ask(fitted, reading, each=asker("model", address="auto"))    # what ask(fitted, reading) says: headcount predict

The model travels to the nodes as its two files, once, and loading it runs no code. Shards of bags travel with their
instances; where the data lie on the nodes (or on a shared disk), give functions that read a shard there instead. A shard
whose process or node is lost is asked again elsewhere.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.inference import predict as answers
from headcount.inference.predict import ShardPredictor
from headcount.inference.ray_cluster import RayOptions, RemoteResult, as_remote, connected, import_ray, task_slots
from headcount.models.fitted import FittedModel
from headcount.models.heads import Output
from headcount.models.network import load_network, predict, split_by_instances
from headcount.training.distributed import require_single_process

ShardSource = Bags | Callable[[], Bags]
Arrays = dict[str, np.ndarray]
Files = dict[str, bytes]  # by name
MODEL_FILES = ("model.safetensors", "model.json")


def predict_on_ray(
    model: Path | str, bags: Bags | Iterable[ShardSource], *, shard_instances: int = 1 << 18, **ray_options: Any
) -> Output:
    """What the saved model says of these bags, as :func:`say` would. See :func:`say_shards` for the rest."""
    shards = predict_shards_on_ray(
        model, split_bags(bags, shard_instances) if isinstance(bags, Bags) else bags, **ray_options
    )
    instance, bag, kept = zip(*shards, strict=True)
    return Output(torch.cat(instance), torch.cat(bag), {k: torch.cat([one[k] for one in kept]) for k in kept[0]})


def predict_shards_on_ray(
    model: Path | str,
    shards: Iterable[ShardSource],
    *,
    keep: tuple[str, ...] = (),
    batch_instances: int = 8192,
    **ray_options: Any,
) -> Iterator[Output]:
    """What is said of each shard, in order, as it comes: for answers that do not all fit in memory.

    A shard is Bags, or a function that makes them on the node. ``how``: address, gpus_each, cpus_each and retries, as for a
    study on Ray.
    """
    load_network(model)  # what is wrong with it is told before anything travels
    for arrays in _map_on_cluster(
        predict_network_on_node, model_files(model), shards, (keep, batch_instances), RayOptions(**ray_options)
    ):
        tensors = {k: torch.tensor(v) for k, v in arrays.items()}  # a copy: what Ray holds can only be read
        parts = {k.removeprefix("part."): v for k, v in tensors.items() if k.startswith("part.")}
        yield Output(tensors["instance"], tensors["bag"], parts)


def remote_predictor(
    model: Path | str, *, address: str | None = None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3
) -> ShardPredictor:
    """The fitted model in this folder on a cluster, for :func:`headcount.inference.predict.predict`. Wrong options and a missing
    Ray are reported at once."""
    require_single_process("prediction on Ray")
    ray_options = RayOptions(address, gpus_each, cpus_each, retries)
    import_ray()

    def predict_shards(
        parts: Iterator[Bags], use_context: bool | None = None
    ) -> Generator[answers.PredictionShard, None, None]:
        task = (model_files(model), map(detach_bags, parts), (use_context,), ray_options)
        for arrays in _map_on_cluster(predict_shard_on_node, *task):
            yield answers.PredictionShard(**arrays)

    return predict_shards


def _map_on_cluster(
    task: Callable[..., RemoteResult[Arrays]],
    files: Files,
    shards: Iterable[ShardSource],
    arguments: tuple[Any, ...],
    options: RayOptions,
) -> Iterator[Arrays]:
    """What ``task`` predicts of each shard on some node, in order. No more shards are submitted than keep the cluster busy, so
    that ``shards`` may be a generator that reads them one by one."""
    require_single_process("prediction on Ray")
    ray = import_ray()
    with connected(ray, options):
        send, stored = as_remote(ray, task, options), ray.put(files)
        limit, submitted = 2 * task_slots(ray, options), deque()
        try:
            for shard in shards:
                if len(submitted) >= limit:
                    yield _fetch(ray, submitted.popleft(), options.retries)
                submitted.append(send.remote(stored, shard, *arguments, options.device, options.threads))
            while submitted:
                yield _fetch(ray, submitted.popleft(), options.retries)
        finally:
            for reference in submitted:
                with suppress(Exception):
                    ray.cancel(reference)


def split_bags(bags: Bags, shard_instances: int) -> Iterator[Bags]:
    """Consecutive bags in shards of about so many instances, each over a pool of its own: nothing else travels."""
    if shard_instances < 1:
        raise HeadcountError(f"a shard holds at least one instance, got {shard_instances}")
    if not len(bags):
        raise HeadcountError("no bags to ask about; give at least one")
    yield from map(detach_bags, split_by_instances(bags, shard_instances))


def detach_bags(part: Bags) -> Bags:
    """These bags over a pool of their own, without truth."""
    seen, index = part.index.unique(return_inverse=True)
    own = Pool(part.pool.take(seen).cpu())
    return replace(part.to("cpu") if part.pool.device.type != "cpu" else part, pool=own, index=index.cpu()).blind()


def model_files(model: Path | str) -> Files:
    """A saved model as bytes."""
    return {name: (Path(model) / name).read_bytes() for name in MODEL_FILES}


# -- on a node ----------------------------------------------------------------------------------------------------------------


def predict_network_on_node(
    files: Files, shard: ShardSource, keep: tuple[str, ...], batch_instances: int, device: str, threads: int
) -> RemoteResult[Arrays]:
    """What the model says of a shard; or an account of what went wrong."""
    try:
        torch.set_num_threads(threads)
        bags = shard if isinstance(shard, Bags) else shard()
        output = predict(
            _cached_model(_ModelFiles(files), load_network, device), bags, keep=keep, batch_instances=batch_instances
        )
        arrays = {"instance": output.instance, "bag": output.bag, **{f"part.{k}": v for k, v in output.parts.items()}}
        return RemoteResult({k: v.numpy() for k, v in arrays.items()})
    except Exception as e:
        return RemoteResult.of_exception(e)


def predict_shard_on_node(
    files: Files, bags: Bags, use_context: bool | None, device: str, threads: int
) -> RemoteResult[Arrays]:
    """What a fitted model says of a shard; or an account of what went wrong."""
    try:
        torch.set_num_threads(threads)
        predictions = answers.predict_shard(
            _cached_model(_ModelFiles(files), FittedModel.load, device), bags, use_context
        )
        return RemoteResult(predictions._asdict())
    except Exception as e:
        return RemoteResult.of_exception(e)


class _ModelFiles:
    """A model's files under a name made of their content: a node builds each model once."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.name = hashlib.sha256(b"".join(files[name] for name in MODEL_FILES)).hexdigest()

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ModelFiles) and self.name == other.name


@lru_cache(maxsize=2)
def _cached_model(files: _ModelFiles, load: Callable[[Path], Any], device: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="headcount-") as folder:
        for name in MODEL_FILES:
            (Path(folder) / name).write_bytes(files.files[name])
        return load(Path(folder)).to(device)


# -- on the driver ------------------------------------------------------------------------------------------------------------


def _fetch(ray: Any, reference: Any, retries: int) -> Arrays:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayError as e:
        why = str(e).strip().partition("\n")[0]
        raise HeadcountError(
            f"a shard was lost {retries + 1} times ({type(e).__name__}: {why}); perhaps it is too large for the memory of a "
            "node: give it nodes with more, or in Python smaller shards"
        ) from e
    return result.unpack()

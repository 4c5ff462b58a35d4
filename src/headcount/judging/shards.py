"""Prediction over many machines: bags in shards, each a task on a Ray cluster; what is said comes back in order.

    said = say_many("model", bags, address="auto")            # what say(load("model"), bags) says
    said = ask(fitted, reading, each=asker("model", address="auto"))    # what ask(fitted, reading) says: headcount predict

The model travels to the nodes as its two files, once, and loading it runs no code. Shards of bags travel with their
instances; where the data lie on the nodes (or on a shared disk), give functions that read a shard there instead. A shard
whose process or node is lost is asked again elsewhere.
"""

from __future__ import annotations

import hashlib
import platform
import tempfile
import traceback
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
from headcount.judging import answers
from headcount.judging.answers import Each
from headcount.judging.rays import Files, Parcel, _check, _connected, _find_room, _packed, _ray, opened
from headcount.models.fitted import Fitted
from headcount.models.heads import Output
from headcount.models.model import by_instances, load, say
from headcount.training.parallel import alone_only

Shard = Bags | Callable[[], Bags]
Arrays = dict[str, np.ndarray]
FILES = ("model.safetensors", "model.json")


def say_many(model: Path | str, bags: Bags | Iterable[Shard], *, shard_instances: int = 1 << 18, **how: Any) -> Output:
    """What the saved model says of these bags, as :func:`say` would. See :func:`say_shards` for the rest."""
    shards = say_shards(model, cut(bags, shard_instances) if isinstance(bags, Bags) else bags, **how)
    instance, bag, kept = zip(*shards, strict=True)
    return Output(torch.cat(instance), torch.cat(bag), {k: torch.cat([one[k] for one in kept]) for k in kept[0]})


def say_shards(
    model: Path | str, shards: Iterable[Shard], *, keep: tuple[str, ...] = (), batch_instances: int = 8192, **how: Any
) -> Iterator[Output]:
    """What is said of each shard, in order, as it comes: for answers that do not all fit in memory.

    A shard is Bags, or a function that makes them on the node. ``how``: address, gpus_each, cpus_each and retries, as for a
    study on Ray.
    """
    load(model)  # what is wrong with it is told before anything travels
    for arrays in _spread(answer, files_of(model), shards, (keep, batch_instances), **how):
        said = {k: torch.tensor(v) for k, v in arrays.items()}  # a copy: what Ray holds can only be read
        parts = {k.removeprefix("part."): v for k, v in said.items() if k.startswith("part.")}
        yield Output(said["instance"], said["bag"], parts)


def asker(
    model: Path | str, *, address: str | None = None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3
) -> Each:
    """Who asks the fitted model in this folder on a cluster, for :func:`headcount.judging.answers.ask`. What is wrong with
    the options is told at once."""
    alone_only("prediction on Ray")
    _check(address, gpus_each, cpus_each, retries)
    _ray()
    how: dict[str, Any] = {"address": address, "gpus_each": gpus_each, "cpus_each": cpus_each, "retries": retries}

    def each(parts: Iterator[Bags], listen: bool | None = None) -> Generator[answers.Shard, None, None]:
        for arrays in _spread(answer_fitted, files_of(model), map(apart, parts), (listen,), **how):
            yield answers.Shard(**arrays)

    return each


def _spread(
    task: Callable[..., tuple[Arrays, Parcel]],
    files: Files,
    shards: Iterable[Shard],
    more: tuple[Any, ...],
    *,
    address: str | None = None,
    gpus_each: float = 0,
    cpus_each: float = 1,
    retries: int = 3,
) -> Iterator[Arrays]:
    """What ``task`` says of each shard on some node, in order. No more shards are under way than keep the cluster busy, so that
    ``shards`` may be a generator that reads them one by one."""
    alone_only("prediction on Ray")
    _check(address, gpus_each, cpus_each, retries)
    ray = _ray()
    with _connected(ray, address):
        _find_room(ray, cpus_each, gpus_each)
        send = ray.remote(num_cpus=cpus_each, num_gpus=gpus_each, max_retries=retries, retry_exceptions=False)(task)
        there, device = ray.put(files), "cuda" if gpus_each else "cpu"
        most, going = 2 * _at_once(ray, cpus_each, gpus_each), deque()
        try:
            for shard in shards:
                if len(going) >= most:
                    yield _arrived(ray, going.popleft(), retries)
                going.append(send.remote(there, shard, *more, device, max(1, int(cpus_each))))
            while going:
                yield _arrived(ray, going.popleft(), retries)
        finally:
            for task_ in going:
                with suppress(Exception):
                    ray.cancel(task_)


def cut(bags: Bags, shard_instances: int) -> Iterator[Bags]:
    """Consecutive bags in shards of about so many instances, each over a pool of its own: nothing else travels."""
    if shard_instances < 1:
        raise HeadcountError(f"a shard holds at least one instance, got {shard_instances}")
    if not len(bags):
        raise HeadcountError("no bags to ask about; give at least one")
    yield from map(apart, by_instances(bags, shard_instances))


def apart(part: Bags) -> Bags:
    """These bags over a pool of their own, without truth."""
    seen, index = part.index.unique(return_inverse=True)
    own = Pool(part.pool.take(seen).cpu())
    return replace(part.to("cpu") if part.pool.device.type != "cpu" else part, pool=own, index=index.cpu()).blind()


def files_of(model: Path | str) -> Files:
    """A saved model as bytes."""
    return {name: (Path(model) / name).read_bytes() for name in FILES}


# -- on a node ----------------------------------------------------------------------------------------------------------------


def answer(
    files: Files, shard: Shard, keep: tuple[str, ...], batch_instances: int, device: str, threads: int
) -> tuple[Arrays, Parcel]:
    """What the model says of a shard; or an account of what went wrong."""
    try:
        torch.set_num_threads(threads)
        bags = shard if isinstance(shard, Bags) else shard()
        said = say(_model(_Held(files), load, device), bags, keep=keep, batch_instances=batch_instances)
        arrays = {"instance": said.instance, "bag": said.bag, **{f"part.{k}": v for k, v in said.parts.items()}}
        return {k: v.numpy() for k, v in arrays.items()}, Parcel({})
    except Exception as e:
        return {}, _trouble(e)


def answer_fitted(files: Files, bags: Bags, listen: bool | None, device: str, threads: int) -> tuple[Arrays, Parcel]:
    """What a fitted model says of a shard; or an account of what went wrong."""
    try:
        torch.set_num_threads(threads)
        said = answers.ask_shard(_model(_Held(files), Fitted.load, device), bags, listen)
        return said._asdict(), Parcel({})
    except Exception as e:
        return {}, _trouble(e)


def _trouble(error: Exception) -> Parcel:
    return Parcel({}, _packed(error), f"on {platform.node()}:\n{traceback.format_exc()}")


class _Held:
    """A model's files under a name made of their content: a node builds each model once."""

    def __init__(self, files: Files) -> None:
        self.files = files
        self.name = hashlib.sha256(b"".join(files[name] for name in FILES)).hexdigest()

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self.name == other.name


@lru_cache(maxsize=2)
def _model(held: _Held, load: Callable[[Path], Any], device: str) -> Any:
    with tempfile.TemporaryDirectory(prefix="headcount-") as folder:
        for name in FILES:
            (Path(folder) / name).write_bytes(held.files[name])
        return load(Path(folder)).to(device)


# -- on the driver ------------------------------------------------------------------------------------------------------------


def _arrived(ray: Any, task: Any, retries: int) -> Arrays:
    try:
        arrays, parcel = ray.get(task)
    except ray.exceptions.RayError as e:
        why = str(e).strip().partition("\n")[0]
        raise HeadcountError(
            f"a shard was lost {retries + 1} times ({type(e).__name__}: {why}); perhaps it is too large for the memory of a "
            "node: give it nodes with more, or in Python smaller shards"
        ) from e
    opened(parcel)
    return arrays


def _at_once(ray: Any, cpus: float, gpus: float) -> int:
    """How many tasks the cluster runs side by side."""
    there = ray.cluster_resources()
    rooms = [there.get(kind, 0) / each for kind, each in (("CPU", cpus), ("GPU", gpus)) if each]
    return max(1, int(min(rooms)))

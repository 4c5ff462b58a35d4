"""Ray: connecting to a cluster that has room, the exceptions of its tasks, and prediction: bags in shards, each a task; the predictions
come back in order. The model travels as its two files, once, and shards with their instances; where the data are on the nodes, give
functions that read a shard there instead."""

import logging
import os
import socket
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.inference.predict import ShardPredictor
from headcount.models.fitted import FittedModel, load_model
from headcount.models.heads import Output
from headcount.models.network import Model
from headcount.models.predictions import Predictions, predict
from headcount.models.serialization import JSON_FILE, WEIGHTS_FILE
from headcount.training.distributed import require_single_process

CONNECT_TIMEOUT = 10.0  # seconds
LOST_AFTER = 30.0  # seconds without an answer; after 60 Ray itself ends the process
ShardSource = Bags | Callable[[], Bags]
ModelFiles = tuple[bytes, ...]  # the weights, and the JSON
Arguments = dict[str, Any]  # of FittedModel.predict, or of predict for a Model


@dataclass(frozen=True)
class RayOptions:
    """Which cluster, and what each task takes of it.

    Parameters
    ----------
    address
        ``auto`` (this machine's cluster), ``host:port``, ``local`` (a new one on this machine), or None (the one that
        ``RAY_ADDRESS`` or this machine knows, else a new one).
    gpus_each, cpus_each, retries
        GPUs and CPUs of a task (0.25 lets four tasks share a GPU), and how often it is repeated after its process or node is
        lost. An exception in a task is final.
    """

    address: str | None = None
    gpus_each: float = 0
    cpus_each: float = 1
    retries: int = 3

    def __post_init__(self) -> None:
        address, gpus, cpus = self.address, self.gpus_each, self.cpus_each
        if address is not None and "://" in address:
            raise HeadcountError(f"this starts on a machine of the cluster; give auto, local or host:port, not {address!r}")
        if not 0 <= gpus < 1e6 or (gpus > 1 and gpus != int(gpus)):
            raise HeadcountError(f"a task takes a part of a GPU or whole ones (0, 0.25, 1, 2), got {gpus:g}")
        if not 0 < cpus < 1e6:
            raise HeadcountError(f"a task takes a part of a CPU or whole ones (0.5, 1, 4), got {cpus:g}")
        if self.retries < 0:
            raise HeadcountError(f"retries is 0 or more, got {self.retries}")

    @property
    def device(self) -> str:
        """The device of a task: Ray hides no GPU from a task that asked for none."""
        return "cuda" if self.gpus_each else "cpu"

    @property
    def threads(self) -> int:
        return max(1, int(self.cpus_each))


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
        See :class:`RayOptions`.
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


def check_device(device: str, gpus_each: float) -> None:
    """A task on Ray computes on the GPU it is given: refuse a ``--device`` that contradicts that."""
    if device not in ("auto", "cpu", "cuda"):
        raise HeadcountError(f"on Ray a run takes the GPU it is given; --device is auto, cpu or cuda, got {device!r}")
    if device != "auto" and (device == "cuda") != bool(gpus_each):
        raise HeadcountError(f"--device {device} and --gpus-each {gpus_each:g} contradict each other; give only --gpus-each")


def import_ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise HeadcountError("--launch ray needs Ray, which is not installed; pip install 'headcount[ray]'") from None
    return ray


@contextmanager
def connected(ray: Any, options: RayOptions) -> Iterator[None]:
    """Connected to the cluster, on which a task has room. A session that is open already is used, and left open."""
    address, connected_before = options.address, ray.is_initialized()
    if not connected_before:
        _check_reachable(address or os.environ.get("RAY_ADDRESS", ""))
        try:
            ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
            why = str(e).partition("\n")[0].partition(". ")[0]
            raise HeadcountError(f"no Ray cluster at {address!r} ({why}); `ray start --head` starts one") from e
    try:
        nodes, cpus, gpus = [node["Resources"] for node in ray.nodes() if node["Alive"]], options.cpus_each, options.gpus_each
        if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):  # a task would wait forever
            available = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
            raise HeadcountError(f"a run wants {cpus:g} CPUs and {gpus:g} GPUs of one node; the nodes have {available}")
        yield
    finally:
        if not connected_before:
            ray.shutdown()


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT).close()
        except (OSError, OverflowError) as e:
            hint = "is the head of the cluster running? (`ray start --head`)"
            raise HeadcountError(f"cannot connect to {address} ({e}); {hint}") from None


@contextmanager
def watched(ray: Any, on_loss: Callable[[str], None]) -> Iterator[None]:
    """Call ``on_loss`` while the head of the cluster is lost, or the node of this process, which a new head does not know."""
    context, ended, last_answer = ray.get_runtime_context(), threading.Event(), time.monotonic()
    (node,) = [node for node in ray.nodes() if node["NodeID"] == context.get_node_id()]
    addresses = context.gcs_address, f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}"

    def watch() -> None:
        nonlocal last_answer
        while not ended.wait(2):
            try:
                for address in addresses:
                    _check_reachable(address)
                last_answer = time.monotonic()
            except HeadcountError as e:
                if time.monotonic() - last_answer > LOST_AFTER:
                    on_loss(str(e))  # again and again: runs may be sent in the meantime

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def task_slots(ray: Any, options: RayOptions) -> int:
    """How many tasks the cluster runs at the same time."""
    resources, wanted = ray.cluster_resources(), (("CPU", options.cpus_each), ("GPU", options.gpus_each))
    return max(1, int(min(resources.get(kind, 0) / each for kind, each in wanted if each)))


def as_remote(ray: Any, task: Callable[..., Any], options: RayOptions) -> Any:
    """``task`` as a Ray function; an exception that it raises is not retried."""
    resources = {"num_cpus": options.cpus_each, "num_gpus": options.gpus_each}
    return ray.remote(**resources, max_retries=options.retries, retry_exceptions=False)(task)


def task_error(error: BaseException) -> BaseException:
    """The exception that a task raised, caused by Ray's, whose text says where; or Ray's own, if it could not bring it back."""
    cause = getattr(error, "cause", None)
    if cause is None:
        return error
    cause.__cause__ = error
    return cause

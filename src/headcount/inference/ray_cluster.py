"""Ray: connecting to a cluster that has room, and the exceptions of its tasks."""

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headcount.errors import HeadcountError

CONNECT_TIMEOUT = 10.0  # seconds


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
        _check_capacity(ray, options)
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


def _check_capacity(ray: Any, options: RayOptions) -> None:
    """A task that fits no node would wait forever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    cpus, gpus = options.cpus_each, options.gpus_each
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        available = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise HeadcountError(f"a run wants {cpus:g} CPUs and {gpus:g} GPUs of one node; the nodes have {available}")


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

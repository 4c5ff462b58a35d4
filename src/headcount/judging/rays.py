"""Runs on a Ray cluster: each a task with its share of a GPU, begun again elsewhere when its process or its node dies.

No shared disk is asked for. A run works in a scratch folder of its node; the record it needs (MPEM: its Counting Network's)
travels with it, its own record travels back as bytes, and the driver puts it in place. Data sets must be in each node's cache.
"""

from __future__ import annotations

import logging
import os
import pickle
import platform
import shutil
import socket
import tempfile
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headcount.errors import HeadcountError
from headcount.files import alone, write_whole
from headcount.judging.launch import Launcher, Submit
from headcount.judging.records import Record
from headcount.training.parallel import alone_only
from headcount.training.recipe import Recipe

Files = dict[str, bytes]  # by name
KNOCK_SECONDS = 10.0
GOODBYE_SECONDS = 10.0  # for runs to leave their nodes tidy after Ctrl-C


def ray_cluster(address: str | None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3) -> Launcher:
    """Runs on every node of a Ray cluster, as many at once as their CPUs and GPUs allow.

    ``address``: ``auto`` (the cluster this machine belongs to), ``host:port``, ``local`` (a new one on this machine alone), or
    None (the one ``RAY_ADDRESS`` or this machine knows, else a new one). ``gpus_each`` 0 trains on CPUs, 0.25 lets four runs
    share a GPU. ``retries`` counts lost processes and nodes; an exception in a run is the run's own failure and is final.

    What is submitted must be a run, ``task(recipe, folder, **options)`` that leaves its record in the folder.
    """
    alone_only("a study on Ray")
    _check(address, gpus_each, cpus_each, retries)
    ray = _ray()

    @contextmanager
    def launch() -> Iterator[Submit]:
        with _connected(ray, address), ThreadPoolExecutor(1) as scribe:
            _find_room(ray, cpus_each, gpus_each)
            send = ray.remote(num_cpus=cpus_each, num_gpus=gpus_each, max_retries=retries, retry_exceptions=False)(away)
            driver = _Driver(ray, send, scribe, max(1, int(cpus_each)), "cuda" if gpus_each else "cpu")
            try:
                yield driver.submit
            except BaseException:
                driver.cancel()
                raise

    return launch


# -- on a node --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errand:
    """What a node is told."""

    task: Callable[..., Any]
    recipe: Recipe
    key: str  # as the driver computes it: the node must have the same data
    options: dict[str, Any]
    study: str  # names the scratch folder
    folder: str  # the driver's, where there is the same one: a head or a source may be given by a relative path
    threads: int


@dataclass(frozen=True)
class Parcel:
    """What comes back: the record's files; or the exception, pickled, and where it arose."""

    files: Files
    error: bytes = b""
    trace: str = ""


def away(errand: Errand, *needs: Files) -> Parcel:
    """One run, wherever this is. A second try on the same node finds the first one's checkpoint; else nothing is left."""
    scratch = Path(tempfile.gettempdir()) / f"headcount-{errand.study}" / errand.key
    with alone(scratch.with_suffix(".lock")):
        try:
            return Parcel(_run_in(scratch, errand, needs))
        except Exception as e:
            return Parcel({}, _packed(e), f"on {platform.node()}:\n{traceback.format_exc()}")
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _run_in(scratch: Path, errand: Errand, needs: tuple[Files, ...]) -> Files:
    torch.set_num_threads(errand.threads)
    if Path(errand.folder).is_dir():
        os.chdir(errand.folder)
    if errand.recipe.key != errand.key:
        raise HeadcountError(
            f"{platform.node()} has another {errand.recipe.source} (or head {errand.recipe.head}) than the machine that "
            "started the study; copy that machine's there"
        )
    for files in needs:
        put(scratch, files)
    errand.task(errand.recipe, scratch, **errand.options)
    return files_of(scratch, errand.key)


def _packed(error: Exception) -> bytes:
    """An exception for a machine that may not know its class."""
    try:
        packed = pickle.dumps(error)
        pickle.loads(packed)
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


# -- what travels -----------------------------------------------------------------------------------------------------


def files_of(folder: Path, key: str) -> Files:
    """A record as bytes: its arrays, if they were kept, then its JSON."""
    paths = (folder / f"{key}.npz", folder / f"{key}.json")
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def put(folder: Path, files: Files) -> None:
    """A record in place: whole or absent, and the JSON that vouches for it last."""
    try:
        for name, content in sorted(files.items(), key=lambda file: file[0].endswith(".json")):
            write_whole(folder / name, lambda f, content=content: f.write(content))
    except Exception:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise


class _There(Exception):
    """Where on its node a run failed, shown as the cause of its exception."""


def opened(parcel: Parcel) -> Files:
    """The files; or the exception, raised here."""
    if not parcel.error:
        return parcel.files
    try:
        error = pickle.loads(parcel.error)
    except Exception:  # a class that only the node knows
        error = RuntimeError(parcel.trace.strip().splitlines()[-1])
    raise error from _There(parcel.trace)


# -- on the driver ----------------------------------------------------------------------------------------------------


class _Driver:
    """Sends runs out, and keeps their records as they come back."""

    def __init__(self, ray: Any, send: Any, scribe: ThreadPoolExecutor, threads: int, device: str) -> None:
        self.ray, self.send, self.scribe, self.threads, self.device = ray, send, scribe, threads, device
        self.study = uuid.uuid4().hex[:12]
        self.sent: dict[str, Any] = {}  # records that runs need, each put into the cluster once
        self.away: dict[Future, Any] = {}

    def submit(self, task: Callable[..., Any], recipe: Recipe, out: Path | str, **options: Any) -> Future:
        if options.get("device", "auto") == "auto":  # settled here: Ray hides no GPU from a run that asked for none
            options["device"] = self.device
        out, key, future = Path(out).absolute(), recipe.key, Future()
        errand = Errand(task, recipe, key, options, self.study, os.getcwd(), self.threads)
        going = self.send.remote(errand, *(self._sent(out, needed.key) for needed in recipe.needs))
        self.away[future] = going
        going.future().add_done_callback(lambda back: self._arrived(future, back, out, key))
        return future

    def _arrived(self, *what: Any) -> None:
        """Ray's own thread must not wait for a disk."""
        with suppress(RuntimeError):  # called back, and nobody waits for it any more
            self.scribe.submit(self._keep, *what)

    def _sent(self, out: Path, key: str) -> Any:
        if key not in self.sent:
            self.sent[key] = self.ray.put(files_of(out, key))
        return self.sent[key]

    def _keep(self, future: Future, back: Future, out: Path, key: str) -> None:
        try:
            files = opened(back.result())
            with alone(out / "running" / f"{key}.arrives.lock"):  # another driver may bring the same
                if not (out / f"{key}.json").exists():
                    put(out, files)
            future.set_result(Record.read(out / f"{key}.json"))
        except Exception as e:
            future.set_exception(e)
        finally:
            self.away.pop(future, None)

    def cancel(self) -> None:
        """Call everything back, and wait a little: what is interrupted tidies up, what has just finished is kept."""
        going = list(self.away.values())
        for run in going:
            with suppress(Exception):
                self.ray.cancel(run)
        if going:
            self.ray.wait(going, num_returns=len(going), timeout=GOODBYE_SECONDS, fetch_local=False)


def _check(address: str | None, gpus: float, cpus: float, retries: int) -> None:
    if address is not None and "://" in address:
        raise HeadcountError(f"this starts on a machine of the cluster; give auto, local or host:port, not {address!r}")
    if not 0 <= gpus < 1e6 or (gpus > 1 and gpus != int(gpus)):
        raise HeadcountError(f"a run takes a part of a GPU or whole ones (0, 0.25, 1, 2), got {gpus:g}")
    if not 0 < cpus < 1e6:
        raise HeadcountError(f"a run takes some of a CPU (0.5, 1, 4), got {cpus:g}")
    if retries < 0:
        raise HeadcountError(f"retries is 0 or more, got {retries}")


def agreed(device: str, gpus_each: float) -> None:
    """On Ray the device is given by Ray; what contradicts that is told before anything runs."""
    if device not in ("auto", "cpu", "cuda"):
        raise HeadcountError(f"on Ray a run takes the GPU it is given; --device is auto, cpu or cuda, got {device!r}")
    if device != "auto" and (device == "cuda") != bool(gpus_each):
        raise HeadcountError(
            f"--device {device} and --gpus-each {gpus_each:g} contradict each other; give only --gpus-each"
        )


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError:
        raise HeadcountError("Ray is not installed, and this is to run on it; pip install 'headcount[ray]'") from None
    return ray


@contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    if ray.is_initialized():  # somebody's session: used, and left as it was
        yield
        return
    _knock(address or os.environ.get("RAY_ADDRESS"))
    try:
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as e:
        why = str(e).partition("\n")[0].partition(". ")[0]
        raise HeadcountError(f"no Ray cluster at {address!r} ({why}); `ray start --head` starts one") from e
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str | None) -> None:
    """Ray would stand before a closed door for minutes."""
    host, _, port = (address or "").rpartition(":")
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), KNOCK_SECONDS).close()
        except (OSError, OverflowError) as e:
            raise HeadcountError(
                f"nobody answers at {address} ({e}); is the cluster's head up? (`ray start --head`)"
            ) from None


def _find_room(ray: Any, cpus: float, gpus: float) -> None:
    """A run that fits no node would wait for ever."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(node.get("CPU", 0) >= cpus and node.get("GPU", 0) >= gpus for node in nodes):
        there = ", ".join(f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes)
        raise HeadcountError(f"a run wants {cpus:g} CPUs and {gpus:g} GPUs of one node; the nodes have {there}")

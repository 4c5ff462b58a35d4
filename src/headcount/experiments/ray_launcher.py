"""Runs on a Ray cluster: each a task with its share of a GPU, begun again elsewhere when its process or its node dies.

No shared disk is asked for. A run works in a scratch folder of its node; the record it needs (MPEM: its Counting Network's)
travels with it, its own record travels back as bytes, and the driver puts it in place. Data sets must be in each node's cache.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from headcount.errors import HeadcountError
from headcount.experiments.launch import Launcher, Submit
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.inference.ray_cluster import RayOptions, RemoteResult, as_remote, connected, import_ray
from headcount.io import atomic_write, file_lock
from headcount.training.distributed import require_single_process

Files = dict[str, bytes]  # by name
CANCEL_TIMEOUT = 10.0  # for runs to leave their nodes tidy after Ctrl-C


def ray_cluster(address: str | None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3) -> Launcher:
    """Runs on every node of a Ray cluster, as many at once as their CPUs and GPUs allow.

    ``address``: ``auto`` (the cluster this machine belongs to), ``host:port``, ``local`` (a new one on this machine alone), or
    None (the one ``RAY_ADDRESS`` or this machine knows, else a new one). ``gpus_each`` 0 trains on CPUs, 0.25 lets four runs
    share a GPU. ``retries`` counts lost processes and nodes; an exception in a run is the run's own failure and is final.

    What is submitted must be a run, ``task(recipe, folder, **options)`` that leaves its record in the folder.
    """
    require_single_process("a study on Ray")
    ray_options = RayOptions(address, gpus_each, cpus_each, retries)
    ray = import_ray()

    @contextmanager
    def launch() -> Iterator[Submit]:
        with connected(ray, ray_options), ThreadPoolExecutor(1) as writer_thread:
            send = as_remote(ray, run_remote, ray_options)
            driver = _Driver(ray, send, writer_thread, ray_options.threads, ray_options.device)
            try:
                yield driver.submit
            except BaseException:
                driver.cancel()
                raise

    return launch


# -- on a node --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RemoteTask:
    """What a node is told."""

    task: Callable[..., Any]
    recipe: Recipe
    key: str  # as the driver computes it: the node must have the same data
    options: dict[str, Any]
    study_id: str  # names the scratch folder
    working_folder: str  # the driver's, where there is the same one: a head or a source may be given by a relative path
    threads: int


def run_remote(remote_task: RemoteTask, *needs: Files) -> RemoteResult[Files]:
    """One run, wherever this is. A second try on the same node finds the first one's checkpoint; else nothing is left."""
    scratch = Path(tempfile.gettempdir()) / f"headcount-{remote_task.study_id}" / remote_task.key
    with file_lock(scratch.with_suffix(".lock")):
        try:
            return RemoteResult(_run_in(scratch, remote_task, needs))
        except Exception as e:
            return RemoteResult.of_exception(e)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _run_in(scratch: Path, remote_task: RemoteTask, needs: tuple[Files, ...]) -> Files:
    torch.set_num_threads(remote_task.threads)
    if Path(remote_task.working_folder).is_dir():
        os.chdir(remote_task.working_folder)
    if remote_task.recipe.key != remote_task.key:
        raise HeadcountError(
            f"{platform.node()} has another {remote_task.recipe.source} (or head {remote_task.recipe.head}) than the machine that "
            "started the study; copy that machine's there"
        )
    for files in needs:
        write_files(scratch, files)
    remote_task.task(remote_task.recipe, scratch, **remote_task.options)
    return read_files(scratch, remote_task.key)


# -- what travels -----------------------------------------------------------------------------------------------------


def read_files(folder: Path, key: str) -> Files:
    """A record as bytes: its arrays, if they were kept, then its JSON."""
    paths = (folder / f"{key}.npz", folder / f"{key}.json")
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def write_files(folder: Path, files: Files) -> None:
    """A record in place: whole or absent, and the JSON that vouches for it last."""
    try:
        for name, content in sorted(files.items(), key=lambda file: file[0].endswith(".json")):
            atomic_write(folder / name, lambda f, content=content: f.write(content))
    except Exception:
        for name in files:
            (folder / name).unlink(missing_ok=True)
        raise


# -- on the driver ----------------------------------------------------------------------------------------------------


class _Driver:
    """Sends runs out, and keeps their records as they come back."""

    def __init__(self, ray: Any, send: Any, writer_thread: ThreadPoolExecutor, threads: int, device: str) -> None:
        self.ray, self.send, self.writer_thread, self.threads, self.device = ray, send, writer_thread, threads, device
        self.study = uuid.uuid4().hex[:12]
        self.stored_records: dict[str, Any] = {}  # records that runs need, each put into the cluster once
        self.remote_runs: dict[Future, Any] = {}

    def submit(self, task: Callable[..., Any], recipe: Recipe, out: Path | str, **options: Any) -> Future:
        if options.get("device", "auto") == "auto":  # settled here: Ray hides no GPU from a run that asked for none
            options["device"] = self.device
        out, key, future = Path(out).absolute(), recipe.key, Future()
        errand = RemoteTask(task, recipe, key, options, self.study, os.getcwd(), self.threads)
        going = self.send.remote(errand, *(self._stored_record(out, needed.key) for needed in recipe.needs))
        self.remote_runs[future] = going
        going.future().add_done_callback(lambda back: self._on_result(future, back, out, key))
        return future

    def _on_result(self, *what: Any) -> None:
        """Ray's own thread must not wait for a disk."""
        with suppress(RuntimeError):  # called back, and nobody waits for it any more
            self.writer_thread.submit(self._store_result, *what)

    def _stored_record(self, out: Path, key: str) -> Any:
        if key not in self.stored_records:
            self.stored_records[key] = self.ray.put(read_files(out, key))
        return self.stored_records[key]

    def _store_result(self, future: Future, back: Future, out: Path, key: str) -> None:
        try:
            files = back.result().unpack()
            with file_lock(out / "running" / f"{key}.arrives.lock"):  # another driver may bring the same
                if not (out / f"{key}.json").exists():
                    write_files(out, files)
            future.set_result(Record.read(out / f"{key}.json"))
        except Exception as e:
            future.set_exception(e)
        finally:
            self.remote_runs.pop(future, None)

    def cancel(self) -> None:
        """Call everything back, and wait a little: what is interrupted tidies up, what has just finished is kept."""
        going = list(self.remote_runs.values())
        for run in going:
            with suppress(Exception):
                self.ray.cancel(run)
        if going:
            self.ray.wait(going, num_returns=len(going), timeout=CANCEL_TIMEOUT, fetch_local=False)

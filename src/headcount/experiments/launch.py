"""Launchers: where a study's runs are executed: in this process, in several on this machine, or on a Ray cluster.

On Ray no shared disk is needed: the record that a run needs is sent to its node, its own record comes back as bytes, and the
driver writes it. Data sets must be in each node's cache.
"""

import multiprocessing
import os
import platform
import shutil
import signal
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, InvalidStateError, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch

from headcount.errors import HeadcountError, format_warning
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.inference.predict_ray import RayOptions, as_remote, connected, import_ray, task_error, watched
from headcount.io import atomic_write, commit_together, file_lock
from headcount.training.accel import threads_per_process
from headcount.training.distributed import require_single_process

Submit = Callable[..., Future]
Launcher = Callable[[], Any]  # a context manager that yields a Submit


@contextmanager
def in_process() -> Iterator[Submit]:
    """One run after the other, in this process."""

    def submit(task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
        future: Future = Future()
        try:
            future.set_result(task(*args, **kwargs))
        except Exception as e:
            future.set_exception(e)
        return future

    yield submit


def processes(count: int) -> Launcher:
    """Several runs at a time on this machine, each with its share of the cores."""
    require_single_process("a study with --processes")

    @contextmanager
    def launch() -> Iterator[Submit]:
        cores, context = threads_per_process(count), multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=(cores, os.getpid()))
        variables = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")  # workers read them once, when they import torch
        before = {name: os.environ[name] for name in variables if name in os.environ}
        os.environ.update(dict.fromkeys(variables, str(cores)))

        def submit(task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
            # workers start here, and start with Ctrl-C blocked: the parent handles it, after this returns
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                return pool.submit(task, *args, **kwargs)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, mask)

        try:
            yield submit
            pool.shutdown()
        except BaseException as e:
            workers = list((pool._processes or {}).values())  # only these: the caller may have other children
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()
            if isinstance(e, BrokenProcessPool):
                advice = "the same command resumes where it stopped, with fewer processes if it happens again"
                raise HeadcountError(f"a run's process was killed, possibly for lack of memory; {advice}") from e
            raise
        finally:
            for name in variables:
                del os.environ[name]
            os.environ.update(before)

    return launch


def _start_worker(cores: int, parent: int) -> None:
    torch.set_num_threads(cores)
    cast(Any, warnings).formatwarning = format_warning

    def exit_with_parent() -> None:
        # a killed parent cannot stop its workers: without this they would go on training
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()


Files = dict[str, bytes]  # file name -> content
CANCEL_TIMEOUT = 10.0  # seconds for cancelled runs to remove their scratch folders


def ray_cluster(address: str | None, gpus_each: float = 0, cpus_each: float = 1, retries: int = 3) -> Launcher:
    """A launcher for :func:`headcount.study`: runs on every node of a Ray cluster, as many at once as its CPUs and GPUs allow.
    The arguments are those of :class:`~headcount.inference.predict_ray.RayOptions`."""
    require_single_process("a study on Ray")
    ray_options = RayOptions(address, gpus_each, cpus_each, retries)
    ray = import_ray()

    @contextmanager
    def launch() -> Iterator[Submit]:
        with connected(ray, ray_options), ThreadPoolExecutor(1) as writer_thread:
            driver = _Driver(ray, ray_options, writer_thread)
            try:
                with watched(ray, driver.fail):
                    yield driver.submit
            except BaseException as e:
                driver.cancel()
                if isinstance(e, BrokenExecutor):
                    raise HeadcountError(f"the cluster was lost: {e}; the same command runs what is missing") from e
                raise

    return launch


def run_remote(
    *needs: Files, task: Callable[..., Any], recipe: Recipe, key: str, options: dict[str, Any],
    study_id: str, working_folder: str, threads: int,
) -> Files:  # fmt: skip
    """One run, on a node. A retry on the same node resumes from the checkpoint; otherwise the scratch folder, which is named by
    ``study_id``, is removed. ``key`` is the driver's: the node must have the same data. So is ``working_folder``, which is used
    if it exists, since a head or a source may be given by a relative path."""
    scratch = Path(tempfile.gettempdir()) / f"headcount-{study_id}" / key
    with file_lock(scratch.with_suffix(".lock")):
        try:
            torch.set_num_threads(threads)
            if Path(working_folder).is_dir():
                os.chdir(working_folder)
            if recipe.key != key:
                difference = f"{platform.node()} has another {recipe.source} (or head {recipe.head})"
                raise HeadcountError(f"{difference} than the machine that started the study; copy that machine's there")
            for files in needs:
                write_files(scratch, files)
            task(recipe, scratch, **options)
            return read_files(scratch, key)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def read_files(folder: Path, key: str) -> Files:
    """A record as bytes: its arrays, if they were kept, then its JSON."""
    paths = (folder / f"{key}.npz", folder / f"{key}.json")
    return {path.name: path.read_bytes() for path in paths if path.exists()}


def write_files(folder: Path, files: Files) -> None:
    """Put a record in place, complete or not at all: the JSON, whose existence means that it is complete, last."""
    with commit_together():
        for name, content in sorted(files.items(), key=lambda file: file[0].endswith(".json")):
            atomic_write(folder / name, lambda f, content=content: f.write(content))


class _Driver:
    """Sends runs to the cluster, and writes their records when they come back."""

    def __init__(self, ray: Any, options: RayOptions, writer_thread: ThreadPoolExecutor) -> None:
        self.ray, self.options, self.writer_thread = ray, options, writer_thread
        self.remote_function = as_remote(ray, run_remote, options)
        self.study_id = uuid.uuid4().hex[:12]
        self.stored_records: dict[str, Any] = {}  # records that runs need, each put into the cluster once
        self.remote_runs: dict[Future, Any] = {}

    def submit(self, task: Callable[..., Any], recipe: Recipe, out: Path | str, **options: Any) -> Future:
        if options.get("device", "auto") == "auto":  # decided here: Ray hides no GPU from a run that asked for none
            options["device"] = self.options.device
        out, key, future = Path(out).absolute(), recipe.key, Future()
        needs = [needed.key for needed in recipe.needs]
        for needed in set(needs) - self.stored_records.keys():
            self.stored_records[needed] = self.ray.put(read_files(out, needed))
        self.remote_runs[future] = self.remote_function.remote(
            *(self.stored_records[needed] for needed in needs), task=task, recipe=recipe, key=key, options=options,
            study_id=self.study_id, working_folder=os.getcwd(), threads=self.options.threads,
        )  # fmt: skip

        def on_result(result: Future) -> None:  # in a thread of Ray, which must not wait for a disk
            with suppress(RuntimeError):  # the study was cancelled
                self.writer_thread.submit(self._store_result, future, result, out, key)

        self.remote_runs[future].future().add_done_callback(on_result)
        return future

    def _store_result(self, future: Future, result: Future, out: Path, key: str) -> None:
        try:
            files = result.result()
            with file_lock(out / "running" / f"{key}.arrives.lock"):  # another driver may write the same record
                if not (out / f"{key}.json").exists():
                    write_files(out, files)
            future.set_result(Record.read(out / f"{key}.json"))
        except Exception as e:
            future.set_exception(task_error(e))
        finally:
            self.remote_runs.pop(future, None)

    def fail(self, why: str) -> None:
        """End all runs, and with them the study."""
        for future in list(self.remote_runs):
            with suppress(InvalidStateError):  # its result has just arrived
                future.set_exception(BrokenExecutor(why))

    def cancel(self) -> None:
        """Cancel all runs and wait briefly: they remove their scratch folders, and records that just arrived are kept."""
        remote_runs = list(self.remote_runs.values())
        for remote_run in remote_runs:
            with suppress(Exception):
                self.ray.cancel(remote_run)
        if remote_runs:
            self.ray.wait(remote_runs, num_returns=len(remote_runs), timeout=CANCEL_TIMEOUT, fetch_local=False)

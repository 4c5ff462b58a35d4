"""Launchers: where a study's runs are executed. Here: in this process, or in several on this machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from typing import Any

from headcount.errors import HeadcountError
from headcount.training.accel.device import threads_per_process
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
        cores = threads_per_process(count)
        with _environment(dict.fromkeys(_THREAD_VARIABLES, str(cores))):
            context = multiprocessing.get_context("spawn")
            initargs = (cores, os.getpid())
            pool = ProcessPoolExecutor(count, mp_context=context, initializer=_start_worker, initargs=initargs)
            try:
                yield partial(_submit, pool)
                pool.shutdown()
            except BaseException as e:
                workers = list((pool._processes or {}).values())  # only these: the caller may have other children
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.terminate()
                if isinstance(e, BrokenProcessPool):
                    raise HeadcountError(_KILLED) from e
                raise

    return launch


_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_KILLED = (
    "a run's process was killed, possibly for lack of memory; the same command resumes where it stopped, "
    "with fewer processes if it happens again"
)


def _submit(pool: Executor, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Workers start here, and start with Ctrl-C blocked: the parent handles it, after this returns."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(task, *args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Environment variables that workers read once, when they import torch."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _start_worker(cores: int, parent: int) -> None:
    import threading
    import time

    import torch

    torch.set_num_threads(cores)

    def exit_with_parent() -> None:
        # a killed parent cannot stop its workers: without this they would go on training
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()

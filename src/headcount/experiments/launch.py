"""Launchers: a launcher is a function from (task, arguments) to futures. Here: this process, or several on this machine."""

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
    """Runs side by side on this machine, each with its share of the cores."""
    require_single_process("a study with --processes")

    @contextmanager
    def launch() -> Iterator[Submit]:
        each = threads_per_process(count)
        with _each_with(each):
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(count, mp_context=context, initializer=_begin, initargs=(each, os.getpid()))
            try:
                yield partial(_submit, pool)
                pool.shutdown()
            except BaseException as e:
                workers = list((pool._processes or {}).values())  # these only: a caller may have children of his own
                pool.shutdown(wait=False, cancel_futures=True)
                for worker in workers:
                    worker.terminate()
                if isinstance(e, BrokenProcessPool):
                    raise HeadcountError(_LOST) from e
                raise

    return launch


def _submit(pool: Executor, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Future:
    """Workers are born here, and born deaf to Ctrl-C: it is the parent's to handle, who hears of it after this."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(task, *args, **kwargs)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _each_with(cores: int) -> Iterator[None]:
    """What a worker reads once, when it imports torch."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, str(cores)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


_LOST = (
    "a run's process was killed, perhaps for want of memory; the same command goes on where it stopped, "
    "with fewer processes if it happens again"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _begin(cores: int, parent: int) -> None:
    import threading
    import time

    import torch

    torch.set_num_threads(cores)

    def leave_with_parent() -> None:
        # a killed parent cannot say goodbye: without this its workers would train on, unseen
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()

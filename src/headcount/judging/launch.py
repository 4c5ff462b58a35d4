"""Launchers: a launcher is a function from (task, arguments) to futures. Here: this process, or several on this machine."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

from headcount.training.speed import threads

Submit = Callable[..., Future]
Launcher = Callable[[], Any]  # a context manager that yields a Submit


@contextmanager
def here() -> Iterator[Submit]:
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

    @contextmanager
    def launch() -> Iterator[Submit]:
        each = threads(count)
        context = multiprocessing.get_context("spawn")
        before = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(dict.fromkeys(_THREADS, str(each)))  # read once, when a worker imports torch
        pool: Executor = ProcessPoolExecutor(
            count, mp_context=context, initializer=_begin, initargs=(each, os.getpid())
        )
        try:
            yield pool.submit
            pool.shutdown()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    return launch


_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def _begin(cores: int, parent: int) -> None:
    import signal
    import threading
    import time

    import torch

    torch.set_num_threads(cores)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle

    def leave_with_parent() -> None:
        # a killed parent cannot say goodbye: without this its workers would train on, unseen
        while os.getppid() == parent:
            time.sleep(0.2)
        os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()

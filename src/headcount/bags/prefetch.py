"""Prefetching: a thread reads the next instances from disk, or copies them to the GPU, while the present ones are computed on.

The reader is given all addresses in advance, in order. At most ``depth`` reads are ready at a time, so memory stays bounded.
"""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache

import torch
from torch import Tensor

from headcount.bags.pool import Pool


@contextmanager
def open_reader(pool: Pool, device: torch.device, plan: Iterable[Tensor]) -> Iterator[DirectReader]:
    """Open a reader of these addresses, in this order: direct if the pool is on the device already, else prefetching."""
    resident = not pool.on_disk and pool.device == device
    reader = DirectReader(pool, device) if resident else Prefetcher(pool, device, plan)
    try:
        yield reader
    finally:
        reader.close()


@lru_cache
def release_large_blocks() -> None:
    """Let glibc return freed blocks of 1 MB and more to the system at once. By default it keeps and splits blocks of up to
    32 MB, which over many chunks amounts to far more memory than is in use."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


class DirectReader:
    """Reads when asked."""

    stall_seconds = 0.0  # how long calls of take() have waited

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.pool, self.device = pool, device

    def take(self, addresses: Tensor) -> Tensor:
        """(n,) addresses -> (n, ...) instances on the device. Do not modify them: they may be the pool's own memory."""
        if not self.pool.on_disk and self.pool.device.type == "cpu" and _are_consecutive(addresses):
            return self.pool.data[int(addresses[0]) : int(addresses[-1]) + 1].to(self.device)
        return self.pool.take(addresses).to(self.device)

    def close(self) -> None:
        pass


def _are_consecutive(addresses: Tensor) -> bool:
    """Usually true of a bag of features: it can then be sliced instead of gathered."""
    n = len(addresses)
    if not n or int(addresses[-1]) - int(addresses[0]) != n - 1:
        return False
    return torch.equal(addresses, torch.arange(int(addresses[0]), int(addresses[0]) + n, device=addresses.device))


class Prefetcher(DirectReader):
    """Reads in a thread, before it is asked."""

    def __init__(self, pool: Pool, device: torch.device, plan: Iterable[Tensor], depth: int = 2) -> None:
        super().__init__(pool, device)
        release_large_blocks()
        self.queue: queue.Queue[tuple[Tensor | None, Tensor | BaseException]] = queue.Queue(depth)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._fetch, args=(iter(plan),), name="headcount-prefetch", daemon=True)
        self.thread.start()

    def take(self, addresses: Tensor) -> Tensor:
        started = time.perf_counter()
        planned, x = self.queue.get()
        self.stall_seconds += time.perf_counter() - started
        if isinstance(x, BaseException):
            raise x
        if planned is None or not torch.equal(planned, addresses):
            raise RuntimeError("the addresses read differ from the planned ones")
        return x.to(self.device, non_blocking=True)

    def close(self) -> None:
        self.stopped.set()
        self.thread.join()

    def _fetch(self, plan: Iterator[Tensor]) -> None:
        try:
            for addresses in plan:
                x = self.pool.take(addresses)
                if not self._put(addresses, x.pin_memory() if self.device.type == "cuda" else x):
                    return
            self._put(None, RuntimeError("more reads than were planned"))
        except BaseException as e:  # raised again in take()
            self._put(None, e)

    def _put(self, addresses: Tensor | None, x: Tensor | BaseException) -> bool:
        while not self.stopped.is_set():
            try:
                self.queue.put((addresses, x), timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

"""Reading ahead: a thread fetches the next instances from a disk, or towards a GPU, while the present ones are computed with.

Whoever reads says beforehand what he will read, in order. At most ``depth`` reads lie ready, so that memory stays bounded.
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
    """A way to take these addresses, in this order, from the pool to the device: ahead, unless the pool is at hand."""
    reader = (
        DirectReader(pool, device) if not pool.on_disk and pool.device == device else Prefetcher(pool, device, plan)
    )
    try:
        yield reader
    finally:
        reader.close()


@lru_cache
def release_large_blocks() -> None:
    """From now on, what is freed in blocks of 1 MB and more goes back to the system at once. glibc would keep and cut up
    blocks of up to 32 MB, and in a long row of chunks that comes to far more than is in use."""
    with suppress(OSError, AttributeError):  # another C library, which may do as it likes
        ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD


class DirectReader:
    """Reads when asked."""

    stall_seconds = 0.0  # seconds for which a taker stood there with nothing ready

    def __init__(self, pool: Pool, device: torch.device) -> None:
        self.pool, self.device = pool, device

    def take(self, addresses: Tensor) -> Tensor:
        """(n,) addresses -> (n, ...) instances, on the device; only to be looked at, for they may be the pool itself."""
        if not self.pool.on_disk and self.pool.device.type == "cpu" and _are_consecutive(addresses):
            return self.pool.data[int(addresses[0]) : int(addresses[-1]) + 1].to(self.device)
        return self.pool.take(addresses).to(self.device)

    def close(self) -> None:
        pass


def _are_consecutive(addresses: Tensor) -> bool:
    """A bag of features mostly lies in one piece: then there is nothing to gather."""
    n = len(addresses)
    if not n or int(addresses[-1]) - int(addresses[0]) != n - 1:
        return False
    return torch.equal(addresses, torch.arange(int(addresses[0]), int(addresses[0]) + n, device=addresses.device))


class Prefetcher(DirectReader):
    """Reads before it is asked."""

    def __init__(self, pool: Pool, device: torch.device, plan: Iterable[Tensor], depth: int = 2) -> None:
        super().__init__(pool, device)
        release_large_blocks()
        self.queue: queue.Queue[tuple[Tensor | None, Tensor | BaseException]] = queue.Queue(depth)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._fetch, args=(iter(plan),), name="headcount-ahead", daemon=True)
        self.thread.start()

    def take(self, addresses: Tensor) -> Tensor:
        started = time.perf_counter()
        planned, x = self.queue.get()
        self.stall_seconds += time.perf_counter() - started
        if isinstance(x, BaseException):
            raise x
        if planned is None or not torch.equal(planned, addresses):
            raise RuntimeError("what is read is not what was planned")
        return x.to(self.device, non_blocking=True)

    def close(self) -> None:
        self.stopped.set()
        self.thread.join()

    def _fetch(self, plan: Iterator[Tensor]) -> None:
        try:
            for addresses in plan:
                x = self.pool.take(addresses)
                if not self._offer(addresses, x.pin_memory() if self.device.type == "cuda" else x):
                    return
            self._offer(None, RuntimeError("more is read than was planned"))
        except BaseException as e:  # told to whoever waits for it
            self._offer(None, e)

    def _offer(self, addresses: Tensor | None, x: Tensor | BaseException) -> bool:
        while not self.stopped.is_set():
            try:
                self.queue.put((addresses, x), timeout=0.05)
                return True
            except queue.Full:
                continue
        return False

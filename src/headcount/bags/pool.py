"""Where pixels and features live: in one place, however many bags refer to them.

A pool is one array, on the device, in memory, or mapped from an .npy file larger than memory; images may also stay in their files.
Bags hold addresses into the pool and never copy it. :func:`open_reader` prefetches: a thread reads the next instances from disk, or
copies them to the GPU, while the present ones are computed on.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor

from headcount.errors import HeadcountError
from headcount.loading import load_npy

_CHUNK_NUMBERS = 1 << 22  # checked at a time
MAX_RESIDENT_BYTES = 1 << 28  # a mapped file up to this size is treated as memory


class Pool:
    """A pool of M instances.

    Parameters
    ----------
    data
        Images (M, H, W, channels) or (M, H, W) uint8, or features (M, D) of any number type.
    trusted
        The numbers are known to be finite and need not be checked.
    keep_float64
        Keep features in float64, for classifiers of scikit-learn, instead of converting them to float32.

    Examples
    --------
    >>> pool = Pool(np.zeros((5, 8, 8, 3), dtype=np.uint8))
    >>> pool.kind, len(pool), pool.shape
    ('images', 5, (8, 8, 3))
    >>> pool.take(torch.tensor([4, 0])).shape
    torch.Size([2, 8, 8, 3])
    """

    data: Tensor
    _file: mmap.mmap | None = None
    on_disk: bool = False  # instances are read from disk each time they are taken: prefetch them
    is_lazy: ClassVar[bool] = False  # they are made when they are taken: ``data`` has their shape and type only

    def __init__(self, data: Any, trusted: bool = False, keep_float64: bool = False) -> None:
        if isinstance(data, np.memmap) and data.nbytes > MAX_RESIDENT_BYTES:
            self._file = cast(Any, data)._mmap
        x = data if isinstance(data, Tensor) else _to_tensor(np.asanyarray(data))
        if x.is_complex():
            raise HeadcountError("a pool holds plain numbers, got complex ones; give real and imaginary parts as columns")
        if x.dtype == torch.uint8 and x.ndim == 3:
            x = x.unsqueeze(-1)  # gray images: one channel
        is_images = x.dtype == torch.uint8 and x.ndim == 4
        if x.ndim != 2 and not is_images:
            want = "images as uint8 (count, height, width, channels) or features as (count, dimension)"
            raise HeadcountError(f"a pool holds {want}, got {x.dtype} of shape {tuple(x.shape)}")
        if not is_images and (not x.is_floating_point() or (x.dtype == torch.float64 and not keep_float64)):
            x = x.float()
        rows = max(1, _CHUNK_NUMBERS // max(1, x.shape[1]))
        for start in range(0, 0 if trusted or is_images else len(x), rows):
            bad = ~torch.isfinite(x[start : start + rows]).all(1)
            self._release_pages()
            if bad.any():
                row = start + int(bad.nonzero()[0])
                col = int((~torch.isfinite(x[row])).nonzero()[0])
                value = f"{float(x[row, col])} in column {col}"
                raise HeadcountError(f"row {row} of the features has {value}; drop the row or fill the value in")
        self.data = x
        self.on_disk = self._file is not None and x.data_ptr() == data.ctypes.data  # not converted, so not copied

    @classmethod
    def from_npy(cls, path: str | Path) -> Pool:
        """Map an .npy file, which may be larger than memory. It is read once to check it. Numbers other than float16 and float32
        are converted, and therefore read into memory."""
        return cls(load_npy(Path(path), mapped=True))

    @property
    def kind(self) -> str:
        return "images" if self.data.dtype == torch.uint8 else "features"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one instance."""
        return tuple(self.data.shape[1:])

    @property
    def device(self) -> torch.device:
        return self.data.device

    def take(self, addresses: Tensor) -> Tensor:
        """(n,) addresses -> (n, ...) instances, on the pool's device."""
        taken = self.data.index_select(0, addresses.to(self.data.device))
        if self.on_disk:
            self._release_pages()
        return taken

    def to(self, device: torch.device | str) -> Pool:
        """The same pool on a device; itself if it is on it already, or its instances go there batch by batch."""
        if torch.device(device) == self.device or self.is_lazy:
            return self
        moved: Pool = object.__new__(Pool)  # checked already
        moved.data = self.data.to(device)
        return moved

    def _release_pages(self) -> None:
        """Give mapped pages back: the system may keep them cached, but they no longer count as this process's memory."""
        if self._file is not None and hasattr(self._file, "madvise"):
            self._file.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Pool({len(self)} {self.kind} of {'x'.join(map(str, self.shape))} on {self.device})"


class DatasetPool(Pool):
    """The instances of a ``torch.utils.data.Dataset``, read when they are needed, by one thread ahead of the training. Its items are
    instances, or tuples that begin with one: uint8 images (height, width, channels), or features (D,)."""

    is_lazy = True
    on_disk = True

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        if not len(dataset):
            raise HeadcountError("the dataset has no items; give at least one")
        self.data = self.take(torch.tensor([0]))[:0]

    def take(self, addresses: Tensor) -> Tensor:
        items = (self.dataset[i] for i in addresses.tolist())
        return Pool(np.stack([np.asarray(item[0] if isinstance(item, tuple | list) else item) for item in items])).data

    def __len__(self) -> int:
        return len(self.dataset)


class ImageFilePool(DatasetPool):
    """M image files as a pool of images (height, width, 3) uint8, for sets that fit neither memory nor a cache on disk. Images are
    decoded and resized by a few threads (decoding releases the GIL) whenever they are taken."""

    def __init__(self, files: Sequence[str | Path], height: int, width: int, n_threads: int | None = None) -> None:
        if not len(files):
            raise HeadcountError("no image files; give at least one")
        self.dataset, self.size = [str(f) for f in files], (height, width)
        self.data = torch.empty(0, height, width, 3, dtype=torch.uint8)
        self.executor = ThreadPoolExecutor(n_threads or min(8, os.cpu_count() or 1), "headcount-image")

    def take(self, addresses: Tensor) -> Tensor:
        return torch.from_numpy(np.stack(list(self.executor.map(self._decode, addresses.tolist()))))

    def _decode(self, address: int) -> np.ndarray:
        from PIL import Image

        try:
            with Image.open(self.dataset[address]) as file:
                return np.asarray(file.convert("RGB").resize(self.size[::-1], Image.Resampling.BILINEAR))
        except OSError as e:
            reason = e.strerror or "not an image, or damaged"
            raise HeadcountError(f"{self.dataset[address]}: {reason}; repair it or leave it out") from None


def to_feature_array(x: Tensor) -> np.ndarray:
    """(n, D) features as scikit-learn takes them: float32, or float64 where the pool kept it."""
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()


def to_numpy(x: Tensor) -> np.ndarray:
    """A tensor on any device as an array, without its gradient; bfloat16, which numpy lacks, as float32."""
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def _to_tensor(array: np.ndarray) -> Tensor:
    """Shares the array's memory where torch can: pools only read, so read-only arrays need no copy."""
    if array.dtype.kind not in "biufc":
        raise HeadcountError(f"a pool holds numbers, got an array of {array.dtype}")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except TypeError:
            raise HeadcountError(f"a pool holds numbers torch knows, got {array.dtype}") from None


def open_reader(pool: Pool, device: torch.device, plan: Iterable[Tensor]) -> AbstractContextManager[DirectReader]:
    """Open a reader of these addresses, in this order: direct if the pool is on the device already, else prefetching."""
    resident = not pool.on_disk and pool.device == device
    return nullcontext(DirectReader(pool, device)) if resident else closing(Prefetcher(pool, device, plan))


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
        if not self.pool.on_disk and self.pool.device.type == "cpu" and len(addresses):
            first, stop = int(addresses[0]), int(addresses[-1]) + 1
            consecutive = stop - first == len(addresses) and torch.equal(addresses.cpu(), torch.arange(first, stop))
            if consecutive:  # as those of a bag of features usually are: slicing is faster than gathering
                return self.pool.data[first:stop].to(self.device)
        return self.pool.take(addresses).to(self.device)


class Prefetcher(DirectReader):
    """Reads in a thread, before it is asked: all addresses are given in order, and ``depth`` reads are in memory at most."""

    def __init__(self, pool: Pool, device: torch.device, plan: Iterable[Tensor], depth: int = 3) -> None:
        super().__init__(pool, device)
        release_large_blocks()
        self.plan, self.pending = iter(plan), deque[tuple[Tensor, Future[Tensor]]]()
        self.executor = ThreadPoolExecutor(1, "headcount-prefetch")
        self._submit(depth)

    def take(self, addresses: Tensor) -> Tensor:
        if not self.pending:
            raise RuntimeError("more reads than were planned")
        planned, read = self.pending.popleft()
        started = time.perf_counter()
        x = read.result()
        self.stall_seconds += time.perf_counter() - started
        if not torch.equal(planned, addresses):
            raise RuntimeError("the addresses read differ from the planned ones")
        self._submit(1)
        return x.to(self.device, non_blocking=True)

    def close(self) -> None:
        self.executor.shutdown(cancel_futures=True)

    def _submit(self, reads: int) -> None:
        self.pending.extend((a, self.executor.submit(self._read, a)) for a in islice(self.plan, reads))

    def _read(self, addresses: Tensor) -> Tensor:
        x = self.pool.take(addresses)
        return x.pin_memory() if self.device.type == "cuda" else x

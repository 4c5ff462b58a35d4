"""Where pixels and features live: once, in one place, however many bags point at them.

A pool is one array: images (M, H, W, channels) uint8, or features (M, D) float. It may lie on the device, in memory, or be
mapped from an .npy file larger than memory; bags hold addresses into it and never copies. Features are float32 at most, but
for classifiers of scikit-learn, which get float64 as it was given (``exact``).
"""

from __future__ import annotations

import mmap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headcount.errors import HeadcountError

_CHUNK_NUMBERS = 1 << 22  # numbers that are looked at together
MAX_RESIDENT_BYTES = 1 << 28  # bytes; a mapped file up to this size is simply memory


class Pool:
    """M instances.

    >>> pool = Pool(np.zeros((5, 8, 8, 3), dtype=np.uint8))
    >>> pool.kind, len(pool), pool.shape
    ('images', 5, (8, 8, 3))
    >>> pool.take(torch.tensor([4, 0])).shape
    torch.Size([2, 8, 8, 3])
    """

    data: Tensor
    _file: mmap.mmap | None = None
    on_disk: bool = False  # true where instances come from a disk each time they are taken: it pays to read ahead

    def __init__(self, data: Any, trusted: bool = False, keep_float64: bool = False) -> None:
        """``trusted``: the numbers were seen to be finite when they were written; a pool on disk is not read again.
        ``exact``: float64 stays what it is."""
        if isinstance(data, np.memmap) and data.nbytes > MAX_RESIDENT_BYTES:
            self._file = cast(Any, data)._mmap
        self.data = _check_data(data, trusted, self._release_pages, keep_float64)
        # what had to be converted lies in memory after all
        self.on_disk = self._file is not None and self.data.data_ptr() == data.ctypes.data

    @classmethod
    def from_npy(cls, path: str | Path) -> Pool:
        """Map an .npy file: it may be larger than memory. It is looked through once, and what was read is let go again.

        Numbers other than float16 and float32 are converted, and so are read into memory.
        """
        try:
            return cls(np.load(path, mmap_mode="c", allow_pickle=False))
        except (OSError, ValueError) as e:
            raise HeadcountError(f"cannot map {path}: {e}; give an .npy file written by numpy.save") from None

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
        """The same pool on a device; itself if it is there already."""
        if torch.device(device) == self.device:
            return self
        moved: Pool = object.__new__(Pool)  # already checked
        moved.data = self.data.to(device)
        return moved

    def _release_pages(self) -> None:
        """Give mapped pages back: they stay in the system's cache while there is room, and are not this process's memory."""
        if self._file is not None and hasattr(self._file, "madvise"):
            self._file.madvise(mmap.MADV_DONTNEED)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        return f"Pool({len(self)} {self.kind} of {'x'.join(map(str, self.shape))} on {self.device})"


def _check_data(
    data: Any, trusted: bool, release_pages: Callable[[], None] = lambda: None, keep_float64: bool = False
) -> Tensor:
    """Images as uint8 (M, H, W, channels), features as float (M, D), every number finite."""
    x = data if isinstance(data, Tensor) else _to_tensor(np.asanyarray(data))
    if x.is_complex():
        raise HeadcountError("a pool holds plain numbers, got complex ones; give real and imaginary parts as columns")
    if x.dtype == torch.uint8 and x.ndim == 3:
        x = x.unsqueeze(-1)  # gray pictures: one channel
    if x.dtype == torch.uint8 and x.ndim == 4:
        return x
    if x.ndim != 2:
        want = "images as uint8 (count, height, width, channels) or features as (count, dimension)"
        raise HeadcountError(f"a pool holds {want}, got {x.dtype} of shape {tuple(x.shape)}")
    if not x.is_floating_point() or (x.dtype == torch.float64 and not keep_float64):
        x = x.float()
    rows = max(1, _CHUNK_NUMBERS // max(1, x.shape[1]))
    for start in range(0, 0 if trusted else len(x), rows):
        bad = ~torch.isfinite(x[start : start + rows]).all(1)
        release_pages()
        if bad.any():
            row = start + int(bad.nonzero()[0])
            col = int((~torch.isfinite(x[row])).nonzero()[0])
            raise HeadcountError(
                f"row {row} of the features has {float(x[row, col])} in column {col}; drop the row or fill the value in"
            )
    return x


def to_feature_array(x: Tensor) -> np.ndarray:
    """Features as scikit-learn takes them: (n, D) float32, or float64 where a pool kept it."""
    return (x if x.dtype == torch.float64 else x.float()).cpu().numpy()


def to_numpy(x: Tensor) -> np.ndarray:
    """A tensor as numpy takes it, wherever it lies and whatever follows its gradient; bfloat16, unknown there, as float32."""
    x = x.detach().cpu()
    return (x.float() if x.dtype == torch.bfloat16 else x).numpy()


def _to_tensor(array: np.ndarray) -> Tensor:
    """Over the same memory where numpy and torch agree on it: an array that cannot be written to is only ever read."""
    if array.dtype.kind not in "biufc":
        raise HeadcountError(f"a pool holds numbers, got an array of {array.dtype}")
    if any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        try:
            return torch.from_numpy(array)
        except TypeError:
            raise HeadcountError(f"a pool holds numbers torch knows, got {array.dtype}") from None

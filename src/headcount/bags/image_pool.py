"""Pictures that stay in their files: each is decoded when it is taken, by a few threads, ahead of the step (see ahead.py).

For sets that fit neither memory nor a cache on disk. Decoding again in every epoch costs time; a decoded cache does not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from headcount.bags.pool import Pool
from headcount.errors import HeadcountError


class ImageFilePool(Pool):
    """M picture files as a pool of images (height, width, 3) uint8; what has another size is resized."""

    def __init__(self, files: Sequence[str | Path], height: int, width: int, n_threads: int | None = None) -> None:
        if not len(files):
            raise HeadcountError("no picture files; give at least one")
        self.files, self.size = [str(f) for f in files], (height, width)
        self.data = torch.empty(
            0, height, width, 3, dtype=torch.uint8
        )  # shape and kind; the pixels stay where they are
        self.on_disk = True
        self.executor = ThreadPoolExecutor(
            n_threads or min(8, os.cpu_count() or 1), thread_name_prefix="headcount-picture"
        )

    def take(self, addresses: Tensor) -> Tensor:
        # decoding lets other threads run, so threads are enough, and nothing is copied between processes
        return torch.from_numpy(np.stack(list(self.executor.map(self._decode, addresses.tolist()))))

    def to(self, device: torch.device | str) -> Pool:
        """Itself: pixels go to a device batch by batch."""
        return self

    def __len__(self) -> int:
        return len(self.files)

    def _decode(self, address: int) -> np.ndarray:
        try:
            with Image.open(self.files[address]) as picture:
                image = picture.convert("RGB")
                if image.size != self.size[::-1]:
                    image = image.resize(self.size[::-1], Image.Resampling.BILINEAR)
                return np.asarray(image)
        except OSError as e:
            why = e.strerror or "not a picture, or damaged"
            raise HeadcountError(f"{self.files[address]}: {why}; mend it or leave it out") from None

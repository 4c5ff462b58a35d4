"""Normalize: from stored instances to the input of a network, fitted on training bags only and saved with the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.readers.standard_scaler import StandardScaler

_CHUNK = 1 << 12  # instances
_MAX_SAMPLE = 50_000  # instances, for a mean and a deviation


class Normalize(nn.Module):
    """(n, H, W, channels) uint8 -> (n, channels, H, W) float, or (n, D) -> (n, D): minus the mean, over the deviation.

    The permuted view is channels-last in memory, the fastest layout for convolutions: nothing is copied.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, shape: tuple[int, ...], mean: Any, std: Any) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.register_buffer("mean", torch.as_tensor(mean, dtype=torch.float32))
        self.register_buffer("std", torch.as_tensor(std, dtype=torch.float32))
        if self.mean.shape != (self.shape[-1],) or self.std.shape != self.mean.shape:
            raise HeadcountError(f"mean and std need {self.shape[-1]} numbers, got {tuple(self.mean.shape)}")

    @property
    def images(self) -> bool:
        return len(self.shape) == 3

    @classmethod
    def fit(cls, train: Bags, mean: Any = None, std: Any = None) -> Normalize:
        """The given constants, or the mean and deviation of each channel (each feature) over the training bags."""
        if mean is not None and std is not None:
            return cls(train.pool.shape, mean, std)
        addresses = train.index.unique()
        addresses = addresses[:: max(1, len(addresses) // _MAX_SAMPLE)]

        def chunks() -> Iterator[np.ndarray]:
            """(n, channels) or (n, D): large images, or many features, need not be in memory all at once."""
            for part in addresses.split(_CHUNK):
                x = train.pool.take(part).float()
                yield (x / 255 if train.pool.kind == "images" else x).flatten(0, -2).cpu().numpy()

        scaler = StandardScaler.fit_chunks(chunks, min_deviation=1e-6)
        return cls(train.pool.shape, scaler.mean_, scaler.scale_)

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != self.shape:
            raise HeadcountError(f"the model takes instances of shape {self.shape}, got {tuple(x.shape[1:])}")
        if not self.images:
            return (x.float() - self.mean).div_(self.std)  # in place: for features this is a good part of the time
        return ((x.float() / 255 - self.mean) / self.std).permute(0, 3, 1, 2)

"""FrozenBackbone: a pretrained backbone that turns images into features, so that every method for features works on images too.

Its weights are in the model's own file, so a saved model needs no download.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags, Pool
from headcount.datasets import cache as data_cache
from headcount.errors import HeadcountError
from headcount.io import atomic_path, file_lock
from headcount.models import library_backbones as library
from headcount.models import serialization
from headcount.models.backbones import Normalize

BATCH_IMAGES = 64  # images that go through the network at once
_FLOAT16_MAX = 65504.0
ProgressCallback = Callable[[int, int], None]  # (images done, images in all)


class FrozenBackbone(nn.Module):
    """Images (n, H, W, channels) uint8 -> (n, D) float16: Normalize, then a backbone of timm or torchvision, with random weights
    at first. Images are first resized to squares of side ``size``."""

    def __init__(self, name: str, shape: tuple[int, ...], size: int | None = None) -> None:
        super().__init__()
        self.name, self.shape, self.size = name, tuple(shape), size
        channels = shape[-1]
        self.normalize = Normalize(self.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = library.build_library_backbone(name, self.shape, {"size": size, "frozen": True})
        self.dim = self.backbone.dim

    @classmethod
    def from_pretrained(cls, pretrained: library.PretrainedBackbone, shape: tuple[int, ...]) -> FrozenBackbone:
        """With pretrained weights, and the mean and deviation of the images these were trained on."""
        frozen_backbone = cls(pretrained.name, shape, pretrained.size)
        frozen_backbone.normalize = Normalize(frozen_backbone.shape, pretrained.mean, pretrained.std)
        pretrained.load_into(frozen_backbone.backbone)
        return frozen_backbone.eval()

    @classmethod
    def from_json(cls, data: Any, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> FrozenBackbone | None:
        """From a model's file: a plain name of a library, a size, and the weights; or null."""
        if data is None:
            if arrays:
                raise HeadcountError(f"the weights 'frozen_backbone.{min(arrays)[:60]}' belong to nothing")
            return None
        serialization.check_keys(data, {"backbone", "size"}, "the frozen backbone")
        name, size = data["backbone"], data["size"]
        if not isinstance(name, str) or len(name) > 200 or not library.is_library_backbone(name):
            raise HeadcountError(f"the frozen backbone is none of a library: {str(name)[:40]!r}")
        return serialization.build_with_weights(lambda: cls(name, shape, size), arrays)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.normalize(x)).float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half()

    def lazy_features(self, pool: Pool) -> LazyFeaturePool:
        """The features of a pool of images, computed when they are taken."""
        return LazyFeaturePool(pool, self)

    def iter_features(
        self, pool: Pool, on_progress: ProgressCallback | None = None, batch_images: int = BATCH_IMAGES
    ) -> Iterator[Tensor]:
        """(n, D) features of all images, batch after batch, on the CPU."""
        features = self.lazy_features(pool)
        for rows in torch.arange(len(pool)).split(batch_images):
            yield features.take(rows)
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(pool))


class LazyFeaturePool(Pool):
    """Images seen as features, which are computed when they are taken and never all at once."""

    def __init__(self, images: Pool, frozen_backbone: FrozenBackbone) -> None:
        self.images, self.frozen_backbone = images, frozen_backbone
        self.data = torch.empty(0, frozen_backbone.dim, dtype=torch.float16)  # its shape and type
        self.on_disk = True

    @torch.no_grad()
    def take(self, addresses: Tensor) -> Tensor:
        device = self.frozen_backbone.normalize.mean.device
        parts = addresses.split(BATCH_IMAGES)
        features = [self.frozen_backbone(self.images.take(part).to(device)).cpu() for part in parts]
        return torch.cat(features) if features else self.data

    def to(self, device: torch.device | str) -> Pool:
        """Itself: features go to a device batch by batch."""
        return self

    def __len__(self) -> int:
        return len(self.images)


def extract_features(
    frozen_backbone: FrozenBackbone,
    bags: Bags,
    cache: Path | str | None = None,
    on_progress: ProgressCallback | None = None,
    batch_images: int = BATCH_IMAGES,
) -> Bags:
    """The same bags over their features (M, D) float16, memory-mapped from the cache, computed if they are not there.

    The file's name is a hash of the images and of the backbone with its weights.
    """
    folder = data_cache.cache_folder(cache) / "features"
    path = folder / f"{_cache_key(frozen_backbone, bags.pool)}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            with atomic_path(path) as part, open(part, "wb") as f:  # not mapped: so a full disk is an exception
                header = {"descr": "<f2", "fortran_order": False, "shape": (len(bags.pool), frozen_backbone.dim)}
                np.lib.format.write_array_header_2_0(f, header)
                for h in frozen_backbone.iter_features(bags.pool, on_progress, batch_images):
                    f.write(h.numpy().astype("<f2").tobytes())
    return replace(bags, pool=Pool.from_npy(path))


def _cache_key(frozen_backbone: FrozenBackbone, pool: Pool) -> str:
    weights = library.state_digest(frozen_backbone.state_dict())
    digest = hashlib.sha256(f"{frozen_backbone.name} {frozen_backbone.size} {weights} {len(pool)} {pool.shape}".encode())
    for rows in torch.arange(len(pool)).split(4096):
        digest.update(pool.take(rows).cpu().contiguous().numpy())
    return digest.hexdigest()[:40]

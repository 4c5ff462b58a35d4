"""Eye: a frozen backbone that turns pictures into features, part of how a model prepares its data.

    Eye        pictures (n, H, W, channels) uint8 -> (n, D) features, float16 in and out of the cache alike
    Seen       a pool of pictures seen through an eye: features that are made when they are taken, and never all at once
    featured   the same bags over features that were computed once and lie in a cache

With an eye, everything made for features is made for pictures too: forests, lines, networks, cross-validation in seconds. The
eye's weights are in the model's own file, so a saved model needs no download.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headcount.bags import Bags, Pool
from headcount.datasets import cache as data_cache
from headcount.io import atomic_path, file_lock
from headcount.models import library_backbones
from headcount.models.normalize import Normalize

BATCH_IMAGES = 64  # pictures in front of the network at once
_FLOAT16_MAX = 65504.0  # the largest float16
ProgressCallback = Callable[[int, int], None]  # (pictures seen, pictures in all)


class FrozenBackbone(nn.Module):
    """Prepare, then a frozen backbone. Born with random weights; ``of`` and a model's file give it others."""

    def __init__(self, name: str, shape: tuple[int, ...], size: int | None = None) -> None:
        super().__init__()
        self.name, self.shape, self.size = name, tuple(shape), size
        channels = shape[-1]
        self.normalize = Normalize(self.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = library_backbones.build_library_backbone(name, self.shape, {"size": size, "frozen": True})
        self.dim = self.backbone.dim

    @classmethod
    def from_pretrained(
        cls, pretrained: library_backbones.PretrainedBackbone, shape: tuple[int, ...]
    ) -> FrozenBackbone:
        """The eye of a choice. Its constants are those of its weights: nothing is learned from the pictures."""
        frozen_backbone = cls(pretrained.name, shape, pretrained.size)
        frozen_backbone.normalize = Normalize(frozen_backbone.shape, pretrained.mean, pretrained.std)
        pretrained.load_into(frozen_backbone.backbone)
        return frozen_backbone.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.normalize(x)).float().clamp(-_FLOAT16_MAX, _FLOAT16_MAX).half()

    def lazy_features(self, pool: Pool) -> LazyFeaturePool:
        """Features of a pool of pictures, made when they are taken."""
        return LazyFeaturePool(pool, self)

    def iter_features(self, pool: Pool, on_progress: ProgressCallback | None = None) -> Iterator[Tensor]:
        """(n, D) features of all pictures, part after part, on the CPU."""
        seen = self.lazy_features(pool)
        for rows in torch.arange(len(pool)).split(BATCH_IMAGES):
            yield seen.take(rows)
            if on_progress is not None:
                on_progress(int(rows[-1]) + 1, len(pool))


class LazyFeaturePool(Pool):
    """Pictures through an eye."""

    def __init__(self, images: Pool, frozen_backbone: FrozenBackbone) -> None:
        self.images, self.frozen_backbone = images, frozen_backbone
        self.data = torch.empty(
            0, frozen_backbone.dim, dtype=torch.float16
        )  # shape and kind; features are made when they are taken
        self.on_disk = True

    @torch.no_grad()
    def take(self, addresses: Tensor) -> Tensor:
        there = self.frozen_backbone.normalize.mean.device
        made = [self.frozen_backbone(self.images.take(part).to(there)).cpu() for part in addresses.split(BATCH_IMAGES)]
        return torch.cat(made) if made else self.data

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
) -> Bags:
    """The same bags over their features (M, D) float16, mapped from the cache; they are computed if they are not there.

    The file's name is a hash of the pictures and of the eye: another of either is another file.
    """
    folder = data_cache.cache_folder(cache) / "features"
    path = folder / f"{_cache_key(frozen_backbone, bags.pool)}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with file_lock(path.with_suffix(".lock")):
        if not path.exists():
            with atomic_path(path) as part, open(part, "wb") as f:  # not mapped: a full disk is an error, and no signal
                header = {"descr": "<f2", "fortran_order": False, "shape": (len(bags.pool), frozen_backbone.dim)}
                np.lib.format.write_array_header_2_0(f, header)
                for h in frozen_backbone.iter_features(bags.pool, on_progress):
                    f.write(h.numpy().astype("<f2").tobytes())
    return replace(bags, pool=Pool.from_npy(path))


def _cache_key(frozen_backbone: FrozenBackbone, pool: Pool) -> str:
    made = hashlib.sha256(
        f"{frozen_backbone.name} {frozen_backbone.size} {library_backbones.state_digest(frozen_backbone.state_dict())} {len(pool)} {pool.shape}".encode()
    )
    for rows in torch.arange(len(pool)).split(4096):
        made.update(pool.take(rows).cpu().contiguous().numpy())
    return made.hexdigest()[:40]

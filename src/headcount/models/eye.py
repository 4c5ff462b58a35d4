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
from headcount.data import cache as data_cache
from headcount.data.prepare import Prepare
from headcount.files import alone, beside
from headcount.models import vision

BATCH = 64  # pictures in front of the network at once
_FAR = 65504.0  # the largest float16
Watch = Callable[[int, int], None]  # (pictures seen, pictures in all)


class Eye(nn.Module):
    """Prepare, then a frozen backbone. Born with random weights; ``of`` and a model's file give it others."""

    def __init__(self, name: str, shape: tuple[int, ...], size: int | None = None) -> None:
        super().__init__()
        self.name, self.shape, self.size = name, tuple(shape), size
        channels = shape[-1]
        self.prepare = Prepare(self.shape, torch.zeros(channels), torch.ones(channels))
        self.backbone = vision.build(name, self.shape, {"size": size, "frozen": True})
        self.dim = self.backbone.dim

    @classmethod
    def of(cls, start: vision.Start, shape: tuple[int, ...]) -> Eye:
        """The eye of a choice. Its constants are those of its weights: nothing is learned from the pictures."""
        made = cls(start.name, shape, start.size)
        made.prepare = Prepare(made.shape, start.mean, start.std)
        start.into(made.backbone)
        return made.eval()

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.backbone(self.prepare(x)).float().clamp(-_FAR, _FAR).half()

    def over(self, pool: Pool) -> Seen:
        """Features of a pool of pictures, made when they are taken."""
        return Seen(pool, self)

    def look(self, pool: Pool, watch: Watch | None = None) -> Iterator[Tensor]:
        """(n, D) features of all pictures, part after part, on the CPU."""
        seen = self.over(pool)
        for rows in torch.arange(len(pool)).split(BATCH):
            yield seen.take(rows)
            if watch is not None:
                watch(int(rows[-1]) + 1, len(pool))


class Seen(Pool):
    """Pictures through an eye."""

    def __init__(self, pictures: Pool, eye: Eye) -> None:
        self.pictures, self.eye = pictures, eye
        self.data = torch.empty(
            0, eye.dim, dtype=torch.float16
        )  # shape and kind; features are made when they are taken
        self.far = True

    @torch.no_grad()
    def take(self, addresses: Tensor) -> Tensor:
        there = self.eye.prepare.mean.device
        made = [self.eye(self.pictures.take(part).to(there)).cpu() for part in addresses.split(BATCH)]
        return torch.cat(made) if made else self.data

    def to(self, device: torch.device | str) -> Pool:
        """Itself: features go to a device batch by batch."""
        return self

    def __len__(self) -> int:
        return len(self.pictures)


def featured(eye: Eye, bags: Bags, cache: Path | str | None = None, watch: Watch | None = None) -> Bags:
    """The same bags over their features (M, D) float16, mapped from the cache; they are computed if they are not there.

    The file's name is a hash of the pictures and of the eye: another of either is another file.
    """
    folder = data_cache.home(cache) / "features"
    path = folder / f"{_key(eye, bags.pool)}.npy"
    folder.mkdir(parents=True, exist_ok=True)
    with alone(path.with_suffix(".lock")):
        if not path.exists():
            with beside(path) as part, open(part, "wb") as f:  # not mapped: a full disk is an error, and no signal
                said = {"descr": "<f2", "fortran_order": False, "shape": (len(bags.pool), eye.dim)}
                np.lib.format.write_array_header_2_0(f, said)
                for h in eye.look(bags.pool, watch):
                    f.write(h.numpy().astype("<f2").tobytes())
    return replace(bags, pool=Pool.mapped(path))


def _key(eye: Eye, pool: Pool) -> str:
    made = hashlib.sha256(f"{eye.name} {eye.size} {vision.digest(eye.state_dict())} {len(pool)} {pool.shape}".encode())
    for rows in torch.arange(len(pool)).split(4096):
        made.update(pool.take(rows).cpu().contiguous().numpy())
    return made.hexdigest()[:40]

"""Randomness is handed over: a seed for each purpose, so that changing how one thing draws leaves the others alone."""

from __future__ import annotations

import hashlib

import torch


def seed_for(seed: int, *purpose: object) -> int:
    """A 63-bit seed made from the run's seed and what it is for.

    >>> seed_for(0, "order", 3) == seed_for(0, "order", 3) != seed_for(0, "order", 4)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: object) -> torch.Generator:
    """A generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))

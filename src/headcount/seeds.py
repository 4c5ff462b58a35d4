"""Randomness is handed over: a seed for each purpose, so that changing how one thing draws leaves the others alone."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from headcount.errors import HeadcountError


def seed_for(seed: int, *purpose: object) -> int:
    """A 63-bit seed made from the run's seed and what it is for.

    >>> seed_for(0, "order", 3) == seed_for(0, "order", 3) != seed_for(0, "order", 4)
    True
    """
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def make_generator(seed: int, *purpose: object) -> torch.Generator:
    """A generator on the CPU for one purpose."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_from_random_state(random_state: Any) -> int:
    """A seed as scikit-learn's users say it: a number, something that draws one, or None, which is 0 here."""
    given = 0 if random_state is None else random_state
    if isinstance(given, np.random.RandomState):
        return int(given.randint(1 << 31))
    if isinstance(given, np.random.Generator):
        return int(given.integers(1 << 31))
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or not 0 <= given < 1 << 63:
        raise HeadcountError(
            f"random_state is a whole number from 0, a RandomState, a Generator or None, got {given!r}"
        )
    return int(given)

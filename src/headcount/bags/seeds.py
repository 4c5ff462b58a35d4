"""Random seeds by purpose, so that a change in how one part draws leaves the draws of all others unchanged."""

import hashlib
from typing import Any

import numpy as np
import torch

from headcount.errors import HeadcountError


def seed_for(seed: int, *purpose: object) -> int:
    """A 63-bit seed for a purpose, derived from the run's seed."""
    text = "/".join(map(str, (seed, *purpose)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def make_generator(seed: int, *purpose: object) -> torch.Generator:
    """A generator on the CPU for a purpose."""
    return torch.Generator().manual_seed(seed_for(seed, *purpose))


def seed_from_random_state(random_state: Any) -> int:
    """The seed that scikit-learn's ``random_state`` stands for: a number, a generator that draws one, or None, here 0."""
    given = 0 if random_state is None else random_state
    if isinstance(given, np.random.RandomState):
        return int(given.randint(1 << 31))
    if isinstance(given, np.random.Generator):
        return int(given.integers(1 << 31))
    if isinstance(given, bool) or not isinstance(given, (int, np.integer)) or not 0 <= given < 1 << 63:
        raise HeadcountError(f"random_state is a whole number from 0, a RandomState, a Generator or None, got {given!r}")
    return int(given)

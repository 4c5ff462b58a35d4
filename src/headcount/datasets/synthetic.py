"""Stand-ins: small generated picture sets, for when a real one cannot be had and only the path matters.

Each class is a random 8x8 pattern; an instance is its class's pattern, shifted and under noise. They say nothing of a method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

N_INSTANCES = 1_500
SIDE = 8


def synthetic_images(classes: int) -> Callable[[Sequence[Path]], tuple[np.ndarray, np.ndarray]]:
    """A parser that needs no files: (COUNT, 8, 8, 1) pictures of so many classes, the same ones every time."""

    def parse(_: Sequence[Path] = ()) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng(classes)
        templates = rng.random((classes, SIDE, SIDE)) < 0.4
        labels = rng.permutation(np.arange(N_INSTANCES) % classes)
        shifted = [np.roll(templates[c], rng.integers(-1, 2, 2), (0, 1)) for c in labels]
        grey = 60 + 130 * np.stack(shifted) + rng.normal(0, 40, (N_INSTANCES, SIDE, SIDE))
        return np.clip(np.rint(grey), 0, 255).astype(np.uint8)[..., None], labels.astype(np.int64)

    return parse

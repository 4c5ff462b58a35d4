"""What a training leaves on disk: ``checkpoint.safetensors``, whole or absent, and ``metrics.jsonl``, a line per epoch.

A checkpoint holds tensors and a little JSON in one safetensors file, so that loading it runs no code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headcount.io import atomic_path

Losses = tuple[float, float]  # training, validation


@dataclass
class TrainProgress:
    """The state of a training after an epoch: what a progress bar shows."""

    epoch: int = 0  # finished epochs
    best_epoch: int = 0  # counted from 1; 0 before the first
    best: float = math.inf  # its validation loss
    curve: list[Losses] = field(default_factory=list)  # of each epoch
    seconds: float = 0.0


def save_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    with atomic_path(path) as part:
        contiguous = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}
        save_file(contiguous, part, metadata={"facts": json.dumps(metadata)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """Tensors and metadata; None if there is no file, or no readable one: then the training starts afresh."""
    try:
        with safe_open(path, "pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}, json.loads(f.metadata()["facts"])  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None


def append_losses(work_dir: Path, epoch: int, losses: Losses) -> None:
    work_dir.mkdir(parents=True, exist_ok=True)
    with open(work_dir / "metrics.jsonl", "a") as f:
        f.write(_line(epoch, *losses))


def rewrite_losses(work_dir: Path, curve: Sequence[Losses]) -> None:
    """Drop the epochs after the last checkpoint, which will be trained again."""
    work_dir.mkdir(parents=True, exist_ok=True)
    (work_dir / "metrics.jsonl").write_text("".join(_line(e, *losses) for e, losses in enumerate(curve, 1)))


def thin_curve(curve: Sequence[Losses], points: int) -> list[list[Any]]:
    """At most this many points (epoch, training loss, validation loss), the last among them; NaN is None, for JSON.

    >>> thin_curve([(2.0, 3.0), (1.0, 2.0), (0.5, math.nan)], 2)
    [[1, 2.0, 3.0], [3, 0.5, None]]
    """
    keep = sorted({round(i) for i in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
    return [[i + 1, *(round(v, 5) if math.isfinite(v) else None for v in curve[i])] for i in keep]


def _line(epoch: int, train: float, valid: float) -> str:
    return json.dumps({"epoch": epoch, "train_loss": train, "valid_loss": valid}) + "\n"

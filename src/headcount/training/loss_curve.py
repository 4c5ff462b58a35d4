"""The learning curve: metrics.jsonl, a line an epoch beside the checkpoint, for whoever wants to look on while a training
runs; and the few points of it that are kept when it has ended."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

Losses = tuple[float, float]  # train, validation


def append_losses(work: Path, epoch: int, losses: Losses) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "metrics.jsonl", "a") as f:
        f.write(_line(epoch, *losses))


def rewrite_losses(work: Path, curve: list[Losses]) -> None:
    """What was logged after the last checkpoint will be trained, and logged, again."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "metrics.jsonl").write_text("".join(_line(e, *losses) for e, losses in enumerate(curve, 1)))


def thin_curve(curve: Sequence[Losses], points: int) -> list[list[Any]]:
    """(epoch, training loss, validation loss), at most so many, the last among them; JSON has no NaN.

    >>> thin([(2.0, 3.0), (1.0, 2.0), (0.5, math.nan)], 2)
    [[1, 2.0, 3.0], [3, 0.5, None]]
    """
    keep = sorted({round(i) for i in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
    return [[i + 1, *(round(v, 5) if math.isfinite(v) else None for v in curve[i])] for i in keep]


def _line(epoch: int, train: float, valid: float) -> str:
    return json.dumps({"epoch": epoch, "train_loss": train, "valid_loss": valid}) + "\n"

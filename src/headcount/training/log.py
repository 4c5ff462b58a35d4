"""metrics.jsonl: a line an epoch beside the checkpoint, for whoever wants to look on while a training runs."""

from __future__ import annotations

import json
from pathlib import Path

Losses = tuple[float, float]  # train, validation


def append(work: Path, epoch: int, losses: Losses) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "metrics.jsonl", "a") as f:
        f.write(_line(epoch, *losses))


def rewrite(work: Path, curve: list[Losses]) -> None:
    """What was logged after the last checkpoint will be trained, and logged, again."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "metrics.jsonl").write_text("".join(_line(e, *losses) for e, losses in enumerate(curve, 1)))


def _line(epoch: int, train: float, valid: float) -> str:
    return json.dumps({"epoch": epoch, "train_loss": train, "valid_loss": valid}) + "\n"

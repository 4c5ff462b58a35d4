"""Checkpoints: tensors and a little JSON in one file, so that loading it runs no code; and the losses of each epoch as lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headcount.io import atomic_path

CHECKPOINT = "checkpoint.safetensors"
Losses = tuple[float, float]  # training, validation


def save_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    with atomic_path(path) as part:
        contiguous = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}
        save_file(contiguous, part, metadata={"facts": json.dumps(metadata)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; empty if there is no file, or no readable one: then the training starts from the beginning."""
    try:
        with safe_open(path, "pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}, json.loads(f.metadata()["facts"])  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return {}, {}


def write_losses(work_dir: Path, curve: Sequence[Losses], written: int = 0) -> None:
    """``metrics.jsonl``, a line per epoch: a new file, or the epochs after those that are ``written``."""
    work_dir.mkdir(parents=True, exist_ok=True)
    with open(work_dir / "metrics.jsonl", "a" if written else "w") as f:
        for epoch, (train, valid) in enumerate(curve[written:], written + 1):
            f.write(json.dumps({"epoch": epoch, "train_loss": train, "valid_loss": valid}) + "\n")


def flatten(groups: dict[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    return {f"{prefix}.{k}": v for prefix, tensors in groups.items() for k, v in tensors.items()}


def with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

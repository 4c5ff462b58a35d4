"""Checkpoints: tensors and a little JSON in one file, so that loading it runs no code; and the losses of each epoch as lines."""

import hashlib
import json
import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from headcount.errors import HeadcountError, HeadcountWarning
from headcount.io import atomic_path
from headcount.loading import check_schema, explain_read_errors, parse_json, read_safetensors
from headcount.models.library_backbones import state_digest

CHECKPOINT = "checkpoint.safetensors"
Losses = tuple[float, float]  # training, validation


def save_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    contiguous, facts = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}, json.dumps(metadata)
    with atomic_path(path) as part:
        save_file(contiguous, part, metadata={"facts": facts, "sha256": _digest(contiguous, facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; empty if there is no file, or a damaged one: then the training starts from the beginning."""
    if not os.path.lexists(path):
        return {}, {}
    try:
        tensors, metadata = read_safetensors(path, "an undamaged one")
        with explain_read_errors(path, "an undamaged one"):
            check_schema(metadata, dict[str, str])
            if metadata["sha256"] != _digest(tensors, metadata["facts"]):
                raise HeadcountError("its content was changed")
            return tensors, parse_json(metadata["facts"].encode(), finite=False)
    except HeadcountError as e:
        warnings.warn(f"the training starts from the beginning: {e}", HeadcountWarning, stacklevel=2)
        return {}, {}


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    return hashlib.sha256((facts + state_digest(tensors)).encode()).hexdigest()


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

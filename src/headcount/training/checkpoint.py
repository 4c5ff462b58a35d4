"""A checkpoint: tensors and a few facts in one safetensors file, so that it is whole or absent, and loading runs no code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from headcount.io import atomic_path


def save(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    with atomic_path(path) as part:
        contiguous = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}
        save_file(contiguous, part, metadata={"facts": json.dumps(metadata)})


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """What was saved, or None if there is nothing (or nothing readable: then training simply starts again)."""
    try:
        with safe_open(path, "pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}, json.loads(f.metadata()["facts"])  # noqa: SIM118
    except (FileNotFoundError, SafetensorError, KeyError, TypeError, json.JSONDecodeError):
        return None

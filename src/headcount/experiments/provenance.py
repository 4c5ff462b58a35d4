"""Where a record comes from: the commit, the versions, the machine, the time."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from headcount import __version__
from headcount.training import distributed
from headcount.training.accel import device as speed


def provenance(device: torch.device, started: datetime, seconds: float, compiled: bool) -> dict[str, Any]:
    return {
        "commit": _commit(),
        "versions": {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": speed.device_name(device),
        "compiled": compiled,
        **({"processes": distributed.world_size()} if distributed.world_size() > 1 else {}),
        "host": platform.node(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
    }


@lru_cache(maxsize=1)
def _commit() -> str | None:
    """The commit of the checkout this code runs from; a copy without its history is told by HEADCOUNT_COMMIT."""
    if told := os.environ.get("HEADCOUNT_COMMIT"):
        return told
    here = Path(__file__).resolve().parent
    git = ["git", "-C", str(here)]
    try:
        top = subprocess.run([*git, "ls-files", "--error-unmatch", __file__], capture_output=True, timeout=10)
        if top.returncode:
            return None
        return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None

"""Everything that only makes it fast, and decides no meaning: device, precision, threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headcount.errors import HeadcountError


def device_for(name: str = "auto") -> torch.device:
    """``auto`` is the first GPU if there is one, else the CPU."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise HeadcountError(f"no device {name!r}; give auto, cpu, cuda or cuda:1") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HeadcountError(f"device {name} was asked for, but torch sees no GPU here; give --device cpu")
    return device


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


@contextmanager
def precise(precision: str, device: torch.device) -> Iterator[None]:
    """``tf32``: float32 with TF32 convolutions where the card has them, the reference. ``fp32``: none of that.
    ``bf16``: bfloat16 where autocast thinks it safe; votes are still counted in float32."""
    if device.type == "cuda":
        torch.backends.cudnn.conv.fp32_precision = "ieee" if precision == "fp32" else "tf32"
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield


def threads(processes: int = 1) -> int:
    """Cores for each of several processes: more threads than cores is slower than fewer (two by two: half the speed)."""
    return max(1, len(os.sched_getaffinity(0)) // processes)

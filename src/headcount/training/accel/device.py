"""Devices, precision, and threads."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from headcount.errors import HeadcountError
from headcount.training.distributed import local_rank


def resolve_device(name: str = "auto") -> torch.device:
    """``auto`` is the first GPU if there is one (each process of torchrun has its own), else the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise HeadcountError(f"no device {name!r}; give auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise HeadcountError(f"device {name} is not supported; give auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HeadcountError(f"device {name} was given, but torch sees no GPU here; give cpu, or auto")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank() if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise HeadcountError(f"device {name} was given, there are {torch.cuda.device_count()} GPUs, from cuda:0")
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """``tf32``: float32 with TF32 convolutions where the GPU has them, the reference. ``fp32``: float32 throughout.
    ``bf16``: bfloat16 where autocast considers it safe; votes are still counted in float32."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield


def set_tf32(precision: str, device: torch.device) -> None:
    """Allow TF32 in convolutions, or not. A setting of the process, made once per training."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int = 1) -> int:
    """Threads for each of several processes: more threads than cores are slower than fewer (two processes: half the speed)."""
    return max(1, n_cores() // processes)

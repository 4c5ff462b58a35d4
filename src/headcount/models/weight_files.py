"""A safetensors file that may be anybody's: its beginning is looked at before it is parsed, its numbers before use."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from headcount.errors import HeadcountError

MAX_HEADER = 1 << 20


def check_header(path: Path) -> None:
    """Refuse what does not begin like such a file, or begins with a list larger than any of ours."""
    if not path.is_file():  # a pipe would be waited for, a device read without end
        raise HeadcountError(f"{path.name} is not a file")
    size = path.stat().st_size
    with open(path, "rb") as f:
        header = int.from_bytes(f.read(8), "little")
        if size < 10 or header > min(MAX_HEADER, size - 8) or f.read(1) != b"{":
            raise HeadcountError(f"{path.name} does not begin like a safetensors file")


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of weights, every number finite. Nothing in it is run, and nothing is pickle."""
    try:
        check_header(path)
        tensors = load_file(path)
    except OSError as e:
        raise HeadcountError(f"cannot read the weights {path}: {e.strerror}") from None
    except HeadcountError as e:
        raise HeadcountError(f"cannot read the weights {path}: {e}; give a .safetensors file") from None
    except (SafetensorError, KeyError, ValueError, RuntimeError) as e:
        raise HeadcountError(
            f"cannot read the weights {path}: {type(e).__name__}: {' '.join(str(e).split())[:200]}"
        ) from None
    for name, x in tensors.items():
        if x.is_complex() or (x.is_floating_point() and not bool(torch.isfinite(x).all())):
            raise HeadcountError(f"the weights {path} hold numbers that are not finite, in {name[:80]!r}")
    return tensors

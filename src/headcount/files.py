"""Writing files whole: beside, then renamed into place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A name next to ``path`` to write to; renamed over it at the end, removed if anything goes wrong.

    The name is always the same, so what a killed process left is overwritten by the next try and not left lying about.
    """
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, fill: Callable[[IO[bytes]], Any]) -> None:
    """Write, flush to the disk, rename: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as part, open(part, "wb") as f:
        fill(f)
        f.flush()
        os.fsync(f.fileno())

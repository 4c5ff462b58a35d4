"""Writing files whole: beside, then renamed into place; and one process at a time where two would write the same."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from headcount.errors import HeadcountError


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """A name next to ``path`` to write to; renamed over it at the end, removed if anything goes wrong.

    The name is always the same, so what a killed process left is overwritten by the next try and not left lying about.
    """
    if path.exists() and not path.is_file():  # renaming would put a file in the place of a device
        raise HeadcountError(f"{path} is a folder or a device, not a file to write over; choose another path")
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException as e:
        with suppress(OSError):  # where nothing can be removed either, the first complaint is the one to hear
            part.unlink(missing_ok=True)
        if isinstance(e, OSError) and (not e.filename or str(e.filename) == str(part)):  # the user typed the other name
            e.filename = str(path)
        elif os_error := re.search(r"\(os error (\d+)\)", str(e)):  # safetensors has words of its own for a full disk
            raise OSError(int(os_error[1]), os.strerror(int(os_error[1])), str(path)) from e
        raise


def atomic_write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write, flush to the disk, rename: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, open(part, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def file_lock(lock: Path, wait: bool = True) -> Iterator[bool]:
    """One process at a time. The lock goes with its process, however that ends; its file goes when the work is done. Who does
    not ``wait`` is told whether it is the one."""
    import fcntl

    acquired = True
    with ExitStack() as stack:
        while True:
            if not lock.parent.is_dir():
                with suppress(FileExistsError):  # made and taken away by others in the same moment: ask again
                    lock.parent.mkdir(parents=True, exist_ok=True)
                if lock.parent.is_file():  # one look: of two, the folder may go between them
                    raise FileExistsError(f"{lock.parent} is a file, and a folder is needed there")
            with suppress(FileNotFoundError):  # whoever was here before us took the file away: ask again
                f = stack.enter_context(open(lock, "w"))
                try:
                    fcntl.flock(f, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    acquired = False
                    break
                if os.path.samestat(os.fstat(f.fileno()), lock.stat()):
                    break
        try:
            yield acquired
        finally:
            if acquired:
                lock.unlink(missing_ok=True)
                with suppress(OSError):  # others are still at work there
                    lock.parent.rmdir()

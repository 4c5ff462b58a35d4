"""Files and folders that are written whole or not at all, and locks between processes."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from headcount.errors import HeadcountError

if TYPE_CHECKING:
    import numpy as np
    from numpy.lib.npyio import NpzFile


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``path``; rename it to ``path`` at the end, or remove it after an error. The temporary
    name is always the same, so that the next attempt overwrites what a killed process left behind."""
    if path.exists() and not path.is_file():  # renaming would replace a device by a file
        raise HeadcountError(f"{path} is a folder or a device, not a file to write over; choose another path")
    part = path.with_name(path.name + ".part")
    try:
        yield part
        os.replace(part, path)
    except BaseException as e:
        with suppress(OSError):  # if removing fails too, the first error is the one to report
            part.unlink(missing_ok=True)
        if isinstance(e, OSError) and (not e.filename or str(e.filename) == str(part)):  # name the file the user named
            e.filename = str(path)
        elif os_error := re.search(r"\(os error (\d+)\)", str(e)):  # how safetensors reports a full disk
            raise OSError(int(os_error[1]), os.strerror(int(os_error[1])), str(path)) from e
        raise


def atomic_write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the new one, never part of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part, open(part, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``; rename it to ``path`` at the end, or remove it after an error. Only an empty
    folder is replaced, or any with ``replace``: the old one is moved aside first, and back if renaming fails."""
    if not replace and path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise HeadcountError(f"{path} is there already; choose another place, or empty the folder first")
    part, old = (path.with_name(path.name + ending) for ending in (".part", ".old"))
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        try:
            os.replace(part, path)
        except BaseException:
            if old.exists():
                os.replace(old, path)
            raise
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


@contextmanager
def explain_read_errors(path: Path, expected: str) -> Iterator[None]:
    """Turn an error of reading the file into one line: its path, and what was ``expected``."""
    try:
        yield
    except HeadcountError:
        raise
    except Exception as e:  # of zip, zlib, and numpy's header parser
        raise HeadcountError(f"cannot read {path}: {e or type(e).__name__}; give {expected}") from None


def file_mode(path: Path) -> int:
    """The mode of a file or folder, 0 where there is none. Links in a circle and a failing disk are errors, unlike in is_file."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character in the name
        return 0


def check_declared_size(path: Path, declared: float, stored: int | None = None) -> None:
    """Refuse a file that declares more bytes than $HEADCOUNT_MAX_GB (default 64), before they are read.

    Without that setting more than 128 MiB may also not be over 200 times what is ``stored`` (default: the size of the file).
    """
    setting = os.environ.get("HEADCOUNT_MAX_GB", "")
    if setting and not re.fullmatch(r"\d+(\.\d+)?", setting):
        raise HeadcountError(f"HEADCOUNT_MAX_GB is a number of gigabytes, got {setting!r}")
    stored = path.stat().st_size if stored is None else stored
    if declared > (float(setting) * 1e9 if setting else min(64e9, max(1 << 27, 200 * stored))):
        advice = "if that is right and fits into memory, set HEADCOUNT_MAX_GB to more"
        raise HeadcountError(f"{path} declares {declared / 1e9:,.2f} GB in {stored:,} bytes; {advice}")


@contextmanager
def open_npz(path: Path, expected: str) -> Iterator[NpzFile]:
    """The arrays of an .npz file, read without pickle."""
    import numpy as np

    with explain_read_errors(path, expected), path.open("rb") as f:  # np.load would leave a damaged zip file open
        if not f.peek(6).startswith((b"PK", b"\x93NUMPY")):  # numpy would report it as a pickle
            raise HeadcountError(f"{path} is no .npz file; give {expected}")
        arrays = np.load(f, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise HeadcountError(f"{path} is a single array; give {expected}")
        with arrays:
            check_declared_size(path, sum(member.file_size for member in arrays.zip.infolist()))
            yield arrays


def load_npy(path: Path, *, mapped: bool = False) -> np.ndarray:
    """The array in an .npy file, read without pickle, in memory or memory-mapped."""
    import numpy as np

    expected = "an .npy file written by numpy.save"
    with explain_read_errors(path, expected):
        with path.open("rb") as f:
            if not f.read(6).startswith(b"\x93NUMPY"):
                raise HeadcountError(f"{path} is no .npy file; give {expected}")
        return np.load(path, mmap_mode="r" if mapped else None, allow_pickle=False)


@contextmanager
def file_lock(path: Path, *, wait: bool = True, required: bool = True) -> Iterator[bool]:
    """Hold a lock between processes; yields whether it was acquired, which without ``wait`` may be False. The lock ends with
    its process, however that ends. Its file is removed afterwards, and so is the folder if it is empty. With ``required=False``
    a system or disk that has no locks is no error: the work is then done without one."""
    with ExitStack() as stack:
        while True:
            if not path.parent.is_dir():
                with suppress(FileExistsError):  # created and removed by others at the same moment: try again
                    path.parent.mkdir(parents=True, exist_ok=True)
                if path.parent.is_file():  # checked once: between two checks the folder may be removed
                    raise FileExistsError(f"{path.parent} is a file, and a folder is needed there")
            with suppress(FileNotFoundError):  # the previous holder removed the file: try again
                f = stack.enter_context(open(path, "w"))
                acquired = _lock(f, wait, required)
                if not acquired or os.path.samestat(os.fstat(f.fileno()), path.stat()):
                    break
        try:
            yield acquired
        finally:
            if acquired:
                path.unlink(missing_ok=True)
                with suppress(OSError):  # others still use the folder
                    path.parent.rmdir()


def _lock(f: IO[str], wait: bool, required: bool) -> bool:
    try:
        import fcntl

        fcntl.flock(f, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, and some network disks
        if required:
            raise
    return True

"""Files and folders that are written whole or not at all, several of them together; and locks between processes."""

import errno
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO, Any

from headcount.errors import FileError, HeadcountError, HeadcountWarning

Outputs = list[tuple[Path, Path]]  # the temporary name and the final one
_UNFINISHED = ".unfinished"  # lists a command's folders, in the first of them, until all of its outputs are in place

_uncommitted: ContextVar[tuple[Outputs, ExitStack] | None] = ContextVar("_uncommitted", default=None)  # of commit_together


@contextmanager
def commit_together() -> Iterator[None]:
    """What is written inside takes its place when the block ends without an error, all of it or nothing. It does so in the order in
    which it was written, so write last what tells a reader that the rest is there."""
    outputs: Outputs = []
    with ExitStack() as locks:
        token = _uncommitted.set((outputs, locks))
        try:
            yield
            _put_in_place(outputs)
        except BaseException:
            for part, _ in outputs:
                _remove(part)
            raise
        finally:
            _uncommitted.reset(token)


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary name next to ``path``; rename it to ``path`` at the end, or remove it after an error."""
    if path.exists() and not path.is_file():  # renaming would replace a device by a file
        raise HeadcountError(f"{path} is a folder or a device, not a file to write over; choose another path")
    with _temporary(path, folder=False) as part:
        yield part


def atomic_write(path: Path, write: Callable[[IO[bytes]], Any]) -> None:
    """Write, flush to disk, rename: a reader sees the old file or the new one, never part of one."""
    with atomic_path(path) as part, open(part, "wb") as f:
        write(f)
        f.flush()
        os.fsync(f.fileno())


@contextmanager
def atomic_folder(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary folder next to ``path``; rename it to ``path`` at the end, or remove it after an error. Only a free path
    is taken, or any with ``replace``: the old folder is moved aside first, and back if renaming fails."""
    outputs, _ = _uncommitted.get() or ([], None)
    if not replace and not is_free(path, [other for _, other in outputs]):
        raise HeadcountError(f"{path} is there already; choose another place, or empty the folder first")
    with _temporary(path, folder=True) as part:
        token = _uncommitted.set(None)  # files in the folder appear with it
        try:
            yield part
        finally:
            _uncommitted.reset(token)


def is_free(path: Path, outputs: Iterable[Path] = ()) -> bool:
    """Whether a folder may be written there: there is none, an empty one, or one of a command that was killed before all of its
    outputs were in place, as the first of its folders says, which is this one or among ``outputs``."""
    if not path.is_dir() or not any(path.iterdir()):
        return path.is_dir() or not path.exists()
    marks = [folder / _UNFINISHED for folder in (path, *outputs)]
    lists = [mark.read_bytes() for mark in marks if mark.is_file() and mark.stat().st_size < 1 << 16]
    return any(os.fsencode(path.absolute()) in names.split(b"\0") for names in lists)


@contextmanager
def _temporary(path: Path, *, folder: bool) -> Iterator[Path]:
    """A temporary name, always the same, so that the next attempt replaces what a killed process left there; a process that is
    writing there now is awaited."""
    if (together := _uncommitted.get()) is None:
        with commit_together(), _temporary(path, folder=folder) as part:
            yield part
        return
    part, (outputs, locks) = path.with_name(path.name + ".part"), together
    with _file_errors(part, path):
        _claim(part, folder, locks)
        try:
            yield part
        except BaseException:
            _remove(part)
            raise
    outputs.append((part, path))


@contextmanager
def _file_errors(part: Path, path: Path) -> Iterator[None]:
    """Make an error of the operating system a FileError that names ``path``, which the user named, instead of ``part``."""
    try:
        yield
    except HeadcountError:
        raise
    except Exception as e:
        error = e if isinstance(e, OSError) else None
        if number := re.search(r"\(os error (\d+)\)", str(e)):  # how safetensors reports a full disk
            error = OSError(int(number[1]), os.strerror(int(number[1])))
        if error is None:
            raise
        name = str(error.filename or part).replace(str(part), str(path), 1)
        raise FileError(error.errno, error.strerror or str(error), name) from e


def _claim(part: Path, folder: bool, locks: ExitStack) -> None:
    """Create the temporary file or folder, empty, and hold a lock on it until ``locks`` are released."""
    part.parent.mkdir(parents=True, exist_ok=True)
    while True:
        left = os.path.lexists(part)
        if part.is_symlink() or not (part.is_dir() if folder else part.is_file()):
            _remove(part)
        if folder:
            part.mkdir(exist_ok=True)
        flags = os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT | os.O_NONBLOCK
        if _lock(part, flags, locks, wait=True, required=False):  # else it was put in place while this process waited
            break
    if left and (not folder or any(part.iterdir())):
        warnings.warn(f"{part}, left by a command that was interrupted, is removed", HeadcountWarning, stacklevel=5)
    for old in part.iterdir() if folder else ():
        _remove(old)


def _put_in_place(outputs: Outputs) -> None:
    """Rename each to its final name, in this order. After an error everything is as it was."""
    folders, renamed, mark = [output for output in outputs if output[0].is_dir()], Outputs(), None
    try:
        if folders and folders[0] != outputs[-1]:  # a folder in place is never replaced, unless it is marked
            part, path = folders[0]
            mark = path / _UNFINISHED
            with _file_errors(part, path):
                (part / _UNFINISHED).write_bytes(b"\0".join(os.fsencode(path.absolute()) for _, path in folders))
        for part, path in outputs:
            if len(outputs) > 1 or part.is_dir():  # else replacing it is one step
                if path.exists():
                    _remove(_earlier(path))
                renamed.append((part, path))
                if path.is_dir():
                    os.replace(path, _earlier(path))
                elif path.exists():
                    with suppress(OSError):  # a disk without links
                        os.link(path, _earlier(path))
            with _file_errors(part, path):
                os.replace(part, path)
        if mark is not None:
            mark.unlink()
    except BaseException as e:
        for part, path in reversed(renamed):  # by what is there: Ctrl-C may come just after a rename
            source = path
            try:
                if not _is_there(part):
                    os.replace(path, part)
                if _is_there(source := _earlier(path)):
                    os.replace(source, path)
            except OSError:  # the disk refuses that, too
                e.add_note(f"{source} could not be put back")
        raise
    finally:
        with suppress(OSError):
            for _, path in renamed:
                if path.exists():
                    _remove(_earlier(path))


def _earlier(path: Path) -> Path:
    """Where the earlier output is while a new one takes its place."""
    return path.with_name(path.name + ".part.old")


def _is_there(path: Path) -> bool:
    """As os.path.lexists, but a failing disk is an error."""
    try:
        return bool(path.lstat())
    except FileNotFoundError:
        return False


def _remove(path: Path) -> None:
    """Remove a file or a folder, if it is there and can be removed."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def file_lock(path: Path, *, wait: bool = True, required: bool = True) -> Iterator[bool]:
    """Hold a lock between processes; yields whether it was acquired, which without ``wait`` may be False. The lock ends with
    its process, however that ends. Its file is removed afterwards, and so is the folder if it is empty. With ``required=False``
    a system or disk that has no locks is no error: the work is then done without one."""
    acquired = False
    with ExitStack() as stack:
        try:
            with _file_errors(path, path):
                acquired = _open_lock(path, stack, wait, required)
            yield acquired
        finally:
            with suppress(OSError):  # others still use the folder, or the disk fails by now
                if acquired:
                    path.unlink(missing_ok=True)
                path.parent.rmdir()


def _open_lock(path: Path, stack: ExitStack, wait: bool, required: bool) -> bool:
    while True:
        if not path.parent.is_dir():
            with suppress(FileExistsError):  # created and removed by others at the same moment: try again
                path.parent.mkdir(parents=True, exist_ok=True)
            if path.parent.is_file():  # checked once: between two checks the folder may be removed
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path.parent))
        with suppress(FileNotFoundError):  # the folder was removed meanwhile
            acquired = _lock(path, os.O_RDWR | os.O_CREAT, stack, wait, required)
            if acquired is not None:
                return acquired


def _lock(path: Path, flags: int, stack: ExitStack, wait: bool, required: bool) -> bool | None:
    """Open and lock until ``stack`` closes: whether the lock was free, None if its file is another by now: try again."""
    file = os.open(path, flags, 0o666)
    stack.callback(os.close, file)
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows, and some network disks
        if required:
            raise
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat()) or None

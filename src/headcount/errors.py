"""Errors that the user can correct, in one line: what was wrong, what was given, and what to do."""

import difflib
import errno
import warnings
from collections.abc import Iterable
from typing import Any, Self

_usual_format = warnings.formatwarning
MAX_SEED = (1 << 63) - 1
_FULL = "free some space and run the same command again, nothing half-written is left"
_IN_THE_WAY = "there is a file where a folder is needed; choose another path"
_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _FULL),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose another folder or change its permissions"),
    **dict.fromkeys((errno.ENOTDIR, errno.EEXIST, errno.EISDIR), _IN_THE_WAY),
    **dict.fromkeys((errno.ENOLCK, errno.ENOTSUP), "the file system has no locks; choose a folder on another disk"),
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "too many files are open; raise the limit (ulimit -n)"),
    errno.EROFS: "choose a folder that can be written to",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
    errno.ELOOP: "links lead in a circle; correct them",
}


class HeadcountError(ValueError):
    """A mistake in the input. The command line prints it as one line and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class FileError(HeadcountError, OSError):
    """What the operating system refused: the path, and what to do. Also an ``OSError``, with ``errno`` and ``filename``."""

    def __init__(self, number: int | None, reason: str, path: object = None) -> None:
        OSError.__init__(self, number, reason, None if path is None else str(path))

    @classmethod
    def from_os_error(cls, error: OSError, path: object = None) -> Self:
        """The same error; ``path`` where it names none."""
        return cls(error.errno, error.strerror or str(error) or type(error).__name__, error.filename or path)

    def __str__(self) -> str:
        advice = _ADVICE.get(self.errno or 0, "the disk or the network folder fails; check it, then repeat the command")
        return " ".join(f"{self.strerror}: {self.filename or 'while writing'}; {advice}".split())


class HeadcountWarning(UserWarning):
    """Something the user should know, after which the work continues. The command line prints it as one line."""


class DamagedFileWarning(HeadcountWarning):
    """A record that cannot be read is left out. ``--strict``, or ``warnings.simplefilter("error", ...)``, makes it an error."""


def format_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of ours as one line; any other as Python formats it. What ``warnings.formatwarning`` is set to."""
    if issubclass(category, HeadcountWarning):
        return f"headcount: {' '.join(str(message).split())}\n"
    return _usual_format(message, category, filename, lineno, line)


def check_choice(kind: str, given: object, choices: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``choices``; otherwise raise an error that lists them."""
    allowed = list(choices)
    if given in allowed:
        return str(given)
    similar = difflib.get_close_matches(str(given), allowed, n=1)
    hint = f" (did you mean {similar[0]!r}?)" if similar else ""
    raise HeadcountError(f"no {kind} {given!r}; there are {', '.join(allowed)}{hint}")


def to_python_scalar(given: Any) -> Any:
    """Convert a scalar of numpy or torch to Python's type; return anything else unchanged."""
    return given.item() if getattr(given, "ndim", None) == 0 and hasattr(given, "item") else given


def check_number(name: str, given: Any, low: float, high: float, *, integer: bool) -> Any:
    """Return ``given`` as a Python number if it is one in the range."""
    value = to_python_scalar(given)
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not low <= value <= high:
        raise HeadcountError(f"{name} is a {'whole ' * integer}number from {low} to {high}, got {given!r}")
    return value if integer else float(value)


def check_bool(name: str, given: Any) -> bool:
    """Return ``given`` if it is a bool, not merely truthy."""
    value = to_python_scalar(given)
    if not isinstance(value, bool):
        raise HeadcountError(f"{name} is true or false, got {given!r}")
    return value

"""What the command line prints about the user's data, and errors: one line that says what to do, exit code 2."""

from __future__ import annotations

import errno
import os
import re
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import typer

from headcount.errors import HeadcountError, HeadcountWarning

if TYPE_CHECKING:
    from headcount.readers import BagDataset

DISK_ADVICE = {
    errno.ENOSPC: "free some space and run the same command again, nothing half-written is left",
    errno.EDQUOT: "free some space and run the same command again, nothing half-written is left",
    errno.EACCES: "choose another folder or change its permissions",
    errno.EPERM: "choose another folder or change its permissions",
    errno.EROFS: "choose a folder that can be written to",
    errno.ENOTDIR: "there is a file where a folder is needed; choose another path",
    errno.EEXIST: "there is a file where a folder is needed; choose another path",
    errno.EISDIR: "there is a folder where a file is needed; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
}
STATELESS = ("predict", "evaluate", "explain", "issues", "audit", "check", "export")
MAX_SKIPPED = 20  # lines printed about skipped rows, of which there may be millions

_PARAMETER = re.compile(
    r"(?<![\w'\".-])(bag|label|labels|votes|path|text|weight|group|truth|known|features|categories|classes|ties|uncounted"
    r"|skip_bad|side|tile|cache|overwrite)=(\w+)?(?![\w'\"(])"
)
_usual_format = warnings.formatwarning
_UsageError: Any = typer.BadParameter.__mro__[1]  # its module differs between versions of typer


def format_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of ours as one line; any other as Python formats it."""
    if issubclass(category, HeadcountWarning):
        return f"headcount: {' '.join(str(message).split())}\n"
    return _usual_format(message, category, filename, lineno, line)


def with_option_names(message: str) -> str:
    """Replace names of Python parameters by options of the command line.

    >>> with_option_names("name it with bag=, or give a side, such as side=64")
    'name it with --bag, or give a side, such as --side 64'
    >>> with_option_names("choose another path, or give overwrite=True")
    'choose another path, or give --overwrite'
    """
    return _PARAMETER.sub(
        lambda m: f"--{m[1].replace('_', '-')}" + (f" {m[2]}" if m[2] not in (None, "True") else ""), message
    )


def log_dataset(dataset: BagDataset, log: Callable[[str], None]) -> None:
    """Log how the data were understood, and what was skipped, with the options' names."""
    for line in dataset.description:
        log(with_option_names(line))
    for line in dataset.skipped[:MAX_SKIPPED]:
        log(f"skipped: {with_option_names(line)}")
    if (more := len(dataset.skipped) - MAX_SKIPPED) > 0:
        log(f"skipped: {more:,} more")


def print_error(message: str, code: int = 2) -> int:
    print(f"headcount: {' '.join(message.split())}", file=sys.stderr)
    return code


def run_app(app: Callable[..., Any]) -> None:
    """Run the command in ``sys.argv`` and exit. A user's mistake is one line and exit code 2, never a traceback."""
    cast(Any, warnings).formatwarning = format_warning
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # a full disk must be noticed here, not during the interpreter's shutdown
        if code == 130:  # typer's translation of a KeyboardInterrupt
            raise KeyboardInterrupt
    except _UsageError as e:
        code = _show_help(e) if type(e).__name__ == "NoArgsIsHelpError" else print_error(e.format_message())
    except HeadcountError as e:
        code = print_error(with_option_names(str(e)))
    except (KeyboardInterrupt, ImportError) as e:
        if isinstance(e, ImportError) and not isinstance(e.__context__, KeyboardInterrupt):
            raise  # otherwise it was Ctrl-C while a library was being imported
        stateless = sys.argv[1:2] and sys.argv[1] in STATELESS
        code = print_error("interrupted" if stateless else "interrupted; the same command resumes the work", 130)
        # After Ctrl-C inside an eval of text (as libraries use it) CPython would end by a signal; another eval resets that
        eval("0")
    except (typer.Abort, EOFError):
        code = print_error("aborted", 130)
    except BrokenPipeError:
        code = 141
    except OSError as e:
        if e.errno not in DISK_ADVICE:
            raise
        code = print_error(f"{e.strerror}: {e.filename or 'while writing'}; {DISK_ADVICE[e.errno]}")
    _flush_stdout()
    sys.exit(code if isinstance(code, int) else 0)


def _show_help(error: Any) -> int:
    print(error.format_message())
    return 0


def _flush_stdout() -> None:
    """Discard what can no longer be written (broken pipe, full disk), so that the interpreter does not report it a second time."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

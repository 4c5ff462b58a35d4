"""What the command line says of somebody's data, and when something is wrong: one line, and what to do."""

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
    errno.ENOTDIR: "a file stands where a folder is wanted; choose another path",
    errno.EEXIST: "a file stands where a folder is wanted; choose another path",
    errno.EISDIR: "a folder stands where a file is wanted; choose another path",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ENOENT: "check the path",
}


_usual = warnings.formatwarning


def format_warning(message: Any, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    if issubclass(category, HeadcountWarning):
        return f"headcount: {' '.join(str(message).split())}\n"
    return _usual(message, category, filename, lineno, line)


def with_option_names(message: str) -> str:
    """What Python calls ``tile=`` is ``--tile`` here.

    >>> as_typed("name it with bag=, or give a side, such as side=64")
    'name it with --bag, or give a side, such as --side 64'
    >>> as_typed("choose another place, or give overwrite=True")
    'choose another place, or give --overwrite'
    """
    return _PYTHON_NAME.sub(
        lambda m: f"--{m[1].replace('_', '-')}" + (f" {m[2]}" if m[2] not in (None, "True") else ""), message
    )


_PYTHON_NAME = re.compile(
    r"(?<![\w'\".-])(bag|label|labels|votes|path|text|weight|group|truth|known|features|categories|classes|ties|uncounted"
    r"|skip_bad|side|tile|cache|overwrite)=(\w+)?(?![\w'\"(])"
)


def log_dataset(reading: BagDataset, log: Callable[[str], None]) -> None:
    """What was understood of somebody's data, and what was left out, as it would be typed."""
    for line in reading.description:
        log(with_option_names(line))
    for line in reading.skipped[:_MOST]:
        log(f"left out: {with_option_names(line)}")
    if (more := len(reading.skipped) - _MOST) > 0:
        log(f"left out: {more:,} more")


_MOST = 20  # lines; there may be a million


def print_error(message: str, code: int = 2) -> int:
    print(f"headcount: {' '.join(message.split())}", file=sys.stderr)
    return code


def show_help(asked: Any) -> int:
    print(asked.format_message())
    return 0


def discard_stdout() -> None:
    """Drop what cannot be written any more (a broken pipe, a full disk), or the interpreter complains once again."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_UsageError: Any = typer.BadParameter.__mro__[1]  # wherever this version of typer keeps it


def run_app(app: Callable[..., Any]) -> None:
    """Run the command that was typed. What was wrong, in one line, exit code 2; never a traceback for a user's mistake."""
    cast(Any, warnings).formatwarning = format_warning  # one line for ours
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()  # a full disk is noticed here, not when the interpreter is half gone
        if code == 130:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except _UsageError as e:
        code = show_help(e) if type(e).__name__ == "NoArgsIsHelpError" else print_error(e.format_message())
    except HeadcountError as e:
        code = print_error(with_option_names(str(e)))
    except (KeyboardInterrupt, ImportError) as e:
        if isinstance(e, ImportError) and not isinstance(e.__context__, KeyboardInterrupt):
            raise  # else it was Ctrl-C while a library was loading
        asking = sys.argv[1:2] in (["predict"], ["evaluate"], ["explain"], ["issues"], ["audit"], ["check"], ["export"])
        code = print_error("interrupted" if asking else "interrupted; the same command goes on where it stopped", 130)
        # Ctrl-C inside an eval of text, as libraries do, makes CPython die by signal at its end; the next eval undoes it
        eval("0")
    except (typer.Abort, EOFError):
        code = print_error("aborted", 130)
    except BrokenPipeError:
        code = 141
    except OSError as e:
        if e.errno not in DISK_ADVICE:
            raise
        code = print_error(f"{e.strerror}: {e.filename or 'while writing'}; {DISK_ADVICE[e.errno]}")
    discard_stdout()
    sys.exit(code if isinstance(code, int) else 0)

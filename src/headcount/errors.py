"""The one exception that is the user's to fix: a single line saying what was wrong, what was given, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from numbers import Integral
from typing import Any

MOST_SEED = (1 << 63) - 1


class HeadcountError(ValueError):
    """A mistake in what was given. The command line prints it as one line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class HeadcountWarning(UserWarning):
    """Something the user should know and need not mend: the work goes on. The command line prints it as one line."""


def whole_number(what: str, given: Any, least: int, most: int) -> int:
    """Return ``given`` if it is a whole number in these bounds, numpy's too; otherwise say what it is.

    >>> whole_number("folds", 5, 2, 100)
    5
    >>> whole_number("folds", "5", 2, 100)
    Traceback (most recent call last):
    headcount.errors.HeadcountError: folds is a whole number from 2 to 100, got '5'
    """
    if isinstance(given, bool) or not isinstance(given, Integral) or not least <= int(given) <= most:
        raise HeadcountError(f"{what} is a whole number from {least} to {most}, got {given!r}")
    return int(given)


def choose(kind: str, given: object, choices: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``choices``; otherwise say what there is.

    >>> choose("tie rule", "lowest", ["lowest", "random"])
    'lowest'
    >>> choose("head", "cuont", ["count", "output_mean"])
    Traceback (most recent call last):
    headcount.errors.HeadcountError: no head 'cuont'; there are count, output_mean (did you mean 'count'?)
    """
    known = list(choices)
    if given in known:
        return str(given)
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise HeadcountError(f"no {kind} {given!r}; there are {', '.join(known)}{hint}")

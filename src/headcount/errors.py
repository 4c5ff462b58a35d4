"""The one exception that is the user's to fix: a single line saying what was wrong, what was given, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class HeadcountError(ValueError):
    """A mistake in what was given. The command line prints it as one line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class HeadcountWarning(UserWarning):
    """Something the user should know and need not mend: the work goes on. The command line prints it as one line."""


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

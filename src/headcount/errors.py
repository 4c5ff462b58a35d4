"""The one exception that is the user's to fix: a single line saying what was wrong, what was given, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

MAX_SEED = (1 << 63) - 1


class HeadcountError(ValueError):
    """A mistake in what was given. The command line prints it as one line and exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class HeadcountWarning(UserWarning):
    """Something the user should know and need not mend: the work goes on. The command line prints it as one line."""


def check_choice(kind: str, given: object, choices: Iterable[str]) -> str:
    """Return ``given`` if it is one of ``choices``; otherwise say what there is.

    >>> choose("tie rule", "lowest", ["lowest", "random"])
    'lowest'
    >>> choose("head", "cuont", ["count", "output_mean"])
    Traceback (most recent call last):
    headcount.errors.HeadcountError: no head 'cuont'; there are count, output_mean (did you mean 'count'?)
    """
    allowed = list(choices)
    if given in allowed:
        return str(given)
    near = difflib.get_close_matches(str(given), allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    raise HeadcountError(f"no {kind} {given!r}; there are {', '.join(allowed)}{hint}")


def to_python_scalar(given: Any) -> Any:
    """A number, truth value or word of numpy or torch as Python's own; anything else as it is."""
    return given.item() if getattr(given, "ndim", None) == 0 and hasattr(given, "item") else given


def check_number(name: str, given: Any, low: float, high: float, *, integer: bool) -> Any:
    """Return ``given`` as a number of Python if it is one in the range.

    >>> number("lr", 1, 0.0, 10.0, whole=False)
    1.0
    >>> number("fold", 2.5, 0, 4, whole=True)
    Traceback (most recent call last):
    headcount.errors.HeadcountError: fold is a whole number from 0 to 4, got 2.5
    """
    value = to_python_scalar(given)
    if isinstance(value, bool) or not isinstance(value, int if integer else (int, float)) or not low <= value <= high:
        raise HeadcountError(f"{name} is a {'whole ' * integer}number from {low} to {high}, got {given!r}")
    return value if integer else float(value)


def check_bool(name: str, given: Any) -> bool:
    """Return ``given`` if it is true or false, and not merely taken for it."""
    if not isinstance(to_python_scalar(given), bool):
        raise HeadcountError(f"{name} is true or false, got {given!r}")
    return to_python_scalar(given)

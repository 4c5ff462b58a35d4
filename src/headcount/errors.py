"""Errors that the user can correct, in one line: what was wrong, what was given, and what to do."""

import difflib
from collections.abc import Iterable
from typing import Any

MAX_SEED = (1 << 63) - 1


class HeadcountError(ValueError):
    """A mistake in the input. The command line prints it as one line and exits with code 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))


class HeadcountWarning(UserWarning):
    """Something the user should know, after which the work continues. The command line prints it as one line."""


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

"""What was asked, what was found, and what was wrong: the three things every reader passes on.

Rows are counted from 1 in what people read (row 1 of a table is the first below its header), from 0 in the arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.data.columns import Columns, Named
from headcount.data.learned import Learned
from headcount.data.values import nearly_alike
from headcount.errors import HeadcountError


class Bad:
    """Complaints: the first one ends the reading, or with ``skip`` each is written down and left out."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.said = skip, list[str]()

    def say(self, message: str) -> None:
        if not self.skip:  # who says nothing of what to do is helped
            raise HeadcountError(message if ";" in message else f"{message}; mend it, or leave it out with skip_bad=")
        self.said.append(" ".join(message.split()))

    def rows(self, wrong: np.ndarray, message: Callable[[int], str]) -> np.ndarray:
        """Complain of each row where ``wrong`` (n,) is true; gives ``wrong`` back."""
        for row in np.flatnonzero(wrong).tolist():
            self.say(message(row))
        return wrong


@dataclass(frozen=True)
class Asked:
    """The options of :func:`headcount.data.read.read`."""

    named: Named
    labels: Any
    classes: tuple[str, ...] | None
    ties: str
    uncounted: tuple[str, ...]
    need_labels: bool
    or_truth: bool
    side: int | None
    cache: Path | None
    tile: float | None
    learned: Learned | None
    bad: Bad

    def miss_labels(self, truth: bool) -> bool:
        """Whether data without any label will not do; ``truth``: the class of instances is known."""
        return self.need_labels and not (self.or_truth and truth)


@dataclass(frozen=True)
class Said:
    """What is said of each of the B bags: a label each, or votes."""

    values: tuple[str, ...] = ()  # the labels' names, or those of the columns of votes
    code: np.ndarray | None = None  # (B,) into values, -1 for an unlabelled bag
    votes: np.ndarray | None = None  # (B, V)
    group: tuple[str, ...] | None = None  # (B,) where the label file says it
    source: str = "no labels"
    digest: str = ""
    where: str = ""  # the table that says it
    row: np.ndarray | None = None  # (B,) the row of it that speaks first of the bag
    notes: tuple[str, ...] = ()


@dataclass
class Found:
    """n input rows, in their order, and what they hold."""

    kind: str
    how: str  # one line: what it is and how it was read
    where: str  # how complaints call it
    columns: Columns
    content: Any  # instances: an array (n, ...), or a pyarrow table of n rows
    bag: np.ndarray  # (n,) bag of each row, -1 where the row is left out
    names: Sequence[str]  # (B,) in order of first appearance; of arrays, in the order of what is said of them
    said: Said
    ids: pa.Table  # n rows: the user's own columns
    digest: str  # sha256 of the content
    weight: np.ndarray | None = None  # (n,)
    group: tuple[str, ...] | None = None  # (B,)
    truth: tuple[np.ndarray, list[str]] | None = None  # (n,) codes and their names
    known: tuple[np.ndarray, list[str]] | None = None
    coords: np.ndarray | None = None  # (n, 2)
    tiles: np.ndarray | None = None  # (n,)
    notes: list[str] = field(default_factory=list)
    checked: bool = False  # every number of the content was seen to be finite
    classes: tuple[str, ...] | None = None  # where the data name them
    address: np.ndarray | None = None  # (n,) where each row lies in the content; None: in its own place


def short(value: Any, most: int = 40) -> str:
    """A value as a complaint shows it."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def some(names: Sequence[Any], most: int = 3) -> str:
    """The first few of many.

    >>> some(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    shown = ", ".join(short(n) for n in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def said_alike(classes: Sequence[str]) -> list[str]:
    """A line on classes that may be one.

    >>> said_alike(["Ville", "sea", "ville"])
    ["classes that differ only in capitals or blanks: 'Ville' and 'ville'; if they are one, write them alike"]
    """
    pairs = [" and ".join(map(short, them)) for them in nearly_alike(classes)]
    if not pairs:
        return []
    shown = ", ".join(pairs[:3]) + (f", and {len(pairs) - 3:,} more such" if len(pairs) > 3 else "")
    return [f"classes that differ only in capitals or blanks: {shown}; if they are one, write them alike"]


def firsts(bag: np.ndarray, value: np.ndarray, bags: int) -> tuple[np.ndarray, np.ndarray]:
    """(B,) the first value >= 0 in each bag (-1: none), and (n,) where a row says otherwise."""
    rows = np.flatnonzero((value >= 0) & (bag >= 0))
    first = np.full(bags, -1)
    first[bag[rows[::-1]]] = value[rows[::-1]]  # written backwards, so that the first row stays
    wrong = np.zeros(len(bag), bool)
    wrong[rows] = value[rows] != first[bag[rows]]
    return first, wrong

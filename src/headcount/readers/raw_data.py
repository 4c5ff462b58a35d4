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

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles, FeatureSchema
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.values import similar_names


class ErrorPolicy:
    """Complaints: the first one ends the reading, or with ``skip`` each is written down and left out."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.messages = skip, list[str]()

    def report(self, message: str) -> None:
        if not self.skip:  # who says nothing of what to do is helped
            raise HeadcountError(message if ";" in message else f"{message}; mend it, or leave it out with skip_bad=")
        self.messages.append(" ".join(message.split()))

    def report_rows(self, wrong: np.ndarray, message: Callable[[int], str]) -> np.ndarray:
        """Complain of each row where ``wrong`` (n,) is true; gives ``wrong`` back."""
        for row in np.flatnonzero(wrong).tolist():
            self.report(message(row))
        return wrong


@dataclass(frozen=True)
class ReadOptions:
    """The options of :func:`headcount.readers.read`."""

    roles: ColumnRoles
    labels: Any
    classes: tuple[str, ...] | None
    ties: str
    uncounted: tuple[str, ...]
    need_labels: bool
    truth_suffices: bool
    side: int | None
    cache: Path | None
    tile: float | None
    preprocessor: Preprocessor | None
    errors: ErrorPolicy

    def requires_labels(self, has_truth: bool) -> bool:
        """Whether data without any label will not do; ``truth``: the class of instances is known."""
        return self.need_labels and not (self.truth_suffices and has_truth)


@dataclass(frozen=True)
class BagLabels:
    """What is said of each of the B bags: a label each, or votes."""

    values: tuple[str, ...] = ()  # the labels' names, or those of the columns of votes
    codes: np.ndarray | None = None  # (B,) into values, -1 for an unlabelled bag
    votes: np.ndarray | None = None  # (B, V)
    group: tuple[str, ...] | None = None  # (B,) where the label file says it
    source: str = "no labels"
    digest: str = ""
    origin: str = ""  # the table that says it
    first_row: np.ndarray | None = None  # (B,) the row of it that speaks first of the bag
    notes: tuple[str, ...] = ()


@dataclass
class RawData:
    """n input rows, in their order, and what they hold."""

    kind: str
    summary: str  # one line: what it is and how it was read
    origin: str  # how complaints call it
    schema: FeatureSchema
    content: Any  # instances: an array (n, ...), or a pyarrow table of n rows
    bag: np.ndarray  # (n,) bag of each row, -1 where the row is left out
    names: Sequence[str]  # (B,) in order of first appearance; of arrays, in the order of what is said of them
    labels: BagLabels
    ids: pa.Table  # n rows: the user's own columns
    digest: str  # sha256 of the content
    weight: np.ndarray | None = None  # (n,)
    group: tuple[str, ...] | None = None  # (B,)
    truth: tuple[np.ndarray, list[str]] | None = None  # (n,) codes and their names
    known: tuple[np.ndarray, list[str]] | None = None
    coords: np.ndarray | None = None  # (n, 2)
    tile_sizes: np.ndarray | None = None  # (n,)
    notes: list[str] = field(default_factory=list)
    all_finite: bool = False  # every number of the content was seen to be finite
    classes: tuple[str, ...] | None = None  # where the data name them
    address: np.ndarray | None = None  # (n,) where each row lies in the content; None: in its own place


def abbreviate(value: Any, most: int = 40) -> str:
    """A value as a complaint shows it."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def preview(names: Sequence[Any], most: int = 3) -> str:
    """The first few of many.

    >>> some(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    shown = ", ".join(abbreviate(n) for n in names[:most])
    return shown + (f" and {len(names) - most:,} more" if len(names) > most else "")


def warn_similar_classes(classes: Sequence[str]) -> list[str]:
    """A line on classes that may be one.

    >>> said_alike(["Ville", "sea", "ville"])
    ["classes that differ only in capitals or blanks: 'Ville' and 'ville'; if they are one, write them alike"]
    """
    pairs = [" and ".join(map(abbreviate, them)) for them in similar_names(classes)]
    if not pairs:
        return []
    shown = ", ".join(pairs[:3]) + (f", and {len(pairs) - 3:,} more such" if len(pairs) > 3 else "")
    return [f"classes that differ only in capitals or blanks: {shown}; if they are one, write them alike"]


def first_per_bag(bag: np.ndarray, codes: np.ndarray, n_bags: int) -> tuple[np.ndarray, np.ndarray]:
    """(B,) the first value >= 0 in each bag (-1: none), and (n,) where a row says otherwise."""
    rows = np.flatnonzero((codes >= 0) & (bag >= 0))
    first = np.full(n_bags, -1)
    first[bag[rows[::-1]]] = codes[rows[::-1]]  # written backwards, so that the first row stays
    differs = np.zeros(len(bag), bool)
    differs[rows] = codes[rows] != first[bag[rows]]
    return first, differs

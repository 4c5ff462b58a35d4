"""What all readers share: the options they get, the raw data they return, and what they do about errors in the data.

Messages count rows from 1 (row 1 of a table is the first below its header), arrays from 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import FeatureSchema, Preprocessor
from headcount.readers.values import abbreviate, similar_names


class ErrorPolicy:
    """The first error in the data ends the reading, or with ``skip`` each is recorded and what it concerns is left out."""

    def __init__(self, skip: bool) -> None:
        self.skip, self.messages = skip, list[str]()

    def report(self, message: str) -> None:
        if not self.skip:
            advice = "" if ";" in message else "; correct it, or leave it out with skip_bad="
            raise HeadcountError(message + advice)
        self.messages.append(" ".join(message.split()))

    def report_rows(self, wrong: np.ndarray, message: Callable[[int], str]) -> np.ndarray:
        """Report each row where ``wrong`` (n,) is true; returns ``wrong``."""
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
        """Whether data without any label are refused; ``has_truth``: the class of instances is known."""
        return self.need_labels and not (self.truth_suffices and has_truth)


@dataclass(frozen=True)
class BagLabels:
    """The labels or votes of B bags, before they are matched with the classes."""

    values: tuple[str, ...] = ()  # the distinct labels, or the names of the columns of votes
    codes: np.ndarray | None = None  # (B,) indices into values, -1 for an unlabelled bag
    votes: np.ndarray | None = None  # (B, V)
    group: tuple[str, ...] | None = None  # (B,) where the label file has it
    source: str = "no labels"  # such as "column 'label'"
    digest: str = ""
    origin: str = ""  # the table that holds them
    first_row: np.ndarray | None = None  # (B,) the first row of it that labels the bag
    notes: tuple[str, ...] = ()


@dataclass
class RawData:
    """n input rows, in their order, and what they hold."""

    kind: str  # images, features, table or text
    summary: str  # one line: what was read
    origin: str  # how messages call it
    schema: FeatureSchema
    content: Any  # instances: an array (n, ...), or a pyarrow table of n rows
    bag: np.ndarray  # (n,) bag of each row, -1 where the row is left out
    names: Sequence[str]  # (B,) in order of first appearance; of arrays, in the order of their labels
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
    all_finite: bool = False  # every number of the content is known to be finite
    classes: tuple[str, ...] | None = None  # where the data name them
    address: np.ndarray | None = None  # (n,) position of each row in the content; None: its own


def note_similar_classes(classes: Sequence[str]) -> list[str]:
    """A line on classes that may be one.

    >>> note_similar_classes(["Ville", "sea", "ville"])
    ["classes that differ only in capitals or blanks: 'Ville' and 'ville'; if they are one, write them alike"]
    """
    pairs = [" and ".join(map(abbreviate, names)) for names in similar_names(classes)]
    if not pairs:
        return []
    more = f", and {len(pairs) - 3:,} more such" if len(pairs) > 3 else ""
    return [f"classes that differ only in capitals or blanks: {', '.join(pairs[:3])}{more}; if they are one, write them alike"]


def first_per_bag(bag: np.ndarray, codes: np.ndarray, n_bags: int) -> tuple[np.ndarray, np.ndarray]:
    """(B,) the first code >= 0 in each bag (-1: none), and (n,) whether a row has another."""
    rows = np.flatnonzero((codes >= 0) & (bag >= 0))
    first = np.full(n_bags, -1)
    first[bag[rows[::-1]]] = codes[rows[::-1]]  # assigned backwards, so that the first row remains
    differs = np.zeros(len(bag), bool)
    differs[rows] = codes[rows] != first[bag[rows]]
    return first, differs

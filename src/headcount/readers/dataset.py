"""What readers share: the options they get, how errors in the data are treated, the raw data they return, the bags made of it.

Messages count rows from 1 (row 1 of a table is the first below its header), arrays from 0.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.readers.columns import Codes, ColumnRoles, preview
from headcount.readers.preprocessing import Preprocessor

TIES = ("split", "drop", "lowest")


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


NO_BAGS = "no bags: each instance is predicted by itself"


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
    label_noise: float
    min_size: int
    errors: ErrorPolicy
    encoder: str | Path | None = None
    download: bool = False
    notes: list[str] = field(default_factory=list)  # lines on what was ignored or changed, for the description

    @property
    def bags_optional(self) -> bool:
        """Whether rows without bags are each a bag of their own: data that a model is to predict."""
        return self.preprocessor is not None and not self.need_labels and self.labels is None

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


@dataclass
class RawData:
    """n input rows, in their order, and what they hold."""

    summary: str  # one line: what was read
    origin: str  # how messages call it
    schema: Preprocessor  # not fitted yet
    content: Any  # instances: an array (n, ...), or a pyarrow table of n rows
    bag: np.ndarray  # (n,) bag of each row, -1 where the row is left out
    names: Sequence[str]  # (B,) in order of first appearance; of arrays, in the order of their labels
    labels: BagLabels
    ids: pa.Table  # n rows: the user's own columns
    digest: str  # sha256 of the content
    weight: np.ndarray | None = None  # (n,)
    group: tuple[str, ...] | None = None  # (B,)
    truth: Codes | None = None  # (n,)
    known: Codes | None = None
    coords: np.ndarray | None = None  # (n, 2)
    tile_sizes: np.ndarray | None = None  # (n,)
    all_finite: bool = False  # every number of the content is known to be finite
    classes: tuple[str, ...] | None = None  # where the data name them
    address: np.ndarray | None = None  # (n,) position of each row in the content; None: its own

    def describe(self, bags: Bags, uncounted: Sequence[str]) -> list[str]:
        """What was understood, line by line."""
        sizes, label, names = bags.sizes.numpy(), bags.label.numpy(), bags.names or ()
        spread = f"{sizes.min():,} to {sizes.max():,} instances (median {np.median(sizes):,.0f})"
        spread = spread if sizes.min() < sizes.max() else f"{sizes.min():,} instance{'s' * bool(sizes.min() != 1)}"
        lines = [f"{len(bags):,} bags of {spread}, {len(bags.index):,} in all"]
        count = np.bincount(label[label >= 0], minlength=len(bags.classes))
        counted = [f"{c} ({n:,} bag{'s' * (n != 1)})" for c, n in zip(bags.classes, count.tolist(), strict=True)]
        shown = ", ".join((counted if count.any() else bags.classes)[:20])
        more = f" and {len(bags.classes) - 20} more" if len(bags.classes) > 20 else ""
        source = f"from {self.labels.source}" if count.any() else "to choose from, no bag has a label"
        lines.append(f"{len(bags.classes)} classes {source}: {shown}{more}")
        if bags.votes is not None:
            extra = (bags.votes.sum(1) - bags.segments().total_weight())[bags.votes.sum(1) > 0]
            cases = {"as many as instances": extra.abs() < 0.5, "fewer": extra <= -0.5, "more": extra >= 0.5}
            counts = ", ".join(f"{what} in {int(n):,}" for what, case in cases.items() if (n := case.sum()))
            lines.append(f"votes are counts, by bags: {counts}")
        elif soft := int(((bags.target > 0).sum(1) > 1).sum()):
            lines.append(f"{soft:,} bags have a soft label")
        if bags.label_noise:
            lines.append(f"each label was replaced by one at random with probability {bags.label_noise:g}")
        unlabelled = np.flatnonzero(label < 0)
        if 0 < len(unlabelled) < len(label):
            have = "bag has" if len(unlabelled) == 1 else "bags have"
            lines.append(f"{len(unlabelled):,} {have} no label: {preview([names[b] for b in unlabelled], 4)}")
        if uncounted:
            lines.append(f"never counted: {', '.join(uncounted)}")
        if bags.group is not None:
            lines.append(f"{len(set(bags.group)):,} groups")
            ungrouped = [name for name, group in zip(names, bags.group, strict=False) if group == f"only {name}"]
            if ungrouped:
                lines.append(f"of these, {len(ungrouped):,} for bags that name none, one each: {preview(ungrouped, 4)}")
        for what, classes in (("truth, for scoring only", bags.truth), ("known class, as supervision", bags.known)):
            if classes is not None:
                lines.append(f"{int((classes >= 0).sum()):,} instances have a {what}")
        return lines

    def fingerprint(self, bags: Bags) -> str:
        """sha256 of the content and of what was made of it."""
        digest = hashlib.sha256(self.digest.encode())
        noise = [bags.label_noise] if bags.label_noise else []
        metadata = [self.schema.kind, self.labels.digest, bags.classes, bags.names, bags.group, *noise]
        digest.update(json.dumps(metadata).encode("utf-8", "backslashreplace"))
        for part in (bags.index, bags.offsets, bags.target, bags.weight, bags.known, bags.truth, bags.counted):
            digest.update(b"-" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes())
        digest.update(b"" if bags.votes is None else bags.votes.numpy().tobytes())
        return digest.hexdigest()


def build_targets(
    labels: BagLabels, options: ReadOptions, names: Sequence[str], origin: str
) -> tuple[np.ndarray, np.ndarray | None, tuple[str, ...], np.ndarray]:
    """(B, C) targets, the votes (B, C) if there are any, the classes, and (B,) which bags are dropped for a tie."""
    ties = _parse_ties(labels.values, options.classes) if labels.votes is None else {}
    values = [v for v in labels.values if v not in ties]
    if labels.votes is None:  # by number if all are numbers, else alphabetically; columns of votes stay in their order
        numeric = all(re.fullmatch(r"-?\d+(\.\d+)?", v) for v in values)
        values.sort(key=lambda v: (float(v), v) if numeric else (0, v))
    classes = options.classes or tuple(dict.fromkeys([*values, *options.uncounted]))
    if len(classes) < 2:
        what = f"only class {classes[0]!r}" if classes else "no class"
        advice = "" if options.need_labels else "; name them with classes="
        raise HeadcountError(f"{origin}: {what} in {labels.source}; a majority needs at least two classes{advice}")
    for name in options.uncounted:
        if name not in classes:
            raise HeadcountError(f"no class {name!r} to leave out of the count; there are {', '.join(classes)}")
    if len(counted := [c for c in classes if c not in options.uncounted]) < 2:
        left = f"only {counted[0]!r} is" if counted else "none of them is"
        raise HeadcountError(f"of the classes {', '.join(classes)} {left} left to win a bag; two must count")
    position = {c: k for k, c in enumerate(classes)}
    wins = np.zeros((len(labels.values), len(classes)))  # the classes that each label, or column of votes, counts for
    for k, value in enumerate(labels.values):
        for name in ties.get(value, (value,)):
            if name in position:
                wins[k, position[name]] = 1
            elif options.need_labels and (labels.codes is None or k in labels.codes):
                problem = f"is none of the classes {', '.join(classes)}; {class_advice(options)}"
                if labels.codes is None:
                    raise HeadcountError(f"{origin}: {name!r} (votes) {problem}")
                bag = int(np.flatnonzero(labels.codes == k)[0])
                row = origin if labels.first_row is None else f"{labels.origin} row {labels.first_row[bag] + 1}"
                raise HeadcountError(f"{row}: {name!r}, the label of bag {names[bag]!r}, {problem}")
    rows = np.vstack([wins, np.zeros(len(classes))])  # code -1, unlabelled, reads the last row
    target = rows[labels.codes] if labels.votes is None else labels.votes @ wins
    votes, top = None if labels.votes is None else target.copy(), target.max(1, keepdims=True)
    tied = (top[:, 0] > 0) & ((target == top).sum(1) > 1)
    if options.ties == "lowest":
        target[tied] = np.identity(len(classes))[target[tied].argmax(1)]
    return target, votes, classes, tied if options.ties == "drop" else np.zeros(len(target), bool)


def class_advice(options: ReadOptions) -> str:
    """What to do about an unknown class; those of a fitted model are fixed."""
    return "correct it or leave it empty" if options.preprocessor else "correct it, leave it empty, or add it with classes="


def _parse_ties(labels: Sequence[str], classes: Sequence[str] | None) -> dict[str, tuple[str, ...]]:
    """Labels such as 'a|b': a tie if a and b are labels too, else a class with a bar in its name."""
    known = set(classes or labels)
    parts = {v: tuple(map(str.strip, v.split("|"))) for v in labels if "|" in v and v not in (classes or ())}
    return {v: p for v, p in parts.items() if set(p) <= known - {v} and len(set(p)) == len(p)}


@dataclass(frozen=True, eq=False)
class BagDataset:
    """What :func:`headcount.read` returns: N instances in B bags, from ``n_rows`` input rows.

    Parameters
    ----------
    kind
        images, features, table or text.
    schema
        How raw instances become numbers, before it is fitted.
    content
        Raw instances: an array (M, ...) or a pyarrow table of M rows.
    bags
        The bags over the content; those of a table hold no features yet, see :meth:`to_bags`.
    rows
        (N,) the input row of each instance, in the order of the bags.
    n_rows
        Input rows, including those that were left out.
    ids
        The user's own columns, one row per input row: predictions are joined to them.
    coords, tile_sizes
        (N, 2) coordinates, and (N,) the side of the tile at the coordinates, NaN where unknown.
    description
        What was understood, line by line.
    skipped
        With ``skip_bad``: each file or row that was left out, and why.
    fingerprint, instances_hash
        sha256 of all that was read, and of the instances without their labels.
    """

    kind: str
    schema: Preprocessor
    content: Any
    bags: Bags
    rows: np.ndarray
    n_rows: int
    ids: pa.Table
    coords: np.ndarray | None
    tile_sizes: np.ndarray | None
    description: list[str]
    skipped: list[str]
    fingerprint: str
    instances_hash: str

    def fit_preprocessor(self, bags: Any = None) -> Preprocessor:
        """Fit the preprocessing to the instances of these bags only (a list of numbers or a mask; None: all)."""
        return self.schema.fit(self.content, (self.bags if bags is None else self.bags.take(bags)).index.numpy())

    def to_bags(self, preprocessor: Preprocessor | None = None) -> Bags:
        """The bags over their features. Tables and texts need a preprocessor, fitted to training bags."""
        if not self.schema.fields:
            return self.bags
        if preprocessor is None:
            advice = "to_bags(dataset.fit_preprocessor(training_bags))"
            raise HeadcountError(f"a {self.kind} becomes features by a fitted preprocessor: {advice}")
        return replace(self.bags, pool=Pool(preprocessor.transform(self.content), trusted=True))

    def broadcast(self, values: Any, blank: Any) -> np.ndarray:
        """(N, ...) per instance -> (n_rows, ...) per input row, ``blank`` for rows that were left out."""
        values = np.asarray(values)
        out = np.full((self.n_rows, *values.shape[1:]), blank, dtype=values.dtype)
        out[self.rows] = values
        return out

    def __repr__(self) -> str:
        counts = f"{len(self.bags)} bags, {len(self.rows)} instances, {len(self.bags.classes)} classes"
        return f"BagDataset({self.kind}: {counts})"


def check_dataset(dataset: Any) -> BagDataset:
    """Refuse data that have not been read."""
    if not isinstance(dataset, BagDataset):
        problem = f"this takes what headcount.read returns, got {type(dataset).__name__}"
        raise HeadcountError(f"{problem}; read it first: read(data, ...)")
    return dataset

"""What the rows say of their bags, labels or votes, and what becomes of it: one target per bag."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles
from headcount.readers.raw_data import BagLabels, ErrorPolicy, ReadOptions, abbreviate, first_per_bag, preview
from headcount.readers.tables import MISSING_VALUES
from headcount.readers.values import as_float, drop_values, factorize

TIES = ("split", "drop", "lowest")


def labels_from_rows(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, names: Sequence[str], origin: str, options: ReadOptions
) -> BagLabels | None:
    """Labels or votes that stand in every row of a bag; None if the table says nothing."""
    bad = options.errors
    if roles.votes and set(roles.votes) <= set(table.column_names):
        votes = parse_votes(table, roles.votes, origin, bad)
        labelled = (bag >= 0) & (votes.sum(1) > 0)  # a blank row says nothing
        first = _first_row_per_bag(labelled, bag, len(names))
        wrong = labelled & (votes != votes[first[bag]]).any(1)
        unclear = _report_conflicts(
            wrong, bag, names, lambda r: f"{origin} row {r + 1}: bag {names[bag[r]]!r} has two sets of votes", bad
        )
        per_bag = np.where(((first >= 0) & ~unclear)[:, None], votes[first], 0.0)
        idle = (f"column {roles.label!r} is not used: the votes decide",) if roles.label in table.column_names else ()
        return BagLabels(roles.votes, votes=per_bag, source=f"votes in columns {', '.join(roles.votes)}", notes=idle)
    if roles.label is None or roles.label not in table.column_names:
        return None
    code, values, notes = parse_class_column(table, roles.label, origin, options)
    first, wrong = first_per_bag(bag, code, len(names))
    both = lambda r: f"{values[first[bag[r]]]!r} and {values[code[r]]!r}"  # noqa: E731
    unclear = _report_conflicts(
        wrong, bag, names, lambda r: f"{origin} row {r + 1}: bag {names[bag[r]]!r} has two labels, {both(r)}", bad
    )
    row = _first_row_per_bag((code >= 0) & (bag >= 0), bag, len(names))
    code = np.where(unclear, -1, first)
    return BagLabels(tuple(values), code, source=f"column {roles.label!r}", origin=origin, first_row=row, notes=notes)


def _first_row_per_bag(there: np.ndarray, bag: np.ndarray, bags: int) -> np.ndarray:
    """(B,) the first row of each bag that is ``there``, -1 where none is."""
    rows = np.flatnonzero(there)[::-1]  # written backwards, so that the first row stays
    first = np.full(bags, -1)
    first[bag[rows]] = rows
    return first


def parse_class_column(
    table: pa.Table, name: str, origin: str, options: ReadOptions
) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """A column of classes, and what to say of it."""
    return drop_missing_classes(
        *factorize(table.column(name), f"column {name!r} of {origin}"), f"column {name!r}", "rows", options
    )


def drop_missing_classes(
    code: np.ndarray, values: list[str], column_name: str, rows: str, options: ReadOptions
) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """NA and its like say nothing, as in a column of numbers, unless somebody named them as a class."""
    words = {*MISSING_VALUES} - {*(options.classes or ()), *options.uncounted}
    left, kept = drop_values(code, values, words)
    gone = [v for v in values if v in words]
    if not gone:
        return code, values, ()
    many = int((left < 0).sum() - (code < 0).sum())
    name_it = "" if options.preprocessor else "; a class of that name must be named in classes="
    return left, kept, (f"{column_name}: {preview(gone)} in {many:,} {rows} read as missing{name_it}",)


def parse_votes(table: pa.Table, columns: Sequence[str], origin: str, errors: ErrorPolicy) -> np.ndarray:
    """(n, V) votes; a row without any is zeros, half a row is refused."""
    for name in columns:
        if name not in table.column_names:
            raise HeadcountError(f"{origin} has no column {name!r} (votes); it has {preview(table.column_names, 12)}")
    votes = np.stack([parse_numbers(table.column(n), n, origin) for n in columns], 1)
    empty = np.isnan(votes).all(1)
    votes[empty] = 0
    wrong = np.asarray(~(np.isfinite(votes) & (votes >= 0) & (votes <= 1e15)).all(1))
    errors.report_rows(
        wrong,
        lambda r: (
            f"{origin} row {r + 1}: votes {votes[r].tolist()} must be from 0 to 1e15; mend the row or leave it out"
        ),
    )
    votes[wrong] = 0
    return votes


def parse_numbers(column: pa.ChunkedArray, name: str, origin: str) -> np.ndarray:
    """A column that must be numbers, NaN where missing."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        code, values = factorize(column)
        parsed = np.array([_float(v) for v in values] + [np.nan])
        lost = np.isnan(parsed[:-1])
        if lost.any():
            word = values[int(np.flatnonzero(lost)[0])]
            row = int(np.flatnonzero(code == values.index(word))[0]) + 1
            raise HeadcountError(f"{origin} row {row}: {abbreviate(word)} in column {name!r} is not a number")
        return parsed[code]
    try:
        return as_float(column)
    except (pa.ArrowException, TypeError) as e:
        raise HeadcountError(f"column {name!r} of {origin} holds {kind}, not numbers ({e})") from None


def _float(text: str) -> float:
    try:
        return float(text.replace("_", "x"))
    except ValueError:
        return np.nan


def _report_conflicts(
    wrong: np.ndarray, bag: np.ndarray, names: Sequence[str], message: Callable[[int], str], errors: ErrorPolicy
) -> np.ndarray:
    """(B,) bags of which two things are said. One complaint a bag; who skips it has the bag without a label."""
    rows = np.flatnonzero(wrong)
    unclear, first = np.unique(bag[rows], return_index=True)
    for row in rows[np.sort(first)].tolist():
        errors.report(f"{message(row)}; a bag has one")
    out = np.zeros(len(names), bool)
    out[unclear] = True
    return out


def build_targets(
    bag_labels: BagLabels, options: ReadOptions, names: Sequence[str], origin: str
) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """(B, C) targets, the classes, and (B,) which bags a tie drops."""
    ties = _parse_ties(bag_labels, options.classes)
    single_classes = [v for v in bag_labels.values if v not in ties]
    label_classes = (
        _sorted(single_classes) if bag_labels.votes is None else bag_labels.values
    )  # columns of votes keep the order they were named in
    classes = options.classes or tuple(dict.fromkeys([*label_classes, *options.uncounted]))
    class_number = {c: k for k, c in enumerate(classes)}
    if len(classes) < 2:
        what = f"only class {classes[0]!r}" if classes else "no class"
        hint = "" if options.need_labels else "; name them with classes="
        raise HeadcountError(f"{origin}: {what} in {bag_labels.source}; a majority needs at least two classes{hint}")
    for name in options.uncounted:
        if name not in class_number:
            raise HeadcountError(f"no class {name!r} to leave out of the count; there are {', '.join(classes)}")
    if len(able := [c for c in classes if c not in options.uncounted]) < 2:
        left = f"only {able[0]!r} is" if able else "none of them is"
        raise HeadcountError(f"of the classes {', '.join(classes)} {left} left to win a bag; two must count")
    wins = np.zeros((len(bag_labels.values), len(classes)))  # what each label, or column of votes, says of the classes
    for k, value in enumerate(bag_labels.values):
        for part in ties.get(value, (value,)):
            if part in class_number:
                wins[k, class_number[part]] = 1
            elif options.need_labels and (bag_labels.codes is None or k in bag_labels.codes):
                raise HeadcountError(_unknown_class_message(part, k, bag_labels, options, names, origin, classes))
    rows = np.vstack([wins, np.zeros(len(classes))])  # code -1, unlabelled, reads the last row
    target = rows[bag_labels.codes] if bag_labels.votes is None else bag_labels.votes @ wins
    top = target.max(1, keepdims=True)
    tied = (top[:, 0] > 0) & ((target == top).sum(1) > 1)
    if options.ties == "lowest":
        target[tied] = np.eye(len(classes))[target[tied].argmax(1)]
    return target, classes, tied if options.ties == "drop" else np.zeros(len(target), bool)


def _unknown_class_message(
    word: str,
    k: int,
    bag_labels: BagLabels,
    options: ReadOptions,
    names: Sequence[str],
    origin: str,
    classes: Sequence[str],
) -> str:
    there = f"is none of the classes {', '.join(classes)}; {class_hint(options)}"
    if bag_labels.codes is None:
        return f"{origin}: {word!r} (votes) {there}"
    bag = int(np.flatnonzero(bag_labels.codes == k)[0])
    place = origin if bag_labels.first_row is None else f"{bag_labels.origin} row {bag_labels.first_row[bag] + 1}"
    return f"{place}: {word!r}, the label of bag {names[bag]!r}, {there}"


def class_hint(options: ReadOptions) -> str:
    """What to do about a class nobody named; a model's are what they are."""
    return "mend it or leave it empty" if options.preprocessor else "mend it, leave it empty, or add it with classes="


def _parse_ties(bag_labels: BagLabels, classes: tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
    """Labels such as 'a|b': a tie if both are labels in their own right, else a name with a bar in it."""
    if bag_labels.votes is not None:
        return {}
    known_classes = set(classes or bag_labels.values)
    parts = {
        v: tuple(p.strip() for p in v.split("|")) for v in bag_labels.values if "|" in v and v not in set(classes or ())
    }
    return {v: p for v, p in parts.items() if set(p) <= known_classes - {v} and len(set(p)) == len(p)}


def _sorted(values: Sequence[str]) -> tuple[str, ...]:
    """In the order of numbers if they are all numbers, else of letters."""
    if all(re.fullmatch(r"-?\d+(\.\d+)?", v) for v in values):
        return tuple(sorted(set(values), key=lambda v: (float(v), v)))
    return tuple(sorted(set(values)))

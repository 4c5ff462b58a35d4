"""From labels or votes in the rows of a table to one target per bag."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.raw_data import BagLabels, ErrorPolicy, ReadOptions, first_per_bag
from headcount.readers.tables import MISSING_VALUES, SourceTable
from headcount.readers.values import abbreviate, as_float, drop_values, factorize, preview

TIES = ("split", "drop", "lowest")


def labels_from_rows(source: SourceTable, bag: np.ndarray, names: Sequence[str], options: ReadOptions) -> BagLabels | None:
    """Labels or votes that every row of a bag repeats; None if the table has neither."""
    roles, errors = source.roles, options.errors
    if roles.votes and all(name in source for name in roles.votes):
        votes = parse_votes(source, roles.votes, errors)
        labelled = (bag >= 0) & (votes.sum(1) > 0)
        row = _first_row_per_bag(labelled, bag, len(names))
        differs = labelled & (votes != votes[row[bag]]).any(1)
        message = lambda r: f"{source.row(r)}: bag {names[bag[r]]!r} has two sets of votes"  # noqa: E731
        conflict = _report_conflicts(differs, bag, len(names), message, errors)
        per_bag = np.where(((row >= 0) & ~conflict)[:, None], votes[row], 0.0)
        notes = (f"column {roles.label!r} is not used: the votes decide",) if roles.label in source else ()
        return BagLabels(roles.votes, votes=per_bag, source=f"votes in columns {', '.join(roles.votes)}", notes=notes)
    if roles.label is None or roles.label not in source:
        return None
    codes, values, notes = parse_class_column(source, roles.label, options)
    first, differs = first_per_bag(bag, codes, len(names))

    def two_labels(r: int) -> str:
        both = f"{values[first[bag[r]]]!r} and {values[codes[r]]!r}"
        return f"{source.row(r)}: bag {names[bag[r]]!r} has two labels, {both}"

    conflict = _report_conflicts(differs, bag, len(names), two_labels, errors)
    row = _first_row_per_bag((codes >= 0) & (bag >= 0), bag, len(names))
    codes = np.where(conflict, -1, first)
    return BagLabels(tuple(values), codes, source=f"column {roles.label!r}", origin=source.origin, first_row=row, notes=notes)


def _first_row_per_bag(candidates: np.ndarray, bag: np.ndarray, n_bags: int) -> np.ndarray:
    """(B,) the first of the rows where ``candidates`` is true in each bag, -1 where there is none."""
    rows = np.flatnonzero(candidates)[::-1]  # assigned backwards, so that the first row remains
    first = np.full(n_bags, -1)
    first[bag[rows]] = rows
    return first


def _report_conflicts(
    differs: np.ndarray, bag: np.ndarray, n_bags: int, message: Callable[[int], str], errors: ErrorPolicy
) -> np.ndarray:
    """(B,) bags with two labels, each reported once; where errors are skipped, they have no label."""
    rows = np.flatnonzero(differs)
    bags, first = np.unique(bag[rows], return_index=True)
    for row in rows[np.sort(first)].tolist():
        errors.report(f"{message(row)}; a bag has one")
    return np.isin(np.arange(n_bags), bags)


def parse_class_column(source: SourceTable, name: str, options: ReadOptions) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """(n,) codes of a column of classes, their values, and notes."""
    return drop_missing_classes(*source.factorize(name), f"column {name!r}", "rows", options)


def drop_missing_classes(
    codes: np.ndarray, values: list[str], column_name: str, rows: str, options: ReadOptions
) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """The same without NA and the like, which are missing as in a column of numbers, unless a class is named so."""
    missing = {*MISSING_VALUES} - {*(options.classes or ()), *options.uncounted}
    dropped = [v for v in values if v in missing]
    if not dropped:
        return codes, values, ()
    new_codes, kept = drop_values(codes, values, missing)
    count = int((new_codes < 0).sum() - (codes < 0).sum())
    advice = "" if options.preprocessor else "; a class of that name must be named in classes="
    return new_codes, kept, (f"{column_name}: {preview(dropped)} in {count:,} {rows} read as missing{advice}",)


def parse_votes(source: SourceTable, columns: Sequence[str], errors: ErrorPolicy) -> np.ndarray:
    """(n, V) votes; zeros where a row has none, an error where some are missing."""
    votes = np.stack([parse_numbers(source, name) for name in columns], 1)
    votes[np.isnan(votes).all(1)] = 0
    wrong = np.asarray(~(np.isfinite(votes) & (votes >= 0) & (votes <= 1e15)).all(1))
    advice = "must be from 0 to 1e15; correct the row or leave it out"
    errors.report_rows(wrong, lambda r: f"{source.row(r)}: votes {votes[r].tolist()} {advice}")
    votes[wrong] = 0
    return votes


def parse_numbers(source: SourceTable, name: str) -> np.ndarray:
    """(n,) float64 of a column that must hold numbers, NaN where missing."""
    column = source.table.column(name)
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        codes, values = factorize(column)
        parsed = np.array([_parse_number(v) for v in values] + [np.nan])
        if np.isnan(parsed[:-1]).any():
            k = int(np.flatnonzero(np.isnan(parsed))[0])
            row = source.row(int(np.flatnonzero(codes == k)[0]))
            raise HeadcountError(f"{row}: {abbreviate(values[k])} in column {name!r} is not a number")
        return parsed[codes]
    try:
        return as_float(column)
    except (pa.ArrowException, TypeError) as e:
        raise HeadcountError(f"column {name!r} of {source.origin} holds {kind}, not numbers ({e})") from None


def _parse_number(text: str) -> float:
    try:
        return float(text.replace("_", "x"))  # Python accepts 1_000
    except ValueError:
        return np.nan


def build_targets(
    labels: BagLabels, options: ReadOptions, names: Sequence[str], origin: str
) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """(B, C) targets, the classes, and (B,) which bags are dropped for a tie."""
    ties = _parse_ties(labels, options.classes)
    single = [v for v in labels.values if v not in ties]
    found = _sort_classes(single) if labels.votes is None else labels.values  # votes keep the order of their columns
    classes = options.classes or tuple(dict.fromkeys([*found, *options.uncounted]))
    _check_classes(classes, labels, options, origin)
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
    top = target.max(1, keepdims=True)
    tied = (top[:, 0] > 0) & ((target == top).sum(1) > 1)
    if options.ties == "lowest":
        target[tied] = np.identity(len(classes))[target[tied].argmax(1)]
    return target, classes, tied if options.ties == "drop" else np.zeros(len(target), bool)


def _check_classes(classes: Sequence[str], labels: BagLabels, options: ReadOptions, origin: str) -> None:
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


def class_advice(options: ReadOptions) -> str:
    """What to do about an unknown class; those of a fitted model are fixed."""
    return "correct it or leave it empty" if options.preprocessor else "correct it, leave it empty, or add it with classes="


def _parse_ties(labels: BagLabels, classes: tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
    """Labels such as 'a|b': a tie if a and b are labels too, else a class with a bar in its name."""
    if labels.votes is not None:
        return {}
    known = set(classes or labels.values)
    with_bar = [v for v in labels.values if "|" in v and v not in (classes or ())]
    parts = {v: tuple(p.strip() for p in v.split("|")) for v in with_bar}
    return {v: p for v, p in parts.items() if set(p) <= known - {v} and len(set(p)) == len(p)}


def _sort_classes(values: Sequence[str]) -> tuple[str, ...]:
    """By number if all of them are numbers, else alphabetically."""
    numeric = all(re.fullmatch(r"-?\d+(\.\d+)?", v) for v in values)
    return tuple(sorted(set(values), key=lambda v: (float(v), v) if numeric else (0, v)))

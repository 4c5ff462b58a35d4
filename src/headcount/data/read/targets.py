"""What the rows say of their bags, labels or votes, and what becomes of it: one target per bag."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from headcount.data.columns import Named
from headcount.data.read.found import Asked, Bad, Said, firsts, short, some
from headcount.data.read.tables import MISSING
from headcount.data.values import numbers, texts, without
from headcount.errors import HeadcountError

TIES = ("split", "drop", "lowest")


def by_rows(
    table: pa.Table, roles: Named, bag: np.ndarray, names: Sequence[str], where: str, asked: Asked
) -> Said | None:
    """Labels or votes that stand in every row of a bag; None if the table says nothing."""
    bad = asked.bad
    if roles.votes and set(roles.votes) <= set(table.column_names):
        votes = votes_of(table, roles.votes, where, bad)
        there = (bag >= 0) & (votes.sum(1) > 0)  # a blank row says nothing
        first = _speaks(there, bag, len(names))
        wrong = there & (votes != votes[first[bag]]).any(1)
        unclear = _two(
            wrong, bag, names, lambda r: f"{where} row {r + 1}: bag {names[bag[r]]!r} has two sets of votes", bad
        )
        per_bag = np.where(((first >= 0) & ~unclear)[:, None], votes[first], 0.0)
        idle = (f"column {roles.label!r} is not used: the votes decide",) if roles.label in table.column_names else ()
        return Said(roles.votes, votes=per_bag, source=f"votes in columns {', '.join(roles.votes)}", notes=idle)
    if roles.label is None or roles.label not in table.column_names:
        return None
    code, values, notes = classes_in(table, roles.label, where, asked)
    first, wrong = firsts(bag, code, len(names))
    both = lambda r: f"{values[first[bag[r]]]!r} and {values[code[r]]!r}"  # noqa: E731
    unclear = _two(
        wrong, bag, names, lambda r: f"{where} row {r + 1}: bag {names[bag[r]]!r} has two labels, {both(r)}", bad
    )
    row = _speaks((code >= 0) & (bag >= 0), bag, len(names))
    code = np.where(unclear, -1, first)
    return Said(tuple(values), code, source=f"column {roles.label!r}", where=where, row=row, notes=notes)


def _speaks(there: np.ndarray, bag: np.ndarray, bags: int) -> np.ndarray:
    """(B,) the first row of each bag that is ``there``, -1 where none is."""
    rows = np.flatnonzero(there)[::-1]  # written backwards, so that the first row stays
    first = np.full(bags, -1)
    first[bag[rows]] = rows
    return first


def classes_in(table: pa.Table, name: str, where: str, asked: Asked) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """A column of classes, and what to say of it."""
    return classes_among(*texts(table.column(name), f"column {name!r} of {where}"), f"column {name!r}", "rows", asked)


def classes_among(
    code: np.ndarray, values: list[str], called: str, rows: str, asked: Asked
) -> tuple[np.ndarray, list[str], tuple[str, ...]]:
    """NA and its like say nothing, as in a column of numbers, unless somebody named them as a class."""
    words = {*MISSING} - {*(asked.classes or ()), *asked.uncounted}
    left, kept = without(code, values, words)
    gone = [v for v in values if v in words]
    if not gone:
        return code, values, ()
    many = int((left < 0).sum() - (code < 0).sum())
    name_it = "" if asked.learned else "; a class of that name must be named in classes="
    return left, kept, (f"{called}: {some(gone)} in {many:,} {rows} read as missing{name_it}",)


def votes_of(table: pa.Table, columns: Sequence[str], where: str, bad: Bad) -> np.ndarray:
    """(n, V) votes; a row without any is zeros, half a row is refused."""
    for name in columns:
        if name not in table.column_names:
            raise HeadcountError(f"{where} has no column {name!r} (votes); it has {some(table.column_names, 12)}")
    votes = np.stack([as_numbers(table.column(n), n, where) for n in columns], 1)
    empty = np.isnan(votes).all(1)
    votes[empty] = 0
    wrong = np.asarray(~(np.isfinite(votes) & (votes >= 0) & (votes <= 1e15)).all(1))
    bad.rows(
        wrong,
        lambda r: (
            f"{where} row {r + 1}: votes {votes[r].tolist()} must be from 0 to 1e15; mend the row or leave it out"
        ),
    )
    votes[wrong] = 0
    return votes


def as_numbers(column: pa.ChunkedArray, name: str, where: str) -> np.ndarray:
    """A column that must be numbers, NaN where missing."""
    kind = column.type
    if pa.types.is_null(kind):
        return np.full(len(column), np.nan)
    if pa.types.is_dictionary(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind):
        code, values = texts(column)
        held = np.array([_float(v) for v in values] + [np.nan])
        lost = np.isnan(held[:-1])
        if lost.any():
            word = values[int(np.flatnonzero(lost)[0])]
            row = int(np.flatnonzero(code == values.index(word))[0]) + 1
            raise HeadcountError(f"{where} row {row}: {short(word)} in column {name!r} is not a number")
        return held[code]
    try:
        return numbers(column)
    except (pa.ArrowException, TypeError) as e:
        raise HeadcountError(f"column {name!r} of {where} holds {kind}, not numbers ({e})") from None


def _float(text: str) -> float:
    try:
        return float(text.replace("_", "x"))
    except ValueError:
        return np.nan


def _two(
    wrong: np.ndarray, bag: np.ndarray, names: Sequence[str], message: Callable[[int], str], bad: Bad
) -> np.ndarray:
    """(B,) bags of which two things are said. One complaint a bag; who skips it has the bag without a label."""
    rows = np.flatnonzero(wrong)
    unclear, first = np.unique(bag[rows], return_index=True)
    for row in rows[np.sort(first)].tolist():
        bad.say(f"{message(row)}; a bag has one")
    out = np.zeros(len(names), bool)
    out[unclear] = True
    return out


def targets(
    said: Said, asked: Asked, names: Sequence[str], where: str
) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """(B, C) targets, the classes, and (B,) which bags a tie drops."""
    ties = _tied_words(said, asked.classes)
    plainly = [v for v in said.values if v not in ties]
    own = _sorted(plainly) if said.votes is None else said.values  # columns of votes keep the order they were named in
    classes = asked.classes or tuple(dict.fromkeys([*own, *asked.uncounted]))
    place = {c: k for k, c in enumerate(classes)}
    if len(classes) < 2:
        what = f"only class {classes[0]!r}" if classes else "no class"
        hint = "" if asked.need_labels else "; name them with classes="
        raise HeadcountError(f"{where}: {what} in {said.source}; a majority needs at least two classes{hint}")
    for name in asked.uncounted:
        if name not in place:
            raise HeadcountError(f"no class {name!r} to leave out of the count; there are {', '.join(classes)}")
    if len(able := [c for c in classes if c not in asked.uncounted]) < 2:
        left = f"only {able[0]!r} is" if able else "none of them is"
        raise HeadcountError(f"of the classes {', '.join(classes)} {left} left to win a bag; two must count")
    wins = np.zeros((len(said.values), len(classes)))  # what each label, or column of votes, says of the classes
    for k, value in enumerate(said.values):
        for part in ties.get(value, (value,)):
            if part in place:
                wins[k, place[part]] = 1
            elif asked.need_labels and (said.code is None or k in said.code):
                raise HeadcountError(_no_class(part, k, said, asked, names, where, classes))
    rows = np.vstack([wins, np.zeros(len(classes))])  # code -1, unlabelled, reads the last row
    target = rows[said.code] if said.votes is None else said.votes @ wins
    top = target.max(1, keepdims=True)
    tied = (top[:, 0] > 0) & ((target == top).sum(1) > 1)
    if asked.ties == "lowest":
        target[tied] = np.eye(len(classes))[target[tied].argmax(1)]
    return target, classes, tied if asked.ties == "drop" else np.zeros(len(target), bool)


def _no_class(
    word: str, k: int, said: Said, asked: Asked, names: Sequence[str], where: str, classes: Sequence[str]
) -> str:
    there = f"is none of the classes {', '.join(classes)}; {add_class(asked)}"
    if said.code is None:
        return f"{where}: {word!r} (votes) {there}"
    bag = int(np.flatnonzero(said.code == k)[0])
    place = where if said.row is None else f"{said.where} row {said.row[bag] + 1}"
    return f"{place}: {word!r}, the label of bag {names[bag]!r}, {there}"


def add_class(asked: Asked) -> str:
    """What to do about a class nobody named; a model's are what they are."""
    return "mend it or leave it empty" if asked.learned else "mend it, leave it empty, or add it with classes="


def _tied_words(said: Said, classes: tuple[str, ...] | None) -> dict[str, tuple[str, ...]]:
    """Labels such as 'a|b': a tie if both are labels in their own right, else a name with a bar in it."""
    if said.votes is not None:
        return {}
    own = set(classes or said.values)
    parts = {v: tuple(p.strip() for p in v.split("|")) for v in said.values if "|" in v and v not in set(classes or ())}
    return {v: p for v, p in parts.items() if set(p) <= own - {v} and len(set(p)) == len(p)}


def _sorted(values: Sequence[str]) -> tuple[str, ...]:
    """In the order of numbers if they are all numbers, else of letters."""
    if all(re.fullmatch(r"-?\d+(\.\d+)?", v) for v in values):
        return tuple(sorted(set(values), key=lambda v: (float(v), v)))
    return tuple(sorted(set(values)))

"""What is said of the bags: labels and votes from rows, a second file, a dict or an array, as one target per bag."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.data.columns import USUAL, Named
from headcount.data.learned import numbers, plain, texts
from headcount.data.read.found import Asked, Bad, Said, firsts, short, some
from headcount.data.read.tables import SUFFIXES, is_frame, open_table, suffix
from headcount.errors import HeadcountError

TIES = ("split", "drop", "lowest")


def by_rows(table: pa.Table, roles: Named, bag: np.ndarray, names: Sequence[str], where: str, bad: Bad) -> Said | None:
    """Labels or votes that stand in every row of a bag; None if the table says nothing."""
    if roles.votes and set(roles.votes) <= set(table.column_names):
        votes = votes_of(table, roles.votes, where, bad)
        there = (bag >= 0) & (votes.sum(1) > 0)  # a blank row says nothing
        first = np.full(len(names), -1)
        first[bag[there][::-1]] = np.flatnonzero(there)[::-1]
        wrong = there & (votes != votes[first[bag]]).any(1)
        unclear = _two(
            wrong, bag, names, lambda r: f"{where} row {r + 1}: bag {names[bag[r]]!r} has two sets of votes", bad
        )
        per_bag = np.where(((first >= 0) & ~unclear)[:, None], votes[first], 0.0)
        return Said(roles.votes, votes=per_bag, source=f"votes in columns {', '.join(roles.votes)}")
    if roles.label is None or roles.label not in table.column_names:
        return None
    code, values = texts(table.column(roles.label), f"column {roles.label!r} of {where}")
    first, wrong = firsts(bag, code, len(names))
    both = lambda r: f"{values[first[bag[r]]]!r} and {values[code[r]]!r}"  # noqa: E731
    unclear = _two(
        wrong, bag, names, lambda r: f"{where} row {r + 1}: bag {names[bag[r]]!r} has two labels, {both(r)}", bad
    )
    return Said(tuple(values), code=np.where(unclear, -1, first), source=f"column {roles.label!r}")


def votes_of(table: pa.Table, columns: Sequence[str], where: str, bad: Bad) -> np.ndarray:
    """(n, V) votes; a row without any is zeros, half a row is refused."""
    for name in columns:
        if name not in table.column_names:
            raise HeadcountError(f"{where} has no column {name!r} (votes); it has {some(table.column_names, 12)}")
    votes = np.stack([as_numbers(table.column(n), n, where) for n in columns], 1)
    empty = np.isnan(votes).all(1)
    votes[empty] = 0
    wrong = np.asarray(~(np.isfinite(votes) & (votes >= 0) & (votes <= 1e15)).all(1))
    bad.rows(wrong, lambda r: f"{where} row {r + 1}: votes {votes[r].tolist()} must be finite and not negative")
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


# -- a second file, a dict, an array ----------------------------------------------------------------------------------------


def beside(asked: Asked, names: Sequence[str], bag_column: str | None, labels: Any = None) -> Said:
    """Labels that come apart from the instances, for the bags called ``names``."""
    given = asked.labels if labels is None else labels
    if isinstance(given, (str, Path)) and suffix(Path(given)) == ".npy":
        given = _loaded(Path(given))
    if isinstance(given, (str, Path)) or is_frame(given):
        table, where, digest, roles, key = label_table(given, asked, bag_column)
        return joined(table, where, digest, roles, key, asked, names)
    if isinstance(given, Mapping):
        table = pa.table({"bag": list(map(plain, given)), "label": list(map(plain, given.values()))})
        roles = Named(bag="bag", label="label")
        return joined(table, "labels", _digest(table.to_pydict()), roles, "bag", asked, names)
    return _in_order(given, asked, names)


def label_table(given: Any, asked: Asked, bag_column: str | None) -> tuple[pa.Table, str, str, Named, str]:
    """The table, its name, its digest, the roles in it, and the column that names the bags."""
    if isinstance(given, (str, Path)):
        if not Path(given).is_file():
            raise HeadcountError(f"no label file {given}; give a table with a bag and a label column")
        if suffix(Path(given)) not in SUFFIXES:
            raise HeadcountError(f"{given}: labels come as {', '.join(SUFFIXES)} or .npy")
    table, where, digest = open_table(given, Named(), asked.bad, verbatim=True)
    columns = table.column_names
    for role, name in [("label", asked.named.label), *(("votes", v) for v in asked.named.votes)]:
        if name is not None and name not in columns:
            raise HeadcountError(f"{where} has no column {name!r} ({role}); it has {some(columns, 12)}")
    own = {f: getattr(asked.named, f) for f in ("bag", "label", "group") if getattr(asked.named, f) in columns}
    votes = asked.named.votes
    rest = [c for c in columns if c not in own.values() and c not in votes]
    label = own.get("label") or usual("label", rest, where)
    group = own.get("group") or usual("group", [c for c in rest if c != own.get("bag")], where)
    key = own.get("bag") or (bag_column if bag_column in columns else None) or usual("bag", rest, where)
    if key is None:  # a table of two columns needs no names for them
        others = [c for c in rest if c not in (label, group)]
        if len(others) != 1:
            raise HeadcountError(f"{where}: which column names the bags? It has {some(columns, 12)}; name it with bag=")
        key = others[0]
    if label is None and not votes:
        raise HeadcountError(f"{where} has no label column; it has {some(columns, 12)}; name it with label= or votes=")
    return table, where, digest, Named(bag=key, label=label, votes=votes, group=group if group != key else None), key


def usual(role: str, columns: Sequence[str], where: str) -> str | None:
    there = [c for c in columns if c.strip().lower().replace(" ", "_").replace("-", "_") in USUAL[role]]
    if len(there) > 1:
        raise HeadcountError(f"{where}: the {role} may be column {' or '.join(map(repr, there))}; name it with {role}=")
    return there[0] if there else None


def joined(
    table: pa.Table, where: str, digest: str, roles: Named, key: str, asked: Asked, names: Sequence[str]
) -> Said:
    code, found = texts(table.column(key))
    blank = asked.bad.rows(code < 0, lambda r: f"{where} row {r + 1} names no bag (column {key!r} is empty)")
    place = {name: b for b, name in enumerate(names)}
    to = np.array([place.get(name, -1) for name in found] + [-1])
    lost = (to[code] < 0) & ~blank
    asked.bad.rows(lost, lambda r: f"{where} row {r + 1} labels bag {found[code[r]]!r}, and there is no such bag")
    bag = to[code]
    said = by_rows(table, roles, bag, names, where, asked.bad) or Said()
    group = None
    if roles.group:
        group = groups(table.column(roles.group), bag, names, where, roles.group)
    return Said(said.values, said.code, said.votes, group, f"{said.source} of {where}", digest)


def groups(column: pa.ChunkedArray, bag: np.ndarray, names: Sequence[str], where: str, called: str) -> tuple[str, ...]:
    """(B,) the group of each bag; a bag that says none is its own group."""
    code, values = texts(column, f"column {called!r} of {where}")
    first, wrong = firsts(bag, code, len(names))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        both = f"{values[first[bag[row]]]!r} and {values[code[row]]!r}"
        raise HeadcountError(f"{where} row {row + 1}: bag {names[bag[row]]!r} stands in two groups ({called}), {both}")
    return tuple(values[k] if k >= 0 else f"only {names[b]}" for b, k in enumerate(first.tolist()))


def _in_order(given: Any, asked: Asked, names: Sequence[str]) -> Said:
    """Labels (B,) or votes (B, C) in the order of the bags."""
    given = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    try:
        y = np.asarray(given if isinstance(given, np.ndarray) else list(given))
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"labels must be one per bag, or votes (bags, classes): {e}") from None
    if y.ndim not in (1, 2) or len(y) != len(names):
        raise HeadcountError(f"labels of shape {y.shape} for {len(names)} bags; give one per bag, in their order")
    digest = _digest([y.shape, y.tolist()])
    if y.ndim == 2:
        values = asked.classes or tuple(map(str, range(y.shape[1])))
        if y.dtype.kind not in "iufb" or y.shape[1] != len(values):
            raise HeadcountError(
                f"votes are {y.dtype} of shape {y.shape}; give a number for each of {len(values)} classes"
            )
        table = pa.table({v: y[:, k].astype(float) for k, v in enumerate(values)})
        return Said(values, votes=votes_of(table, values, "labels", asked.bad), source="votes given", digest=digest)
    words = [plain(v) for v in y.tolist()]
    if y.dtype.kind in "iu" and asked.classes and not {w for w in words if w and w != "-1"} <= set(asked.classes):
        words = [_numbered(int(v), asked.classes, b) for b, v in enumerate(y.tolist())]
    elif y.dtype.kind in "iu" and asked.classes:
        words = [None if w == "-1" and w not in asked.classes else w for w in words]
    values = tuple(dict.fromkeys(w for w in words if w is not None))
    code = np.array([-1 if w is None else values.index(w) for w in words])
    return Said(values, code=code, source="labels given", digest=digest)


def _numbered(v: int, classes: Sequence[str], bag: int) -> str | None:
    if not -1 <= v < len(classes):
        raise HeadcountError(
            f"label {v} of bag {bag + 1} is neither a class name nor a class number (0 to {len(classes) - 1})"
        )
    return None if v < 0 else classes[v]


def _loaded(path: Path) -> np.ndarray:
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise HeadcountError(f"cannot read the labels {path}: {e}") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "backslashreplace")).hexdigest()


# -- targets ----------------------------------------------------------------------------------------------------------------


def targets(
    said: Said, asked: Asked, known: Sequence[str], where: str
) -> tuple[np.ndarray, tuple[str, ...], np.ndarray]:
    """(B, C) targets, the classes, and (B,) which bags a tie drops."""
    ties = _tied_words(said, asked.classes)
    plainly = [v for v in said.values if v not in ties]
    own = _sorted(plainly) if said.votes is None else said.values  # columns of votes keep the order they were named in
    classes = asked.classes or tuple(dict.fromkeys([*own, *sorted(known), *asked.uncounted]))
    place = {c: k for k, c in enumerate(classes)}
    if len(classes) < 2:
        what = f"only class {classes[0]!r}" if classes else "no labels"
        raise HeadcountError(f"{where}: {what} in {said.source}; a majority needs at least two classes")
    for name in asked.uncounted:
        if name not in place:
            raise HeadcountError(f"no class {name!r} to leave out of the count; there are {', '.join(classes)}")
    wins = np.zeros((len(said.values), len(classes)))  # what each label, or column of votes, says of the classes
    for k, value in enumerate(said.values):
        for part in ties.get(value, (value,)):
            if part in place:
                wins[k, place[part]] = 1
            elif asked.need_labels and (said.code is None or k in said.code):
                which = "votes" if said.code is None else f"label of bag {int(np.flatnonzero(said.code == k)[0]) + 1}"
                raise HeadcountError(f"{where}: {part!r} ({which}) is none of the classes {', '.join(classes)}")
    rows = np.vstack([wins, np.zeros(len(classes))])  # code -1, unlabelled, reads the last row
    target = rows[said.code] if said.votes is None else said.votes @ wins
    top = target.max(1, keepdims=True)
    tied = (top[:, 0] > 0) & ((target == top).sum(1) > 1)
    if asked.ties == "lowest":
        target[tied] = np.eye(len(classes))[target[tied].argmax(1)]
    return target, classes, tied if asked.ties == "drop" else np.zeros(len(target), bool)


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

"""Labels that come apart from the instances: a second table, a dict, or an array in the order of the bags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.data.columns import USUAL, Named
from headcount.data.read.found import Asked, Said, firsts, some
from headcount.data.read.tables import SUFFIXES, is_frame, open_table, suffix
from headcount.data.read.targets import by_rows, classes_among, votes_of
from headcount.data.values import plain, texts
from headcount.errors import HeadcountError


def beside(
    asked: Asked, names: Sequence[str], bag_column: str | None, labels: Any = None, empty: Sequence[str] = ()
) -> Said:
    """Labels that come apart from the instances, for the bags called ``names``; ``empty`` are bags with nothing in them."""
    given = asked.labels if labels is None else labels
    if isinstance(given, (str, Path)) and suffix(Path(given)) == ".npy":
        given = _loaded(Path(given))
    if isinstance(given, (str, Path)) or is_frame(given):
        table, where, digest, roles, key = label_table(given, asked, bag_column)
        return joined(table, where, digest, roles, key, asked, names, empty)
    given = _by_index(given, names)
    if isinstance(given, Mapping):
        table = pa.table({"bag": list(map(plain, given)), "label": list(map(plain, given.values()))})
        roles = Named(bag="bag", label="label")
        return joined(table, "labels", _digest(table.to_pydict()), roles, "bag", asked, names, empty)
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
    named = _remembered(asked, columns)
    own = {f: getattr(named, f) for f in ("bag", "label", "group") if getattr(named, f) in columns}
    votes = named.votes
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


def _remembered(asked: Asked, columns: Sequence[str]) -> Named:
    """The user's word; where it says nothing, the model's, as far as this table has such columns."""
    model = Named(**asked.learned.named) if asked.learned else Named()
    votes = model.votes if set(model.votes) <= {*columns} else ()
    model = Named(**{f: v for f in ("bag", "label", "group") if (v := getattr(model, f)) in columns}, votes=votes)
    if asked.named.label or asked.named.votes:  # one of them was named: the other is not meant
        model = replace(model, label=None, votes=())
    return asked.named.over(model)


def usual(role: str, columns: Sequence[str], where: str) -> str | None:
    there = [c for c in columns if c.strip().lower().replace(" ", "_").replace("-", "_") in USUAL[role]]
    if len(there) > 1:
        raise HeadcountError(f"{where}: the {role} may be column {' or '.join(map(repr, there))}; name it with {role}=")
    return there[0] if there else None


def joined(
    table: pa.Table,
    where: str,
    digest: str,
    roles: Named,
    key: str,
    asked: Asked,
    names: Sequence[str],
    empty: Sequence[str] = (),
) -> Said:
    """What a label table says of the bags. Rows of other bags are a mistake, unless nobody needs the labels."""
    code, found = texts(table.column(key))
    blank = asked.bad.rows(code < 0, lambda r: f"{where} row {r + 1} names no bag (column {key!r} is empty)")
    place = {name: b for b, name in enumerate(names)}
    to = np.array([place.get(name, -1) for name in found] + [-1])
    lost = (to[code] < 0) & ~blank & asked.need_labels
    bare = dict.fromkeys(empty, "whose folder holds no pictures; fill it or take the row out")
    asked.bad.rows(
        lost,
        lambda r: (
            f"{where} row {r + 1} labels bag {found[code[r]]!r}, {bare.get(found[code[r]], 'and there is no such bag')}"
        ),
    )
    bag = to[code]
    said = by_rows(table, roles, bag, names, where, asked) or Said()
    group = None
    if roles.group:
        group = groups(table.column(roles.group), bag, names, where, roles.group)
    return replace(said, group=group, source=f"{said.source} of {where}", digest=digest)


def groups(column: pa.ChunkedArray, bag: np.ndarray, names: Sequence[str], where: str, called: str) -> tuple[str, ...]:
    """(B,) the group of each bag; a bag that says none is its own group."""
    code, values = texts(column, f"column {called!r} of {where}")
    first, wrong = firsts(bag, code, len(names))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        both = f"{values[first[bag[row]]]!r} and {values[code[row]]!r}"
        raise HeadcountError(
            f"{where} row {row + 1}: bag {names[bag[row]]!r} stands in two groups ({called}), {both}; "
            "a bag is of one group: make it two bags, or name another column"
        )
    return tuple(values[k] if k >= 0 else f"only {names[b]}" for b, k in enumerate(first.tolist()))


def _by_index(given: Any, names: Sequence[str]) -> Any:
    """A Series is a dict if its index names the bags, else a list; anything else is what it is."""
    if isinstance(given, Mapping) or callable(getattr(given, "index", len)) or not hasattr(given, "items"):
        return given
    held = {plain(k): v for k, v in given.items()}
    counted = list(held) == [str(i) for i in range(len(names))]
    return list(held.values()) if counted and set(held) != set(names) else held


def _in_order(given: Any, asked: Asked, names: Sequence[str]) -> Said:
    """Labels (B,) or votes (B, C) in the order of the bags."""
    given = given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given
    try:
        y = np.asarray(given if isinstance(given, np.ndarray) else list(given))
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"labels must be one per bag, or votes (bags, classes): {e}") from None
    if y.ndim not in (1, 2) or len(y) != len(names) or y.shape[-1] == 0:
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
    words, notes = [plain(v) for v in y.tolist()], ()
    if y.dtype.kind in "iu" and asked.classes and not any(map(_whole, asked.classes)):
        words = [_numbered(int(v), asked.classes, b) for b, v in enumerate(y.tolist())]
        notes = (f"labels are numbers: 0 is {asked.classes[0]}, 1 is {asked.classes[1]}, and so on",)
    elif y.dtype.kind in "iu" and asked.classes:
        words = [None if w == "-1" and w not in asked.classes else w for w in words]
    elif not asked.classes:
        notes = _minus(words)
    number: dict[str, int] = {}
    code = np.array([-1 if w is None else number.setdefault(w, len(number)) for w in words])
    code, values, blank = classes_among(code, list(number), "labels", "bags", asked)
    return Said(tuple(values), code=code, source="labels given", digest=digest, notes=(*notes, *blank))


def _minus(words: Sequence[str | None]) -> tuple[str, ...]:
    """A line on -1 beside two or more class numbers: a class, as numbers are without names, or somebody's word for none."""
    others = {w for w in words if w is not None and w != "-1"}
    if "-1" not in words or len(others) < 2 or not all(w.isdigit() for w in others):
        return ()
    return (
        f"label -1 is taken for a class ({words.count('-1')} bags); if it means no label, name the others with classes=",
    )


def _whole(name: str) -> bool:
    """Whether a class is named by a number, so that a number names it, and not its place."""
    return name.removeprefix("-").isdigit()


def _numbered(v: int, classes: Sequence[str], bag: int) -> str | None:
    if not -1 <= v < len(classes):
        raise HeadcountError(
            f"label {v} of bag {bag + 1} is neither a class name nor a class number (0 to {len(classes) - 1})"
        )
    return None if v < 0 else classes[v]


def in_order(given: Any, names: Sequence[str]) -> bool:
    """Whether labels are one per bag in the order of the bags, rather than by the bags' names."""
    if isinstance(given, (str, Path)):
        return suffix(Path(given)) == ".npy"
    return not is_frame(given) and not isinstance(_by_index(given, names), Mapping)


def is_numpy(path: Path) -> None:
    """Refuse what is .npy or .npz by its name only: numpy takes anything else for a pickle, and says so."""
    with open(path, "rb") as f:
        head = f.read(6)
    one = path.suffix.lower() == ".npy"
    if not head.startswith(b"\x93NUMPY" if one else (b"PK\x03\x04", b"PK\x05\x06")):
        what = f"it begins with {head!r}" if head else "it is empty"
        raise HeadcountError(
            f"cannot read {path}: this is no {path.suffix} file ({what}); write it with numpy.{'save' if one else 'savez'}"
        )


def _loaded(path: Path) -> np.ndarray:
    if path.is_file():
        is_numpy(path)
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise HeadcountError(f"cannot read the labels {path}: {e}") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "backslashreplace")).hexdigest()

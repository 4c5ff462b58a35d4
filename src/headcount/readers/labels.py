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

from headcount.errors import HeadcountError
from headcount.readers.columns import COMMON_NAMES, ColumnRoles
from headcount.readers.raw_data import BagLabels, ReadOptions, first_per_bag, preview
from headcount.readers.tables import TABLE_SUFFIXES, file_suffix, is_dataframe, open_table
from headcount.readers.targets import drop_missing_classes, labels_from_rows, parse_votes
from headcount.readers.values import clean_name, factorize


def join_labels(
    options: ReadOptions, names: Sequence[str], bag_column: str | None, labels: Any = None, empty: Sequence[str] = ()
) -> BagLabels:
    """Labels that come apart from the instances, for the bags called ``names``; ``empty`` are bags with nothing in them."""
    given = options.labels if labels is None else labels
    if isinstance(given, (str, Path)) and file_suffix(Path(given)) == ".npy":
        given = _load_npy(Path(given))
    if isinstance(given, (str, Path)) or is_dataframe(given):
        table, origin, digest, roles, key = open_label_table(given, options, bag_column)
        return labels_from_table(table, origin, digest, roles, key, options, names, empty)
    given = _series_as_dict_or_list(given, names)
    if isinstance(given, Mapping):
        table = pa.table({"bag": list(map(clean_name, given)), "label": list(map(clean_name, given.values()))})
        roles = ColumnRoles(bag="bag", label="label")
        return labels_from_table(table, "labels", _digest(table.to_pydict()), roles, "bag", options, names, empty)
    return _labels_by_position(given, options, names)


def open_label_table(
    given: Any, options: ReadOptions, bag_column: str | None
) -> tuple[pa.Table, str, str, ColumnRoles, str]:
    """The table, its name, its digest, the roles in it, and the column that names the bags."""
    if isinstance(given, (str, Path)):
        if not Path(given).is_file():
            raise HeadcountError(f"no label file {given}; give a table with a bag and a label column")
        if file_suffix(Path(given)) not in TABLE_SUFFIXES:
            raise HeadcountError(f"{given}: labels come as {', '.join(TABLE_SUFFIXES)} or .npy")
    table, origin, digest = open_table(given, ColumnRoles(), options.errors, verbatim=True)
    columns = table.column_names
    for role, name in [("label", options.roles.label), *(("votes", v) for v in options.roles.votes)]:
        if name is not None and name not in columns:
            raise HeadcountError(f"{origin} has no column {name!r} ({role}); it has {preview(columns, 12)}")
    named = _merge_roles(options, columns)
    assigned = {f: getattr(named, f) for f in ("bag", "label", "group") if getattr(named, f) in columns}
    votes = named.votes
    rest = [c for c in columns if c not in assigned.values() and c not in votes]
    label = assigned.get("label") or find_common_name("label", rest, origin)
    group = assigned.get("group") or find_common_name("group", [c for c in rest if c != assigned.get("bag")], origin)
    key = (
        assigned.get("bag") or (bag_column if bag_column in columns else None) or find_common_name("bag", rest, origin)
    )
    if key is None:  # a table of two columns needs no names for them
        others = [c for c in rest if c not in (label, group)]
        if len(others) != 1:
            raise HeadcountError(
                f"{origin}: which column names the bags? It has {preview(columns, 12)}; name it with bag="
            )
        key = others[0]
    if label is None and not votes:
        raise HeadcountError(
            f"{origin} has no label column; it has {preview(columns, 12)}; name it with label= or votes="
        )
    return (
        table,
        origin,
        digest,
        ColumnRoles(bag=key, label=label, votes=votes, group=group if group != key else None),
        key,
    )


def _merge_roles(options: ReadOptions, columns: Sequence[str]) -> ColumnRoles:
    """The user's word; where it says nothing, the model's, as far as this table has such columns."""
    model = ColumnRoles(**options.preprocessor.roles) if options.preprocessor else ColumnRoles()
    votes = model.votes if set(model.votes) <= {*columns} else ()
    model = ColumnRoles(**{f: v for f in ("bag", "label", "group") if (v := getattr(model, f)) in columns}, votes=votes)
    if options.roles.label or options.roles.votes:  # one of them was named: the other is not meant
        model = replace(model, label=None, votes=())
    return options.roles.filled_from(model)


def find_common_name(role: str, columns: Sequence[str], origin: str) -> str | None:
    candidates = [c for c in columns if c.strip().lower().replace(" ", "_").replace("-", "_") in COMMON_NAMES[role]]
    if len(candidates) > 1:
        raise HeadcountError(
            f"{origin}: the {role} may be column {' or '.join(map(repr, candidates))}; name it with {role}="
        )
    return candidates[0] if candidates else None


def labels_from_table(
    table: pa.Table,
    origin: str,
    digest: str,
    roles: ColumnRoles,
    key: str,
    options: ReadOptions,
    names: Sequence[str],
    empty: Sequence[str] = (),
) -> BagLabels:
    """What a label table says of the bags. Rows of other bags are a mistake, unless nobody needs the labels."""
    code, values = factorize(table.column(key))
    blank = options.errors.report_rows(
        code < 0, lambda r: f"{origin} row {r + 1} names no bag (column {key!r} is empty)"
    )
    place = {name: b for b, name in enumerate(names)}
    to = np.array([place.get(name, -1) for name in values] + [-1])
    lost = (to[code] < 0) & ~blank & options.need_labels
    bare = dict.fromkeys(empty, "whose folder holds no pictures; fill it or take the row out")
    options.errors.report_rows(
        lost,
        lambda r: (
            f"{origin} row {r + 1} labels bag {values[code[r]]!r}, {bare.get(values[code[r]], 'and there is no such bag')}"
        ),
    )
    bag = to[code]
    bag_labels = labels_from_rows(table, roles, bag, names, origin, options) or BagLabels()
    group = None
    if roles.group:
        group = groups_per_bag(table.column(roles.group), bag, names, origin, roles.group)
    return replace(bag_labels, group=group, source=f"{bag_labels.source} of {origin}", digest=digest)


def groups_per_bag(
    column: pa.ChunkedArray, bag: np.ndarray, names: Sequence[str], origin: str, column_name: str
) -> tuple[str, ...]:
    """(B,) the group of each bag; a bag that says none is its own group."""
    code, values = factorize(column, f"column {column_name!r} of {origin}")
    first, wrong = first_per_bag(bag, code, len(names))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        both = f"{values[first[bag[row]]]!r} and {values[code[row]]!r}"
        raise HeadcountError(
            f"{origin} row {row + 1}: bag {names[bag[row]]!r} stands in two groups ({column_name}), {both}; "
            "a bag is of one group: make it two bags, or name another column"
        )
    return tuple(values[k] if k >= 0 else f"only {names[b]}" for b, k in enumerate(first.tolist()))


def _series_as_dict_or_list(given: Any, names: Sequence[str]) -> Any:
    """A Series is a dict if its index names the bags, else a list; anything else is what it is."""
    if isinstance(given, Mapping) or callable(getattr(given, "index", len)) or not hasattr(given, "items"):
        return given
    by_name = {clean_name(k): v for k, v in given.items()}
    counted = list(by_name) == [str(i) for i in range(len(names))]
    return list(by_name.values()) if counted and set(by_name) != set(names) else by_name


def _labels_by_position(given: Any, options: ReadOptions, names: Sequence[str]) -> BagLabels:
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
        values = options.classes or tuple(map(str, range(y.shape[1])))
        if y.dtype.kind not in "iufb" or y.shape[1] != len(values):
            raise HeadcountError(
                f"votes are {y.dtype} of shape {y.shape}; give a number for each of {len(values)} classes"
            )
        table = pa.table({v: y[:, k].astype(float) for k, v in enumerate(values)})
        return BagLabels(
            values, votes=parse_votes(table, values, "labels", options.errors), source="votes given", digest=digest
        )
    words, notes = [clean_name(v) for v in y.tolist()], ()
    if y.dtype.kind in "iu" and options.classes and not any(map(_is_integer, options.classes)):
        words = [_class_by_number(int(v), options.classes, b) for b, v in enumerate(y.tolist())]
        notes = (f"labels are numbers: 0 is {options.classes[0]}, 1 is {options.classes[1]}, and so on",)
    elif y.dtype.kind in "iu" and options.classes:
        words = [None if w == "-1" and w not in options.classes else w for w in words]
    elif not options.classes:
        notes = _note_minus_one(words)
    number: dict[str, int] = {}
    code = np.array([-1 if w is None else number.setdefault(w, len(number)) for w in words])
    code, values, blank = drop_missing_classes(code, list(number), "labels", "bags", options)
    return BagLabels(tuple(values), codes=code, source="labels given", digest=digest, notes=(*notes, *blank))


def _note_minus_one(words: Sequence[str | None]) -> tuple[str, ...]:
    """A line on -1 beside two or more class numbers: a class, as numbers are without names, or somebody's word for none."""
    others = {w for w in words if w is not None and w != "-1"}
    if "-1" not in words or len(others) < 2 or not all(w.isdigit() for w in others):
        return ()
    return (
        f"label -1 is taken for a class ({words.count('-1')} bags); if it means no label, name the others with classes=",
    )


def _is_integer(name: str) -> bool:
    """Whether a class is named by a number, so that a number names it, and not its place."""
    return name.removeprefix("-").isdigit()


def _class_by_number(v: int, classes: Sequence[str], bag: int) -> str | None:
    if not -1 <= v < len(classes):
        raise HeadcountError(
            f"label {v} of bag {bag + 1} is neither a class name nor a class number (0 to {len(classes) - 1})"
        )
    return None if v < 0 else classes[v]


def are_positional(given: Any, names: Sequence[str]) -> bool:
    """Whether labels are one per bag in the order of the bags, rather than by the bags' names."""
    if isinstance(given, (str, Path)):
        return file_suffix(Path(given)) == ".npy"
    return not is_dataframe(given) and not isinstance(_series_as_dict_or_list(given, names), Mapping)


def check_numpy_magic(path: Path) -> None:
    """Refuse what is .npy or .npz by its name only: numpy takes anything else for a pickle, and says so."""
    with open(path, "rb") as f:
        head = f.read(6)
    is_npy = path.suffix.lower() == ".npy"
    if not head.startswith(b"\x93NUMPY" if is_npy else (b"PK\x03\x04", b"PK\x05\x06")):
        what = f"it begins with {head!r}" if head else "it is empty"
        raise HeadcountError(
            f"cannot read {path}: this is no {path.suffix} file ({what}); write it with numpy.{'save' if is_npy else 'savez'}"
        )


def _load_npy(path: Path) -> np.ndarray:
    if path.is_file():
        check_numpy_magic(path)
    try:
        return np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as e:
        raise HeadcountError(f"cannot read the labels {path}: {e}") from None


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "backslashreplace")).hexdigest()

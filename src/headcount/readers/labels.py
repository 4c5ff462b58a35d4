"""Labels that are separate from the instances: a second table, a dict, or an array in the order of the bags."""

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
from headcount.io import load_npy
from headcount.readers.columns import ColumnRoles, find_common_name
from headcount.readers.raw_data import BagLabels, ReadOptions, first_per_bag
from headcount.readers.tables import TABLE_SUFFIXES, SourceTable, file_suffix, is_dataframe, open_table
from headcount.readers.targets import drop_missing_classes, labels_from_rows, parse_votes
from headcount.readers.values import clean_name, factorize


def join_labels(
    labels: Any, options: ReadOptions, names: Sequence[str], bag_column: str | None = None, empty: Sequence[str] = ()
) -> BagLabels:
    """The labels of the bags ``names``; ``empty`` are further bags, without instances."""
    if isinstance(labels, (str, Path)) and file_suffix(Path(labels)) == ".npy":
        labels = load_npy(Path(labels))
    if isinstance(labels, (str, Path)) or is_dataframe(labels):
        return labels_from_table(open_label_table(labels, options, bag_column), options, names, empty)
    labels = _series_as_dict_or_list(labels, names)
    if not isinstance(labels, Mapping):
        return _labels_by_position(labels, options, names)
    table = pa.table({"bag": list(map(clean_name, labels)), "label": list(map(clean_name, labels.values()))})
    source = SourceTable(table, "labels", _digest(table.to_pydict()), ColumnRoles(bag="bag", label="label"))
    return labels_from_table(source, options, names, empty)


def open_label_table(labels: Any, options: ReadOptions, bag_column: str | None) -> SourceTable:
    """Open a table of labels and recognise its columns; ``bag_column`` names the bags in the table of instances."""
    if isinstance(labels, (str, Path)):
        if not Path(labels).is_file():
            raise HeadcountError(f"no label file {labels}; give a table with a bag and a label column")
        if file_suffix(Path(labels)) not in TABLE_SUFFIXES:
            raise HeadcountError(f"{labels}: labels come as {', '.join(TABLE_SUFFIXES)} or .npy")
    source = open_table(labels, errors=options.errors, verbatim=True)
    origin, columns = source.origin, source.table.column_names
    for role, name in [("label", options.roles.label), *(("votes", v) for v in options.roles.votes)]:
        if name is not None and name not in columns:
            raise HeadcountError(f"{origin} has no column {name!r} ({role}); it has {source.columns}")
    roles = _expected_roles(options, columns)
    named = {role: name for role in ("bag", "label", "group") if (name := getattr(roles, role)) in columns}
    rest = [c for c in columns if c not in named.values() and c not in roles.votes]
    label = named.get("label") or find_common_name("label", rest, origin)
    group = named.get("group") or find_common_name("group", rest, origin)
    bag = named.get("bag") or (bag_column if bag_column in columns else None) or find_common_name("bag", rest, origin)
    if bag is None:  # of two columns, the one that is not the label
        others = [c for c in rest if c not in (label, group)]
        if len(others) != 1:
            raise HeadcountError(f"{origin}: which column names the bags? It has {source.columns}; name it with bag=")
        bag = others[0]
    if label is None and not roles.votes:
        raise HeadcountError(f"{origin} has no label column; it has {source.columns}; name it with label= or votes=")
    group = group if group != bag else None
    return replace(source, roles=ColumnRoles(bag=bag, label=label, votes=roles.votes, group=group))


def _expected_roles(options: ReadOptions, columns: Sequence[str]) -> ColumnRoles:
    """Roles that the user named; where there are none, those of the model, as far as this table has such columns."""
    model = options.preprocessor.roles if options.preprocessor else ColumnRoles()
    named = {role: name for role in ("bag", "label", "group") if (name := getattr(model, role)) in columns}
    model = ColumnRoles(**named, votes=model.votes if set(model.votes) <= {*columns} else ())
    if options.roles.label or options.roles.votes:  # one of them replaces both
        model = replace(model, label=None, votes=())
    return options.roles.filled_from(model)


def labels_from_table(source: SourceTable, options: ReadOptions, names: Sequence[str], empty: Sequence[str] = ()) -> BagLabels:
    """Match the rows of a label table with the bags. Rows of other bags are an error if labels are needed."""
    key = source.roles.bag or ""
    codes, values = factorize(source.table.column(key))
    unnamed = options.errors.report_rows(codes < 0, lambda r: f"{source.row(r)} names no bag (column {key!r} is empty)")
    position = {name: b for b, name in enumerate(names)}
    bag = np.array([position.get(name, -1) for name in values] + [-1])[codes]
    problem = dict.fromkeys(empty, "whose folder holds no images; fill it or take the row out")

    def unknown_bag(r: int) -> str:
        name = values[codes[r]]
        return f"{source.row(r)} labels bag {name!r}, {problem.get(name, 'and there is no such bag')}"

    options.errors.report_rows((bag < 0) & ~unnamed & options.need_labels, unknown_bag)
    labels = labels_from_rows(source, bag, names, options) or BagLabels()
    group = groups_per_bag(source, bag, names) if source.roles.group else None
    return replace(labels, group=group, source=f"{labels.source} of {source.origin}", digest=source.digest)


def groups_per_bag(source: SourceTable, bag: np.ndarray, names: Sequence[str]) -> tuple[str, ...]:
    """(B,) the group of each bag; a bag without one is a group by itself."""
    column = source.roles.group or ""
    codes, values = source.factorize(column)
    first, differs = first_per_bag(bag, codes, len(names))
    if differs.any():
        row = int(np.flatnonzero(differs)[0])
        both = f"{values[first[bag[row]]]!r} and {values[codes[row]]!r}"
        raise HeadcountError(
            f"{source.row(row)}: bag {names[bag[row]]!r} is in two groups ({column}), {both}; "
            "a bag is in one group: split the bag, or name another column"
        )
    return tuple(values[k] if k >= 0 else f"only {names[b]}" for b, k in enumerate(first.tolist()))


def are_positional(labels: Any, names: Sequence[str]) -> bool:
    """Whether labels are one per bag in the order of the bags, rather than by the names of the bags."""
    if isinstance(labels, (str, Path)):
        return file_suffix(Path(labels)) == ".npy"
    return not is_dataframe(labels) and not isinstance(_series_as_dict_or_list(labels, names), Mapping)


def _series_as_dict_or_list(labels: Any, names: Sequence[str]) -> Any:
    """A Series as a dict if its index names the bags, else as a list; anything else as it is."""
    if isinstance(labels, Mapping) or callable(getattr(labels, "index", len)) or not hasattr(labels, "items"):
        return labels
    by_name = {clean_name(k): v for k, v in labels.items()}
    is_range = list(by_name) == [str(i) for i in range(len(names))]
    return list(by_name.values()) if is_range and set(by_name) != set(names) else by_name


def _labels_by_position(labels: Any, options: ReadOptions, names: Sequence[str]) -> BagLabels:
    """Labels (B,) or votes (B, C) in the order of the bags."""
    labels = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else labels
    try:
        y = np.asarray(labels if isinstance(labels, np.ndarray) else list(labels))
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"labels must be one per bag, or votes (bags, classes): {e}") from None
    if y.ndim not in (1, 2) or len(y) != len(names) or y.shape[-1] == 0:
        raise HeadcountError(f"labels of shape {y.shape} for {len(names)} bags; give one per bag, in their order")
    digest, classes = _digest([y.shape, y.tolist()]), options.classes
    if y.ndim == 2:
        values = classes or tuple(map(str, range(y.shape[1])))
        if y.dtype.kind not in "iufb" or y.shape[1] != len(values):
            want = f"give a number for each of {len(values)} classes"
            raise HeadcountError(f"votes are {y.dtype} of shape {y.shape}; {want}")
        table = pa.table({v: y[:, k].astype(float) for k, v in enumerate(values)})
        votes = parse_votes(SourceTable(table, "labels", digest), values, options.errors)
        return BagLabels(values, votes=votes, source="votes given", digest=digest)
    words, notes = [clean_name(v) for v in y.tolist()], ()
    if y.dtype.kind in "iu" and classes and not any(name.removeprefix("-").isdigit() for name in classes):
        words = [_class_by_number(int(v), classes, b) for b, v in enumerate(y.tolist())]
        notes = (f"labels are numbers: 0 is {classes[0]}, 1 is {classes[1]}, and so on",)
    elif y.dtype.kind in "iu" and classes:
        words = [None if w == "-1" and w not in classes else w for w in words]
    elif not classes:
        notes = _note_minus_one(words)
    code_of: dict[str, int] = {}
    codes = np.array([-1 if w is None else code_of.setdefault(w, len(code_of)) for w in words])
    codes, values, missing = drop_missing_classes(codes, list(code_of), "labels", "bags", options)
    return BagLabels(tuple(values), codes=codes, source="labels given", digest=digest, notes=(*notes, *missing))


def _note_minus_one(words: Sequence[str | None]) -> tuple[str, ...]:
    """A line on -1 beside two or more class numbers, which may mean a class, or no label."""
    others = {w for w in words if w is not None and w != "-1"}
    if "-1" not in words or len(others) < 2 or not all(w.isdigit() for w in others):
        return ()
    count = words.count("-1")
    return (f"label -1 is taken for a class ({count} bags); if it means no label, name the others with classes=",)


def _class_by_number(v: int, classes: Sequence[str], bag: int) -> str | None:
    if not -1 <= v < len(classes):
        numbers = f"0 to {len(classes) - 1}"
        raise HeadcountError(f"label {v} of bag {bag + 1} is neither a class name nor a class number ({numbers})")
    return None if v < 0 else classes[v]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "backslashreplace")).hexdigest()

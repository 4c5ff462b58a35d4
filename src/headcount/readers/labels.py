"""The labels or votes of bags: in the rows of a table, in a second table, a dict or an array; and one target per bag from them."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.errors import HeadcountError
from headcount.loading import file_mode, load_npy
from headcount.readers.columns import Codes, ColumnRoles, clean_name, drop_values, factorize, find_common_name, preview
from headcount.readers.dataset import BagLabels, ReadOptions
from headcount.readers.tables import MISSING_VALUES, TABLE_SUFFIXES, SourceTable, file_suffix, is_dataframe, open_table


def join_labels(
    labels: Any, options: ReadOptions, names: Sequence[str], bag_column: str = "", bag: Any = None, empty: Sequence[str] = ()
) -> BagLabels:
    """The labels of the bags ``names`` from a second table, a dict, or an array with one per bag, or per row if ``bag`` (n,) is
    that of each row; ``empty`` are further bags, without instances. None: no bag has a label."""
    if labels is None:
        return BagLabels(codes=np.full(len(names), -1))
    if isinstance(labels, (str, Path)) and file_suffix(Path(labels)) == ".npy":
        labels = load_npy(Path(labels))
    if isinstance(labels, (str, Path)) or is_dataframe(labels):
        return labels_from_table(open_label_table(labels, options, bag_column), options, names, empty)
    if (pairs := _by_name(labels, names)) is None:
        return _labels_by_position(labels, options, names, bag)
    keys, values = pairs
    votes = _vote_matrix(values)
    columns, roles = _label_columns(list(map(clean_name, values)) if votes is None else votes, options)
    table = pa.table({"the bag": keys, **columns})
    source = SourceTable(table, "labels", _digest(table.to_pydict()), replace(roles, bag="the bag"))
    return labels_from_table(source, options, names, empty)


def _label_columns(labels: Any, options: ReadOptions) -> tuple[dict[str, Any], ColumnRoles]:
    """Labels as a list of names, or votes (n, C), as the columns of a table, and the roles of these."""
    if not isinstance(labels, np.ndarray):
        return {"labels": labels}, ColumnRoles(label="labels")
    classes = options.classes or tuple(map(str, range(labels.shape[1])))
    if labels.dtype.kind not in "iufb" or labels.shape[1] != len(classes):
        got = f"votes are {labels.dtype} of shape {labels.shape}"
        raise HeadcountError(f"{got}; give a number for each of {len(classes)} classes")
    return dict(zip(classes, labels.T.astype(float), strict=True)), ColumnRoles(votes=classes)


def open_label_table(labels: Any, options: ReadOptions, bag_column: str) -> SourceTable:
    """Open a table of labels and recognise its columns; ``bag_column`` names the bags in the table of instances."""
    if isinstance(labels, (str, Path)):
        if not S_ISREG(file_mode(Path(labels))):
            raise HeadcountError(f"no label file {labels}; give a table with a bag and a label column")
        if file_suffix(Path(labels)) not in TABLE_SUFFIXES:
            raise HeadcountError(f"{labels}: labels come as {', '.join(TABLE_SUFFIXES)} or .npy")
    source = open_table(labels, errors=options.errors, verbatim=True)
    origin, columns = source.origin, source.table.column_names
    for role, name in options.roles.assigned_columns(["votes"]):
        if role in ("label", "votes") and name not in columns:
            raise HeadcountError(f"{origin} has no column {name!r} ({role}); it has {source.columns}")
    user, model = options.roles, options.preprocessor.roles if options.preprocessor else ColumnRoles()
    if user.label or user.votes:  # one of them replaces both
        model = replace(model, label=None, votes=())
    votes = user.votes or (model.votes if {*model.votes} <= {*columns} else ())
    expected = {role: getattr(user, role) or getattr(model, role) for role in ("bag", "label", "group")}
    named = {role: name for role, name in expected.items() if name in columns}
    rest = [c for c in columns if c not in (*named.values(), *votes)]
    label = named.get("label") or find_common_name("label", rest, origin)
    group = named.get("group") or find_common_name("group", rest, origin)
    bag = named.get("bag") or (bag_column if bag_column in columns else None) or find_common_name("bag", rest, origin)
    others = [c for c in rest if c not in (label, group)]  # of two columns, the one that is not the label
    bag = bag or next((c for c in others if c.startswith("__index_level_")), None)
    if bag is None and len(others) != 1:
        raise HeadcountError(f"{origin}: which column names the bags? It has {source.columns}; name it with bag=")
    bag = bag or others[0]
    if label is None and not votes and not (votes := _probability_columns(source, [c for c in others if c != bag])):
        raise HeadcountError(f"{origin} has no label column; it has {source.columns}; name it with label= or votes=")
    return replace(source, roles=ColumnRoles(bag=bag, label=label, votes=votes, group=group if group != bag else None))


def _probability_columns(source: SourceTable, columns: list[str]) -> tuple[str, ...]:
    """These columns if each row of them adds up to one, or is empty: the probabilities of classes."""
    numeric = all(pa.types.is_floating(source.table.column(c).type) for c in columns)
    if len(columns) < 2 or not numeric:
        return ()
    p = np.stack([source.numbers(c) for c in columns], 1)
    p = p[~np.isnan(p).all(1)]
    return tuple(columns) if len(p) and (p >= 0).all() and np.allclose(p.sum(1), 1, atol=1e-3) else ()


def labels_from_table(source: SourceTable, options: ReadOptions, names: Sequence[str], empty: Sequence[str] = ()) -> BagLabels:
    """Match the rows of a label table with the bags; rows of other bags are an error if labels are needed."""
    key = source.roles.bag or ""
    codes, values = factorize(source.table.column(key))
    unnamed = options.errors.report_rows(codes < 0, lambda r: f"{source.row(r)} names no bag (column {key!r} is empty)")
    position = {name: b for b, name in enumerate(names)}
    bag = np.array([position.get(name, -1) for name in values] + [-1])[codes]
    why = dict.fromkeys(values, "and there is no such bag")
    why |= dict.fromkeys(empty, "whose folder holds no images; fill it or take the row out")
    unknown_bag = lambda r: f"{source.row(r)} labels bag {values[codes[r]]!r}, {why[values[codes[r]]]}"  # noqa: E731
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
        problem = f"is in two groups ({column}), {values[first[bag[row]]]!r} and {values[codes[row]]!r}"
        advice = "a bag is in one group: split the bag, or name another column"
        raise HeadcountError(f"{source.row(row)}: bag {names[bag[row]]!r} {problem}; {advice}")
    return tuple(values[k] if k >= 0 else f"only {names[b]}" for b, k in enumerate(first.tolist()))


def are_positional(labels: Any, names: Sequence[str], n_rows: int) -> bool:
    """Whether labels are one per bag in the order of the bags, rather than by the names of the bags or one per row."""
    if isinstance(labels, (str, Path)):
        return file_suffix(Path(labels)) == ".npy"
    is_per_row = len(names) != n_rows and hasattr(labels, "__len__") and len(labels) == n_rows
    return not is_per_row and not is_dataframe(labels) and _by_name(labels, names) is None


def _by_name(labels: Any, names: Sequence[str]) -> tuple[list[str | None], list[Any]] | None:
    """Bags and labels of a dict, or of a Series whose index names the bags; None where labels go by position."""
    is_series = hasattr(labels, "items") and not callable(getattr(labels, "index", len))
    if not (isinstance(labels, Mapping) or is_series):
        return None
    keys, values = [clean_name(key) for key, _ in labels.items()], [value for _, value in labels.items()]
    is_range = is_series and keys == list(map(str, range(len(keys))))
    return None if is_range and {*keys} != {*names} else (keys, values)


def _vote_matrix(labels: Sequence[Any]) -> np.ndarray | None:
    """(B, C) votes or probabilities, where labels are vectors of them, NaN for a bag without."""
    width = next((len(v) for v in labels if np.ndim(v) == 1), 0)
    try:
        rows = [v if np.ndim(v) or clean_name(v) else np.full(width, np.nan) for v in labels]
        return np.array(rows, np.float64) if width else None
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"labels must be one per bag, or votes (bags, classes): {e}") from None


def _labels_by_position(labels: Any, options: ReadOptions, names: Sequence[str], bag: np.ndarray | None) -> BagLabels:
    """Labels (B,) or votes (B, C) in the order of the bags, or labels (n,) of rows."""
    labels = labels.detach().cpu().numpy() if isinstance(labels, torch.Tensor) else labels
    try:
        y = labels if isinstance(labels, np.ndarray) else list(labels)
        y = np.asarray(y if isinstance(y, np.ndarray) or (votes := _vote_matrix(y)) is None else votes)
    except (TypeError, ValueError) as e:
        raise HeadcountError(f"labels must be one per bag, or votes (bags, classes): {e}") from None
    per_row = bag is not None and y.ndim == 1 and len(y) == len(bag) != len(names)
    if y.ndim not in (1, 2) or not (per_row or len(y) == len(names)) or y.shape[-1] == 0:
        raise HeadcountError(f"labels of shape {y.shape} for {len(names)} bags; give one per bag, in their order")
    words, classes = y if y.ndim == 2 else [clean_name(v) for v in y.tolist()], options.classes
    if y.ndim == 1 and y.dtype.kind in "iu" and classes and not any(name.removeprefix("-").isdigit() for name in classes):
        if len(wrong := np.flatnonzero((y < -1) | (y >= len(classes)))):
            problem = f"label {y[wrong[0]]} of bag {wrong[0] + 1} is neither a class name nor a class number"
            raise HeadcountError(f"{problem} (0 to {len(classes) - 1})")
        words = [(*classes, None)[v] for v in y.tolist()]
        options.notes.append(f"labels are numbers: 0 is {classes[0]}, 1 is {classes[1]}, and so on")
    columns, roles = _label_columns(words, options)
    source = SourceTable(pa.table(columns), "labels", _digest([y.shape, y.tolist()]), roles)
    of_bags = labels_from_rows(source, bag if per_row else np.arange(len(names)), names, options) or BagLabels()
    kind = "votes given" if y.ndim == 2 else "labels given, one per row" if per_row else "labels given"
    return replace(of_bags, source=kind, digest=source.digest)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode("utf-8", "backslashreplace")).hexdigest()


def labels_from_rows(source: SourceTable, bag: np.ndarray, names: Sequence[str], options: ReadOptions) -> BagLabels | None:
    """Labels or votes that every row of a bag repeats; None if the table has neither."""
    roles = source.roles

    def conflicting_bags(differs: np.ndarray, what: Callable[[int], str]) -> np.ndarray:
        """(B,) bags with two labels, each reported once; where errors are skipped, they have no label."""
        bags, first = np.unique(bag[differs], return_index=True)
        for row in np.flatnonzero(differs)[np.sort(first)].tolist():
            options.errors.report(f"{source.row(row)}: bag {names[bag[row]]!r} has {what(row)}; a bag has one")
        return np.isin(np.arange(len(names)), bags)

    if roles.votes and all(name in source for name in roles.votes):
        votes = np.stack([source.numbers(name) for name in roles.votes], 1)  # (n, V)
        votes[np.isnan(votes).all(1)] = 0
        wrong = ~(np.isfinite(votes) & (votes >= 0) & (votes <= 1e15)).all(1)
        advice = "must be from 0 to 1e15; correct the row or leave it out"
        options.errors.report_rows(wrong, lambda r: f"{source.row(r)}: votes {votes[r].tolist()} {advice}")
        votes[wrong] = 0
        labelled = (bag >= 0) & (votes.sum(1) > 0)
        row = _first_row_per_bag(labelled, bag, len(names))
        differs = labelled & (votes != votes[row[bag]]).any(1)
        conflict = conflicting_bags(differs, lambda _: "two sets of votes")
        per_bag = np.where(((row >= 0) & ~conflict)[:, None], votes[row], 0.0)
        options.notes.extend([f"column {roles.label!r} is not used: the votes decide"] if roles.label in source else [])
        return BagLabels(roles.votes, votes=per_bag, source=f"votes in columns {', '.join(roles.votes)}")
    if roles.label is None or roles.label not in source:
        return None
    codes, values = drop_missing_classes(*source.factorize(roles.label), f"column {roles.label!r}", "rows", options)
    first, differs = first_per_bag(bag, codes, len(names))
    conflict = conflicting_bags(differs, lambda r: f"two labels, {values[first[bag[r]]]!r} and {values[codes[r]]!r}")
    row = _first_row_per_bag((codes >= 0) & (bag >= 0), bag, len(names))
    codes = np.where(conflict, -1, first)
    return BagLabels(tuple(values), codes, source=f"column {roles.label!r}", origin=source.origin, first_row=row)


def _first_row_per_bag(candidates: np.ndarray, bag: np.ndarray, n_bags: int) -> np.ndarray:
    """(B,) the first of the rows where ``candidates`` is true in each bag, -1 where there is none."""
    rows = np.flatnonzero(candidates)[::-1]  # assigned backwards, so that the first row remains
    first = np.full(n_bags, -1)
    first[bag[rows]] = rows
    return first


def first_per_bag(bag: np.ndarray, codes: np.ndarray, n_bags: int) -> tuple[np.ndarray, np.ndarray]:
    """(B,) the first code >= 0 in each bag (-1: none), and (n,) whether a row has another."""
    labelled = (codes >= 0) & (bag >= 0)
    first = np.append(codes, -1)[_first_row_per_bag(labelled, bag, n_bags)]
    return first, labelled & (codes != np.append(first, -1)[bag])


def drop_missing_classes(codes: np.ndarray, values: list[str], column_name: str, rows: str, options: ReadOptions) -> Codes:
    """Codes and values without NA, -1 and the like, which are missing unless a class is named so."""
    named = {*(options.classes or ()), *options.uncounted}
    missing = {*MISSING_VALUES} - named
    others = {*values} - missing - {"-1"}  # beside two or more class numbers, or classes named by the user, -1 is no label
    if "-1" not in named and (options.classes or (len(others) > 1 and all(v.isdigit() for v in others))):
        missing.add("-1")
    new_codes, kept = drop_values(codes, values, missing)
    if dropped := [v for v in values if v in missing]:
        count = int((new_codes < 0).sum() - (codes < 0).sum())
        advice = "" if options.preprocessor else "; a class of that name must be named in classes="
        options.notes.append(f"{column_name}: {preview(dropped)} in {count:,} {rows} read as missing{advice}")
    return new_codes, kept

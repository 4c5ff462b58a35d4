"""A table with one row per instance: who is in which bag, what the instances are, and everything else that is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles, FeatureSchema, is_id_column
from headcount.readers.feature_columns import select_features
from headcount.readers.images import read_images
from headcount.readers.labels import groups_per_bag, join_labels
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, first_per_bag, preview
from headcount.readers.tables import open_table
from headcount.readers.targets import labels_from_rows, parse_class_column, parse_numbers
from headcount.readers.values import as_text, dictionary_codes, factorize

MAX_WEIGHT = 1e9  # an instance of more votes than that would drown the float32 sums of its bag


def read_table(data: Any, options: ReadOptions) -> RawData:
    """CSV, TSV, Parquet or a DataFrame."""
    table, origin, digest = open_table(data, _expected_roles(options), options.errors)
    roles = _resolve_roles(table, origin, options)
    if roles.bag is None or roles.bag not in table.column_names:
        raise HeadcountError(
            f"{origin}: which column is the bag? It has {preview(table.column_names, 12)}; name it with bag="
        )
    bag, names = factorize(table.column(roles.bag), f"column {roles.bag!r} of {origin}")
    if not names:
        raise HeadcountError(f"{origin}: column {roles.bag!r} is empty, no row is in a bag")
    missing = options.errors.report_rows(
        bag < 0, lambda r: f"{origin} row {r + 1} is in no bag (column {roles.bag!r} is empty)"
    )
    wrong = missing | _duplicate_ids(table, roles, bag, origin, options)
    if roles.weight:
        weight = parse_numbers(table.column(roles.weight), roles.weight, origin)
        wrong |= check_weights(weight, roles.weight, origin, options)
    group, roles, notes = _groups(table, roles, bag, names, origin, options)
    bag_labels = _read_labels(table, roles, bag, names, origin, options)
    if options.roles.group and group is None and bag_labels.group is None:
        raise HeadcountError(f"neither {origin} nor the label file has a column {options.roles.group!r} (group)")
    raw = RawData(
        kind="table", summary="", origin=origin, schema=FeatureSchema("table"), content=None, bag=bag, names=names, labels=bag_labels,
        ids=table, digest=digest, group=group, notes=notes,
    )  # fmt: skip
    if roles.weight:
        raw.weight = np.where(wrong, 1, weight)
    for what in ("truth", "known"):
        if (name := getattr(roles, what)) is not None:
            code, values, more = parse_class_column(table, name, origin, options)
            setattr(raw, what, (code, values))
            raw.notes += more
    if roles.x and roles.y:
        raw.coords = np.stack([parse_numbers(table.column(n), n, origin) for n in (roles.x, roles.y)], 1)
        lost = np.asarray(~np.isfinite(raw.coords).all(1))
        wrong |= options.errors.report_rows(
            lost, lambda r: f"{origin} row {r + 1} has no finite coordinates in {roles.x!r}, {roles.y!r}"
        )
        if options.tile:
            raw.tile_sizes = np.full(table.num_rows, float(options.tile))
    wrong |= _read_instances(table, roles, raw, data, options)
    raw.bag = np.where(wrong, -1, bag)
    raw.notes = [*_describe_roles(roles), *raw.notes]
    return raw


def _expected_roles(options: ReadOptions) -> ColumnRoles:
    """What is known of the columns before they are read: the user's word, then the model's."""
    model = options.preprocessor
    named = options.roles.filled_from(ColumnRoles(**model.roles)) if model else options.roles
    if model and model.fields:
        named = replace(named, categories=tuple(f.name for f in model.fields if f.kind == "category"), features=())
    return named


def _resolve_roles(table: pa.Table, origin: str, options: ReadOptions) -> ColumnRoles:
    names, user_roles = table.column_names, options.roles
    elsewhere = [
        n for n in (user_roles.label, user_roles.group, *user_roles.votes) if n and options.labels is not None
    ]  # in the label file
    if options.preprocessor is None:
        return user_roles.resolve(names, origin, elsewhere)
    model = {f.name for f in options.preprocessor.fields}
    expected = _expected_roles(
        options
    ).to_json()  # what only the model says need not be there: new data may well have no labels
    named = ColumnRoles(
        **{k: v for k, v in expected.items() if k == "categories" or getattr(user_roles, k) or _all_present(v, names)}
    )
    rest = [n for n in names if n not in model or n == named.text]
    unasked = () if options.need_labels else ("label", "group", "truth", "known")  # of two that may be it, neither
    return named.resolve(rest, origin, {*elsewhere, *model}, instance_kind_known=bool(model), optional_roles=unasked)


def _all_present(value: Any, names: Sequence[str]) -> bool:
    return set(value) <= set(names) if isinstance(value, (tuple, list)) else value in names


def _duplicate_ids(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, origin: str, options: ReadOptions
) -> np.ndarray:
    """(n,) rows whose id stands in their bag already."""
    if roles.id is None or roles.id not in table.column_names:
        return np.zeros(table.num_rows, bool)
    column = table.column(roles.id)
    code = dictionary_codes(column, f"column {roles.id!r} of {origin}")[
        0
    ]  # ids are many: their texts are not looked at
    many = int(code.max(initial=0)) + 1
    both = np.where((code >= 0) & (bag >= 0), bag.astype(np.int64) * many + code, -1 - np.arange(len(code)))
    order = np.argsort(both, kind="stable")
    again = np.zeros(len(code), bool)
    again[order[1:]] = both[order[1:]] == both[order[:-1]]
    return options.errors.report_rows(
        again, lambda r: f"{origin} row {r + 1}: id {column[r].as_py()!r} ({roles.id}) stands twice in its bag"
    )


def check_weights(weight: np.ndarray, name: str, origin: str, options: ReadOptions) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wrong = ~((weight >= 0) & (weight <= MAX_WEIGHT))
    return options.errors.report_rows(
        wrong,
        lambda r: f"{origin} row {r + 1}: {weight[r]} in column {name!r} is no weight; weights are 0 to {MAX_WEIGHT:g}",
    )


def _groups(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, names: Sequence[str], origin: str, options: ReadOptions
) -> tuple[tuple[str, ...] | None, ColumnRoles, list[str]]:
    """(B,) groups. A column that was only recognised, and is not one value per bag, is no group but a column like others."""
    if roles.group is None or roles.group not in table.column_names:
        return None, roles, []
    if options.roles.group is None:
        code, _ = factorize(table.column(roles.group), f"column {roles.group!r} of {origin}")
        differs = np.unique(bag[first_per_bag(bag, code, len(names))[1]])
        if 0 < len(differs) < len(names) / 10:
            raise HeadcountError(
                f"{origin}: column {roles.group!r} looks like the group, and says several in bag {names[differs[0]]!r}; "
                "mend it, or name the group with group="
            )
        if len(differs):
            note = f"column {roles.group!r} differs inside bags: taken as a feature, not as the group"
            return None, replace(roles, group=None), [note]
        if len(names) > 1 and len(np.unique(code)) == 1:
            note = f"column {roles.group!r} says the same of every bag: not taken as the group"
            return None, replace(roles, group=None), [note]
    return groups_per_bag(table.column(roles.group), bag, names, origin, roles.group), roles, []


def _read_labels(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, names: Sequence[str], origin: str, options: ReadOptions
) -> BagLabels:
    if options.labels is not None:
        return join_labels(options, names, roles.bag)
    bag_labels = labels_from_rows(table, roles, bag, names, origin, options)
    if bag_labels is None and options.requires_labels(roles.truth is not None):
        own = ", or the instances' own class with truth=" if options.truth_suffices else ""
        raise HeadcountError(
            f"{origin} has no label column ({preview(table.column_names, 12)}); name it with label= or votes={own}"
        )
    return bag_labels or BagLabels(codes=np.full(len(names), -1))


def _read_instances(table: pa.Table, roles: ColumnRoles, raw: RawData, data: Any, options: ReadOptions) -> np.ndarray:
    """Fill in what the instances are; gives (n,) rows that are bad."""
    n, origin, model = table.num_rows, raw.origin, options.preprocessor
    if model is not None and not model.fields and not (model.kind == "images" and roles.path):
        if model.kind == "features":  # they were an array: nobody knows which column was which
            raise HeadcountError(
                f"the model was fitted on arrays, and {origin} is a table; give an .npy or .npz file, or fit it on a table"
            )
        raise HeadcountError(f"the model takes {model.kind}, and {origin} is a table without pictures")
    role_columns = [
        *(name for _, name in roles.assigned_columns()),
        *roles.votes,
        *filter(is_id_column, table.column_names),
    ]
    if roles.path and (model is None or not model.fields):
        if model is None and (more := [*roles.features, *roles.categories]):
            both = f"{origin}: pictures (column {roles.path!r}) are learned from alone"
            raise HeadcountError(f"{both}, and {more[0]!r} is named in features= or categories=; leave it out")
        folder = Path(data).parent if isinstance(data, (str, Path)) else Path()
        paths = [as_text(v) for v in table.column(roles.path).to_pylist()]
        files = [folder / (p or "") for p in paths]
        called = lambda i: f"{origin} row {i + 1}: {paths[i] or 'no file'}"  # noqa: E731
        raw.content, raw.address, wrong, digest = read_images(files, options, called, raw.notes)
        raw.kind, raw.all_finite, raw.digest = "images", True, raw.digest + digest
        shape = raw.content.shape[1:]
        raw.schema = FeatureSchema("images", shape=shape, roles=roles)
        raw.summary = f"read {origin}: {n:,} pictures of {shape[1]}x{shape[0]} in column {roles.path!r}"
        raw.ids = _id_columns(table, roles, [])
        return wrong
    label = None if raw.labels.codes is None else np.append(raw.labels.codes, -1)[raw.bag]
    content, raw.schema, notes, wrong = select_features(table, roles, role_columns, label, raw.bag, origin, options)
    raw.content, raw.kind = content, raw.schema.kind
    raw.summary = f"read {origin}: a table of {n:,} rows and {table.num_columns} columns"
    raw.notes += notes
    raw.ids = _id_columns(table, roles, content.column_names)
    return wrong


def _id_columns(table: pa.Table, roles: ColumnRoles, features: Sequence[str]) -> pa.Table:
    """The user's own columns: all but the features and what is said of the classes."""
    hidden = {*features, *roles.votes, roles.label, roles.truth, roles.known}
    return table.select([n for n in table.column_names if n not in hidden])


def _describe_roles(roles: ColumnRoles) -> list[str]:
    assigned = [f"{role} {name!r}" for role, name in roles.assigned_columns()] + (
        [f"votes {', '.join(roles.votes)}"] if roles.votes else []
    )
    return [f"columns: {', '.join(assigned)}"]

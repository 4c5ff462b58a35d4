"""A table with one row per instance: its bags, labels, groups, weights and coordinates, and what the instances are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles, is_id_column
from headcount.readers.feature_columns import select_features
from headcount.readers.images import read_images
from headcount.readers.labels import groups_per_bag, join_labels
from headcount.readers.preprocessing import FeatureSchema
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, first_per_bag
from headcount.readers.tables import open_table
from headcount.readers.targets import labels_from_rows, parse_class_column, parse_numbers
from headcount.readers.values import as_text, dictionary_codes, factorize, preview

MAX_WEIGHT = 1e9  # more votes would lose the others in the float32 sums of the bag


def read_table(data: Any, options: ReadOptions) -> RawData:
    """CSV, TSV, Parquet or a DataFrame."""
    table, origin, digest = open_table(data, _expected_roles(options), options.errors)
    roles = _resolve_roles(table, origin, options)
    if roles.bag is None or roles.bag not in table.column_names:
        has = preview(table.column_names, 12)
        raise HeadcountError(f"{origin}: which column is the bag? It has {has}; name it with bag=")
    bag, names = factorize(table.column(roles.bag), f"column {roles.bag!r} of {origin}")
    if not names:
        raise HeadcountError(f"{origin}: column {roles.bag!r} is empty, no row is in a bag")
    excluded = options.errors.report_rows(
        bag < 0, lambda r: f"{origin} row {r + 1} is in no bag (column {roles.bag!r} is empty)"
    )
    excluded = excluded | _duplicate_ids(table, roles, bag, origin, options)
    weight = None
    if roles.weight:
        weight = parse_numbers(table.column(roles.weight), roles.weight, origin)
        excluded |= check_weights(weight, roles.weight, origin, options)
    group, roles, notes = _groups(table, roles, bag, names, origin, options)
    labels = _labels(table, roles, bag, names, origin, options)
    if options.roles.group and group is None and labels.group is None:
        raise HeadcountError(f"neither {origin} nor the label file has a column {options.roles.group!r} (group)")
    raw = RawData(
        kind="table", summary="", origin=origin, schema=FeatureSchema("table"), content=None, bag=bag, names=names,
        labels=labels, ids=table, digest=digest, group=group, notes=[_describe_roles(roles), *notes],
        weight=None if weight is None else np.where(excluded, 1, weight),
    )  # fmt: skip
    if roles.truth:
        raw.truth = _instance_classes(table, roles.truth, raw, options)
    if roles.known:
        raw.known = _instance_classes(table, roles.known, raw, options)
    if roles.x and roles.y:
        raw.coords = np.stack([parse_numbers(table.column(n), n, origin) for n in (roles.x, roles.y)], 1)
        excluded |= options.errors.report_rows(
            np.asarray(~np.isfinite(raw.coords).all(1)),
            lambda r: f"{origin} row {r + 1} has no finite coordinates in {roles.x!r}, {roles.y!r}",
        )
        if options.tile:
            raw.tile_sizes = np.full(table.num_rows, float(options.tile))
    model = options.preprocessor
    _check_model_takes_table(model, roles, origin)
    if roles.path and (model is None or not model.fields):
        excluded |= _add_images(raw, table, roles, data, options)
    else:
        excluded |= _add_features(raw, table, roles, options)
    raw.bag = np.where(excluded, -1, bag)
    return raw


# -- roles ----------------------------------------------------------------------------------------------------------------


def _expected_roles(options: ReadOptions) -> ColumnRoles:
    """The roles known before the table is opened: those the user named, then those of the model."""
    model = options.preprocessor
    if model is None:
        return options.roles
    roles = options.roles.filled_from(model.roles)
    categories = tuple(f.name for f in model.fields if f.kind == "category")
    return replace(roles, categories=categories, features=()) if model.fields else roles


def _resolve_roles(table: pa.Table, origin: str, options: ReadOptions) -> ColumnRoles:
    names, user, model = table.column_names, options.roles, options.preprocessor
    in_label_table = [n for n in (user.label, user.group, *user.votes) if n] if options.labels is not None else []
    if model is None:
        return user.resolve(names, origin, in_label_table)
    fields = {f.name for f in model.fields}

    def is_present(value: Any) -> bool:
        return set(value) <= set(names) if isinstance(value, list) else value in names

    # a role that only the model has may be absent: new data need no labels
    expected = _expected_roles(options).to_json()
    roles = ColumnRoles(**{k: v for k, v in expected.items() if k == "categories" or getattr(user, k) or is_present(v)})
    rest = [n for n in names if n not in fields or n == roles.text]
    optional = () if options.need_labels else ("label", "group", "truth", "known")
    return roles.resolve(
        rest, origin, {*in_label_table, *fields}, instance_kind_known=bool(fields), optional_roles=optional
    )


def _describe_roles(roles: ColumnRoles) -> str:
    assigned = [f"{role} {name!r}" for role, name in roles.assigned_columns()]
    votes = [f"votes {', '.join(roles.votes)}"] if roles.votes else []
    return f"columns: {', '.join(assigned + votes)}"


# -- bags -----------------------------------------------------------------------------------------------------------------


def _duplicate_ids(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, origin: str, options: ReadOptions
) -> np.ndarray:
    """(n,) rows whose id occurs earlier in their bag."""
    if roles.id is None or roles.id not in table.column_names:
        return np.zeros(table.num_rows, bool)
    column = table.column(roles.id)
    codes, _ = dictionary_codes(column, f"column {roles.id!r} of {origin}")  # ids are many: not made into texts
    n_codes = int(codes.max(initial=0)) + 1
    unique = -1 - np.arange(len(codes))
    pairs = np.where((codes >= 0) & (bag >= 0), bag.astype(np.int64) * n_codes + codes, unique)
    order = np.argsort(pairs, kind="stable")
    repeated = np.zeros(len(codes), bool)
    repeated[order[1:]] = pairs[order[1:]] == pairs[order[:-1]]
    return options.errors.report_rows(
        repeated, lambda r: f"{origin} row {r + 1}: id {column[r].as_py()!r} ({roles.id}) occurs twice in its bag"
    )


def check_weights(weight: np.ndarray, name: str, origin: str, options: ReadOptions) -> np.ndarray:
    """(n,) rows whose weight is negative, missing or too large."""
    with np.errstate(invalid="ignore"):
        wrong = ~((weight >= 0) & (weight <= MAX_WEIGHT))
    return options.errors.report_rows(
        wrong,
        lambda r: f"{origin} row {r + 1}: {weight[r]} in column {name!r} is no weight; weights are 0 to {MAX_WEIGHT:g}",
    )


def _groups(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, names: Sequence[str], origin: str, options: ReadOptions
) -> tuple[tuple[str, ...] | None, ColumnRoles, list[str]]:
    """(B,) groups, the roles and notes. A recognised column that varies within bags, or not at all, is not the group."""
    if roles.group is None or roles.group not in table.column_names:
        return None, roles, []
    column = f"column {roles.group!r}"
    if options.roles.group is None:
        codes, _ = factorize(table.column(roles.group), f"{column} of {origin}")
        several = np.unique(bag[first_per_bag(bag, codes, len(names))[1]])
        if 0 < len(several) < len(names) / 10:
            raise HeadcountError(
                f"{origin}: {column} looks like the group, and has several values in bag {names[several[0]]!r}; "
                "correct it, or name the group with group="
            )
        if len(several):
            note = f"{column} differs inside bags: taken as a feature, not as the group"
            return None, replace(roles, group=None), [note]
        if len(names) > 1 and len(np.unique(codes)) == 1:
            note = f"{column} has one value for all bags: not taken as the group"
            return None, replace(roles, group=None), [note]
    return groups_per_bag(table.column(roles.group), bag, names, origin, roles.group), roles, []


def _labels(
    table: pa.Table, roles: ColumnRoles, bag: np.ndarray, names: Sequence[str], origin: str, options: ReadOptions
) -> BagLabels:
    if options.labels is not None:
        return join_labels(options.labels, options, names, roles.bag)
    labels = labels_from_rows(table, roles, bag, names, origin, options)
    if labels is None and options.requires_labels(roles.truth is not None):
        has = preview(table.column_names, 12)
        or_truth = ", or the class of the instances with truth=" if options.truth_suffices else ""
        raise HeadcountError(f"{origin} has no label column ({has}); name it with label= or votes={or_truth}")
    return labels or BagLabels(codes=np.full(len(names), -1))


def _instance_classes(table: pa.Table, column: str, raw: RawData, options: ReadOptions) -> tuple[np.ndarray, list[str]]:
    codes, values, notes = parse_class_column(table, column, raw.origin, options)
    raw.notes += notes
    return codes, values


# -- instances ------------------------------------------------------------------------------------------------------------


def _check_model_takes_table(model: Any, roles: ColumnRoles, origin: str) -> None:
    if model is None or model.fields or (model.kind == "images" and roles.path):
        return
    if model.kind == "features":  # columns of arrays have no names
        raise HeadcountError(
            f"the model was fitted on arrays, and {origin} is a table; give an .npy or .npz file, or fit it on a table"
        )
    raise HeadcountError(f"the model takes {model.kind}, and {origin} is a table without images; name them with path=")


def _add_images(raw: RawData, table: pa.Table, roles: ColumnRoles, data: Any, options: ReadOptions) -> np.ndarray:
    """Read the images that a column lists; returns (n,) rows that are excluded."""
    if options.preprocessor is None and (others := [*roles.features, *roles.categories]):
        raise HeadcountError(
            f"{raw.origin}: images (column {roles.path!r}) cannot be combined with other columns, and {others[0]!r} is "
            "named in features= or categories=; leave it out"
        )
    folder = Path(data).parent if isinstance(data, (str, Path)) else Path()
    paths = [as_text(v) for v in table.column(roles.path).to_pylist()]
    files = [folder / (p or "") for p in paths]
    describe = lambda i: f"{raw.origin} row {i + 1}: {paths[i] or 'no file'}"  # noqa: E731
    raw.content, raw.address, excluded, digest = read_images(files, options, describe, raw.notes)
    raw.kind, raw.all_finite, raw.digest = "images", True, raw.digest + digest
    height, width, _ = shape = raw.content.shape[1:]
    raw.schema = FeatureSchema("images", shape=shape, roles=roles)
    raw.summary = f"read {raw.origin}: {len(files):,} images of {width}x{height} in column {roles.path!r}"
    raw.ids = _id_columns(table, roles, [])
    return excluded


def _add_features(raw: RawData, table: pa.Table, roles: ColumnRoles, options: ReadOptions) -> np.ndarray:
    """Choose the columns to learn from; returns (n,) rows that are excluded."""
    names = table.column_names
    role_columns = [*(name for _, name in roles.assigned_columns()), *roles.votes, *filter(is_id_column, names)]
    label = None if raw.labels.codes is None else np.append(raw.labels.codes, -1)[raw.bag]
    raw.content, raw.schema, notes, excluded = select_features(
        table, roles, role_columns, label, raw.bag, raw.origin, options
    )
    raw.kind, raw.notes = raw.schema.kind, [*raw.notes, *notes]
    raw.summary = f"read {raw.origin}: a table of {table.num_rows:,} rows and {table.num_columns} columns"
    raw.ids = _id_columns(table, roles, raw.content.column_names)
    return excluded


def _id_columns(table: pa.Table, roles: ColumnRoles, features: Sequence[str]) -> pa.Table:
    """The user's own columns: all except features, labels and classes of instances."""
    hidden = {*features, *roles.votes, roles.label, roles.truth, roles.known}
    return table.select([n for n in table.column_names if n not in hidden])

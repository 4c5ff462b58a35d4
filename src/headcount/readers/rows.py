"""A table with one row per instance: its bags, labels, groups, weights and coordinates, and what the instances are."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.readers.columns import ColumnRoles, as_text, dictionary_codes
from headcount.readers.dataset import NO_BAGS, BagLabels, ErrorPolicy, RawData, ReadOptions
from headcount.readers.feature_columns import select_features
from headcount.readers.images import read_images
from headcount.readers.labels import drop_missing_classes, first_per_bag, groups_per_bag, join_labels, labels_from_rows
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.tables import SourceTable, open_table

MAX_WEIGHT = 1e9  # more votes would lose the others in the float32 sums of the bag


def read_table(data: Any, options: ReadOptions) -> RawData:
    source, errors = open_table(data, _expected_roles(options), options.errors), options.errors
    table, origin, roles = source.table, source.origin, _resolve_roles(source, options)
    source = replace(source, roles=roles)
    if roles.bag is not None and roles.bag in source:
        bag, names = source.factorize(roles.bag)
    elif options.bags_optional:
        bag, names = np.arange(table.num_rows), list(map(str, range(1, table.num_rows + 1)))
    else:
        raise HeadcountError(f"{origin}: which column is the bag? It has {source.columns}; name it with bag=")
    if not names:
        raise HeadcountError(f"{origin}: column {roles.bag!r} is empty, no row is in a bag")
    excluded = errors.report_rows(bag < 0, lambda r: f"{source.row(r)} is in no bag (column {roles.bag!r} is empty)")
    excluded = excluded | _duplicate_ids(source, bag, errors)
    group = _groups(source, bag, names, options)
    if group is None and roles.group in source:
        roles = replace(roles, group=None)
        source = replace(source, roles=roles)
    labels = _labels(source, bag, names, options)
    if options.roles.group and group is None and labels.group is None:
        raise HeadcountError(f"neither {origin} nor the label file has a column {options.roles.group!r} (group)")
    in_words = [f"{role} {name!r}" for role, name in roles.assigned_columns()]
    in_words += [f"votes {', '.join(roles.votes)}"] if roles.votes else []
    options.notes[:0] = [f"columns: {', '.join(in_words)}"] if in_words else []
    options.notes.extend([] if roles.bag in source else [NO_BAGS])
    raw = RawData(
        summary="", origin=origin, schema=Preprocessor("table"), content=None, bag=bag, names=names,
        labels=labels, ids=table, digest=source.digest, group=group,
    )  # fmt: skip
    if roles.weight:
        weight = source.numbers(roles.weight)
        excluded |= check_weights(weight, roles.weight, origin, errors)
        raw.weight = np.where(excluded, 1, weight)
    for key in ("truth", "known"):
        if name := getattr(roles, key):
            setattr(raw, key, drop_missing_classes(*source.factorize(name), f"column {name!r}", "rows", options))
    if roles.x and roles.y:
        raw.coords = np.stack([source.numbers(n) for n in (roles.x, roles.y)], 1)
        problem = f"has no finite coordinates in {roles.x!r}, {roles.y!r}"
        excluded |= errors.report_rows(np.asarray(~np.isfinite(raw.coords).all(1)), lambda r: f"{source.row(r)} {problem}")
        if options.tile:
            raw.tile_sizes = np.full(table.num_rows, float(options.tile))
    model = options.preprocessor
    if model is not None and not model.fields and not (model.kind == "images" and roles.path):
        if model.kind == "features":  # columns of arrays have no names
            advice = "give an .npy or .npz file, or fit it on a table"
            raise HeadcountError(f"the model was fitted on arrays, and {origin} is a table; {advice}")
        raise HeadcountError(f"the model takes {model.kind}, and {origin} is a table without images; name them with path=")
    if roles.path and (model is None or not model.fields):
        excluded |= _add_images(raw, source, data, options)
    else:
        label = None if labels.codes is None else np.append(labels.codes, -1)[bag]
        raw.content, raw.schema, unusable = select_features(source, label, bag, options)
        excluded |= unusable
        raw.digest += "".join(f.digest for f in raw.schema.fields)  # of their encoders
        raw.summary = f"read {origin}: a table of {table.num_rows:,} rows and {table.num_columns} columns"
    raw.bag = np.where(excluded, -1, bag)
    hidden = {*roles.votes, roles.label, roles.truth, roles.known, *(f.name for f in raw.schema.fields)}
    raw.ids = table.select([n for n in table.column_names if n not in hidden])  # the user's own columns
    return raw


def _expected_roles(options: ReadOptions) -> ColumnRoles:
    """The roles known before the table is opened: those the user named, then those of the model."""
    model = options.preprocessor
    if model is None:
        return options.roles
    roles = replace(model.roles, **options.roles.to_json())
    categories = tuple(f.name for f in model.fields if f.kind == "category")
    return replace(roles, categories=categories, features=()) if model.fields else roles


def _resolve_roles(source: SourceTable, options: ReadOptions) -> ColumnRoles:
    names, user, model = source.table.column_names, options.roles, options.preprocessor
    in_label_table = [n for n in (user.label, user.group, *user.votes) if n] if options.labels is not None else []
    if model is None:
        return user.resolve(names, source.origin, in_label_table)
    fields = {f.name for f in model.fields}
    # a role that only the model has may be absent: new data need no labels
    expected = _expected_roles(options).to_json()
    present = {k for k, v in expected.items() if {*(v if isinstance(v, list) else [v])} <= {*names}}
    roles = ColumnRoles(**{k: v for k, v in expected.items() if k in {*present, "categories"} or getattr(user, k)})
    rest = [n for n in names if n not in fields or n == roles.text]
    optional = () if options.need_labels else ("label", "group", "truth", "known")
    known = {*in_label_table, *fields}
    return roles.resolve(rest, source.origin, known, instance_kind_known=bool(fields), optional_roles=optional)


def _duplicate_ids(source: SourceTable, bag: np.ndarray, errors: ErrorPolicy) -> np.ndarray:
    """(n,) rows whose id occurs earlier in their bag."""
    name = source.roles.id
    if name is None or name not in source:
        return np.zeros(source.table.num_rows, bool)
    column = source.table.column(name)
    codes, _ = dictionary_codes(column, f"column {name!r} of {source.origin}")  # ids are many: not made into texts
    n_codes = int(codes.max(initial=0)) + 1
    repeated = (codes >= 0) & (bag >= 0)
    pairs = bag[repeated].astype(np.int64) * n_codes + codes[repeated]
    repeated[np.flatnonzero(repeated)[np.unique(pairs, return_index=True)[1]]] = False
    return errors.report_rows(repeated, lambda r: f"{source.row(r)}: id {column[r].as_py()!r} ({name}) occurs twice in its bag")


def check_weights(weight: np.ndarray, name: str, origin: str, errors: ErrorPolicy) -> np.ndarray:
    """(n,) rows whose weight is negative, missing or too large."""
    with np.errstate(invalid="ignore"):
        wrong = ~((weight >= 0) & (weight <= MAX_WEIGHT))
    problem = f"in column {name!r} is no weight; weights are 0 to {MAX_WEIGHT:g}"
    return errors.report_rows(wrong, lambda r: f"{origin} row {r + 1}: {weight[r]} {problem}")


def _groups(source: SourceTable, bag: np.ndarray, names: Sequence[str], options: ReadOptions) -> tuple[str, ...] | None:
    """(B,) groups; a recognised column that varies within bags, or not at all, is not the group."""
    if source.roles.group is None or source.roles.group not in source:
        return None
    column = f"column {source.roles.group!r}"
    if options.roles.group is None:
        codes, _ = source.factorize(source.roles.group)
        several = np.unique(bag[first_per_bag(bag, codes, len(names))[1]])
        if 0 < len(several) < len(names) / 10:
            problem = f"looks like the group, and has several values in bag {names[several[0]]!r}"
            raise HeadcountError(f"{source.origin}: {column} {problem}; correct it, or name the group with group=")
        if len(several):
            options.notes.append(f"{column} differs inside bags: taken as a feature, not as the group")
            return None
        if len(names) > 1 and len(np.unique(codes)) == 1:
            options.notes.append(f"{column} has one value for all bags: not taken as the group")
            return None
    return groups_per_bag(source, bag, names)


def _labels(source: SourceTable, bag: np.ndarray, names: Sequence[str], options: ReadOptions) -> BagLabels:
    if options.labels is not None:
        return join_labels(options.labels, options, names, bag_column=source.roles.bag or "", bag=bag)
    labels = labels_from_rows(source, bag, names, options)
    if labels is None and options.requires_labels(source.roles.truth is not None):
        truth = ", or the class of the instances with truth=" if options.truth_suffices else ""
        raise HeadcountError(f"{source.origin} has no label column ({source.columns}); name it with label= or votes={truth}")
    return labels or BagLabels(codes=np.full(len(names), -1))


def _add_images(raw: RawData, source: SourceTable, data: Any, options: ReadOptions) -> np.ndarray:
    """Read the images that a column lists; returns (n,) rows that are excluded."""
    roles = source.roles
    if options.preprocessor is None and (others := [*roles.features, *roles.categories]):
        problem = f"images (column {roles.path!r}) cannot be combined with other columns"
        raise HeadcountError(f"{raw.origin}: {problem}, and {others[0]!r} is named in features= or categories=; leave it out")
    folder = Path(data).parent if isinstance(data, (str, Path)) else Path()
    paths = [as_text(v) for v in source.table.column(roles.path).to_pylist()]
    files = [folder / (p or "") for p in paths]
    describe = lambda i: f"{source.row(i)}: {paths[i] or 'no file'}"  # noqa: E731
    raw.content, raw.address, excluded, digest = read_images(files, options, describe)
    raw.all_finite, raw.digest = True, raw.digest + digest
    height, width, _ = shape = raw.content.shape[1:]
    raw.schema = Preprocessor("images", shape=shape, roles=roles)
    raw.summary = f"read {raw.origin}: {len(files):,} images of {width}x{height} in column {roles.path!r}"
    return excluded

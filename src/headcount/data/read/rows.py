"""A table with one row per instance: who is in which bag, what the instances are, and everything else that is said of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.data.columns import Columns, Named, is_id
from headcount.data.read.fields import plan
from headcount.data.read.found import Asked, Found, Said, firsts, some
from headcount.data.read.images import read_images
from headcount.data.read.labels import beside, groups
from headcount.data.read.tables import open_table
from headcount.data.read.targets import as_numbers, by_rows, classes_in
from headcount.data.values import numbered, texts, written
from headcount.errors import HeadcountError

HEAVIEST = 1e9  # an instance of more votes than that would drown the float32 sums of its bag


def read_table(data: Any, asked: Asked) -> Found:
    """CSV, TSV, Parquet or a DataFrame."""
    table, where, digest = open_table(data, _before(asked), asked.bad)
    roles = _roles(table, where, asked)
    if roles.bag is None or roles.bag not in table.column_names:
        raise HeadcountError(
            f"{where}: which column is the bag? It has {some(table.column_names, 12)}; name it with bag="
        )
    bag, names = texts(table.column(roles.bag), f"column {roles.bag!r} of {where}")
    if not names:
        raise HeadcountError(f"{where}: column {roles.bag!r} is empty, no row is in a bag")
    missing = asked.bad.rows(bag < 0, lambda r: f"{where} row {r + 1} is in no bag (column {roles.bag!r} is empty)")
    wrong = missing | _twice(table, roles, bag, where, asked)
    if roles.weight:
        weight = as_numbers(table.column(roles.weight), roles.weight, where)
        wrong |= heavy(weight, roles.weight, where, asked)
    group, roles, notes = _group(table, roles, bag, names, where, asked)
    said = _said(table, roles, bag, names, where, asked)
    if asked.named.group and group is None and said.group is None:
        raise HeadcountError(f"neither {where} nor the label file has a column {asked.named.group!r} (group)")
    found = Found(
        kind="table", how="", where=where, columns=Columns("table"), content=None, bag=bag, names=names, said=said,
        ids=table, digest=digest, group=group, notes=notes,
    )  # fmt: skip
    if roles.weight:
        found.weight = np.where(wrong, 1, weight)
    for what in ("truth", "known"):
        if (name := getattr(roles, what)) is not None:
            code, values, more = classes_in(table, name, where, asked)
            setattr(found, what, (code, values))
            found.notes += more
    if roles.x and roles.y:
        found.coords = np.stack([as_numbers(table.column(n), n, where) for n in (roles.x, roles.y)], 1)
        lost = np.asarray(~np.isfinite(found.coords).all(1))
        wrong |= asked.bad.rows(
            lost, lambda r: f"{where} row {r + 1} has no finite coordinates in {roles.x!r}, {roles.y!r}"
        )
        if asked.tile:
            found.tiles = np.full(table.num_rows, float(asked.tile))
    wrong |= _instances(table, roles, found, data, asked)
    found.bag = np.where(wrong, -1, bag)
    found.notes = [*_columns_said(roles), *found.notes]
    return found


def _before(asked: Asked) -> Named:
    """What is known of the columns before they are read: the user's word, then the model's."""
    model = asked.learned
    named = asked.named.over(Named(**model.named)) if model else asked.named
    if model and model.fields:
        named = replace(named, categories=tuple(f.name for f in model.fields if f.kind == "category"), features=())
    return named


def _roles(table: pa.Table, where: str, asked: Asked) -> Named:
    names, own = table.column_names, asked.named
    elsewhere = [n for n in (own.label, own.group, *own.votes) if n and asked.labels is not None]  # in the label file
    if asked.learned is None:
        return own.found(names, where, elsewhere)
    model = {f.name for f in asked.learned.fields}
    said = _before(asked).to_json()  # what only the model says need not be there: new data may well have no labels
    named = Named(**{k: v for k, v in said.items() if k == "categories" or getattr(own, k) or _there(v, names)})
    rest = [n for n in names if n not in model or n == named.text]
    unasked = () if asked.need_labels else ("label", "group", "truth", "known")  # of two that may be it, neither
    return named.found(rest, where, {*elsewhere, *model}, settled=bool(model), unasked=unasked)


def _there(value: Any, names: Sequence[str]) -> bool:
    return set(value) <= set(names) if isinstance(value, (tuple, list)) else value in names


def _twice(table: pa.Table, roles: Named, bag: np.ndarray, where: str, asked: Asked) -> np.ndarray:
    """(n,) rows whose id stands in their bag already."""
    if roles.id is None or roles.id not in table.column_names:
        return np.zeros(table.num_rows, bool)
    column = table.column(roles.id)
    code = numbered(column, f"column {roles.id!r} of {where}")[0]  # ids are many: their texts are not looked at
    many = int(code.max(initial=0)) + 1
    both = np.where((code >= 0) & (bag >= 0), bag.astype(np.int64) * many + code, -1 - np.arange(len(code)))
    order = np.argsort(both, kind="stable")
    again = np.zeros(len(code), bool)
    again[order[1:]] = both[order[1:]] == both[order[:-1]]
    return asked.bad.rows(
        again, lambda r: f"{where} row {r + 1}: id {column[r].as_py()!r} ({roles.id}) stands twice in its bag"
    )


def heavy(weight: np.ndarray, name: str, where: str, asked: Asked) -> np.ndarray:
    with np.errstate(invalid="ignore"):
        wrong = ~((weight >= 0) & (weight <= HEAVIEST))
    return asked.bad.rows(
        wrong,
        lambda r: f"{where} row {r + 1}: {weight[r]} in column {name!r} is no weight; weights are 0 to {HEAVIEST:g}",
    )


def _group(
    table: pa.Table, roles: Named, bag: np.ndarray, names: Sequence[str], where: str, asked: Asked
) -> tuple[tuple[str, ...] | None, Named, list[str]]:
    """(B,) groups. A column that was only recognised, and is not one value per bag, is no group but a column like others."""
    if roles.group is None or roles.group not in table.column_names:
        return None, roles, []
    if asked.named.group is None:
        code, _ = texts(table.column(roles.group), f"column {roles.group!r} of {where}")
        differs = np.unique(bag[firsts(bag, code, len(names))[1]])
        if 0 < len(differs) < len(names) / 10:
            raise HeadcountError(
                f"{where}: column {roles.group!r} looks like the group, and says several in bag {names[differs[0]]!r}; "
                "mend it, or name the group with group="
            )
        if len(differs):
            said = f"column {roles.group!r} differs inside bags: taken as a feature, not as the group"
            return None, replace(roles, group=None), [said]
        if len(names) > 1 and len(np.unique(code)) == 1:
            said = f"column {roles.group!r} says the same of every bag: not taken as the group"
            return None, replace(roles, group=None), [said]
    return groups(table.column(roles.group), bag, names, where, roles.group), roles, []


def _said(table: pa.Table, roles: Named, bag: np.ndarray, names: Sequence[str], where: str, asked: Asked) -> Said:
    if asked.labels is not None:
        return beside(asked, names, roles.bag)
    said = by_rows(table, roles, bag, names, where, asked)
    if said is None and asked.miss_labels(roles.truth is not None):
        own = ", or the instances' own class with truth=" if asked.or_truth else ""
        raise HeadcountError(
            f"{where} has no label column ({some(table.column_names, 12)}); name it with label= or votes={own}"
        )
    return said or Said(code=np.full(len(names), -1))


def _instances(table: pa.Table, roles: Named, found: Found, data: Any, asked: Asked) -> np.ndarray:
    """Fill in what the instances are; gives (n,) rows that are bad."""
    n, shown, model = table.num_rows, found.where, asked.learned
    if model is not None and not model.fields and not (model.kind == "images" and roles.path):
        if model.kind == "features":  # they were an array: nobody knows which column was which
            raise HeadcountError(
                f"the model was fitted on arrays, and {shown} is a table; give an .npy or .npz file, or fit it on a table"
            )
        raise HeadcountError(f"the model takes {model.kind}, and {shown} is a table without pictures")
    spoken = [*(name for _, name in roles.single()), *roles.votes, *filter(is_id, table.column_names)]
    if roles.path and (model is None or not model.fields):
        if model is None and (more := [*roles.features, *roles.categories]):
            both = f"{shown}: pictures (column {roles.path!r}) are learned from alone"
            raise HeadcountError(f"{both}, and {more[0]!r} is named in features= or categories=; leave it out")
        folder = Path(data).parent if isinstance(data, (str, Path)) else Path()
        paths = [written(v) for v in table.column(roles.path).to_pylist()]
        files = [folder / (p or "") for p in paths]
        called = lambda i: f"{shown} row {i + 1}: {paths[i] or 'no file'}"  # noqa: E731
        found.content, found.address, wrong, digest = read_images(files, asked, called, found.notes)
        found.kind, found.checked, found.digest = "images", True, found.digest + digest
        shape = found.content.shape[1:]
        found.columns = Columns("images", shape=shape, named=roles)
        found.how = f"read {shown}: {n:,} pictures of {shape[1]}x{shape[0]} in column {roles.path!r}"
        found.ids = _own(table, roles, [])
        return wrong
    label = None if found.said.code is None else np.append(found.said.code, -1)[found.bag]
    content, found.columns, notes, wrong = plan(table, roles, spoken, label, found.bag, shown, asked)
    found.content, found.kind = content, found.columns.kind
    found.how = f"read {shown}: a table of {n:,} rows and {table.num_columns} columns"
    found.notes += notes
    found.ids = _own(table, roles, content.column_names)
    return wrong


def _own(table: pa.Table, roles: Named, features: Sequence[str]) -> pa.Table:
    """The user's own columns: all but the features and what is said of the classes."""
    hidden = {*features, *roles.votes, roles.label, roles.truth, roles.known}
    return table.select([n for n in table.column_names if n not in hidden])


def _columns_said(roles: Named) -> list[str]:
    said = [f"{role} {name!r}" for role, name in roles.single()] + (
        [f"votes {', '.join(roles.votes)}"] if roles.votes else []
    )
    return [f"columns: {', '.join(said)}"]

"""What a page calls each method: short, the same in every table, and no two of a table alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.select import Row
from headcount.models.heads import HEADS, head_options

MIN_FAMILY = 4  # methods of one head, from which on what most of them share is said once


def display_names(rows: Sequence[Row]) -> tuple[list[str], dict[str, str]]:
    """A name for each row, and by the beginnings of names what they leave out. Rows of one label (of one head, where that has
    many) in one table are told apart by the recipe fields in which they differ; where a method needs a field in one table, it
    has it in all."""
    short, family, remarks = _labels(rows)
    names, plain = [""] * len(rows), {k: _shown(v) for k, v in Recipe().values.items()}
    for kin in dict.fromkeys(family.values()):
        told = {i: _decided(row.records[0]) for i, row in enumerate(rows) if family[row.label] == kin}
        tables: dict[tuple[str, str], list[dict[str, str]]] = {}
        for i, values in told.items():
            tables.setdefault((rows[i].source, rows[i].scenario), []).append(values)
        differ = [k for k in next(iter(told.values())) if any(len({v[k] for v in t}) > 1 for t in tables.values())]
        usual: dict[str, str] = {}
        if len({(rows[i].label, *(values[k] for k in differ)) for i, values in told.items()}) >= MIN_FAMILY:
            usual = {k: Counter(values[k] for values in told.values()).most_common(1)[0][0] for k in differ}
            shared = _listed({k: v for k, v in usual.items() if v != plain.get(k)})
            before = remarks.get(kin, "where a row says nothing else")
            remarks |= {kin: f"{before}{', ' if ':' in before else ': '}{shared}"} if shared else {}
        for i, values in told.items():
            own = _listed({k: values[k] for k in differ if values[k] != usual.get(k)})
            name = short[rows[i].label]
            names[i] = f"{name}, {own}" if own else name
    return names, remarks


def _listed(values: Mapping[str, str]) -> str:
    return ", ".join(f"{field.replace('_', ' ')} {value or 'none'}" for field, value in values.items())


def _shown(value: Any) -> str:
    """A recipe's value as one writes it: an empty dictionary is nothing."""
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, Mapping) else str(value)


def _decided(record: Record) -> dict[str, str]:
    """All that can tell two rows of one label apart. What a label says of head and options is not said again, unless two
    files name their heads alike."""
    alike = ("fold", "seed", "removal", "head", "options", "source", "scenario")
    values = {k: v for k, v in record.recipe.values.items() if k not in alike or (k == "head" and ":" in v)}
    values = {"head": "", **values, **{k: v[:8] for k, v in record.fingerprint.items()}}
    return {k: _shown(v) for k, v in values.items()}


def _labels(rows: Sequence[Row]) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Every label, or a shorter one: of many methods of one head each says only where it differs from most of them. And by
    label the family it is held against, and what the shorter ones leave out."""
    short = {row.label: row.label for row in rows}
    family, remarks = dict(short), {}
    for name, head in HEADS.items():
        told = {r.label: dict(r.records[0].recipe.options) for r in rows if r.records[0].recipe.head == name}
        if len(told) < MIN_FAMILY or "named" in vars(head):  # some heads have better names
            continue
        usual = head_options(name)
        whole = {label: {**usual, **options} for label, options in told.items()}
        most = {k: Counter(options[k] for options in whole.values()).most_common(1)[0][0] for k in usual}
        found = {
            label: head.display_name({k: v for k, v in options.items() if v != most[k]})
            for label, options in whole.items()
        }
        if len(set(found.values())) == len(found):
            short |= found
            family |= dict.fromkeys(found, head.title)
            shared = ", ".join(f"{k}={v}" for k, v in most.items() if v != usual[k])
            remarks |= {head.title: f"where a row says nothing else: {shared}"} if shared else {}
    return short, family, remarks

"""What a page calls each method: short, the same in every table, and no two of a table alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from headcount.judging.records import Record
from headcount.judging.select import Row
from headcount.models.heads import HEADS, head_options

MANY = 4  # methods of one head, from which on what most of them share is said once


def own_names(rows: Sequence[Row]) -> tuple[list[str], list[str]]:
    """A name for each row, and what the names leave out. Rows of one label in one table are told apart by the recipe fields in
    which they differ; where a method needs a field in one table, it has it in all."""
    short, remarks = _labels(rows)
    fields: dict[str, dict[str, None]] = {}
    for row in rows:
        twins = [r for r in rows if (r.label, r.source, r.scenario) == (row.label, row.source, row.scenario)]
        mine, *_ = values = [_decided(r.records[0]) for r in [row, *twins]]
        fields.setdefault(row.label, {}).update({k: None for k in mine if any(v[k] != mine[k] for v in values)})
    return [", ".join([short[row.label], *_said(row, fields[row.label])]) for row in rows], remarks


def _said(row: Row, fields: dict[str, None]) -> list[str]:
    mine = _decided(row.records[0])
    return [f"{k.replace('_', ' ')} {v}" for k, v in mine.items() if k in fields]


def _decided(record: Record) -> dict[str, Any]:
    """All that can tell two rows of one label apart. What a label says of head and options is not said again, unless two
    files name their heads alike."""
    alike = ("fold", "seed", "removal", "head", "options", "source", "scenario")
    values = {k: v for k, v in record.recipe.values.items() if k not in alike or (k == "head" and ":" in v)}
    return {"head": "", **values, **{k: v[:8] for k, v in record.seen.items()}}


def _labels(rows: Sequence[Row]) -> tuple[dict[str, str], list[str]]:
    """Every label, or a shorter one: of many methods of one head each says only where it differs from most of them."""
    short = {row.label: row.label for row in rows}
    remarks = []
    for name, head in HEADS.items():
        told = {r.label: dict(r.records[0].recipe.options) for r in rows if r.records[0].recipe.head == name}
        if len(told) < MANY or "named" in vars(head):  # some heads have better names
            continue
        usual = head_options(name)
        whole = {label: {**usual, **options} for label, options in told.items()}
        most = {k: Counter(options[k] for options in whole.values()).most_common(1)[0][0] for k in usual}
        found = {
            label: head.named({k: v for k, v in options.items() if v != most[k]}) for label, options in whole.items()
        }
        if len(set(found.values())) == len(found):
            short |= found
            shared = ", ".join(f"{k}={v}" for k, v in most.items() if v != usual[k])
            remarks += [f"{head.title}, where a row says nothing else: {shared}"] if shared else []
    return short, remarks

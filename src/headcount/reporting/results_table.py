"""One data set in one scenario: its facts and its table, from records to what the page prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headcount.experiments.records import Record
from headcount.experiments.select import Row
from headcount.reporting.method_names import display_names

METRICS = {
    "instance_accuracy": "Instance accuracy",
    "bag_accuracy": "Bag accuracy",
    "consistency_rate": "Consistency",
    "miou": "mIoU",
    "share_difference": "Share difference",
}


@dataclass(frozen=True)
class TableCell:
    """A mean and its deviation, as printed."""

    mean: str
    deviation: str
    best: bool = False


@dataclass(frozen=True)
class TableLine:
    """A row of the main table; ``runs`` are the fold (and seed) and key of each record behind it."""

    name: str
    note: str
    runs: tuple[tuple[str, str], ...]
    cells: tuple[TableCell, ...]


@dataclass(frozen=True)
class ReportMethod:
    """A table row under the name that is its own in this section."""

    name: str
    row: Row

    @property
    def accuracy(self) -> float:
        return self.row.score("instance_accuracy")[0]

    @property
    def oracle(self) -> bool:
        """Told every instance's label: an upper bound, never "the best"."""
        return self.row.records[0].uses_instance_labels

    @property
    def removes(self) -> bool:
        return self.row.records[0].recipe.removal > 0


def rank_methods(rows: Sequence[Row], names: Sequence[str] | None = None) -> list[ReportMethod]:
    """Best first, oracles last, under these names or those they have among themselves."""
    named = [ReportMethod(name, row) for name, row in zip(names or display_names(rows)[0], rows, strict=True)]
    return sorted(named, key=lambda m: (m.oracle, -m.accuracy if math.isfinite(m.accuracy) else math.inf, m.name))


def best_method(methods: Sequence[ReportMethod]) -> ReportMethod:
    """The best instance accuracy that was had without instance labels."""
    honest = [m for m in methods if not m.oracle and math.isfinite(m.accuracy)]
    return honest[0] if honest else methods[0]


def table_lines(methods: Sequence[ReportMethod]) -> list[TableLine]:
    best = best_method(methods)
    return [TableLine(m.name, _note(m), _runs(m.row), tuple(_cells(m, best))) for m in methods]


def _note(method: ReportMethod) -> str:
    if method.oracle:
        return "told every instance’s label: an upper bound"
    if method.removes:
        return "r chosen by validation loss: " + ", ".join(f"{r.recipe.removal:g}" for r in method.row.records)
    return ""


def _runs(row: Row) -> tuple[tuple[str, str], ...]:
    recipes = [r.recipe for r in row.records]
    several = len({r.seed for r in recipes}) > 1
    return tuple(
        (f"{p.fold}·{p.seed}" if several else str(p.fold), r.key) for p, r in zip(recipes, row.records, strict=True)
    )


def _cells(method: ReportMethod, best: ReportMethod) -> Iterator[TableCell]:
    for metric in METRICS:
        yield score_cell(method.row, metric, best=method is best and metric == "instance_accuracy")


def score_cell(row: Row, metric: str, best: bool = False) -> TableCell:
    """Three decimals as in the paper; no deviation over a single run, a dash where the metric is undefined."""
    mean, deviation, runs = row.score(metric)
    if not runs:
        return TableCell("–", "")
    sign = "+" if metric == "share_difference" else ""
    text = f"{mean:{sign}.3f}".replace("-", "−")
    return TableCell(text, f"± {deviation:.3f}" if runs > 1 else "", best)


def data_facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    """What the data were; where records of one section differ, all the values."""
    data = [r.data["data"] for r in records]
    classes = data[0]["classes"]
    bags = (f"{d['train_bags']:,} training, {d['valid_bags']:,} validation, {d['test_bags']:,} test" for d in data)
    return [
        ("Source", _all(d["source"] for d in data)),
        ("Scenario", _all(r.recipe.scenario for r in records)),
        ("Bags in a fold", _all(bags)),
        ("Instances in a bag", _all(d["bag_size"] for d in data)),
        ("An instance is", _all(_shape(d.get("shape") or ()) for d in data)),
        (f"{len(classes)} classes", ", ".join(classes[:30]) + ("…" if len(classes) > 30 else "")),
        ("Checksum", _all(str(d["checksum"])[:12] for d in data)),
    ]


def _shape(shape: Sequence[int]) -> str:
    """
    >>> _shape([8, 8, 1]), _shape([30])
    ('8 × 8 pixels, grey', '30 numbers')
    """
    if len(shape) == 3:
        return f"{shape[0]} × {shape[1]} pixels, {'grey' if shape[2] == 1 else 'colour'}"
    return " × ".join(map(str, shape)) + " numbers" if shape else "unknown"


def _all(values: Iterable[Any]) -> str:
    return " or ".join(dict.fromkeys(str(v) for v in values))

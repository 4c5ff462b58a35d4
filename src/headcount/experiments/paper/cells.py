"""Cells: a printed number, the recipes that reproduce it, and the metric.

The printed values are read from the CSV files in this folder, as the paper prints them, averages included; where a printed
average is not the average of its cells (there are two), both are shown.
"""

from __future__ import annotations

import csv
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path

from headcount.errors import HeadcountWarning, check_choice
from headcount.experiments.paper.scales import DATASETS, SCENARIOS, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, load_records
from headcount.experiments.scores import best_removal, mean_and_deviation
from headcount.experiments.study import with_needs

OURS = ("Ours", "Minimum loss (Ours)")
ALL_DATASETS = "all"  # table 5 pools the data sets

# table -> its contents, and the metric of its cells
TABLES: dict[str, tuple[str, str]] = {
    "table2": ("Instance accuracy", "instance_accuracy"),
    "table3": ("Bag accuracy", "bag_accuracy"),
    "table4": ("Ablation, instance accuracy", "instance_accuracy"),
    "table5": ("Consistency rate, pooled over the data sets", "consistency_rate"),
    "table6": ("MPEM's removal ratio r, instance accuracy", "instance_accuracy"),
}

FIGURES: dict[str, str] = {
    "figure3": "Counting Network, instance accuracy by scenario and data set",
    "figure6": "Estimated minus true share of the majority, by scenario",
    "figure7": "The majority's share before and after MPEM",
    "figure8": "Purity of what MPEM removes, against r",
    "figure9": "Agreement of what is left with the label, against r",
}

ITEMS = [*TABLES, *FIGURES]
DEFAULT_SECONDS = {"full": 55.0, "smoke": 0.5}  # per run, if none has been timed: on one H200; on one core


@dataclass(frozen=True)
class PrintedValue:
    """A mean as the paper prints it, with its standard deviation where there is one."""

    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Cell:
    """One number of the paper."""

    table: str
    scenario: str
    method: str
    dataset: str
    printed: PrintedValue
    metric: str
    recipes: tuple[Recipe, ...]

    def selected_records(self, records: Mapping[Recipe, Record]) -> list[Record]:
        """The records that the value averages; of a sweep, one for each fold and data set for which it is complete."""
        if self.method not in OURS:
            return [records[r] for r in self.recipes if r in records]
        ordered = sorted(self.recipes, key=_cell_of)
        groups = [list(group) for _, group in groupby(ordered, key=_cell_of)]
        return [best_removal([records[r] for r in g]) for g in groups if all(r in records for r in g)]

    def value(self, records: Mapping[Recipe, Record]) -> tuple[float, float, int]:
        """Mean, population standard deviation, number of runs."""
        return mean_and_deviation(r.scores.get(self.metric) for r in self.selected_records(records))

    @property
    def n_runs(self) -> int:
        """The number of runs that the complete value averages."""
        return len({_cell_of(r) for r in self.recipes})

    def missing(self, records: Mapping[Recipe, Record]) -> list[Recipe]:
        """The recipes without a record."""
        return [r for r in self.recipes if r not in records]


def _cell_of(recipe: Recipe) -> tuple[str, str, int]:
    return recipe.source, recipe.scenario, recipe.fold


def table_cells(table: str, scale: Scale) -> list[Cell]:
    """The table's cells in the paper's order, without averages (they follow from the others)."""
    metric = TABLES[table][1]
    return [
        Cell(table, scenario, method, dataset, printed, metric, _recipes(scale, method, dataset, scenario))
        for (scenario, method, dataset), printed in printed_values(table).items()
        if dataset in (*DATASETS, ALL_DATASETS)
    ]


def _recipes(scale: Scale, method: str, dataset: str, scenario: str) -> tuple[Recipe, ...]:
    if dataset == ALL_DATASETS:
        return tuple(r for d in DATASETS for r in _recipes(scale, method, d, scenario))
    if method in OURS:
        return scale.sweep(dataset, scenario)
    if method.startswith("r="):
        return scale.recipes("Counting Network", dataset, scenario, float(method.removeprefix("r=")))
    return scale.recipes(method, dataset, scenario)


@lru_cache
def printed_values(table: str) -> dict[tuple[str, str, str], PrintedValue]:
    """(scenario, method, data set) -> what the paper prints; the data set "Average" is its printed average."""
    text = files("headcount.experiments.paper").joinpath(f"{table}.csv").read_text()
    values = {}
    for row in csv.DictReader(text.splitlines()):
        dataset = ALL_DATASETS if row["dataset"].startswith("all") else row["dataset"]
        deviation = float(row["std"]) if row["std"] else None
        values[row["scenario"], row["method"], dataset] = PrintedValue(float(row["mean"]), deviation)
    return values


@dataclass(frozen=True)
class Average:
    """A printed average, and the average of its cells."""

    printed: float
    recomputed: float

    @property
    def is_wrong(self) -> bool:
        """Different by more than rounding explains."""
        return abs(self.printed - self.recomputed) > 0.0011


def averages(table: str) -> dict[tuple[str, str], Average]:
    """(scenario, method) -> the row's average, as printed and as its cells give it."""
    values = printed_values(table)
    result = {}
    for (scenario, method, dataset), printed in values.items():
        if dataset == "Average":
            means = [values[scenario, method, d].mean for d in DATASETS]
            result[scenario, method] = Average(printed.mean, sum(means) / len(means))
    return result


def figure_recipes(figure: str, scale: Scale) -> list[Recipe]:
    """The runs that a figure shows; figures 7 to 9 need only the Counting Network."""

    def of(method: str, datasets: Iterable[str], scenarios: Iterable[str]) -> list[Recipe]:
        return [r for d in datasets for s in scenarios for r in scale.recipes(method, d, s)]

    if figure == "figure6":
        return of("Output+Mean", DATASETS, SCENARIOS) + of("Counting Network", DATASETS, SCENARIOS)
    if figure == "figure7":
        return [r for r in of("Counting Network", DATASETS[:1], SCENARIOS) if r.fold == scale.folds[0]]
    return of("Counting Network", DATASETS, SCENARIOS if figure == "figure3" else SCENARIOS[:1])


def records_by_recipe(folder: Path) -> dict[Recipe, Record]:
    """The records of a folder by their recipe; none if the folder does not exist.

    Two versions of a data set are not averaged: the one with more records counts, and a warning reports the others.
    """
    versions: dict[str, dict[str | None, list[Record]]] = {}  # by source, then by checksum
    for record in load_records(folder) if folder.exists() else ():
        by_checksum = versions.setdefault(record.recipe.source, {})
        by_checksum.setdefault(record.data["data"].get("checksum"), []).append(record)
    kept: list[Record] = []
    for source, by_checksum in versions.items():
        largest = max(by_checksum.values(), key=len)
        if ignored := sum(map(len, by_checksum.values())) - len(largest):
            message = f"{folder} holds runs on {len(by_checksum)} versions of {source}, whose files differ"
            counts = f"the {len(largest)} runs on one count, {ignored} do not"
            warnings.warn(f"{message}; {counts}", HeadcountWarning, stacklevel=2)
        kept += largest
    return {record.recipe: record for record in kept}


def required_recipes(item: str, scale: Scale) -> list[Recipe]:
    """All runs of a table or figure and those they need, in an order in which they can be run."""
    if check_choice("table or figure", item, ITEMS) in TABLES:
        return with_needs(r for cell in table_cells(item, scale) for r in cell.recipes)
    return with_needs(figure_recipes(item, scale))


def missing_recipes(wanted: Iterable[str], scale: Scale, records: Mapping[Recipe, Record]) -> list[Recipe]:
    """The recipes of these tables and figures that have no record, each once."""
    return [r for r in dict.fromkeys(r for item in wanted for r in required_recipes(item, scale)) if r not in records]


def seconds_per_run(scale: Scale, records: Mapping[Recipe, Record]) -> float:
    """The mean time of the runs of this scale in these records; the default if there are none."""
    of_scale = dict.fromkeys(r for item in ITEMS for r in required_recipes(item, scale))
    seconds = (records[r].data["provenance"].get("seconds") for r in of_scale if r in records)
    timed = [s for s in seconds if s is not None]
    return sum(timed) / len(timed) if timed else DEFAULT_SECONDS[scale.name]

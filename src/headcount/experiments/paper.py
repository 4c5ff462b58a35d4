"""The paper as cells: every printed number with the recipes that reproduce it and the metric, at one of two scales.

The printed values are read from the CSV files in ``printed``, as the paper prints them, averages included; where a printed
average is not the average of its cells (there are two), both are shown.
"""

import csv
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from headcount.errors import HeadcountWarning, check_choice
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, load_records
from headcount.experiments.scores import REMOVALS, best_removal, mean_and_deviation
from headcount.experiments.study import with_needs

DATASETS = ("CIFAR10", "SVHN", "PATH", "OCT")
SCENARIOS = ("Various", "Small", "Large")

# name in tables -> how the recipe differs from the Counting Network's
METHODS: dict[str, dict[str, Any]] = {
    "Output+Mean": {"head": "output_mean"}, "Feature+Mean": {"head": "feature_mean"}, "Feature+Max": {"head": "feature_max"},
    "Feature+P-norm": {"head": "feature_pnorm"}, "Feature+LSE": {"head": "feature_lse"}, "Feature+Attention": {"head": "attention"},
    "AdditiveMIL": {"head": "additive"}, "AdditiveTransMIL": {"head": "additive_trans"}, "MILLET": {"head": "millet"},
    "MCTformer+": {"head": "mctformer"}, "WENO": {"head": "weno"},
    "Counting Network w/o Count": {"options": {"t1": 1.0}}, "Counting Network": {},
}  # fmt: skip

OURS = ("Ours", "Minimum loss (Ours)")
COARSE = (0.1, 0.3, 0.5, 0.7, 1.0)  # of MPEM's removals: "Ours" selects from these while the others have not run
SUBSTITUTES = {"oct": "oct-originals"}  # taken for a column of which there is nothing else
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
class Scale:
    """The size at which the paper is reproduced. ``full``: as in the paper, with every removal. ``smoke``: digits and three
    generated stand-ins, two folds, few epochs; it tests the pipeline and does not compare methods. Its recipes differ, so the
    records of the two never mix."""

    name: str
    base: Recipe
    sources: Mapping[str, str]  # the paper's data set -> ours
    folds: tuple[int, ...]
    removals: tuple[float, ...]  # those from which "Ours" selects
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # options of heads that are made smaller, by head

    def recipes(self, method: str, dataset: str, scenario: str, removal: float = 0.0) -> tuple[Recipe, ...]:
        """One recipe for each fold."""
        changes = dict(METHODS[method])
        head = changes.get("head", "count")
        changes["options"] = {**changes.get("options", {}), **self.options.get(head, {})}
        recipe = self.base.replace(source=self.sources[dataset], scenario=scenario.lower(), removal=removal, **changes)
        return tuple(recipe.replace(fold=fold) for fold in self.folds)


def substitute_sources(scale: Scale, *available: Collection[str]) -> Scale:
    """The scale with :data:`SUBSTITUTES` in the columns for which the first collection of sources (those of the records, say)
    that has one of the two has the substitute alone."""
    sources = {}
    for dataset, source in scale.sources.items():
        pair = {source, SUBSTITUTES.get(source, source)}
        present = next((both for names in available if (both := pair.intersection(names))), {source})
        sources[dataset] = source if source in present else SUBSTITUTES[source]
    return replace(scale, sources=sources)


SCALES = {
    "full": Scale(
        name="full", base=Recipe(precision="bf16"), folds=(0, 1, 2, 3, 4), removals=REMOVALS,
        sources={"CIFAR10": "cifar10", "SVHN": "svhn", "PATH": "path", "OCT": "oct"},
    ),
    "smoke": Scale(
        name="smoke",
        base=Recipe(
            backbone="mlp", backbone_options=(("hidden", 24), ("layers", 1)), bag_size=12, epochs=6, lr=3e-3,
            train_bags=40, valid_bags=10, test_bags=10, batch_bags=20,
        ),
        sources={"CIFAR10": "digits", "SVHN": "standin10", "PATH": "standin9", "OCT": "standin4"},
        folds=(0, 1), removals=(0.5, 1.0),
        options={  # at their default widths these three would take nine tenths of the time
            "additive_trans": {"attn": "exact", "width": 32, "heads": 2},
            "mctformer": {"layers": 1, "width": 24, "heads": 2},
            "weno": {"width": 32, "student_width": 64},
        },
    ),
}  # fmt: skip


class PrintedValue(NamedTuple):
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
        """The records that the value averages; of a sweep, one for each fold and data set for which it is whole or coarse."""
        if self.method not in OURS:
            return [records[r] for r in self.recipes if r in records]
        return [best_removal(sweep) for sweep in self._sweeps(records)]

    def _sweeps(self, records: Mapping[Recipe, Record]) -> Iterator[list[Record]]:
        for _, group in groupby(sorted(self.recipes, key=_cell_of), key=_cell_of):
            whole = list(group)
            for sweep in (whole, [r for r in whole if r.removal in COARSE]):
                if sweep and all(r in records for r in sweep):
                    yield [records[r] for r in sweep]
                    break

    def is_coarse(self, records: Mapping[Recipe, Record]) -> bool:
        """Whether a fold of "Ours" selects from the coarse sweep, because the whole one has not run."""
        n_removals = len(self.recipes) // self.n_runs
        return self.method in OURS and any(len(sweep) < n_removals for sweep in self._sweeps(records))

    def value(self, records: Mapping[Recipe, Record]) -> tuple[float, float, int]:
        """Mean, population standard deviation, number of runs."""
        return mean_and_deviation(r.scores.get(self.metric) for r in self.selected_records(records))

    @property
    def n_runs(self) -> int:
        """The number of runs that the complete value averages."""
        return len({_cell_of(r) for r in self.recipes})

    @property
    def data(self) -> str:
        """The data of our value: the paper's data set, or what stands in for it."""
        sources = dict.fromkeys(r.source for r in self.recipes)
        return self.dataset if sources.keys() <= {d.lower() for d in DATASETS} else f"{'/'.join(sources)} for {self.dataset}"

    def missing(self, records: Mapping[Recipe, Record]) -> list[Recipe]:
        """The recipes without a record."""
        return [r for r in self.recipes if r not in records]


def _cell_of(recipe: Recipe) -> tuple[str, str, int]:
    return recipe.source, recipe.scenario, recipe.fold


def table_cells(table: str, scale: Scale, **wanted: str | None) -> list[Cell]:
    """The table's cells in the paper's order, without averages (they follow from the others); all, or those of the wanted
    method, dataset and scenario (None: of all)."""
    cells = [
        Cell(table, scenario, method, dataset, printed, TABLES[table][1], _recipes(scale, method, dataset, scenario))
        for (scenario, method, dataset), printed in printed_values(table).items()
        if dataset in (*DATASETS, ALL_DATASETS)
    ]
    for name, value in wanted.items():
        if value is not None:
            check_choice(f"{name} in {table}", value, dict.fromkeys(getattr(c, name) for c in cells))
            cells = [c for c in cells if getattr(c, name) == value]
    return cells


def _recipes(scale: Scale, method: str, dataset: str, scenario: str) -> tuple[Recipe, ...]:
    if dataset == ALL_DATASETS:
        return tuple(r for d in DATASETS for r in _recipes(scale, method, d, scenario))
    if method in OURS:  # they select from every removal on every fold
        return tuple(r for removal in scale.removals for r in scale.recipes("Counting Network", dataset, scenario, removal))
    if method.startswith("r="):
        return scale.recipes("Counting Network", dataset, scenario, float(method.removeprefix("r=")))
    return scale.recipes(method, dataset, scenario)


@lru_cache
def printed_values(table: str) -> dict[tuple[str, str, str], PrintedValue]:
    """(scenario, method, data set) -> what the paper prints; the data set "Average" is its printed average."""
    text, values = files("headcount.experiments").joinpath("printed", f"{table}.csv").read_text(), {}
    for row in csv.DictReader(text.splitlines()):
        dataset = ALL_DATASETS if row["dataset"].startswith("all") else row["dataset"]
        deviation = float(row["std"]) if row["std"] else None
        values[row["scenario"], row["method"], dataset] = PrintedValue(float(row["mean"]), deviation)
    return values


class Average(NamedTuple):
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
    return {
        (scenario, method): Average(printed.mean, sum(values[scenario, method, d].mean for d in DATASETS) / len(DATASETS))
        for (scenario, method, dataset), printed in values.items()
        if dataset == "Average"
    }


def figure_recipes(figure: str, scale: Scale) -> list[Recipe]:
    """The runs that a figure shows; figures 7 to 9 need only the Counting Network."""
    methods = ("Output+Mean", "Counting Network") if figure == "figure6" else ("Counting Network",)
    datasets = DATASETS[:1] if figure == "figure7" else DATASETS
    scenarios = SCENARIOS if figure in ("figure3", "figure6", "figure7") else SCENARIOS[:1]
    recipes = [r for m in methods for d in datasets for s in scenarios for r in scale.recipes(m, d, s)]
    return [r for r in recipes if r.fold == scale.folds[0]] if figure == "figure7" else recipes


def records_by_recipe(folder: Path) -> dict[Recipe, Record]:
    """The records of a folder by their recipe; none if the folder does not exist. Two versions of a data set are not averaged:
    the one with more records counts, and a warning reports the others."""
    records = load_records(folder) if folder.exists() else []
    counts = Counter((r.recipe.source, r.fingerprint["data"]) for r in records)
    chosen = {source: version for (source, version), _ in reversed(counts.most_common())}  # the most common comes last
    for source, version in chosen.items():
        versions = [n for (name, _), n in counts.items() if name == source]
        if len(versions) > 1:
            message = f"{folder} holds runs on {len(versions)} versions of {source}, whose files differ"
            n = counts[source, version]
            warnings.warn(f"{message}; the {n} runs on one count, {sum(versions) - n} do not", HeadcountWarning, stacklevel=2)
    return {r.recipe: r for r in records if r.fingerprint["data"] == chosen[r.recipe.source]}


def required_recipes(item: str, scale: Scale) -> list[Recipe]:
    """All runs of a table or figure and those they need, in an order in which they can be run."""
    if check_choice("table or figure", item, ITEMS) in TABLES:
        return with_needs(r for cell in table_cells(item, scale) for r in cell.recipes)
    return with_needs(figure_recipes(item, scale))


def seconds_per_run(scale: Scale, records: Mapping[Recipe, Record]) -> float:
    """The mean time of the runs of this scale in these records; the default if there are none."""
    of_scale = dict.fromkeys(r for item in ITEMS for r in required_recipes(item, scale))
    mean, _, n_timed = mean_and_deviation(records[r].data["provenance"].get("seconds") for r in of_scale if r in records)
    return mean if n_timed else DEFAULT_SECONDS[scale.name]

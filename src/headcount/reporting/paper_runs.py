"""The runs behind the paper's numbers: ours against the others, fold by fold, and every record in short."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headcount.experiments.paper.cells import OURS, Cell
from headcount.experiments.paper.scales import DATASETS, METHODS, SCENARIOS, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.select import PairedTest, mean_and_deviation, paired_t_test
from headcount.reporting.paper_tables import MPEM, Records, signed, slug

# -- ours against the others, fold by fold ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldComparison:
    """ "Ours" beside the best other method and beside the Counting Network, on one data set in one scenario."""

    scenario: str
    dataset: str
    ours: str
    other: str
    n_others: int
    against_other: tuple[str, str, str]
    against_count: tuple[str, str, str]


def comparisons(cells: Sequence[Cell], records: Records) -> list[FoldComparison]:
    grid = {(c.scenario, c.method, c.dataset): c for c in cells}
    methods = list(dict.fromkeys(c.method for c in cells if c.table == "table2" and c.method not in OURS))
    made = []
    for scenario in SCENARIOS:
        for dataset in DATASETS:
            ours = _by_fold(grid[scenario, "Ours", dataset], records)
            others = {m: _by_fold(grid[scenario, m, dataset], records) for m in methods}
            alike = {m: v for m, v in others.items() if ours and v.keys() == ours.keys()}
            best = max(alike, key=lambda m: mean_and_deviation(alike[m].values())[0], default="")
            count = _by_fold(grid[scenario, "Counting Network", dataset], records)
            mean = f"{mean_and_deviation(ours.values())[0]:.3f}" if ours else "–"
            tests = _said(ours, alike.get(best, {})), _said(ours, count)
            made.append(FoldComparison(scenario, dataset, mean, best, len(alike), *tests))
    return made


def _by_fold(cell: Cell, records: Records) -> dict[int, float]:
    return {r.recipe.fold: r.scores[cell.metric] for r in cell.selected_records(records)}


def _said(a: dict[int, float], b: dict[int, float]) -> tuple[str, str, str]:
    """Difference, p and number of folds; dashes unless both have run the same two folds or more."""
    if a.keys() != b.keys() or len(a) < 2:
        return "–", "–", "–"
    folds = sorted(a)
    made: PairedTest = paired_t_test([a[f] for f in folds], [b[f] for f in folds])
    p = "–" if math.isnan(made.p) else "< 0.001" if made.p < 0.001 else f"{made.p:.3f}"
    return signed(made.difference), p, str(made.n)


# -- the runs -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PaperRun:
    """One record, in short: instance accuracy, bag accuracy and consistency."""

    key: str
    scores: tuple[str, ...]
    seconds: str
    device: str
    chosen: bool


@dataclass(frozen=True)
class PaperRunLine:
    """One recipe on all its folds; None where a fold has not run."""

    slug: str
    name: str
    runs: list[PaperRun | None]


@dataclass(frozen=True)
class PaperRunGroup:
    """Lines that a table takes together: a method on all data sets, or MPEM's removals on one."""

    slug: str
    title: str
    text: str  # what the recipes add to the scale's base
    devices: str
    lines: list[PaperRunLine]


def run_groups(
    scenario: str, scale: Scale, records: Records, chosen: set[str], removals: Sequence[float]
) -> list[PaperRunGroup]:
    """Only what has run; of MPEM's runs, those that "Ours" chose are marked."""
    groups = []
    for method in METHODS:
        lines = {d: scale.recipes(method, d, scenario) for d in DATASETS}
        groups.append(_group(("runs", scenario, method), method, lines, scale, records, set()))
    for d in DATASETS:
        lines = {f"{x:g}": scale.recipes("Counting Network", d, scenario, x) for x in removals}
        groups.append(_group(("runs", scenario, MPEM, d), f"{MPEM}, {d}", lines, scale, records, chosen))
    return [g for g in groups if g.lines]


def _group(
    name: tuple[str, ...],
    title: str,
    lines: Mapping[str, Sequence[Recipe]],
    scale: Scale,
    records: Records,
    chosen: set[str],
) -> PaperRunGroup:
    made = []
    for own, recipes in lines.items():
        found = [records.get(r) for r in recipes]
        if any(found):
            runs = [None if r is None else summarize_run(r, r.key in chosen) for r in found]
            made.append(PaperRunLine(slug(*name, own), f"r = {own}" if recipes[0].removal else own, runs))
    shared = ("source", "scenario", "fold", "removal", *scale.base.changes)
    changes = next(iter(lines.values()))[0].changes
    text = ", ".join(f"{k}={v}" for k, v in changes.items() if k not in shared)
    devices = dict.fromkeys(run.device for line in made for run in line.runs if run)
    return PaperRunGroup(slug(*name), title, text, ", ".join(devices), made)


def summarize_run(record: Record, chosen: bool = False) -> PaperRun:
    made = record.data.get("provenance", {})
    scores = (record.scores.get(m) for m in ("instance_accuracy", "bag_accuracy", "consistency_rate"))
    seconds = made.get("seconds")
    return PaperRun(
        key=record.key,
        scores=tuple("–" if s is None else f"{s:.3f}" for s in scores),
        seconds="–" if seconds is None else f"{seconds:,.1f} s",
        device=str(made.get("device", "–")),
        chosen=chosen,
    )

"""All tables and figures of the paper on one page: printed values beside ours, each of ours a link to its runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headcount.experiments.paper.cells import ITEMS, OURS, TABLES, Cell, required_recipes, table_cells
from headcount.experiments.paper.scales import DATASETS, METHODS, SCENARIOS, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import mean_and_deviation, paired_t_test
from headcount.io import atomic_write
from headcount.reporting import paper_tables as tables
from headcount.reporting.paper_plots import agreement_scatter, paper_figures
from headcount.reporting.report import provenance
from headcount.reporting.results_table import RunSummary
from headcount.reporting.templates import render_template


def write_paper(scale: Scale, records: tables.Records, page: Path | str) -> Path:
    """Write the page of the paper at this scale atomically and return its path."""
    page = Path(page)
    text = render_paper(scale, records)
    atomic_write(page, lambda f: f.write(text.encode()))
    return page


def render_paper(scale: Scale, records: tables.Records) -> str:
    """The page as a string; without any records it shows the printed values, all of ours marked missing."""
    cells = {table: table_cells(table, scale) for table in TABLES}
    recipes = {item: required_recipes(item, scale) for item in ITEMS}
    required = dict.fromkeys(r for group in recipes.values() for r in group)
    used = {r: records[r] for r in required if r in records}
    shown = [tables.paper_table(name, group, records) for name, group in cells.items()]
    chosen = {r.key for group in cells.values() for c in group if c.method in OURS for r in c.selected_records(records)}
    removals = sorted({r.removal for r in required if r.removal})
    substitutes = {d: s for d, s in scale.sources.items() if s != d.lower()}
    notes, column_notes = _data_notes(used.values()), dict(substitutes)
    if tables.uses_recropped_svhn(used):
        notes[tables.RECROPPED_NOTE] = ["SVHN"]
        column_notes |= dict.fromkeys((tables.AVERAGE, *SCENARIOS), "SVHN re-cropped") | {"SVHN": "re-cropped"}
    return render_template(
        "paper.html",
        scale=scale,
        substitutes=substitutes,
        column_notes=column_notes,
        base=", ".join(f"{k}={v}" for k, v in scale.base.changes.items()),
        count=len(used),
        wanted=len(required),
        notes=notes,
        provenance=provenance(list(used.values())),
        tables=shown,
        items=[(item, sum(r in records for r in group), len(group)) for item, group in recipes.items()],
        agreement=agreement_scatter([e.pair for t in shown for e in t.entries if e.pair and e.complete]),
        pairs=comparisons(cells["table2"] + cells["table4"], records),
        figures=paper_figures(scale, records),
        runs=[(scenario, run_groups(scenario, scale, records, chosen, removals)) for scenario in SCENARIOS],
        unrelated=[RunSummary(record) for recipe, record in records.items() if recipe not in required],
    )


def _data_notes(records: Iterable[Record]) -> dict[str, list[str]]:
    """Notes on the data, each with the sources to which it applies."""
    notes: dict[str, list[str]] = {}
    for source, note in sorted({(r.data["recipe"]["source"], r.data["data"].get("note") or "") for r in records}):
        notes.setdefault(note, []).append(source)
    return {note: sources for note, sources in notes.items() if note}


@dataclass(frozen=True)
class FoldComparison:
    """ "Ours" against the best other method and the Counting Network, on one data set in one scenario."""

    scenario: str
    dataset: str
    ours: str
    other: str
    n_others: int
    against_other: tuple[str, str, str]
    against_count: tuple[str, str, str]


def comparisons(cells: Sequence[Cell], records: tables.Records) -> list[FoldComparison]:
    """A comparison for each scenario and data set."""
    grid = {(c.scenario, c.method, c.dataset): c for c in cells}
    methods = list(dict.fromkeys(c.method for c in cells if c.table == "table2" and c.method not in OURS))
    rows = []
    for scenario in SCENARIOS:
        for dataset in DATASETS:
            scores = {m: _by_fold(grid[scenario, m, dataset], records) for m in ("Ours", "Counting Network", *methods)}
            ours, count = scores["Ours"], scores["Counting Network"]
            others = {m: scores[m] for m in methods if ours and scores[m].keys() == ours.keys()}
            best = max(others, key=lambda m: mean_and_deviation(others[m].values())[0], default="")
            mean = f"{mean_and_deviation(ours.values())[0]:.3f}" if ours else "–"
            tests = _test(ours, others.get(best, {})), _test(ours, count)
            rows.append(FoldComparison(scenario, dataset, mean, best, len(others), *tests))
    return rows


def _by_fold(cell: Cell, records: tables.Records) -> dict[int, float]:
    return {r.recipe.fold: r.scores[cell.metric] for r in cell.selected_records(records)}


def _test(a: dict[int, float], b: dict[int, float]) -> tuple[str, str, str]:
    """Difference, p and number of folds; dashes unless both have run the same folds, two or more."""
    if a.keys() != b.keys() or len(a) < 2:
        return "–", "–", "–"
    test = paired_t_test([a[f] for f in sorted(a)], [b[f] for f in sorted(a)])
    p = "–" if math.isnan(test.p) else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return tables.signed(test.difference), p, str(test.n)


@dataclass(frozen=True)
class PaperRunLine:
    """One recipe on all its folds; None where a fold has not run."""

    slug: str
    name: str
    runs: list[RunSummary | None]


@dataclass(frozen=True)
class PaperRunGroup:
    """A method on all data sets, or the removals of MPEM on one."""

    slug: str
    title: str
    text: str  # what the recipes change beyond the base of the scale
    lines: list[PaperRunLine]

    @property
    def devices(self) -> str:
        return ", ".join(dict.fromkeys(run.device for line in self.lines for run in line.runs if run))


def run_groups(
    scenario: str, scale: Scale, records: tables.Records, chosen: set[str], removals: Sequence[float]
) -> list[PaperRunGroup]:
    """The recipes that have run; the runs of MPEM that "Ours" chose are marked."""
    groups = []
    for method in METHODS:
        recipes = {d: scale.recipes(method, d, scenario) for d in DATASETS}
        groups.append(_run_group(("runs", scenario, method), method, recipes, scale, records, set()))
    for d in DATASETS:
        recipes = {f"{r:g}": scale.recipes("Counting Network", d, scenario, r) for r in removals}
        groups.append(_run_group(("runs", scenario, tables.MPEM, d), f"{tables.MPEM}, {d}", recipes, scale, records, chosen))
    return [group for group in groups if group.lines]


def _run_group(
    names: tuple[str, ...],
    title: str,
    recipes: Mapping[str, Sequence[Recipe]],
    scale: Scale,
    records: tables.Records,
    chosen: set[str],
) -> PaperRunGroup:
    lines = []
    for name, folds in recipes.items():
        found = [records.get(r) for r in folds]
        if any(found):
            runs = [None if r is None else RunSummary(r, chosen=r.key in chosen) for r in found]
            lines.append(PaperRunLine(tables.slug(*names, name), f"r = {name}" if folds[0].removal else name, runs))
    in_base = ("source", "scenario", "fold", "removal", *scale.base.changes)
    changes = next(iter(recipes.values()))[0].changes
    text = ", ".join(f"{k}={v}" for k, v in changes.items() if k not in in_base)
    return PaperRunGroup(tables.slug(*names), title, text, lines)

"""The paper's tables as text: on the terminal, as CSV and as LaTeX; and lists of their runs."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable

from rich.table import Table

from headcount.cli.running import console, print_line
from headcount.datasets import registry
from headcount.errors import HeadcountError
from headcount.experiments.paper import FIGURES, TABLES, Cell, Scale, averages, completeness, table_cells
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

Records = dict[Recipe, Record]


def available(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Those recipes, each once, whose data set is in the cache; the others are reported."""
    recipes = list(dict.fromkeys(recipes))
    absent = sorted({r.source for r in recipes if not registry.is_available(r.source)})
    for name in absent:
        console.print(f"{name} is not in the cache: its cells stay missing (`headcount data fetch {name}`)")
    runnable = [r for r in recipes if r.source not in absent]
    if not runnable:
        raise HeadcountError(
            f"none of {', '.join(absent)} is in the cache; fetch or import one (`headcount data --help`)"
        )
    return runnable


def list_items(items: Iterable[str], scale: Scale, records: Records) -> None:
    """All tables and figures, and how many of their runs are done."""
    table = Table(box=None, pad_edge=False)
    for name in ("item", "what", "runs", "done"):
        table.add_column(name, justify="right" if name in ("runs", "done") else "left")
    for item in items:
        recipes = completeness.required_recipes(item, scale)
        done = sum(r in records for r in recipes)
        table.add_row(item, TABLES[item][0] if item in TABLES else FIGURES[item], str(len(recipes)), str(done))
    console.print(table)


def list_missing(items: list[str], scale: Scale, records: Records) -> None:
    """The runs without a record, and an estimate of their time."""
    missing = completeness.missing_recipes(items, scale, records)
    for recipe in missing:
        print_line(str(recipe))
    seconds = completeness.seconds_per_run(scale, records)
    console.print(
        f"{len(missing)} runs missing, about {len(missing) * seconds / 3600:.1f} hours at {seconds:.1f} s a run"
    )


def print_table(item: str, scale: Scale, records: Records) -> None:
    """Printed value, ours, difference and number of runs of each cell."""
    title = f"{item}: {TABLES[item][0]} (scale {scale.name})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("scenario", "method", "data set", "printed", "ours", "difference", "runs"):
        table.add_column(name, justify="left" if name in ("scenario", "method", "data set") else "right", no_wrap=True)
    for cell in table_cells(item, scale):
        mean, deviation, count = cell.value(records)
        spread = f" ± {deviation:.3f}" if count > 1 else ""  # one run has no standard deviation
        ours = (f"{mean:.3f}{spread}", f"{mean - cell.printed.mean:+.3f}") if count else ("missing", "")
        table.add_row(cell.scenario, cell.method, cell.dataset, _printed(cell), *ours, f"{count}/{cell.n_runs}")
    console.print(table)
    for (scenario, method), average in averages(item).items():
        if average.is_wrong:
            note = f"printed average {average.printed:.3f}, its cells average {average.recomputed:.3f}"
            console.print(f"note: {scenario}, {method}: {note}")


def _printed(cell: Cell) -> str:
    deviation = cell.printed.deviation
    return f"{cell.printed.mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


def as_csv(cells: list[Cell], records: Records) -> str:
    """One line per cell; ours is empty where no run exists."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["scenario", "method", "dataset", "printed_mean", "printed_std", "mean", "std", "runs", "runs_wanted"])
    for c in cells:
        mean, deviation, count = c.value(records)
        ours = [f"{mean:.4f}" if count else "", f"{deviation:.4f}" if count > 1 else ""]
        out.writerow([c.scenario, c.method, c.dataset, c.printed.mean, c.printed.deviation, *ours, count, c.n_runs])
    return text.getvalue()


def as_latex(cells: list[Cell], records: Records) -> str:
    """Our values as a tabular, a row per scenario and method; a dash without runs, (4/5) where some are missing."""
    datasets = list(dict.fromkeys(c.dataset for c in cells))
    lines = [rf"\begin{{tabular}}{{ll{'c' * len(datasets)}}}", r"\toprule"]
    lines += [" & ".join(["Scenario", "Method", *datasets]) + r" \\", r"\midrule"]
    grid = {(c.scenario, c.method, c.dataset): c for c in cells}
    for scenario, method in dict.fromkeys((c.scenario, c.method) for c in cells):
        shown = []
        for dataset in datasets:
            cell = grid[scenario, method, dataset]
            mean, deviation, count = cell.value(records)
            part = f" ({count}/{cell.n_runs})" if count < cell.n_runs else ""
            spread = rf" \pm {deviation:.3f}" if count > 1 else ""
            shown.append(f"${mean:.3f}{spread}${part}" if count else "--")
        lines.append(" & ".join([scenario, method, *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

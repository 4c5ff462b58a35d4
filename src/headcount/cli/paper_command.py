"""The command `headcount paper`: printed beside ours, what is missing, and running it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rich.table import Table

from headcount.cli.experiment_actions import console, run_study
from headcount.datasets import registry
from headcount.errors import HeadcountError, check_choice
from headcount.experiments.paper import FIGURES, SCALES, TABLES, Cell, Scale, averages, table_cells
from headcount.experiments.paper import completeness as so_far
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

Records = dict[Recipe, Record]


class RunOptions(NamedTuple):
    """How missing runs are run: what decides no number."""

    device: str = "auto"
    processes: int = 1
    compile: str = "auto"


DEFAULT_RUN = RunOptions()


def paper(
    item: str | None,
    scale_name: str,
    out: Path,
    *,
    missing: bool,
    run: bool,
    style: str | None,
    page: Path | None,
    precision: str | None = None,
    run_options: RunOptions = DEFAULT_RUN,
) -> None:
    """One table or figure, or all of the paper."""
    scale = SCALES[check_choice("scale", scale_name, SCALES)]
    if precision is not None:
        scale = replace(scale, base=scale.base.replace(precision=precision))
    wanted = [item] if item else so_far.items()
    if style and item not in TABLES:  # told before anything runs
        raise HeadcountError(f"only tables can be written as {style}: {', '.join(TABLES)}")
    if style and missing:
        raise HeadcountError(f"--missing lists runs, --{style} writes a table; give one of the two")
    if run:
        _run([r for name in wanted for r in so_far.required_recipes(name, scale)], out, run_options)
    records = so_far.records_by_recipe(out)
    if page:
        from headcount.reporting.paper_page import write_paper

        console.print(f"page {write_paper(scale, records, page)}")
    if missing:
        _list_missing(wanted, scale, records)
    elif style and item:
        print({"csv": as_csv, "latex": as_latex}[style](table_cells(item, scale), records), end="")
    elif item in TABLES:
        print_table(item, scale, records)
    elif not (run or page):
        _list_items(wanted, scale, records)


def _run(recipes: list[Recipe], out: Path, run_options: RunOptions) -> None:
    recipes = list(dict.fromkeys(recipes))
    gone = sorted({r.source for r in recipes if not registry.is_available(r.source)})
    for name in gone:
        console.print(f"{name} is not in the cache: its cells stay missing (`headcount data fetch {name}`)")
    here = [r for r in recipes if r.source not in gone]
    if not here:
        raise HeadcountError(
            f"none of {', '.join(gone)} is in the cache; fetch or import one (`headcount data --help`)"
        )
    run_study(
        here, out, run_options.device, run_options.processes, dry_run=False, table=False, compile=run_options.compile
    )


def _list_items(wanted: Iterable[str], scale: Scale, records: Records) -> None:
    table = Table(box=None, pad_edge=False)
    for name in ("item", "what", "runs", "done"):
        table.add_column(name, justify="right" if name in ("runs", "done") else "left")
    for item in wanted:
        recipes = so_far.required_recipes(item, scale)
        done = sum(r in records for r in recipes)
        table.add_row(item, TABLES[item][0] if item in TABLES else FIGURES[item], str(len(recipes)), str(done))
    console.print(table)


def _list_missing(wanted: list[str], scale: Scale, records: Records) -> None:
    left = so_far.missing_recipes(wanted, scale, records)
    for recipe in left:
        console.print(str(recipe), soft_wrap=True)
    each = so_far.seconds_per_run(scale, records)
    console.print(f"{len(left)} runs missing, about {len(left) * each / 3600:.1f} hours at {each:.1f} s a run")


# -- one table ------------------------------------------------------------------------------------------------------------


def print_table(item: str, scale: Scale, records: Records) -> None:
    """Printed, ours, difference and number of runs, cell by cell; what is missing is marked."""
    title = f"{item}: {TABLES[item][0]} (scale {scale.name})"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("scenario", "method", "data set", "printed", "ours", "difference", "runs"):
        table.add_column(name, justify="left" if name in ("scenario", "method", "data set") else "right", no_wrap=True)
    for cell in table_cells(item, scale):
        mean, deviation, count = cell.value(records)
        ours = (f"{mean:.3f} ± {deviation:.3f}", f"{mean - cell.printed.mean:+.3f}") if count else ("missing", "")
        table.add_row(cell.scenario, cell.method, cell.dataset, _printed(cell), *ours, f"{count}/{cell.n_runs}")
    console.print(table)
    for (scenario, method), average in averages(item).items():
        if average.is_wrong:
            said = f"printed average {average.printed:.3f}, its cells average {average.recomputed:.3f}"
            console.print(f"note: {scenario}, {method}: {said}")


def _printed(cell: Cell) -> str:
    deviation = cell.printed.deviation
    return f"{cell.printed.mean:.3f}" + (f" ± {deviation:.3f}" if deviation is not None else "")


def as_csv(wanted: list[Cell], records: Records) -> str:
    """One line a cell; ours is empty where it is missing."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(["scenario", "method", "dataset", "printed_mean", "printed_std", "mean", "std", "runs", "runs_wanted"])
    for c in wanted:
        mean, deviation, count = c.value(records)
        ours = [f"{mean:.4f}", f"{deviation:.4f}"] if count else ["", ""]
        out.writerow([c.scenario, c.method, c.dataset, c.printed.mean, c.printed.deviation, *ours, count, c.n_runs])
    return text.getvalue()


def as_latex(wanted: list[Cell], records: Records) -> str:
    """A tabular of ours, a row per scenario and method; a dash where it is missing, (4/5) where only so many runs are there."""
    datasets = list(dict.fromkeys(c.dataset for c in wanted))
    lines = [rf"\begin{{tabular}}{{ll{'c' * len(datasets)}}}", r"\toprule"]
    lines += [" & ".join(["Scenario", "Method", *datasets]) + r" \\", r"\midrule"]
    grid = {(c.scenario, c.method, c.dataset): c for c in wanted}
    for scenario, method in dict.fromkeys((c.scenario, c.method) for c in wanted):
        shown = []
        for dataset in datasets:
            cell = grid[scenario, method, dataset]
            mean, deviation, count = cell.value(records)
            part = f" ({count}/{cell.n_runs})" if count < cell.n_runs else ""
            shown.append(rf"${mean:.3f} \pm {deviation:.3f}${part}" if count else "--")
        lines.append(" & ".join([scenario, method, *shown]) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

"""What the commands print about experiments, fits and the paper's tables: on the terminal, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.table import Table

from headcount.bags import Bags
from headcount.experiments import paper, scores
from headcount.experiments.paper import FIGURES, TABLES, Cell, Scale, table_cells
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.majority import metrics
from headcount.models.fitted import FittedModel
from headcount.reporting.paper_tables import RECROPPED_NOTE, uses_recropped_svhn
from headcount.reporting.results_table import display_names
from headcount.training.distributed import rank

Records = dict[Recipe, Record]
_size: tuple[int | None, int | None] = (None, None) if sys.stdout.isatty() else (120, 50)
# without markup, because names and paths may contain [brackets]; of several training processes only the first prints
console = Console(highlight=False, markup=False, width=_size[0], height=_size[1], quiet=rank() > 0)


def print_line(line: str) -> None:
    """Print without wrapping."""
    console.print(line, soft_wrap=True)


def _table(*names: str, left: int = 1, no_wrap: bool = True, title: str | None = None) -> Table:
    """A table without lines, of which the first columns are aligned to the left."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=no_wrap)
    return table


def print_results(rows: Iterable[scores.Row]) -> None:
    """The results, one table for each source and scenario."""
    rows = sorted(rows, key=lambda row: (row.source, row.scenario))
    names, remarks = display_names(rows)
    named = zip(names, rows, strict=True)
    for (source, scenario), group in groupby(named, key=lambda pair: (pair[1].source, pair[1].scenario)):
        table = _table(f"{source}, {scenario}", "runs", "instance accuracy", "bag accuracy", "consistency")
        for name, row in group:
            scores = (row.score(m) for m in ("instance_accuracy", "bag_accuracy", "consistency_rate"))
            cells = [f"{mean:.3f} ± {deviation:.3f}" if count else "–" for mean, deviation, count in scores]
            table.add_row(name, str(len(row.records)), *cells)
        console.print(table)
    for name, remark in remarks.items():
        print_line(f"{name}, {remark}")


def print_methods(model: FittedModel) -> None:
    """The methods that `fit` compared, the best first."""
    truth = model.metadata["data"]["truth"]
    table = _table("method", "loss on held-out labels", "bag accuracy", *(["instances (not used)"] if truth else []), "")
    for c in model.metadata["methods"]:
        cells = [_number(c["loss"], 4), _number(c["bag_accuracy"], 3)]
        cells += [_number(c["instance_accuracy"], 3)] if truth else []
        table.add_row(c["title"], *cells, "kept" if c["chosen"] else c["note"] or ("baseline" if c["baseline"] else ""))
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def bag_statistics(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B,) share of the label's class, label, and whether the vote is a tie; of bags with truth."""
    assert bags.truth is not None
    truth, label, bag = bags.truth.numpy(), bags.label.numpy(), bags.bag.numpy()
    votes = metrics.count_votes(truth, bag, len(bags), len(bags.classes))
    return metrics.label_share(truth, label, bag), label, (votes == votes.max(1, keepdims=True)).sum(1) > 1


def print_bags(splits: Mapping[str, Bags]) -> None:
    """Size, majority shares, ties and labels of each split."""
    names = ("split", "bags", "instances", "majority share (min / mean / max)", "ties", "labels per class")
    table = _table(*names, left=len(names), no_wrap=False)
    for name, bags in splits.items():
        share, label, tied = bag_statistics(bags)
        shares = f"{share.min():.3f} / {share.mean():.3f} / {share.max():.3f}"
        per_class = " ".join(map(str, np.bincount(label, minlength=len(bags.classes))))
        table.add_row(name, str(len(bags)), str(len(bags.index)), shares, f"{tied.mean():.1%}", per_class)
    console.print(table)


def list_items(items: Iterable[str], scale: Scale, records: Records) -> None:
    """All tables and figures, and how many of their runs are done."""
    table = _table("item", "what", "runs", "done", left=2, no_wrap=False)
    for item in items:
        recipes = paper.required_recipes(item, scale)
        done = sum(r in records for r in recipes)
        table.add_row(item, TABLES[item][0] if item in TABLES else FIGURES[item], str(len(recipes)), str(done))
    console.print(table)


def list_missing(items: list[str], scale: Scale, records: Records) -> None:
    """The runs without a record, and an estimate of their time."""
    missing = paper.missing_recipes(items, scale, records)
    for recipe in missing:
        print_line(str(recipe))
    seconds = paper.seconds_per_run(scale, records)
    console.print(f"{len(missing)} runs missing, about {len(missing) * seconds / 3600:.1f} hours at {seconds:.1f} s a run")


def print_table(item: str, scale: Scale, records: Records) -> None:
    """Printed value, ours, difference and number of runs of each cell."""
    title = f"{item}: {TABLES[item][0]} (scale {scale.name})"
    table = _table("scenario", "method", "data set", "printed", "ours", "difference", "runs", left=3, title=title)
    for cell in table_cells(item, scale):
        mean, deviation, count = cell.value(records)
        spread = f" ± {deviation:.3f}" if count > 1 else ""  # one run has no standard deviation
        ours = (f"{mean:.3f}{spread}", f"{mean - cell.printed.mean:+.3f}") if count else ("missing", "")
        printed = f"{cell.printed.mean:.3f}" + (
            f" ± {cell.printed.deviation:.3f}" if cell.printed.deviation is not None else ""
        )
        table.add_row(cell.scenario, cell.method, cell.dataset, printed, *ours, f"{count}/{cell.n_runs}")
    console.print(table)
    for (scenario, method), average in paper.averages(item).items():
        if average.is_wrong:
            note = f"printed average {average.printed:.3f}, its cells average {average.recomputed:.3f}"
            console.print(f"note: {scenario}, {method}: {note}")
    if uses_recropped_svhn(records):
        console.print(f"note: SVHN: {RECROPPED_NOTE}", soft_wrap=True)


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

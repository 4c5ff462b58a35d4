"""Write the tables of docs/reference/results.md, benchmark.md and docs/explanation/paper.md from the records: ``python docs/results.py``.

A table stands between ``<!-- results: NAME -->`` and ``<!-- end -->``; NAME is a function below. A test keeps the pages current.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np

from headcount.experiments.benchmark import load_benchmark
from headcount.experiments.paper import (
    ALL_DATASETS,
    DATASETS,
    METHODS,
    SCALES,
    SCENARIOS,
    TABLES,
    Cell,
    Scale,
    records_by_recipe,
    substitute_sources,
    table_cells,
)  # fmt: skip
from headcount.experiments.records import load_records
from headcount.experiments.scores import mean_and_deviation
from headcount.reporting.benchmark_page import markdown_tables
from headcount.reporting.paper_tables import Records, data_remarks, difference_in_errors, paper_table, signed

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import loss_jumps  # noqa: E402

PAGES = tuple(ROOT / "docs" / name for name in ("reference/results.md", "reference/benchmark.md", "explanation/paper.md"))
NAMES = {"CIFAR10": "CIFAR-10", "SVHN": "SVHN", "PATH": "PathMNIST", "OCT": "OCT", ALL_DATASETS: "all"}
NLL = "Output+Mean (nll, not in the paper)"


def current(page: Path) -> str:
    """The page with its tables as the records have them now."""
    records = records_by_recipe(ROOT / "results" / "paper")
    scale = substitute_sources(SCALES["full"], {r.source for r in records})
    pattern = re.compile(r"<!-- results: (\w+) -->\n.*?<!-- end -->", flags=re.S)
    block = "<!-- results: {} -->\n\n{}\n\n<!-- end -->"
    return pattern.sub(lambda m: block.format(m[1], BLOCKS[m[1]](scale, records)), page.read_text())


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, ["---"] * len(header), *lines))


def spread(mean: float, deviation: float | None, n: int = 2) -> str:
    return f"{mean:.3f}" + (f" ± {deviation:.3f}" if n > 1 and deviation is not None else "") if n else "–"


def ours(cell: Cell, records: Records) -> str:
    """Our value with the number of folds; a coarse sweep of r is marked by an asterisk."""
    mean, deviation, n = cell.value(records)
    return f"{spread(mean, deviation, n)} ({n})" + "\\*" * cell.is_coarse(records) if n else "missing"


def in_errors(cell: Cell, records: Records) -> str:
    errors = difference_in_errors(cell, records)
    return "–" if math.isnan(errors) else signed(errors, 1)


def data_name(dataset: str, records: Records) -> str:
    remark, _ = data_remarks(records).get(dataset, ("", ""))
    return f"{NAMES[dataset]} ({remark})" if remark else NAMES[dataset]


def scenario_tables(cells: Sequence[Cell], records: Records, extra: Callable[[str, str], Cell] | None = None) -> str:
    """A table for each scenario: ours, printed and the difference in standard errors, of the data sets that have runs."""
    parts = []
    for scenario in SCENARIOS:
        grid = {(c.method, c.dataset): c for c in cells if c.scenario == scenario}
        datasets = [
            d for d in dict.fromkeys(d for _, d in grid) if any(c.value(records)[2] for (_, e), c in grid.items() if e == d)
        ]
        if not datasets:
            continue
        header = ["method", *(text for d in datasets for text in (data_name(d, records), "printed", "std. errors"))]
        lines = []
        for method in dict.fromkeys(m for m, _ in grid):
            row = [grid[method, d] for d in datasets]
            texts = ((ours(c, records), spread(c.printed.mean, c.printed.deviation), in_errors(c, records)) for c in row)
            lines.append([method, *(text for group in texts for text in group)])
        if extra:
            nll = [ours(extra(d, scenario), records) for d in datasets]
            lines.insert(1, [NLL, *(text for value in nll for text in (value, "–", "–"))])
        parts.append(f"**{scenario}**\n\n{markdown(header, lines)}")
    return "\n\n".join(parts)


def instance_accuracy(scale: Scale, records: Records) -> str:
    """Tables 2 and 4 together, in the order of the methods."""
    cells = {(c.scenario, c.method, c.dataset): c for t in ("table2", "table4") for c in table_cells(t, scale)}
    order = [*METHODS, "Ours"]

    def nll(dataset: str, scenario: str) -> Cell:
        recipes = tuple(r.replace(options={"form": "nll"}) for r in scale.recipes("Output+Mean", dataset, scenario))
        like = cells[scenario, "Output+Mean", dataset]
        return Cell("", scenario, NLL, dataset, like.printed, like.metric, recipes)

    return scenario_tables(sorted(cells.values(), key=lambda c: order.index(c.method)), records, nll)


def bag_accuracy(scale: Scale, records: Records) -> str:
    return scenario_tables(table_cells("table3", scale), records)


def removal(scale: Scale, records: Records) -> str:
    return scenario_tables(table_cells("table6", scale), records)


def consistency(scale: Scale, records: Records) -> str:
    """Table 5, which pools data sets: only with the number of its runs; the deviations are mostly those between data sets."""
    cells = [c for c in table_cells("table5", scale) if c.value(records)[2] > 1]
    lines = (
        [c.scenario, c.method, ours(c, records).replace(")", f" of {c.n_runs})"), spread(c.printed.mean, c.printed.deviation)]
        for c in cells
    )
    return markdown(["scenario", "method", "ours (runs)", "printed"], lines)


def cells(scale: Scale, records: Records) -> str:
    """How much of each table there is, and how it agrees."""
    lines = []
    for name, (title, _) in TABLES.items():
        table = paper_table(name, table_cells(name, scale), records)
        agree = [str(table.n_flagged(flag)) for flag in ("", "▲", "▼")]
        lines.append([f"{name[-1]}: {title}", f"{table.n_complete} of {len(table.entries)}", *agree])
    return markdown(["table", "cells with all runs", "within two standard errors", "above", "below"], lines)


def agreement(scale: Scale, records: Records) -> str:
    """Differences of all cells with five folds, by data set and scenario."""
    lines = []
    for dataset in DATASETS:
        for scenario in SCENARIOS:
            group = [c for t in ("table2", "table4", "table6") for c in table_cells(t, scale)]
            group = [c for c in group if (c.dataset, c.scenario) == (dataset, scenario) and c.value(records)[2] == 5]
            distinct = {c.recipes: c for c in group if not c.is_coarse(records)}.values()  # some rows stand in two tables
            if distinct:
                gaps = np.array([c.value(records)[0] - c.printed.mean for c in distinct])
                errors = np.array([difference_in_errors(c, records) for c in distinct])
                rms = f"{np.sqrt((errors**2).mean()):.1f}"
                lines.append(
                    [data_name(dataset, records), scenario, str(len(gaps)), f"{100 * gaps.mean():+.1f}".replace("-", "−"), rms]
                )
    header = ["data set", "scenario", "cells with five folds", "mean difference, points", "root mean square, standard errors"]
    return markdown(header, lines)


def figure6(scale: Scale, records: Records) -> str:
    """The median error of the majority's estimated share, of every data set and scenario with runs."""
    lines, medians = [], []
    for dataset in DATASETS:
        for scenario in SCENARIOS:
            texts = []
            for method in ("Output+Mean", "Counting Network"):
                runs = [records[r] for r in scale.recipes(method, dataset, scenario) if r in records]
                errors = np.array([v for r in runs for v in r.data["share_difference"]])
                texts.append(
                    f"{signed(np.median(errors))}, {np.mean(errors > 0):.0%} ({len(runs)})".replace("%", " %") if runs else "–"
                )
                medians += [np.median(errors)] if runs and method == "Output+Mean" else []
            if texts != ["–", "–"]:
                lines.append([data_name(dataset, records), scenario, *texts])
    n_above = sum(m > 0 for m in medians)
    summary = f"The median of Output+Mean is above zero in {n_above} of {len(medians)} combinations of data set and scenario."
    return markdown(["data set", "scenario", "Output+Mean", "Counting Network"], lines) + "\n\n" + summary


def jumps(scale: Scale, records: Records) -> str:
    """The jumps of the loss outside CIFAR-10 Various, of the Counting Networks."""
    lines = []
    for dataset in DATASETS:
        for scenario in SCENARIOS:
            place = scale.sources[dataset], scenario.lower()
            group = [r for r in records.values() if r.recipe.label in loss_jumps.METHODS]
            runs = [loss_jumps.summarize(r) for r in group if (r.recipe.source, r.recipe.scenario) == place]
            first = [r["jump"] for r in runs if r["jump"] is not None]
            if runs:
                correlation = loss_jumps.correlation_within_folds(runs)
                span = f"{min(first):,} to {max(first):,}" if first else "–"
                after = sum(r["after_jump"] for r in runs)
                shown = "–" if correlation is None else f"{correlation:.2f}".replace("-", "−")
                lines.append([data_name(dataset, records), scenario, str(len(runs)), str(len(first)), span, str(after), shown])
    header = ["data set", "scenario", "trainings", "with a jump", "first, epoch", "selected after one", "correlation"]
    return markdown(header, lines)


def sampler(scale: Scale, records: Records) -> str:
    """CIFAR-10 Various: the released sampler of bags or ours, TF32 or bf16."""
    folder = ROOT / "results" / "sampler"
    every = {**records, **{r.recipe: r for r in load_records(folder)}} if folder.exists() else records
    lines = []
    printed = {c.method: c for c in table_cells("table4", scale) if (c.scenario, c.dataset) == ("Various", "CIFAR10")}
    for method in ("Counting Network", "Counting Network w/o Count"):
        for how, precision in (("conditional", "bf16"), ("conditional", "tf32"), ("official", "bf16"), ("official", "tf32")):
            recipes = [r.replace(sampler=how, precision=precision) for r in scale.recipes(method, "CIFAR10", "Various")]
            runs = {r.fold: every[r].scores["instance_accuracy"] for r in recipes if r in every}
            three = mean_and_deviation(runs[f] for f in range(3)) if {0, 1, 2} <= runs.keys() else (0.0, 0.0, 0)
            cell = Cell("", "Various", method, "CIFAR10", printed[method].printed, "instance_accuracy", tuple(recipes))
            texts = [ours(cell, every), spread(*three), in_errors(cell, every)]
            lines.append([method, how, precision, *texts])
    header = ["method", "sampler", "precision", "instance accuracy (folds)", "folds 0 to 2", "minus printed, standard errors"]
    return markdown(header, lines)


def available(scale: Scale, records: Records) -> str:
    """What has been run: methods with the number of folds."""
    lines = []
    for dataset in DATASETS:
        for scenario in SCENARIOS:
            folds: dict[int, list[str]] = {}
            for method in METHODS:
                if n := sum(r in records for r in scale.recipes(method, dataset, scenario)):
                    folds.setdefault(n, []).append(method)
            every_r = (scale.recipes("Counting Network", dataset, scenario, removal) for removal in scale.removals)
            swept = [r for recipes in every_r for r in recipes if r in records]
            texts = [f"{', '.join(names)} ({n})" for n, names in sorted(folds.items(), reverse=True)]
            if swept:
                texts.append(f"MPEM with {len({r.removal for r in swept})} values of r ({len({r.fold for r in swept})})")
            if texts:
                lines.append([data_name(dataset, records), scenario, "; ".join(texts)])
    return markdown(["data set", "scenario", "methods (folds)"], lines)


def natural(scale: Scale, records: Records) -> str:
    """Every task of ``headcount benchmark``, whose records are not those of recipes."""
    folder = ROOT / "results" / "natural"
    return markdown_tables(load_benchmark(folder)) if folder.exists() else "These runs have not been made yet."


BLOCKS: dict[str, Callable[[Scale, Records], str]] = {
    f.__name__: f
    for f in (
        instance_accuracy, bag_accuracy, removal, consistency, cells, agreement, figure6, jumps, sampler, available, natural,
    )
}  # fmt: skip


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(current(page))

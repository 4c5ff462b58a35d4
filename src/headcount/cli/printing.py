"""What the commands print about experiments and the paper's tables: on the terminal, as CSV and as LaTeX."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np
from rich.text import Text

from headcount.bags import Bags
from headcount.cli.console import console, plain_table, print_line
from headcount.experiments import paper, scores
from headcount.experiments.paper import FIGURES, TABLES, Cell, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.majority import metrics
from headcount.reporting.paper_tables import AVERAGE, data_remarks, difference_in_errors, paper_table, signed
from headcount.reporting.results_table import METRICS, display_names

Records = dict[Recipe, Record]
StudyLine = tuple[scores.Row, str, scores.PairedTest | None]


def _spread(mean: float, deviation: float | None, count: int = 2, sign: str = "") -> str:
    """A mean with its spread, which a single run does not have; a dash without runs."""
    spread = f" ± {deviation:.3f}" if count > 1 and deviation is not None and not math.isnan(deviation) else ""
    return f"{mean:{sign}.3f}{spread}" if count else "–"


def _study_lines(rows: Iterable[scores.Row]) -> tuple[list[StudyLine], dict[str, str]]:
    """Each method with its name and its test against the best of its source and scenario, which has none; remarks on names."""
    rows = sorted(rows, key=lambda row: (row.source, row.scenario))
    names, remarks = display_names(rows)
    groups = groupby(rows, key=lambda row: (row.source, row.scenario))
    tests = [test for _, group in groups for test in scores.compare_with_best(list(group))]
    return list(zip(rows, names, tests, strict=True)), remarks


def _study_cells(row: scores.Row, test: scores.PairedTest | None) -> list[str]:
    """Runs, three scores, difference from the best, p."""
    test = test or scores.PairedTest(math.nan, math.nan, 0)
    p = "–" if math.isnan(test.p) else f"{test.p:.3f}" if test.p >= 0.0005 else "< 0.001"
    values = (_spread(*row.score(metric)) for metric in list(METRICS)[:3])
    return [str(len(row.records)), *values, _spread(test.difference, test.error, test.n, "+"), p]


def print_results(rows: Iterable[scores.Row]) -> None:
    """The results, one table for each source and scenario, and how far the others are from the best of each."""
    lines, remarks = _study_lines(rows)
    for (source, scenario), group in groupby(lines, key=lambda line: (line[0].source, line[0].scenario)):
        members = list(group)
        best = next((name for _, name, test in members if not test), "")
        table = plain_table(f"{source}, {scenario}", "runs", "instance accuracy", "bag accuracy", "consistency")
        against = plain_table(f"instance accuracy against {best}", "difference ± SE", "p (Holm)", "runs")
        for row, name, test in members:
            cells = _study_cells(row, test)
            table.add_row(name, *cells[:4])
            if test and test.n > 1:
                against.add_row(name, *cells[4:], str(test.n))
        console.print(table)
        if against.row_count:
            console.print(against)
    for name, remark in remarks.items():
        print_line(f"{name}, {remark}")


def study_csv(rows: Iterable[scores.Row]) -> str:
    """One line per method, source and scenario: means, standard deviations and errors, and the difference from the best."""
    header = ["source", "scenario", "method", "runs", *(m + end for m in METRICS for end in ("", "_std", "_se"))]
    lines = []
    for row, name, test in _study_lines(rows)[0]:
        values: list[float] = []
        for metric in METRICS:
            mean, deviation, count = row.score(metric)
            values += (mean, deviation, deviation / math.sqrt(count - 1)) if count > 1 else (mean, math.nan, math.nan)
        values += (test.difference, test.error, test.p) if test else (math.nan,) * 3
        numbers = ["" if math.isnan(v) else f"{v:.5g}" for v in values]
        lines.append([row.source, row.scenario, name, len(row.records), *numbers, test.n if test else ""])
    return _csv([*header, "difference", "difference_se", "p_holm", "runs_compared"], lines)


def study_latex(rows: Iterable[scores.Row]) -> str:
    """A tabular with a row per method, source and scenario; the difference from the best with its standard error and p."""
    header = ["Source", "Scenario", "Method", "Runs", *list(METRICS.values())[:3], "Difference", "$p$"]
    lines, remarks = _study_lines(rows)
    cells = [
        [*map(_escape, (row.source, row.scenario, name)), *map(_math, _study_cells(row, test))] for row, name, test in lines
    ]
    notes = [_escape(f"{name}, {remark}") for name, remark in remarks.items()]
    about = "Means and standard deviations. Differences of the instance accuracy from the best, with standard errors; "
    notes.append(about + "$p$: paired $t$-test over the runs, Holm-corrected.")
    return _latex(header, cells, 3, notes)


def _math(cell: str) -> str:
    return "--" if cell == "–" else f"${cell.replace('±', chr(92) + 'pm')}$"


def _escape(text: str) -> str:
    return re.sub(r"([&%_#$])", r"\\\1", text)


def _csv(header: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *lines])
    return text.getvalue()


def _latex(header: Sequence[str], lines: Iterable[Sequence[str]], left: int, notes: Sequence[str]) -> str:
    """A tabular (booktabs), its first columns aligned to the left, with notes below."""
    head, *rows = (" & ".join(line) + r" \\" for line in (header, *lines))
    rows += [r"\midrule"] if notes else []
    rows += [rf"\multicolumn{{{len(header)}}}{{l}}{{\emph{{{note}}}}} \\" for note in notes]
    begin = rf"\begin{{tabular}}{{{'l' * left}{'c' * (len(header) - left)}}}"
    return "\n".join([begin, r"\toprule", head, r"\midrule", *rows, r"\bottomrule", r"\end{tabular}"]) + "\n"


def bag_statistics(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B,) share of the label's class, label, and whether the vote is a tie; of bags with truth."""
    assert bags.truth is not None
    truth, label, bag = bags.truth.numpy(), bags.label.numpy(), bags.bag.numpy()
    votes = metrics.count_votes(truth, bag, len(bags), len(bags.classes))
    return metrics.label_share(truth, label, bag), label, (votes == votes.max(1, keepdims=True)).sum(1) > 1


def print_bags(splits: Mapping[str, Bags]) -> None:
    """Size, majority shares, ties and labels of each split."""
    names = ("split", "bags", "instances", "majority share (min / mean / max)", "ties", "labels per class")
    table = plain_table(*names, left=len(names), no_wrap=False)
    for name, bags in splits.items():
        share, label, tied = bag_statistics(bags)
        shares = f"{share.min():.3f} / {share.mean():.3f} / {share.max():.3f}"
        per_class = " ".join(map(str, np.bincount(label, minlength=len(bags.classes))))
        table.add_row(name, str(len(bags)), str(len(bags.index)), shares, f"{tied.mean():.1%}", per_class)
    console.print(table)


def list_items(items: Iterable[str], scale: Scale, records: Records) -> None:
    """All tables and figures, and how many of their runs are done."""
    table = plain_table("item", "what", "runs", "done", left=2, no_wrap=False)
    for item in items:
        recipes = paper.required_recipes(item, scale)
        done = sum(r in records for r in recipes)
        table.add_row(item, TABLES[item][0] if item in TABLES else FIGURES[item], str(len(recipes)), str(done))
    console.print(table)


def list_missing(recipes: Iterable[Recipe], scale: Scale, records: Records) -> None:
    """The runs without a record, and an estimate of their time."""
    missing = [r for r in dict.fromkeys(recipes) if r not in records]
    for recipe in missing:
        print_line(str(recipe))
    seconds = paper.seconds_per_run(scale, records)
    console.print(f"{len(missing)} runs missing, about {len(missing) * seconds / 3600:.1f} hours at {seconds:.1f} s a run")


def print_table(item: str, cells: Sequence[Cell], scale: Scale, records: Records) -> None:
    """Printed value, ours, difference and number of runs of each of the table's cells."""
    title = f"{item}: {TABLES[item][0]} (scale {scale.name})"
    columns = ("printed", "ours", "difference", "std. errors", "runs")
    table = plain_table("scenario", "method", "data set", *columns, left=3, title=title)
    for cell in cells:
        mean, deviation, count = cell.value(records)
        ours = ("missing", "", "")
        if count:
            errors = difference_in_errors(cell, records)
            text = "–" if math.isnan(errors) else signed(errors, 1)
            ours = (_spread(mean, deviation, count), signed(mean - cell.printed.mean), text)
        printed, coarse = _spread(cell.printed.mean, cell.printed.deviation), ", coarse r" * cell.is_coarse(records)
        table.add_row(cell.scenario, cell.method, cell.data, printed, *ours, f"{count}/{cell.n_runs}{coarse}")
    console.print(table)
    for (scenario, method), average in paper.averages(item).items():
        if average.is_wrong and (scenario, method) in {(c.scenario, c.method) for c in cells}:
            note = f"printed average {average.printed:.3f}, its cells average {average.recomputed:.3f}"
            console.print(f"note: {scenario}, {method}: {note}")
    for dataset, (_, text) in data_remarks(records).items():
        console.print(f"note: {dataset}: {text}", soft_wrap=True)


def print_matrix(item: str, cells: Sequence[Cell], records: Records) -> None:
    """Methods by data sets, a matrix for each scenario: ours, printed, and their difference in standard errors, coloured."""
    colours = {"near": "green", "apart": "yellow", "far": "red"}
    for block in paper_table(item, cells, records).blocks:
        names = [name for name in block.columns if name != AVERAGE]
        title = f"{item}, {block.title or 'all data sets'}: ours, printed, difference in standard errors"
        table = plain_table("method", *names, left=1, title=title)
        for method, entries in block.lines:
            shown = [(f"{e.ours.mean if e.link else '–'}  {e.printed.mean}  {e.text or '–':>5}", e.agreement) for e in entries]
            table.add_row(method, *(Text(text, colours.get(agreement, "")) for text, agreement in shown[: len(names)]))
        console.print(table)


def as_csv(cells: list[Cell], records: Records) -> str:
    """One line per cell; ours is empty where no run exists. ``source`` is what our numbers are of."""
    header = ["scenario", "method", "dataset", "printed_mean", "printed_std", "mean", "std", "runs", "runs_wanted"]
    lines = []
    for c in cells:
        mean, deviation, count = c.value(records)
        ours = [f"{mean:.4f}" if count else "", f"{deviation:.4f}" if count > 1 else "", count, c.n_runs]
        source = "/".join(dict.fromkeys(r.source for r in c.recipes))
        sweep = "coarse" if c.is_coarse(records) else ""
        lines.append([c.scenario, c.method, c.dataset, c.printed.mean, c.printed.deviation, *ours, source, sweep])
    return _csv([*header, "source", "sweep"], lines)


def as_latex(cells: list[Cell], records: Records) -> str:
    """Our values as a tabular, a row per scenario and method; a dash without runs, (4/5) where some are missing."""
    datasets, lines = {c.dataset: c.data for c in cells}, []
    grid = {(c.scenario, c.method, c.dataset): c for c in cells}
    for scenario, method in dict.fromkeys((c.scenario, c.method) for c in cells):
        shown = []
        for dataset in datasets:
            cell = grid[scenario, method, dataset]
            mean, deviation, count = cell.value(records)
            coarse = ", coarse r" * cell.is_coarse(records)
            part = f" ({count}/{cell.n_runs}{coarse})" if 0 < count < cell.n_runs or coarse else ""
            shown.append(_math(_spread(mean, deviation, count)) + part)
        lines.append([scenario, method, *shown])
    stand_ins = ["Digits and generated stand-ins: a test of the pipeline, not results on the paper's data sets"]
    sources = {r.source for c in cells for r in c.recipes} - {d.lower() for d in paper.DATASETS} - {*paper.SUBSTITUTES.values()}
    used = {r: records[r] for c in cells for r in c.recipes if r in records}
    notes = [f"{dataset}: {text}" for dataset, (_, text) in data_remarks(used).items()] + (stand_ins if sources else [])
    return _latex(["Scenario", "Method", *datasets.values()], lines, 2, notes)

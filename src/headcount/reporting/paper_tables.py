"""The tables of the paper: our values beside the printed ones, averages, and footnotes on inconsistencies of the paper."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from headcount.datasets.registry import SOURCES
from headcount.experiments.paper import ALL_DATASETS, DATASETS, OURS, SCENARIOS, SUBSTITUTES, TABLES, Cell, averages
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import mean_and_deviation, paired_t_test
from headcount.reporting.render import read_resource
from headcount.reporting.results_table import TableCell

Records = Mapping[Recipe, Record]
CellKey = tuple[str, str, str]  # scenario, method, data set
Footnotes = Sequence[Mapping[str, Any]]
AVERAGE = "Average"
MPEM = "Counting Network + MPEM"
RECROPPED_SVHN = "423d8b9c077da6756fde7b8aa1103128434510b6949089be583cc6ece298f3f3"  # checksum of the data
RECROPPED_NOTE = (
    "the images are re-cropped from format 1 (full numbers) and are not the official 32 × 32 crops; our values and the "
    "printed ones are not of exactly the same data"
)
_PRINTED_FOLDS = 5
_ROUNDING = 0.001 / math.sqrt(12)  # standard deviation of what a printed mean loses at three decimals


def slug(*words: str) -> str:
    """As in "various-feature-mean-r-0-5"."""
    return "-".join(re.sub(r"[^a-z0-9]+", "-", w.lower()).strip("-") for w in words)


def data_remarks(records: Records) -> dict[str, tuple[str, str]]:
    """Where our values are not exactly of the paper's data: data set -> the remark in a word or two, and in full."""
    remarks = {}
    if any(r.data["data"].get("checksum") == RECROPPED_SVHN for r in records.values()):
        remarks["SVHN"] = "re-cropped", RECROPPED_NOTE
    if any(recipe.source == SUBSTITUTES["oct"] for recipe in records):
        remarks["OCT"] = "46,453 originals", SOURCES[SUBSTITUTES["oct"]].note
    return remarks


class PaperEntry(NamedTuple):
    """A cell as shown: our value, the printed one and their difference."""

    ours: TableCell
    printed: TableCell
    difference: str = ""
    errors: float = math.nan  # the difference in standard errors
    runs: str = ""
    complete: bool = False
    link: str = ""
    recomputed: str = ""  # a printed average that its cells do not give
    notes: tuple[int, ...] = ()
    pair: tuple[float, float] | None = None  # printed and ours, as numbers

    @property
    def flag(self) -> str:
        """▲ or ▼ beyond two standard errors."""
        return "▲" if self.errors > 2 else "▼" if self.errors < -2 else ""

    @property
    def agreement(self) -> str:
        """Near, apart (beyond two standard errors) or far (beyond three); empty if unknown."""
        size = abs(self.errors)
        return "" if math.isnan(size) else "near" if size <= 2 else "apart" if size <= 3 else "far"

    @property
    def text(self) -> str:
        """The difference in standard errors, as in "−1.7"."""
        return "" if math.isnan(self.errors) else signed(self.errors, 1)


class PaperTable(NamedTuple):
    """One table of the paper, ready for the page."""

    slug: str
    title: str
    blocks: list[SimpleNamespace]  # matrices of entries: title, columns with their footnotes, a line per method
    footnotes: list[str]
    entries: list[PaperEntry]  # without averages

    @property
    def n_complete(self) -> int:
        return sum(e.complete for e in self.entries)

    def n_flagged(self, flag: str) -> int:
        return sum(e.flag == flag for e in self.entries if e.complete and e.agreement)


def paper_table(name: str, cells: Sequence[Cell], records: Records) -> PaperTable:
    """A table from its cells and all records."""
    notes = _footnotes(name)
    entries = {(c.scenario, c.method, c.dataset): _entry(c, records, notes) for c in cells}
    shown = entries | _average_entries(name, entries, notes)
    methods = list(dict.fromkeys(c.method for c in cells))
    pooled = cells[0].dataset == ALL_DATASETS
    blocks = []
    for title in [""] if pooled else list(dict.fromkeys(c.scenario for c in cells)):
        keys = [(s, ALL_DATASETS) for s in SCENARIOS] if pooled else [(title, d) for d in (*DATASETS, AVERAGE)]
        columns = {s if pooled else d: _note_numbers(notes, s, "", d) for s, d in keys}
        lines = _mark_best([[shown[s, m, d] for s, d in keys] for m in methods])
        blocks.append(SimpleNamespace(title=title, columns=columns, lines=list(zip(methods, lines, strict=True))))
    return PaperTable(name, TABLES[name][0], blocks, [note["text"] for note in notes], list(entries.values()))


def _entry(cell: Cell, records: Records, notes: Footnotes) -> PaperEntry:
    (mean, deviation, count), (printed, printed_deviation) = cell.value(records), cell.printed
    missing = cell.missing(records)
    remark = ", coarse r" if cell.is_coarse(records) else "" if missing or count == cell.n_runs else " defined"
    entry = PaperEntry(
        ours=TableCell("missing" if missing else "undefined"),
        printed=TableCell(f"{printed:.3f}", "" if printed_deviation is None else f"± {printed_deviation:.3f}"),
        runs=f"{count}/{cell.n_runs}{remark}",
        notes=_note_numbers(notes, cell.scenario, cell.method, cell.dataset),
    )
    if not count:
        return entry
    return entry._replace(
        ours=TableCell(f"{mean:.3f}", f"± {deviation:.3f}" if count > 1 else ""),
        difference=signed(mean - printed),
        errors=difference_in_errors(cell, records),
        complete=not missing,
        link=_link(cell),
        pair=(printed, mean),
    )


def difference_in_errors(cell: Cell, records: Records) -> float:
    """Our mean minus the printed one, in standard errors of this difference.

    Both means are of folds, the printed one of five. Deviations are population deviations; the variance of a single fold is
    estimated from those of both, so a mean of one fold has a standard error too. Undefined where a deviation is that of several
    data sets.
    """
    mean, deviation, n = cell.value(records)
    if not n or cell.dataset == ALL_DATASETS or cell.printed.deviation is None:
        return math.nan
    squares = n * deviation**2 + _PRINTED_FOLDS * cell.printed.deviation**2
    variance = squares / (n + _PRINTED_FOLDS - 2) * (1 / n + 1 / _PRINTED_FOLDS)
    return (mean - cell.printed.mean) / math.hypot(math.sqrt(variance), _ROUNDING)


def _link(cell: Cell) -> str:
    """The runs behind a value: a line, all lines of a method, or the whole sweep of MPEM."""
    if cell.method in OURS:
        return slug("runs", cell.scenario, MPEM, cell.dataset)
    if cell.method.startswith("r="):
        removal = float(cell.method.removeprefix("r="))
        name = (MPEM, cell.dataset, f"{removal:g}") if removal else ("Counting Network", cell.dataset)
        return slug("runs", cell.scenario, *name)
    return slug("runs", cell.scenario, cell.method, *([] if cell.dataset == ALL_DATASETS else [cell.dataset]))


def _average_entries(name: str, entries: Mapping[CellKey, PaperEntry], notes: Footnotes) -> dict[CellKey, PaperEntry]:
    """Our averages only over all data sets; the printed ones beside what their cells give, where the two differ."""
    shown = {}
    for (scenario, method), average in averages(name).items():
        row = [entries[scenario, method, d] for d in DATASETS]
        values = [e.pair[1] for e in row if e.pair and e.complete]
        complete = len(values) == len(row)
        mean = math.fsum(values) / len(values) if complete else math.nan
        expected = average.recomputed if average.is_wrong else average.printed
        shown[scenario, method, AVERAGE] = PaperEntry(
            ours=TableCell(f"{mean:.3f}" if complete else "–"),
            printed=TableCell(f"{average.printed:.3f}"),
            recomputed=f"{average.recomputed:.3f}" if average.is_wrong else "",
            difference=signed(mean - expected) if complete else "",
            complete=complete,
            notes=_note_numbers(notes, scenario, method, AVERAGE),
        )
    return shown


def _mark_best(lines: list[list[PaperEntry]]) -> list[list[PaperEntry]]:
    """The best printed value of each column and, once the column is complete, the best of ours; ties are all marked."""
    for k, column in enumerate(zip(*lines, strict=True)):
        best_printed = max(e.recomputed or e.printed.mean for e in column)
        best_ours = max(e.ours.mean for e in column) if all(e.complete for e in column) else None
        for line, e in zip(lines, column, strict=True):
            ours = e.ours._replace(best=e.ours.mean == best_ours)
            printed = e.printed._replace(best=(e.recomputed or e.printed.mean) == best_printed)
            line[k] = e._replace(ours=ours, printed=printed)
    return lines


def signed(value: float, digits: int = 3) -> str:
    return f"{0:.{digits}f}" if abs(value) < 0.5 * 10**-digits else f"{value:+.{digits}f}".replace("-", "−")


def _footnotes(table: str) -> list[dict[str, Any]]:
    """Remarks on some cells, and wrong averages, in the order of the table; the method "" is the head of the column."""
    data = json.loads(read_resource("paper_notes.json"))
    notes = [note for note in data["remarks"] if note["table"] == table]
    for (scenario, method), average in averages(table).items():
        if average.is_wrong:
            text = f"Printed as {average.printed:.3f}, but its four cells average {average.recomputed:.3f}, which our "
            text += "difference refers to." + (f" {data['ranking']}" if table == "table2" else "")
            notes.append({"scenario": scenario, "methods": [method], "datasets": [AVERAGE], "text": text})
    return sorted(notes, key=lambda note: SCENARIOS.index(note["scenario"]))


def _note_numbers(notes: Footnotes, scenario: str, method: str, dataset: str) -> tuple[int, ...]:
    where = (n["scenario"] == scenario and method in n["methods"] and dataset in n["datasets"] for n in notes)
    return tuple(i for i, applies in enumerate(where, 1) if applies)


def comparisons(cells: Sequence[Cell], records: Records) -> list[SimpleNamespace]:
    """ "Ours" against the best other method and the Counting Network, on each data set in each scenario."""
    grid = {(c.scenario, c.method, c.dataset): c for c in cells}
    methods = list(dict.fromkeys(c.method for c in cells if c.table == "table2" and c.method not in OURS))
    rows = []
    for scenario in SCENARIOS:
        for dataset in DATASETS:
            cells_of = {m: grid[scenario, m, dataset] for m in ("Ours", "Counting Network", *methods)}
            scores = {m: {r.recipe.fold: r.scores[c.metric] for r in c.selected_records(records)} for m, c in cells_of.items()}
            ours, count = scores["Ours"], scores["Counting Network"]
            others = {m: scores[m] for m in methods if ours and scores[m].keys() == ours.keys()}
            best = max(others, key=lambda m: mean_and_deviation(others[m].values())[0], default="")
            rows.append(
                SimpleNamespace(
                    scenario=scenario,
                    dataset=dataset,
                    ours=f"{mean_and_deviation(ours.values())[0]:.3f}" if ours else "–",
                    other=best,
                    n_others=len(others),
                    against_other=_test(ours, others.get(best, {})),
                    against_count=_test(ours, count),
                )
            )
    return rows


def _test(a: dict[int, float], b: dict[int, float]) -> tuple[str, str, str]:
    """Difference, p and number of folds; dashes unless both have run the same folds, two or more."""
    if a.keys() != b.keys() or len(a) < 2:
        return "–", "–", "–"
    test = paired_t_test([a[f] for f in sorted(a)], [b[f] for f in sorted(a)])
    p = "–" if math.isnan(test.p) else "< 0.001" if test.p < 0.001 else f"{test.p:.3f}"
    return signed(test.difference), p, str(test.n)

"""The tables of the paper: our values beside the printed ones, averages, and footnotes on inconsistencies of the paper."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from headcount.experiments.paper.cells import ALL_DATASETS, OURS, TABLES, Cell, PrintedValue, averages
from headcount.experiments.paper.scales import DATASETS, SCENARIOS
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.reporting.results_table import TableCell
from headcount.reporting.templates import read_resource

Records = Mapping[Recipe, Record]
CellKey = tuple[str, str, str]  # scenario, method, data set
AVERAGE = "Average"
MPEM = "Counting Network + MPEM"
RECROPPED_SVHN = "423d8b9c077da6756fde7b8aa1103128434510b6949089be583cc6ece298f3f3"  # checksum of the data
RECROPPED_NOTE = (
    "the images are re-cropped from format 1 (full numbers) and are not the official 32 × 32 crops; our values and the "
    "printed ones are not of exactly the same data"
)
_ROUNDING = 0.0015  # error of a mean and twice a deviation that are printed with three decimals


def slug(*words: str) -> str:
    """
    >>> slug("Various", "Feature+Mean", "r=0.5")
    'various-feature-mean-r-0-5'
    """
    return "-".join(re.sub(r"[^a-z0-9]+", "-", w.lower()).strip("-") for w in words)


def uses_recropped_svhn(records: Records) -> bool:
    """Whether any of the records is of SVHN as re-cropped from format 1."""
    return any(r.data["data"].get("checksum") == RECROPPED_SVHN for r in records.values())


@dataclass(frozen=True)
class PaperEntry:
    """A cell as shown: our value, the printed one and their difference."""

    ours: TableCell
    printed: TableCell
    difference: str = ""
    flag: str = ""  # ▲ or ▼ beyond two printed deviations
    runs: str = ""
    complete: bool = False
    link: str = ""
    recomputed: str = ""  # a printed average that its cells do not give
    notes: tuple[int, ...] = ()
    pair: tuple[float, float] | None = None  # printed and ours, as numbers


@dataclass(frozen=True)
class PaperBlock:
    """A matrix of entries, a row per method."""

    title: str
    columns: dict[str, tuple[int, ...]]  # name -> its footnotes
    lines: list[tuple[str, list[PaperEntry]]]


@dataclass(frozen=True)
class PaperTable:
    """One table of the paper, ready for the page."""

    slug: str
    title: str
    blocks: list[PaperBlock]
    footnotes: list[str]
    entries: list[PaperEntry]  # without averages

    @property
    def number(self) -> str:
        return self.slug.removeprefix("table")

    @property
    def n_complete(self) -> int:
        return sum(e.complete for e in self.entries)

    def count(self, flag: str) -> int:
        return sum(e.flag == flag for e in self.entries if e.complete)


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
        blocks.append(PaperBlock(title, columns, list(zip(methods, lines, strict=True))))
    return PaperTable(name, TABLES[name][0], blocks, [note.text for note in notes], list(entries.values()))


def _entry(cell: Cell, records: Records, notes: Sequence[Footnote]) -> PaperEntry:
    mean, deviation, count = cell.value(records)
    missing = cell.missing(records)
    entry = PaperEntry(
        ours=TableCell("missing" if missing else "undefined"),
        printed=TableCell(f"{cell.printed.mean:.3f}", _format_deviation(cell.printed.deviation)),
        runs=f"{count}/{cell.n_runs}" + ("" if missing or count == cell.n_runs else " defined"),
        notes=_note_numbers(notes, cell.scenario, cell.method, cell.dataset),
    )
    if not count:
        return entry
    return replace(
        entry,
        ours=TableCell(f"{mean:.3f}", _format_deviation(deviation if count > 1 else None)),
        difference=signed(mean - cell.printed.mean),
        flag=deviation_flag(mean, cell.printed),
        complete=not missing,
        link=_link(cell),
        pair=(cell.printed.mean, mean),
    )


def deviation_flag(mean: float, printed: PrintedValue) -> str:
    """▲ or ▼ if the mean is more than two printed deviations away, beyond rounding."""
    far = abs(mean - printed.mean) > 2 * (printed.deviation or 0.0) + _ROUNDING
    return ("▲" if mean > printed.mean else "▼") if far else ""


def _link(cell: Cell) -> str:
    """The runs behind a value: a line, all lines of a method, or the whole sweep of MPEM."""
    if cell.method in OURS:
        return slug("runs", cell.scenario, MPEM, cell.dataset)
    if cell.method.startswith("r="):
        removal = float(cell.method.removeprefix("r="))
        name = (MPEM, cell.dataset, f"{removal:g}") if removal else ("Counting Network", cell.dataset)
        return slug("runs", cell.scenario, *name)
    return slug("runs", cell.scenario, cell.method, *([] if cell.dataset == ALL_DATASETS else [cell.dataset]))


def _average_entries(name: str, entries: Mapping[CellKey, PaperEntry], notes: Sequence[Footnote]) -> dict[CellKey, PaperEntry]:
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
    columns = []
    for column in zip(*lines, strict=True):
        printed = max(e.recomputed or e.printed.mean for e in column)
        ours = max(e.ours.mean for e in column) if all(e.complete for e in column) else None
        columns.append(
            [
                replace(
                    e,
                    ours=replace(e.ours, best=e.ours.mean == ours),
                    printed=replace(e.printed, best=(e.recomputed or e.printed.mean) == printed),
                )
                for e in column
            ]
        )
    return [list(line) for line in zip(*columns, strict=True)]


def _format_deviation(value: float | None) -> str:
    return "" if value is None else f"± {value:.3f}"


def signed(value: float) -> str:
    """
    >>> signed(-0.0123), signed(-0.0001)
    ('−0.012', '0.000')
    """
    return "0.000" if abs(value) < 0.0005 else f"{value:+.3f}".replace("-", "−")


class Footnote(NamedTuple):
    """A remark on some cells; the method "" is the head of the column."""

    scenario: str
    methods: Sequence[str]
    datasets: Sequence[str]
    text: str


def _footnotes(table: str) -> list[Footnote]:
    """Remarks and wrong averages, in the order of the table."""
    data = json.loads(read_resource("paper_notes.json"))
    notes = [Footnote(*(n[k] for k in Footnote._fields)) for n in data["remarks"] if n["table"] == table]
    for (scenario, method), average in averages(table).items():
        if average.is_wrong:
            text = f"Printed as {average.printed:.3f}, but its four cells average {average.recomputed:.3f}, which our "
            text += "difference refers to." + (f" {data['ranking']}" if table == "table2" else "")
            notes.append(Footnote(scenario, (method,), (AVERAGE,), text))
    return sorted(notes, key=lambda note: SCENARIOS.index(note.scenario))


def _note_numbers(notes: Sequence[Footnote], scenario: str, method: str, dataset: str) -> tuple[int, ...]:
    return tuple(i for i, n in enumerate(notes, 1) if n.scenario == scenario and method in n.methods and dataset in n.datasets)

"""Records in, one HTML file out: tables, figures and a few bags to look at, readable offline on any screen.

Nothing in the page runs or is fetched: no script, no font, no request, and a policy that forbids them. Every string is data
and is escaped; only the style sheet and the figures, which escape their own text, go in as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.records import Record
from headcount.experiments.select import Row, rows
from headcount.io import atomic_write
from headcount.reporting.figures import FigureGroup, section_figures
from headcount.reporting.gallery import Gallery, LoadSource, build_gallery, cached_source
from headcount.reporting.method_names import display_names
from headcount.reporting.results_table import (
    METRICS,
    ReportMethod,
    TableCell,
    TableLine,
    best_method,
    data_facts,
    rank_methods,
    score_cell,
    table_lines,
)
from headcount.reporting.svg import method_colours
from headcount.reporting.templates import render_template

_WEIGHT = 2_800_000  # bytes: a page should open at once on a phone


@dataclass(frozen=True)
class ReportSection:
    """One data set in one scenario."""

    slug: str
    source: str
    scenario: str
    best: ReportMethod
    facts: list[tuple[str, str]]
    notes: list[str]
    lines: list[TableLine]
    groups: list[FigureGroup]
    methods: list[ReportMethod]
    records: list[Record]

    @property
    def best_accuracy(self) -> str:
        return f"{100 * round(self.best.accuracy, 3):.1f} %"  # rounded as in the table


@dataclass(frozen=True)
class ReportRun:
    """A line of the list of records."""

    key: str
    name: str
    fold: int
    seed: int
    removal: str
    accuracy: str
    valid_loss: str
    best_epoch: int
    epochs: int
    seconds: str
    device: str
    text: str
    chosen: bool


def write_report(
    records: Sequence[Record],
    path: Path | str,
    title: str = "Learning from majority labels",
    load_source: LoadSource = cached_source,
) -> Path:
    """Write the report of these records to ``path``, whole, and return the path."""
    if not records:
        raise HeadcountError("no records to report on; run a study first, or give the folder of one that has run")
    path = Path(path)
    page = render_report(records, title, load_source)
    atomic_write(path, lambda f: f.write(page.encode()))
    return path


def render_report(records: Sequence[Record], title: str, load_source: LoadSource = cached_source) -> str:
    """The page as a string. The figures are drawn first; the pictures of bags share what room they leave."""
    sections = _sections(records)
    drawn = sum(len(p.svg) for s in sections for g in s.groups for p in g.panels)
    room = max(0, _WEIGHT - drawn - 450 * len(records) - 100_000) // len(sections)
    return render_template(
        "report.html",
        title=title,
        metrics=list(METRICS.values()),
        sections=[(s, _gallery(s, load_source, room), _runs(s)) for s in sections],
        overview=_overview(sections) if len(sections) > 1 else [],
        provenance=provenance(records),
        count=len(records),
        seeds=len({r.data["recipe"]["seed"] for r in records}) > 1,
    )


def _sections(records: Sequence[Record]) -> list[ReportSection]:
    made = rows(records)
    names, remarks = display_names(made)
    groups: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, name in zip(made, names, strict=True):
        groups.setdefault((row.source, row.scenario), []).append((row, name))
    ordered = {place: rank_methods(*zip(*members, strict=True)) for place, members in sorted(groups.items())}
    colours = method_colours(sorted({m.name for named in ordered.values() for m in named}))
    lean = sum(map(len, ordered.values())) > 60  # so many panels of curves weigh, and a reader wants the gist
    return [
        _section(f"s{i}", *place, named, records, colours, lean, remarks)
        for i, (place, named) in enumerate(ordered.items(), 1)
    ]


def _section(
    slug: str,
    source: str,
    scenario: str,
    named: list[ReportMethod],
    records: Sequence[Record],
    colours: dict[str, str],
    lean: bool,
    remarks: dict[str, str],
) -> ReportSection:
    left_out = [f"{who}, {what}" for who, what in remarks.items() if any(m.name.startswith(who) for m in named)]
    own = [r for r in records if (r.data["recipe"]["source"], r.data["recipe"]["scenario"]) == (source, scenario)]
    return ReportSection(
        slug=slug,
        source=source,
        scenario=scenario,
        best=best_method(named),
        facts=data_facts(own),
        notes=[*sorted({note for r in own if (note := r.data["data"].get("note"))}), *left_out],
        lines=table_lines(named),
        groups=section_figures(named, own, colours, slug, lean),
        methods=named,
        records=own,
    )


def _gallery(section: ReportSection, load_source: LoadSource, room: int) -> Gallery:
    """Of the best method's records, the first that still has its arrays."""
    records = section.best.row.records
    record = next((r for r in records if r.path.with_suffix(".npz").exists()), records[0])
    return build_gallery(record, section.best.name, load_source, room)


def _overview(sections: Sequence[ReportSection]) -> list[tuple[str, list[TableCell]]]:
    """Instance accuracy of every method on every data set."""
    names = dict.fromkeys(m.name for s in sections for m in s.methods)
    table = []
    for name in names:
        found = [next((m for m in s.methods if m.name == name), None) for s in sections]
        cells = [
            score_cell(m.row, "instance_accuracy", best=m is s.best) if m else TableCell("", "")
            for m, s in zip(found, sections, strict=True)
        ]
        table.append((name, cells))
    return table


def _runs(section: ReportSection) -> list[ReportRun]:
    chosen = {r.key for m in section.methods for r in m.row.records}
    names = {m.row.records[0].method: m.name for m in section.methods}
    order = list(names.values())
    made = [_run(r, names[r.method], r.key in chosen) for r in section.records]
    return sorted(made, key=lambda r: (order.index(r.name), r.fold, r.seed, r.removal))


def _run(record: Record, name: str, chosen: bool) -> ReportRun:
    recipe, fit, made = record.recipe, record.data["fit"], record.data.get("provenance", {})
    accuracy, seconds = record.scores.get("instance_accuracy"), made.get("seconds")
    return ReportRun(
        key=record.key,
        name=name,
        fold=recipe.fold,
        seed=recipe.seed,
        removal=f"{recipe.removal:g}" if recipe.removal else "",
        accuracy="–" if accuracy is None else f"{accuracy:.3f}",
        valid_loss=f"{fit['valid_loss']:.4f}",
        best_epoch=fit["best_epoch"],
        epochs=fit.get("stopped", fit["epochs"]),
        seconds="–" if seconds is None else f"{seconds:,.1f}",
        device=str(made.get("device", "–")),
        text=str(record.data.get("text", record.label)),
        chosen=chosen,
    )


def provenance(records: Sequence[Record]) -> dict[str, Any]:
    """Who made these numbers: commits, versions, devices, days and hours, each said once."""
    made = [r.data.get("provenance", {}) for r in records]
    versions = sorted({f"{k} {v}" for m in made for k, v in (m.get("versions") or {}).items()})
    days = sorted({str(m["started"])[:10] for m in made if m.get("started")})
    return {
        "commits": sorted({str(m["commit"]) for m in made if m.get("commit")}),
        "versions": versions,
        "devices": sorted({str(m["device"]) for m in made if m.get("device")}),
        "days": days if len(days) < 3 else [days[0], days[-1]],
        "hours": sum(m.get("seconds") or 0 for m in made) / 3600,
    }

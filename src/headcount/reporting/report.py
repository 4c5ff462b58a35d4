"""Records in, one HTML file out: tables, figures and example bags, readable offline on any screen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.records import Record
from headcount.experiments.select import Row, rows
from headcount.io import atomic_write
from headcount.reporting import results_table as tables
from headcount.reporting.figures import FigureGroup, section_figures
from headcount.reporting.gallery import Gallery, LoadSource, build_gallery, cached_source
from headcount.reporting.results_table import ReportMethod, RunSummary, TableCell
from headcount.reporting.svg import method_colours
from headcount.reporting.templates import render_template

_MAX_BYTES = 2_800_000  # a page should open at once on a phone


@dataclass(frozen=True)
class ReportSection:
    """One data set in one scenario."""

    slug: str
    source: str
    scenario: str
    notes: list[str]
    methods: list[ReportMethod]  # ranked
    groups: list[FigureGroup]
    records: list[Record]

    @property
    def best(self) -> ReportMethod:
        return tables.best_method(self.methods)

    @property
    def best_accuracy(self) -> str:
        return f"{100 * round(self.best.accuracy, 3):.1f} %"  # rounded as in the table

    @property
    def facts(self) -> list[tuple[str, str]]:
        return tables.data_facts(self.records)

    @property
    def lines(self) -> list[tuple[ReportMethod, list[TableCell]]]:
        return tables.table_lines(self.methods)

    @property
    def runs(self) -> list[RunSummary]:
        """Every record, by the rank of its method, then fold, seed and r."""
        chosen = {r.key for m in self.methods for r in m.row.records}
        names = {m.row.records[0].method: m.name for m in self.methods}
        rank = {name: i for i, name in enumerate(names.values())}
        runs = [RunSummary(r, names[r.method], r.key in chosen) for r in self.records]
        return sorted(runs, key=lambda r: (rank[r.name], r.recipe.fold, r.recipe.seed, r.recipe.removal))

    def gallery(self, load_source: LoadSource, budget: int) -> Gallery:
        """Bags of the best method's first record that has its arrays."""
        records = self.best.row.records
        record = next((r for r in records if r.path.with_suffix(".npz").exists()), records[0])
        return build_gallery(record, self.best.name, load_source, budget)


def write_report(
    records: Sequence[Record],
    path: Path | str,
    title: str = "Learning from majority labels",
    load_source: LoadSource = cached_source,
) -> Path:
    """Write the report of these records to ``path`` atomically and return the path."""
    if not records:
        raise HeadcountError("no records to report on; run a study first, or give the folder of a finished one")
    path = Path(path)
    page = render_report(records, title, load_source)
    atomic_write(path, lambda f: f.write(page.encode()))
    return path


def render_report(records: Sequence[Record], title: str, load_source: LoadSource = cached_source) -> str:
    """The page as a string. Figures are drawn first; the pictures of bags share the remaining bytes."""
    sections = _sections(records)
    drawn = sum(len(p.svg) for s in sections for g in s.groups for p in g.panels)
    budget = max(0, _MAX_BYTES - drawn - 450 * len(records) - 100_000) // len(sections)
    return render_template(
        "report.html",
        title=title,
        metrics=list(tables.METRICS.values()),
        sections=[(s, s.gallery(load_source, budget)) for s in sections],
        overview=_overview(sections) if len(sections) > 1 else [],
        provenance=provenance(records),
        count=len(records),
        seeds=len({r.data["recipe"]["seed"] for r in records}) > 1,
    )


def _sections(records: Sequence[Record]) -> list[ReportSection]:
    table_rows = rows(records)
    names, remarks = tables.display_names(table_rows)
    groups: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, name in zip(table_rows, names, strict=True):
        groups.setdefault((row.source, row.scenario), []).append((row, name))
    ranked = {key: tables.rank_methods(*zip(*members, strict=True)) for key, members in sorted(groups.items())}
    colours = method_colours(sorted({m.name for methods in ranked.values() for m in methods}))
    compact = sum(map(len, ranked.values())) > 60  # bytes: a panel of curves per method
    sections = []
    for i, ((source, scenario), methods) in enumerate(ranked.items(), 1):
        here = [r for r in records if (r.data["recipe"]["source"], r.data["recipe"]["scenario"]) == (source, scenario)]
        notes = sorted({note for r in here if (note := r.data["data"].get("note"))})
        notes += [f"{n}, {text}" for n, text in remarks.items() if any(m.name.startswith(n) for m in methods)]
        figures = section_figures(methods, here, colours, f"s{i}", compact)
        sections.append(ReportSection(f"s{i}", source, scenario, notes, methods, figures, here))
    return sections


def _overview(sections: Sequence[ReportSection]) -> list[tuple[str, list[TableCell]]]:
    """Instance accuracy of every method on every data set."""
    best = [s.best for s in sections]
    by_name = [{m.name: m for m in s.methods} for s in sections]
    return [
        (
            name,
            [
                tables.score_cell(m.row, "instance_accuracy", m is b) if (m := methods.get(name)) else TableCell()
                for methods, b in zip(by_name, best, strict=True)
            ],
        )
        for name in dict.fromkeys(m.name for s in sections for m in s.methods)
    ]


def provenance(records: Sequence[Record]) -> dict[str, Any]:
    """What produced these numbers: distinct commits, versions and devices, first and last day, hours of computing."""
    entries = [r.data.get("provenance", {}) for r in records]
    days = sorted({str(p["started"])[:10] for p in entries if p.get("started")})
    return {
        "commits": sorted({str(p["commit"]) for p in entries if p.get("commit")}),
        "versions": sorted({f"{k} {v}" for p in entries for k, v in (p.get("versions") or {}).items()}),
        "devices": sorted({str(p["device"]) for p in entries if p.get("device")}),
        "days": days if len(days) < 3 else [days[0], days[-1]],
        "hours": sum(p.get("seconds") or 0 for p in entries) / 3600,
    }

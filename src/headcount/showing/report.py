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
from headcount.files import write_whole
from headcount.judging.records import Record
from headcount.judging.select import Row, rows
from headcount.showing.canvas import method_colours
from headcount.showing.figures import Group, figures
from headcount.showing.gallery import Gallery, LoadSource, gallery, local_source
from headcount.showing.names import own_names
from headcount.showing.pages import page
from headcount.showing.tables import METRICS, Cell, Line, Method, best_of, cell, facts, lines, methods

_WEIGHT = 2_800_000  # bytes: a page should open at once on a phone


@dataclass(frozen=True)
class Section:
    """One data set in one scenario."""

    slug: str
    source: str
    scenario: str
    best: Method
    facts: list[tuple[str, str]]
    notes: list[str]
    lines: list[Line]
    groups: list[Group]
    methods: list[Method]
    records: list[Record]

    @property
    def share_right(self) -> str:
        return f"{100 * round(self.best.accuracy, 3):.1f} %"  # rounded as in the table


@dataclass(frozen=True)
class Run:
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
    load_source: LoadSource = local_source,
) -> Path:
    """Write the report of these records to ``path``, whole, and return the path."""
    if not records:
        raise HeadcountError("no records to report on; run a study first, or give the folder of one that has run")
    path = Path(path)
    page = render(records, title, load_source)
    write_whole(path, lambda f: f.write(page.encode()))
    return path


def render(records: Sequence[Record], title: str, load_source: LoadSource = local_source) -> str:
    """The page as a string. The figures are drawn first; the pictures of bags share what room they leave."""
    sections = _sections(records)
    drawn = sum(len(p.svg) for s in sections for g in s.groups for p in g.panels)
    room = max(0, _WEIGHT - drawn - 450 * len(records) - 100_000) // len(sections)
    return page(
        "report.html",
        title=title,
        metrics=list(METRICS.values()),
        sections=[(s, _gallery(s, load_source, room), _runs(s)) for s in sections],
        overview=_overview(sections) if len(sections) > 1 else [],
        made=provenance(records),
        count=len(records),
        seeds=len({r.body["recipe"]["seed"] for r in records}) > 1,
    )


def _sections(records: Sequence[Record]) -> list[Section]:
    made = rows(records)
    names, remarks = own_names(made)
    groups: dict[tuple[str, str], list[tuple[Row, str]]] = {}
    for row, name in zip(made, names, strict=True):
        groups.setdefault((row.source, row.scenario), []).append((row, name))
    ordered = {place: methods(*zip(*members, strict=True)) for place, members in sorted(groups.items())}
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
    named: list[Method],
    records: Sequence[Record],
    colours: dict[str, str],
    lean: bool,
    remarks: dict[str, str],
) -> Section:
    left_out = [f"{who}, {what}" for who, what in remarks.items() if any(m.name.startswith(who) for m in named)]
    own = [r for r in records if (r.body["recipe"]["source"], r.body["recipe"]["scenario"]) == (source, scenario)]
    return Section(
        slug=slug,
        source=source,
        scenario=scenario,
        best=best_of(named),
        facts=facts(own),
        notes=[*sorted({note for r in own if (note := r.body["data"].get("note"))}), *left_out],
        lines=lines(named),
        groups=figures(named, own, colours, slug, lean),
        methods=named,
        records=own,
    )


def _gallery(section: Section, load_source: LoadSource, room: int) -> Gallery:
    """Of the best method's records, the first that still has its arrays."""
    records = section.best.row.records
    record = next((r for r in records if r.path.with_suffix(".npz").exists()), records[0])
    return gallery(record, section.best.name, load_source, room)


def _overview(sections: Sequence[Section]) -> list[tuple[str, list[Cell]]]:
    """Instance accuracy of every method on every data set."""
    names = dict.fromkeys(m.name for s in sections for m in s.methods)
    table = []
    for name in names:
        found = [next((m for m in s.methods if m.name == name), None) for s in sections]
        cells = [
            cell(m.row, "instance_accuracy", best=m is s.best) if m else Cell("", "")
            for m, s in zip(found, sections, strict=True)
        ]
        table.append((name, cells))
    return table


def _runs(section: Section) -> list[Run]:
    chosen = {r.key for m in section.methods for r in m.row.records}
    names = {m.row.records[0].method: m.name for m in section.methods}
    order = list(names.values())
    made = [_run(r, names[r.method], r.key in chosen) for r in section.records]
    return sorted(made, key=lambda r: (order.index(r.name), r.fold, r.seed, r.removal))


def _run(record: Record, name: str, chosen: bool) -> Run:
    recipe, fit, made = record.recipe, record.body["fit"], record.body.get("provenance", {})
    accuracy, seconds = record.scores.get("instance_accuracy"), made.get("seconds")
    return Run(
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
        text=str(record.body.get("text", record.label)),
        chosen=chosen,
    )


def provenance(records: Sequence[Record]) -> dict[str, Any]:
    """Who made these numbers: commits, versions, devices, days and hours, each said once."""
    made = [r.body.get("provenance", {}) for r in records]
    versions = sorted({f"{k} {v}" for m in made for k, v in (m.get("versions") or {}).items()})
    days = sorted({str(m["started"])[:10] for m in made if m.get("started")})
    return {
        "commits": sorted({str(m["commit"]) for m in made if m.get("commit")}),
        "versions": versions,
        "devices": sorted({str(m["device"]) for m in made if m.get("device")}),
        "days": days if len(days) < 3 else [days[0], days[-1]],
        "hours": sum(m.get("seconds") or 0 for m in made) / 3600,
    }

"""All tables and figures of the paper on one page: printed beside ours, every value a link to the runs it is made of.

Like the report: one file, nothing in it runs or is fetched, every string is data and is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headcount.experiments.paper import completeness as so_far
from headcount.experiments.paper.cells import OURS, TABLES, table_cells
from headcount.experiments.paper.scales import SCENARIOS, Scale
from headcount.experiments.records import Record
from headcount.io import atomic_write
from headcount.reporting.paper_plots import agreement_scatter, paper_figures
from headcount.reporting.paper_runs import comparisons, run_groups, summarize_run
from headcount.reporting.paper_tables import Records, paper_table
from headcount.reporting.report import provenance
from headcount.reporting.templates import render_template


def write_paper(scale: Scale, records: Records, page: Path | str) -> Path:
    """Write the page of the paper at this scale, whole, and return its path."""
    page = Path(page)
    text = render_paper(scale, records)
    atomic_write(page, lambda f: f.write(text.encode()))
    return page


def render_paper(scale: Scale, records: Records) -> str:
    """The page as a string; without any records it is the printed paper, all of ours marked missing."""
    given = {table: table_cells(table, scale) for table in TABLES}
    items = {item: so_far.required_recipes(item, scale) for item in so_far.items()}
    wanted = dict.fromkeys(r for recipes in items.values() for r in recipes)
    used = [records[r] for r in wanted if r in records]
    tables = [paper_table(name, own, records) for name, own in given.items()]
    chosen = {r.key for own in given.values() for c in own if c.method in OURS for r in c.selected_records(records)}
    removals = sorted({r.removal for r in wanted if r.removal})
    return render_template(
        "paper.html",
        scale=scale,
        substitutes={d: s for d, s in scale.sources.items() if s != d.lower()},
        base=", ".join(f"{k}={v}" for k, v in scale.base.changes.items()),
        count=len(used),
        wanted=len(wanted),
        notes=_data_notes(used),
        provenance=provenance(used),
        tables=tables,
        items=[(item, sum(r in records for r in recipes), len(recipes)) for item, recipes in items.items()],
        agreement=agreement_scatter([e.pair for t in tables for e in t.entries if e.pair and e.complete]),
        pairs=comparisons(given["table2"] + given["table4"], records),
        figures=paper_figures(scale, records),
        runs=[(scenario, run_groups(scenario, scale, records, chosen, removals)) for scenario in SCENARIOS],
        unrelated=[(record, summarize_run(record)) for recipe, record in records.items() if recipe not in wanted],
    )


def _data_notes(used: Iterable[Record]) -> dict[str, list[str]]:
    """What was said of the data, each once, with the sources it was said of."""
    notes: dict[str, list[str]] = {}
    for source, note in sorted({(r.data["recipe"]["source"], r.data["data"].get("note") or "") for r in used}):
        notes.setdefault(note, []).append(source)
    return {note: sources for note, sources in notes.items() if note}

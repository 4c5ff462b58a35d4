"""All tables and figures of the paper on one page: printed beside ours, every value a link to the runs it is made of.

Like the report: one file, nothing in it runs or is fetched, every string is data and is escaped.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from headcount.files import write_whole
from headcount.judging.paper import progress as so_far
from headcount.judging.paper.cells import OURS, TABLES, cells
from headcount.judging.paper.scales import SCENARIOS, Scale
from headcount.judging.records import Record
from headcount.showing.pages import page
from headcount.showing.paper_plots import draw, printed_against_ours
from headcount.showing.paper_runs import comparisons, run_groups, run_in_short
from headcount.showing.paper_tables import Records, shown_table
from headcount.showing.report import provenance


def write_paper(scale: Scale, records: Records, page: Path | str) -> Path:
    """Write the page of the paper at this scale, whole, and return its path."""
    page = Path(page)
    text = render(scale, records)
    write_whole(page, lambda f: f.write(text.encode()))
    return page


def render(scale: Scale, records: Records) -> str:
    """The page as a string; without any records it is the printed paper, all of ours marked missing."""
    given = {table: cells(table, scale) for table in TABLES}
    items = {item: so_far.recipes(item, scale) for item in so_far.items()}
    wanted = dict.fromkeys(r for recipes in items.values() for r in recipes)
    used = [records[r] for r in wanted if r in records]
    tables = [shown_table(name, own, records) for name, own in given.items()]
    chosen = {r.key for own in given.values() for c in own if c.method in OURS for r in c.chosen(records)}
    removals = sorted({r.removal for r in wanted if r.removal})
    return page(
        "paper.html",
        scale=scale,
        stand_ins={d: s for d, s in scale.sources.items() if s != d.lower()},
        base=", ".join(f"{k}={v}" for k, v in scale.base.changes.items()),
        count=len(used),
        wanted=len(wanted),
        notes=_data_notes(used),
        made=provenance(used),
        tables=tables,
        items=[(item, sum(r in records for r in recipes), len(recipes)) for item, recipes in items.items()],
        glance=printed_against_ours([e.pair for t in tables for e in t.entries if e.pair and e.whole]),
        pairs=comparisons(given["table2"] + given["table4"], records),
        figures=draw(scale, records),
        runs=[(scenario, run_groups(scenario, scale, records, chosen, removals)) for scenario in SCENARIOS],
        strange=[(record, run_in_short(record)) for recipe, record in records.items() if recipe not in wanted],
    )


def _data_notes(used: Iterable[Record]) -> dict[str, list[str]]:
    """What was said of the data, each once, with the sources it was said of."""
    notes: dict[str, list[str]] = {}
    for source, note in sorted({(r.body["recipe"]["source"], r.body["data"].get("note") or "") for r in used}):
        notes.setdefault(note, []).append(source)
    return {note: sources for note, sources in notes.items() if note}

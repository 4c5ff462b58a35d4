"""How much of the paper has been reproduced: existing records, missing runs and their cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from headcount.errors import HeadcountWarning, check_choice
from headcount.experiments.paper.cells import FIGURES, TABLES, figure_recipes, table_cells
from headcount.experiments.paper.scales import Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, load_records
from headcount.experiments.study import with_needs

DEFAULT_SECONDS = {"full": 55.0, "smoke": 0.5}  # per run, if none has been timed: on one H200; on one core


def items() -> list[str]:
    """The names of all tables and figures."""
    return [*TABLES, *FIGURES]


def records_by_recipe(folder: Path) -> dict[Recipe, Record]:
    """The records of a folder by their recipe; none if the folder does not exist.

    Two versions of a data set are not averaged: the one with more records counts, and a warning reports the others.
    """
    versions: dict[str, dict[str | None, list[Record]]] = {}  # by source, then by checksum
    for record in load_records(folder) if folder.exists() else ():
        by_checksum = versions.setdefault(record.recipe.source, {})
        by_checksum.setdefault(record.data["data"].get("checksum"), []).append(record)
    kept: list[Record] = []
    for source, by_checksum in versions.items():
        largest = max(by_checksum.values(), key=len)
        if ignored := sum(map(len, by_checksum.values())) - len(largest):
            message = f"{folder} holds runs on {len(by_checksum)} versions of {source}, whose files differ"
            counts = f"the {len(largest)} runs on one count, {ignored} do not"
            warnings.warn(f"{message}; {counts}", HeadcountWarning, stacklevel=2)
        kept += largest
    return {record.recipe: record for record in kept}


def required_recipes(item: str, scale: Scale) -> list[Recipe]:
    """All runs of a table or figure and those they need, in an order in which they can be run."""
    if check_choice("table or figure", item, items()) in TABLES:
        return with_needs(r for cell in table_cells(item, scale) for r in cell.recipes)
    return with_needs(figure_recipes(item, scale))


def missing_recipes(wanted: Iterable[str], scale: Scale, records: Mapping[Recipe, Record]) -> list[Recipe]:
    """The recipes of these tables and figures that have no record, each once."""
    return [r for r in dict.fromkeys(r for item in wanted for r in required_recipes(item, scale)) if r not in records]


def seconds_per_run(scale: Scale, records: Mapping[Recipe, Record]) -> float:
    """The mean time of the runs of this scale in these records; the default if there are none."""
    of_scale = dict.fromkeys(r for item in items() for r in required_recipes(item, scale))
    seconds = (records[r].data["provenance"].get("seconds") for r in of_scale if r in records)
    timed = [s for s in seconds if s is not None]
    return sum(timed) / len(timed) if timed else DEFAULT_SECONDS[scale.name]

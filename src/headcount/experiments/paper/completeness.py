"""How far the paper has been remade: records found, runs missing, what they would cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path

from headcount.errors import HeadcountWarning, check_choice
from headcount.experiments import records as files
from headcount.experiments.paper.cells import FIGURES, TABLES, figure_recipes, table_cells
from headcount.experiments.paper.scales import Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.study import with_needs

DEFAULT_SECONDS = {"full": 55.0, "smoke": 0.5}  # a run, where none has been timed yet: one H200; one core


def items() -> list[str]:
    """Everything that can be asked for."""
    return [*TABLES, *FIGURES]


def records_by_recipe(folder: Path) -> dict[Recipe, Record]:
    """The records of a folder by their recipe; none if there is no such folder yet. A data set that came in two versions is
    not averaged over them: the version with more records counts, and it is said that the others do not."""
    versions: dict[str, dict[str | None, list[Record]]] = {}
    for record in files.load_records(folder) if folder.exists() else ():
        data = versions.setdefault(record.recipe.source, {})
        data.setdefault(record.data["data"].get("checksum"), []).append(record)
    kept: list[Record] = []
    for source, data in versions.items():
        most = max(data.values(), key=len)
        if fewer := sum(map(len, data.values())) - len(most):
            said = f"{folder} holds runs on {len(data)} versions of {source}, whose files differ"
            warnings.warn(f"{said}; the {len(most)} runs on one count, {fewer} do not", HeadcountWarning, stacklevel=2)
        kept += most
    return {record.recipe: record for record in kept}


def required_recipes(item: str, scale: Scale) -> list[Recipe]:
    """All runs a table or figure is made of, with what they need, in the order to run them."""
    if check_choice("table or figure", item, items()) in TABLES:
        return with_needs(r for cell in table_cells(item, scale) for r in cell.recipes)
    return with_needs(figure_recipes(item, scale))


def missing_recipes(wanted: Iterable[str], scale: Scale, records: Mapping[Recipe, Record]) -> list[Recipe]:
    """What is still to run, each once."""
    return [r for r in dict.fromkeys(r for item in wanted for r in required_recipes(item, scale)) if r not in records]


def seconds_per_run(scale: Scale, records: Mapping[Recipe, Record]) -> float:
    """What a run costs: the mean of those of this scale that were timed; a folder may hold others, far shorter or longer."""
    own = dict.fromkeys(r for item in items() for r in required_recipes(item, scale))
    seconds = (records[r].data["provenance"].get("seconds") for r in own if r in records)
    timed = [s for s in seconds if s is not None]
    return sum(timed) / len(timed) if timed else DEFAULT_SECONDS[scale.name]

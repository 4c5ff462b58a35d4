"""The paper as cells: every printed number with the recipes that reproduce it."""

from headcount.experiments.paper.cells import (
    DEFAULT_SECONDS,
    FIGURES,
    ITEMS,
    TABLES,
    Cell,
    PrintedValue,
    averages,
    figure_recipes,
    missing_recipes,
    records_by_recipe,
    required_recipes,
    seconds_per_run,
    table_cells,
)
from headcount.experiments.paper.scales import SCALES, Scale

__all__ = [
    "DEFAULT_SECONDS", "FIGURES", "ITEMS", "SCALES", "TABLES", "Cell", "PrintedValue", "Scale", "averages", "figure_recipes",
    "missing_recipes", "records_by_recipe", "required_recipes", "seconds_per_run", "table_cells",
]  # fmt: skip

"""The paper as cells: every printed number with the recipes that reproduce it."""

from headcount.experiments.paper.cells import FIGURES, TABLES, Cell, PrintedValue, averages, figure_recipes, table_cells
from headcount.experiments.paper.scales import SCALES, Scale

__all__ = ["FIGURES", "SCALES", "TABLES", "Cell", "PrintedValue", "Scale", "averages", "figure_recipes", "table_cells"]

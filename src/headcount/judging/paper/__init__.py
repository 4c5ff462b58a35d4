"""The paper as cells: every printed number beside the recipes that remake it."""

from headcount.judging.paper.cells import FIGURES, TABLES, Cell, Printed, averages, cells, figure_recipes
from headcount.judging.paper.scales import SCALES, Scale

__all__ = ["FIGURES", "SCALES", "TABLES", "Cell", "Printed", "Scale", "averages", "cells", "figure_recipes"]

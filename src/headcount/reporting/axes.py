"""What several figures share: rows with names above them, box plots, matrices, curves against r, and axis limits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from headcount.experiments.select import mean_and_deviation
from headcount.reporting.svg import INK, PALETTE, PAPER, RULE, legend, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Numbers = Sequence[float] | np.ndarray
Matrix = Sequence[Numbers] | np.ndarray
_ROW_HEIGHT = 38  # pixels of a method: its name, and its dots or its box below


@contextmanager
def method_rows(labels: Sequence[str], width: float = 390) -> Iterator[tuple[Figure, Axes]]:
    """A panel with one row per method, its name above its dots rather than beside them: a phone is narrow."""
    with panel(width, 54 + _ROW_HEIGHT * len(labels), (10, 18, 52, 36)) as (figure, ax):
        ax.set(ylim=(len(labels) - 0.5, -0.72), yticks=[])
        ax.grid(visible=True, axis="x")
        background = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # hides grid lines behind a name
        for y, label in enumerate(labels):
            ax.annotate(
                label, (0, y - 0.26), (0, 0), ("axes fraction", "data"), "offset points", va="bottom", bbox=background
            )
        yield figure, ax


@contextmanager
def lines_against_removal(
    title: str, removal: Numbers, lines: Mapping[str, Matrix], colours: Mapping[str, str]
) -> Iterator[tuple[Figure, Axes]]:
    """A panel over r from 0 to 1: for each name, a thin line per fold and a thick one for their mean."""
    with panel(390, 220) as (figure, ax):
        for name, folds in lines.items():
            table = np.asarray(folds, dtype=float)  # (folds, removals), NaN where there is no run
            if len(table) > 1:
                ax.plot(removal, table.T, color=colours[name], lw=0.8, alpha=0.45)
            mean = [mean_and_deviation(column)[0] for column in table.T]
            ax.plot(removal, mean, color=colours[name], lw=2.2, label=name)
        ax.set(title=title, xlim=(0, 1.03), xticks=np.arange(0, 1.01, 0.2))
        ax.set_xlabel("r, share of the predicted minority removed", loc="right")
        yield figure, ax
        limit_ticks(ax)
        if len(lines) > 1 or len(ax.get_legend_handles_labels()[1]) > 1:
            legend(ax)


def box_plot(ax: Axes, y: float, values: np.ndarray, colour: str) -> None:
    """A box over the quartiles, whiskers to the last value within 1.5 box lengths, dots beyond."""
    low, median, high = np.percentile(values, [25, 50, 75])
    reach = 1.5 * (high - low)
    inside = (values >= low - reach) & (values <= high + reach)
    ax.plot([values[inside].min(), values[inside].max()], [y, y], color=colour, lw=1.2)
    ax.barh(y, high - low, 0.34, low, color=colour, alpha=0.3)
    ax.plot([median, median], [y - 0.17, y + 0.17], color=colour, lw=2.4, solid_capstyle="butt")
    outliers = np.unique(values[~inside])
    ax.plot(outliers, np.full(len(outliers), y), "o", ms=3, color=colour, alpha=0.5, mew=0)


def matrix_cell(ax: Axes, row: int, column: int, share: float, count: float | None) -> None:
    """One cell of a confusion matrix: blue on the diagonal, orange elsewhere, darker with its share of the row."""
    x, y = column + np.array([-0.5, 0.5, 0.5, -0.5]), row + np.array([-0.5, -0.5, 0.5, 0.5])
    # the square root keeps rare errors visible
    ax.fill(x, y, color=PALETTE[0] if row == column else PALETTE[1], alpha=float(share) ** 0.5, lw=0)
    if count is not None:
        ink = PAPER if share > 0.4 else INK
        ax.text(column, row, f"{count:.0f}", ha="center", va="center", color=ink, size=10.5 if count < 10_000 else 8.5)


def matrix_grid(ax: Axes, size: int, names: Sequence[str]) -> None:
    """The rules and names of a square matrix, its first row at the top."""
    ticks = range(0, size, 1 if size <= 40 else 10)
    rotated: Any = {"rotation": 40, "ha": "left", "rotation_mode": "anchor"} if max(map(len, names)) > 3 else {}
    ax.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5))
    ax.set_xticks(ticks, [names[k] for k in ticks], **rotated)
    ax.set_yticks(ticks, [names[k] for k in ticks])
    ax.tick_params(length=0, bottom=False, labeltop=True, labelbottom=False, pad=5)
    ax.grid(visible=False)
    ax.spines[:].set_visible(False)
    if size <= 40:
        edges = np.arange(size + 1) - 0.5
        ax.hlines(edges, -0.5, size - 0.5, color=RULE, lw=1, zorder=0)
        ax.vlines(edges, -0.5, size - 0.5, color=RULE, lw=1, zorder=0)


def truncate(name: str, length: int) -> str:
    """
    >>> truncate("cancer-associated stroma", 16)
    'cancer-associat…'
    """
    return name if len(name) <= length else name[: length - 1] + "…"


def finite(values: Numbers) -> np.ndarray:
    """The values without NaN and infinities."""
    array = np.asarray(values, dtype=float)
    return array[np.isfinite(array)]


def pad_limits(ax: Axes, values: Numbers) -> tuple[float, float]:
    """Set and return x limits with some room beyond the outermost values."""
    shown = finite(values)
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    padding = max(0.06 * (high - low), 0.01)
    ax.set_xlim(low - padding, high + padding)
    return low - padding, high + padding


def loss_limits(ax: Axes, values: Numbers) -> None:
    """From zero unless the loss stays far above it; an extreme first epoch does not flatten the rest."""
    shown = finite(values)
    if len(shown):
        low, high = float(shown.min()), min(float(shown.max()), 3 * float(np.percentile(shown, 95)))
        bottom = low - 0.1 * (high - low) if low > 0.4 * high else 0.0
        ax.set_ylim(bottom, high + 0.06 * (high - bottom) + 1e-9)


def limit_ticks(ax: Axes) -> None:
    """At most five intervals on the y axis."""
    from matplotlib.ticker import MaxNLocator

    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))

"""Pure functions from numbers to one matplotlib Figure each, small enough for a phone; captions belong to the page.

Those of the paper are share_boxes (figure 6), share_scatter (7), purity (8) and agreement (9).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from headcount.experiments.scores import mean_and_deviation
from headcount.majority.metrics import wilson_interval
from headcount.reporting import render
from headcount.reporting.render import INK, MUTED, PALETTE, PAPER, Numbers, finite, legend, panel, truncate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROW_HEIGHT = 38  # pixels of a method: its name, and its dots or its box below


class LossCurve(NamedTuple):
    """The losses of one run and the epoch that was kept."""

    epoch: Numbers
    train: Numbers
    valid: Numbers
    best_epoch: float
    best_loss: float


def column_means(folds: np.ndarray) -> list[float]:
    """The mean of each column, without undefined values."""
    return [mean_and_deviation(column)[0] for column in folds.T]


@contextmanager
def method_rows(labels: Sequence[str]) -> Iterator[tuple[Figure, Axes]]:
    """A panel with one row per method, its name above its dots rather than beside them: a phone is narrow."""
    with panel(390, 54 + _ROW_HEIGHT * len(labels), (10, 18, 52, 36)) as (figure, ax):
        ax.set(ylim=(len(labels) - 0.5, -0.72), yticks=[])
        ax.grid(visible=True, axis="x")
        background = {"facecolor": PAPER, "edgecolor": "none", "pad": 1}  # hides grid lines behind a name
        for y, label in enumerate(labels):
            ax.annotate(label, (0, y - 0.26), (0, 0), ("axes fraction", "data"), "offset points", va="bottom", bbox=background)
        yield figure, ax


def against_removal(
    title: str, removal: Numbers, lines: Mapping[str, ArrayLike], chosen: Numbers = (), baseline: float = math.nan
) -> Figure:
    """A score against r from 0 to 1: for each name a thin line per fold and a thick one for their mean. Rings mark the r that
    each fold has ``chosen``; the dashed ``baseline`` is the score without removal."""
    with panel(390, 220) as (figure, ax):
        for (name, folds), colour in zip(lines.items(), (PALETTE[1], PALETTE[7]), strict=False):
            table = np.asarray(folds, dtype=float)  # (folds, removals), NaN where there is no run
            if len(table) > 1:
                ax.plot(removal, table.T, color=colour, lw=0.8, alpha=0.45)
            ax.plot(removal, column_means(table), color=colour, lw=2.2, label=name)
            rings = [(r, fold[np.isclose(removal, r).argmax()]) for r, fold in zip(chosen, table, strict=False)]
            if rings:
                ax.plot(*zip(*rings, strict=True), "o", label="chosen r", ms=6, mfc=PAPER, mec=colour, mew=1.7, zorder=4)
        if math.isfinite(baseline):
            ax.axhline(baseline, color=PALETTE[0], lw=1.4, dashes=(4, 3), label="no removal")
        ax.set(title=title, xlim=(0, 1.03), xticks=np.arange(0, 1.01, 0.2))
        ax.set_xlabel("r, share of the predicted minority removed", loc="right")
        render.limit_ticks(ax)
        if len(ax.get_legend_handles_labels()[1]) > 1:
            legend(ax)
    return figure


@contextmanager
def unit_square(title: str, xlabel: str) -> Iterator[tuple[Figure, Axes]]:
    """A panel from 0 to 1 with its diagonal dashed."""
    with panel(220, 220, (34, 22, 8, 32)) as (figure, ax):
        ax.plot([0, 1], [0, 1], color=MUTED, lw=1, dashes=(4, 3))
        yield figure, ax
        ax.set(xlim=(0, 1), ylim=(0, 1), xticks=(0, 0.5, 1), yticks=(0, 0.5, 1), aspect="equal", title=title)
        ax.set_xlabel(xlabel, loc="right")


def padded_range(values: Iterable[Numbers]) -> tuple[float, float]:
    """The range of the values, with some room beyond the outermost; from 0 to 1 if none is finite."""
    shown = finite(np.concatenate([np.zeros(0), *values]))
    low, high = (float(shown.min()), float(shown.max())) if len(shown) else (0.0, 1.0)
    padding = max(0.06 * (high - low), 0.01)
    return low - padding, high + padding


def learning_curves(curves: Sequence[LossCurve], colour: str = PALETTE[0]) -> Figure:
    """Training and validation loss over the epochs, a thin line per fold; a ring marks the kept epoch."""
    with panel(340, 200) as (figure, ax):
        width = 1.6 if len(curves) == 1 else 1.0
        for i, curve in enumerate(curves):
            ax.plot(curve.epoch, curve.train, color=MUTED, lw=0.8, alpha=0.6, label=None if i else "training")
            ax.plot(curve.epoch, curve.valid, color=colour, lw=width, label=None if i else "validation")
        if len(curves) == 1:  # values on hover
            points = zip(curves[0].epoch, curves[0].train, curves[0].valid, strict=True)
            texts = (f"epoch {e:g}: validation {v:.4f}, training {t:.4f}" for e, t, v in points)
            (dots,) = ax.plot(curves[0].epoch, curves[0].valid, "o", ms=9, alpha=0)
            render.hover(dots, *texts)
        best = [c.best_epoch for c in curves], [c.best_loss for c in curves]
        ax.plot(*best, "o", ms=5.5, mfc=PAPER, mec=colour, mew=1.6, clip_on=False, label="kept", zorder=4)
        shown = finite([v for c in curves for v in (*c.train, *c.valid)])
        if len(shown):  # from zero unless the loss stays far above it; an extreme first epoch does not flatten the rest
            low, high = float(shown.min()), min(float(shown.max()), 3 * float(np.percentile(shown, 95)))
            bottom = low - 0.1 * (high - low) if low > 0.4 * high else 0.0
            ax.set_ylim(bottom, high + 0.06 * (high - bottom) + 1e-9)
        ax.set(title="loss", xlim=(0, max((max(c.epoch, default=1) for c in curves), default=1)))
        ax.xaxis.get_major_locator().set_params(nbins=5, integer=True)
        render.limit_ticks(ax)
        ax.set_xlabel("epoch", loc="right")
        legend(ax)
    return figure


def reliability(confidence: Numbers, accuracy: Numbers, counts: Sequence[int]) -> Figure:
    """Accuracy of predictions against the probability they were given, a dot for each bin; calibrated ones lie on the dashes."""
    with unit_square("correct", "predicted probability") as (figure, ax):
        ax.plot(confidence, accuracy, color=PALETTE[0], lw=1.2)
        for c, a, n in zip(confidence, accuracy, counts, strict=True):
            ax.plot([c, c], wilson_interval(a, n), color=PALETTE[0], lw=1, alpha=0.6)
            (dot,) = ax.plot([c], [a], "o", ms=4 + 6 * math.sqrt(n / max(counts)), color=PALETTE[0], mew=0, clip_on=False)
            render.hover(dot, f"{n:,} bags predicted with probability {c:.2f} on average: {100 * a:.0f} % correct")
    return figure


def losses_with_errors(losses: Mapping[str, tuple[float, float]], chosen: str, prior_loss: float) -> Figure:
    """The loss of each method with two standard errors to each side; dashes: predicting label frequencies alone."""
    with method_rows(list(losses)) as (figure, ax):
        ax.axvline(prior_loss, color=MUTED, lw=1, dashes=(4, 3))
        for y, (name, (loss, error)) in enumerate(losses.items()):
            colour = PALETTE[0] if name == chosen else PALETTE[7]
            ax.plot([loss - 2 * error, loss + 2 * error], [y, y], color=colour, lw=1.6)
            (dot,) = ax.plot([loss], [y], "o", ms=8, color=colour, mew=0)
            render.hover(dot, f"{name}: {loss:.4f} ± {error:.4f} (standard error)")
            ax.annotate(f"{loss:.3f}", (1, y), (46, 0), ("axes fraction", "data"), "offset points", ha="right", va="center")
        ax.set_xlim(padded_range([[prior_loss], *([loss - 2 * e, loss + 2 * e] for loss, e in losses.values())]))
        ax.set_xlabel("held-out loss (dashes: label frequencies)", loc="right")
    return figure


def accuracy_dots(scores: Mapping[str, Numbers], colours: Mapping[str, str]) -> Figure:
    """Instance accuracy of each method: faint dots for the folds, a solid one for their mean, which is printed."""
    with method_rows(list(scores)) as (figure, ax):
        for y, (label, values) in enumerate(scores.items()):
            mean, _, count = mean_and_deviation(values)
            if not count:
                continue
            (runs,) = ax.plot(values, [y] * len(values), "o", ms=6, color=colours[label], alpha=0.35, mew=0)
            render.hover(runs, *(f"{v:.4f}" for v in values))
            (dot,) = ax.plot([mean], [y], "o", ms=9, color=colours[label], mew=0)
            render.hover(dot, f"{label}: mean {mean:.4f}")
            ax.annotate(f"{mean:.3f}", (1, y), (46, 0), ("axes fraction", "data"), "offset points", ha="right", va="center")
        ax.set_xlim(padded_range(scores.values()))
        ax.set_xlabel("instance accuracy", loc="right")
    return figure


def accuracy_by_scenario(printed: Mapping[str, tuple[float, float]], ours: Mapping[str, Numbers]) -> Figure:
    """Printed means with their deviation as rings, ours beside them as dots, over the scenarios."""
    with panel(250, 220, (30, 26, 6, 26)) as (figure, ax):
        for x, (scenario, (mean, deviation)) in enumerate(printed.items()):
            folds = finite(ours[scenario])
            labels = ("printed", "ours") if x == 0 else (None, None)
            ax.plot([x - 0.14] * 2, [mean - deviation, mean + deviation], color=MUTED, lw=1.4)
            ax.plot([x - 0.14], [mean], "o", ms=7, mfc=PAPER, mec=MUTED, mew=1.6, ls="none", label=labels[0])
            ax.plot([x + 0.14] * len(folds), folds, "o", ms=5, color=PALETTE[0], alpha=0.35, mew=0)
            ax.plot([x + 0.14], [mean_and_deviation(folds)[0]], "o", ms=8, color=PALETTE[0], mew=0, ls="none", label=labels[1])
        ax.set(xlim=(-0.5, len(printed) - 0.5), ylim=(0, 1), title="accuracy")
        ax.set_xticks(range(len(printed)), list(printed))
        ax.tick_params(axis="x", length=0)
        render.limit_ticks(ax)
        legend(ax)
    return figure


def share_boxes(differences: Mapping[str, Numbers], colours: Mapping[str, str]) -> Figure:
    """Predicted minus true share of the majority; above zero it is over-estimated. For each method a box over the quartiles,
    whiskers to the last value within 1.5 box lengths, and dots beyond."""
    with method_rows(list(differences)) as (figure, ax):
        ax.axvline(0, color=MUTED, lw=1, dashes=(4, 3))
        for y, (label, given) in enumerate(differences.items()):
            if not len(values := finite(given)):
                continue
            low, median, high = np.percentile(values, [25, 50, 75])
            reach, colour = 1.5 * (high - low), colours[label]
            inside = (values >= low - reach) & (values <= high + reach)
            ax.plot([values[inside].min(), values[inside].max()], [y, y], color=colour, lw=1.2)
            (box,) = ax.barh(y, high - low, 0.34, low, color=colour, alpha=0.3)
            render.hover(box, f"median {median:+.3f}, quartiles {low:+.3f} and {high:+.3f}, {len(values):,} bags")
            ax.plot([median, median], [y - 0.17, y + 0.17], color=colour, lw=2.4, solid_capstyle="butt")
            outliers = np.unique(values[~inside])
            ax.plot(outliers, np.full_like(outliers, y), "o", ms=3, color=colour, alpha=0.5, mew=0)
        low, high = ax.set_xlim(padded_range([[0.0], *differences.values()]))
        ax.set_xlabel("share of the majority, predicted − true", loc="right")
        for x, text, side in ((low, "under-estimated", "left"), (high, "over-estimated", "right")):
            ax.annotate(text, (x, 1), (0, 4), ("data", "axes fraction"), "offset points", ha=side, color=MUTED, size=10)
    return figure


def share_scatter(before: Numbers, after: Numbers, colour: str = PALETTE[1], x: str = "before", y: str = "after") -> Figure:
    """The share of the majority in each training bag before and after removal; it has grown above the dashed line."""
    with unit_square(y, x) as (figure, ax):
        ax.plot(before, after, "o", ms=4, color=colour, alpha=0.45, mew=0, clip_on=False)
    return figure


def bag_sizes(edges: Sequence[int], counts: Sequence[int]) -> Figure:
    """How many bags have how many instances: a bar per bin."""
    with panel(340, 180) as (figure, ax):
        names = [f"{a:,}" if b == a + 1 else f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
        for bar, name, n in zip(ax.bar(range(len(counts)), counts, color=PALETTE[0], width=0.85), names, counts, strict=True):
            render.hover(bar, f"{name} instances: {n:,} bags")
        step = max(1, len(counts) // 4)
        ax.set(title="bags", xticks=range(0, len(counts), step), xticklabels=names[::step])
        ax.set_xlabel("instances in a bag", loc="right")
        render.limit_ticks(ax)
    return figure


def protocol_figure(share: Numbers, labels: Numbers, tied: Numbers | float, classes: Sequence[str], edges: Numbers) -> Figure:
    """What n bags are like: the share of their majority over the protocol's bins, and how many have each label. ``share``,
    ``labels`` and ``tied`` (two classes lead) are (n,). Bags that rounding pushed out of the protocol's range are counted in
    the axis label."""
    share, edges = np.asarray(share, dtype=float), np.asarray(edges, dtype=float)
    with panel(780, max(250, 90 + 20 * len(classes)), (44, 34, 24, 42), columns=2) as (figure, (left, right)):
        figure.subplots_adjust(wspace=0.5)
        left.bar(edges[:-1], np.histogram(share, edges)[0], np.diff(edges) * 0.92, align="edge", color=PALETTE[0])
        left.set(title=f"{len(share):,} bags by the share of their majority", xlim=(edges[0], edges[-1]))
        left.set_xticks(edges[::2], [f"{e:.2f}" for e in edges[::2]])
        outside = int(((share < edges[0]) | (share > edges[-1])).sum())
        left.set_xlabel(f"share of the majority{f'; {outside} outside the range' if outside else ''}", loc="right")
        rows, counts = np.arange(len(classes)), np.bincount(np.asarray(labels, dtype=int), minlength=len(classes))
        right.barh(rows, counts, 0.7, color=PALETTE[0])
        right.axvline(counts.mean(), color=INK, lw=1, dashes=(4, 3))
        right.set_yticks(rows, [truncate(name, 18) for name in classes])
        right.invert_yaxis()
        right.set_title(f"bags by label; {100 * float(np.mean(tied)):.1f} % tied")
        right.set_xlabel("bags (dashed: uniform labels)", loc="right")
        right.grid(visible=False)
    return figure

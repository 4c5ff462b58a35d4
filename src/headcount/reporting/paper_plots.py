"""The figures of the paper, drawn from the available records, with a sentence on the runs that are missing.

figure 3   accuracy of the Counting Network: a panel per data set, printed and ours side by side
figure 6   over- and under-estimated majorities: a row for each method and scenario
figure 7   share of the majority before and after MPEM: a row of panels for each scenario
figure 8   purity against r       } the mean of the data sets, then each of them
figure 9   agreement against r    }
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from headcount.experiments.paper.cells import FIGURES, PrintedValue, figure_recipes, table_cells
from headcount.experiments.paper.scales import DATASETS, SCENARIOS, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.scores import REMOVALS, mean_and_deviation
from headcount.reporting import plots
from headcount.reporting.figures import FigureGroup, FigurePanel, share_scatters, svg_panel
from headcount.reporting.paper_tables import Records, uses_recropped_svhn
from headcount.reporting.svg import MUTED, PALETTE, PAPER, Numbers, finite, legend, limit_ticks, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RISING = ("Small", "Various", "Large")  # by the size of the majorities, as in the paper's figure 3
_MAX_POINTS = 400  # of a scatter: every bag of a fold


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper, ready for the page."""

    slug: str
    title: str
    groups: list[FigureGroup]
    missing: str  # the missing runs in words, or empty

    @property
    def number(self) -> str:
        return self.slug.removeprefix("figure")


def paper_figures(scale: Scale, records: Records) -> list[PaperFigure]:
    """Every figure of the paper; without any of its runs, a figure consists of the sentence on what is missing."""
    groups = {
        "figure3": _accuracy_groups(scale, records),
        "figure6": _share_error_groups(scale, records),
        "figure7": share_groups(scale, records),
        "figure8": _sweep_groups(scale, records, "purity"),
        "figure9": _sweep_groups(scale, records, "agreement"),
    }
    return [
        PaperFigure(s, FIGURES[s], [g for g in gs if g.panels or g.text], missing_runs(s, scale, records))
        for s, gs in groups.items()
    ]


def missing_runs(figure: str, scale: Scale, records: Records) -> str:
    """The missing runs of a figure by method, data set and scenario, and by fold where only some are missing."""
    required = figure_recipes(figure, scale)
    missing = [r for r in required if r not in records]
    if not missing:
        return ""
    by_label = {}
    for label in dict.fromkeys(r.label for r in missing):
        by_dataset = {}
        for dataset, source in scale.sources.items():
            lists = ([r for r in rs if (r.label, r.source) == (label, source)] for rs in (missing, required))
            by_dataset[dataset] = ", ".join(_missing_scenarios(*lists))
        by_label[label] = "; ".join(f"{names} ({scenarios})" for scenarios, names in _group_names(by_dataset).items())
    where = ". ".join(f"{names} on {datasets}" for datasets, names in _group_names(by_label).items())
    return f"Missing: {len(missing):,} of {len(required):,} runs. {where}."


def _missing_scenarios(missing: Sequence[Recipe], required: Sequence[Recipe]) -> Iterator[str]:
    for scenario in SCENARIOS:
        folds, total = ([r.fold for r in rs if r.scenario == scenario.lower()] for rs in (missing, required))
        if folds:
            yield scenario if len(folds) == len(total) else f"{scenario} (fold {', '.join(map(str, folds))})"


def _group_names(values: Mapping[str, str]) -> dict[str, str]:
    """Each value with the names that have it.

    >>> _group_names({"SVHN": "Small", "PATH": "Small", "OCT": "Large", "CIFAR10": ""})
    {'Small': 'SVHN, PATH', 'Large': 'OCT'}
    """
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        groups.setdefault(value, []).append(name)
    return {value: ", ".join(names) for value, names in groups.items() if value}


def agreement_scatter(pairs: Sequence[tuple[float, float]]) -> Markup:
    """A dot per cell, our value against the printed one; empty without cells."""
    if not pairs:
        return Markup("")
    figure = plots.share_scatter(*np.array(pairs).T, PALETTE[0])
    figure.axes[0].set_title("ours", loc="left")
    figure.axes[0].set_xlabel("printed", loc="right")
    return svg_panel("", figure, "scatter", "Every complete cell of the tables: our value against the printed one").svg


def accuracy_by_scenario(printed: Mapping[str, PrintedValue], ours: Mapping[str, Numbers]) -> Figure:
    """Printed means with their deviation as rings, ours beside them as dots, over the scenarios."""
    with panel(250, 220, (30, 26, 6, 26)) as (figure, ax):
        for x, (scenario, value) in enumerate(printed.items()):
            folds, deviation = finite(ours[scenario]), value.deviation or 0
            labels = ("printed", "ours") if x == 0 else (None, None)
            ax.plot([x - 0.14] * 2, [value.mean - deviation, value.mean + deviation], color=MUTED, lw=1.4)
            ax.plot([x - 0.14], [value.mean], "o", ms=7, mfc=PAPER, mec=MUTED, mew=1.6, ls="none", label=labels[0])
            ax.plot([x + 0.14] * len(folds), folds, "o", ms=5, color=PALETTE[0], alpha=0.35, mew=0)
            mean = mean_and_deviation(folds)[0]
            ax.plot([x + 0.14], [mean], "o", ms=8, color=PALETTE[0], mew=0, ls="none", label=labels[1])
        ax.set(xlim=(-0.5, len(printed) - 0.5), ylim=(0, 1), title="accuracy")
        ax.set_xticks(range(len(printed)), list(printed))
        ax.tick_params(axis="x", length=0)
        limit_ticks(ax)
        legend(ax)
    return figure


def _accuracy_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    grid = {(c.scenario, c.dataset): c for c in table_cells("table4", scale) if c.method == "Counting Network"}
    panels = []
    for dataset in DATASETS:
        cells = {s: grid[s, dataset] for s in RISING}
        chosen = {r.recipe: r for c in cells.values() for r in c.selected_records(records)}
        ours = {s: [r.scores[c.metric] for r in c.selected_records(records)] for s, c in cells.items()}
        figure = accuracy_by_scenario({s: c.printed for s, c in cells.items()}, ours)
        label = f"Instance accuracy of the Counting Network on {dataset} by scenario, printed and ours"
        caption = f"{dataset} (re-cropped)" if uses_recropped_svhn(chosen) else dataset
        panels.append(svg_panel(caption, figure, f"figure3-{dataset}", label))
    return [FigureGroup("", "", "four", tuple(panels))]


def _share_error_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    errors: dict[str, list[float]] = {}
    colours = {}
    for scenario in SCENARIOS:
        for method, colour in (("Output+Mean", PALETTE[2]), ("Counting Network", PALETTE[0])):
            recipes = [r for d in DATASETS for r in scale.recipes(method, d, scenario)]
            runs = [records[r].data.get("share_difference") or () for r in recipes if r in records]
            if any(runs):
                part = "" if len(runs) == len(recipes) else f" ({len(runs)} of {len(recipes)} runs)"
                name = f"{scenario}, {method}{part}"
                errors[name], colours[name] = [v for bags in runs for v in bags], colour
    if not errors:
        return []
    label = "Box plots of the predicted minus the true share of the majority class, by scenario and method"
    drawn = svg_panel("", plots.share_boxes(errors, colours), "figure6", label)
    notes = tuple(f"{name}: {_describe_errors(np.array(values))}" for name, values in errors.items())
    return [FigureGroup("", "", "wide", (drawn,), notes)]


def _describe_errors(errors: np.ndarray) -> str:
    """
    >>> _describe_errors(np.array([-0.5, -0.25, 0.0, 0.25]))
    'median −0.125, over-estimated in 25 % of the bags'
    """
    median = f"{np.median(errors):+.3f}".replace("-", "−")
    return f"median {median}, over-estimated in {100 * (errors > 0).mean():.0f} % of the bags"


def share_groups(scale: Scale, records: Records) -> list[FigureGroup]:
    """Figure 7: the panels of each scenario, or the reason why its run has none."""
    groups = []
    for recipe in figure_recipes("figure7", scale):
        if recipe in records:
            group = share_scatters([records[recipe]], f"figure7-{recipe.scenario}", _MAX_POINTS)
            reason = f"The arrays of run {records[recipe].key} were not kept beside its record."
            groups.append(replace(group, title=recipe.scenario.title(), text="" if group.panels else reason))
    return groups


_QUANTITIES = {"purity": ("purity",), "agreement": ("agreement", "agreement_random")}


def _sweep_groups(scale: Scale, records: Records, what: str) -> list[FigureGroup]:
    """A panel with the mean of the data sets, which are its thin lines; then one per data set, with folds as thin lines."""
    plot, keys = {"purity": plots.purity, "agreement": plots.agreement}[what], _QUANTITIES[what]
    tables: dict[str, list[np.ndarray]] = {}  # data set -> for each quantity (folds, removals)
    for dataset in DATASETS:
        runs = [records[r] for r in scale.recipes("Counting Network", dataset, SCENARIOS[0]) if r in records]
        sweeps = [s for r in runs if (s := r.data.get("sweep")) and tuple(s["removal"]) == REMOVALS]
        if sweeps:
            tables[dataset] = [np.array([s[k] for s in sweeps], float) for k in keys]
    shown = finite(np.concatenate([np.zeros(0), *(t.ravel() for group in tables.values() for t in group)]))
    if not len(shown):
        return []
    means = [np.array([_mean_over_folds(group[i]) for group in tables.values()]) for i in range(len(keys))]
    complete = len(tables) == len(DATASETS)
    mean_of = "Mean of the data sets" if complete else f"Mean of the available data sets: {', '.join(tables)}"
    padding = max(0.06 * float(np.ptp(shown)), 0.01)
    panels = []
    for name, group in {mean_of: means, **{d: tables.get(d) for d in DATASETS}}.items():
        if group is None:
            panels.append(FigurePanel(name, Markup("")))
            continue
        figure = plot(REMOVALS, *group)
        figure.axes[0].set_ylim(shown.min() - padding, shown.max() + padding)  # one scale, so that panels compare
        label = f"{what.capitalize()} against the share r removed: {name}"
        panels.append(svg_panel(name, figure, f"{what}-{len(panels)}", label))
    return [FigureGroup("", "", "small", tuple(panels))]


def _mean_over_folds(table: np.ndarray) -> list[float]:
    return [mean_and_deviation(column)[0] for column in table.T]

"""The paper's figures, remade: each drawn from the records there are, saying in words which runs it still lacks.

figure 3   accuracy of the Counting Network: a panel a data set, printed and ours side by side
figure 6   over- and under-estimated majorities: one row for each method and scenario
figure 7   the majority's share before and after MPEM: a row of panels for each scenario
figure 8   purity against r       } the mean of the data sets, then each of them
figure 9   agreement against r    }
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from headcount.experiments.paper.cells import FIGURES, PrintedValue, figure_recipes, table_cells
from headcount.experiments.paper.scales import DATASETS, SCENARIOS, Scale
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.scores import REMOVALS
from headcount.experiments.select import mean_and_deviation
from headcount.reporting import axes, plots
from headcount.reporting.axes import Numbers
from headcount.reporting.figures import FigureGroup, FigurePanel, share_scatters
from headcount.reporting.svg import MUTED, PALETTE, PAPER, legend, panel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Mapping[Recipe, Record]
RISING = ("Small", "Various", "Large")  # by how large the majorities are, as the paper's figure 3 has them
_POINTS = 400  # dots of a scatter: every bag of a fold


@dataclass(frozen=True)
class PaperFigure:
    """One figure of the paper, ready for the page."""

    slug: str
    title: str
    text: str
    groups: list[FigureGroup]
    missing: str  # which runs are missing, in words; empty if none is

    @property
    def number(self) -> str:
        return self.slug.removeprefix("figure")


def paper_figures(scale: Scale, records: Records) -> list[PaperFigure]:
    """Every figure of the paper; one that nothing can be drawn of is its sentence on what is missing."""
    made = {
        "figure3": (_accuracy(scale, records), _TEXT["figure3"]),
        "figure6": (_boxes(scale, records), _TEXT["figure6"]),
        "figure7": (_shares(scale, records), _TEXT["figure7"]),
        "figure8": (_curves(scale, records, "purity", _purity), _TEXT["figure8"]),
        "figure9": (_curves(scale, records, "agreement", _agreement), _TEXT["figure9"]),
    }
    return [
        PaperFigure(
            slug, FIGURES[slug], text, [g for g in groups if g.panels or g.text], missing_runs(slug, scale, records)
        )
        for slug, (groups, text) in made.items()
    ]


_TEXT = {
    "figure3": "The larger the majorities in training, the better single instances are told apart: why MPEM makes them "
    "larger. Rings are printed (Table 4; the picture itself gives no numbers), with one deviation to each side; full dots "
    "are our means and faint ones our folds.",
    "figure6": "Share of the majority class in each test bag, estimated minus true, over all data sets and folds. "
    "Box: the middle half of the bags. The paper gives no numbers; it reads off its picture that Output+Mean over-estimates "
    "the majority in every scenario, most of all in Small.",
    "figure7": "The majority’s share in each training bag of the first fold of CIFAR10, before and after MPEM has removed "
    "the share r of the predicted minority. Above the dashes it has grown.",
    "figure8": "Of the instances removed from training bags, how many really were not of the bag’s class; scenario Various. A "
    "thin line is a fold, in the first panel a data set; the strong one is their mean.",
    "figure9": "How often the label still is the majority of what is left in a training bag, beside removing as many at "
    "random; scenario Various. Lines as in figure 8. The paper says that with MPEM it stays at 1.",
}


def missing_runs(figure: str, scale: Scale, records: Records) -> str:
    """The runs that a figure still wants: by method, data set and scenario, and by fold where some are there."""
    wanted = figure_recipes(figure, scale)
    gone = [r for r in wanted if r not in records]
    if not gone:
        return ""
    lists = {}
    for label in dict.fromkeys(r.label for r in gone):
        spots = {}
        for dataset, source in scale.sources.items():
            lacks, all_of = ([r for r in rs if (r.label, r.source) == (label, source)] for rs in (gone, wanted))
            spots[dataset] = ", ".join(_scenarios(lacks, all_of))
        lists[label] = "; ".join(f"{names} ({said})" for said, names in _together(spots).items())
    places = ". ".join(f"{names} on {said}" for said, names in _together(lists).items())
    return f"Missing: {len(gone):,} of {len(wanted):,} runs. {places}."


def _scenarios(lacks: Sequence[Recipe], wanted: Sequence[Recipe]) -> Iterator[str]:
    """By name; with the folds, where only some of them are missing."""
    for scenario in SCENARIOS:
        gone, total = ([r.fold for r in rs if r.scenario == scenario.lower()] for rs in (lacks, wanted))
        if gone:
            yield scenario if len(gone) == len(total) else f"{scenario} (fold {', '.join(map(str, gone))})"


def _together(said: Mapping[str, str]) -> dict[str, str]:
    """Whatever is said of several names, once, with their names.

    >>> _together({"SVHN": "Small", "PATH": "Small", "OCT": "Large", "CIFAR10": ""})
    {'Small': 'SVHN, PATH', 'Large': 'OCT'}
    """
    alike: dict[str, list[str]] = {}
    for name, words in said.items():
        alike.setdefault(words, []).append(name)
    return {words: ", ".join(names) for words, names in alike.items() if words}


# -- printed and ours: all cells, and figure 3 ------------------------------------------------------------------------


def agreement_scatter(pairs: Sequence[tuple[float, float]]) -> Markup:
    """A dot a cell, printed across and ours up; on the dashes the two are one. Nothing for nothing."""
    if not pairs:
        return Markup("")
    figure = plots.share_scatter(*np.array(pairs).T, PALETTE[0])
    figure.axes[0].set_title("ours", loc="left")
    figure.axes[0].set_xlabel("printed", loc="right")
    return Markup(plots.inline_svg(figure, "glance", "Every whole cell of the tables: its printed value against ours"))


def accuracy_by_scenario(printed: Mapping[str, PrintedValue], ours: Mapping[str, Numbers]) -> Figure:
    """Printed means with their deviation as rings, ours beside them as dots, over the scenarios."""
    with panel(250, 220, (30, 26, 6, 26)) as (figure, ax):
        for x, scenario in enumerate(printed):
            said, values = printed[scenario], axes.finite(ours[scenario])
            spread = [said.mean - (said.deviation or 0), said.mean + (said.deviation or 0)]
            ax.plot([x - 0.14] * 2, spread, color=MUTED, lw=1.4)
            ring = "printed" if x == 0 else None
            ax.plot([x - 0.14], [said.mean], "o", ms=7, mfc=PAPER, mec=MUTED, mew=1.6, ls="none", label=ring)
            ax.plot([x + 0.14] * len(values), values, "o", ms=5, color=PALETTE[0], alpha=0.35, mew=0)
            mean = mean_and_deviation(values)[0]
            ax.plot([x + 0.14], [mean], "o", ms=8, color=PALETTE[0], mew=0, ls="none", label="ours" if x == 0 else None)
        ax.set(xlim=(-0.5, len(printed) - 0.5), ylim=(0, 1), title="accuracy")
        ax.set_xticks(range(len(printed)), list(printed))
        ax.tick_params(axis="x", length=0)
        axes.limit_ticks(ax)
        legend(ax)
    return figure


def _accuracy(scale: Scale, records: Records) -> list[FigureGroup]:
    grid = {(c.scenario, c.dataset): c for c in table_cells("table4", scale) if c.method == "Counting Network"}
    panels = []
    for dataset in DATASETS:
        own = {s: grid[s, dataset] for s in RISING}
        printed = {s: cell.printed for s, cell in own.items()}
        ours = {s: [r.scores[cell.metric] for r in cell.selected_records(records)] for s, cell in own.items()}
        label = f"Instance accuracy of the Counting Network on {dataset} by scenario, printed and ours"
        panels.append(_panel(dataset, accuracy_by_scenario(printed, ours), f"figure3-{dataset}", label))
    return [FigureGroup("", "", "four", tuple(panels))]


# -- figures 6 and 7 ----------------------------------------------------------------------------------------------------------


def _boxes(scale: Scale, records: Records) -> list[FigureGroup]:
    gaps: dict[str, list[float]] = {}
    colours = {}
    for scenario in SCENARIOS:
        for method, colour in (("Output+Mean", PALETTE[2]), ("Counting Network", PALETTE[0])):
            wanted = [r for d in DATASETS for r in scale.recipes(method, d, scenario)]
            found = [records[r].data.get("share_difference") or () for r in wanted if r in records]
            if any(found):
                part = "" if len(found) == len(wanted) else f" ({len(found)} of {len(wanted)} runs)"
                name = f"{scenario}, {method}{part}"
                gaps[name], colours[name] = [v for bags in found for v in bags], colour
    if not gaps:
        return []
    label = "Box plots of the estimated minus the true share of the majority class, by scenario and method"
    drawn = _panel("", plots.share_boxes(gaps, colours), "figure6", label)
    points = tuple(f"{name}: {_middle(np.array(values))}" for name, values in gaps.items())
    return [FigureGroup("", "", "wide", (drawn,), points)]


def _middle(gaps: np.ndarray) -> str:
    """
    >>> _middle(np.array([-0.5, -0.25, 0.0, 0.25]))
    'median −0.125, too many in 25 % of the bags'
    """
    return f"median {np.median(gaps):+.3f}, too many in {100 * (gaps > 0).mean():.0f} % of the bags".replace(
        "-", "−", 1
    )


def _shares(scale: Scale, records: Records) -> list[FigureGroup]:
    groups = []
    for recipe in figure_recipes("figure7", scale):
        if recipe in records:
            drawn = share_scatters([records[recipe]], f"figure7-{recipe.scenario}", _POINTS)
            missing_reason = (
                "" if drawn.panels else f"The arrays of run {records[recipe].key} were not kept beside its record."
            )
            groups.append(replace(drawn, title=recipe.scenario.title(), text=missing_reason))
    return groups


# -- figures 8 and 9 ----------------------------------------------------------------------------------------------------------

Sweep = dict[str, np.ndarray]  # a quantity -> (folds, removals)


def _purity(removal: Numbers, sweep: Sweep) -> Figure:
    return plots.purity(removal, sweep["purity"])


def _agreement(removal: Numbers, sweep: Sweep) -> Figure:
    return plots.agreement(removal, sweep["agreement"], sweep["agreement_random"])


_READ = {"purity": ("purity",), "agreement": ("agreement", "agreement_random")}


def _curves(scale: Scale, records: Records, what: str, plot: Callable[[Numbers, Sweep], Figure]) -> list[FigureGroup]:
    """The mean over the data sets, which are its thin lines; then each data set, its folds the thin lines."""
    swept: dict[str, list[dict[str, list[float]]]] = {}
    for dataset in DATASETS:
        found = [records[r] for r in scale.recipes("Counting Network", dataset, SCENARIOS[0]) if r in records]
        swept[dataset] = [s for r in found if (s := r.data.get("sweep")) and tuple(s["removal"]) == REMOVALS]
    if not any(swept.values()):
        return []
    each = {
        d: {k: np.array([s[k] for s in sweeps], float) for k in _READ[what]} for d, sweeps in swept.items() if sweeps
    }
    means = {k: np.array([_mean(sweep[k]) for sweep in each.values()]) for k in _READ[what]}
    mean_of = "Mean of the data sets" if len(each) == len(DATASETS) else f"Mean of what is there: {', '.join(each)}"
    seen = axes.finite(np.concatenate([sweep[k].ravel() for sweep in each.values() for k in sweep]))
    if not len(seen):
        return []
    air = max(0.06 * float(np.ptp(seen)), 0.01)
    panels = []
    for name, sweep in {mean_of: means, **{d: each.get(d) for d in DATASETS}}.items():
        if sweep is None:
            panels.append(FigurePanel(name, Markup("")))
            continue
        figure = plot(REMOVALS, sweep)
        figure.axes[0].set_ylim(seen.min() - air, seen.max() + air)  # one scale: the panels are compared
        label = f"{what.capitalize()} against the share r removed: {name}"
        panels.append(_panel(name, figure, f"{what}-{len(panels)}", label))
    return [FigureGroup("", "", "small", tuple(panels))]


def _mean(table: np.ndarray) -> list[float]:
    return [mean_and_deviation(column)[0] for column in table.T]


def _panel(caption: str, figure: Figure, name: str, label: str) -> FigurePanel:
    return FigurePanel(caption, Markup(plots.inline_svg(figure, name, label)))  # a figure escapes the words in it


__all__ = ["PaperFigure", "accuracy_by_scenario", "agreement_scatter", "missing_runs", "paper_figures"]

"""The figures of one data set in one scenario, in groups: every group that its records can fill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from markupsafe import Markup

from headcount.experiments.records import Record
from headcount.experiments.select import mean_and_deviation
from headcount.reporting import plots
from headcount.reporting.results_table import ReportMethod, best_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class FigurePanel:
    """A figure, ready for the page."""

    caption: str
    svg: Markup


@dataclass(frozen=True)
class FigureGroup:
    """Figures that belong together, under one heading and a sentence."""

    title: str
    text: str
    layout: str  # a CSS class: wide, small, quad
    panels: tuple[FigurePanel, ...]
    notes: tuple[str, ...] = ()


def section_figures(
    methods: Sequence[ReportMethod],
    records: Sequence[Record],
    colours: Mapping[str, str],
    slug: str,
    compact: bool = False,
) -> list[FigureGroup]:
    """Every group of figures that these records can fill; ``lean`` for a page of many sections: means and samples."""
    who, asked = _asked(methods)
    made = (
        _comparison(methods, colours, slug),
        _curves(methods, colours, slug, compact),
        _sweeps(methods, records, slug),
        _removal(who, asked, slug),
        share_scatters(asked, slug, 120 if compact else 2000),
        _confusion(best_method(methods), slug),
    )
    return [group for group in made if group.panels]


def _comparison(named: Sequence[ReportMethod], colours: Mapping[str, str], slug: str) -> FigureGroup:
    scores = {m.name: _floats(r.scores.get("instance_accuracy") for r in m.row.records) for m in named}
    gaps = {m.name: _floats(v for r in m.row.records for v in r.data.get("share_difference") or ()) for m in named}
    gaps = {name: values for name, values in gaps.items() if len(values)}
    panels = [
        FigurePanel(
            "Instance accuracy. A faint dot is a fold, the full one their mean.",
            _inline(plots.accuracy_dots(scores, colours), f"{slug}-dots", "Instance accuracy of each method"),
        )
    ]
    if gaps:
        label = "Box plot, for each method, of the estimated minus the true share of the majority class over test bags"
        panels.append(
            FigurePanel(
                "Share of the majority class in each test bag, estimated minus true. Box: the middle half of the bags.",
                _inline(plots.share_boxes(gaps, colours), f"{slug}-boxes", label),
            )
        )
    return FigureGroup("The methods side by side", "", "wide", tuple(panels))


def _curves(named: Sequence[ReportMethod], colours: Mapping[str, str], slug: str, lean: bool) -> FigureGroup:
    panels = []
    for i, method in enumerate(named):
        fits = [r.data["fit"] for r in method.row.records if (r.data["fit"].get("curve") or {}).get("epoch")]
        if not fits:
            continue
        curves = [_curve(f) for f in fits]
        curves = _mean_curve(curves) if lean else curves
        label = f"Training and validation loss of {method.name} over the epochs"
        drawn = plots.learning_curves(curves, colours[method.name])
        panels.append(FigurePanel(method.name, _inline(drawn, f"{slug}-curve{i}", label)))
    text = "The mean of the folds; a" if lean else "One line a fold; the"
    text += " ring is the epoch that was kept: that of the smallest validation loss, unless a recipe keeps the last."
    return FigureGroup("How they learned", text, "small", tuple(panels))


def _curve(fit: dict[str, Any]) -> plots.LossCurve:
    epoch, train, valid = (_floats(fit["curve"][k]) for k in ("epoch", "train", "valid"))
    return plots.LossCurve(epoch, train, valid, fit["best_epoch"], fit["valid_loss"])


def _mean_curve(curves: Sequence[plots.LossCurve]) -> list[plots.LossCurve]:
    """The folds' mean, each fold still with its ring; where a fold has stopped, the mean of those that go on."""
    grid = np.asarray(max((c.epoch for c in curves), key=lambda epoch: epoch[-1]))
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, 60).round().astype(int))]
    train, valid = (
        [
            mean_and_deviation(column)[0]
            for column in np.stack([np.interp(grid, x, y, right=math.nan) for x, y in pairs]).T
        ]
        for pairs in ([(c.epoch, c.train) for c in curves], [(c.epoch, c.valid) for c in curves])
    )
    rings = [c._replace(epoch=(), train=(), valid=()) for c in curves]
    return [rings[0]._replace(epoch=grid, train=train, valid=valid), *rings[1:]]


def _sweeps(named: Sequence[ReportMethod], records: Sequence[Record], slug: str) -> FigureGroup:
    panels = []
    removing = [m for m in named if m.removes]
    for i, method in enumerate(removing):
        sweep = _sweep_of(method, records)
        removal = sorted({r for fold in sweep for r in fold})
        chosen = [r.recipe.removal for r in method.row.records]
        needed = {run for c in method.row.records for run in _needed(c)}
        plain = [r for r in records if _run(r) in needed]
        for read, title, words in (
            (lambda r: r.data["fit"]["valid_loss"], "validation loss", "Validation loss, which chooses r"),
            (lambda r: r.scores["instance_accuracy"], "instance accuracy", "Instance accuracy on the test bags"),
        ):
            folds = [[read(fold[r]) if r in fold else math.nan for r in removal] for fold in sweep]
            base = mean_and_deviation(read(r) for r in plain)[0]
            drawn = plots.removal_sweep(removal, _table(folds), chosen, title, base)
            label = f"{title} of {method.name} against the share r removed"
            panels.append(
                FigurePanel(
                    f"{words}: {method.name}." if len(removing) > 1 else f"{words}.",
                    _inline(drawn, f"{slug}-sweep{i}{title[0]}", label),
                )
            )
    text = (
        "A thin line a fold, a strong one for their mean. Rings mark the r each fold chose without seeing a test label."
    )
    return FigureGroup("How much MPEM should remove", text, "wide", tuple(panels))


def _sweep_of(method: ReportMethod, records: Sequence[Record]) -> list[dict[float, Record]]:
    """For each record of the row, the runs of its fold at every r."""
    wanted = [_run(r, removal=1.0) for r in method.row.records]
    folds: list[dict[float, Record]] = [{} for _ in wanted]
    for record in records:
        run, removal = _run(record, removal=1.0), record.recipe.removal
        if removal and run in wanted:
            folds[wanted.index(run)][removal] = record
    return folds


def _run(record: Record, **changes: float) -> tuple:
    """By what a run is found among records: its recipe, and what it saw."""
    return record.recipe.replace(**changes), *record.fingerprint.values()


def _needed(record: Record) -> list[tuple]:
    return [(needed, *record.fingerprint.values()) for needed in record.recipe.needs]


def _asked(named: Sequence[ReportMethod]) -> tuple[str, list[Record]]:
    """Whom MPEM asked, and the runs that it asked; where it did not run, those of the best Counting Network."""
    needed = {run for m in named if m.removes for r in m.row.records for run in _needed(r)}
    plain = [m for m in named if m.row.records[0].data.get("sweep")]
    plain.sort(key=lambda m: (_run(m.row.records[0]) not in needed, m.row.records[0].recipe.head != "count"))
    return (plain[0].name, [r for r in plain[0].row.records if r.data.get("sweep")]) if plain else ("", [])


def _removal(who: str, asked: Sequence[Record], slug: str) -> FigureGroup:
    sweeps = [r.data["sweep"] for r in asked]
    sweeps = [s for s in sweeps if s["removal"] == sweeps[0]["removal"]]
    panels = []
    if sweeps:
        removal = sweeps[0]["removal"]
        pure, agree, control = (_table([s[k] for s in sweeps]) for k in ("purity", "agreement", "agreement_random"))
        label = "Purity of the removed instances against the share r removed"
        panels.append(
            FigurePanel(
                "Purity: of the removed, how many really were not of the bag’s class.",
                _inline(plots.purity(removal, pure), f"{slug}-purity", label),
            )
        )
        label = (
            "Agreement of the remaining majority with the label against the share r removed, MPEM and random control"
        )
        panels.append(
            FigurePanel(
                "Agreement: how often the label still is the majority of what is left, beside removal at random.",
                _inline(plots.agreement(removal, agree, control), f"{slug}-agreement", label),
            )
        )
    text = f"Asked of {who}, measured on its training bags with the instance labels that it never saw."
    return FigureGroup("Whom MPEM removes", text, "wide", tuple(panels))


def share_scatters(records: Sequence[Record], slug: str, most: int) -> FigureGroup:
    panels, prefix = [], "train_share_after_"
    for record in records:
        arrays = record.arrays()
        for name in sorted((k for k in arrays if k.startswith(prefix)), key=lambda k: float(k.removeprefix(prefix))):
            removal = float(name.removeprefix(prefix))
            label = f"Share of the majority in each training bag before and after removing {removal:g} of the minority"
            seen = np.unique(np.stack([arrays["train_share_before"], arrays[name]], 1).round(3), axis=0)
            drawn = plots.share_scatter(*seen[:: math.ceil(len(seen) / most)].T)
            panels.append(FigurePanel(f"r = {removal:g}", _inline(drawn, f"{slug}-scatter{len(panels)}", label)))
        if panels:
            break  # one fold shows it, as in the paper
    text = "The majority’s share in each training bag before and after. Above the dashes it has grown."
    return FigureGroup("What removal does to the bags", text, "quad", tuple(panels))


def _confusion(method: ReportMethod, slug: str) -> FigureGroup:
    given = [r.data.get("confusion") for r in method.row.records]
    counts = [np.asarray(c) for c in given if c]
    if not counts:
        return FigureGroup("", "", "", ())
    classes, total = method.row.records[0].data["data"]["classes"], np.sum(counts, axis=0)
    drawn = plots.confusion_matrix(total, classes)
    label = f"Confusion matrix of {method.name}: true classes in rows, said classes in columns"
    text = (
        f"{method.name}, all folds together. Rows are what the instances are, columns what was said of them;"
        " at the right, the share of each class that is said right."
    )
    panel = FigurePanel("", _inline(drawn, f"{slug}-confusion", label))
    return FigureGroup("What is taken for what", text, "table", (panel,), tuple(_mistakes(total, classes)))


def _mistakes(counts: np.ndarray, classes: Sequence[str], most: int = 5) -> Iterator[str]:
    """The commonest mistakes in words, as a share of the class they happen to."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    np.fill_diagonal(share, 0)
    for spot in np.argsort(-share, axis=None, kind="stable")[:most]:
        true, said = divmod(int(spot), len(classes))
        if share[true, said] > 0:
            part = f"{100 * share[true, said]:.1f} % of {classes[true]}"
            yield f"{part} is taken for {classes[said]} ({counts[true, said]:,} of {counts[true].sum():,})"


def _inline(figure: Figure, name: str, label: str) -> Markup:
    """Ours to vouch for: a figure escapes the words in it."""
    return Markup(plots.inline_svg(figure, name, label))


def _floats(values: Iterable[float | None]) -> np.ndarray:
    return _table([list(values)])[0]


def _table(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    """A record writes what is undefined as null; a figure wants NaN."""
    return np.array([[math.nan if v is None else v for v in row] for row in rows], dtype=float)

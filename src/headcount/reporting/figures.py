"""The figures of one data set in one scenario, in groups: every group that its records can fill."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from headcount.experiments.records import Record
from headcount.experiments.scores import mean_and_deviation
from headcount.reporting import plots
from headcount.reporting.render import confusion_table, inline_svg
from headcount.reporting.results_table import ReportMethod, best_method

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class FigureGroup(NamedTuple):
    """Figures under one heading and a sentence."""

    title: str
    text: str
    layout: str  # a CSS class: wide, small, quad, four, table
    panels: tuple[SimpleNamespace, ...]  # caption and svg of each
    notes: tuple[str, ...] = ()


def svg_panel(caption: str, figure: Figure, name: str, label: str) -> SimpleNamespace:
    return SimpleNamespace(caption=caption, svg=inline_svg(figure, name, label))


def section_figures(
    methods: Sequence[ReportMethod], records: Sequence[Record], colours: Mapping[str, str], slug: str, compact: bool = False,
    max_drawn: int = 40,
) -> list[FigureGroup]:  # fmt: skip
    """Every group of figures that these records can fill; ``compact`` shows means and samples, for pages of many sections. Of many
    methods the best are drawn; the table has all."""
    measured, sweeps = _sweep_records(methods)
    drawn = methods[:max_drawn]
    groups = (
        _comparison(drawn, colours, slug, f"The {max_drawn} best of {len(methods)} methods." * (len(methods) > max_drawn)),
        _learning_curves(drawn, colours, slug, compact),
        _choice_of_r(drawn, records, slug),
        _removed_instances(measured, sweeps, slug),
        share_scatters(sweeps, slug, 120 if compact else 2000),
        _confusion(best_method(methods)),
    )
    return [group for group in groups if group.panels]


def _comparison(methods: Sequence[ReportMethod], colours: Mapping[str, str], slug: str, text: str) -> FigureGroup:
    scores = {m.name: _floats(r.scores.get("instance_accuracy") for r in m.row.records) for m in methods}
    errors = {m.name: _floats(v for r in m.row.records for v in r.data.get("share_difference") or ()) for m in methods}
    errors = {name: values for name, values in errors.items() if len(values)}
    several = any(len(values) > 1 for values in scores.values())
    caption = f"Instance accuracy.{' Faint dots are folds, solid ones their mean.' * several}"
    panels = [svg_panel(caption, plots.accuracy_dots(scores, colours), f"{slug}-dots", "Instance accuracy of each method")]
    if errors:
        caption = "Share of the majority class in each test bag, predicted minus true. Boxes span the quartiles."
        label = "Box plot, for each method, of the predicted minus the true share of the majority class over test bags"
        panels.append(svg_panel(caption, plots.share_boxes(errors, colours), f"{slug}-boxes", label))
    return FigureGroup("Comparison of methods", text, "wide", tuple(panels))


def _learning_curves(methods: Sequence[ReportMethod], colours: Mapping[str, str], slug: str, compact: bool) -> FigureGroup:
    panels = []
    for i, method in enumerate(methods):
        curves = []
        for fit in (r.data["fit"] for r in method.row.records):
            if (fit.get("curve") or {}).get("epoch"):
                losses = (_floats(fit["curve"][k]) for k in ("epoch", "train", "valid"))
                curves.append(plots.LossCurve(*losses, fit["best_epoch"], fit["valid_loss"]))
        if curves:
            figure = plots.learning_curves(_mean_curve(curves) if compact else curves, colours[method.name])
            label = f"Training and validation loss of {method.name} over the epochs"
            panels.append(svg_panel(method.name, figure, f"{slug}-curve{i}", label))
    text = "Mean of the folds; rings mark" if compact else "One line per fold; rings mark"
    text += " the kept epoch, that with the lowest validation loss unless the recipe keeps the last."
    return FigureGroup("Learning curves", text, "small", tuple(panels))


def _mean_curve(curves: Sequence[plots.LossCurve]) -> list[plots.LossCurve]:
    """The mean of the folds, with the ring of each fold; after a fold has stopped, the mean of the others."""
    grid = np.asarray(max((c.epoch for c in curves), key=lambda epoch: epoch[-1]))
    grid = grid[np.unique(np.linspace(0, len(grid) - 1, 60).round().astype(int))]

    train, valid = (
        plots.column_means(np.stack([np.interp(grid, c.epoch, getattr(c, name), right=math.nan) for c in curves]))
        for name in ("train", "valid")
    )
    rings = [c._replace(epoch=(), train=(), valid=()) for c in curves]
    return [rings[0]._replace(epoch=grid, train=train, valid=valid), *rings[1:]]


def _choice_of_r(methods: Sequence[ReportMethod], records: Sequence[Record], slug: str) -> FigureGroup:
    panels = []
    removing = [m for m in methods if m.removes]
    for i, method in enumerate(removing):
        sweep = [{r.recipe.removal: r for r in runs} for runs in method.row.sweeps]
        removal = sorted({r for fold in sweep for r in fold})
        chosen = [r.recipe.removal for r in method.row.records]
        prerequisites = _prerequisites([method])
        without_removal = [r for r in records if _run_key(r) in prerequisites]
        for value, title, caption in (
            (lambda r: r.data["fit"]["valid_loss"], "validation loss", "Validation loss, by which r is chosen"),
            (lambda r: r.scores["instance_accuracy"], "instance accuracy", "Instance accuracy on the test bags"),
        ):
            folds = _floats([value(fold[r]) if r in fold else None for r in removal] for fold in sweep)
            baseline = mean_and_deviation(value(r) for r in without_removal)[0]
            figure = plots.against_removal(title, removal, {"": folds}, chosen, baseline)
            label = f"{title} of {method.name} against the share r removed"
            caption = f"{caption}: {method.name}." if len(removing) > 1 else f"{caption}."
            panels.append(svg_panel(caption, figure, f"{slug}-sweep{i}{title[0]}", label))
    text = "Thin lines are folds, thick ones their mean. Rings mark the r that each fold chose without access to test labels."
    return FigureGroup("Choice of the removal ratio r", text, "wide", tuple(panels))


def _run_key(record: Record) -> tuple:
    """What identifies a run among records: its recipe, data and code."""
    return record.recipe, *record.fingerprint.values()


def _prerequisites(methods: Sequence[ReportMethod]) -> set[tuple]:
    """The runs whose predictions MPEM used in those of these methods."""
    return {(recipe, *r.fingerprint.values()) for m in methods for r in m.row.records for recipe in r.recipe.needs}


def _sweep_records(methods: Sequence[ReportMethod]) -> tuple[str, list[Record]]:
    """The method whose predictions MPEM used, and its records; without MPEM, those of the best Counting Network."""
    prerequisites = _prerequisites([m for m in methods if m.removes])
    swept = [m for m in methods if m.row.records[0].data.get("sweep")]
    swept.sort(key=lambda m: (_run_key(m.row.records[0]) not in prerequisites, m.row.records[0].recipe.head != "count"))
    return (swept[0].name, [r for r in swept[0].row.records if r.data.get("sweep")]) if swept else ("", [])


def _removed_instances(name: str, records: Sequence[Record], slug: str) -> FigureGroup:
    sweeps = [r.data["sweep"] for r in records]
    sweeps = [s for s in sweeps if s["removal"] == sweeps[0]["removal"]]
    panels = []
    if sweeps:
        removal = sweeps[0]["removal"]
        pure, agree, control = (_floats(s[k] for s in sweeps) for k in ("purity", "agreement", "agreement_random"))
        caption = "Purity: the fraction of the removed instances that do not belong to the bag’s class."
        label = "Purity of the removed instances against the share r removed"
        panels.append(svg_panel(caption, plots.against_removal("purity", removal, {"MPEM": pure}), f"{slug}-purity", label))
        caption = "Agreement: how often the label is the majority of the remaining instances, compared with removal at random."
        label = "Agreement of the remaining majority with the label against the share r removed, MPEM and random control"
        figure = plots.against_removal("agreement", removal, {"MPEM": agree, "at random": control})
        panels.append(svg_panel(caption, figure, f"{slug}-agreement", label))
    text = f"Removal by the predictions of {name} on its training bags, measured with instance labels not used in training."
    return FigureGroup("What MPEM removes", text, "wide", tuple(panels))


def share_scatters(records: Sequence[Record], slug: str, max_points: int) -> FigureGroup:
    """The share of the majority before and after removal, a panel per r; the first fold with arrays, as in the paper."""
    panels, prefix = [], "train_share_after_"
    for record in records:
        arrays = record.readable_arrays()
        for name in sorted((k for k in arrays if k.startswith(prefix)), key=lambda k: float(k.removeprefix(prefix))):
            removal = float(name.removeprefix(prefix))
            label = f"Share of the majority in each training bag before and after removing {removal:g} of the minority"
            points = np.unique(np.stack([arrays["train_share_before"], arrays[name]], 1).round(3), axis=0)
            figure = plots.share_scatter(*points[:: math.ceil(len(points) / max_points)].T)
            panels.append(svg_panel(f"r = {removal:g}", figure, f"{slug}-scatter{len(panels)}", label))
        if panels:
            break
    text = "Share of the majority in each training bag, before and after removal. It has grown above the dashed line."
    return FigureGroup("Effect of removal on the training bags", text, "quad", tuple(panels))


def _confusion(method: ReportMethod) -> FigureGroup:
    counts = [np.asarray(c) for r in method.row.records if (c := r.data.get("confusion"))]
    if not counts:
        return FigureGroup("", "", "", ())
    classes, total = method.row.records[0].data["data"]["classes"], np.sum(counts, axis=0)
    label = f"Confusion matrix of {method.name}: true classes in rows, predicted classes in columns"
    text = f"{method.name}, all folds. Rows are true classes, columns predicted ones; the recall of each class is at the right."
    panel = SimpleNamespace(caption="", svg=confusion_table(total, classes, label))
    return FigureGroup("Confusion matrix", text, "table", (panel,), tuple(_frequent_errors(total, classes)))


def _frequent_errors(counts: np.ndarray, classes: Sequence[str]) -> Iterator[str]:
    """The five errors with the largest share of their true class, in words."""
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    np.fill_diagonal(share, 0)
    for cell in np.argsort(-share, axis=None, kind="stable")[:5]:
        true, predicted = divmod(int(cell), len(classes))
        if share[true, predicted] > 0:
            part = f"{100 * share[true, predicted]:.1f} % of “{classes[true]}”"
            count = f"{counts[true, predicted]:,} of {counts[true].sum():,}"
            yield f"{part} are predicted as “{classes[predicted]}” ({count})"


def _floats(values: Iterable[Any]) -> np.ndarray:
    """Records write undefined values as null; figures need NaN."""
    return np.array(list(values), dtype=float)

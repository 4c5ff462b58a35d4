"""The report of a fit: one HTML page without scripts or requests, a model card in Markdown, and a summary for the terminal.

Names of classes, files and columns are user data: escaped in the page, inside code marks in the card.
"""

from __future__ import annotations

import math

import numpy as np

from headcount.models.fitted import FittedModel
from headcount.reporting import plots
from headcount.reporting.figures import FigurePanel, svg_panel
from headcount.reporting.templates import render_template
from headcount.reporting.templates import score_with_interval as score

MAX_CLASSES = 30  # in figures and tables
_SCORES = {"bag": "bag_accuracy bag_low bag_high", "instance": "instance_accuracy instance_low instance_high"}


def render_fit_page(model: FittedModel, title: str = "A model from majority labels") -> str:
    """The page as a string."""
    data, splits = model.metadata["data"], model.metadata["splits"]
    sizes = data["sizes"]
    return render_template(
        "fit.html",
        title=title,
        metadata=model.metadata,
        classes=model.classes,
        shares=_majority_shares(model),
        context=context_sentence(model),
        figures=_figures(model),
        facts=[
            ("Bags", f"{data['bags']:,} ({data['labelled']:,} labelled)"),
            ("Instances", f"{data['instances']:,}"),
            ("Instances per bag", f"{sizes['least']:,} to {sizes['most']:,}, median {sizes['median']:g}"),
            ("Folds", str(splits["folds"] or "none")),
            ("Training", f"{splits['train']:,} bags; {splits['valid']:,} for early stopping"),
            ("Time", f"{model.metadata['seconds']:,.0f} s on {model.metadata['device']}"),
            ("Seed", str(model.metadata["seed"])),
        ],
    )


def _majority_shares(model: FittedModel) -> list[tuple[str, int, str, str]]:
    """Class, bags with this label, its share in such bags (from votes, or else expected), its share of all instances."""
    labels, counted = model.metadata["data"]["labels"], model.metadata["data"].get("counted")
    share = counted["share"] if counted else model.transition.share.tolist()
    prior = counted["of_all"] if counted else model.transition.prior.tolist()
    rows = zip(model.classes, labels, share, prior, strict=True)
    return [(c, n, f"{s:.0%}" if n else "–", f"{p:.0%}") for c, n, s, p in rows][:MAX_CLASSES]


def _figures(model: FittedModel) -> list[tuple[str, FigurePanel]]:
    """Headings and figures."""
    metadata, figures = model.metadata, []
    if metadata["confusion"] and len(model.classes) <= MAX_CLASSES:
        text = "Out-of-fold predictions of bag labels: true labels in rows, predicted ones in columns."
        figure = plots.confusion_matrix(metadata["confusion"], model.classes)
        figures.append(("Confusion matrix", svg_panel(text, figure, "confusion", "Confusion matrix of bag labels")))
    curve = [(e, t, v) for e, t, v in metadata["curve"] if v is not None]
    if len(curve) > 1:
        epoch, train, valid = np.array([[math.nan if x is None else x for x in row] for row in curve]).T
        best = int(np.abs(epoch - metadata["best_epoch"]).argmin())
        figure = plots.learning_curves([plots.LossCurve(epoch, train, valid, epoch[best], valid[best])])
        text = "Loss of the final training after each epoch or round; the ring marks the one with the lowest validation loss."
        figures.append(("Learning curve", svg_panel(text, figure, "curve", "Learning curve")))
    figure = plots.bag_sizes(**metadata["data"]["size_counts"])
    return [*figures, ("Bag sizes", svg_panel("", figure, "sizes", "Histogram of bag sizes"))]


def context_sentence(model: FittedModel) -> str | None:
    """Whether predictions use the rest of the bag as context, as cross-validation decided; None if it could not."""
    context = model.metadata.get("context")
    if context is None:
        return None
    accuracy = context.get("instance_accuracy")
    measured = "" if accuracy is None else f"; instance accuracy with context {accuracy:.3f}, against the given truth"
    if context["use_context"]:
        return f"predictions use the rest of the bag as context: it helped on held-out bags{measured}"
    return f"predictions do not use the rest of the bag as context: it did not help on held-out bags{measured}"


def _score_lines(model: FittedModel) -> list[str]:
    """Cross-validated scores in words; empty without cross-validation."""
    scores, folds = model.metadata["scores"], model.metadata["splits"]["folds"]
    if not scores:
        return []
    bag, instance = (score(*(scores[k] for k in keys.split())) for keys in _SCORES.values())
    lines = [f"bag accuracy, {folds}-fold cross-validation: {bag}"]
    if scores["instance_accuracy"] is not None:
        lines.append(f"instance accuracy, against the given truth (not used in training): {instance}")
    return lines


def summary_lines(model: FittedModel) -> list[str]:
    """What the command line prints at the end of a fit."""
    shares = ", ".join(f"{c}: {s}" for c, n, s, _ in _majority_shares(model)[:12] if n)
    counted = model.metadata["data"].get("counted")
    name = "majority share, counted from the votes" if counted else "expected majority share"
    context = context_sentence(model)
    return [
        f"selected {model.metadata['method']['title']}",
        *_score_lines(model),
        *([context] if context else []),
        f"{name}: {shares}",
        *model.metadata["warnings"],
    ]


def model_card(model: FittedModel) -> str:
    """A model card in Markdown for the model's folder."""
    values = {"metadata": model.metadata, "shares": _majority_shares(model), "context": context_sentence(model)}
    return render_template("card.md", scores=_score_lines(model), **values)

"""What a fit shows people: one HTML page that is whole and quiet (no script, no request), and a model card in Markdown.

Class names, file names and column names are other people's words: escaped in the page, held inside code marks in the card.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from markupsafe import Markup

from headcount.models.fitted import FittedModel
from headcount.reporting import axes, plots
from headcount.reporting.svg import MUTED, PALETTE, panel
from headcount.reporting.templates import render_template, score_with_interval

MAX_CLASSES = 30  # in a figure or a table; a page with a thousand rows is read by nobody


def render_fit_page(fitted: FittedModel, title: str = "A model from majority labels") -> str:
    """The page as a string."""
    return render_template(
        "fit.html",
        title=title,
        facts=fitted.metadata,
        classes=fitted.classes,
        shares=_shares(fitted),
        context=context_sentence(fitted),
        figures=_figures(fitted),
        terms=_terms(fitted),
    )


def _shares(fitted: FittedModel) -> list[tuple[str, int, str, str]]:
    """Class, bags so labelled, majority share (counted, or else expected), share of all instances."""
    bags, counted = fitted.metadata["data"]["labels"], fitted.metadata["data"].get("counted")
    own, prior = fitted.transition.share.tolist(), fitted.transition.prior.tolist()
    own, prior = (counted["share"], counted["of_all"]) if counted else (own, prior)
    rows = zip(fitted.classes, bags, own, prior, strict=True)
    return [(c, n, f"{s:.0%}" if n else "–", f"{p:.0%}") for c, n, s, p in rows][:MAX_CLASSES]


def _terms(fitted: FittedModel) -> list[tuple[str, str]]:
    facts, data = fitted.metadata, fitted.metadata["data"]
    sizes = data["sizes"]
    return [
        ("bags", f"{data['bags']:,} ({data['labelled']:,} labelled)"),
        ("instances", f"{data['instances']:,}"),
        ("instances in a bag", f"{sizes['least']:,} to {sizes['most']:,}, median {sizes['median']:g}"),
        ("folds", str(facts["splits"]["folds"] or "none")),
        ("trained on", f"{facts['splits']['train']:,} bags, {facts['splits']['valid']:,} chose the epoch"),
        ("time", f"{facts['seconds']:,.0f} s on {facts['device']}"),
        ("seed", str(facts["seed"])),
    ]


def _figures(fitted: FittedModel) -> list[tuple[str, str, Markup]]:
    """(caption, text, drawing)."""
    facts, made = fitted.metadata, []
    if facts["confusion"] and len(fitted.classes) <= MAX_CLASSES:
        drawn = plots.confusion_matrix(facts["confusion"], fitted.classes)
        text = "Bags, each answered by a model that never saw it: rows are their labels, columns what was said."
        made.append(("Labels of held-out bags", text, _svg(drawn, "confusion", "Confusion matrix of bag labels")))
    curve = [(e, t, v) for e, t, v in facts["curve"] if v is not None]
    if len(curve) > 1:
        epoch, train, valid = (np.array([math.nan if x is None else x for x in a]) for a in zip(*curve, strict=True))
        best = int(np.abs(epoch - facts["best_epoch"]).argmin())
        seen = train if np.isfinite(train).any() else np.full_like(valid, np.nan)
        one = plots.LossCurve(epoch.tolist(), seen.tolist(), valid.tolist(), float(epoch[best]), float(valid[best]))
        text = "The final training: loss after each epoch or round, and the one that validation bags chose."
        made.append(("Learning curve", text, _svg(plots.learning_curves([one]), "curve", "Learning curve")))
    return [*made, ("Sizes of the bags", "", _svg(_sizes(facts["data"]["size_counts"]), "sizes", "Sizes of the bags"))]


def _sizes(counts: dict[str, list[Any]]) -> Any:
    with panel(340, 180) as (figure, ax):
        edges, n = counts["edges"], counts["counts"]
        names = [f"{a:,}" if b == a + 1 else f"{a:,} to {b - 1:,}" for a, b in pairwise(edges)]
        ax.bar(range(len(n)), n, color=PALETTE[0], width=0.85)
        step = max(1, len(n) // 4)
        ax.set(title="bags", xticks=range(0, len(n), step), xticklabels=names[::step])
        ax.set_xlabel("instances in a bag", loc="right", color=MUTED)
        axes.limit_ticks(ax)
    return figure


def _svg(figure: Any, name: str, label: str) -> Markup:
    """Ours to vouch for: a figure escapes the words in it."""
    return Markup(plots.inline_svg(figure, name, label))


# -- the card -------------------------------------------------------------------------------------------------------------


def model_card(fitted: FittedModel) -> str:
    """Short and honest, for whoever finds the folder."""
    facts, data = fitted.metadata, fitted.metadata["data"]
    scores, method = facts["scores"], facts["method"]
    lines = [
        "# Model card",
        "",
        f"{method['title']}: names the class of single instances, learned from the majority labels of bags.",
    ]
    lines += ["", "## Data", ""]
    lines += [f"* {markdown_escape(line)}" for line in data["description"]]
    lines += [f"* fingerprint {data['fingerprint'][:16]}"]
    lines += ["", "## How good it is", ""]
    if scores:
        lines.append(
            f"* bag labels, {facts['splits']['folds']}-fold cross-validation (whole groups held out): accuracy "
            f"{score_with_interval(scores['bag_accuracy'], scores['bag_low'], scores['bag_high'])}, 95 % interval over bags or their groups"
        )
        if scores["instance_accuracy"] is not None:
            said = score_with_interval(scores["instance_accuracy"], scores["instance_low"], scores["instance_high"])
            lines.append(f"* instances, against the truth that came with the data (never used): {said}")
    else:
        lines.append("* not cross-validated")  # why, the cautions say
    if line := context_sentence(fitted):
        lines.append(f"* {line}")
    lines += [f"* {markdown_escape(line)}" for line in facts["warnings"]]
    lines += [
        "",
        "## Classes",
        "",
        "| class | bags with this label | expected share of it in such a bag |",
        "|---|---|---|",
    ]
    lines += [f"| {markdown_escape(c)} | {n} | {s} |" for c, n, s, _ in _shares(fitted)]
    lines += ["", "## Other methods tried", "", "| method | loss on held-out labels | bag accuracy |", "|---|---|---|"]
    for c in facts["methods"]:
        loss = "–" if c["loss"] is None else f"{c['loss']:.4f}"
        lines.append(f"| {c['title']}{' (kept)' * c['chosen']} | {loss} | {score_with_interval(c['bag_accuracy'])} |")
    made = ", ".join(f"{k} {v}" for k, v in facts["versions"].items())
    lines += ["", f"Made {facts['created']} by {made}; seed {facts['seed']}.", ""]
    return "\n".join(lines)


def context_sentence(fitted: FittedModel) -> str | None:
    """What held-out bags said of reading an instance in the light of its bag; None if nobody asked them."""
    told = fitted.metadata.get("context")
    if told is None:
        return None
    right = told.get("instance_accuracy")
    seen = "" if right is None else f" (instances so read, against the truth given: {right:.3f})"
    if told["use_context"]:
        return f"predictions are read in the light of the bag: one half of a held-out bag foretells the other{seen}"
    return f"predictions are of each instance by itself: its bag would not help, by held-out bags{seen}"


def markdown_escape(words: str) -> str:
    """Other people's words, inside code marks where they hold anything that Markdown or HTML could take for more.

    >>> markdown_escape("a plain line"), markdown_escape("<b>|x`"), markdown_escape("a*b")
    ('a plain line', '`` <b>¦x` ``', '`` a*b ``')
    """
    words = " ".join(words.replace("|", "¦").split())
    if re.fullmatch(r"[\w ,.:;'\"()%/+–-]*", words):
        return words
    fence = "`" * (1 + max((len(m) for m in re.findall(r"`+", words)), default=1))
    return f"{fence} {words} {fence}"


def summary_lines(fitted: FittedModel) -> Sequence[str]:
    """What the command line prints at the end."""
    facts = fitted.metadata
    scores, said = facts["scores"], [f"kept {facts['method']['title']}"]
    if scores:
        bag = score_with_interval(scores["bag_accuracy"], scores["bag_low"], scores["bag_high"])
        said.append(f"bag labels, cross-validated: accuracy {bag}")
        if scores["instance_accuracy"] is not None:
            own = score_with_interval(scores["instance_accuracy"], scores["instance_low"], scores["instance_high"])
            said.append(f"instances, against the truth given (used for nothing): accuracy {own}")
    if line := context_sentence(fitted):
        said.append(line)
    shares = ", ".join(f"{c}: {s}" for c, n, s, _ in _shares(fitted)[:12] if n)
    how = "majority share, counted from the votes" if facts["data"].get("counted") else "expected majority share"
    return [*said, f"{how}: {shares}", *facts["warnings"]]

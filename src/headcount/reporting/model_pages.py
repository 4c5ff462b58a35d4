"""Pages about a fitted model: the report of a fit with its model card and summary, and the explanation of predictions."""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headcount.errors import HeadcountError
from headcount.inference.attribution import attribute_columns
from headcount.inference.predict import Predictions
from headcount.majority import metrics
from headcount.models.fitted import FittedModel
from headcount.readers import BagDataset
from headcount.reporting import plots
from headcount.reporting.figures import FigurePanel, svg_panel
from headcount.reporting.render import InstanceView, render_template, score_with_interval as score, view_instance

MAX_CLASSES = 30  # in figures and tables of a fit
_BAGS, _CLASSES, _INSTANCES, _SHARES = 6, 40, 12, 8  # in an explanation: bags if none is named, and per bag or class


def render_fit_page(model: FittedModel, title: str = "A model from majority labels") -> str:
    """The page as a string."""
    data, splits, sizes = model.metadata["data"], model.metadata["splits"], model.metadata["data"]["sizes"]
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
    losses = {m["title"]: (m["loss"], m["error"]) for m in metadata["methods"] if m["loss"] is not None}
    if losses:
        text = "The loss of each method on held-out bags, with two standard errors to each side. Bars that overlap do not show that "
        text += "methods are alike: the table gives differences paired by bag, which are more precise."
        figure = plots.losses_with_errors(losses, metadata["method"]["title"], metadata["prior_loss"])
        figures.append(("Methods compared", svg_panel(text, figure, "methods", "Held-out loss of each method")))
    if metadata["calibration"]:
        table = {k: [row[k] for row in metadata["calibration"]["table"]] for k in ("confidence", "accuracy", "predictions")}
        text = "How often predicted labels of held-out bags are correct, against the probability they were given. Dots on the dashed line "
        text += (
            "are calibrated, those below it overconfident. Bars are 95 % intervals; larger dots stand for more bags. The mean "
        )
        text += f"distance from the line is {metadata['calibration']['error']:.3f} (expected calibration error)."
        figures.append(("Calibration", svg_panel(text, plots.reliability(*table.values()), "calibration", "Calibration plot")))
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
    verb, result = ("use", "helped") if context["use_context"] else ("do not use", "did not help")
    measured = "" if accuracy is None else f"; instance accuracy with context {accuracy:.3f}, against the given truth"
    return f"predictions {verb} the rest of the bag as context: it {result} on held-out bags{measured}"


def _score_lines(model: FittedModel) -> list[str]:
    """Cross-validated scores in words; empty without cross-validation."""
    scores, folds = model.metadata["scores"], model.metadata["splits"]["folds"]
    if not scores:
        return []
    bag, instance = (score(*(scores[f"{k}_{v}"] for v in ("accuracy", "low", "high"))) for k in ("bag", "instance"))
    lines = [f"bag accuracy, {folds}-fold cross-validation: {bag}"]
    if scores["instance_accuracy"] is not None:
        lines.append(f"instance accuracy, against the given truth (not used in training): {instance}")
    return lines


def summary_lines(model: FittedModel) -> list[str]:
    """What the command line prints at the end of a fit."""
    metadata, context = model.metadata, context_sentence(model)
    shares = ", ".join(f"{c}: {s}" for c, n, s, _ in _majority_shares(model)[:12] if n)
    name = "majority share, counted from the votes" if metadata["data"].get("counted") else "expected majority share"
    lines = [f"selected {metadata['method']['title']}", *_score_lines(model), *([context] if context else [])]
    return [*lines, f"{name}: {shares}", *metadata["warnings"]]


def model_card(model: FittedModel) -> str:
    """A model card in Markdown for the model's folder."""
    values = {"metadata": model.metadata, "shares": _majority_shares(model), "context": context_sentence(model)}
    return render_template("card.md", scores=_score_lines(model), **values)


class ExplainedInstance(NamedTuple):
    number: int
    view: InstanceView
    predicted: str
    confidence: float
    vote: float  # contribution to the mean probability of the class under which it is shown


class ClassShare(NamedTuple):
    name: str
    share: float
    low: float
    high: float


class ExplainedBag(NamedTuple):
    name: str
    size: int
    label: str  # as given, all winners of a tie, or empty
    predicted: str
    correct: bool
    probability: float
    shares: tuple[ClassShare, ...]
    votes_for: tuple[ExplainedInstance, ...]  # the strongest for the predicted class, of instances that predict it
    vote_sum: float  # of all votes for the predicted class: its mean probability
    vote_fraction: float  # of them, by the strongest
    runner_up: str
    votes_against: tuple[ExplainedInstance, ...]


class ExplainedClass(NamedTuple):
    name: str
    count: int
    typical: tuple[ExplainedInstance, ...]
    ambiguous: tuple[ExplainedInstance, ...]


def find_bags(dataset: BagDataset, names: Sequence[str]) -> list[int]:
    """The numbers of the bags with these names; unknown names are refused."""
    number = {name: b for b, name in enumerate(dataset.bags.names or ())}
    for name in names:
        if name not in number:
            close = difflib.get_close_matches(name, list(number), n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"the first is {next(iter(number))!r}"
            raise HeadcountError(f"no bag {name!r} among {len(number):,}; {hint}")
    return [number[name] for name in dict.fromkeys(names)]


def bags_to_inspect(dataset: BagDataset, predictions: Predictions) -> list[int]:
    """A few bags: those whose prediction differs from the label first, then those with the lowest confidence."""
    target = dataset.bags.target.numpy()
    wrong = target.any(1) & ~metrics.correct_bags(target, predictions.bag_prediction)
    return np.lexsort((predictions.bag_probabilities.max(1), ~wrong))[:_BAGS].tolist()


def render_explanation(
    model: FittedModel, dataset: BagDataset, predictions: Predictions, bags: Sequence[int], title: str, name: str
) -> str:
    """A page on why these bags (or a few) are predicted as they are, and on how the classes look to the model. The vote of an
    instance for a class is its contribution to the bag's mean probability of the class. The share of a class is what ``predict
    --bags`` writes, inferred from all instances jointly; it equals the mean only without ``concentration``."""
    label = dataset.bags.label.numpy()
    predicted = predictions.instance_prediction
    count = np.bincount(predicted, minlength=len(predictions.classes))
    shown = sorted(np.argsort(-count, kind="stable")[:_CLASSES].tolist())
    explained = [explain_bag(dataset, predictions, b) for b in bags or bags_to_inspect(dataset, predictions)]
    by_class = [explain_class(dataset, predictions, k, np.flatnonzero(predicted == k)) for k in shown]
    instances = {i.number for b in explained for i in (*b.votes_for, *b.votes_against)}
    instances |= {i.number for c in by_class for i in (*c.typical, *c.ambiguous)}
    attribution = attribute_columns(model, dataset, predictions, np.array(sorted(instances)))
    return render_template(
        "explain.html",
        title=title,
        model=name,
        bags=explained,
        classes=by_class,
        attribution=attribution,
        numbers=shown[:8],  # of the classes in the table of columns
        hidden=len(predictions.classes) - len(shown),
        counts={"bags": len(label), "instances": len(dataset.rows), "labelled": int((label >= 0).sum())},
        selected=bool(bags),
    )


def explain_bag(dataset: BagDataset, predictions: Predictions, b: int) -> ExplainedBag:
    bags, classes = dataset.bags, predictions.classes
    rows = np.arange(*bags.offsets[b : b + 2].tolist())
    p, bag_p = predictions.instance_probabilities[rows], predictions.bag_probabilities[b]
    weight = np.ones(len(rows)) if bags.weight is None else bags.weight[rows].numpy().astype(float)
    vote = p * (weight / max(weight.sum(), 1e-12))[:, None]  # (n, C)
    order = np.argsort(-bag_p, kind="stable")
    winner, runner_up = order[:2].tolist()
    ranked = (np.argsort(-vote[:, k], kind="stable") for k in (winner, runner_up))
    votes_for = np.where(weight > 0, p.argmax(1), -1)  # the class of each instance that has a vote
    pro, con = (i[votes_for[i] == k][:_INSTANCES] for i, k in zip(ranked, (winner, runner_up), strict=True))
    estimates = (predictions.shares, predictions.shares_low, predictions.shares_high)
    largest = np.argsort(-predictions.shares[b], kind="stable")[:_SHARES].tolist()
    return ExplainedBag(
        name=(bags.names or ())[b],
        size=len(rows),
        label=bags.take([b]).label_names[0] or "",
        predicted=classes[winner],
        correct=bool(metrics.correct_bags(bags.target[b : b + 1].numpy(), order[:1])[0]),
        probability=float(bag_p[winner]),
        shares=tuple(ClassShare(classes[k], *(float(a[b, k]) for a in estimates)) for k in largest),
        votes_for=_instances(dataset, predictions, rows[pro], vote[pro, winner]),
        vote_sum=float(vote[:, winner].sum()),
        vote_fraction=float(vote[pro, winner].sum() / max(vote[:, winner].sum(), 1e-12)),
        runner_up=classes[runner_up],
        votes_against=_instances(dataset, predictions, rows[con], vote[con, runner_up]),
    )


def explain_class(dataset: BagDataset, predictions: Predictions, k: int, members: np.ndarray) -> ExplainedClass:
    p = predictions.instance_probabilities[members]
    second = np.partition(p, -2, axis=1)[:, -2]
    typical, ambiguous = (
        _instances(dataset, predictions, members[np.argsort(key, kind="stable")[:_INSTANCES]])
        for key in (-p[:, k], p[:, k] - second)
    )
    return ExplainedClass(predictions.classes[k], len(members), typical, ambiguous)


def _instances(
    dataset: BagDataset, predictions: Predictions, rows: np.ndarray, votes: np.ndarray | None = None
) -> tuple[ExplainedInstance, ...]:
    p = predictions.instance_probabilities[rows]
    votes = np.zeros(len(rows)) if votes is None else votes
    columns = (rows.tolist(), p.argmax(1).tolist(), p.max(1).tolist(), votes.tolist())
    return tuple(
        ExplainedInstance(i, view_instance(dataset, i), predictions.classes[k], confidence, vote)
        for i, k, confidence, vote in zip(*columns, strict=True)
    )

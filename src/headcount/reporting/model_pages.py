"""Pages about a fitted model: the report of a fit with its model card and summary, and the explanation of predictions."""

import difflib
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.majority import metrics
from headcount.majority.calibration import apply_temperature
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions, estimator_probabilities
from headcount.readers import BagDataset
from headcount.reporting import plots
from headcount.reporting.render import (
    confusion_table,
    inline_svg,
    percent,
    render_template,
    score_with_interval as score,
    view_instance,
)

MAX_CLASSES = 30  # in figures and tables of a fit
_BAGS, _CLASSES, _INSTANCES, _SHARES = 6, 40, 12, 8  # in an explanation: bags if none is named, and per bag or class
_SAMPLE, _ROWS = 1000, 200_000  # instances for the importance of columns, and predictions that it may take
_LOCAL = 8  # columns of single instances: the most important ones


def render_fit_page(model: FittedModel, title: str) -> str:
    """The page as a string, with the figures for which there are data; their headings and captions are in the template."""
    metadata, sizes = model.metadata, model.metadata["data"]["size_counts"]
    figures = {"Bag sizes": plots.bag_sizes(**sizes)} if len(sizes["counts"]) > 1 else {}
    losses = {m["title"]: (m["loss"], m["error"]) for m in metadata["methods"] if m["loss"] is not None}
    if losses:
        figures["Methods compared"] = plots.losses_with_errors(losses, metadata["method"]["title"], metadata["prior_loss"])
    if metadata["calibration"]:
        table = metadata["calibration"]["table"]
        columns = ([row[k] for row in table] for k in ("confidence", "accuracy", "predictions"))
        figures["Calibration"] = plots.reliability(*columns)
    curve = [(e, t, v) for e, t, v in metadata["curve"] if v is not None]
    if len(curve) > 1:
        epoch, train, valid = np.array([[math.nan if x is None else x for x in row] for row in curve]).T
        best = int(np.abs(epoch - metadata["best_epoch"]).argmin())
        figures["Learning curve"] = plots.learning_curves([plots.LossCurve(epoch, train, valid, epoch[best], valid[best])])
    panels = {name: inline_svg(figure, name.split()[0].lower(), name) for name, figure in figures.items()}
    if metadata["confusion"] and len(model.classes) <= MAX_CLASSES:
        panels["Confusion matrix"] = confusion_table(metadata["confusion"], model.classes, "Confusion matrix of bag labels")
    shown = {"metadata": metadata, "classes": model.classes, "shares": _majority_shares(model)}
    return render_template("fit.html", title=title, context=context_sentence(model), figures=panels, **shown)


def _majority_shares(model: FittedModel) -> list[tuple[str, int, str, str]]:
    """Class, bags with this label, its share in such bags (from votes, or else expected), its share of all instances."""
    labels, counted = model.metadata["data"]["labels"], model.metadata["data"].get("counted")
    share = counted["share"] if counted else model.transition.share.tolist()
    prior = counted["of_all"] if counted else model.transition.prior.tolist()
    rows = zip(model.classes, labels, share, prior, strict=True)
    return [(c, n, percent(s) if n else "–", percent(p)) for c, n, s, p in rows][:MAX_CLASSES]


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
    return render_template(
        "explain.html",
        title=title,
        model=name,
        bags=explained,
        classes=by_class,
        attribution=attribute_columns(model, dataset, predictions, np.array(sorted(instances))),
        numbers=shown[:8],  # of the classes in the table of columns
        hidden=len(predictions.classes) - len(shown),
        counts={"bags": len(label), "instances": len(dataset.rows), "labelled": int((label >= 0).sum())},
        selected=bool(bags),
        trained_on=int(predictions.seen_in_training.sum()),
    )


def explain_bag(dataset: BagDataset, predictions: Predictions, b: int) -> SimpleNamespace:
    """What the page shows of a bag. ``votes_for`` are the strongest votes of instances that predict the bag's class, ``vote_sum``
    is that of all instances for it, and ``vote_fraction`` what the strongest contribute to the sum."""
    bags, classes = dataset.bags, predictions.classes
    rows = np.arange(*bags.offsets[b : b + 2].tolist())
    p, bag_p = predictions.instance_probabilities[rows], predictions.bag_probabilities[b]
    weight = np.ones(len(rows)) if bags.weight is None else bags.weight[rows].numpy().astype(float)
    vote = p * (weight / max(weight.sum(), 1e-12))[:, None]  # (n, C)
    order = np.argsort(-bag_p, kind="stable")
    winner, runner_up = order[:2].tolist()
    votes_for = np.where(weight > 0, p.argmax(1), -1)  # the class of each instance that has a vote

    def strongest(k: int) -> np.ndarray:
        ranked = np.argsort(-vote[:, k], kind="stable")
        return ranked[votes_for[ranked] == k][:_INSTANCES]

    pro, con = strongest(winner), strongest(runner_up)
    shares, low, high = (a[b].tolist() for a in (predictions.shares, predictions.shares_low, predictions.shares_high))
    largest = np.argsort(-predictions.shares[b], kind="stable")[:_SHARES].tolist()
    return SimpleNamespace(
        name=(bags.names or ())[b],
        size=len(rows),
        label=bags.take([b]).label_names[0] or "",  # as given, all winners of a tie, or empty
        predicted=classes[winner],
        correct=bool(metrics.correct_bags(bags.target[b : b + 1].numpy(), order[:1])[0]),
        probability=float(bag_p[winner]),
        shares=[SimpleNamespace(name=classes[k], share=shares[k], low=low[k], high=high[k]) for k in largest],
        votes_for=_instances(dataset, predictions, rows[pro], vote[pro, winner]),
        vote_sum=float(vote[:, winner].sum()),
        vote_fraction=float(vote[pro, winner].sum() / max(vote[:, winner].sum(), 1e-12)),
        runner_up=classes[runner_up],
        votes_against=_instances(dataset, predictions, rows[con], vote[con, runner_up]),
    )


def explain_class(dataset: BagDataset, predictions: Predictions, k: int, members: np.ndarray) -> SimpleNamespace:
    """The most typical and the most ambiguous of the instances that are predicted to belong to a class."""
    p = predictions.instance_probabilities[members]
    keys = (-p[:, k], p[:, k] - np.partition(p, -2, axis=1)[:, -2])
    chosen = (members[np.argsort(key, kind="stable")[:_INSTANCES]] for key in keys)
    typical, ambiguous = (_instances(dataset, predictions, rows) for rows in chosen)
    return SimpleNamespace(name=predictions.classes[k], count=len(members), typical=typical, ambiguous=ambiguous)


def _instances(
    dataset: BagDataset, predictions: Predictions, rows: np.ndarray, votes: np.ndarray | None = None
) -> list[SimpleNamespace]:
    """Instances with their prediction, and their vote for the class under which they are shown."""
    p = predictions.instance_probabilities[rows]
    votes = np.zeros(len(rows)) if votes is None else votes
    columns = (rows.tolist(), p.argmax(1).tolist(), p.max(1).tolist(), votes.tolist())
    shown = []
    for i, k, confidence, vote in zip(*columns, strict=True):
        view, predicted = view_instance(dataset, i), predictions.classes[k]
        shown.append(SimpleNamespace(number=i, view=view, predicted=predicted, confidence=confidence, vote=vote))
    return shown


class Attribution(NamedTuple):
    """How much each of K columns contributes to predictions, the most important column first.

    The contribution to the prediction of an instance: how far the probability of its class falls, on average, if the column has
    the value of another instance, drawn at random. The mean over instances is the permutation importance of the column. Columns
    that say the same share their importance, and one may look useless because the other is there.
    """

    columns: tuple[str, ...]
    importance: np.ndarray  # (K, 1 + C): over all instances, then over those predicted as each class (NaN: there is none)
    contributions: dict[int, tuple[tuple[str, float], ...]]  # by instance, the largest first


def attribute_columns(
    model: FittedModel, dataset: BagDataset, predictions: Predictions, instances: np.ndarray
) -> Attribution | None:
    """The importance of the columns, and their contributions to the predictions of some instances; None without columns."""
    blocks, end = {}, 0
    for f in model.preprocessor.fields:
        start, end = end, end + f.width
        if not f.is_text and f.width:
            blocks[f.name] = slice(start, end)
    if not blocks:
        return None
    bags, predicted = dataset.to_bags(model.preprocessor), predictions.instance_prediction
    generator = np.random.default_rng([0, 5021])

    def contributions(rows: np.ndarray, names: list[str], draws: int) -> np.ndarray:
        """(n, names)"""
        x, repeated = bags.pool.take(bags.index[rows]).numpy(), np.repeat(np.arange(len(rows)), draws)
        others = bags.pool.take(bags.index[generator.integers(0, len(bags.index), len(repeated))]).numpy()
        before, columns = _probabilities(model, x)[np.arange(len(rows)), predicted[rows]], []
        for name in names:
            changed = x[repeated]
            changed[:, blocks[name]] = others[:, blocks[name]]
            after = _probabilities(model, changed)[np.arange(len(repeated)), predicted[rows][repeated]]
            columns.append(before - after.reshape(len(rows), draws).mean(1))
        return np.stack(columns, 1)

    most = min(_SAMPLE, max(50, _ROWS // (4 * len(blocks))), len(bags.index))
    sample = np.sort(generator.choice(len(bags.index), most, replace=False))
    of_sample, n_classes = contributions(sample, list(blocks), 4), len(predictions.classes)
    groups = [np.full(most, True), *(predicted[sample] == k for k in range(n_classes))]
    importance = np.stack([of_sample[g].mean(0) if g.any() else np.full(len(blocks), np.nan) for g in groups], 1)
    order = np.argsort(-importance[:, 0], kind="stable")
    columns = [list(blocks)[i] for i in order]
    local = contributions(instances, columns[:_LOCAL], 16)
    ranked = {}
    for i, row in zip(instances.tolist(), local.tolist(), strict=True):
        ranked[i] = tuple(sorted(zip(columns, row, strict=False), key=lambda pair: -abs(pair[1])))
    return Attribution(tuple(columns), importance[order], ranked)


def _probabilities(model: FittedModel, x: np.ndarray) -> np.ndarray:
    """(n, C) of instances without their bags."""
    single = Bags.of(Pool(x), sizes=[1] * len(x), labels=np.full(len(x), -1), classes=model.classes)
    return apply_temperature(estimator_probabilities(model.estimator, single)[0], model.instance_temperature).numpy()

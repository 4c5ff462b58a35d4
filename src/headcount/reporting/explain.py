"""Why a bag is predicted as it is, and how the classes look to the model: one page, readable offline.

The *vote* of an instance for a class is its contribution to the bag's mean probability of the class: votes add up to that
mean. The *share* of a class is what ``predict --bags`` writes (:meth:`FittedModel.estimate_shares`); it is inferred from all
instances jointly and equals the mean only for a model that does not know how similar the instances of a bag are.
Typical instances of a class have its highest probabilities, ambiguous ones nearly equal probabilities of two classes.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headcount.errors import HeadcountError
from headcount.majority import metrics
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.reporting.templates import InstanceView, render_template, view_instance

_BAGS = 6  # if none is named
_PER_BAG = _PER_CLASS = 12  # instances
_CLASSES = 40
_SHARES = 8


class ExplainedInstance(NamedTuple):
    view: InstanceView
    predicted: str
    confidence: float
    vote: float  # contribution to the mean probability of the class under which it is shown


class ClassShare(NamedTuple):
    name: str
    share: float
    low: float
    high: float


@dataclass(frozen=True)
class ExplainedBag:
    name: str
    size: int
    label: str  # as given, all winners of a tie, or empty
    predicted: str
    correct: bool
    probability: float
    shares: tuple[ClassShare, ...]
    votes_for: tuple[ExplainedInstance, ...]  # the strongest for the predicted class
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
    dataset: BagDataset, predictions: Predictions, bags: Sequence[int], title: str, model: str
) -> str:
    """The page about these bags, or about a few if none is given."""
    label = dataset.bags.label.numpy()
    predicted = predictions.instance_prediction
    count = np.bincount(predicted, minlength=len(predictions.classes))
    shown = sorted(np.argsort(-count, kind="stable")[:_CLASSES].tolist())
    return render_template(
        "explain.html",
        title=title,
        model=model,
        bags=[explain_bag(dataset, predictions, b) for b in bags or bags_to_inspect(dataset, predictions)],
        classes=[explain_class(dataset, predictions, k, np.flatnonzero(predicted == k)) for k in shown],
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
    pro, con = (np.argsort(-vote[:, k], kind="stable")[:_PER_BAG] for k in (winner, runner_up))
    con = con[p[con].argmax(1) != winner]
    (label,) = bags.take([b]).label_names
    estimates = (predictions.shares, predictions.shares_low, predictions.shares_high)
    largest = np.argsort(-predictions.shares[b], kind="stable")[:_SHARES].tolist()
    return ExplainedBag(
        name=(bags.names or ())[b],
        size=len(rows),
        label=label or "",
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
        _instances(dataset, predictions, members[np.argsort(key, kind="stable")[:_PER_CLASS]])
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
        ExplainedInstance(view_instance(dataset, i), predictions.classes[k], confidence, vote)
        for i, k, confidence, vote in zip(*columns, strict=True)
    )

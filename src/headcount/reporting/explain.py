"""Why a bag has its label, and what a class looks like to the model: one page, readable offline.

An instance's *vote* for a class is its part of the mean of the bag's probabilities: the votes of a class add up to that mean.
The *share* is another number, the one ``predict --bags`` writes: what the instances make likely together
(:meth:`Fitted.shares`), which is that mean only for a model that does not know how alike bags are.

Typical instances of a class are the surest of it, doubtful ones those whose two likeliest classes are closest.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headcount.errors import HeadcountError
from headcount.inference.predict import Predictions
from headcount.majority import metrics
from headcount.readers import BagDataset
from headcount.reporting.templates import InstanceView, render_template, view_instance

_BAGS = 6  # shown when none is named
_VOTERS = 12
_EACH = 12  # typical and doubtful instances of a class
_CLASSES = 40


class ExplainedInstance(NamedTuple):
    view: InstanceView
    predicted: str
    confidence: float
    vote: float  # its part of the mean probability of the class it stands under


class ClassShare(NamedTuple):
    name: str
    share: float
    low: float
    high: float
    p_majority: float  # of being the majority


@dataclass(frozen=True)
class ExplainedBag:
    name: str
    size: int
    label: str  # as given, all winners of a tie, or nothing
    predicted: str
    correct: bool
    probability: float
    shares: tuple[ClassShare, ...]
    votes_for: tuple[ExplainedInstance, ...]  # the strongest votes for what was said
    vote_sum: float  # all votes for what was said: the mean of its probabilities
    vote_fraction: float  # the part of them that these carry
    runner_up: str
    votes_against: tuple[ExplainedInstance, ...]


class ExplainedClass(NamedTuple):
    name: str
    count: int
    typical: tuple[ExplainedInstance, ...]
    ambiguous: tuple[ExplainedInstance, ...]


def find_bags(dataset: BagDataset, names: Sequence[str]) -> list[int]:
    """The bags of these names; a name that is not there is refused."""
    place = {name: b for b, name in enumerate(dataset.bags.names or ())}
    for name in names:
        if name not in place:
            near = difflib.get_close_matches(name, list(place), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the first is {next(iter(place))!r}"
            raise HeadcountError(f"no bag {name!r} among {len(place):,}; {hint}")
    return [place[name] for name in dict.fromkeys(names)]


def bags_to_inspect(dataset: BagDataset, predictions: Predictions) -> list[int]:
    """A few bags: said otherwise than labelled first, then the least sure."""
    target = dataset.bags.target.numpy()
    wrong = target.any(1) & ~metrics.correct_bags(target, predictions.bag_prediction)
    return np.lexsort((predictions.bag_probabilities.max(1), ~wrong))[:_BAGS].tolist()


def render_explanation(
    dataset: BagDataset, predictions: Predictions, bags: Sequence[int], title: str, model: str
) -> str:
    """The page about these bags, or about a few if none is named."""
    label = dataset.bags.label.numpy()
    count = np.bincount(predictions.instance_prediction, minlength=len(predictions.classes))
    shown = np.argsort(-count, kind="stable")[:_CLASSES]
    return render_template(
        "explain.html",
        title=title,
        model=model,
        bags=[_bag(dataset, predictions, b) for b in bags or bags_to_inspect(dataset, predictions)],
        classes=[_class(dataset, predictions, int(k), int(count[k])) for k in sorted(shown.tolist())],
        hidden=len(predictions.classes) - len(shown),
        counts={"bags": len(label), "instances": len(dataset.rows), "labelled": int((label >= 0).sum())},
        selected=bool(bags),
    )


def _bag(reading: BagDataset, said: Predictions, b: int) -> ExplainedBag:
    laid = reading.bags
    ends = laid.offsets
    here = np.arange(int(ends[b]), int(ends[b + 1]))
    weight = np.ones(len(here)) if laid.weight is None else laid.weight[here].numpy().astype(float)
    vote = (
        said.instance_probabilities[here] * (weight / max(weight.sum(), 1e-12))[:, None]
    )  # (n, C): adds up to the mean
    order = np.argsort(-said.bag_probabilities[b], kind="stable")
    won, rival = int(order[0]), int(order[1])
    (label,) = laid.take([b]).label_names
    best, worst = (np.argsort(-vote[:, k], kind="stable")[:_VOTERS] for k in (won, rival))
    voters = lambda which, k: tuple(_voter(reading, said, int(here[j]), float(vote[j, k])) for j in which)  # noqa: E731
    return ExplainedBag(
        name=(laid.names or ())[b],
        size=len(here),
        label=label or "",
        predicted=said.classes[won],
        correct=bool(metrics.correct_bags(laid.target[b : b + 1].numpy(), order[:1])[0]),
        probability=float(said.bag_probabilities[b, won]),
        shares=tuple(
            ClassShare(
                said.classes[k],
                *(float(a[b, k]) for a in (said.shares, said.shares_low, said.shares_high, said.bag_probabilities)),
            )
            for k in np.argsort(-said.shares[b], kind="stable")[:8].tolist()
        ),
        votes_for=voters(best, won),
        vote_sum=float(vote[:, won].sum()),
        vote_fraction=float(vote[best, won].sum() / max(vote[:, won].sum(), 1e-12)),
        runner_up=said.classes[rival],
        votes_against=voters([j for j in worst if said.instance_probabilities[here[j]].argmax() != won], rival),
    )


def _voter(reading: BagDataset, said: Predictions, i: int, vote: float) -> ExplainedInstance:
    k = int(said.instance_probabilities[i].argmax())
    return ExplainedInstance(view_instance(reading, i), said.classes[k], float(said.instance_probabilities[i, k]), vote)


def _class(reading: BagDataset, said: Predictions, k: int, count: int) -> ExplainedClass:
    mine = np.flatnonzero(said.instance_prediction == k)
    p = said.instance_probabilities[mine]
    two = np.partition(p, -2, axis=1)[:, -2] if len(mine) else np.zeros(0)
    typical = mine[np.argsort(-p[:, k], kind="stable")[:_EACH]]
    doubtful = mine[np.argsort(p[:, k] - two, kind="stable")[:_EACH]]
    views = lambda which: tuple(_voter(reading, said, int(i), 0.0) for i in which)  # noqa: E731
    return ExplainedClass(said.classes[k], count, views(typical), views(doubtful))

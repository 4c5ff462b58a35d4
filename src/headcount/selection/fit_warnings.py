"""Cautions: what a person should know before believing a model, in plain sentences, as far as the bags tell."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headcount.bags import Bags
from headcount.inference.evaluate import has_votes
from headcount.majority import transition as tilt
from headcount.majority import transition_em
from headcount.majority.criterion import is_significant
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.selection.cross_validation import MethodScore
from headcount.selection.methods import Method

FEW_BAGS = 30
MIN_BAGS_PER_LABEL = 3  # bags of a label: if none of them is foretold, it is no accident


def fit_warnings(
    bags: Bags,
    best: Method,
    naive_labels: bool,
    scores: dict[str, MethodScore],
    valid_is_train: bool,
    enough_bags: bool = False,
) -> list[str]:
    """Sentences, the gravest first. ``believed``: what was kept learned the bag's label of each instance. ``split``: the bags
    were enough to cross-validate."""
    said = [*_bag_warnings(bags, valid_is_train), *(_baseline_warnings(best, scores) if naive_labels else ())]
    said += _choice_warnings(bags, best, scores, enough_bags)
    if best.name in scores:
        said += _label_warnings(scores[best.name], bags.classes)
        said += _majority_warnings(scores[best.name].criterion.transition, bags)
    said.append(
        "How often single instances are named right cannot be known from bag labels. headcount audit draws about a "
        "hundred instances to label by hand, and headcount evaluate then gives their accuracy with an interval."
    )
    return said


def _bag_warnings(bags: Bags, valid_is_train: bool) -> list[str]:
    told = bags.labelled
    wins = np.bincount(bags.label[told].numpy(), minlength=len(bags.classes))
    said = []
    if int(told.sum()) < FEW_BAGS:
        said.append(f"There are only {int(told.sum())} labelled bags; every number here is uncertain.")
    if valid_is_train:
        why = _one_group(bags) or "Bags are so few"
        said.append(f"{why} that the training bags also chose the epoch: expect less of new bags.")
    counts = [True] * len(wins) if bags.counted is None else bags.counted.tolist()
    never = [c for c, n, on in zip(bags.classes, wins.tolist(), counts, strict=True) if n == 0 and on]
    if never:
        said.append(
            f"No bag has the label {', '.join(never)}: such a class can be told from the others only by what it is not."
        )
    sizes = bags.sizes.numpy()
    if sizes.max() == 1:
        said.append("Every bag holds one instance, so the labels are the instances' own: this is ordinary supervision.")
    elif sizes.max() > sizes.sum() / 2 and len(bags) > 2:
        said.append("One bag holds more than half of all instances and weighs accordingly.")
    return said


def _one_group(bags: Bags) -> str:
    """The beginning of a sentence, where the bags stand or fall together."""
    told = bags.take(bags.labelled)
    if not told.group or len(set(told.group)) > 1:
        return ""
    return f"All {'bags' if len(told) == len(bags) else 'labelled bags'} are in one group ({told.group[0]!r}), so"


def _baseline_warnings(best: Method, scores: dict[str, MethodScore]) -> list[str]:
    what = best.title.lower() if best.baseline else f"{best.title}, no round of which was better than the first"
    bolder = ", which a temperature makes bolder" if best.name in scores else ""
    return [
        f"A baseline was kept ({what}): it learned P(label of the bag){bolder}; take its probabilities, and "
        "the expected majority share, with more salt than usual."
    ]


def _choice_warnings(bags: Bags, best: Method, scores: dict[str, MethodScore], enough_bags: bool) -> list[str]:
    if not scores:
        unknown = "nothing was compared, and nothing is known of how good this is."
        if not enough_bags and (together := _one_group(bags)):
            return [f"{together} that none could be held out from the others: {unknown}"]
        what = "time was too short" if enough_bags else "bags were too few"
        return [f"The {what} to cross-validate: {unknown}"]
    mine = scores.get(best.name)
    if mine is None:
        return []
    said, near, better = [], [], []
    if not is_significant(mine.criterion):
        said.append(
            "The labels of held-out bags are not clearly foretold better than by chance: nothing shows that this model "
            "tells one class from another."
        )
    for name, other in scores.items():
        gap = other.criterion.loss_per_bag - mine.criterion.loss_per_bag
        error = 2 * gap.std() / math.sqrt(max(1, len(gap) - 1))
        if name != best.name and gap.mean() <= error:
            (better if gap.mean() < -error else near).append(name)
    if better:
        said.append(f"Clearly worse on these bags than {', '.join(better)}: it was kept because it was asked for.")
    if near:
        said.append(f"Not clearly better on these bags than {', '.join(near)}.")
    return said


def _label_warnings(score: MethodScore, classes: Sequence[str]) -> list[str]:
    """What a single accuracy hides: labels that are never foretold, and how far the commonest one alone gets."""
    said, counts = [], np.array(score.confusion)
    held = counts.sum(1)
    commonest = float(held.max() / max(1, held.sum()))
    if score.bag_low <= commonest:
        said.append(
            f"Always to name the commonest label, {classes[int(held.argmax())]}, is right in {commonest:.0%} of the bags: "
            f"{score.bag_accuracy:.0%} is not clearly more."
        )
    if lost := [
        f"{c} ({n} bags)"
        for c, n, hit in zip(classes, held, counts.diagonal(), strict=True)
        if n >= MIN_BAGS_PER_LABEL and not hit
    ]:
        said.append(
            f"No held-out bag with the label {', '.join(lost)} was named so: of single instances, too, expect few to be."
        )
    return said


def _majority_warnings(transition: tilt.Transition, bags: Bags) -> list[str]:
    size = max(1, round(transition_em.effective_bag_size(bags.segments(), bags.target)))
    least = transition_em.random_majority_share(size, len(bags.classes))
    # a tilt of votes is of a label drawn from them, which is no majority's
    share = float((bags.target.amax(1)[bags.labelled] if has_votes(bags) else transition.share).mean())
    if size > 1 and (share - least) < 0.05:
        return [
            f"Majorities are slight (about {share:.0%} of a bag; bags filled by lot would have {least:.0%}): labels say "
            "little of single instances, and many bags are needed."
        ]
    return []


# -- of a table of bags -------------------------------------------------------------------------------------------------------


def share_warnings(fitted: FittedModel, predictions: Predictions) -> list[str]:
    """What to know before believing the shares of bags: lines to go with the table."""
    lines = []
    method = fitted.metadata.get("method")
    if isinstance(method, dict) and method.get("baseline") is True:
        lines.append(
            "caution: a baseline was kept, which learned the bag's label of each instance and not its class: the shares may be "
            "far off, and the intervals do not know that; evaluate with votes, or an audit, tells how far"
        )
    apart = int(contradicts_shares(predictions, fitted.counted).sum())
    if apart:
        lines.append(
            f"caution: in {apart:,} of the {len(predictions.bag_probabilities):,} bags the prediction is not the class with the largest share: they "
            "are two estimates (docs/how-to/predict.md), and where they differ neither is sure"
        )
    return lines


def contradicts_shares(predictions: Predictions, counted: tuple[bool, ...] | None = None) -> np.ndarray:
    """(B,) another class that may win has a larger share than the one the bag is said to be."""
    share = predictions.shares if counted is None else np.where(counted, predictions.shares, -1.0)
    own = np.take_along_axis(share, predictions.bag_prediction[:, None], 1)[:, 0]
    return share.max(1) > own + 1e-6

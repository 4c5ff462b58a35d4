"""What is known about a fit, as plain JSON for its folder, report and model card; and what to know before relying on it."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from headcount import __version__
from headcount.bags import Bags
from headcount.bags.splits import Split
from headcount.inference.evaluate import has_votes
from headcount.majority.calibration import is_significant, prior_loss
from headcount.majority.transition import Transition, effective_bag_size, random_majority_share
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.selection.cross_validation import FoldResult, MethodScore
from headcount.selection.learnability import mean_winner_share
from headcount.selection.methods import FitResult, Method
from headcount.selection.search import ModelSearch
from headcount.training.loop import thin_curve

FEW_BAGS = 30
MIN_BAGS_PER_LABEL = 3  # if none of this many bags of a label is predicted correctly, it is no accident
CURVE_POINTS = 120  # of the learning curve that are kept
SCORE_KEYS = (
    *("loss", "error", "bag_accuracy", "bag_low", "bag_high", "bag_loss"),
    *("instance_accuracy", "instance_low", "instance_high"),
)


def fit_metadata(
    dataset: BagDataset, search: ModelSearch, best: Method, result: FitResult, final: Split,
    *, scores: dict[str, MethodScore], rows: list[dict[str, Any]],
) -> dict[str, Any]:  # fmt: skip
    """The metadata of a fit: the method kept, the others, the data, the training. ``rows``: :func:`method_rows`."""
    kept = next(row for row in rows if row["chosen"])
    warnings = fit_warnings(
        search.bags, best, scores, naive_labels=result.naive_labels, valid_is_train=final.valid_is_train,
        cross_validated=bool(search.splits),
    )  # fmt: skip
    return {
        "method": {
            "name": best.name, "title": best.title, "baseline": result.naive_labels, "requested": bool(search.requested),
            "parameters": json.loads(json.dumps(best.metadata(), default=str)),
        },
        "methods": rows,
        "scores": None if kept["loss"] is None else {key: kept[key] for key in SCORE_KEYS},
        "confusion": scores[best.name].confusion if best.name in scores else None,
        "calibration": scores[best.name].calibration if best.name in scores else None,
        "warnings": [*warnings.serious, *warnings.cautions, *warnings.notes],
        "warning_weights": [len(sentences) for sentences in warnings],
        "prior_loss": float(prior_loss(search.bags.target).mean()),
        "data": dataset_metadata(dataset),
        "splits": {
            "folds": len(search.splits), "train": len(final.train), "valid": len(final.valid), "valid_is_train": final.valid_is_train,
        },
        "curve": thin_curve(result.curve, CURVE_POINTS), "best_epoch": result.best_epoch, "seed": search.seed,
        "epoch_fraction": search.plan.epoch_fraction, "notes": [*search.plan.notes, *search.notes],
        "versions": {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": str(search.device),
    }  # fmt: skip


def dataset_metadata(dataset: BagDataset) -> dict[str, Any]:
    """What the data are: counts, sizes, how they were read."""
    bags = dataset.bags
    sizes, label = bags.sizes.numpy(), bags.label.numpy()
    edges = np.unique(np.round(np.geomspace(sizes.min(), sizes.max() + 1, 21)).astype(int))
    return {
        "fingerprint": dataset.fingerprint, "kind": dataset.kind,
        "description": list(dataset.description), "skipped": list(dataset.skipped),
        "bags": len(bags), "labelled": int((label >= 0).sum()), "instances": len(bags.index),
        "sizes": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        "size_counts": {"edges": edges.tolist(), "counts": np.histogram(sizes, edges)[0].tolist()},
        "labels": np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist(),
        "truth": bags.truth is not None, "counted": _vote_shares(bags) if has_votes(bags) else None,
        **({"label_noise": bags.label_noise} if bags.label_noise else {}),
    }  # fmt: skip


def _vote_shares(bags: Bags) -> dict[str, list[float | None]]:
    """Counted from the votes: the mean share of each class in the bags it wins, and its share of all instances."""
    majority = dict(enumerate(mean_winner_share(bags)[0].tolist()))
    votes = bags.target.double().T @ bags.segments().total_weight().double()
    return {"share": [*finite_numbers(majority).values()], "of_all": (votes / votes.sum()).tolist()}


def method_rows(
    methods: Sequence[Method], best: Method, scores: dict[str, MethodScore], results: dict[str, list[FoldResult]],
    notes: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """A row for each method, the lowest loss first."""
    rows, best_score = [], scores.get(best.name)
    for method in methods:
        score, behind = scores.get(method.name), None
        if score is not None and best_score is not None and method is not best:
            gap, error = _loss_gap(score, best_score)
            behind = {"loss": gap, "error": error}
        rows.append({
            "name": method.name, "title": method.title, "baseline": method.baseline, "chosen": method is best,
            "seconds": round(sum(r.seconds for r in results.get(method.name, [])), 2), "behind": behind,
            "note": notes.get(method.name, ""), **{key: None if score is None else getattr(score, key) for key in SCORE_KEYS},
        })  # fmt: skip
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def _loss_gap(score: MethodScore, best: MethodScore) -> tuple[float, float]:
    """How much higher the loss is than the best, and the standard error: the same bags in the same order."""
    gap = score.criterion.loss_per_bag - best.criterion.loss_per_bag
    return float(gap.mean()), float(gap.std() / math.sqrt(max(1, len(gap) - 1)))


def finite_numbers(numbers: Mapping[Any, float]) -> dict[Any, float | None]:
    """The numbers as JSON takes them: null where they are not finite."""
    return {k: round(float(v), 6) if math.isfinite(v) else None for k, v in numbers.items()}


class FitWarnings(NamedTuple):
    """What to know before relying on a model, by weight."""

    serious: list[str]  # do not rely on it
    cautions: list[str]  # expect less of it
    notes: list[str]


def fit_warnings(
    bags: Bags, best: Method, scores: dict[str, MethodScore],
    *, naive_labels: bool, valid_is_train: bool, cross_validated: bool,
) -> FitWarnings:  # fmt: skip
    """Sentences by their weight. ``naive_labels``: the model was fitted to the bag's label of each instance;
    ``cross_validated``: there were enough bags for folds (``scores`` is empty if there was no time for them)."""
    found = FitWarnings([], [], [])
    _bag_warnings(found, bags, valid_is_train)
    if naive_labels:
        name = best.title.lower() if best.baseline else f"{best.title}, whose first round was the best"
        sharpened = ", and a temperature sharpens its probabilities" if best.name in scores else ""
        found.cautions.append(
            f"A baseline was kept ({name}): it was fitted to the bag's label of each instance{sharpened}; rely on its "
            "probabilities, and on the expected majority share, less than usual."
        )
    _choice_warnings(found, bags, best, scores, cross_validated)
    if best.name in scores:
        _label_warnings(found, scores[best.name], bags.classes)
        _majority_warnings(found, scores[best.name].criterion.transition, bags)
    found.notes.append(
        "The accuracy on single instances cannot be known from bag labels: headcount audit draws some to label by hand."
    )
    return found


def _bag_warnings(found: FitWarnings, bags: Bags, valid_is_train: bool) -> None:
    label, sizes = bags.label.numpy(), bags.sizes.numpy()
    wins = np.bincount(label[label >= 0], minlength=len(bags.classes))
    if wins.sum() < FEW_BAGS:
        found.cautions.append(f"There are only {wins.sum()} labelled bags; every number here is uncertain.")
    if valid_is_train:
        reason = _one_group(bags) or "There are too few bags for a separate validation part"
        found.cautions.append(f"{reason}: the training bags also chose the epoch, so expect less of new bags.")
    counted = [True] * len(wins) if bags.counted is None else bags.counted.tolist()
    never = [c for c, n, can_win in zip(bags.classes, wins.tolist(), counted, strict=True) if n == 0 and can_win]
    if never:
        found.notes.append(f"No bag has the label {', '.join(never)}: such a class can be recognised only by exclusion.")
    if sizes.max() == 1:
        found.notes.append("Every bag holds one instance, so bag labels are instance labels: this is ordinary supervision.")
    elif sizes.max() > sizes.sum() / 2 and len(bags) > 2:
        found.cautions.append("One bag holds more than half of all instances and dominates training.")


def _one_group(bags: Bags) -> str:
    """The beginning of a sentence, where all labelled bags are in one group."""
    labelled = bags.take(bags.labelled)
    if not labelled.group or len(set(labelled.group)) > 1:
        return ""
    return f"All {'' if len(labelled) == len(bags) else 'labelled '}bags are in one group ({labelled.group[0]!r})"


def _choice_warnings(
    found: FitWarnings, bags: Bags, best: Method, scores: dict[str, MethodScore], cross_validated: bool
) -> None:
    if not scores:
        reason = "The time was too short to cross-validate" if cross_validated else "The bags were too few to cross-validate"
        if not cross_validated and (one_group := _one_group(bags)):
            reason = f"{one_group}, so none could be held out"
        found.serious.append(f"{reason}: the methods were not compared, and the accuracy of this model is unknown.")
    if (best_score := scores.get(best.name)) is None:
        return
    similar, better = [], []
    if not is_significant(best_score.criterion):
        found.serious.append(
            "The labels of held-out bags are not predicted clearly better than by chance: nothing shows that this model works."
        )
    for name, score in sorted(scores.items(), key=lambda item: item[1].loss):  # not in the order of their estimated times
        gap, error = _loss_gap(score, best_score)
        if name != best.name and gap <= 2 * error:
            (better if gap < -2 * error else similar).append(name)
    if better:
        reason = "it was kept because it was requested, or because their instance predictions explain the labels worse"
        found.cautions.append(f"Clearly worse on these bags than {', '.join(better)}: {reason} than a baseline's.")
    if similar:
        found.notes.append(f"Not clearly better on these bags than {', '.join(similar)}.")


def _label_warnings(found: FitWarnings, score: MethodScore, classes: Sequence[str]) -> None:
    confusion = np.array(score.confusion)
    totals = confusion.sum(1)
    frequency = float(totals.max() / max(1, totals.sum()))
    if score.bag_low <= frequency:
        found.serious.append(
            f"Always predicting the most frequent label, {classes[int(totals.argmax())]}, is correct for {frequency:.0%} of the "
            f"bags: {score.bag_accuracy:.0%} is not clearly more."
        )
    rows = zip(classes, totals, confusion.diagonal(), strict=True)
    missed = [f"{c} ({n} bags)" for c, n, correct in rows if n >= MIN_BAGS_PER_LABEL and not correct]
    if missed:
        found.cautions.append(
            f"No held-out bag with the label {', '.join(missed)} was predicted correctly: expect the same of single instances."
        )


def _majority_warnings(found: FitWarnings, transition: Transition, bags: Bags) -> None:
    size = max(1, round(effective_bag_size(bags.segments(), bags.target)))
    at_random = random_majority_share(size, len(bags.classes))
    # with votes, the transition is that of a label drawn from them, not of the majority
    share = float((bags.target.amax(1)[bags.labelled] if has_votes(bags) else transition.share).mean())
    if size == 1 or share - at_random >= 0.05:
        return
    found.cautions.append(
        f"Majorities are slight (about {share:.0%} of a bag; bags filled at random would have {at_random:.0%}): labels say "
        "little about single instances, and many bags are needed."
    )


def share_warnings(model: FittedModel, predictions: Predictions) -> list[str]:
    """What to know before relying on predicted shares of bags, as lines to print with the table."""
    lines = []
    method = model.metadata.get("method")
    if isinstance(method, dict) and method.get("baseline") is True:
        lines.append(
            "warning: the model is a baseline, fitted to the bag's label of each instance: the shares may be far off, and the "
            "intervals do not account for it; evaluate with votes, or an audit, shows by how much"
        )
    conflicts = int(contradicts_shares(predictions, model.counted).sum())
    if conflicts:
        lines.append(
            f"warning: in {conflicts:,} of the {len(predictions.bag_probabilities):,} bags the predicted label is not the class "
            "with the largest share: both are uncertain there (docs/how-to/predict.md)"
        )
    return lines


def contradicts_shares(predictions: Predictions, counted: tuple[bool, ...] | None = None) -> np.ndarray:
    """(B,) whether a class that may win has a larger share than the predicted label."""
    shares = predictions.shares if counted is None else np.where(counted, predictions.shares, -1.0)
    predicted = np.take_along_axis(shares, predictions.bag_prediction[:, None], 1)[:, 0]
    return shares.max(1) > predicted + 1e-6

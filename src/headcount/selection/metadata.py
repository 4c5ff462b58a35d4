"""What is known about a fit, as plain JSON: kept in the model's folder, and the source of its report and model card."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from headcount import __version__
from headcount.bags import Bags
from headcount.bags.splits import Split
from headcount.inference.evaluate import has_votes
from headcount.majority.criterion import prior_loss
from headcount.readers import BagDataset
from headcount.selection.check.learnability import mean_winner_share
from headcount.selection.cross_validation import FoldResult, MethodScore
from headcount.selection.fit_warnings import fit_warnings
from headcount.selection.methods import FitResult, Method
from headcount.selection.search import ModelSearch
from headcount.training.checkpoint import thin_curve

CURVE_POINTS = 120  # of the learning curve that are kept
SCORE_KEYS = (
    *("loss", "error", "bag_accuracy", "bag_low", "bag_high", "bag_loss"),
    *("instance_accuracy", "instance_low", "instance_high"),
)


def fit_metadata(
    search: ModelSearch,
    best: Method,
    result: FitResult,
    final: Split,
    scores: dict[str, MethodScore],
    rows: list[dict[str, Any]],
    *,
    requested: bool,
) -> dict[str, Any]:
    """The metadata of a fit: the method kept, the others, the data, the training. ``rows``: :func:`method_rows`."""
    kept = next(row for row in rows if row["chosen"])
    parameters = json.loads(json.dumps(best.metadata(), default=str))
    return {
        "method": {
            "name": best.name,
            "title": best.title,
            "baseline": result.naive_labels,
            "requested": requested,
            "parameters": parameters,
        },
        "methods": rows,
        "scores": None if kept["loss"] is None else {key: kept[key] for key in SCORE_KEYS},
        "confusion": scores[best.name].confusion if best.name in scores else None,
        "warnings": fit_warnings(
            search.bags,
            best,
            scores,
            naive_labels=result.naive_labels,
            valid_is_train=final.valid_is_train,
            cross_validated=bool(search.splits),
        ),
        "prior_loss": float(prior_loss(search.bags.target).mean()),
        "data": dataset_metadata(search.dataset),
        "splits": {
            "folds": len(search.splits),
            "train": len(final.train),
            "valid": len(final.valid),
            "valid_is_train": final.valid_is_train,
        },
        "curve": thin_curve(result.curve, CURVE_POINTS),
        "best_epoch": result.best_epoch,
        "seed": search.seed,
        "epoch_fraction": search.plan.epoch_fraction,
        "notes": list(search.plan.notes),
        "versions": {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": str(search.device),
    }


def dataset_metadata(dataset: BagDataset) -> dict[str, Any]:
    """What the data are: counts, sizes, how they were read."""
    bags = dataset.bags
    sizes, label = bags.sizes.numpy(), bags.label.numpy()
    return {
        "fingerprint": dataset.fingerprint,
        "kind": dataset.kind,
        "description": list(dataset.description),
        "skipped": list(dataset.skipped),
        "bags": len(bags),
        "labelled": int((label >= 0).sum()),
        "instances": len(bags.index),
        "sizes": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        "size_counts": _histogram(sizes),
        "labels": np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist(),
        "truth": bags.truth is not None,
        "counted": _vote_shares(bags) if has_votes(bags) else None,
    }


def _vote_shares(bags: Bags) -> dict[str, list[float | None]]:
    """Counted from the votes: the mean share of each class in the bags it wins, and its share of all instances."""
    majority = dict(enumerate(mean_winner_share(bags)[0].tolist()))
    votes = bags.target.double().T @ bags.segments().total_weight().double()
    return {"share": [*finite_numbers(majority).values()], "of_all": (votes / votes.sum()).tolist()}


def _histogram(sizes: np.ndarray) -> dict[str, list[Any]]:
    edges = np.unique(np.round(np.geomspace(sizes.min(), sizes.max() + 1, 21)).astype(int))
    return {"edges": edges.tolist(), "counts": np.histogram(sizes, edges)[0].tolist()}


def method_rows(
    methods: Sequence[Method],
    best: Method,
    scores: dict[str, MethodScore],
    results: dict[str, list[FoldResult]],
    notes: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for each method, the lowest loss first."""
    rows = [_method_row(m, best, scores, results.get(m.name, []), notes.get(m.name, "")) for m in methods]
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def _method_row(
    method: Method, best: Method, scores: dict[str, MethodScore], results: Sequence[FoldResult], note: str
) -> dict[str, Any]:
    score, best_score = scores.get(method.name), scores.get(best.name)
    behind = None
    if score is not None and best_score is not None and method is not best:
        gap = score.criterion.loss_per_bag - best_score.criterion.loss_per_bag  # the same bags in the same order
        behind = {"loss": float(gap.mean()), "error": float(gap.std() / math.sqrt(max(1, len(gap) - 1)))}
    return {
        "name": method.name,
        "title": method.title,
        "baseline": method.baseline,
        "chosen": method is best,
        "seconds": round(sum(r.seconds for r in results), 2),
        **{key: None if score is None else getattr(score, key) for key in SCORE_KEYS},
        "behind": behind,
        "note": note,
    }


def finite_numbers(numbers: Mapping[Any, float]) -> dict[Any, float | None]:
    """The numbers as JSON takes them: null where they are not finite.

    >>> finite_numbers({"gain": 0.25, "error": math.inf})
    {'gain': 0.25, 'error': None}
    """
    return {k: round(float(v), 6) if math.isfinite(v) else None for k, v in numbers.items()}

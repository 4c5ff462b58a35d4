"""Facts of a fit, as plain JSON: what a model's folder keeps, and what its page and its card are made of."""

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
from headcount.inference.evaluate import has_votes
from headcount.readers import BagDataset
from headcount.selection.check.coverage import mean_winner_share
from headcount.selection.cross_validation import FoldResult, MethodScore
from headcount.selection.methods import Method

SCORE_KEYS = (
    *("loss", "error", "bag_accuracy", "bag_low", "bag_high", "bag_loss"),
    *("instance_accuracy", "instance_low", "instance_high"),
)


def dataset_metadata(dataset: BagDataset) -> dict[str, Any]:
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
    """Where votes tell how large majorities are, it need not be estimated: each winner's mean share, and shares of all."""
    won = dict(enumerate(mean_winner_share(bags)[0].tolist()))
    heard = bags.target.double().T @ bags.segments().total_weight().double()
    return {"share": [*finite_numbers(won).values()], "of_all": (heard / heard.sum()).tolist()}


def method_rows(
    methods: Sequence[Method],
    best: Method,
    scores: dict[str, MethodScore],
    results: dict[str, list[FoldResult]],
    notes: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for each, the least loss first."""
    rows = [_method_row(c, best, scores, results.get(c.name, []), notes.get(c.name, "")) for c in methods]
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def _method_row(
    method: Method, best: Method, scores: dict[str, MethodScore], results: Sequence[FoldResult], note: str
) -> dict[str, Any]:
    found, mine = scores.get(method.name), scores.get(best.name)
    row: dict[str, Any] = {k: None if found is None else getattr(found, k) for k in SCORE_KEYS}
    behind = None
    if found is not None and mine is not None and method is not best:
        gap = found.criterion.loss_per_bag - mine.criterion.loss_per_bag  # the same bags in the same order
        behind = {"loss": float(gap.mean()), "error": float(gap.std() / math.sqrt(max(1, len(gap) - 1)))}
    took = round(sum(u.seconds for u in results), 2)
    said = {
        "name": method.name,
        "title": method.title,
        "baseline": method.baseline,
        "chosen": method is best,
        "seconds": took,
    }
    return {**said, **row, "behind": behind, "note": note}


def method_metadata(best: Method, naive_labels: bool, requested: bool) -> dict[str, Any]:
    how = json.loads(json.dumps(best.metadata(), default=str))
    return {"name": best.name, "title": best.title, "baseline": naive_labels, "requested": requested, "parameters": how}


def finite_numbers(numbers: Mapping[Any, float]) -> dict[Any, float | None]:
    """As JSON takes them.

    >>> finite({"gain": 0.25, "error": math.inf})
    {'gain': 0.25, 'error': None}
    """
    return {k: round(float(v), 6) if math.isfinite(v) else None for k, v in numbers.items()}


def library_versions() -> dict[str, str]:
    return {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _histogram(sizes: np.ndarray) -> dict[str, list[Any]]:
    edges = np.unique(np.round(np.geomspace(sizes.min(), sizes.max() + 1, 21)).astype(int))
    return {"edges": edges.tolist(), "counts": np.histogram(sizes, edges)[0].tolist()}

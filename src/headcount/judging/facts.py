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
from headcount.data.read import Reading
from headcount.judging.candidates import Candidate
from headcount.judging.coverage import won_shares
from headcount.judging.crossval import Score, Unit
from headcount.judging.evaluation import has_votes

SCORES = (
    *("loss", "error", "bag_accuracy", "bag_low", "bag_high", "bag_loss"),
    *("instance_accuracy", "instance_low", "instance_high"),
)


def of_data(reading: Reading) -> dict[str, Any]:
    bags = reading.laid
    sizes, label = bags.sizes.numpy(), bags.label.numpy()
    return {
        "fingerprint": reading.fingerprint,
        "whose": reading.whose,
        "kind": reading.kind,
        "described": list(reading.described),
        "skipped": list(reading.skipped),
        "bags": len(bags),
        "labelled": int((label >= 0).sum()),
        "instances": len(bags.index),
        "sizes": {"least": int(sizes.min()), "median": float(np.median(sizes)), "most": int(sizes.max())},
        "size_counts": _histogram(sizes),
        "labels": np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist(),
        "truth": bags.truth is not None,
        "counted": _counted(bags) if has_votes(bags) else None,
    }


def _counted(bags: Bags) -> dict[str, list[float | None]]:
    """Where votes tell how large majorities are, it need not be estimated: each winner's mean share, and shares of all."""
    won = dict(enumerate(won_shares(bags)[0].tolist()))
    heard = bags.target.double().T @ bags.segments().total().double()
    return {"share": [*finite(won).values()], "of_all": (heard / heard.sum()).tolist()}


def of_candidates(
    tried: Sequence[Candidate],
    best: Candidate,
    scores: dict[str, Score],
    units: dict[str, list[Unit]],
    notes: dict[str, str],
) -> list[dict[str, Any]]:
    """A row for each, the least loss first."""
    rows = [_row(c, best, scores, units.get(c.name, []), notes.get(c.name, "")) for c in tried]
    return sorted(rows, key=lambda row: math.inf if row["loss"] is None else row["loss"])


def _row(c: Candidate, best: Candidate, scores: dict[str, Score], units: Sequence[Unit], note: str) -> dict[str, Any]:
    found, mine = scores.get(c.name), scores.get(best.name)
    row: dict[str, Any] = {k: None if found is None else getattr(found, k) for k in SCORES}
    behind = None
    if found is not None and mine is not None and c is not best:
        gap = found.judgement.each - mine.judgement.each  # the same bags in the same order
        behind = {"loss": float(gap.mean()), "error": float(gap.std() / math.sqrt(max(1, len(gap) - 1)))}
    took = round(sum(u.seconds for u in units), 2)
    said = {"name": c.name, "title": c.title, "baseline": c.baseline, "chosen": c is best, "seconds": took}
    return {**said, **row, "behind": behind, "note": note}


def of_method(best: Candidate, believed: bool, asked: bool) -> dict[str, Any]:
    how = json.loads(json.dumps(best.facts(), default=str))
    return {"name": best.name, "title": best.title, "baseline": believed, "asked": asked, "how": how}


def finite(numbers: Mapping[Any, float]) -> dict[Any, float | None]:
    """As JSON takes them.

    >>> finite({"gain": 0.25, "error": math.inf})
    {'gain': 0.25, 'error': None}
    """
    return {k: round(float(v), 6) if math.isfinite(v) else None for k, v in numbers.items()}


def versions() -> dict[str, str]:
    return {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()}


def _histogram(sizes: np.ndarray) -> dict[str, list[Any]]:
    edges = np.unique(np.round(np.geomspace(sizes.min(), sizes.max() + 1, 21)).astype(int))
    return {"edges": edges.tolist(), "counts": np.histogram(sizes, edges)[0].tolist()}

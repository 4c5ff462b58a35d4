"""Checking: before any training, can instances be learned from these bags' labels? The service behind ``headcount check``.

    >>> import numpy as np
    >>> from headcount.selection.check.check import check_reading
    >>> from headcount.readers import read
    >>> rng = np.random.default_rng(0)
    >>> classes = [np.where(rng.random(8) < 0.8, b % 2, rng.integers(2, size=8)) for b in range(24)]
    >>> bags = [rng.normal(6.0 * y[:, None], 1.0, (8, 2)) for y in classes]
    >>> checked = check_reading(read(bags, labels=["cat" if 2 * y.sum() < 8 else "dog" for y in classes]))
    >>> checked.verdict
    'good'

Only bags and their labels are looked at (truth is taken away first), at most so many of them (BAGS, INSTANCES), so that it
takes seconds for data of any size. What is computed, and why: selection/check/learnability.py; the look itself: selection/check/linear_baseline.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from threadpoolctl import threadpool_limits

from headcount.bags import Bags
from headcount.bags.folds import count_groups, has_distinct_labels
from headcount.bags.subsample import sample_rows
from headcount.errors import MAX_SEED, check_number
from headcount.inference import label_issues
from headcount.majority.calibration import log_mean_shares
from headcount.readers import BagDataset
from headcount.readers.dataset import check_dataset
from headcount.seeds import seed_for
from headcount.selection.check import advice as counsel
from headcount.selection.check.coverage import Coverage
from headcount.selection.check.learnability import Learnability, assess_learnability, transition_from_votes
from headcount.selection.check.linear_baseline import N_FOLDS, LinearBaseline, fit_linear_baseline

MAX_BAGS, MAX_INSTANCES, MAX_PREDICTIONS = (
    500,
    4_000,
    100_000,
)  # looked at, and instances times classes; more of the same tell little more
THUMBNAIL_SIDE = 12  # pictures are looked at as so many blocks a side (inference/label_issues.py)


@dataclass(frozen=True)
class CheckResult:
    """What was found. ``str()`` is what the command prints; ``to_json()`` is for programs, null where nothing is known."""

    coverage: Coverage
    learnability: Learnability | None  # None: too little to look at
    accuracy: tuple[float, float]  # the range expected for instances
    more_bags: dict[str, int]  # about how many more bags of each class would help
    n_label_issues: int | None  # labels, by the quick look; None if it saw a part of the bags: a part has other winners
    advice: list[str]
    verdict: str  # good, hard or hopeless
    reason: str
    examined: tuple[int, int]  # bags and instances
    seconds: float

    def __str__(self) -> str:
        low, high = self.accuracy
        lines = [*self.coverage.lines(), *_text_lines(self.coverage, self.learnability)]
        lines.append(
            f"expected instance accuracy: {low:.2f} to {high:.2f} (by lot {1 / len(self.coverage.classes):.2f})"
        )
        lines += [f"advice: {sentence}" for sentence in self.advice]
        return "\n".join([*lines, f"verdict: {self.verdict}: {self.reason}"])

    def to_json(self) -> dict[str, Any]:
        low, high = self.accuracy
        return {
            "verdict": self.verdict, "why": self.reason, "coverage": self.coverage.to_json(),
            **_json_fields(self.coverage, self.learnability), "accuracy": {"low": _round(low), "high": _round(high)},
            "more_bags": self.more_bags, "labels_doubted_at_a_quick_look": self.n_label_issues, "advice": self.advice,
            "looked_at": {"bags": self.examined[0], "instances": self.examined[1]}, "seconds": round(self.seconds, 2),
        }  # fmt: skip


def check(dataset: BagDataset, seed: int = 0) -> CheckResult:
    """Check what was read."""
    started, seed = time.monotonic(), check_number("seed", seed, 0, MAX_SEED, integer=True)
    cover = Coverage.from_bags(check_dataset(dataset).bags.blind())
    bags, whole = _subsample(dataset, seed)
    part_seen = dataset.kind == "images" and max(dataset.bags.pool.shape[:2]) > THUMBNAIL_SIDE
    folds = min(N_FOLDS, count_groups(bags)) if len(bags) else 0
    found = doubted = None
    if folds > 1 and has_distinct_labels(bags):
        with _single_thread():
            known = transition_from_votes(bags).mix.double() if cover.votes else None
            seen = fit_linear_baseline(_features(dataset, bags), bags, folds, known, seed)
            found = assess_learnability(seen, bags, cover.votes, cover.labelled_classes, seed)
        doubted = _count_label_issues(seen, bags) if len(bags.index) == whole else None
    low, high = (1 / len(cover.classes), 1.0) if found is None else found.accuracy
    if cover.labelled < counsel.MIN_BAGS:  # of so few bags strangers may be right, or agree, by chance
        low, high = min(low, 1 / len(cover.classes)), 1.0
    high = 1.0 if part_seen else high  # nobody knows from a small picture what a network sees in a large one
    more = {} if found is None else counsel.bags_wanted(cover, found)
    word, why = counsel.verdict(cover, found, part_seen)
    return CheckResult(
        cover, found, (low, high), more, doubted, counsel.advice(cover, found, more, doubted, len(bags), part_seen), word, why,
        (len(bags), len(bags.index)), time.monotonic() - started,
    )  # fmt: skip


@contextmanager
def _single_thread() -> Iterator[None]:
    """Thousands of small products gain nothing from threads, and where others work on the same cores each waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


# -- what is looked at ----------------------------------------------------------------------------------------------------


def _subsample(dataset: BagDataset, seed: int) -> tuple[Bags, int]:
    """Labelled bags, blind: at most BAGS of them, every label in its part, and about INSTANCES instances; and how many
    instances these bags really have.

    An instance that stands for others of its bag has their number as its weight, so that sizes stay what they are.
    """
    bags = dataset.bags.blind()
    label = bags.label.numpy()
    rng = np.random.default_rng(seed_for(seed, "bags looked at"))
    order = rng.permutation(np.flatnonzero(label >= 0))
    rank = np.empty(len(order))
    for c in np.unique(label[order]):
        mine = label[order] == c
        rank[mine] = np.arange(mine.sum()) / mine.sum()
    bags = bags.take(np.sort(order[np.argsort(rank, kind="stable")[:MAX_BAGS]]))
    most = min(MAX_INSTANCES, max(1_000, MAX_PREDICTIONS // len(bags.classes)))
    if len(bags.index) <= most:
        return bags, len(bags.index)
    bags = replace(bags, known=None)
    rows = sample_rows(bags, most, seed)
    kept = torch.bincount(bags.bag[rows], minlength=len(bags))
    whole = bags.segments().total_weight()
    weight = torch.ones(len(rows)) if bags.weight is None else bags.weight[rows]
    thin = replace(
        bags, index=bags.index[rows], offsets=torch.cat([kept.new_zeros(1), kept.cumsum(0)]), weight=weight,
        removed=None if bags.removed is None else bags.removed[rows],
    )  # fmt: skip
    share = whole / thin.segments().total_weight().clamp_min(1e-12)
    thin = replace(thin, weight=weight * share.float().repeat_interleave(kept))
    return thin.take(thin.segments().total_weight() > 0), len(
        bags.index
    )  # of a bag only weightless ones may have been drawn


def _features(dataset: BagDataset, bags: Bags) -> np.ndarray:
    """(N, D) of the instances looked at; what prepares them needs no label, so it may see them all."""
    if dataset.schema.fields:
        table = dataset.content.take(pa.array(bags.index.numpy()))
        return dataset.schema.fit(table, np.arange(table.num_rows)).transform(table)
    return label_issues.downsample(bags.pool.take(bags.index).cpu().numpy())


def _count_label_issues(baseline: LinearBaseline, bags: Bags) -> int:
    """Labels that the quick look doubts, by the rule of ``headcount issues``: that asks forests, which take too long here, and
    so marks others."""
    said = log_mean_shares(baseline.p, bags.segments(), bags.counted) / baseline.criterion.bag_temperature
    return sum(label_issues.find_label_issues(bags, said.softmax(1).numpy()).column("looks_wrong").to_pylist())


# -- in words and numbers -------------------------------------------------------------------------------------------------


def _text_lines(coverage: Coverage, learnability: Learnability | None) -> list[str]:
    if learnability is None:
        return []
    rows = zip(coverage.classes, learnability.share, learnability.share_low, learnability.share_high, strict=True)
    shares = ", ".join(f"{c}: {s:.2f} ({a:.2f} to {b:.2f})" for c, s, a, b in rows if not math.isnan(s))
    known = "counted from the votes" if coverage.votes else "estimated"
    c, (doubt, often) = learnability.conditioning, learnability.most_confused
    i, j = (coverage.classes[k] for k in c.hardest_pair)
    singular = "" if c.all_win else "; among the classes that win, as a whole it cannot be inverted"
    lines = [
        f"majority shares, {known}, 90 % intervals: {shares}",
        f"tilt: smallest singular value {c.smallest:.2f}, condition {c.condition:.1f}: an error in P(label | x) becomes up to "
        f"{c.amplification:.1f} times as large in P(class | x){singular}",
        f"hardest to tell apart by labels: {i!r} and {j!r} ({c.distance:.2f} of 1 apart)",
    ]
    if often >= 0.005:
        lines.append(
            f"by looks: {' and '.join(repr(coverage.classes[k]) for k in doubt)} ({often:.0%} of instances in doubt)"
        )
    return lines


def _json_fields(coverage: Coverage, learnability: Learnability | None) -> dict[str, Any]:
    if learnability is None:
        return {"shares": None, "tilt": None, "witnesses": None, "gain": None}
    rows = zip(coverage.classes, learnability.share, learnability.share_low, learnability.share_high, strict=True)
    c, (doubt, often) = learnability.conditioning, learnability.most_confused
    return {
        "shares": {
            "known": coverage.votes,
            "classes": {k: {"share": _round(s), "low": _round(a), "high": _round(b)} for k, s, a, b in rows},
        },
        "tilt": {
            "matrix": [[_round(v) for v in row] for row in learnability.transition.matrix.tolist()],
            "smallest_singular_value": _round(c.smallest), "condition": _round(c.condition) if c.all_win else None,
            "condition_of_winners": _round(c.condition), "amplification": _round(c.amplification),
            "hardest_by_labels": {"classes": [coverage.classes[k] for k in c.hardest_pair], "apart": _round(c.distance)},
            "hardest_by_looks": {"classes": [coverage.classes[k] for k in doubt], "in_doubt": _round(often)},
        },
        "witnesses": {"dispute": _round(learnability.fold_disagreement), "doubt": [_round(v) for v in learnability.uncertainty]},
        "gain": {"nats_a_bag": _round(learnability.gain[0]), "error": _round(learnability.gain[1])},
    }  # fmt: skip


def _round(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return round(float(value), 6) if math.isfinite(value) else None

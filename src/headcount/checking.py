"""Checking: before any training, can instances be learned from these bags' labels? The service behind ``headcount check``.

    >>> import numpy as np
    >>> from headcount.checking import check_reading
    >>> from headcount.data.read import read
    >>> rng = np.random.default_rng(0)
    >>> classes = [np.where(rng.random(8) < 0.8, b % 2, rng.integers(2, size=8)) for b in range(24)]
    >>> bags = [rng.normal(6.0 * y[:, None], 1.0, (8, 2)) for y in classes]
    >>> checked = check_reading(read(bags, labels=["cat" if 2 * y.sum() < 8 else "dog" for y in classes]))
    >>> checked.verdict
    'good'

Only bags and their labels are looked at (truth is taken away first), at most so many of them (BAGS, INSTANCES), so that it
takes seconds for data of any size. What is computed, and why: judging/prospects.py; the look itself: judging/quick.py.
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
from headcount.data.read import Reading
from headcount.data.read.lay import as_read
from headcount.errors import MOST_SEED, number
from headcount.judging import counsel, crossval, doubts
from headcount.judging.coverage import Coverage
from headcount.judging.fewer import some_rows
from headcount.judging.prospects import Prospect, from_votes, prospect
from headcount.judging.quick import FOLDS, Look, look
from headcount.models.fitted import log_shares
from headcount.training.seeds import seed_for
from headcount.training.splits import groups_of

BAGS, INSTANCES, ANSWERS = (
    500,
    4_000,
    100_000,
)  # looked at, and instances times classes; more of the same tell little more
SIDE = 12  # pictures are looked at as so many blocks a side (judging/doubts.py)


@dataclass(frozen=True)
class Checked:
    """What was found. ``str()`` is what the command prints; ``to_json()`` is for programs, null where nothing is known."""

    coverage: Coverage
    found: Prospect | None  # None: too little to look at
    accuracy: tuple[float, float]  # the range expected for instances
    more: dict[str, int]  # about how many more bags of each class would help
    doubted: int | None  # labels, by the quick look; None if it saw a part of the bags: a part has other winners
    advice: list[str]
    verdict: str  # good, hard or hopeless
    why: str
    looked: tuple[int, int]  # bags and instances
    seconds: float

    def __str__(self) -> str:
        low, high = self.accuracy
        lines = [*self.coverage.lines(), *_said(self.coverage, self.found)]
        lines.append(
            f"expected instance accuracy: {low:.2f} to {high:.2f} (by lot {1 / len(self.coverage.classes):.2f})"
        )
        lines += [f"advice: {sentence}" for sentence in self.advice]
        return "\n".join([*lines, f"verdict: {self.verdict}: {self.why}"])

    def to_json(self) -> dict[str, Any]:
        low, high = self.accuracy
        return {
            "verdict": self.verdict, "why": self.why, "coverage": self.coverage.to_json(),
            **_numbers(self.coverage, self.found), "accuracy": {"low": _round(low), "high": _round(high)},
            "more_bags": self.more, "labels_doubted_at_a_quick_look": self.doubted, "advice": self.advice,
            "looked_at": {"bags": self.looked[0], "instances": self.looked[1]}, "seconds": round(self.seconds, 2),
        }  # fmt: skip


def check_reading(reading: Reading, seed: int = 0) -> Checked:
    """Check what was read."""
    started, seed = time.monotonic(), number("seed", seed, 0, MOST_SEED, whole=True)
    cover = Coverage.of(as_read(reading).laid.blind())
    bags, whole = _some(reading, seed)
    part_seen = reading.kind == "images" and max(reading.laid.pool.shape[:2]) > SIDE
    folds = min(FOLDS, groups_of(bags)) if len(bags) else 0
    found = doubted = None
    if folds > 1 and crossval.differs(bags):
        with _one_thread():
            known = from_votes(bags).mix.double() if cover.votes else None
            seen = look(_features(reading, bags), bags, folds, known, seed)
            found = prospect(seen, bags, cover.votes, cover.heard, seed)
        doubted = _doubted(seen, bags) if len(bags.index) == whole else None
    low, high = (1 / len(cover.classes), 1.0) if found is None else found.accuracy
    if cover.labelled < counsel.LEAST:  # of so few bags strangers may be right, or agree, by chance
        low, high = min(low, 1 / len(cover.classes)), 1.0
    high = 1.0 if part_seen else high  # nobody knows from a small picture what a network sees in a large one
    more = {} if found is None else counsel.wanted(cover, found)
    word, why = counsel.verdict(cover, found, part_seen)
    return Checked(
        cover, found, (low, high), more, doubted, counsel.advice(cover, found, more, doubted, len(bags), part_seen), word, why,
        (len(bags), len(bags.index)), time.monotonic() - started,
    )  # fmt: skip


@contextmanager
def _one_thread() -> Iterator[None]:
    """Thousands of small products gain nothing from threads, and where others work on the same cores each waits for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threadpool_limits(1):
            yield
    finally:
        torch.set_num_threads(before)


# -- what is looked at ----------------------------------------------------------------------------------------------------


def _some(reading: Reading, seed: int) -> tuple[Bags, int]:
    """Labelled bags, blind: at most BAGS of them, every label in its part, and about INSTANCES instances; and how many
    instances these bags really have.

    An instance that stands for others of its bag has their number as its weight, so that sizes stay what they are.
    """
    bags = reading.laid.blind()
    label = bags.label.numpy()
    rng = np.random.default_rng(seed_for(seed, "bags looked at"))
    order = rng.permutation(np.flatnonzero(label >= 0))
    rank = np.empty(len(order))
    for c in np.unique(label[order]):
        mine = label[order] == c
        rank[mine] = np.arange(mine.sum()) / mine.sum()
    bags = bags.take(np.sort(order[np.argsort(rank, kind="stable")[:BAGS]]))
    most = min(INSTANCES, max(1_000, ANSWERS // len(bags.classes)))
    if len(bags.index) <= most:
        return bags, len(bags.index)
    bags = replace(bags, known=None)
    rows = some_rows(bags, most, seed)
    kept = torch.bincount(bags.bag[rows], minlength=len(bags))
    whole = bags.segments().total()
    weight = torch.ones(len(rows)) if bags.weight is None else bags.weight[rows]
    thin = replace(
        bags, index=bags.index[rows], offsets=torch.cat([kept.new_zeros(1), kept.cumsum(0)]), weight=weight,
        removed=None if bags.removed is None else bags.removed[rows],
    )  # fmt: skip
    share = whole / thin.segments().total().clamp_min(1e-12)
    thin = replace(thin, weight=weight * share.float().repeat_interleave(kept))
    return thin.take(thin.segments().total() > 0), len(bags.index)  # of a bag only weightless ones may have been drawn


def _features(reading: Reading, bags: Bags) -> np.ndarray:
    """(N, D) of the instances looked at; what prepares them needs no label, so it may see them all."""
    if reading.columns.fields:
        table = reading.content.take(pa.array(bags.index.numpy()))
        return reading.columns.learn(table, np.arange(table.num_rows)).apply(table)
    return doubts.in_small(bags.pool.take(bags.index).cpu().numpy())


def _doubted(seen: Look, bags: Bags) -> int:
    """Labels that the quick look doubts, by the rule of ``headcount issues``: that asks forests, which take too long here, and
    so marks others."""
    said = log_shares(seen.p, bags.segments(), bags.counted) / seen.judgement.bag_temperature
    return sum(doubts.doubtful(bags, said.softmax(1).numpy()).column("looks_wrong").to_pylist())


# -- in words and numbers -------------------------------------------------------------------------------------------------


def _said(cover: Coverage, found: Prospect | None) -> list[str]:
    if found is None:
        return []
    rows = zip(cover.classes, found.share, found.share_low, found.share_high, strict=True)
    shares = ", ".join(f"{c}: {s:.2f} ({a:.2f} to {b:.2f})" for c, s, a, b in rows if not math.isnan(s))
    known = "counted from the votes" if cover.votes else "estimated"
    c, (doubt, often) = found.conditions, found.confused
    i, j = (cover.classes[k] for k in c.pair)
    singular = "" if c.whole else "; among the classes that win, as a whole it cannot be inverted"
    lines = [
        f"majority shares, {known}, 90 % intervals: {shares}",
        f"tilt: smallest singular value {c.smallest:.2f}, condition {c.condition:.1f}: an error in P(label | x) becomes up to "
        f"{c.amplification:.1f} times as large in P(class | x){singular}",
        f"hardest to tell apart by labels: {i!r} and {j!r} ({c.apart:.2f} of 1 apart)",
    ]
    if often >= 0.005:
        lines.append(
            f"by looks: {' and '.join(repr(cover.classes[k]) for k in doubt)} ({often:.0%} of instances in doubt)"
        )
    return lines


def _numbers(cover: Coverage, found: Prospect | None) -> dict[str, Any]:
    if found is None:
        return {"shares": None, "tilt": None, "witnesses": None, "gain": None}
    rows = zip(cover.classes, found.share, found.share_low, found.share_high, strict=True)
    c, (doubt, often) = found.conditions, found.confused
    return {
        "shares": {
            "known": cover.votes,
            "classes": {k: {"share": _round(s), "low": _round(a), "high": _round(b)} for k, s, a, b in rows},
        },
        "tilt": {
            "matrix": [[_round(v) for v in row] for row in found.tilt.matrix.tolist()],
            "smallest_singular_value": _round(c.smallest), "condition": _round(c.condition) if c.whole else None,
            "condition_of_winners": _round(c.condition), "amplification": _round(c.amplification),
            "hardest_by_labels": {"classes": [cover.classes[k] for k in c.pair], "apart": _round(c.apart)},
            "hardest_by_looks": {"classes": [cover.classes[k] for k in doubt], "in_doubt": _round(often)},
        },
        "witnesses": {"dispute": _round(found.dispute), "doubt": [_round(v) for v in found.doubt]},
        "gain": {"nats_a_bag": _round(found.gain[0]), "error": _round(found.gain[1])},
    }  # fmt: skip


def _round(value: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return round(float(value), 6) if math.isfinite(value) else None

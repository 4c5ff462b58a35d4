"""Before any training: can instances be learned from the labels of these bags? The service behind ``headcount check``.

It takes seconds for data of any size; truth is removed first. The estimates are explained in docs/how-to/check.md.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.bags.splits import count_groups, has_distinct_labels, subsample_instances
from headcount.errors import MAX_SEED, check_number
from headcount.inference import label_issues
from headcount.majority.calibration import log_mean_shares
from headcount.majority.transition import Transition
from headcount.readers.dataset import BagDataset, check_dataset
from headcount.selection.advice import MIN_BAGS, Coverage, advice, bags_needed, verdict
from headcount.selection.learnability import (
    N_FOLDS,
    Learnability,
    LinearBaseline,
    assess_learnability,
    fit_linear_baseline,
    transition_from_votes,
)
from headcount.training.accel import limit_threads

MAX_PREDICTIONS = 100_000  # instances times classes
THUMBNAIL_SIDE = 12  # images are reduced to at most this many blocks a side (inference/label_issues.py)


@dataclass(frozen=True)
class CheckResult:
    """What :func:`check` returns. ``str()`` is what the command prints."""

    verdict: str  # whether instances can be learned: yes, perhaps or no
    reason: str  # for the verdict
    accuracy: tuple[float, float]  # range in which the instance accuracy of a trained model lies in four cases of five
    advice: list[str]  # what would help, the most useful first
    coverage: Coverage  # counts of bags, labels and instances
    learnability: Learnability | None  # None: too few bags to estimate anything
    more_bags: dict[str, int]  # about how many more bags of each class would help
    n_label_issues: int | None  # labels that the linear baseline flags; None if it saw a part of the instances only
    examined: tuple[int, int]  # bags and instances
    seconds: float

    @property
    def conditioning(self) -> Conditioning | None:
        """How well the estimated transition can be inverted."""
        known = self.learnability
        return None if known is None else conditioning(known.transition, self.coverage.labelled_classes)

    def __str__(self) -> str:
        low, high = self.accuracy
        expected = f"about {(low + high) / 2:.2f}, in four cases of five {low:.2f} to {high:.2f}"
        expected = "unknown" if self.learnability is None else expected
        lines = [f"can this work? {self.verdict}: {self.reason}"]
        lines.append(f"expected accuracy on single instances: {expected} (guessing: {1 / len(self.coverage.classes):.2f})")
        lines += [f"advice: {sentence}" for sentence in self.advice]
        return "\n".join([*lines, "details:", *(f"  {line}" for line in (*self.coverage.lines(), *_text_lines(self)))])

    def to_json(self) -> dict[str, Any]:
        """The result as plain JSON; null where nothing is known."""
        low, high = self.accuracy
        return {
            "verdict": self.verdict, "reason": self.reason, "coverage": self.coverage.to_json(), **_json_fields(self),
            "accuracy": {"low": _finite(low), "high": _finite(high)}, "more_bags": self.more_bags,
            "label_issues_by_linear_baseline": self.n_label_issues, "advice": self.advice,
            "examined": {"bags": self.examined[0], "instances": self.examined[1]}, "seconds": round(self.seconds, 2),
        }  # fmt: skip


def check(dataset: BagDataset, seed: int = 0, *, max_bags: int = 500, max_instances: int = 4_000) -> CheckResult:
    """Check, before any training, whether instances can be learned from the labels of these bags.

    Parameters
    ----------
    dataset : BagDataset
        What :func:`headcount.read` returns. Its truth is not used.
    seed : int
        Random seed of the subsample, the folds and the bootstrap.
    max_bags, max_instances : int
        How much is examined at most; each instance then stands for those left out of its bag.

    Returns
    -------
    CheckResult

    Examples
    --------
    >>> import numpy as np
    >>> import headcount as hc
    >>> rng = np.random.default_rng(0)
    >>> classes = [np.where(rng.random(8) < 0.8, b % 2, rng.integers(2, size=8)) for b in range(24)]
    >>> bags = [rng.normal(6.0 * y[:, None], 1.0, (8, 2)) for y in classes]
    >>> result = hc.check(hc.read(bags, labels=["cat" if 2 * y.sum() < 8 else "dog" for y in classes]))
    >>> result.verdict
    'yes'
    """
    started, seed = time.monotonic(), check_number("seed", seed, 0, MAX_SEED, integer=True)
    coverage = Coverage.from_bags(check_dataset(dataset).bags.blind())
    bags, all_instances = subsample(dataset.bags.blind(), seed, max_bags, max_instances)
    downscaled = dataset.kind == "images" and max(dataset.bags.pool.shape[:2]) > THUMBNAIL_SIDE
    folds, learnability, n_label_issues = min(N_FOLDS, count_groups(bags)) if len(bags) else 0, None, None
    if folds > 1 and has_distinct_labels(bags):
        # thousands of small products gain nothing from threads, and on a busy machine each product waits for all of them
        with limit_threads(1):
            mix = transition_from_votes(bags).mix.double() if coverage.votes else None
            baseline = fit_linear_baseline(_features(dataset, bags), bags, folds, mix, seed)
            learnability = assess_learnability(baseline, bags, coverage.votes, coverage.labelled_classes, seed)
        n_label_issues = _count_label_issues(baseline, bags) if len(bags.index) == all_instances else None
    chance = 1 / len(coverage.classes)
    low, high = (chance, 1.0) if learnability is None else learnability.accuracy
    if coverage.labelled < MIN_BAGS:  # out-of-fold predictions of so few bags may be right, or agree, by chance
        low, high = min(low, chance), 1.0
    high = 1.0 if downscaled else high  # a reduced image cannot tell what a network sees in the full one
    more_bags = {} if learnability is None else bags_needed(coverage, learnability)
    word, reason = verdict(coverage, learnability, downscaled)
    sentences = advice(coverage, learnability, more_bags, n_label_issues, len(bags), downscaled)
    return CheckResult(
        word, reason, (low, high), sentences, coverage, learnability, more_bags, n_label_issues,
        examined=(len(bags), len(bags.index)), seconds=time.monotonic() - started,
    )  # fmt: skip


def subsample(bags: Bags, seed: int, max_bags: int, max_instances: int) -> tuple[Bags, int]:
    """At most ``max_bags`` labelled bags, every label in proportion, with about ``max_instances`` of their instances; and how
    many instances these bags have in full. Each instance is weighted for those left out, so that bags keep their sizes."""
    label = bags.label.numpy()
    rng = np.random.default_rng(seed_for(seed, "bags looked at"))
    order = rng.permutation(np.flatnonzero(label >= 0))
    rank = np.empty(len(order))
    for c in np.unique(label[order]):
        of_class = label[order] == c
        rank[of_class] = np.arange(of_class.sum()) / of_class.sum()
    bags = bags.take(np.sort(order[np.argsort(rank, kind="stable")[:max_bags]]))
    limit = min(max_instances, max(1_000, MAX_PREDICTIONS // len(bags.classes)))
    if len(bags.index) <= limit:
        return bags, len(bags.index)
    sample = subsample_instances(replace(bags, known=None), limit, seed)
    return sample.take(sample.segments().total_weight() > 0), len(bags.index)  # all drawn from a bag may have weight 0


def _features(dataset: BagDataset, bags: Bags) -> np.ndarray:
    """(N, D) features of the instances examined. Preparing them needs no label, so all folds may share it."""
    if dataset.schema.fields:
        table = dataset.content.take(pa.array(bags.index.numpy()))
        return dataset.schema.fit(table, np.arange(table.num_rows)).transform(table)
    return label_issues.downsample(bags.pool.take(bags.index).cpu().numpy())


def _count_label_issues(baseline: LinearBaseline, bags: Bags) -> int:
    """Labels that the baseline flags, by the rule of ``headcount issues`` (which asks slower forests)."""
    log_p = log_mean_shares(baseline.p, bags.segments(), bags.counted) / baseline.criterion.bag_temperature
    return sum(label_issues.find_label_issues(bags, log_p.softmax(1).numpy()).column("looks_wrong").to_pylist())


@dataclass(frozen=True)
class Conditioning:
    """How well T can be inverted, among the classes that win bags."""

    smallest: float  # singular value
    condition: float  # the largest over the smallest
    amplification: float  # largest factor from an error in P(label | x): equation (2) of docs/explanation/theory.md
    hardest_pair: tuple[int, int]  # the two classes with the most similar rows of T
    distance: float  # total variation between these rows, from 0 (labels cannot separate them) to 1
    all_win: bool  # whether every class wins a bag; if not, T as a whole is singular (section 5)


def conditioning(transition: Transition, wins: np.ndarray) -> Conditioning:
    """The conditioning of a transition, given (C,) which classes win bags (at least two do)."""
    winners = np.flatnonzero(wins)
    matrix = transition.matrix.double().numpy()[np.ix_(winners, winners)]
    matrix = matrix / matrix.sum(1, keepdims=True)
    values = np.linalg.svd(matrix, compute_uv=False)
    condition = amplification = math.inf
    if values[-1] >= 1e-9:
        condition, amplification = values[0] / values[-1], np.abs(np.linalg.inv(matrix.T)).sum(0).max()
    distances = np.abs(matrix[:, None] - matrix[None]).sum(2) / 2 + np.diag(np.full(len(winners), 2.0))
    i, j = sorted(np.unravel_index(int(distances.argmin()), distances.shape))
    pair, distance = (int(winners[i]), int(winners[j])), float(distances[i, j])
    return Conditioning(float(values[-1]), float(condition), float(amplification), pair, distance, bool(wins.all()))


def _text_lines(result: CheckResult) -> list[str]:
    coverage, learnability, c = result.coverage, result.learnability, result.conditioning
    if learnability is None or c is None:
        return []
    rows = zip(coverage.classes, learnability.share, learnability.share_low, learnability.share_high, strict=True)
    shares = ", ".join(f"{k}: {s:.2f} ({a:.2f} to {b:.2f})" for k, s, a, b in rows if not math.isnan(s))
    source = "counted from the votes" if coverage.votes else "estimated"
    i, j = (coverage.classes[k] for k in c.hardest_pair)
    singular = "" if c.all_win else "; among the classes that win, as a whole it cannot be inverted"
    lines = [
        f"majority shares, {source}, 90 % intervals: {shares}",
        f"transition: smallest singular value {c.smallest:.2f}, condition {c.condition:.1f}: an error in P(label | x) becomes "
        f"up to {c.amplification:.1f} times as large in P(class | x){singular}",
        f"hardest to separate by labels: {i!r} and {j!r} (distance {c.distance:.2f} of 1)",
    ]
    pair, confused = learnability.most_confused
    if confused >= 0.005:
        names = " and ".join(repr(coverage.classes[k]) for k in pair)
        lines.append(f"hardest to separate by features: {names} ({confused:.0%} of instances confused)")
    return lines


def _json_fields(result: CheckResult) -> dict[str, Any]:
    coverage, learnability, c = result.coverage, result.learnability, result.conditioning
    if learnability is None or c is None:
        return dict.fromkeys(("shares", "transition", "baseline", "gain"))
    rows = zip(coverage.classes, learnability.share, learnability.share_low, learnability.share_high, strict=True)
    pair, confused = learnability.most_confused
    return {
        "shares": {
            "counted": coverage.votes,
            "classes": {k: {"share": _finite(s), "low": _finite(a), "high": _finite(b)} for k, s, a, b in rows},
        },
        "transition": {
            "matrix": [[*map(_finite, row)] for row in learnability.transition.matrix.tolist()],
            "smallest_singular_value": _finite(c.smallest), "condition": _finite(c.condition) if c.all_win else None,
            "condition_of_winners": _finite(c.condition), "amplification": _finite(c.amplification),
            "hardest_by_labels": {"classes": [coverage.classes[k] for k in c.hardest_pair], "distance": _finite(c.distance)},
            "hardest_by_features": {"classes": [coverage.classes[k] for k in pair], "confused": _finite(confused)},
        },
        "baseline": {
            "fold_disagreement": _finite(learnability.fold_disagreement), "uncertainty": [*map(_finite, learnability.uncertainty)],
        },
        "gain": {"nats_per_bag": _finite(learnability.gain[0]), "error": _finite(learnability.gain[1])},
    }  # fmt: skip


def _finite(value: float) -> float | None:
    """JSON has neither NaN nor infinity."""
    return round(float(value), 6) if math.isfinite(value) else None

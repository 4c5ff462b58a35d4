"""The contest: every candidate learns on the same folds, held-out bags choose, the winner is trained once more on all.

Finished folds are kept in ``work`` and taken up by the next fit of the same. When the minutes are over, what is finished
counts.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from headcount.bags import Bags
from headcount.bags.splits import Split
from headcount.readers import BagDataset
from headcount.selection import cross_validation, resume
from headcount.selection.cross_validation import FoldResult, MethodScore
from headcount.selection.methods import FitResult, Method
from headcount.selection.time_budget import TimePlan


class SearchProgress(NamedTuple):
    """Where a fit stands: what is being done, and how much of the whole, in seconds as they were estimated."""

    message: str
    done: float
    total: float


class TimeLimitReached(Exception):
    """The minutes are over; what is finished is used."""


@dataclass
class ModelSearch:
    """One fit: what stays the same through it, and how far it is."""

    dataset: BagDataset
    bags: Bags  # blind
    methods: dict[str, Method]
    plan: TimePlan
    splits: list[Split]
    seed: int
    device: torch.device
    work: Path | None
    on_progress: Callable[[SearchProgress], None] | None
    deadline: float  # of the cross-validation
    done_seconds: float = 0.0  # seconds of the plan behind us

    def cross_validate(self) -> tuple[dict[str, list[FoldResult]], dict[str, str]]:
        """The units of every candidate that finished, and why the others did not."""
        units: dict[str, list[FoldResult]] = {}
        unfinished: dict[str, str] = {}
        if not self.splits:
            return units, unfinished
        cheap_first = sorted(self.methods.values(), key=lambda c: (not c.baseline, self.plan.cost(c.name)))
        for candidate in cheap_first:
            try:
                units[candidate.name] = [self._fold_result(candidate, k) for k in range(len(self.splits))]
            except TimeLimitReached:
                unfinished[candidate.name] = "not finished in the time given"
        return units, unfinished

    def _fold_result(self, method: Method, k: int) -> FoldResult:
        file = None if self.work is None else self.work / f"{method.name}-{k}.npz"
        cost, what = self.plan.cost(method.name), f"{method.title}, fold {k + 1} of {len(self.splits)}"
        unit = resume.load_fold(file) if file else None
        if unit is None:
            self.report(what, cost, 0.0)
            start = time.monotonic()
            train, valid, test, _ = cross_validation.prepare_split(self.dataset, self.splits[k])
            inside = None if self.work is None else self.work / f"{method.name}-{k}"
            trained = method.fit(
                train, valid, seed=self.seed, device=self.device, epoch_fraction=self.plan.epoch_fraction, work=inside,
                on_progress=lambda share, said: self.report(what, cost, share),
            )  # fmt: skip
            instance, bag = cross_validation.predict_estimator(trained.estimator, test, self.device)
            unit = FoldResult(self.splits[k].test, instance, bag, time.monotonic() - start)
            if file is not None:
                resume.save_fold(file, unit)
            if inside is not None:
                shutil.rmtree(inside, ignore_errors=True)
        self.done_seconds += cost
        return unit

    def choose(self, scores: dict[str, MethodScore], requested: Sequence[str]) -> Method:
        """The candidate with the least loss on held-out bags; where nothing could be cross-validated, the first there is.

        A person who named methods gets one of them: the others stand beside it and are not chosen.
        """
        rivals = [c for c in self.methods.values() if not requested or c.name in requested] or list(
            self.methods.values()
        )
        finished = [c for c in rivals if c.name in scores and math.isfinite(scores[c.name].loss)]
        if not finished:
            return min(rivals, key=lambda c: self.plan.cost(c.name)) if scores else rivals[0]
        return min(finished, key=lambda c: scores[c.name].loss)

    def train_final(self, best: Method, train: Bags, valid: Bags, minutes: float | None, started: float) -> FitResult:
        """The last training, with the epochs there is still time for."""
        cost, effort = self.plan.cost(best.name) * 1.2, self.plan.epoch_fraction
        left = math.inf if minutes is None else started + 60 * minutes - time.monotonic()
        effort *= min(1.0, max(0.05, left / max(cost, 1e-9)))
        self.done_seconds = self.plan.total_seconds - cost
        what = f"{best.title}, final training"
        self.report(what, cost, 0.0, enforce_deadline=False)
        return best.fit(
            train, valid, seed=self.seed, device=self.device, epoch_fraction=effort,
            work=None if self.work is None else self.work / "final",
            on_progress=lambda share, said: self.report(what, cost, share, enforce_deadline=False),
        )  # fmt: skip

    def report(self, message: str, cost: float, fraction: float, enforce_deadline: bool = True) -> None:
        if self.on_progress:
            self.on_progress(
                SearchProgress(
                    message, min(self.done_seconds + fraction * cost, self.plan.total_seconds), self.plan.total_seconds
                )
            )
        if enforce_deadline and time.monotonic() > self.deadline:
            raise TimeLimitReached

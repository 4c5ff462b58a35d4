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
from headcount.data.read import Reading
from headcount.judging import begun, crossval
from headcount.judging.candidates import Candidate, Trained
from headcount.judging.crossval import Score, Split, Unit
from headcount.judging.plans import Plan


class Step(NamedTuple):
    """Where a fit stands: what is being done, and how much of the whole, in seconds as they were estimated."""

    what: str
    done: float
    total: float


class TimeUp(Exception):
    """The minutes are over; what is finished is used."""


@dataclass
class Contest:
    """One fit: what stays the same through it, and how far it is."""

    reading: Reading
    bags: Bags  # blind
    candidates: dict[str, Candidate]
    plan: Plan
    splits: list[Split]
    seed: int
    device: torch.device
    work: Path | None
    watch: Callable[[Step], None] | None
    deadline: float  # of the cross-validation
    done: float = 0.0  # seconds of the plan behind us

    def cross_validate(self) -> tuple[dict[str, list[Unit]], dict[str, str]]:
        """The units of every candidate that finished, and why the others did not."""
        units: dict[str, list[Unit]] = {}
        unfinished: dict[str, str] = {}
        if not self.splits:
            return units, unfinished
        cheap_first = sorted(self.candidates.values(), key=lambda c: (not c.baseline, self.plan.cost(c.name)))
        for candidate in cheap_first:
            try:
                units[candidate.name] = [self._unit(candidate, k) for k in range(len(self.splits))]
            except TimeUp:
                unfinished[candidate.name] = "not finished in the time given"
        return units, unfinished

    def _unit(self, candidate: Candidate, k: int) -> Unit:
        file = None if self.work is None else self.work / f"{candidate.name}-{k}.npz"
        cost, what = self.plan.cost(candidate.name), f"{candidate.title}, fold {k + 1} of {len(self.splits)}"
        unit = begun.read_unit(file) if file else None
        if unit is None:
            self.tell(what, cost, 0.0)
            start = time.monotonic()
            train, valid, test, learned = crossval.prepared(self.reading, self.splits[k])
            inside = None if self.work is None else self.work / f"{candidate.name}-{k}"
            trained = candidate.fit(
                train, valid, seed=self.seed, device=self.device, effort=self.plan.effort, work=inside,
                watch=lambda share, said: self.tell(what, cost, share),
            )  # fmt: skip
            instance, bag = crossval.answers(trained.body, test, learned, self.device)
            unit = Unit(self.splits[k].test, instance, bag, time.monotonic() - start)
            if file is not None:
                begun.write_unit(file, unit)
            if inside is not None:
                shutil.rmtree(inside, ignore_errors=True)
        self.done += cost
        return unit

    def choose(self, scores: dict[str, Score], asked: Sequence[str]) -> Candidate:
        """The candidate with the least loss on held-out bags; where nothing could be cross-validated, the first there is.

        A person who named methods gets one of them: the others stand beside it and are not chosen.
        """
        rivals = [c for c in self.candidates.values() if not asked or c.name in asked] or list(self.candidates.values())
        finished = [c for c in rivals if c.name in scores and math.isfinite(scores[c.name].loss)]
        if not finished:
            return min(rivals, key=lambda c: self.plan.cost(c.name)) if scores else rivals[0]
        return min(finished, key=lambda c: scores[c.name].loss)

    def train(self, best: Candidate, train: Bags, valid: Bags, minutes: float | None, clock: float) -> Trained:
        """The last training, with the epochs there is still time for."""
        cost, effort = self.plan.cost(best.name) * 1.2, self.plan.effort
        left = math.inf if minutes is None else clock + 60 * minutes - time.monotonic()
        effort *= min(1.0, max(0.05, left / max(cost, 1e-9)))
        self.done = self.plan.total - cost
        what = f"{best.title}, final training"
        self.tell(what, cost, 0.0, bound=False)
        return best.fit(
            train, valid, seed=self.seed, device=self.device, effort=effort,
            work=None if self.work is None else self.work / "final",
            watch=lambda share, said: self.tell(what, cost, share, bound=False),
        )  # fmt: skip

    def tell(self, what: str, cost: float, share: float, bound: bool = True) -> None:
        if self.watch:
            self.watch(Step(what, min(self.done + share * cost, self.plan.total), self.plan.total))
        if bound and time.monotonic() > self.deadline:
            raise TimeUp

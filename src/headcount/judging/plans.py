"""How long it will take, measured before it is begun; and what to leave out when there are only so many minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headcount.bags import Bags
from headcount.judging.candidates import MOST, OPTIONAL, WHOLE, Candidate
from headcount.judging.fewer import thinned
from headcount.training.em import FOLDS, em

FEW_TREES = 10  # tell how long many take
SAMPLE = 20_000  # instances, likewise
FEWER = (2, 3)  # folds, when time is short
HURRY = 0.85  # of the minutes given: a machine is not equally fast all the time


@dataclass(frozen=True)
class Plan:
    """Which candidates, on how many folds, with which share of their epochs; ``seconds``: of one full fit of each."""

    names: tuple[str, ...]
    folds: int
    effort: float
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, said: dict[str, Any]) -> Plan:
        """Back from JSON."""
        names, notes = tuple(said["names"]), tuple(said["notes"])
        return cls(names, int(said["folds"]), float(said["effort"]), dict(said["seconds"]), notes)

    def cost(self, name: str) -> float:
        """Seconds of one fit under this plan."""
        return self.seconds[name] * (1.0 if name in WHOLE else self.effort)

    @property
    def final(self) -> float:
        """Seconds of the last training, whoever wins."""
        return max(self.cost(n) for n in self.names) * 1.2  # on more bags than a fold has

    @property
    def total(self) -> float:
        return self.folds * sum(self.cost(n) for n in self.names) + self.final

    def __str__(self) -> str:
        what = f"{len(self.names)} method{'s' * (len(self.names) > 1)}"
        folds = f" x {self.folds} folds, then" if self.folds else ","
        return f"about {spoken(self.total)}: {what}{folds} the final training"


def spoken(seconds: float) -> str:
    """A time as people say it.

    >>> spoken(8), spoken(100), spoken(8000)
    ('8 seconds', '1.7 minutes', '2.2 hours')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def planned(
    candidates: Sequence[Candidate],
    folds: int,
    train: Bags,
    valid: Bags,
    device: torch.device,
    minutes: float | None,
    must: Sequence[str] = (),
    spent: float = 0.0,
    fewer: Sequence[int] = FEWER,
) -> Plan:
    """Time a few steps of each candidate on these bags, and make the fullest plan that the minutes allow. ``must``: methods
    that somebody asked for, and that are never left out. ``spent``: seconds of the minutes that are gone already. ``fewer``:
    those numbers of folds below ``folds`` that leave every training part two labels."""
    took = {c.name: measured(c, train, valid, device) for c in candidates}
    names = tuple(c.name for c in candidates)
    plan = Plan(names, folds, 1.0, took)
    if minutes is None:
        return plan
    for lesser in _lesser(plan, must, fewer):
        plan = lesser
        if plan.total <= (60 * minutes - spent) * HURRY:
            return plan
    return replace(plan, notes=(*plan.notes, f"even so it may take longer than {minutes:g} minutes"))


def _lesser(plan: Plan, must: Sequence[str] = (), fewer: Sequence[int] = FEWER) -> list[Plan]:
    """The plan, and ever smaller ones: fewer methods nobody must have, fewer folds, fewer epochs, then fewer methods."""
    main = tuple(n for n in plan.names if n in must or n not in OPTIONAL) or plan.names
    left = tuple(n for n in plan.names if n not in main)
    said = (f"left out for lack of time: {', '.join(left)}",) if left else ()
    some = [plan, replace(plan, names=main, notes=said)]
    for folds, effort in ((3, 1.0), (3, 0.5), (2, 0.5), (2, 0.25), (2, 0.1)):
        held = min(n for n in (*fewer, plan.folds) if n >= min(folds, plan.folds))
        notes = [*said, f"{held} folds for lack of time"] if held < plan.folds else [*said]
        notes += [f"{effort:.0%} of the usual epochs and rounds for lack of time"] if effort < 1 else []
        some.append(replace(plan, names=main, folds=held, effort=effort, notes=tuple(notes)))
    least, cheap_first = some[-1], sorted(main, key=lambda n: (n not in must, plan.seconds[n]))
    for keep in range(len(main) - 1, max(1, len(must)) - 1, -1):
        gone = [n for n in plan.names if n not in cheap_first[:keep]]
        notes = (*least.notes[len(said) :], f"left out for lack of time: {', '.join(gone)}")
        some.append(replace(least, names=tuple(n for n in main if n in cheap_first[:keep]), notes=notes))
    return some


def measured(candidate: Candidate, train: Bags, valid: Bags, device: torch.device) -> float:
    """Seconds of a full fit, from two epochs of it, or from a few trees."""
    if candidate.recipe is not None:
        at: list[float] = []
        few, part = thinned(train, SAMPLE), min(1.0, SAMPLE / len(train.index))
        short = replace(candidate, recipe=candidate.recipe.but(epochs=2))
        start = time.perf_counter()
        short.fit(few, thinned(valid, SAMPLE), device=device, watch=lambda done, said: at.append(time.perf_counter()))
        return at[0] - start + (at[1] - at[0]) * (candidate.recipe.epochs / part - 1)
    few, classifier = thinned(train, SAMPLE), candidate.classifier
    many = min(len(train.index), MOST)
    scale = max(1.0, many * math.log(many + 1) / (SAMPLE * math.log(SAMPLE)))
    params: dict[str, Any] = classifier.get_params()
    if params.get("n_estimators", 0) > FEW_TREES:
        from sklearn.base import clone

        scale *= params["n_estimators"] / FEW_TREES
        classifier = clone(classifier).set_params(n_estimators=FEW_TREES)
    start = time.perf_counter()
    em(classifier, few, thinned(valid, SAMPLE), rounds=0)
    fits = (candidate.rounds + 1) * FOLDS + 1 if candidate.rounds else 1
    return (time.perf_counter() - start) * scale * fits

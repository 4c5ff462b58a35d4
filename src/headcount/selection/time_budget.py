"""How long it will take, measured before it is begun; and what to leave out when there are only so many minutes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from headcount.bags import Bags
from headcount.bags.splits import subsample_instances
from headcount.selection.methods import FIXED_COST_METHODS, MAX_FIT_INSTANCES, OPTIONAL_METHODS, Method
from headcount.training.em import CROSS_FIT_FOLDS, em

TIMING_TREES = 10  # tell how long many take
TIMING_INSTANCES = 20_000  # instances, likewise
REDUCED_FOLDS = (2, 3)  # folds, when time is short
TIME_MARGIN = 0.85  # of the minutes given: a machine is not equally fast all the time


@dataclass(frozen=True)
class TimePlan:
    """Which candidates, on how many folds, with which share of their epochs; ``seconds``: of one full fit of each."""

    names: tuple[str, ...]
    folds: int
    epoch_fraction: float
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TimePlan:
        """Back from JSON."""
        names, notes = tuple(data["names"]), tuple(data["notes"])
        return cls(names, int(data["folds"]), float(data["effort"]), dict(data["seconds"]), notes)

    def cost(self, name: str) -> float:
        """Seconds of one fit under this plan."""
        return self.seconds[name] * (1.0 if name in FIXED_COST_METHODS else self.epoch_fraction)

    @property
    def final_seconds(self) -> float:
        """Seconds of the last training, whoever wins."""
        return max(self.cost(n) for n in self.names) * 1.2  # on more bags than a fold has

    @property
    def total_seconds(self) -> float:
        return self.folds * sum(self.cost(n) for n in self.names) + self.final_seconds

    def __str__(self) -> str:
        what = f"{len(self.names)} method{'s' * (len(self.names) > 1)}"
        folds = f" x {self.folds} folds, then" if self.folds else ","
        return f"about {format_duration(self.total_seconds)}: {what}{folds} the final training"


def format_duration(seconds: float) -> str:
    """A time as people say it.

    >>> spoken(8), spoken(100), spoken(8000)
    ('8 seconds', '1.7 minutes', '2.2 hours')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def make_plan(
    methods: Sequence[Method],
    folds: int,
    train: Bags,
    valid: Bags,
    device: torch.device,
    minutes: float | None,
    required: Sequence[str] = (),
    spent_seconds: float = 0.0,
    reduced_folds: Sequence[int] = REDUCED_FOLDS,
) -> TimePlan:
    """Time a few steps of each candidate on these bags, and make the fullest plan that the minutes allow. ``must``: methods
    that somebody asked for, and that are never left out. ``spent``: seconds of the minutes that are gone already. ``fewer``:
    those numbers of folds below ``folds`` that leave every training part two labels."""
    took = {c.name: estimate_seconds(c, train, valid, device) for c in methods}
    names = tuple(c.name for c in methods)
    plan = TimePlan(names, folds, 1.0, took)
    if minutes is None:
        return plan
    for lesser in _reduced_plans(plan, required, reduced_folds):
        plan = lesser
        if plan.total_seconds <= (60 * minutes - spent_seconds) * TIME_MARGIN:
            return plan
    return replace(plan, notes=(*plan.notes, f"even so it may take longer than {minutes:g} minutes"))


def _reduced_plans(
    plan: TimePlan, required: Sequence[str] = (), reduced_folds: Sequence[int] = REDUCED_FOLDS
) -> list[TimePlan]:
    """The plan, and ever smaller ones: fewer methods nobody must have, fewer folds, fewer epochs, then fewer methods."""
    main = tuple(n for n in plan.names if n in required or n not in OPTIONAL_METHODS) or plan.names
    left = tuple(n for n in plan.names if n not in main)
    said = (f"left out for lack of time: {', '.join(left)}",) if left else ()
    some = [plan, replace(plan, names=main, notes=said)]
    for folds, effort in ((3, 1.0), (3, 0.5), (2, 0.5), (2, 0.25), (2, 0.1)):
        held = min(n for n in (*reduced_folds, plan.folds) if n >= min(folds, plan.folds))
        notes = [*said, f"{held} folds for lack of time"] if held < plan.folds else [*said]
        notes += [f"{effort:.0%} of the usual epochs and rounds for lack of time"] if effort < 1 else []
        some.append(replace(plan, names=main, folds=held, epoch_fraction=effort, notes=tuple(notes)))
    least, cheap_first = some[-1], sorted(main, key=lambda n: (n not in required, plan.seconds[n]))
    for keep in range(len(main) - 1, max(1, len(required)) - 1, -1):
        gone = [n for n in plan.names if n not in cheap_first[:keep]]
        notes = (*least.notes[len(said) :], f"left out for lack of time: {', '.join(gone)}")
        some.append(replace(least, names=tuple(n for n in main if n in cheap_first[:keep]), notes=notes))
    return some


def estimate_seconds(method: Method, train: Bags, valid: Bags, device: torch.device) -> float:
    """Seconds of a full fit, from two epochs of it, or from a few trees."""
    if method.recipe is not None:
        at: list[float] = []
        few, part = subsample_instances(train, TIMING_INSTANCES), min(1.0, TIMING_INSTANCES / len(train.index))
        short = replace(method, recipe=method.recipe.replace(epochs=2))
        start = time.perf_counter()
        short.fit(
            few,
            subsample_instances(valid, TIMING_INSTANCES),
            device=device,
            on_progress=lambda done, said: at.append(time.perf_counter()),
        )
        return at[0] - start + (at[1] - at[0]) * (method.recipe.epochs / part - 1)
    few, classifier = subsample_instances(train, TIMING_INSTANCES), method.classifier
    many = min(len(train.index), MAX_FIT_INSTANCES)
    scale = max(1.0, many * math.log(many + 1) / (TIMING_INSTANCES * math.log(TIMING_INSTANCES)))
    params: dict[str, Any] = classifier.get_params()
    if params.get("n_estimators", 0) > TIMING_TREES:
        from sklearn.base import clone

        scale *= params["n_estimators"] / TIMING_TREES
        classifier = clone(classifier).set_params(n_estimators=TIMING_TREES)
    start = time.perf_counter()
    em(classifier, few, subsample_instances(valid, TIMING_INSTANCES), rounds=0)
    fits = (method.rounds + 1) * CROSS_FIT_FOLDS + 1 if method.rounds else 1
    return (time.perf_counter() - start) * scale * fits

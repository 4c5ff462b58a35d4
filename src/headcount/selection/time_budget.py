"""How long a fit will take, measured in advance, and what is reduced to fit a time budget."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.bags.splits import subsample_instances
from headcount.errors import HeadcountError
from headcount.selection.classifiers import MAX_FIT_INSTANCES
from headcount.selection.methods import BASELINES, FIXED_COST_METHODS, OPTIONAL_METHODS, Method
from headcount.training.em import ROUND_TREES, em

TIMING_TREES = 12  # fitted to estimate the time of all
TIMING_INSTANCES = 20_000  # fitted to estimate the time of all
REDUCED_FOLDS = (2, 3)  # numbers of folds when time is short
TIME_MARGIN = 0.85  # of the budget that may be planned: the speed of a machine varies
FINAL_FACTOR = 1.2  # the final training has more bags than a fold
MIN_BAGS_TO_COMPARE = 20  # before a method is left out
MEAN_LEFT = 1.4  # candidates, and baselines, after the first fold or two, roughly
MEAN_ROUNDS = 4  # of EM after the first, roughly: it stops when three bring nothing
TIMING_EPOCHS = 4  # of which a teacher takes part in two of the last three, and of all of them in seven of ten
EM_BASELINES = {"em_forest": "forest", "em_boosting": "boosting"}  # a method, and the baseline that is its first round
RIVALS = {"em_boosting": "forest"}  # a method that is pointless where its baseline is behind this one


@dataclass(frozen=True)
class TimePlan:
    """The methods, the number of folds and the fraction of epochs; ``seconds``: the time of one full fit of each method."""

    names: tuple[str, ...]
    folds: int
    epoch_fraction: float
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()
    halving: bool = False  # of the methods besides baselines, after each fold

    @classmethod
    def from_json(cls, data: dict[str, Any], methods: Collection[str]) -> TimePlan:
        """A plan with its types (``loading.read_json``), for these methods; anything implausible is an error."""
        names, notes = tuple(data["names"]), tuple(data.get("notes", ()))
        plan = cls(names, data["folds"], data["epoch_fraction"], data["seconds"], notes, data.get("halving", False))
        known = plan.names and set(plan.names) <= set(methods) == set(plan.seconds)
        if not known or min(plan.seconds.values()) < 0 or not 0 <= plan.folds <= 100 or not 0 < plan.epoch_fraction <= 1:
            raise HeadcountError("it is a plan for something else")
        return plan

    def cost(self, name: str) -> float:
        """Seconds of one fit under this plan."""
        return self.seconds[name] * (1.0 if name in FIXED_COST_METHODS else self.epoch_fraction)

    @property
    def final_seconds(self) -> float:
        """Of the final training of the slowest method."""
        return max(map(self.cost, self._expected)) * FINAL_FACTOR

    @property
    def _groups(self) -> list[list[float]]:
        """The costs of the expected candidates, and those of the baselines."""
        groups = [[self.cost(n) for n in self._expected if (n in BASELINES) == baseline] for baseline in (False, True)]
        return [costs for costs in groups if costs]

    @property
    def _expected(self) -> list[str]:
        """The methods that will be fitted, as far as is known: those with a rival seldom are."""
        return [n for n in self.names if not (self.halving and n in RIVALS and len(self.names) > 1)]

    def seconds_before(self, fold: int) -> float:
        """Of all folds before this one. With halving, as many methods of either kind as are left on average, of mean cost."""
        return sum(
            sum(min(len(costs), max(MEAN_LEFT, len(costs) / 2**k)) if self.halving else len(costs) for k in range(fold))
            * float(np.mean(costs))
            for costs in self._groups
        )

    @property
    def total_seconds(self) -> float:
        """With halving, any candidate may be the one that is trained in the end."""
        final = float(np.mean(self._groups[0])) * FINAL_FACTOR if self.halving else self.final_seconds
        return self.seconds_before(self.folds) + final

    def __str__(self) -> str:
        methods = f"{len(self.names)} method{'s' * (len(self.names) > 1)}"
        folds = f" x {self.folds} folds, then" if self.folds else ","
        return f"about {format_duration(self.total_seconds)}: {methods}{folds} the final training"


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(8), format_duration(100), format_duration(8000)
    ('8 seconds', '1.7 minutes', '2.2 hours')
    """
    if seconds < 90:
        return f"{max(1, round(seconds))} second{'s' * (round(seconds) > 1)}"
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def make_plan(
    methods: Sequence[Method], folds: int, train: Bags, valid: Bags, device: torch.device,
    *, minutes: float | None, requested: Sequence[str] = (), started: float | None = None,
    reduced_folds: Sequence[int] = REDUCED_FOLDS,
) -> TimePlan:  # fmt: skip
    """Time a small part of each method, and return the largest plan within the budget, which began at ``started`` of the
    monotonic clock. ``requested`` methods are never left out; ``reduced_folds`` below ``folds`` leave two labels in every training part."""
    seconds = dict[str, float]()
    for method in sorted(
        methods, key=lambda m: m.name in RIVALS
    ):  # a rival costs, in every round, about what its baseline does
        baseline = seconds.get(EM_BASELINES[method.name]) if method.name in RIVALS else None
        timed = estimate_seconds(method, train, valid, device) if baseline is None else MEAN_ROUNDS * baseline
        seconds[method.name] = timed
    halving = not requested and len(train) + len(valid) >= folds * MIN_BAGS_TO_COMPARE
    plan = TimePlan(tuple(m.name for m in methods), folds, 1.0, seconds, halving=halving)
    if minutes is None:
        return plan
    spent_seconds = 0.0 if started is None else time.monotonic() - started
    for smaller in reduced_plans(plan, requested, reduced_folds):
        plan = smaller
        if plan.total_seconds <= (60 * minutes - spent_seconds) * TIME_MARGIN:
            return plan
    return replace(plan, notes=(*plan.notes, f"even so it may take longer than {minutes:g} minutes"))


def reduced_plans(
    plan: TimePlan, requested: Sequence[str] = (), reduced_folds: Sequence[int] = REDUCED_FOLDS
) -> list[TimePlan]:
    """The plan and ever smaller ones: first without optional methods, then with fewer folds, fewer epochs, fewer methods."""
    main = tuple(n for n in plan.names if n in requested or n not in OPTIONAL_METHODS) or plan.names
    optional = tuple(n for n in plan.names if n not in main)
    omitted = (f"left out for lack of time: {', '.join(optional)}",) if optional else ()
    plans = [plan, replace(plan, names=main, notes=omitted)]
    for folds, fraction in ((3, 1.0), (3, 0.5), (2, 0.5), (2, 0.25), (2, 0.1)):
        possible = min(n for n in (*reduced_folds, plan.folds) if n >= min(folds, plan.folds))
        notes = [*omitted, f"{possible} folds for lack of time"] if possible < plan.folds else [*omitted]
        notes += [f"{fraction:.0%} of the usual epochs and rounds for lack of time"] if fraction < 1 else []
        plans.append(replace(plan, names=main, folds=possible, epoch_fraction=fraction, notes=tuple(notes)))
    smallest, by_cost = plans[-1], sorted(main, key=lambda n: (n not in requested, plan.seconds[n]))
    for keep in range(len(main) - 1, max(1, len(requested)) - 1, -1):
        left_out = [n for n in plan.names if n not in by_cost[:keep]]
        notes = (*smallest.notes[len(omitted) :], f"left out for lack of time: {', '.join(left_out)}")
        plans.append(replace(smallest, names=tuple(n for n in main if n in by_cost[:keep]), notes=notes))
    return plans


def estimate_seconds(method: Method, train: Bags, valid: Bags, device: torch.device) -> float:
    """Seconds of a full fit, estimated from a few epochs of it, or from a few trees."""
    sample, valid_sample = subsample_instances(train, TIMING_INSTANCES), subsample_instances(valid, TIMING_INSTANCES)
    if method.train_config is not None:
        epoch_ends: list[float] = []
        part = min(1.0, TIMING_INSTANCES / len(train.index))
        few_epochs = replace(method, train_config=replace(method.train_config, epochs=TIMING_EPOCHS))
        start = time.perf_counter()
        few_epochs.fit(sample, valid_sample, device=device, on_progress=lambda *_: epoch_ends.append(time.perf_counter()))
        # the first epoch takes along what a process does once, such as imports
        times = np.diff(epoch_ends) if len(epoch_ends) > 1 else [epoch_ends[0] - start]
        return float(np.mean(times)) * method.train_config.epochs / part
    classifier, instances = method.classifier, min(len(train.index), MAX_FIT_INSTANCES)
    n_log_n = instances * math.log(instances + 1) / (TIMING_INSTANCES * math.log(TIMING_INSTANCES))
    options = classifier.get_params()
    trees = "max_iter" if "max_bins" in options else "n_estimators"
    scale, n_trees = max(1.0, n_log_n), options.get(trees, 0)

    def fit_seconds(n: int) -> np.ndarray:
        """Of all rounds, and of the last fit, with n trees at most."""
        from sklearn.base import clone

        part = clone(classifier).set_params(**{trees: n}) if n < n_trees else classifier
        ends = [time.perf_counter()]
        if hasattr(part, "fit_bags"):
            part.fit_bags(sample, valid_sample)
            return np.array([0.0, time.perf_counter() - ends[0]]) * scale
        em(part, sample, valid_sample, rounds=min(1, method.rounds), on_progress=lambda *_: ends.append(time.perf_counter()))
        ends.append(time.perf_counter())
        if len(ends) < 4:  # no rounds: a baseline, or bags of one
            return np.array([0.0, ends[-1] - ends[0]]) * scale
        first, later, last = np.diff(ends)  # later rounds fit to several classes of an instance, the first to its bag's label
        return np.array([first + min(method.rounds, MEAN_ROUNDS) * later, last]) * scale

    seconds = fit_seconds(TIMING_TREES)
    if n_trees <= TIMING_TREES:
        return float(seconds.sum())
    per_tree = np.maximum(0.0, seconds - fit_seconds(TIMING_TREES // 3)) / (TIMING_TREES - TIMING_TREES // 3)
    of_rounds = min(n_trees, ROUND_TREES) if trees == "n_estimators" else n_trees
    return float((seconds + per_tree * (np.array([of_rounds, n_trees]) - TIMING_TREES)).sum())

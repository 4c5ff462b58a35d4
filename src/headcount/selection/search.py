"""The search for the best method: all are cross-validated on the same folds, and the best is trained on all bags.

Its time is measured in advance, and folds, epochs and methods are reduced to fit a budget; when that is used up, the methods that
are finished are compared. Finished folds are kept in a folder, from which an interrupted search resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headcount import __version__
from headcount.bags import Bags
from headcount.bags.splits import Split, make_splits, subsample_instances
from headcount.io import atomic_write
from headcount.majority.calibration import standard_error
from headcount.readers import BagDataset
from headcount.selection.cross_validation import FoldResult, MethodScore, load_fold, predict_estimator, save_fold, score_method
from headcount.selection.methods import FIXED_COST_METHODS, MAX_FIT_INSTANCES, OPTIONAL_METHODS, FitResult, Method
from headcount.training.em import em

TIMING_TREES = 12  # fitted to estimate the time of all
TIMING_INSTANCES = 20_000  # fitted to estimate the time of all
REDUCED_FOLDS = (2, 3)  # numbers of folds when time is short
TIME_MARGIN = 0.85  # of the budget that may be planned: the speed of a machine varies
MIN_BAGS_TO_COMPARE = 20  # before a method is left out
CLEARLY_BEHIND = 3.0  # standard errors of the difference from the best
FINAL_FACTOR = 1.2  # the final training has more bags than a fold


@dataclass(frozen=True)
class TimePlan:
    """The methods, the number of folds and the fraction of epochs; ``seconds``: the time of one full fit of each method."""

    names: tuple[str, ...]
    folds: int
    epoch_fraction: float
    seconds: dict[str, float]
    notes: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> TimePlan:
        names, notes = tuple(data["names"]), tuple(data["notes"])
        return cls(names, int(data["folds"]), float(data["epoch_fraction"]), dict(data["seconds"]), notes)

    def cost(self, name: str) -> float:
        """Seconds of one fit under this plan."""
        return self.seconds[name] * (1.0 if name in FIXED_COST_METHODS else self.epoch_fraction)

    @property
    def final_seconds(self) -> float:
        """Of the final training of the slowest method."""
        return max(map(self.cost, self.names)) * FINAL_FACTOR

    @property
    def total_seconds(self) -> float:
        return self.folds * sum(self.cost(n) for n in self.names) + self.final_seconds

    def __str__(self) -> str:
        methods = f"{len(self.names)} method{'s' * (len(self.names) > 1)}"
        folds = f" x {self.folds} folds, then" if self.folds else ","
        return f"about {format_duration(self.total_seconds)}: {methods}{folds} the final training"


class SearchProgress(NamedTuple):
    """What a fit is doing, and how much of it is done, in estimated seconds."""

    message: str
    done: float
    total: float


class TimeLimitReached(Exception):
    """The time budget is used up; what is finished is used."""


@dataclass
class ModelSearch:
    """One search. ``bags`` are blind."""

    prepare: Callable[[Split], tuple[Bags, Bags, Bags]]  # blind training, validation and test bags
    bags: Bags
    methods: dict[str, Method]
    plan: TimePlan
    splits: list[Split]
    seed: int
    device: torch.device
    work: Path | None
    on_progress: Callable[[SearchProgress], None] | None
    deadline: float  # of the cross-validation, on the monotonic clock
    requested: Sequence[str] = ()  # methods of which one must be kept; none where the choice is free
    done_seconds: float = 0.0  # of the plan
    notes: list[str] = field(default_factory=list)  # what was cut for lack of time, besides the plan's

    def cross_validate(self) -> tuple[dict[str, list[FoldResult]], dict[str, str]]:
        """The folds of the methods that are compared, and why the others are not. All methods are fitted to one fold before the
        next; cheap ones first. Where the choice is free, a method that is clearly behind is left out of the other folds. When
        the time is used up, the methods are compared on the folds that all have."""
        order = sorted(self.methods.values(), key=lambda m: (not m.baseline, self.plan.cost(m.name)))
        results: dict[str, list[FoldResult]] = {m.name: [] for m in order if self.splits}
        omitted: dict[str, str] = {}
        for k in range(len(self.splits)):
            for name in list(results):
                try:
                    results[name].append(self._fold_result(self.methods[name], k))
                except TimeLimitReached:
                    if k:
                        self.notes.append(f"compared on {k} of {len(self.splits)} folds for lack of time")
                        return {name: folds[:k] for name, folds in results.items()}, omitted
                    omitted[name] = "not finished in the time given"
                    del results[name]
            if not self.requested and k + 1 < len(self.splits):
                for name, reason in self._clearly_behind(results).items():
                    omitted[name] = reason
                    self.done_seconds += self.plan.cost(name) * (len(self.splits) - k - 1)
                    del results[name]
        return results, omitted

    def _clearly_behind(self, results: dict[str, list[FoldResult]]) -> dict[str, str]:
        """Why to leave out methods, by the differences of their losses from the leader's, bag by bag. Baselines always stay."""
        scores = {name: score_method(folds, self.bags) for name, folds in results.items()}
        leader, reasons = min(scores.values(), key=lambda s: s.loss, default=None), {}
        for name, score in scores.items():
            if leader is None or score is leader or self.methods[name].baseline:
                continue
            behind = score.criterion.loss_per_bag - leader.criterion.loss_per_bag
            if len(behind) >= MIN_BAGS_TO_COMPARE and behind.mean() > CLEARLY_BEHIND * standard_error(behind):
                folds = f"{len(results[name])} of {len(self.splits)} folds"
                reasons[name] = f"clearly behind after {folds}: loss {score.loss:.3f}, the best {leader.loss:.3f}"
        return reasons

    def _fold_result(self, method: Method, k: int) -> FoldResult:
        checkpoints = None if self.work is None else self.work / f"{Path(method.name).name}-{k}"
        cost, message = self.plan.cost(method.name), f"{method.title}, fold {k + 1} of {len(self.splits)}"
        result = None if checkpoints is None else load_fold(checkpoints.with_suffix(".npz"))
        if result is None:
            self.report(message, cost, 0.0)
            start = time.monotonic()
            train, valid, test = self.prepare(self.splits[k])
            fit = method.fit(
                train, valid, seed=self.seed, device=self.device, epoch_fraction=self.plan.epoch_fraction,
                work=checkpoints, on_progress=lambda fraction, _: self.report(message, cost, fraction),
            )  # fmt: skip
            predictions = predict_estimator(fit.estimator, test, self.device)
            result = FoldResult(self.splits[k].test, *predictions, time.monotonic() - start)
            if checkpoints is not None:
                save_fold(checkpoints.with_suffix(".npz"), result)
                shutil.rmtree(checkpoints, ignore_errors=True)
        self.done_seconds += cost
        return result

    def choose(self, scores: dict[str, MethodScore]) -> Method:
        """The method with the lowest loss on held-out bags, among the requested ones if there are any; without cross-validation
        the first."""
        eligible = [m for m in self.methods.values() if not self.requested or m.name in self.requested]
        eligible = eligible or list(self.methods.values())
        finished = [m for m in eligible if m.name in scores and math.isfinite(scores[m.name].loss)]
        if not finished:
            return min(eligible, key=lambda m: self.plan.cost(m.name)) if scores else eligible[0]
        return min(finished, key=lambda m: scores[m.name].loss)

    def train_final(self, best: Method, train: Bags, valid: Bags, seconds_left: float) -> FitResult:
        """Train on all bags, with the epochs for which there is time."""
        cost = self.plan.cost(best.name) * FINAL_FACTOR
        fraction = min(1.0, max(0.05, seconds_left / max(cost, 1e-9)))
        self.done_seconds = self.plan.total_seconds - cost
        message = f"{best.title}, final training"
        self.report(message, cost, 0.0, enforce_deadline=False)
        return best.fit(
            train, valid, seed=self.seed, device=self.device, epoch_fraction=self.plan.epoch_fraction * fraction,
            work=None if self.work is None else self.work / "final",
            on_progress=lambda fraction, _: self.report(message, cost, fraction, enforce_deadline=False),
        )  # fmt: skip

    def report(self, message: str, cost: float, fraction: float, enforce_deadline: bool = True) -> None:
        """Report that a fraction of a step is done; stop at the deadline."""
        if self.on_progress:
            total = self.plan.total_seconds
            self.on_progress(SearchProgress(message, min(self.done_seconds + fraction * cost, total), total))
        if enforce_deadline and time.monotonic() > self.deadline:
            raise TimeLimitReached


def choose_method(
    bags: Bags, methods: Sequence[Method], *, folds: int, seed: int, device: torch.device,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> tuple[Method, dict[str, float]]:  # fmt: skip
    """The method that held-out bags prefer, and the losses of all that were compared to the end. ``bags`` are blind."""
    plan = TimePlan(tuple(m.name for m in methods), folds, 1.0, {m.name: i + 1.0 for i, m in enumerate(methods[::-1])})
    search = ModelSearch(
        lambda s: (bags.take(s.train), bags.take(s.valid), bags.take(s.test)), bags, {m.name: m for m in methods}, plan, make_splits(bags, folds, seed), seed=seed, device=device, work=None,
        on_progress=on_progress, deadline=math.inf,
    )  # fmt: skip
    scores = {name: score_method(results, bags) for name, results in search.cross_validate()[0].items()}
    return search.choose(scores), {name: score.loss for name, score in scores.items()}


def resume_folder(
    work: Path | str | None, dataset: BagDataset, methods: Sequence[Method],
    *, seed: int, folds: int, minutes: float | None, device: torch.device, frozen_backbone: dict[str, Any] | None = None,
) -> Path | None:  # fmt: skip
    """The folder in ``work`` for these data and options: any difference gives another folder."""
    if work is None:
        return None
    described = [[m.name, m.metadata(), fingerprint(m.classifier)] for m in methods]
    values = [dataset.fingerprint, described, seed, folds, minutes, device.type, __version__, frozen_backbone]
    key = hashlib.sha256(json.dumps(values, default=str, sort_keys=True).encode()).hexdigest()[:16]
    folder = Path(work) / key
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def fingerprint(value: Any) -> Any:
    """Everything that determines a classifier, as plain values: all its parameters, nested ones too, and arrays by content. The
    fingerprint of an object whose ``repr`` is its address differs in every process, so its folds are never used again."""
    if hasattr(value, "get_params") and not isinstance(value, type):
        kind = type(value)
        return [kind.__module__, kind.__qualname__, fingerprint(value.get_params(deep=False))]
    if isinstance(value, Mapping):
        return {repr(k): fingerprint(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(fingerprint, value)]
    if hasattr(value, "__array__") and not isinstance(value, type):
        array = np.asarray(value)
        is_object = array.dtype == object
        content = fingerprint(array.ravel().tolist()) if is_object else hashlib.sha256(array.tobytes()).hexdigest()
        return [str(array.dtype), array.shape, content]
    return repr(value)


def load_or_make_plan(folder: Path | None, make: Callable[[], TimePlan]) -> TimePlan:
    """The plan of the interrupted search, or a new one."""
    if folder is None:
        return make()
    file = folder / "plan.json"
    with suppress(OSError, ValueError, TypeError, KeyError):  # absent or damaged: a new plan replaces it
        return TimePlan.from_json(json.loads(file.read_text()))
    plan = make()
    atomic_write(file, lambda f: f.write(json.dumps(asdict(plan)).encode()))
    return plan


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
    *, minutes: float | None, requested: Sequence[str] = (), spent_seconds: float = 0.0,
    reduced_folds: Sequence[int] = REDUCED_FOLDS,
) -> TimePlan:  # fmt: skip
    """Time a small part of each method, and return the largest plan within the budget, of which ``spent_seconds`` are gone.
    ``requested`` methods are never left out; ``reduced_folds`` below ``folds`` leave two labels in every training part."""
    seconds = {m.name: estimate_seconds(m, train, valid, device) for m in methods}
    plan = TimePlan(tuple(m.name for m in methods), folds, 1.0, seconds)
    if minutes is None:
        return plan
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
    """Seconds of a full fit, estimated from two epochs of it, or from a few trees."""
    sample, valid_sample = subsample_instances(train, TIMING_INSTANCES), subsample_instances(valid, TIMING_INSTANCES)
    if method.train_config is not None:
        epoch_ends: list[float] = []
        part = min(1.0, TIMING_INSTANCES / len(train.index))
        two_epochs = replace(method, train_config=replace(method.train_config, epochs=2))
        start = time.perf_counter()
        two_epochs.fit(sample, valid_sample, device=device, on_progress=lambda *_: epoch_ends.append(time.perf_counter()))
        return epoch_ends[0] - start + (epoch_ends[1] - epoch_ends[0]) * (method.train_config.epochs / part - 1)
    classifier, instances = method.classifier, min(len(train.index), MAX_FIT_INSTANCES)
    n_log_n = instances * math.log(instances + 1) / (TIMING_INSTANCES * math.log(TIMING_INSTANCES))
    scale, n_trees = max(1.0, n_log_n), classifier.get_params().get("n_estimators", 0)
    if n_trees > TIMING_TREES:
        from sklearn.base import clone

        scale *= n_trees / TIMING_TREES
        classifier = clone(classifier).set_params(n_estimators=TIMING_TREES)
    ends = [time.perf_counter()]
    em(classifier, sample, valid_sample, rounds=min(1, method.rounds), on_progress=lambda *_: ends.append(time.perf_counter()))
    ends.append(time.perf_counter())
    if not method.rounds:
        return (ends[-1] - ends[0]) * scale
    first, later, last = np.diff(ends)  # later rounds fit to several classes of an instance, the first one to its bag's label
    return float(first + method.rounds * later + last) * scale

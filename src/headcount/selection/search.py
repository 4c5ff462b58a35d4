"""The search for the best method: all are cross-validated on the same folds, and the best is trained on all bags.

When a time budget is used up, the methods that are finished are compared. Finished folds are kept in a folder, from which an interrupted search resumes.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headcount import __version__
from headcount.bags import Bags
from headcount.bags.splits import Split, make_splits
from headcount.errors import HeadcountError
from headcount.io import atomic_write
from headcount.loading import read_json
from headcount.majority.calibration import MIN_STANDARD_ERRORS, standard_error
from headcount.readers import BagDataset
from headcount.selection.cross_validation import FoldResult, MethodScore, load_fold, predict_estimator, save_fold, score_method
from headcount.selection.methods import FIXED_COST_METHODS, FitResult, Method
from headcount.selection.time_budget import EM_BASELINES, FINAL_FACTOR, MIN_BAGS_TO_COMPARE, RIVALS, TIME_MARGIN, TimePlan

BEHIND, CLEARLY_BEHIND = 1.0, 3.0  # standard errors of the difference from the best


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
    end: float  # of the time budget, on the monotonic clock
    requested: Sequence[str] = ()  # methods of which one must be kept; none where the choice is free
    all_folds: bool = True  # of the last method that is left, too
    done_seconds: float = 0.0  # of the plan
    notes: list[str] = field(default_factory=list)  # what was cut for lack of time, besides the plan's
    rejected: dict[str, str] = field(default_factory=dict)  # methods with a lower loss than the one chosen, and why
    slowdown: float = 1.0  # how much longer than planned a fold took at most

    def cross_validate(self) -> tuple[dict[str, list[FoldResult]], dict[str, str]]:
        """The folds of the methods that are compared, and why the others are not. All methods are fitted to one fold before the
        next; cheap ones first. Where the choice is free, candidates that are behind leave after each fold. When the time
        is used up, the methods are compared on the folds that all have."""
        order = sorted(self.methods.values(), key=lambda m: (not m.baseline, self.plan.cost(m.name)))
        results: dict[str, list[FoldResult]] = {m.name: [] for m in order if self.splits}
        omitted: dict[str, str] = {}
        for k in range(len(self.splits)):
            for name in list(results):
                if not k and not self.requested and (reason := self._pointless(name, results)):
                    omitted[name] = reason
                    del results[name]
                    continue
                try:
                    results[name].append(self._fold_result(self.methods[name], k))
                except TimeLimitReached:
                    if k:
                        self.notes.append(f"compared on {k} of {len(self.splits)} folds for lack of time")
                        return {name: folds[:k] for name, folds in results.items()}, omitted
                    omitted[name] = "not finished in the time given"
                    del results[name]
            if not self.requested and k + 1 < len(self.splits):
                omitted |= (behind := self._behind(results))
                results = {name: folds for name, folds in results.items() if name not in behind}
                if len(results) == 1 and not self.all_folds:
                    break
            self.done_seconds = self.plan.seconds_before(k + 1)
        return results, omitted

    def _pointless(self, name: str, results: dict[str, list[FoldResult]]) -> str:
        """Why not even to begin with a method: another baseline is better than the one from which its EM starts."""
        baseline, rival = EM_BASELINES.get(name, ""), RIVALS.get(name, "")
        if not (results.get(baseline) and results.get(rival)) or len(results[rival][0].bags) < MIN_BAGS_TO_COMPARE:
            return ""
        loss, rival_loss = (score_method(results[n], self.bags).loss for n in (baseline, rival))
        return f"not tried: {baseline} is behind {rival} (loss {loss:.3f}, {rival_loss:.3f})" if loss > rival_loss else ""

    def _behind(self, results: dict[str, list[FoldResult]]) -> dict[str, str]:
        """Which methods leave, and why: those behind the leader by the differences of their losses, bag by bag; of the candidates
        the worse half sooner, but for the second best; and EM that is no better than the baseline it starts from. The best
        baseline always stays."""
        scores = {name: score_method(folds, self.bags) for name, folds in results.items()}
        leader, reasons = min(scores.values(), key=lambda s: s.loss, default=None), {}
        candidates, baselines = (
            sorted((n for n in scores if self.methods[n].baseline == baseline), key=lambda n: scores[n].loss)
            for baseline in (False, True)
        )
        worse_half = candidates[max(2, (len(candidates) + 1) // 2) :]
        for name in [*candidates, *baselines[1:]]:
            assert leader is not None
            behind = scores[name].criterion.loss_per_bag - leader.criterion.loss_per_bag
            errors, start = BEHIND if name in worse_half else CLEARLY_BEHIND, scores.get(EM_BASELINES.get(name, ""))
            if len(behind) < MIN_BAGS_TO_COMPARE:
                continue
            after = f"after {len(results[name])} of {len(self.splits)} folds: loss {scores[name].loss:.3f}"
            if behind.mean() > errors * standard_error(behind):
                reasons[name] = f"behind {after}, the best {leader.loss:.3f}"
            elif start is not None and scores[name].loss >= start.loss:
                reasons[name] = f"no better than its baseline {after}, {start.loss:.3f}"
        return reasons

    def _fold_result(self, method: Method, k: int) -> FoldResult:
        checkpoints = None if self.work is None else self.work / f"{Path(method.name).name}-{k}"
        cost, message = self.plan.cost(method.name), f"{method.title}, fold {k + 1} of {len(self.splits)}"
        result = None if checkpoints is None else load_fold(checkpoints.with_suffix(".npz"), self.splits[k].test, self.bags)
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
            self.slowdown = max(self.slowdown, result.seconds / max(cost, 1.0))
            if checkpoints is not None:
                save_fold(checkpoints.with_suffix(".npz"), result)
                shutil.rmtree(checkpoints, ignore_errors=True)
        self.done_seconds += cost
        return result

    def choose(self, scores: dict[str, MethodScore]) -> Method:
        """The method with the lowest loss on held-out bags, among the requested ones if there are any; without cross-validation
        the first. A lead in the votes alone may come from predictions that are right for bags and wrong for instances: a method
        whose instance part is worse than a baseline's, by a standard error, is kept only if its lead is clear."""
        eligible = [m for m in self.methods.values() if not self.requested or m.name in self.requested]
        eligible = eligible or list(self.methods.values())
        finished = [m for m in eligible if m.name in scores and math.isfinite(scores[m.name].loss)]
        if not finished:
            return min(eligible, key=lambda m: self.plan.cost(m.name)) if scores else eligible[0]
        criteria = {m.name: scores[m.name].criterion for m in finished}
        baselines = [criteria[m.name] for m in finished if m.baseline]
        ranked = sorted(finished, key=lambda m: scores[m.name].loss)
        if not baselines:
            return ranked[0]
        best = min(baselines, key=lambda c: c.instance_loss_per_bag.mean())
        for method in ranked:
            criterion = criteria[method.name]
            worse = criterion.instance_loss_per_bag - best.instance_loss_per_bag
            lead = best.loss_per_bag - criterion.loss_per_bag
            if worse.mean() <= standard_error(worse) or lead.mean() > MIN_STANDARD_ERRORS * standard_error(lead):
                return method
            self.rejected[method.name] = "not kept: the instance predictions of a baseline explain the labels better"
        return ranked[0]

    def train_final(self, best: Method, train: Bags, valid: Bags) -> FitResult:
        """Train on all bags, with the epochs for which there is time."""
        cost = self.plan.cost(best.name) * FINAL_FACTOR
        time_left = (self.end - time.monotonic()) * TIME_MARGIN
        fraction = min(1.0, max(0.05, time_left / max(cost * self.slowdown, 1e-9)))
        if fraction < 1 and best.name not in FIXED_COST_METHODS:
            self.notes.append(f"{fraction:.0%} of the epochs or rounds in the final training for lack of time")
        self.done_seconds = max(self.done_seconds, self.plan.total_seconds - cost)
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
            done = round(self.done_seconds + fraction * cost, 6)  # sums in another order differ in their last digits
            self.on_progress(SearchProgress(message, min(done, total), total))
        if enforce_deadline and time.monotonic() > self.end - 1.5 * self.slowdown * self.plan.final_seconds:
            raise TimeLimitReached


def choose_method(
    bags: Bags, methods: Sequence[Method], *, folds: int, seed: int, device: torch.device,
    on_progress: Callable[[SearchProgress], None] | None = None,
) -> tuple[Method, dict[str, float]]:  # fmt: skip
    """The method that held-out bags prefer, and the losses of all that were compared to the end. ``bags`` are blind."""
    plan = TimePlan(tuple(m.name for m in methods), folds, 1.0, {m.name: i + 1.0 for i, m in enumerate(methods[::-1])})
    search = ModelSearch(
        lambda s: (bags.take(s.train), bags.take(s.valid), bags.take(s.test)), bags, {m.name: m for m in methods}, plan, make_splits(bags, folds, seed), seed=seed, device=device, work=None,
        on_progress=on_progress, end=math.inf, all_folds=False,
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


def load_or_make_plan(folder: Path | None, make: Callable[[], TimePlan], methods: Collection[str]) -> TimePlan:
    """The plan of the interrupted search, or a new one. ``methods`` are those that a plan may name."""
    if folder is None:
        return make()
    file = folder / "plan.json"
    with suppress(HeadcountError):  # absent or damaged: a new plan replaces it
        return TimePlan.from_json(read_json(file, TimePlan, "a plan"), methods)
    plan = make()
    atomic_write(file, lambda f: f.write(json.dumps(asdict(plan)).encode()))
    return plan

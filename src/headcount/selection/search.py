"""The search for the best method: all are cross-validated on the same folds, and the best is trained on all bags.

Finished folds are kept in a folder and used when the same search is started again; a file that exists is complete. When the
time budget is used up, the methods that are finished are compared.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from headcount import __version__
from headcount.bags import Bags
from headcount.bags.splits import Split
from headcount.io import atomic_write
from headcount.readers import BagDataset
from headcount.selection.cross_validation import FoldResult, MethodScore, predict_estimator, prepare_split
from headcount.selection.methods import FitResult, Method
from headcount.selection.time_budget import FINAL_FACTOR, TimePlan


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

    dataset: BagDataset
    bags: Bags
    methods: dict[str, Method]
    plan: TimePlan
    splits: list[Split]
    seed: int
    device: torch.device
    work: Path | None
    on_progress: Callable[[SearchProgress], None] | None
    deadline: float  # of the cross-validation, on the monotonic clock
    done_seconds: float = 0.0  # of the plan

    def cross_validate(self) -> tuple[dict[str, list[FoldResult]], dict[str, str]]:
        """The folds of every method that finished, and why the others did not. Baselines and cheap methods go first."""
        results: dict[str, list[FoldResult]] = {}
        unfinished: dict[str, str] = {}
        if not self.splits:
            return results, unfinished
        for method in sorted(self.methods.values(), key=lambda m: (not m.baseline, self.plan.cost(m.name))):
            try:
                results[method.name] = [self._fold_result(method, k) for k in range(len(self.splits))]
            except TimeLimitReached:
                unfinished[method.name] = "not finished in the time given"
        return results, unfinished

    def _fold_result(self, method: Method, k: int) -> FoldResult:
        file = None if self.work is None else self.work / f"{method.name}-{k}.npz"
        cost, message = self.plan.cost(method.name), f"{method.title}, fold {k + 1} of {len(self.splits)}"
        result = load_fold(file) if file else None
        if result is None:
            self.report(message, cost, 0.0)
            start = time.monotonic()
            train, valid, test, _ = prepare_split(self.dataset, self.splits[k])
            checkpoints = None if self.work is None else self.work / f"{method.name}-{k}"
            fit = method.fit(
                train, valid, seed=self.seed, device=self.device, epoch_fraction=self.plan.epoch_fraction,
                work=checkpoints, on_progress=lambda fraction, _: self.report(message, cost, fraction),
            )  # fmt: skip
            predictions = predict_estimator(fit.estimator, test, self.device)
            result = FoldResult(self.splits[k].test, *predictions, time.monotonic() - start)
            if file is not None:
                save_fold(file, result)
            if checkpoints is not None:
                shutil.rmtree(checkpoints, ignore_errors=True)
        self.done_seconds += cost
        return result

    def choose(self, scores: dict[str, MethodScore], requested: Sequence[str]) -> Method:
        """The method with the lowest loss on held-out bags, among the requested ones if there are any; without cross-validation
        the first."""
        eligible = [m for m in self.methods.values() if not requested or m.name in requested]
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
    """Everything that determines a classifier, as plain values: all its parameters, nested ones too, and arrays by content.

    The fingerprint of an object whose ``repr`` is its address differs in every process, so its folds are never used again.
    """
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
    if file.is_file():
        try:
            return TimePlan.from_json(json.loads(file.read_text()))
        except (ValueError, TypeError, KeyError):
            pass  # the file is damaged: a new plan replaces it
    plan = make()
    atomic_write(file, lambda f: f.write(json.dumps(asdict(plan)).encode()))
    return plan


def save_fold(file: Path, result: FoldResult) -> None:
    """Write a finished fold."""
    instance, bag = result.instance_probabilities.numpy(), result.bag_log_probabilities.numpy()
    seconds = np.array(result.seconds)
    atomic_write(file, lambda f: np.savez(f, bags=result.bags, instance=instance, bag=bag, seconds=seconds))


def load_fold(file: Path) -> FoldResult | None:
    """A finished fold; None if the file is absent or damaged."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as z:
            instance, bag = (torch.from_numpy(z[k]) for k in ("instance", "bag"))
            return FoldResult(z["bags"], instance, bag, float(z["seconds"]))
    except Exception:  # zip, zlib and header errors of many kinds
        return None

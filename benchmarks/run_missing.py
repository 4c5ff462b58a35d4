"""Run recipes that have no record, one after the other in one process, until a time limit.

No run is started that would exceed the limit, as estimated from the time per epoch of the last one; the next call continues.
Several processes may work on the same recipes in one folder (on one GPU: with NVIDIA's multi-process service running); each
skips what another has started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.io import file_lock


def run_missing(
    named_recipes: Iterable[tuple[str, Recipe]],
    out: Path,
    minutes: float,
    *,
    compile: str = "auto",
    after: Callable[[Recipe], None] = lambda recipe: None,
) -> None:
    """Run (name, recipe) pairs and print a line for each: the validation loss, which needs no instance labels, first."""
    started, seconds_per_epoch = time.monotonic(), 0.0
    for name, recipe in named_recipes:
        if has_record(recipe, out):
            continue
        if time.monotonic() - started + seconds_per_epoch * recipe.epochs > 60 * minutes:
            print("time is up", flush=True)
            return
        with file_lock(out / "running" / f"{recipe.key}.claim", wait=False) as acquired:
            if not acquired or has_record(recipe, out):
                continue
            run_started, resumed = time.monotonic(), (out / "running" / recipe.key).exists()
            record: Record = runs.run(recipe, out, compile=compile)
            after(recipe)
        seconds = time.monotonic() - run_started
        seconds_per_epoch = seconds_per_epoch if resumed else seconds / recipe.epochs
        fit, scores = record.data["fit"], record.scores
        text = f"instance {scores['instance_accuracy']:.4f}  bag {scores['bag_accuracy']:.2f}  epoch {fit['best_epoch']}"
        criterion = f"criterion {record.data['tilt']['criterion']:.4f}  " if "tilt" in record.data else ""
        print(f"{seconds:6.1f} s  valid {fit['valid_loss']:.4f}  {criterion}{text}  {name}", flush=True)


def has_record(recipe: Recipe, out: Path) -> bool:
    return (out / f"{recipe.key}.json").exists()

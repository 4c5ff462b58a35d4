"""A campaign: recipes one after the other in one process, those without a record, as long as the minutes last.

No run is begun that would outlast them, as the epochs of the last one foretell (beside others a card is slow, but not for
ever); the next call goes on. Several processes may work at one campaign in one folder (on one card: with NVIDIA's multi-process
service running); each passes over what another has begun.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.io import file_lock


def campaign(
    named: Iterable[tuple[str, Recipe]],
    out: Path,
    minutes: float,
    *,
    compile: str = "auto",
    after: Callable[[Recipe], None] = lambda recipe: None,
) -> None:
    """Run the recipes, each under its name, and print a line for each: the validation loss, which needs no truth, first."""
    started, pace = time.monotonic(), 0.0  # seconds of an epoch
    for name, recipe in named:
        if done(recipe, out):
            continue
        if time.monotonic() - started + pace * recipe.epochs > 60 * minutes:
            print("time is up", flush=True)
            return
        with file_lock(out / "running" / f"{recipe.key}.claim", wait=False) as mine:
            if not mine or done(recipe, out):
                continue
            begun, resumed = time.monotonic(), (out / "running" / recipe.key).exists()
            record: Record = runs.run(recipe, out, compile=compile)
            after(recipe)
        seconds = time.monotonic() - begun
        pace = pace if resumed else seconds / recipe.epochs
        fitted, got = record.data["fit"], record.scores
        text = f"instance {got['instance_accuracy']:.4f}  bag {got['bag_accuracy']:.2f}  epoch {fitted['best_epoch']}"
        heard = f"criterion {record.data['tilt']['criterion']:.4f}  " if "tilt" in record.data else ""
        print(f"{seconds:6.1f} s  valid {fitted['valid_loss']:.4f}  {heard}{text}  {name}", flush=True)


def done(recipe: Recipe, out: Path) -> bool:
    return (out / f"{recipe.key}.json").exists()

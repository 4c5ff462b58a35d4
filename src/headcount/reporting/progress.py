"""Progress of long work: a line that moves on a terminal, and nothing at all elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from headcount.experiments.recipe import Recipe
from headcount.experiments.study import StudyProgress
from headcount.training import distributed, trainer


def _bar() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[said]}"))
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=not (console.is_terminal and distributed.rank() == 0),
        transient=True,
    )


@contextmanager
def epochs_bar(recipe: Recipe) -> Iterator[Callable[[trainer.TrainProgress], None]]:
    """Epochs of one training: loss, validation loss, the best epoch, time left."""
    with _bar() as bar:
        task = bar.add_task(recipe.label, total=recipe.epochs, said="")

        def watch(progress: trainer.TrainProgress) -> None:
            loss, valid = progress.curve[-1]
            said = f"loss {loss:.4f}  valid {valid:.4f}  best {progress.best:.4f} at {progress.best_epoch}"
            bar.update(task, completed=progress.epoch, said=said)

        yield watch


@contextmanager
def seconds_bar() -> Iterator[Callable[[Any], None]]:
    """Work of an estimated length: what is being done, how much of the estimate is behind us."""
    with _bar() as bar:
        task = bar.add_task("timing a few steps", total=None, said="")

        def watch(step: Any) -> None:
            bar.update(task, description=step.message, total=round(step.total), completed=round(step.done))

        yield watch


@contextmanager
def bags_bar() -> Iterator[Callable[[int, int], None]]:
    """Bags that were answered, of all."""
    with _bar() as bar:
        task = bar.add_task("bags", total=None, said="")
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextmanager
def runs_bar() -> Iterator[Callable[[StudyProgress], None]]:
    """Runs of a study: done, failed, left, time left."""
    with _bar() as bar:
        task = bar.add_task("runs", total=None, said="")
        started = time.monotonic()

        def watch(tally: StudyProgress) -> None:
            fresh, left = tally.done - tally.reused, tally.total - tally.done - len(tally.failed)
            pace = (time.monotonic() - started) / fresh if fresh else 0.0
            left_text = f"  about {pace * left:.0f} s left" if fresh and left else ""
            failed = f"  {len(tally.failed)} failed" if tally.failed else ""
            bar.update(task, total=tally.total, completed=tally.done, said=f"{left} to go{failed}{left_text}")

        yield watch

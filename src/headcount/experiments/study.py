"""A study: many recipes, what they need first and once, each a record. A second call runs nothing; a killed one goes on."""

from __future__ import annotations

import itertools
import shutil
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.launch import Launcher, in_process
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, failure_path, write_failure
from headcount.experiments.run import ProgressCallback
from headcount.experiments.run import run as run_one
from headcount.models.heads import check_options
from headcount.training import distributed
from headcount.training.loop import CHECKPOINT_SECONDS


def grid(base: Recipe, **axes: Iterable[Any]) -> list[Recipe]:
    """Every combination of the axes' values.

    >>> [r.fold for r in grid(Recipe(), fold=range(3))]
    [0, 1, 2]
    """
    return [base.replace(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def with_needs(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes and all that they need, each once, needs before the needy."""
    ordered: dict[Recipe, None] = {}
    for recipe in recipes:
        for needed in with_needs(recipe.needs):
            ordered.setdefault(needed)
        ordered.setdefault(recipe)
    return list(ordered)


@dataclass
class StudyProgress:
    """How a study stands."""

    total: int
    done: int = 0
    reused: int = 0  # records that were there before
    failed: dict[Recipe, BaseException] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyResult:
    """A study that has ended: its records, in the order of the recipes, and what failed."""

    records: list[Record]
    failed: dict[Recipe, BaseException]


def study(
    recipes: Iterable[Recipe],
    out: Path | str,
    *,
    launch: Launcher = in_process,
    device: str = "auto",
    compile: str = "auto",
    on_progress: Callable[[StudyProgress], None] | None = None,
    on_run_progress: ProgressCallback | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> StudyResult:
    """Run what is missing. One run that fails stops only those that need it, leaves ``<key>.failed.json``, and is next time's.

    ``run_watch`` hears every epoch; it must be picklable where runs are launched in other processes.
    """
    options = {
        "device": device,
        "compile": compile,
        "on_progress": on_run_progress,
        "checkpoint_seconds": checkpoint_seconds,
    }
    out = Path(out)
    recipes = list(dict.fromkeys(recipes))
    todo = with_needs(recipes)
    for recipe in todo:  # a head of one's own is first met here
        check_options(recipe.head, dict(recipe.options))
    keys = {recipe: recipe.key for recipe in todo}
    found = {r for r in todo if (out / f"{keys[r]}.json").exists()}
    tally = StudyProgress(len(todo), len(found), len(found))
    _tidy(out, {keys[r] for r in found})
    finished, waiting = set(found), [r for r in todo if r not in found]
    running: dict[Future, Recipe] = {}
    with launch() as submit:
        while waiting or running:
            for recipe in [r for r in waiting if finished.issuperset(r.needs)]:
                waiting.remove(recipe)
                running[submit(run_one, recipe, out, **options)] = recipe
                if on_progress:
                    on_progress(tally)
                if any(f.done() for f in running):
                    break  # running here, one after the other: settle each before the next
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                recipe = running.pop(future)
                _settle(future, recipe, failure_path(out, keys[recipe]), tally, finished, waiting)
                if on_progress:
                    on_progress(tally)
    _end(out, keys, tally)
    return StudyResult([Record.read(out / f"{keys[r]}.json") for r in recipes if r in finished], tally.failed)


def _settle(
    future: Future, recipe: Recipe, why: Path, tally: StudyProgress, finished: set[Recipe], waiting: list[Recipe]
) -> None:
    error = future.exception()
    if error is None:
        finished.add(recipe)
        tally.done += 1
        return
    if isinstance(error, BrokenExecutor):
        raise error  # not this run's fault, and no other can run
    if distributed.world_size() > 1:
        raise error  # of several processes at this training each must do the same next
    tally.failed[recipe] = error
    write_failure(why, recipe, error)
    for needy in [r for r in waiting if recipe in r.needs]:
        waiting.remove(needy)
        tally.failed[needy] = RuntimeError(f"not run, because {recipe} failed")


def _end(out: Path, keys: dict[Recipe, str], tally: StudyProgress) -> None:
    _tidy(out, set(keys.values()))
    if not tally.done:  # nothing but a person's mistakes: each is told in a line, and leaves nothing lying about
        for recipe in [r for r, error in tally.failed.items() if isinstance(error, HeadcountError)]:
            failure_path(out, keys[recipe]).unlink(missing_ok=True)


def _tidy(out: Path, keys: set[str]) -> None:
    """Remove what killed and failed runs left of records that are whole by now."""
    running = out / "running"
    for key in keys:
        if (out / f"{key}.json").exists():
            shutil.rmtree(running / key, ignore_errors=True)
            for left in (
                running / f"{key}.lock",
                out / f"{key}.json.part",
                out / f"{key}.npz.part",
                failure_path(out, key),
            ):
                if left.exists():  # a read-only disk refuses even to remove what is not there
                    left.unlink(missing_ok=True)
    with suppress(OSError):  # it is not there, or others are still at work in it
        running.rmdir()


def error_line(error: BaseException) -> str:
    """The last line of a failure; the rest is in its ``.failed.json``."""
    return traceback.format_exception_only(error)[-1].strip()

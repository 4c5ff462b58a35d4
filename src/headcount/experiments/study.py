"""A study: many recipes, with the runs they need, each a record. A second call runs nothing; an interrupted one resumes."""

import itertools
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headcount.errors import HeadcountError
from headcount.experiments.launch import Launcher, in_process
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, failure_path, read_records, write_failure
from headcount.experiments.run import EpochCallback, run
from headcount.models.heads import check_options
from headcount.training import distributed
from headcount.training.loop import CHECKPOINT_SECONDS


def grid(base: Recipe, **axes: Iterable[Any]) -> list[Recipe]:
    """Every combination of the given field values.

    >>> [r.fold for r in grid(Recipe(), fold=range(3))]
    [0, 1, 2]
    """
    return [base.replace(**dict(zip(axes, values, strict=True))) for values in itertools.product(*axes.values())]


def with_needs(recipes: Iterable[Recipe]) -> list[Recipe]:
    """The recipes and all that they need, each once, in an order in which they can be run."""
    return list(dict.fromkeys(r for recipe in recipes for r in (*with_needs(recipe.needs), recipe)))


@dataclass
class StudyProgress:
    """How far a study is."""

    total: int
    done: int = 0
    reused: int = 0  # records that existed before
    failed: dict[Recipe, BaseException] = field(default_factory=dict)


@dataclass(frozen=True)
class StudyResult:
    """Records in the order of the recipes, and the error of each run that failed."""

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
    on_run_progress: EpochCallback | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> StudyResult:
    """Run the recipes that have no record yet, and the runs they need.

    A run that fails stops only those that need it. It leaves ``<key>.failed.json`` and is tried again by the next call.

    Parameters
    ----------
    launch : launcher
        ``in_process``, ``processes(count)`` or ``ray_cluster(address)`` of headcount.experiments.launch.
    device, compile, checkpoint_seconds
        See :func:`headcount.run`.
    on_progress : callable, optional
        Called with a :class:`StudyProgress` whenever a run starts or ends.
    on_run_progress : callable, optional
        Called after every epoch of every run; must be picklable if runs are launched in other processes.
    """
    options = {"device": device, "compile": compile, "checkpoint_seconds": checkpoint_seconds}
    out, recipes = Path(out), list(dict.fromkeys(recipes))
    todo = with_needs(recipes)
    for recipe in todo:  # the file of a custom head is first executed here
        check_options(recipe.head, dict(recipe.options))
    keys = {recipe: recipe.key for recipe in todo}
    finished = {r for r in todo if (out / f"{keys[r]}.json").exists()}
    waiting = [r for r in todo if r not in finished]
    progress = StudyProgress(len(todo), len(finished), len(finished))
    _remove_leftovers(out, {keys[r] for r in finished})
    running: dict[Future, Recipe] = {}
    with launch() as submit:
        while waiting or running:
            for recipe in [r for r in waiting if finished.issuperset(r.needs)]:
                waiting.remove(recipe)
                running[submit(run, recipe, out, on_progress=on_run_progress, **options)] = recipe
                if on_progress:
                    on_progress(progress)
                if any(future.done() for future in running):
                    break  # in this process submitting is running: handle each result before the next
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                recipe = running.pop(future)
                if (error := future.exception()) is None:
                    finished.add(recipe)
                    progress.done += 1
                elif isinstance(error, BrokenExecutor) or distributed.world_size() > 1:
                    raise error  # no other can run; or all processes of a distributed training must do the same next
                else:
                    progress.failed[recipe] = error
                    write_failure(failure_path(out, keys[recipe]), recipe, error)
                    for dependent in [r for r in waiting if recipe in r.needs]:
                        waiting.remove(dependent)
                        progress.failed[dependent] = RuntimeError(f"not run, because {recipe} failed")
                if on_progress:
                    on_progress(progress)
    _remove_leftovers(out, set(keys.values()))
    if not progress.done:  # only usage errors: each is reported in a line, no file is needed
        for recipe in [r for r, error in progress.failed.items() if isinstance(error, HeadcountError)]:
            with suppress(OSError):
                failure_path(out, keys[recipe]).unlink()
    return StudyResult(read_records(out / f"{keys[r]}.json" for r in recipes if r in finished), progress.failed)


def _remove_leftovers(out: Path, keys: set[str]) -> None:
    """Remove what killed and failed runs left behind of runs that have a record by now."""
    running = out / "running"
    for key in keys:
        if (out / f"{key}.json").exists():
            shutil.rmtree(running / key, ignore_errors=True)
            leftovers = (running / f"{key}.lock", out / f"{key}.json.part", out / f"{key}.npz.part", failure_path(out, key))
            for path in leftovers:
                if path.exists():  # a read-only disk refuses to unlink even what does not exist
                    path.unlink(missing_ok=True)
    with suppress(OSError):  # it does not exist, or other processes still work in it
        running.rmdir()

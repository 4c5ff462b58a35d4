"""Running experiments from the command line: the launcher, the study with its progress, and what is printed afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.table import Table

from headcount.errors import HeadcountError, check_choice
from headcount.experiments import select
from headcount.experiments import study as studies
from headcount.experiments.launch import Launcher, in_process, processes
from headcount.experiments.ray_launcher import ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.inference.ray_cluster import check_device
from headcount.models.fitted import FittedModel
from headcount.reporting.console import runs_bar
from headcount.reporting.results_table import display_names
from headcount.training.accel import COMPILE, resolve_device
from headcount.training.distributed import rank

# without markup, because names and paths may contain [brackets]; of several training processes only the first prints
_size = {} if sys.stdout.isatty() else {"width": 120, "height": 50}
console = Console(highlight=False, markup=False, width=_size.get("width"), height=_size.get("height"), quiet=rank() > 0)


def print_line(line: str) -> None:
    """Print without wrapping."""
    console.print(line, soft_wrap=True)


def make_launcher(launch: str, n_processes: int, address: str | None, gpus_each: float, device: str) -> Launcher:
    """The launcher that the options of `study` ask for; contradictory options are refused before anything runs."""
    if check_choice("launcher", launch, ("processes", "ray")) == "processes":
        if address is not None or gpus_each:
            raise HeadcountError(
                "--address and --gpus-each are for --launch ray; for runs on this machine give --processes"
            )
        resolve_device(device)
        return in_process if n_processes == 1 else processes(n_processes)
    if n_processes != 1:
        raise HeadcountError(
            "--processes is for --launch processes; on Ray, CPUs and --gpus-each decide how many run at once"
        )
    check_device(device, gpus_each)
    return ray_cluster(address, gpus_each)


def run_study(
    recipes: list[Recipe], out: Path, launcher: Launcher, device: str, compile: str, *, table: bool = True
) -> None:
    """Run what has no record yet, with a progress bar; print the table and the failed runs."""
    check_choice("compile", compile, COMPILE)
    with runs_bar() as on_progress:
        result = studies.study(recipes, out, launch=launcher, device=device, compile=compile, on_progress=on_progress)
    if result.records and table:
        print_results(select.rows(result.records))
    if result.records:
        print_line(f"{len(result.records)} records in {out}; `headcount report {out}` makes the page")
    if result.failed:
        _report_failures(result.failed, out)


def _report_failures(failed: Mapping[Recipe, BaseException], out: Path) -> None:
    """Print each failure in a line, then raise: first of all an error that the user can correct."""
    for recipe, error in failed.items():
        print_line(f"failed: {recipe}: {studies.error_line(error)}")
    message = (
        f"{len(failed)} run{'s' * (len(failed) > 1)} failed; see {out}/*.failed.json; the same command tries them again"
    )
    for error in failed.values():
        if isinstance(error, (HeadcountError, OSError)):
            if any(out.glob("*.failed.json")):
                print_line(message)
            raise error
    raise HeadcountError(message)


def print_results(rows: Iterable[select.Row]) -> None:
    """The results, one table for each source and scenario."""
    rows = sorted(rows, key=_setting)
    names, remarks = display_names(rows)
    for (source, scenario), group in groupby(zip(names, rows, strict=True), key=lambda pair: _setting(pair[1])):
        table = Table(box=None, pad_edge=False)
        for name in (f"{source}, {scenario}", "runs", "instance accuracy", "bag accuracy", "consistency"):
            table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
        for name, row in group:
            cells = [
                _mean_and_deviation(*row.score(m)) for m in ("instance_accuracy", "bag_accuracy", "consistency_rate")
            ]
            table.add_row(name, str(len(row.records)), *cells)
        console.print(table)
    for name, remark in remarks.items():
        print_line(f"{name}, {remark}")


def _setting(row: select.Row) -> tuple[str, str]:
    return row.source, row.scenario


def _mean_and_deviation(mean: float, deviation: float, count: int) -> str:
    return f"{mean:.3f} ± {deviation:.3f}" if count else "–"


def print_methods(model: FittedModel) -> None:
    """The methods that `fit` compared, the best first."""
    table = Table(box=None, pad_edge=False)
    truth = model.metadata["data"]["truth"]
    for name in ("method", "loss on held-out labels", "bag accuracy", *(["instances (not used)"] if truth else []), ""):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for c in model.metadata["methods"]:
        cells = [_number(c["loss"], 4), _number(c["bag_accuracy"], 3)]
        cells += [_number(c["instance_accuracy"], 3)] if truth else []
        table.add_row(c["title"], *cells, "kept" if c["chosen"] else c["note"] or ("baseline" if c["baseline"] else ""))
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"

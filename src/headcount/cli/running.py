"""From the options of the command line to recipes, a launcher and a study with its progress; and what is printed afterwards.

Of two values for one field of a recipe neither wins silently: that is an error.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from headcount.bags import Bags
from headcount.errors import HeadcountError, check_choice
from headcount.experiments import select
from headcount.experiments.launch import Launcher, in_process, processes
from headcount.experiments.ray_launcher import ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.experiments.study import error_line, grid
from headcount.experiments.study import study as run_all
from headcount.inference.ray_cluster import check_device
from headcount.majority import metrics
from headcount.models.fitted import FittedModel
from headcount.models.heads import check_options
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


# -- options become recipes ---------------------------------------------------------------------------------------------


def build_recipes(options: Mapping[str, Any]) -> list[Recipe]:
    """The grid that the recipe options of options.py span; commas separate values."""
    axes: dict[str, list[Any]] = {
        "source": options["source"].split(","),
        "scenario": options["scenario"].split(","),
        "fold": [_parse_number("--fold", v, int) for v in options["fold"].split(",")],
        "head": options["head"].split(","),
        "removal": [_parse_number("--removal", v, float) for v in options["removal"].split(",")],
        "options": [parse_options(options["option"])],
    }
    axes |= {name: [options[name]] for name in ("epochs", "bag_size") if options[name] is not None}
    if options["precision"] is not None:
        axes["precision"] = options["precision"].split(",")
    _add_fields(axes, options["set"] or [])
    recipes = grid(Recipe(), **axes)
    for recipe in recipes:
        check_options(recipe.head, dict(recipe.options))
    return recipes


def _add_fields(axes: dict[str, list[Any]], texts: list[str]) -> None:
    """Add the values of ``--set``: fields without an option of their own, and fields inside backbone and trouble."""
    names_given: set[str] = set()
    for text in texts:
        name, values = _split_pair("--set", text)
        field, dot, inner = name.partition(".")
        if name.endswith("options") or name == "trouble":
            raise HeadcountError(
                f"--set cannot give {name} as a whole; give --option NAME=VALUE for the head, --set backbone.NAME=VALUE, "
                "--set trouble.NAME=VALUE"
            )
        if name in names_given:
            raise HeadcountError(f"--set {name} is given twice; give it once, with commas between several values")
        if name in axes:
            flag = f"--{name.replace('_', '-')}"
            raise HeadcountError(f"--set {text}: {name} has an option of its own; give {flag} alone")
        names_given.add(name)
        parsed = [_parse_value(v) for v in values.split(",")]
        if not dot:
            axes[name] = parsed
            continue
        field = {"backbone": "backbone_options", "trouble": "trouble"}.get(field, field)
        if field not in ("backbone_options", "trouble"):
            raise HeadcountError(f"--set {name}: only backbone and trouble have fields of their own")
        axes[field] = [{**others, inner: v} for others in axes.get(field, [{}]) for v in parsed]


def _parse_number(flag: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise HeadcountError(f"{flag} takes numbers, got {text!r}") from None


def _split_pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals and value):
        raise HeadcountError(f"{flag} takes NAME=VALUE, got {text!r}")
    return name, value


def parse_options(option: list[str] | None) -> dict[str, Any]:
    """Options of a head as a dictionary."""
    pairs: dict[str, Any] = {}
    for text in option or []:
        name, value = _split_pair("--option", text)
        if name in pairs:
            raise HeadcountError(f"--option {name} is given twice; give it once")
        pairs[name] = _parse_value(value)
    return pairs


def _parse_value(text: str) -> Any:
    """A number, true or false, or the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise HeadcountError(f"{text} is not a number that can be computed with; give a finite one")
    return value if isinstance(value, (bool, int, float)) else text


# -- running ------------------------------------------------------------------------------------------------------------


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
        result = run_all(recipes, out, launch=launcher, device=device, compile=compile, on_progress=on_progress)
    if result.records and table:
        print_results(select.rows(result.records))
    if result.records:
        print_line(f"{len(result.records)} records in {out}; `headcount report {out}` makes the page")
    if result.failed:
        _report_failures(result.failed, out)


def _report_failures(failed: Mapping[Recipe, BaseException], out: Path) -> None:
    """Print each failure in a line, then raise: first of all an error that the user can correct."""
    for recipe, error in failed.items():
        print_line(f"failed: {recipe}: {error_line(error)}")
    message = (
        f"{len(failed)} run{'s' * (len(failed) > 1)} failed; see {out}/*.failed.json; the same command tries them again"
    )
    for error in failed.values():
        if isinstance(error, (HeadcountError, OSError)):
            if any(out.glob("*.failed.json")):
                print_line(message)
            raise error
    raise HeadcountError(message)


# -- printing -----------------------------------------------------------------------------------------------------------


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


def bag_statistics(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(B,) share of the label's class, label, and whether the vote is a tie; of bags with truth."""
    assert bags.truth is not None
    truth, label, bag = bags.truth.numpy(), bags.label.numpy(), bags.bag.numpy()
    votes = metrics.count_votes(truth, bag, len(bags), len(bags.classes))
    return metrics.label_share(truth, label, bag), label, (votes == votes.max(1, keepdims=True)).sum(1) > 1


def print_bags(splits: Mapping[str, Bags]) -> None:
    """Size, majority shares, ties and labels of each split."""
    table = Table(box=None, pad_edge=False)
    for name in ("split", "bags", "instances", "majority share (min / mean / max)", "ties", "labels per class"):
        table.add_column(name, justify="left")
    for name, bags in splits.items():
        share, label, tied = bag_statistics(bags)
        shares = f"{share.min():.3f} / {share.mean():.3f} / {share.max():.3f}"
        per_class = " ".join(map(str, np.bincount(label, minlength=len(bags.classes))))
        table.add_row(name, str(len(bags)), str(len(bags.index)), shares, f"{tied.mean():.1%}", per_class)
    console.print(table)

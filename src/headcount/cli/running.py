"""From the options of the command line to recipes, a launcher and a study with its progress; and the demo."""

import json
import math
import time
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from headcount.cli.console import console, print_line, runs_bar
from headcount.cli.printing import print_results
from headcount.datasets import registry
from headcount.errors import HeadcountError, check_choice
from headcount.experiments import scores
from headcount.experiments.launch import Launcher, in_process, processes, ray_cluster
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import error_line
from headcount.experiments.study import grid, study as run_all
from headcount.inference.predict_ray import check_device
from headcount.io import atomic_write
from headcount.models.heads import check_options
from headcount.reporting.report import write_report
from headcount.training.accel import COMPILE, n_cores, resolve_device

REMOVALS = (0.2, 0.4, 0.6, 0.8, 1.0)  # of the demo


def build_recipes(options: Mapping[str, Any]) -> list[Recipe]:
    """The grid that the recipe options of options.py span, from a preset or the paper's recipe; commas separate values."""
    base = Recipe.preset(options["preset"]) if options["preset"] else Recipe()
    fields = ("fold", "removal", "source", "scenario", "head", "precision", "epochs", "bag_size")
    texts = {field: str(options[field]).split(",") for field in fields if options[field] is not None}
    axes = {k: v if isinstance(getattr(base, k), str) else [_parse_value(t) for t in v] for k, v in texts.items()}
    if axes.get("head", [base.head]) != [base.head]:
        base = base.replace(head=axes["head"][0], options={})  # the options of a preset belong to its head
    _add_fields(axes, "--option", options["option"], base)
    _add_fields(axes, "--set", options["set"], base)
    recipes = grid(base, **axes)
    for recipe in recipes:
        check_options(recipe.head, dict(recipe.options))
    return recipes


def _add_fields(axes: dict[str, list[Any]], flag: str, given: list[str] | None, base: Recipe) -> None:
    """Add the values of ``--set`` (fields without an option of their own, fields inside backbone and trouble) or ``--option``."""
    for name, text in _split_pairs(flag, given, ", with commas between several values").items():
        field, dot, inner = ("options", ".", name) if flag == "--option" else name.partition(".")
        if name.endswith("options") or name == "trouble":
            advice = "give --option NAME=VALUE for the head, --set backbone.NAME=VALUE, --set trouble.NAME=VALUE"
            raise HeadcountError(f"--set cannot give {name} as a whole; {advice}")
        if flag == "--set" and name in (*axes, "source", "scenario", "head", "removal"):
            raise HeadcountError(f"--set {name}={text}: {name} has an option of its own; give --{name.replace('_', '-')} alone")
        values = [_parse_value(v) for v in text.split(",")]
        if not dot:
            axes[name] = values
            continue
        field = {"backbone": "backbone_options", "trouble": "trouble"}.get(field, field)
        if field not in ("backbone_options", "trouble") and flag == "--set":
            raise HeadcountError(f"--set {name}: only backbone and trouble have fields of their own")
        axes[field] = [{**others, inner: v} for others in axes.get(field, [dict(getattr(base, field))]) for v in values]


def _split_pairs(flag: str, given: list[str] | None, advice: str = "") -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given or []:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise HeadcountError(f"{flag} takes NAME=VALUE, got {text!r}")
        if name in pairs:
            raise HeadcountError(f"{flag} {name} is given twice; give it once{advice}")
        pairs[name] = value
    return pairs


def parse_options(option: list[str] | None) -> dict[str, Any]:
    """Options of a head as a dictionary."""
    return {name: _parse_value(value) for name, value in _split_pairs("--option", option).items()}


def _parse_value(text: str) -> Any:
    """A number, true or false, or the text itself."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, float) and not math.isfinite(value):
        raise HeadcountError(f"{text} is not a number that can be computed with; give a finite one")
    return value if isinstance(value, (bool, int, float)) else text


def available_recipes(recipes: Iterable[Recipe]) -> list[Recipe]:
    """Those recipes, each once, whose data set is in the cache; the others are reported."""
    recipes = list(dict.fromkeys(recipes))
    absent = sorted({r.source for r in recipes if not registry.is_available(r.source)})
    for name in absent:
        console.print(f"{name} is not in the cache: its cells stay missing (`headcount data fetch {name}`)")
    runnable = [r for r in recipes if r.source not in absent]
    if not runnable:
        raise HeadcountError(f"none of {', '.join(absent)} is in the cache; fetch or import one (`headcount data --help`)")
    return runnable


def make_launcher(launch: str, n_processes: int, address: str | None, gpus_each: float, device: str) -> Launcher:
    """The launcher that the options of `study` ask for; contradictory options are refused before anything runs."""
    if check_choice("launcher", launch, ("processes", "ray")) == "processes":
        if address is not None or gpus_each:
            raise HeadcountError("--address and --gpus-each are for --launch ray; for runs on this machine give --processes")
        resolve_device(device)
        return in_process if n_processes == 1 else processes(n_processes)
    if n_processes != 1:
        raise HeadcountError("--processes is for --launch processes; on Ray, CPUs and --gpus-each decide how many run at once")
    check_device(device, gpus_each)
    return ray_cluster(address, gpus_each)


def run_study(recipes: list[Recipe], out: Path, launcher: Launcher, device: str, compile: str, *, table: bool = True) -> None:
    """Run what has no record yet, with a progress bar; print the table and the failed runs."""
    check_choice("compile", compile, COMPILE)
    with runs_bar() as on_progress:
        result = run_all(recipes, out, launch=launcher, device=device, compile=compile, on_progress=on_progress)
    if result.records and table:
        print_results(scores.rows(result.records))
    if result.records:
        print_line(f"{len(result.records)} records in {out}; `headcount report {out}` makes the page")
    if not result.failed:
        return
    for recipe, error in result.failed.items():
        print_line(f"failed: {recipe}: {error_line(error)}")
    n_failed = len(result.failed)
    message = f"{n_failed} run{'s' * (n_failed > 1)} failed; see {out}/*.failed.json; the same command tries them again"
    for error in result.failed.values():  # first of all an error that the user can correct
        if isinstance(error, (HeadcountError, OSError)):
            if any(out.glob("*.failed.json")):
                print_line(message)
            raise error
    raise HeadcountError(message)


def demo_recipes(folds: int) -> list[Recipe]:
    """Six methods on each fold: bags of 24, a small network, otherwise the paper's training; tilt needs a quarter of the epochs."""
    base = Recipe.preset("digits")
    methods: list[dict[str, Any]] = [
        {"head": "output_mean"},
        {"head": "output_mean", "options": {"form": "nll"}},
        {"options": {"t1": 1.0}},
        *({"removal": r} for r in (0.0, *REMOVALS)),
        {"head": "tilt", "epochs": 18, "lr": 3e-3, "views": "noise"},
    ]
    return [base.replace(fold=fold, **method) for fold in range(folds) for method in methods]


def run_demo(out: Path, folds: int, n_processes: int | None) -> None:
    """Train, print the table, write ``report.html`` and ``summary.json``."""
    started, n_processes = time.monotonic(), n_processes or n_cores()
    console.print(f"digits, Various, bags of 24, {folds} fold{'s' * (folds > 1)}: training from majority labels alone ...")
    with runs_bar() as on_progress:
        launch = in_process if n_processes == 1 else processes(n_processes)
        result = run_all(demo_recipes(folds), out / "records", launch=launch, device="cpu", on_progress=on_progress)
    for error in result.failed.values():
        raise error
    rows = scores.rows(result.records)
    print_results(rows)
    page = write_report(result.records, out / "report.html", title="headcount demo: digits from majority labels")
    seconds = time.monotonic() - started
    methods: dict[str, dict[str, Any]] = {row.label: {} for row in rows}
    for row, metric in product(rows, ("instance_accuracy", "bag_accuracy")):
        mean, deviation, runs = row.score(metric)
        methods[row.label][metric] = {"mean": round(mean, 4), "std": round(deviation, 4), "runs": runs}
    summary = {"seconds": round(seconds, 1), "folds": folds, "methods": methods, "report": str(page)}
    atomic_write(out / "summary.json", lambda f: f.write(json.dumps(summary, indent=1).encode()))
    console.print(f"{len(result.records)} runs in {seconds:.0f} s. Open {page}")

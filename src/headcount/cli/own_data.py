"""What the commands for one's own data do: options in, a verdict or a model's folder out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rich.table import Table

from headcount.cli.experiment_actions import console
from headcount.cli.predicting import read_for_model
from headcount.cli.recipe_args import parse_options
from headcount.io import file_lock
from headcount.models import library_backbones, serialization
from headcount.models.fitted import FittedModel
from headcount.reporting.console import print_message
from headcount.reporting.fit_page import model_card, render_fit_page, summary_lines
from headcount.reporting.output_paths import check_writable
from headcount.reporting.progress import seconds_bar
from headcount.selection.check import check as bag_check
from headcount.selection.fit import check_limits
from headcount.selection.fit import fit as fit_dataset
from headcount.selection.methods import resolve_method
from headcount.training.accel.device import resolve_device


def check(data: str, how: dict[str, Any], seed: int, as_json: bool) -> None:
    """Read as fit does, and say what to expect. Nothing is written, and no verdict is an error."""
    reading = read_for_model(None, data, how, labels=True, log=print_message if as_json else _print_line)
    checked = bag_check.check(reading, seed)
    if as_json:
        print(json.dumps(checked.to_json(), indent=1, allow_nan=False))
    else:
        for line in str(checked).splitlines():
            _print_line(line)
    bags, instances = checked.examined
    print_message(f"looked at {instances:,} instances of {bags:,} bags in {checked.seconds:.1f} s")


def fit(
    data: str, out: Path, overwrite: bool, how: dict[str, Any], *, option: list[str] | None, **training: Any
) -> None:
    """Read, fit (``training``: as :func:`fit_reading` takes it), write the folder whole. What is finished is kept beside it
    until then."""
    resolve_device(training["device"])  # what is wrong without any data is told before they are read
    resolve_method(training["method"], training["head"])
    check_limits(training["minutes"], training["folds"])
    library_backbones.check_backbone_options(*(training[k] for k in ("backbone", "frozen", "weights", "size")))
    training |= {"options": parse_options(option), "cache": how["cache"]}
    out = out if out.name else Path(os.path.abspath(out))  # "." has no name to put the work beside
    check_writable("out", out)
    work = out.with_name(out.name + ".work")
    with file_lock(work / "lock"):
        serialization.check_writable(out, overwrite)
        dataset = read_for_model(None, data, how, labels=True, log=_print_line)
        with seconds_bar() as on_progress:
            fitted = fit_dataset(dataset, work=work, on_progress=on_progress, log=_print_line, **training)
        save_model(fitted, out, overwrite, Path(data).name)
        for folder_left in work.iterdir():  # with other options, perhaps; the model is there now
            if folder_left.is_dir():
                shutil.rmtree(folder_left, ignore_errors=True)
    print_methods(fitted)
    for line in summary_lines(fitted):
        _print_line(line)
    _print_line(f"model in {out}; see {out / 'report.html'}")


def save_model(fitted: FittedModel, out: Path, overwrite: bool, called: str) -> None:
    page = render_fit_page(fitted, f"A model from {called}")
    fitted.save(out, {"report.html": page, "MODEL_CARD.md": model_card(fitted)}, overwrite)


def print_methods(fitted: FittedModel) -> None:
    """What was tried, the best first."""
    table = Table(box=None, pad_edge=False)
    truth = fitted.metadata["data"]["truth"]
    for name in ("method", "loss on held-out labels", "bag accuracy", *(["instances (not used)"] if truth else []), ""):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for c in fitted.metadata["methods"]:
        cells = [
            _number(c["loss"], 4),
            _number(c["bag_accuracy"], 3),
            *([_number(c["instance_accuracy"], 3)] if truth else []),
        ]
        word = "kept" if c["chosen"] else c["note"] or ("baseline" if c["baseline"] else "")
        table.add_row(c["title"], *cells, word)
    console.print(table)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _print_line(line: str) -> None:
    console.print(line, soft_wrap=True)

"""What the commands for one's own data do: options in, a verdict or a model's folder out."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from rich.table import Table

from headcount.answering import read_as
from headcount.checking import check_reading
from headcount.commands import console
from headcount.files import alone
from headcount.fitting import check_bounds, fit_reading
from headcount.judging.candidates import method_of
from headcount.models import folder, vision
from headcount.models.fitted import Fitted
from headcount.showing.ask_tables import say
from headcount.showing.fit_page import fit_page, lines_of, model_card
from headcount.showing.outputs import reachable
from headcount.showing.progress import seconds_bar
from headcount.training.speed import device_for
from headcount.typed import pairs_of


def check(data: str, how: dict[str, Any], seed: int, as_json: bool) -> None:
    """Read as fit does, and say what to expect. Nothing is written, and no verdict is an error."""
    reading = read_as(None, data, how, labels=True, tell=say if as_json else _say)
    checked = check_reading(reading, seed)
    if as_json:
        print(json.dumps(checked.to_json(), indent=1, allow_nan=False))
    else:
        for line in str(checked).splitlines():
            _say(line)
    bags, instances = checked.looked
    say(f"looked at {instances:,} instances of {bags:,} bags in {checked.seconds:.1f} s")


def fit(
    data: str, out: Path, overwrite: bool, how: dict[str, Any], *, option: list[str] | None, **training: Any
) -> None:
    """Read, fit (``training``: as :func:`fit_reading` takes it), write the folder whole. What is finished is kept beside it
    until then."""
    device_for(training["device"])  # what is wrong without any data is told before they are read
    method_of(training["method"], training["head"])
    check_bounds(training["minutes"], training["folds"])
    vision.check_choice(*(training[k] for k in ("backbone", "frozen", "weights", "size")))
    training |= {"options": pairs_of(option), "cache": how["cache"]}
    out = out if out.name else Path(os.path.abspath(out))  # "." has no name to put the work beside
    reachable("out", out)
    work = out.with_name(out.name + ".work")
    with alone(work / "lock"):
        folder.free(out, overwrite)
        found = read_as(None, data, how, labels=True, tell=_say)
        with seconds_bar() as watch:
            fitted = fit_reading(found, work=work, watch=watch, tell=_say, **training)
        write(fitted, out, overwrite, Path(data).name)
        for begun in work.iterdir():  # with other options, perhaps; the model is there now
            if begun.is_dir():
                shutil.rmtree(begun, ignore_errors=True)
    table_of(fitted)
    for line in lines_of(fitted):
        _say(line)
    _say(f"model in {out}; see {out / 'report.html'}")


def write(fitted: Fitted, out: Path, overwrite: bool, called: str) -> None:
    page = fit_page(fitted, f"A model from {called}")
    fitted.save(out, {"report.html": page, "MODEL_CARD.md": model_card(fitted)}, overwrite)


def table_of(fitted: Fitted) -> None:
    """What was tried, the best first."""
    table = Table(box=None, pad_edge=False)
    truth = fitted.facts["data"]["truth"]
    for name in ("method", "loss on held-out labels", "bag accuracy", *(["instances (not used)"] if truth else []), ""):
        table.add_column(name, justify="right" if table.columns else "left", no_wrap=True)
    for c in fitted.facts["candidates"]:
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


def _say(line: str) -> None:
    console.print(line, soft_wrap=True)

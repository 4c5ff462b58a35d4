"""What the commands for one's own data do: options in, a reading or a model's folder out."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

from headcount.checking import check_reading
from headcount.commands import console
from headcount.complaints import tell_of
from headcount.data.columns import Named
from headcount.data.read import Reading, read
from headcount.files import alone
from headcount.fitting import fit_reading
from headcount.models import folder, vision
from headcount.models.fitted import Fitted
from headcount.showing.ask_tables import say
from headcount.showing.fit_page import fit_page, lines_of, model_card
from headcount.showing.outputs import reachable
from headcount.showing.progress import seconds_bar
from headcount.training.speed import device_for
from headcount.typed import pairs_of

ROLES = ("bag", "label", "path", "text", "weight", "group", "truth", "known", "x", "y", "id")
LISTS = ("votes", "features", "categories")


def named_of(options: dict[str, Any]) -> Named:
    """The columns' roles among a command's options; commas separate several."""
    roles: dict[str, Any] = {k: options.get(k) for k in ROLES}
    return Named(**roles, **{k: words(options.get(k)) for k in LISTS})


def words(text: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Names with commas between them; what is apart already stays so.

    >>> words("a, b,c"), words(None)
    (('a', 'b', 'c'), ())
    """
    if isinstance(text, tuple):
        return text
    return () if text is None else tuple(w for w in (part.strip() for part in text.split(",")) if w)


def read_own(data: str, options: dict[str, Any], tell: Callable[[str], None] | None = None, **more: Any) -> Reading:
    """Read with a command's options, and say what was understood."""
    reading = read(
        data,
        named_of(options),
        labels=options.get("labels"),
        classes=words(options.get("classes")) or None,
        ties=options.get("ties") or "split",
        uncounted=words(options.get("uncounted")),
        skip_bad=bool(options.get("skip_bad")),
        side=options.get("side"),
        tile=options.get("tile"),
        cache=options.get("cache"),
        **more,
    )
    tell_of(reading, tell or _say)
    return reading


def check(data: str, how: dict[str, Any], seed: int, as_json: bool) -> None:
    """Read as fit does, and say what to expect. Nothing is written, and no verdict is an error."""
    reading = read_own(data, how, tell=say if as_json else _say)
    checked = check_reading(reading, seed)
    if as_json:
        print(json.dumps(checked.to_json(), indent=1, allow_nan=False))
    else:
        for line in str(checked).splitlines():
            _say(line)
    bags, instances = checked.looked
    say(f"looked at {instances:,} instances of {bags:,} bags in {checked.seconds:.1f} s")


def fit(data: str, out: Path, overwrite: bool, reading: dict[str, Any], how: dict[str, Any]) -> None:
    """Read, fit, write the folder whole. What is finished is kept beside it until then."""
    device_for(how["device"])  # a typo is told before anything is read
    vision.check_choice(*(how[k] for k in ("backbone", "frozen", "weights", "size")))
    options = pairs_of(how.pop("option"))
    out = out if out.name else Path(os.path.abspath(out))  # "." has no name to put the work beside
    reachable("out", out)
    work = out.with_name(out.name + ".work")
    with alone(work / "lock"):
        folder.free(out, overwrite)
        found = read_own(data, reading)
        with seconds_bar() as watch:
            fitted = fit_reading(found, work=work, watch=watch, tell=_say, options=options, **how)
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

"""The options that say how data are read, each declared once: ``reads`` gives them to a command, which gets them as one mapping
``how``. Nothing heavy is imported here.
"""

from __future__ import annotations

import csv
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

Data = Annotated[str, typer.Argument(help="A folder, or a table (.csv .tsv .parquet) or arrays (.npz .npy).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]


def _column(help: str) -> Any:
    return Annotated[str | None, typer.Option(help=f"Column {help}")]


def _columns(help: str) -> Any:
    return Annotated[str | None, typer.Option(help=f"{help}: a,b,c.")]


# of whoever asks a model: what it remembers of its columns and classes need not be said again
READ_OPTIONS: dict[str, Any] = {
    "bag": _column("that says the bag."),
    "label": _column("with the bag's label."),
    "votes": _columns("Columns with votes or shares, one per class"),
    "path": _column("with the picture's file."),
    "text": _column("with a text."),
    "weight": _column("with the instance's weight, its number of votes."),
    "group": _column("with the bag's group (patient, site, county): never split over folds."),
    "truth": _column("with the instance's own class, for scoring only."),
    "x": _column("with the x coordinate."),
    "y": _column("with the y coordinate."),
    "id": _column("with the instance's own name."),
    "labels": Annotated[str | None, typer.Option(help="A second file with bag and label columns.")],
    "skip_bad": Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be read, and list it.")],
    "tile": Annotated[
        float | None,
        typer.Option(help="Side of the tiles at the coordinates, in their unit, where files do not say it."),
    ],
    "cache": Annotated[
        Path | None, typer.Option(help="Folder for pictures and slides larger than memory; default $HEADCOUNT_DATA.")
    ],
}
# of whoever reads data that no model knows
FIT_OPTIONS: dict[str, Any] = {
    **READ_OPTIONS,
    "known": _column("with the instance's own class, given as supervision."),
    "features": _columns("Columns to learn from, default all that have no role"),
    "categories": _columns("Columns whose numbers are names"),
    "classes": _columns("The classes in their order"),
    "ties": Annotated[str, typer.Option(help="A bag with two winners: split, drop or lowest.")],
    "uncounted": _columns("Classes that never win, such as background"),
    "side": Annotated[int | None, typer.Option(help="Resize pictures to a square of this side.")],
}
LIST_OPTIONS = ("votes", "features", "categories", "classes", "uncounted")
DEFAULTS: dict[str, Any] = {"skip_bad": False, "ties": "split"}


def with_read_options(options: dict[str, Any] = READ_OPTIONS) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command these options."""

    def giving(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        called = {n: f"{n}_column" if n in own.parameters else n for n in options}  # the command's own word comes first
        more = [
            inspect.Parameter(called[n], inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(n), annotation=a)
            for n, a in options.items()
        ]
        kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for n, p in own.parameters.items() if n != "how"]

        @functools.wraps(command)
        def with_options(**given: Any) -> None:
            how = {name: given.pop(called[name]) for name in options}
            command(**given, how={k: split_names(v) if k in LIST_OPTIONS else v for k, v in how.items()})

        del with_options.__wrapped__
        vars(with_options)["__signature__"] = own.replace(parameters=kept + more)
        with_options.__annotations__ = {p.name: p.annotation for p in kept + more}
        return with_options

    return giving


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Names with commas between them, as a line of a CSV file has them: one with a comma of its own stands in quotes. None
    where there are none.

    >>> words("a, b,c,"), words('a, "b, c"'), words("")
    (('a', 'b', 'c'), ('a', 'b, c'), None)
    """
    parts = next(csv.reader([text or ""], skipinitialspace=True), [])
    return tuple(w for w in map(str.strip, parts) if w) or None

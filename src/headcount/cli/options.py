"""The options that several commands share, each declared once. Nothing heavy is imported here."""

import csv
import functools
import inspect
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.errors import DamagedFileWarning


def _stop_at_damaged_records(strict: bool) -> None:
    if strict:
        warnings.simplefilter("error", DamagedFileWarning)


Data = Annotated[str, typer.Argument(help="A folder, or a table (.csv .tsv .parquet) or arrays (.npz .npy).")]
Device = Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:1.")]
_COMPILE = "Compile the network: auto (on a GPU), on or off. Affects speed only; not part of the recipe."
Compile = Annotated[str, typer.Option(help=_COMPILE)]
_STRICT = "Stop at a damaged record instead of leaving it out."
Strict = Annotated[bool, typer.Option("--strict", help=_STRICT, callback=_stop_at_damaged_records)]
_HEAD_OPTION = "An option of the head, NAME=VALUE; may be repeated."
HeadOption = Annotated[list[str] | None, typer.Option("--option", help=_HEAD_OPTION)]
_ADDRESS = "The Ray cluster: auto, local or host:port; default: auto if there is one, else local."
RayAddress = Annotated[str | None, typer.Option(help=_ADDRESS)]


Option = inspect.Parameter  # the annotation that typer reads, and the default; with_options gives it its name


def _option(kind: Any, help: str, default: Any = None, *names: str) -> Option:
    annotation = Annotated[kind, typer.Option(*names, help=help)]
    return Option("option", Option.KEYWORD_ONLY, default=default, annotation=annotation)


def _column(content: str) -> Option:
    return _option(str | None, f"Column with {content}.")


# how data are read for a model, which knows its own columns and classes
READ_OPTIONS = {
    "bag": _column("the bag of each instance"),
    "label": _column("the bag's label"),
    "votes": _option(str | None, "Columns with votes (whole numbers are counts) or shares, one per class: a,b,c."),
    "path": _column("the image file"),
    "text": _column("a text"),
    "weight": _column("the instance's weight (its number of votes)"),
    "group": _column("the bag's group (patient, site, county); groups are never divided between folds"),
    "truth": _column("the instance's class, for scoring only"),
    "x": _column("the x coordinate"),
    "y": _column("the y coordinate"),
    "id": _column("the instance's identifier"),
    "labels": _option(str | None, "A second file with columns bag and label."),
    "skip_bad": _option(bool, "Skip what cannot be read, and list it.", False, "--skip-bad"),
    "tile": _option(float | None, "Side of the tiles, in the unit of the coordinates, if the files do not contain it."),
    "cache": _option(
        Path | None, "Folder for embeddings, and for images and slides larger than memory; default $HEADCOUNT_DATA."
    ),
    "encoder": _option(str | None, "Encoder of texts: a folder or a name; default: the model's, or TF-IDF."),
    "download": _option(bool, "Download the encoder if it is not here.", False, "--download"),
}
# how data are read from which a model is made
FIT_OPTIONS = {
    **READ_OPTIONS,
    "known": _column("the instance's class, used in training"),
    "features": _option(str | None, "Columns used as features: a,b,c; default: all without a role."),
    "categories": _option(str | None, "Columns whose numbers are categories: a,b,c."),
    "classes": _option(str | None, "The classes, in order: a,b,c."),
    "ties": _option(str, "Bags with two equally frequent classes: split, drop or lowest.", "split"),
    "uncounted": _option(str | None, "Classes that never win, such as background: a,b,c."),
    "label_noise": _option(float | None, "Each label was replaced by one at random with this probability, from 0 to 0.99."),
    "side": _option(int | None, "Resize images to squares of this side."),
}
LIST_OPTIONS = ("votes", "features", "categories", "classes", "uncounted")

# what makes recipes; in a study a comma separates values
_SET = "Any other field of the recipe (docs/reference/api.md): NAME=VALUE, backbone.NAME=VALUE or trouble.NAME=VALUE; "
_PRECISION = "tf32 (float32 with TF32 convolutions; default), fp32 or bf16. Part of the recipe."
_PRESET = "Start from a published recipe: paper, tilt-photographs, tilt-house-numbers or digits; other options change it."
RECIPE_OPTIONS = {
    "preset": _option(str | None, _PRESET),
    "source": _option(
        str | None, "cifar10 (default), digits, svhn, path, oct, or FILE.npz with images or features and labels."
    ),
    "scenario": _option(str | None, "Majority share: various (default), small, large, or a range such as 0.3-0.5."),
    "fold": _option(str, "Fold of the cross-validation, 0 to 4.", "0"),
    "head": _option(str | None, "A method (see `headcount heads`; default count), or path/to/file.py:Class."),
    "option": _option(list[str] | None, _HEAD_OPTION, None, "--option"),
    "removal": _option(str | None, "MPEM: fraction of each bag's dissenters to remove; default 0, which means no MPEM."),
    "epochs": _option(int | None, "Training epochs; default 1500."),
    "bag_size": _option(int | None, "Instances per bag; default 64."),
    "precision": _option(str | None, _PRECISION),
    "set": _option(list[str] | None, f"{_SET}may be repeated.", None, "--set"),
}


def with_options(parameter: str, options: Mapping[str, Option]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace one parameter of a command by a group of options, whose values it receives there as a dictionary.

    An option whose name the command already uses is called NAME-column (``explain --bag``, ``--bag-column``).
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        names = {name: f"{name}_column" if name in signature.parameters else name for name in options}
        added = [option.replace(name=names[name]) for name, option in options.items()]
        parameters: list[inspect.Parameter] = []
        for p in signature.parameters.values():
            parameters += added if p.name == parameter else [p.replace(kind=Option.KEYWORD_ONLY)]

        @functools.wraps(command)
        def with_group(**values: Any) -> None:
            group = {name: values.pop(names[name]) for name in options}
            command(**values, **{parameter: group})

        del with_group.__wrapped__
        vars(with_group)["__signature__"] = signature.replace(parameters=parameters)
        with_group.__annotations__ = {p.name: p.annotation for p in parameters}
        return with_group

    return decorate


def split_names(text: str | None) -> tuple[str, ...] | None:
    """Names separated by commas, as in a line of a CSV file: a name that contains a comma is quoted. None if there are none.

    >>> split_names("a, b,c,"), split_names('a, "b, c"'), split_names("")
    (('a', 'b', 'c'), ('a', 'b, c'), None)
    """
    parts = next(csv.reader([text or ""], skipinitialspace=True), [])
    return tuple(name for name in map(str.strip, parts) if name) or None


def reading_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given ones of FIT_OPTIONS as :func:`headcount.read` takes them, with lists of names."""
    values = {k: split_names(v) if k in LIST_OPTIONS else v for k, v in options.items()}
    return {k: v for k, v in values.items() if v is not None}


def with_option_names(message: str) -> str:
    """Replace names of Python parameters by options of the command line.

    >>> with_option_names("name it with bag=, or give a side, such as side=64")
    'name it with --bag, or give a side, such as --side 64'
    >>> with_option_names("choose another path, or give overwrite=True")
    'choose another path, or give --overwrite'
    """
    return _PARAMETER.sub(lambda m: f"--{m[1].replace('_', '-')}" + (f" {m[2]}" if m[2] not in (None, "True") else ""), message)


_NAMES = "|".join({*FIT_OPTIONS, "overwrite"} - {"x", "y", "id"})
_PARAMETER = re.compile(rf"(?<![\w'\".-])({_NAMES})=(\w+)?(?![\w'\"(])")

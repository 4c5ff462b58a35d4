"""The commands for one's own data. Like the others a few lines over the API; torch is imported only when one of them runs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.commands_ask import issues, reads

own = typer.Typer()

# -- how data are read: the same options wherever data are given -------------------------------------------------------------

Data = Annotated[str, typer.Argument(help="A folder, or a table (.csv .tsv .parquet) or arrays (.npz .npy).")]
Bag = Annotated[str | None, typer.Option(help="Column that says the bag.")]
Label = Annotated[str | None, typer.Option(help="Column with the bag's label.")]
Votes = Annotated[str | None, typer.Option(help="Columns with votes or shares, one per class: a,b,c.")]
Path_ = Annotated[str | None, typer.Option("--path", help="Column with the picture's file.")]
Text = Annotated[str | None, typer.Option(help="Column with a text.")]
Weight = Annotated[str | None, typer.Option(help="Column with the instance's weight, its number of votes.")]
Group = Annotated[str | None, typer.Option(help="Column with the patient, site or county: never split over folds.")]
Truth = Annotated[str | None, typer.Option(help="Column with the instance's own class, for scoring only.")]
Known = Annotated[str | None, typer.Option(help="Column with the instance's own class, given as supervision.")]
X = Annotated[str | None, typer.Option("--x", help="Column with the x coordinate.")]
Y = Annotated[str | None, typer.Option("--y", help="Column with the y coordinate.")]
Id = Annotated[str | None, typer.Option("--id", help="Column with the instance's own name.")]
Features = Annotated[str | None, typer.Option(help="Columns to learn from: a,b,c; default all that have no role.")]
Categories = Annotated[str | None, typer.Option(help="Columns whose numbers are names: a,b,c.")]
Labels = Annotated[str | None, typer.Option(help="A second file with bag and label columns.")]
Classes = Annotated[str | None, typer.Option(help="The classes in their order: a,b,c.")]
Ties = Annotated[str, typer.Option(help="A bag with two winners: split, drop or lowest.")]
Uncounted = Annotated[str | None, typer.Option(help="Classes that never win, such as background: a,b.")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out what cannot be read, and list it.")]
Side = Annotated[int | None, typer.Option(help="Resize pictures to a square of this side.")]
Tile = Annotated[int | None, typer.Option(help="Side of the tiles at the coordinates, where files do not say it.")]
Cache = Annotated[
    Path | None, typer.Option(help="Folder for pictures and slides larger than memory; default $HEADCOUNT_DATA.")
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")]
Method = Annotated[
    str, typer.Option(help="auto, or some of tilt, em_forest, count, forest, logistic or heads, with commas.")
]
Views = Annotated[
    str | None,
    typer.Option(help="Changes that leave a class as it is: digit (no mirror, the default), image, tissue, none."),
]


@own.command()
def fit(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    bag: Bag = None, label: Label = None, votes: Votes = None, path: Path_ = None, text: Text = None, weight: Weight = None,
    group: Group = None, truth: Truth = None, known: Known = None, x: X = None, y: Y = None, id: Id = None,
    features: Features = None, categories: Categories = None, labels: Labels = None, classes: Classes = None,
    ties: Ties = "split", uncounted: Uncounted = None, skip_bad: SkipBad = False, side: Side = None, tile: Tile = None,
    cache: Cache = None,
    method: Method = "auto",
    minutes: Annotated[
        float | None, typer.Option(help="For the whole: with fewer folds, epochs, methods; default no limit.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, over groups of bags.")] = 5,
    head: Annotated[str | None, typer.Option(help="A network with this head (see `headcount heads`).")] = None,
    option: Annotated[list[str] | None, typer.Option("--option", help="An option of the head, NAME=VALUE; repeat.")] = None,
    backbone: Annotated[
        str | None,
        typer.Option(
            help="Of networks: quick, resnet18, mlp, linear; for pictures timm:NAME or torchvision:NAME; default by the data."
        ),
    ] = None,
    frozen: Annotated[
        bool | None,
        typer.Option(
            "--frozen/--trained",
            help="timm, torchvision: features once, all methods on them; or trained. Default frozen, if it has weights.",
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="timm, torchvision: pretrained (may download; the default), none, or FILE.safetensors."),
    ] = None,
    size: Annotated[int | None, typer.Option(help="timm, torchvision: pictures become squares of this side.")] = None,
    views: Views = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Epochs of networks; default by the number of bags.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that is there.")] = False,
) -> None:  # fmt: skip
    """Fit a model to your own bags, cross-validated on their labels; goes on where it stopped."""
    given: dict[str, Any] = dict(locals())
    from headcount import commands_own

    commands_own.fit(data, out, overwrite, given, {k: given[k] for k in (*_HOW, "cache")})


_NET = ("head", "option", "backbone", "frozen", "weights", "size", "views", "epochs")
_HOW = ("method", "minutes", "folds", *_NET, "seed", "device")
_TAKEN = inspect.signature(fit, eval_str=True).parameters
_READING = {n: p.annotation for n, p in _TAKEN.items() if n not in (*_HOW, "data", "out", "overwrite")}


def check(
    data: Data,
    how: dict[str, Any],
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Before any training, in seconds: can instances be learned from these bags' labels, and what would help."""
    from headcount import commands_own

    commands_own.check(data, how, seed, json_)


for _command in (check, issues):  # they read as fit does
    own.command()(reads(_command, _READING))

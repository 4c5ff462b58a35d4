"""The commands for one's own data. Like the others a few lines over the API; torch is imported only when one of them runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.cli.model_commands import issues
from headcount.cli.options import FIT_OPTIONS, Data, Device, with_read_options

own_data_app = typer.Typer()

Method = Annotated[
    str, typer.Option(help="auto, or some of tilt, em_forest, count, forest, logistic or heads, with commas.")
]
Views = Annotated[
    str | None,
    typer.Option(help="Changes that leave a class as it is: digit (no mirror, the default), image, tissue, none."),
]


@own_data_app.command()
@with_read_options(FIT_OPTIONS)
def fit(
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the model.")],
    how: dict[str, Any],
    method: Method = "auto",
    minutes: Annotated[
        float | None, typer.Option(help="For the whole: with fewer folds, epochs, methods; default no limit.")
    ] = None,
    folds: Annotated[int, typer.Option(help="Folds of the cross-validation, over groups of bags.")] = 5,
    head: Annotated[str | None, typer.Option(help="A network with this head (see `headcount heads`).")] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", help="An option of the head, NAME=VALUE; repeat.")
    ] = None,
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
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epochs of networks; default by the number of bags.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    device: Device = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the model that is there.")] = False,
) -> None:
    """Fit a model to your own bags, cross-validated on their labels; goes on where it stopped."""
    from headcount.cli import own_data

    network: dict[str, Any] = {
        **{"head": head, "option": option, "backbone": backbone, "frozen": frozen, "weights": weights, "size": size},
        **{"views": views, "epochs": epochs},
    }
    own_data.fit(
        data, out, overwrite, how, method=method, minutes=minutes, folds=folds, seed=seed, device=device, **network
    )


@own_data_app.command()
@with_read_options(FIT_OPTIONS)
def check(
    data: Data,
    how: dict[str, Any],
    seed: Annotated[int, typer.Option(min=0, help="Of everything that is drawn.")] = 0,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Before any training, in seconds: can instances be learned from these bags' labels, and what would help."""
    from headcount.cli import own_data

    own_data.check(data, how, seed, json_)


own_data_app.command()(issues)  # it needs no model

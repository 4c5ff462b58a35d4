"""The commands that ask a model: predict, evaluate, explain, issues, audit, export. Nothing heavy is imported
before one runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.cli.options import FIT_OPTIONS, Data, Device, with_read_options
from headcount.errors import HeadcountError, check_choice

Model = Annotated[Path, typer.Argument(help="The folder that `headcount fit` wrote.")]
Context = Annotated[
    str,
    typer.Option(
        help="Listen to an instance's bag: auto (as held-out bags decided; never to a bag that was trained on), on or off."
    ),
]
CONTEXT = {"auto": None, "on": True, "off": False}


@with_read_options()
def predict(
    model: Model,
    data: Data,
    out: Annotated[
        Path, typer.Option(help="FILE.csv, .tsv or .parquet; FILE.h5, or a folder for one HDF5 file per bag.")
    ],
    how: dict[str, Any],
    bags: Annotated[Path | None, typer.Option(help="Also a table of the bags: label, shares, intervals.")] = None,
    geojson: Annotated[Path | None, typer.Option(help="Also a folder of GeoJSON for QuPath, one file per bag.")] = None,
    heatmap: Annotated[Path | None, typer.Option(help="Also a folder of heat maps, one PNG per bag.")] = None,
    context: Context = "auto",
    device: Device = "auto",
    launch: Annotated[str, typer.Option(help="here, or ray (a cluster; see docs/how-to/cluster.md).")] = "here",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster: auto, local or host:port; default auto, else local.")
    ] = None,
    gpus_each: Annotated[float, typer.Option(help="Ray: GPUs for each shard, such as 1 or 0.5; 0 asks on CPUs.")] = 0,
) -> None:
    """Say the class of every instance: one output row per input row, in the same order, with your own ids."""
    from headcount.cli import model_actions

    use_context = CONTEXT[check_choice("context", context, CONTEXT)]
    more: dict[str, Any] = {
        "bags": bags,
        "geojson": geojson,
        "heatmap": heatmap,
        "launch": launch,
        "address": address,
        "gpus_each": gpus_each,
    }
    model_actions.predict(model, data, out, use_context=use_context, how=how, device=device, **more)


@with_read_options()
def evaluate(
    model: Model,
    data: Data,
    how: dict[str, Any],
    audit: Annotated[Path | None, typer.Option(help="A sheet of `headcount audit`, filled in.")] = None,
    key: Annotated[Path | None, typer.Option(help="Its key, if it is not beside the sheet.")] = None,
    level: Annotated[float, typer.Option(help="Of the intervals.")] = 0.95,
    json_: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    context: Context = "auto",
    device: Device = "auto",
) -> None:
    """How good a model is: bags by their labels, shares by votes, instances by truth or by an audit."""
    from headcount.cli import model_actions

    if key is not None and audit is None:
        raise HeadcountError("--key belongs to a sheet; give the sheet with --audit")
    use_context = CONTEXT[check_choice("context", context, CONTEXT)]
    model_actions.evaluate(
        model, data, audit=audit, key=key, level=level, use_context=use_context, how=how, device=device, as_json=json_
    )


@with_read_options()
def explain(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The page to write (.html).")],
    how: dict[str, Any],
    bag: Annotated[
        list[str] | None, typer.Option(help="A bag, by name; repeat for more. Default: a few, wrongly said ones first.")
    ] = None,
    device: Device = "auto",
) -> None:
    """Which instances made a bag's label; the most typical and the most doubtful of each class. One HTML page."""
    from headcount.cli import model_actions

    model_actions.explain(model, data, out, bag=bag or (), how=how, device=device)


@with_read_options(FIT_OPTIONS)
def issues(
    data: Data,
    how: dict[str, Any],
    model: Annotated[Path | None, typer.Option(help="Ask this model; default: cross-validated forests.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all bags, ranked (.csv, .tsv, .parquet).")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many to list.")] = 20,
    folds: Annotated[int | None, typer.Option(min=2, max=50, help="Without a model: folds; default 5.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Without a model: seed of the folds; default 0.")] = None,
    device: Device = "auto",
) -> None:
    """Bags whose label looks wrong, ranked."""
    from headcount.cli import model_actions

    model_actions.issues(data, model=model, out=out, top=top, folds=folds, seed=seed, how=how, device=device)


@with_read_options()
def audit(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="SHEET.csv, or a folder for a sheet with pictures.")],
    how: dict[str, Any],
    count: Annotated[int, typer.Option(min=2, max=100_000, help="How many instances.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the draw.")] = 0,
    device: Device = "auto",
) -> None:
    """Draw instances to label by hand, blind to what the model says; `evaluate --audit` then gives the accuracy."""
    from headcount.cli import model_actions

    model_actions.audit(model, data, out, count=count, seed=seed, how=how, device=device)


def export(
    model: Model,
    onnx: Annotated[Path, typer.Option(help="The file to write (.onnx).")],
) -> None:
    """Write the model as ONNX, checked with onnxruntime to answer the same."""
    from headcount.cli import model_actions

    model_actions.export_onnx(model, onnx)


def register(app: typer.Typer) -> None:
    for command in (predict, evaluate, explain, audit, export):
        app.command()(command)

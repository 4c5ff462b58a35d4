"""The commands that use a fitted model: predict, evaluate, explain, audit, export.

Each checks every output path before it predicts. Files are written whole or not at all.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headcount.cli.options import READ_OPTIONS, Data, Device, RayAddress, with_options
from headcount.cli.own_data import load_model, predict_all, read_data
from headcount.errors import HeadcountError, check_choice

if TYPE_CHECKING:
    from headcount.models.fitted import FittedModel

_OUT = "Instances, one per row: FILE.csv, .tsv, .parquet or .h5, or a folder for one HDF5 file per bag."
CONTEXT = {"auto": None, "on": True, "off": False}
app = typer.Typer()
Model = Annotated[Path, typer.Argument(help="The folder that `headcount fit` wrote.")]
_CONTEXT = "Use the rest of the bag as context: auto (if it helped in cross-validation; never on training bags), on, off."
Context = Annotated[str, typer.Option(help=_CONTEXT)]


def require_instance_output(model: FittedModel, command: str) -> None:
    """Refuse what is about single instances, if the model is private."""
    if model.min_bag_size:
        problem = f"{command} writes about single instances, and the model was fitted with --private {model.min_bag_size}"
        raise HeadcountError(f"{problem}; `headcount predict --bags FILE` writes the shares of bags")


@app.command()
@with_options("read_options", READ_OPTIONS)
def predict(
    model: Model,
    data: Data,
    out: Annotated[Path | None, typer.Option(help=_OUT)] = None,
    bags: Annotated[Path | None, typer.Option(help="A table of the bags: label, shares, intervals.")] = None,
    geojson: Annotated[Path | None, typer.Option(help="Also a folder of GeoJSON for QuPath, one file per bag.")] = None,
    heatmap: Annotated[Path | None, typer.Option(help="Also a folder of heat maps, one PNG per bag.")] = None,
    geotiff: Annotated[Path | None, typer.Option(help="Also the classes as a raster, from x and y on a grid (.tif).")] = None,
    crs: Annotated[str | None, typer.Option(help="The coordinate reference system of x and y, such as EPSG:32633.")] = None,
    context: Context = "auto",
    device: Device = "auto",
    launch: Annotated[
        str, typer.Option(help="Where to predict: here, or ray (a cluster; see docs/how-to/cluster.md).")
    ] = "here",
    address: RayAddress = None,
    gpus_each: Annotated[float, typer.Option(help="Ray: GPUs per shard, such as 1 or 0.5; 0 predicts on CPUs.")] = 0,
    *,
    read_options: dict[str, Any],
) -> None:
    """Predict the class of every instance.

    One output row per input row, in the same order, with your own ids.
    """
    from headcount.cli.console import print_message, progress_bar
    from headcount.inference.predict_ray import check_device, remote_predictor
    from headcount.io import commit_together
    from headcount.reporting import export, geo
    from headcount.selection.metadata import share_warnings

    use_context = CONTEXT[check_choice("context", context, CONTEXT)]
    if (target := out or bags) is None:
        raise HeadcountError("nothing to write; give --out for the instances, --bags for the bags, or both")
    as_table = out is None or export.is_table(out)
    if bags is not None:
        export.require_table("--bags", bags)
    export.check_outputs(
        data, model, read_options["labels"], out=out, bags=bags, geojson=geojson, heatmap=heatmap, geotiff=geotiff
    )
    if geotiff is not None:
        geo.load_rasterio(crs)
    elif crs is not None:
        raise HeadcountError("--crs is for --geotiff; name the file to write with --geotiff FILE.tif")
    remote = None
    if check_choice("launcher", launch, ("here", "ray")) == "ray":
        check_device(device, gpus_each)
        remote = remote_predictor(model, address=address, gpus_each=gpus_each)
    elif address is not None or gpus_each:
        raise HeadcountError("--address and --gpus-each are for --launch ray")
    fitted = load_model(model, "cpu" if remote else device)
    for name, path in {"--out": out, "--geojson": geojson, "--heatmap": heatmap, "--geotiff": geotiff}.items():
        if path is not None:
            require_instance_output(fitted, name)
    dataset = read_data(data, read_options, fitted, labels=False)
    if geojson is not None:
        geo.require_coords(dataset, "--geojson", tiles=True)
    if heatmap is not None:
        geo.require_coords(dataset, "--heatmap", tiles=False)
    if geotiff is not None:
        geo.require_coords(dataset, "--geotiff", tiles=False)
    _, note = export.added_columns(dataset, fitted.classes)
    if note:
        print_message(note)
    target.parent.mkdir(parents=True, exist_ok=True)
    with progress_bar("bags") as update:
        show = lambda done, total: update(completed=done, total=total)  # noqa: E731
        predictions = predict_all(fitted, dataset, use_context, scratch=target.parent, on_progress=show, shard_predictor=remote)
    for line in share_warnings(fitted, predictions) if bags is not None else ():
        print_message(line)
    with commit_together():  # all or nothing, OUT last
        if geojson is not None:
            geo.write_geojson(geojson, dataset, predictions)
        if heatmap is not None:
            geo.write_heatmaps(heatmap, dataset, predictions)
        if geotiff is not None:
            geo.write_geotiff(geotiff, dataset, predictions, crs)
        if bags is not None:
            export.write_table(bags, [export.bag_table(dataset, predictions)])
        if out is not None and as_table:
            export.write_table(out, export.prediction_chunks(dataset, predictions))
        elif out is not None:
            export.write_hdf5(out, dataset, predictions)
    for folder in filter(None, (geojson, heatmap)):
        print_message(f"wrote {folder}: {len(list(folder.iterdir())):,} files")
    if geotiff is not None:
        print_message(f"wrote {geotiff}: " + ", ".join(f"{k} {name}" for k, name in enumerate(fitted.classes[:20])))
    if bags is not None:
        print_message(f"wrote {bags}: {len(dataset.bags):,} bags")
    if out is not None:
        missing = dataset.n_rows - len(dataset.rows)
        without = f", {missing:,} of them without a prediction" if missing else ""
        print_message(f"wrote {out}: {dataset.n_rows:,} rows{without}")


@app.command()
@with_options("read_options", READ_OPTIONS)
def evaluate(
    model: Model,
    data: Data,
    audit: Annotated[Path | None, typer.Option(help="A completed sheet of `headcount audit`.")] = None,
    key: Annotated[Path | None, typer.Option(help="The sheet's key file, if it is not beside the sheet.")] = None,
    level: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.95,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
    context: Context = "auto",
    device: Device = "auto",
    *,
    read_options: dict[str, Any],
) -> None:
    """Score a model on labelled data.

    Bags are scored by their labels, shares by votes, instances by truth or by an audit.
    """
    from headcount.cli.console import print_scores
    from headcount.inference import evaluate as scoring
    from headcount.majority.metrics import check_level
    from headcount.reporting import audit_sheet

    if key is not None and audit is None:
        raise HeadcountError("--key belongs to a sheet; give the sheet with --audit")
    use_context = CONTEXT[check_choice("context", context, CONTEXT)]
    check_level(level)
    fitted = load_model(model, device)
    dataset = read_data(data, read_options, fitted, labels=audit is None, truth_suffices=True)
    sheet = None if audit is None else audit_sheet.read_sheet(audit, dataset, fitted.classes, key)
    predictions = predict_all(fitted, dataset, use_context)
    scores: dict[str, Any] = {"model": str(model), "data": str(data), "classes": list(fitted.classes), "level": level}
    scores["trained_on_these"] = bool(predictions.seen_in_training.all())
    scores["bags_trained_on"] = int(predictions.seen_in_training.sum())
    truth = dataset.bags.truth
    if bool(dataset.bags.target.any()):
        scores["bags"] = scoring.evaluate_bags(dataset.bags, predictions, level)
        if scoring.has_votes(dataset.bags):
            scores["shares"] = scoring.evaluate_shares(dataset.bags, predictions)
    if truth is not None and bool((truth >= 0).any()):
        scores["instances"] = scoring.evaluate_instances(dataset.bags, predictions, level)
    if sheet is not None:
        row, true, stratum, stratum_sizes = sheet
        audited = dataset.broadcast(predictions.instance_prediction, -1)[row]
        scores["audit"] = scoring.evaluate_audit(true, audited, stratum, stratum_sizes, fitted.classes, level)
    if as_json:
        print(json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_scores(scores)


@app.command()
@with_options("read_options", READ_OPTIONS)
def explain(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="The page to write (.html).")],
    bag: Annotated[
        list[str] | None, typer.Option(help="A bag, by name; may be repeated. Default: a few, wrongly predicted ones first.")
    ] = None,
    device: Device = "auto",
    *,
    read_options: dict[str, Any],
) -> None:
    """Write an HTML page that explains predictions.

    It shows which instances determined a bag's prediction, typical and ambiguous instances of each class, and for tables which
    columns matter.
    """
    from headcount.cli.console import print_message
    from headcount.io import atomic_write
    from headcount.reporting.export import check_outputs
    from headcount.reporting.model_pages import find_bags, render_explanation

    if out.suffix.lower() not in (".html", ".htm"):
        raise HeadcountError(f"the page is an .html file, got {out}")
    check_outputs(data, model, read_options["labels"], out=out)
    fitted = load_model(model, device)
    require_instance_output(fitted, "explain")
    dataset = read_data(data, read_options, fitted, labels=False)
    shown = find_bags(dataset, bag or ())
    predictions = predict_all(fitted, dataset)
    title = f"Explanation: {Path(data).name}"
    text = render_explanation(fitted, dataset, predictions, shown, title, f"the {fitted.kind} model in {model.name}")
    atomic_write(out, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    print_message(f"wrote {out}")


@app.command()
@with_options("read_options", READ_OPTIONS)
def audit(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="SHEET.csv, or a folder for a sheet with images.")],
    count: Annotated[int, typer.Option(min=2, max=100_000, help="Number of instances.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the sample.")] = 0,
    device: Device = "auto",
    *,
    read_options: dict[str, Any],
) -> None:
    """Sample instances to label by hand.

    The sheet does not show the predictions; `evaluate --audit` turns the completed sheet into an accuracy with an interval.
    """
    from headcount.cli.console import print_message
    from headcount.reporting import audit_sheet
    from headcount.reporting.export import check_outputs

    audit_sheet.check_free(out)
    check_outputs(data, model, read_options["labels"], out=out)
    fitted = load_model(model, device)
    require_instance_output(fitted, "audit")
    dataset = read_data(data, read_options, fitted, labels=False)
    n_drawn, key = audit_sheet.write_sheet(out, dataset, predict_all(fitted, dataset), count, seed)
    sheet = out if out.suffix.lower() == ".csv" else out / "sheet.csv"
    next_command = list(map(str, ("headcount", "evaluate", model, data, "--audit", sheet)))
    for name, value in read_options.items():
        if value:
            next_command += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    print_message(f"wrote {out}: {n_drawn} instances; fill in the column 'label' of {sheet}, then")
    print_message(f"  {shlex.join(next_command)}")
    print_message(f"the predictions are in {key}: open it only afterwards")


@app.command()
def export(model: Model, onnx: Annotated[Path, typer.Option(help="The file to write (.onnx).")]) -> None:
    """Export a model as ONNX.

    The file is written only if onnxruntime gives the same predictions.
    """
    from headcount.cli.console import print_message
    from headcount.models.onnx import export_onnx
    from headcount.reporting.export import check_outputs

    if onnx.suffix.lower() != ".onnx":
        raise HeadcountError(f"the file is an .onnx, got {onnx}")
    check_outputs(None, model, onnx=onnx)
    fitted = load_model(model, "cpu")
    require_instance_output(fitted, "export")
    difference = export_onnx(fitted, onnx)
    without = ", as `predict --context off` makes them" if fitted.use_context else ""
    print_message(f"wrote {onnx}: onnxruntime gives the model's predictions{without} (to {difference:.1g})")

"""The commands ``table`` (class shares of groups, with intervals and bounds, printed and as files) and ``calibrate`` (intervals that
hold, from known shares)."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from headcount.cli.model_commands import Model
from headcount.cli.options import READ_OPTIONS, Data, Device, split_names, with_options
from headcount.cli.own_data import load_model, predict_all, read_data
from headcount.errors import HeadcountError

app = typer.Typer()
_BY = "Columns whose values, or combinations, are the groups: a,b. Default: all instances together."
_ODDS = "Also the range of shares if the odds of a class are wrong by up to this factor for every instance."
_POLYGONS = "GeoJSON with a feature for each bag, for --map; default: points, from the coordinates."


@app.command()
@with_options("read_options", READ_OPTIONS)
def table(
    model: Model,
    data: Data,
    by: Annotated[str | None, typer.Option(help=_BY)] = None,
    of: Annotated[str, typer.Option(help="Shares of all instances, or of those of counted classes: all, counted.")] = "all",
    level: Annotated[float, typer.Option(help="Confidence level of the intervals.")] = 0.9,
    odds: Annotated[float, typer.Option(help=_ODDS)] = 1.5,
    out: Annotated[Path | None, typer.Option(help="Write the table: .csv, .tsv or .parquet.")] = None,
    bags: Annotated[Path | None, typer.Option(help="Also the shares of each group in each bag, as a table.")] = None,
    page: Annotated[Path | None, typer.Option(help="Also a page with the comparison as a figure (.html).")] = None,
    share_map: Annotated[Path | None, typer.Option("--map", help="Also the shares of each bag as a map (.geojson).")] = None,
    polygons: Annotated[Path | None, typer.Option(help=_POLYGONS)] = None,
    polygon_id: Annotated[str | None, typer.Option(help="The property that names the bag; default: the bag's column.")] = None,
    device: Device = "auto",
    *,
    read_options: dict[str, Any],
) -> None:
    """Tabulate the shares of each class by group.

    Estimates with intervals, beside the bounds that the bags' labels and sizes prove.
    """
    from headcount.bags.validation import check_noise
    from headcount.cli.console import console, plain_table, print_line, print_message
    from headcount.errors import check_choice
    from headcount.inference.evaluate import has_votes
    from headcount.inference.share_advice import assess_assumption, merging_advice, steadiness
    from headcount.inference.share_table import OF, suppress_small, tabulate_shares
    from headcount.io import atomic_write, commit_together
    from headcount.majority.metrics import check_level
    from headcount.reporting import export, geo, share_page
    from headcount.selection.metadata import share_warnings

    check_choice("of", of, OF)
    check_level(level)
    for option, path in {"--out": out, "--bags": bags}.items():
        if path is not None:
            export.require_table(option, path)
    for option, path, suffixes in (("--page", page, (".html", ".htm")), ("--map", share_map, (".geojson", ".json"))):
        if path is not None and path.suffix.lower() not in suffixes:
            raise HeadcountError(f"{option} writes {' or '.join(suffixes)}, got {path}")
    if share_map is None and (polygons or polygon_id):
        raise HeadcountError("--polygons and --polygon-id are for --map; name the file to write with --map FILE.geojson")
    if polygons is not None and share_map is not None and os.path.realpath(polygons) == os.path.realpath(share_map):
        raise HeadcountError(f"--map {share_map} would overwrite --polygons; choose another path")
    outputs = {"out": out, "bags": bags, "page": page, "map": share_map}
    export.check_outputs(data, model, read_options["labels"], **outputs)
    fitted = load_model(model, device)
    dataset = read_data(data, read_options, fitted, labels=False)
    of_fit = fitted.metadata.get("data")
    noise = of_fit.get("label_noise") if isinstance(of_fit, dict) else None
    if noise and not has_votes(dataset.bags):
        dataset = replace(dataset, bags=replace(dataset.bags, label_noise=check_noise(noise)))
        print_message(f"the model was fitted to labels of which {noise:.0%} were replaced at random: labels bound no share")
    field = polygon_id or export.bag_column(dataset) or "bag"
    shapes = None if polygons is None else share_page.read_polygons(polygons, field, dataset.bags.names or ())
    if share_map is not None and shapes is None:
        geo.require_coords(dataset, "--map without --polygons", tiles=False)
    columns = split_names(by) or ()
    predictions = predict_all(fitted, dataset, False)  # the table sees to the context: the bag's shares
    groups, in_bags = tabulate_shares(dataset, predictions, columns, of=of, level=level, odds=odds)
    if k := fitted.min_bag_size:
        n_groups = len(groups.group)
        groups, in_bags = suppress_small(groups, in_bags, k)
        left_out = f"{n_groups - len(groups.group):,} of {n_groups - 1:,} groups are left out"
        print_message(f"{left_out}: fewer than {k} instances, or others could be computed; of bags there are whole ones only")
    advice = [assess_assumption(fitted, dataset, predictions), *merging_advice(groups, dataset.bags)]
    for line in (*share_warnings(fitted, predictions), *advice):
        print_message(line)
    labelled = int(dataset.bags.labelled.sum())
    context = {
        "of": of,
        "level": level,
        "odds": odds,
        "steadiness": steadiness(groups),
        "advice": advice,
        "bags": len(dataset.bags),
        "instances": len(dataset.rows),
    }
    context |= {"labelled": labelled, "model": f"the {fitted.kind} model in {model.name}"}
    with commit_together():
        if bags is not None:
            export.write_table(bags, [in_bags.to_arrow()])
        if share_map is not None:
            n = share_page.write_share_map(share_map, in_bags, dataset, shapes, field)
            print_message(f"{n:,} features of {share_map} have shares, of {len(dataset.bags):,} bags")
        if page is not None:
            text = share_page.render_shares(groups, f"Shares: {Path(data).name}", columns, context)
            atomic_write(page, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
        if out is not None:
            export.write_table(out, [groups.to_arrow()])
    names = (
        ", ".join(columns) or "group",
        "choice",
        "share",
        f"{level:.0%} interval",
        f"odds x {odds:g}",
        "bounds by labels",
        "instances",
        "bags",
    )
    shown = plain_table(*names, left=2)
    for row in groups.to_arrow().to_pylist():
        spans = (f"{row[f'{kind}low']:.3f} to {row[f'{kind}high']:.3f}" for kind in ("", "odds_", "bound_"))
        shown.add_row(row["group"], row["choice"], f"{row['share']:.3f}", *spans, f"{row['instances']:,}", f"{row['bags']:,}")
    console.print(shown)
    for line in steadiness(groups):
        print_line(line)
    for path in filter(None, outputs.values()):
        print_message(f"wrote {path}")


@app.command()
@with_options("read_options", READ_OPTIONS)
def calibrate(
    model: Model,
    data: Data,
    out: Annotated[Path, typer.Option(help="Folder for the calibrated model.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing model.")] = False,
    device: Device = "auto",
    *,
    read_options: dict[str, Any],
) -> None:
    """Make intervals of shares hold, by bags of known shares.

    DATA are about thirty bags or more, drawn at random from those to be predicted, with counted votes (--labels, --votes) or the
    class of every instance (--truth). Bags without either are not used.
    """
    from headcount.cli.console import print_message
    from headcount.inference.calibrate import calibrate_model, describe_calibration
    from headcount.loading import explain_read_errors, open_file
    from headcount.models import serialization

    serialization.check_writable(out, overwrite)
    fitted = load_model(model, device)
    dataset = read_data(data, read_options, fitted, labels=True, truth_suffices=True)
    calibrated = calibrate_model(fitted, dataset)
    documents = {name: "" for name in ("report.html", "MODEL_CARD.md") if (model / name).exists()}
    for name in documents:
        with explain_read_errors(model / name, "the folder that headcount fit wrote"), open_file(model / name) as f:
            documents[name] = f.read().decode()
    sentence, title = describe_calibration(calibrated), "\n## Intervals of shares\n"
    documents["MODEL_CARD.md"] = f"{documents.get('MODEL_CARD.md', '').partition(title)[0]}{title}\n{sentence}\n"
    calibrated.save(out, documents, overwrite)
    print_message(sentence)
    print_message(f"model in {out}")

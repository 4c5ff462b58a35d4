"""What one asks of a fitted model: predict, evaluate, explain, issues, audit, export. Paths and words in; files and tables out.

Each service reads the data as the model's were read, says what was understood, checks every place it will write to, and only
then asks. Files are whole or absent.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.cli.predicting import is_training_data, load_model, predict_all, read_for_model
from headcount.errors import HeadcountError, check_choice
from headcount.inference import evaluate as evaluation
from headcount.inference import label_issues
from headcount.inference.predict import Predictions, ShardPredictor
from headcount.inference.predict_ray import remote_predictor
from headcount.inference.ray_cluster import check_device
from headcount.io import atomic_write
from headcount.majority.intervals import check_level
from headcount.readers import BagDataset
from headcount.reporting import audit_sheet, export, geo
from headcount.reporting import explain as explaining
from headcount.reporting.console import print_label_issues, print_message, print_scores
from headcount.reporting.output_paths import check_outputs
from headcount.reporting.progress import bags_bar
from headcount.selection.fit_warnings import share_warnings

# -- predict ----------------------------------------------------------------------------------------------------------------


def predict(
    model: Path,
    data: str,
    out: Path,
    *,
    bags: Path | None = None,
    geojson: Path | None = None,
    heatmap: Path | None = None,
    use_context: bool | None = None,
    how: Mapping[str, Any],
    device: str = "auto",
    launch: str = "here",
    address: str | None = None,
    gpus_each: float = 0,
) -> Predictions:
    """Every instance's class and probabilities, one output row per input row, and what else was asked for. ``launch``: here,
    or ray, on the cluster at ``address``."""
    kind = export.output_kind(out)
    if kind in ("hdf5", "folder"):
        export.require_h5py()
    if bags is not None and bags.suffix.lower() not in export.TABLE_SUFFIXES:
        raise HeadcountError(f"--bags writes a table, {', '.join(export.TABLE_SUFFIXES)}; got {bags}")
    check_outputs(data, model, how.get("labels"), out=out, bags=bags, geojson=geojson, heatmap=heatmap)
    shard_predictor = make_predictor(model, launch, address, gpus_each, device)
    fitted = load_model(model, "cpu" if shard_predictor else device)
    reading = read_for_model(fitted, data, how, labels=False)
    if geojson is not None:
        geo.require_coords(reading, "--geojson", tiles=True)
    if heatmap is not None:
        geo.require_coords(reading, "--heatmap", tiles=False)
    _, note = export.added_columns(reading, fitted.classes)
    if note:
        print_message(note)
    out.parent.mkdir(parents=True, exist_ok=True)
    with bags_bar() as on_progress:
        predictions = predict_all(
            fitted, reading, use_context, scratch=out.parent, on_progress=on_progress, shard_predictor=shard_predictor
        )
    for line in share_warnings(fitted, predictions) if bags is not None else ():
        print_message(line)
    _write(reading, predictions, kind, out, bags, geojson, heatmap)
    return predictions


def make_predictor(
    model: Path, launch: str, address: str | None, gpus_each: float, device: str
) -> ShardPredictor | None:
    """Who asks: nobody but us, or a Ray cluster."""
    if check_choice("launcher", launch, ("here", "ray")) == "ray":
        check_device(device, gpus_each)
        return remote_predictor(model, address=address, gpus_each=gpus_each)
    if address is not None or gpus_each:
        raise HeadcountError("--address and --gpus-each are for --launch ray")
    return None


def _write(
    reading: BagDataset,
    predictions: Predictions,
    kind: str,
    out: Path,
    bags: Path | None,
    geojson: Path | None,
    heatmap: Path | None,
) -> None:
    """The pictures first, the tables last: if anything fails, what was written before it is taken away again."""
    keep = False
    with ExitStack() as undo:
        for path, write in ((geojson, geo.write_geojson), (heatmap, geo.write_heatmaps)):
            if path is not None:
                made = write(path, reading, predictions)
                undo.callback(lambda path=path: keep or shutil.rmtree(path))
                print_message(f"wrote {path}: {made:,} files")
        if bags is not None:
            undo.enter_context(export.atomic_table(bags, [export.bag_table(reading, predictions)]))
        if kind == "table":
            export.write_table(out, export.prediction_chunks(reading, predictions))
        else:
            (export.write_hdf5 if kind == "hdf5" else export.write_hdf5_folder)(out, reading, predictions)
        keep = True
    if bags is not None:
        print_message(f"wrote {bags}: {len(reading.bags):,} bags")
    blank = reading.n_rows - len(reading.rows)
    empty = f", {blank:,} of them without a prediction" if blank else ""
    print_message(f"wrote {out}: {reading.n_rows:,} rows{empty}")


# -- evaluate ---------------------------------------------------------------------------------------------------------------


def evaluate(
    model: Path,
    data: str,
    *,
    audit: Path | None = None,
    key: Path | None = None,
    level: float = 0.95,
    use_context: bool | None = None,
    how: Mapping[str, Any],
    device: str = "auto",
    as_json: bool = False,
) -> dict[str, Any]:
    """Bags by their labels, shares by votes, instances by truth or by a sheet filled in by hand."""
    check_level(level)
    fitted = load_model(model, device)
    reading = read_for_model(fitted, data, how, labels=audit is None, or_truth=True)
    sheet = None if audit is None else audit_sheet.read_sheet(audit, reading, fitted.classes, key)
    predictions = predict_all(fitted, reading, use_context)
    scores: dict[str, Any] = {"model": str(model), "data": str(data), "classes": list(fitted.classes), "level": level}
    scores["trained_on_these"] = bool(predictions.seen_in_training.all()) or is_training_data(fitted, reading)
    scores["bags_trained_on"] = int(predictions.seen_in_training.sum())
    if bool(reading.bags.target.any()):
        scores["bags"] = evaluation.evaluate_bags(reading.bags, predictions, level)
        if evaluation.has_votes(reading.bags):
            scores["shares"] = evaluation.evaluate_shares(reading.bags, predictions)
    if reading.bags.truth is not None and bool((reading.bags.truth >= 0).any()):
        scores["instances"] = evaluation.evaluate_instances(reading.bags, predictions, level)
    if sheet is not None:
        place = np.full(reading.n_rows, -1)
        place[reading.rows] = np.arange(len(reading.rows))
        answer = predictions.instance_probabilities[place[sheet.row]].argmax(1)
        scores["audit"] = evaluation.evaluate_audit(
            sheet.true, answer, sheet.stratum, sheet.stratum_sizes, fitted.classes, level
        )
    if as_json:
        print(json.dumps(scores, indent=1, ensure_ascii=False, allow_nan=False))
    else:
        print_scores(scores)
    return scores


# -- explain, issues, audit, export -----------------------------------------------------------------------------------------


def explain(
    model: Path,
    data: str,
    out: Path,
    *,
    bag: Sequence[str] = (),
    how: Mapping[str, Any],
    device: str = "auto",
) -> None:
    """A page about bags and classes."""
    if out.suffix.lower() not in (".html", ".htm"):
        raise HeadcountError(f"the page is an .html file, got {out}")
    check_outputs(data, model, how.get("labels"), out=out)
    fitted = load_model(model, device)
    reading = read_for_model(fitted, data, how, labels=False)
    which = explaining.find_bags(reading, bag)
    predictions = predict_all(fitted, reading)
    title = f"Why: {Path(data).name}"
    text = explaining.render_explanation(reading, predictions, which, title, f"the {fitted.kind} in {Path(model).name}")
    atomic_write(out, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    print_message(f"wrote {out}")


def issues(
    data: str,
    *,
    model: Path | None = None,
    out: Path | None = None,
    top: int = 20,
    folds: int | None = None,
    seed: int | None = None,
    how: Mapping[str, Any],
    device: str = "auto",
) -> pa.Table:
    """Bags whose label looks wrong, the likeliest first. ``folds`` (5) and ``seed`` (0) are for forests; a model has its own
    columns and classes."""
    own = {"folds": folds, "seed": seed, **{k: how.get(k) for k in ("features", "categories", "classes", "uncounted")}}
    if model is not None and (idle := [name for name, value in own.items() if value not in (None, ())]):
        raise HeadcountError(f"--{idle[0]} is for judging without a model; leave it out, or leave out --model")
    folds, seed = label_issues.FOLDS if folds is None else folds, seed or 0
    if out is not None and out.suffix.lower() not in export.TABLE_SUFFIXES:
        raise HeadcountError(f"--out writes a table, {', '.join(export.TABLE_SUFFIXES)}; got {out}")
    check_outputs(data, model, how.get("labels"), out=out)
    fitted = None if model is None else load_model(model, device)
    reading = read_for_model(fitted, data, how, labels=True)
    if fitted is None:
        print_message(
            f"judged by {folds} random forests of {label_issues.TREES} trees on the bags' labels, each bag by one that never saw it"
        )
        p = label_issues.cross_val_bag_probabilities(reading, folds, seed)
    else:
        predictions = predict_all(fitted, reading)
        if predictions.seen_in_training.any() or is_training_data(fitted, reading):
            print_message(
                "it may have learned wrong labels too; without --model each bag is judged by models that never saw it"
            )
        p = predictions.bag_probabilities
    issues_table = label_issues.find_label_issues(reading.bags, p)
    if out is not None:
        export.write_table(out, [issues_table])
        print_message(f"wrote {out}: {issues_table.num_rows:,} bags")
    print_label_issues(issues_table, top)
    return issues_table


def audit(
    model: Path,
    data: str,
    out: Path,
    *,
    count: int = 100,
    seed: int = 0,
    how: Mapping[str, Any],
    device: str = "auto",
) -> None:
    """A sheet of instances to label by hand."""
    audit_sheet.check_free(out)
    check_outputs(data, model, how.get("labels"), out=out)
    fitted = load_model(model, device)
    reading = read_for_model(fitted, data, how, labels=False)
    drawn, key = audit_sheet.write_sheet(out, reading, predict_all(fitted, reading), count, seed)
    sheet = out if out.suffix.lower() == ".csv" else out / "sheet.csv"
    print_message(f"wrote {out}: {drawn} instances; fill in the column 'label' of {sheet}, then")
    print_message(f"  headcount evaluate {shlex.join(map(str, (model, data, '--audit', sheet)))}{_as_options(how)}")
    print_message(f"what the model said is in {key}: look at it afterwards")


def _as_options(how: Mapping[str, Any]) -> str:
    """The options that say how data are read, as they were typed."""
    text_so_far = ""
    for name, value in how.items():
        if value:
            text = ",".join(map(_in_quotes, value)) if isinstance(value, tuple) else str(value)
            text_so_far += f" --{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(text)}")
    return text_so_far


def _in_quotes(name: str) -> str:
    """A name as cli/options.py takes it in a list: in quotes if it has a comma of its own."""
    inner = name.replace('"', '""')
    return f'"{inner}"' if "," in name else name


def export_onnx(model: Path, out: Path) -> None:
    """The network, checked to answer the same."""
    from headcount.models import onnx

    if out.suffix.lower() != ".onnx":
        raise HeadcountError(f"the file is an .onnx, got {out}")
    check_outputs(None, model, onnx=out)
    off = onnx.export_onnx(load_model(model, "cpu"), out)
    print_message(f"wrote {out}: onnxruntime answers as the model does (to {off:.1g})")

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

from headcount import auditing
from headcount.answering import answered, opened, read_as, seen
from headcount.data.read import Reading
from headcount.errors import HeadcountError, choose
from headcount.files import write_whole
from headcount.judging import doubts, evaluation
from headcount.judging.answers import Each, Said
from headcount.judging.cautions import of_shares
from headcount.judging.intervals import check_level
from headcount.judging.rays import agreed
from headcount.judging.shards import asker
from headcount.showing import explain as explaining
from headcount.showing import export, places
from headcount.showing.ask_tables import print_doubts, print_scores, say
from headcount.showing.outputs import free_places
from headcount.showing.progress import bags_bar

# -- predict ----------------------------------------------------------------------------------------------------------------


def predict(
    model: Path,
    data: str,
    out: Path,
    *,
    bags: Path | None = None,
    geojson: Path | None = None,
    heatmap: Path | None = None,
    listen: bool | None = None,
    how: Mapping[str, Any],
    device: str = "auto",
    launch: str = "here",
    address: str | None = None,
    gpus_each: float = 0,
) -> Said:
    """Every instance's class and probabilities, one output row per input row, and what else was asked for. ``launch``: here,
    or ray, on the cluster at ``address``."""
    kind = export.kind_of(out)
    if kind in ("hdf5", "folder"):
        export.hdf5()
    if bags is not None and bags.suffix.lower() not in export.TABLES:
        raise HeadcountError(f"--bags writes a table, {', '.join(export.TABLES)}; got {bags}")
    free_places(data, model, how.get("labels"), out=out, bags=bags, geojson=geojson, heatmap=heatmap)
    each = asker_of(model, launch, address, gpus_each, device)
    fitted = opened(model, "cpu" if each else device)
    reading = read_as(fitted, data, how, labels=False)
    if geojson is not None:
        places.need_coords(reading, "--geojson", tiles=True)
    if heatmap is not None:
        places.need_coords(reading, "--heatmap", tiles=False)
    _, note = export.own_names(reading, fitted.classes)
    if note:
        say(note)
    out.parent.mkdir(parents=True, exist_ok=True)
    with bags_bar() as watch:
        said = answered(fitted, reading, listen, scratch=out.parent, watch=watch, each=each)
    for line in of_shares(fitted, said) if bags is not None else ():
        say(line)
    _write(reading, said, kind, out, bags, geojson, heatmap)
    return said


def asker_of(model: Path, launch: str, address: str | None, gpus_each: float, device: str) -> Each | None:
    """Who asks: nobody but us, or a Ray cluster."""
    if choose("launcher", launch, ("here", "ray")) == "ray":
        agreed(device, gpus_each)
        return asker(model, address=address, gpus_each=gpus_each)
    if address is not None or gpus_each:
        raise HeadcountError("--address and --gpus-each are for --launch ray")
    return None


def _write(
    reading: Reading, said: Said, kind: str, out: Path, bags: Path | None, geojson: Path | None, heatmap: Path | None
) -> None:
    """The pictures first, the tables last: if anything fails, what was written before it is taken away again."""
    keep = False
    with ExitStack() as undo:
        for path, write in ((geojson, places.write_geojson), (heatmap, places.write_heatmaps)):
            if path is not None:
                made = write(path, reading, said)
                undo.callback(lambda path=path: keep or shutil.rmtree(path))
                say(f"wrote {path}: {made:,} files")
        if bags is not None:
            undo.enter_context(export.tables_beside(bags, [export.bag_table(reading, said)]))
        if kind == "table":
            export.write_tables(out, export.row_chunks(reading, said))
        else:
            (export.write_hdf5 if kind == "hdf5" else export.write_hdf5_folder)(out, reading, said)
        keep = True
    if bags is not None:
        say(f"wrote {bags}: {len(reading.laid):,} bags")
    blank = reading.inputs - len(reading.rows)
    empty = f", {blank:,} of them without a prediction" if blank else ""
    say(f"wrote {out}: {reading.inputs:,} rows{empty}")


# -- evaluate ---------------------------------------------------------------------------------------------------------------


def evaluate(
    model: Path,
    data: str,
    *,
    audit: Path | None = None,
    key: Path | None = None,
    level: float = 0.95,
    listen: bool | None = None,
    how: Mapping[str, Any],
    device: str = "auto",
    as_json: bool = False,
) -> dict[str, Any]:
    """Bags by their labels, shares by votes, instances by truth or by a sheet filled in by hand."""
    check_level(level)
    fitted = opened(model, device)
    reading = read_as(fitted, data, how, labels=audit is None, or_truth=True)
    sheet = None if audit is None else auditing.read_sheet(audit, reading, fitted.classes, key)
    said = answered(fitted, reading, listen)
    scores: dict[str, Any] = {"model": str(model), "data": str(data), "classes": list(fitted.classes), "level": level}
    scores["trained_on_these"] = bool(said.met.all()) or seen(fitted, reading)
    scores["bags_trained_on"] = int(said.met.sum())
    if bool(reading.laid.target.any()):
        scores["bags"] = evaluation.bags_scored(reading.laid, said, level)
        if evaluation.has_votes(reading.laid):
            scores["shares"] = evaluation.shares_scored(reading.laid, said)
    if reading.laid.truth is not None and bool((reading.laid.truth >= 0).any()):
        scores["instances"] = evaluation.instances_scored(reading.laid, said, level)
    if sheet is not None:
        place = np.full(reading.inputs, -1)
        place[reading.rows] = np.arange(len(reading.rows))
        answer = said.p[place[sheet.row]].argmax(1)
        scores["audit"] = evaluation.audit_scored(sheet.true, answer, sheet.stratum, sheet.held, fitted.classes, level)
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
    free_places(data, model, how.get("labels"), out=out)
    fitted = opened(model, device)
    reading = read_as(fitted, data, how, labels=False)
    which = explaining.named_bags(reading, bag)
    said = answered(fitted, reading)
    title = f"Why: {Path(data).name}"
    text = explaining.explained(reading, said, which, title, f"the {fitted.kind} in {Path(model).name}")
    write_whole(out, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    say(f"wrote {out}")


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
    folds, seed = doubts.FOLDS if folds is None else folds, seed or 0
    if out is not None and out.suffix.lower() not in export.TABLES:
        raise HeadcountError(f"--out writes a table, {', '.join(export.TABLES)}; got {out}")
    free_places(data, model, how.get("labels"), out=out)
    fitted = None if model is None else opened(model, device)
    reading = read_as(fitted, data, how, labels=True)
    if fitted is None:
        say(
            f"judged by {folds} random forests of {doubts.TREES} trees on the bags' labels, each bag by one that never saw it"
        )
        p = doubts.cross_fitted(reading, folds, seed)
    else:
        said = answered(fitted, reading)
        if said.met.any() or seen(fitted, reading):
            say("it may have learned wrong labels too; without --model each bag is judged by models that never saw it")
        p = said.bag
    found = doubts.doubtful(reading.laid, p)
    if out is not None:
        export.write_tables(out, [found])
        say(f"wrote {out}: {found.num_rows:,} bags")
    print_doubts(found, top)
    return found


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
    auditing.free(out)
    free_places(data, model, how.get("labels"), out=out)
    fitted = opened(model, device)
    reading = read_as(fitted, data, how, labels=False)
    drawn, key = auditing.write_sheet(out, reading, answered(fitted, reading), count, seed)
    sheet = out if out.suffix.lower() == ".csv" else out / "sheet.csv"
    say(f"wrote {out}: {drawn} instances; fill in the column 'label' of {sheet}, then")
    say(f"  headcount evaluate {shlex.join(map(str, (model, data, '--audit', sheet)))}{_typed(how)}")
    say(f"what the model said is in {key}: look at it afterwards")


def _typed(how: Mapping[str, Any]) -> str:
    """The options that say how data are read, as they were typed."""
    said = ""
    for name, value in how.items():
        if value:
            text = ",".join(map(_in_quotes, value)) if isinstance(value, tuple) else str(value)
            said += f" --{name.replace('_', '-')}" + ("" if value is True else f" {shlex.quote(text)}")
    return said


def _in_quotes(name: str) -> str:
    """A name as cli_options.py takes it in a list: in quotes if it has a comma of its own."""
    inner = name.replace('"', '""')
    return f'"{inner}"' if "," in name else name


def to_onnx(model: Path, out: Path) -> None:
    """The network, checked to answer the same."""
    from headcount.models import onnx

    if out.suffix.lower() != ".onnx":
        raise HeadcountError(f"the file is an .onnx, got {out}")
    free_places(None, model, onnx=out)
    off = onnx.export(opened(model, "cpu"), out)
    say(f"wrote {out}: onnxruntime answers as the model does (to {off:.1g})")

"""An audit sheet: a sample of instances to label by hand without seeing predictions, and the way back to an estimate.

sheet.csv   item, the user's own columns, the content of the instance, and an empty column ``label`` to fill in
key.json    the input row of each item, its stratum and prediction, and the sizes of the strata
index.html  the same sheet with pictures, if written to a folder
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.inference import evaluate
from headcount.io import atomic_folder, atomic_write, commit_together
from headcount.loading import explain_read_errors, open_file, read_json
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.readers.tables import open_table
from headcount.reporting.export import write_table
from headcount.reporting.render import render_template, view_instance

FORMAT = 1
_SIDE = 192  # pixels of a picture
_MAX_TEXT = 20_000  # characters: annotators read the whole text
_BLANK = ("", "?", "unsure", "skip")


def write_sheet(out: Path, dataset: BagDataset, predictions: Predictions, count: int, seed: int) -> tuple[int, Path]:
    """Draw a sample and write its sheet and key; returns the size of the sample and the path of the key."""
    generator = np.random.default_rng([seed, 4099])
    sample = evaluate.draw_sample(predictions.instance_prediction, predictions.confidence, count, generator)
    views = [view_instance(dataset, i, _SIDE, _MAX_TEXT) for i in sample.instance.tolist()]
    rows = _sheet_rows(views)
    p, classes = predictions.instance_probabilities[sample.instance], predictions.classes
    weight = evaluate.stratum_weights(sample.stratum, sample.stratum_sizes)
    columns = (dataset.rows[sample.instance], sample.stratum, weight, p.argmax(1), p.max(1))
    data = {
        "format": FORMAT,
        "note": "predictions of the model: do not look at them before the sheet is filled in",
        "data": dataset.instances_hash,
        "classes": list(classes),
        "seed": seed,
        "held": sample.stratum_sizes.tolist(),
        "items": [
            {"item": n, "row": row, "stratum": stratum, "weight": weight, "prediction": classes[k], "p": round(best, 6)}
            for n, (row, stratum, weight, k, best) in enumerate(zip(*(c.tolist() for c in columns), strict=True), 1)
        ],
    }
    key = json.dumps(data, indent=1).encode("utf-8", "backslashreplace")
    check_free(out)
    if out.suffix.lower() == ".csv":
        path = key_path(out)
        with commit_together():  # the sheet last: without its key the work on it would be lost
            atomic_write(path, lambda f: f.write(key))
            write_table(out, [rows])
        return len(views), path
    items, pictures = list(enumerate(views, 1)), any(v.picture for v in views)
    with atomic_folder(out) as part:
        text = render_template("sheet.html", items=items, classes=classes, pictures=pictures)
        write_table(part / "sheet.csv", [rows])
        atomic_write(part / "index.html", lambda f: f.write(text.encode("utf-8", "backslashreplace")))
        atomic_write(part / "key.json", lambda f: f.write(key))
    return len(views), out / "key.json"


def check_free(out: Path) -> None:
    """Refuse a path where a sheet cannot be written, or where one is that may have been filled in."""
    if out.suffix.lower() == ".csv":
        if os.path.lexists(out):  # a key without its sheet is what an interrupted audit left; it is replaced
            raise HeadcountError(f"{out} is there already; choose another name, or move it away")
    elif out.suffix and not out.is_dir():
        raise HeadcountError(f"{out} ends in {out.suffix}; give SHEET.csv, or a folder for a sheet with pictures")


def key_path(sheet: Path) -> Path:
    """The key of a sheet: key.json in its folder, or beside a/mine.csv a/mine.key.json."""
    in_folder = sheet.with_name("key.json")
    return in_folder if sheet.name == "sheet.csv" and in_folder.exists() else sheet.with_suffix(".key.json")


def _sheet_rows(views: Sequence[SimpleNamespace]) -> pa.Table:
    """The content of the instances; columns that would collide with ours are renamed."""
    values = [dict(v.ids + v.values) for v in views]
    columns: dict[str, Any] = {"item": np.arange(1, len(views) + 1)}
    for name in dict.fromkeys(name for v in values for name in v):
        column = name
        while column in columns or column in ("label", "text"):
            column = f"data_{column}"
        columns[column] = pa.array([v.get(name) for v in values], pa.string())
    if any(v.text for v in views):
        columns["text"] = pa.array([v.text for v in views], pa.string())
    return pa.table({**columns, "label": pa.nulls(len(views), pa.string())})


def read_sheet(path: Path, dataset: BagDataset, classes: tuple[str, ...], key: Path | None = None) -> tuple[np.ndarray, ...]:
    """A sheet filled in by hand, and its key: (n,) input row of each item, class (-1 where left blank) and stratum; (H,) sizes of
    the strata. Errors name the row of the sheet."""
    key = key or key_path(path)
    row, stratum, stratum_sizes = _read_key(key, dataset, classes)
    with explain_read_errors(path, "the sheet that `headcount audit` wrote, filled in"):
        open_file(path).close()  # a pipe would block, and a device has no end
    source = open_table(path, verbatim=True)
    origin = source.origin
    for name in ("item", "label"):
        if name not in source:
            raise HeadcountError(f"{origin} has no column {name!r}; it is not a sheet that `headcount audit` wrote")
    columns = (source.table.column(name).to_pylist() for name in ("item", "label"))
    items, labels = (["" if v is None else str(v).strip() for v in column] for column in columns)
    true, seen, number = np.full(len(row), -1), set(), {c: k for k, c in enumerate(classes)}
    for r, (item, label) in enumerate(zip(items, labels, strict=True), 1):
        if not item.isdecimal() or not 1 <= int(item) <= len(row):
            raise HeadcountError(f"{origin} row {r}: item {item!r} is none of the {len(row)} in {key}")
        if int(item) in seen:
            raise HeadcountError(f"{origin} row {r}: item {item} appears twice; keep one of them")
        seen.add(int(item))
        if label.lower() in _BLANK and label not in number:
            continue
        if label not in number:
            raise HeadcountError(f"{origin} row {r}: {label!r} is none of the classes {', '.join(classes)}")
        true[int(item) - 1] = number[label]
    if not (true >= 0).any():
        raise HeadcountError(f"{origin}: the column 'label' is empty; fill in the class of each item")
    return row, true, stratum, stratum_sizes


_KEY = {"format": int, "data": str, "classes": [str], "held": [int], "items": [{"item": int, "row": int, "stratum": int}]}


def _read_key(path: Path, dataset: BagDataset, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row and stratum of each item, and the sizes of the strata."""
    data = read_json(path, _KEY, "the key that `headcount audit` wrote with the sheet, by --key if it is elsewhere")
    row, stratum, item = (np.array([i[k] for i in data["items"]], int) for k in ("row", "stratum", "item"))
    sizes, instances_hash, key_classes = np.array(data["held"], int), data["data"], data["classes"]
    intact = data["format"] == FORMAT and len(row) > 0 and (item == np.arange(1, len(row) + 1)).all()
    intact = intact and 0 <= stratum.min() <= stratum.max() < len(sizes)
    if not intact or (np.bincount(stratum, minlength=len(sizes)) > sizes).any() or sizes.min() < 1 or sizes.sum() > 1 << 53:
        raise HeadcountError(f"{path} is not the key of a sheet, or was changed")
    if instances_hash != dataset.instances_hash:
        raise HeadcountError(f"{path} belongs to a sheet drawn from other data; give the data the sheet was drawn from")
    if set(key_classes) != set(classes):
        raise HeadcountError(f"{path} is of a model with classes {', '.join(key_classes)}, this one has {', '.join(classes)}")
    if row.min() < 0 or not np.isin(row, dataset.rows).all():
        raise HeadcountError(f"{path} names input rows that were not read")
    return row, stratum, sizes

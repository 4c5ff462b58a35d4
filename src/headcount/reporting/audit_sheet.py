"""An audit sheet: a hundred instances to label by hand, blind to what the model says, and the way back to an estimate.

    sheet.csv   item, the user's own columns, what there is to see, and an empty column ``label`` to fill in
    key.json    which input row each item is, its stratum, what the model said, and how many instances each stratum holds
    index.html  the same sheet with pictures, for a folder

``--out SHEET.csv`` writes SHEET.csv and SHEET.key.json; ``--out FOLDER`` writes all three into the folder.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.inference import audit
from headcount.inference.predict import Predictions
from headcount.io import atomic_folder, atomic_write
from headcount.readers import BagDataset
from headcount.readers.columns import ColumnRoles
from headcount.readers.raw_data import ErrorPolicy
from headcount.readers.tables import open_table
from headcount.reporting.export import write_table
from headcount.reporting.templates import InstanceView, render_template, view_instance

FORMAT = 1
_SIDE = 192
_TEXT = 20_000  # characters: who is to name its class reads all of it
_BLANK = ("", "?", "unsure", "skip")


class AuditSheet(NamedTuple):
    """A sheet that came back."""

    row: np.ndarray  # (n,) input row of each item
    true: np.ndarray  # (n,) class number, -1 where nothing was filled in
    stratum: np.ndarray  # (n,)
    stratum_sizes: np.ndarray  # (H,)


def write_sheet(out: Path, dataset: BagDataset, predictions: Predictions, count: int, seed: int) -> tuple[int, Path]:
    """Draw, and write sheet and key; how many were drawn, and where the key is."""
    drawn = audit.draw_sample(
        predictions.instance_prediction, predictions.confidence, count, np.random.default_rng([seed, 4099])
    )
    looks = [view_instance(dataset, int(i), _SIDE, _TEXT) for i in drawn.instance]
    key = json.dumps(_key(dataset, predictions, drawn, seed), indent=1).encode("utf-8", "backslashreplace")
    check_free(out)
    if out.suffix.lower() == ".csv":
        atomic_write(key_path(out), lambda f: f.write(key))
        try:
            write_table(out, [_rows(looks)])
        except BaseException:  # a key without its sheet is no use
            key_path(out).unlink(missing_ok=True)
            raise
        return len(drawn.instance), key_path(out)
    with atomic_folder(out) as part:
        text = render_template(
            "sheet.html",
            items=list(enumerate(looks, 1)),
            classes=predictions.classes,
            pictures=any(s.picture for s in looks),
        )
        write_table(part / "sheet.csv", [_rows(looks)])
        atomic_write(part / "index.html", lambda f: f.write(text.encode("utf-8", "backslashreplace")))
        atomic_write(part / "key.json", lambda f: f.write(key))
    return len(drawn.instance), out / "key.json"


def check_free(out: Path) -> None:
    """Refuse a place where a sheet cannot be, or where one is: somebody may have filled it in."""
    if out.suffix.lower() == ".csv":
        for path in (out, key_path(out)):
            if path.exists():
                raise HeadcountError(f"{path} is there already; choose another name, or move it away")
    elif out.suffix and not out.is_dir():
        raise HeadcountError(f"{out} ends in {out.suffix}; give SHEET.csv, or a folder for a sheet with pictures")


def key_path(sheet: Path) -> Path:
    """The key beside a sheet.

    >>> str(key_path(Path("a/sheet.csv"))), str(key_path(Path("a/mine.csv")))
    ('a/sheet.key.json', 'a/mine.key.json')
    """
    inside = sheet.with_name("key.json")
    return inside if sheet.name == "sheet.csv" and inside.exists() else sheet.with_suffix(".key.json")


def _rows(looks: list[InstanceView]) -> pa.Table:
    """What there is to see, under names that do not run into our two."""
    names = list(dict.fromkeys(name for s in looks for name, _ in s.ids + s.values))
    columns: dict[str, Any] = {"item": np.arange(1, len(looks) + 1)}
    for name in names:
        shown = [dict(s.ids + s.values).get(name) for s in looks]
        own = name
        while own in columns or own in ("label", "text"):
            own = f"data_{own}"
        columns[own] = pa.array(shown, pa.string())
    if any(s.text for s in looks):
        columns["text"] = pa.array([s.text for s in looks], pa.string())
    return pa.table({**columns, "label": pa.nulls(len(looks), pa.string())})


def _key(reading: BagDataset, said: Predictions, drawn: audit.AuditSample, seed: int) -> dict[str, Any]:
    p = said.instance_probabilities[drawn.instance]
    weight = drawn.weight
    items = [
        {"item": n + 1, "row": int(reading.rows[i]), "stratum": int(drawn.stratum[n]), "weight": float(weight[n]),
         "prediction": said.classes[int(p[n].argmax())], "p": round(float(p[n].max()), 6)}
        for n, i in enumerate(drawn.instance.tolist())
    ]  # fmt: skip
    return {
        "format": FORMAT,
        "note": "what the model said: do not look before the sheet is filled in",
        "data": reading.instances_hash,
        "classes": list(said.classes),
        "seed": seed,
        "held": drawn.stratum_sizes.tolist(),
        "items": items,
    }


# -- back -------------------------------------------------------------------------------------------------------------------


def read_sheet(path: Path, dataset: BagDataset, classes: tuple[str, ...], key: Path | None = None) -> AuditSheet:
    """A sheet filled in by hand, with its key; every complaint names the row."""
    key = key or key_path(path)
    row, stratum, held = _read_key(key, dataset, classes)
    table, where, _ = open_table(path, ColumnRoles(), ErrorPolicy(False), verbatim=True)
    for name in ("item", "label"):
        if name not in table.column_names:
            raise HeadcountError(f"{where} has no column {name!r}; it is not a sheet that `headcount audit` wrote")
    numbers, words = ([_word(v) for v in table.column(n).to_pylist()] for n in ("item", "label"))
    true = np.full(len(row), -1)
    seen: set[int] = set()
    place = {c: k for k, c in enumerate(classes)}
    for r, (number, word) in enumerate(zip(numbers, words, strict=True), 1):
        if not number.isdecimal() or not 1 <= int(number) <= len(row):
            raise HeadcountError(f"{where} row {r}: item {number!r} is none of the {len(row)} in {key}")
        if int(number) in seen:
            raise HeadcountError(f"{where} row {r}: item {number} stands there twice; keep one of them")
        seen.add(int(number))
        if word.lower() in _BLANK and word not in place:
            continue
        if word not in place:
            raise HeadcountError(f"{where} row {r}: {word!r} is none of the classes {', '.join(classes)}")
        true[int(number) - 1] = place[word]
    if not (true >= 0).any():
        raise HeadcountError(f"{where}: the column 'label' is empty; fill in the class of each item")
    return AuditSheet(row, true, stratum, held)


def _word(value: Any) -> str:
    return "" if value is None else str(value).strip()


def _read_key(path: Path, reading: BagDataset, classes: tuple[str, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    try:
        said = json.loads(path.read_bytes())
        row = np.array([int(i["row"]) for i in said["items"]])
        stratum = np.array([int(i["stratum"]) for i in said["items"]])
        held = np.array([int(n) for n in said["held"]])
        numbers = [int(i["item"]) for i in said["items"]]
        data, known, form = str(said["data"]), tuple(map(str, said["classes"])), said["format"]
    except OSError as e:
        raise HeadcountError(f"no key {path} beside the sheet ({e.strerror}); name it with --key") from None
    except (ValueError, KeyError, TypeError) as e:
        raise HeadcountError(f"{path} is not the key of a sheet: {type(e).__name__}: {e}") from None
    good = form == FORMAT and numbers == list(range(1, len(row) + 1)) and len(row) and (held > 0).all()
    if (
        not good
        or stratum.min() < 0
        or stratum.max() >= len(held)
        or (np.bincount(stratum) > held[: stratum.max() + 1]).any()
    ):
        raise HeadcountError(f"{path} is not the key of a sheet, or was changed")
    if data != reading.instances_hash:
        raise HeadcountError(f"{path} belongs to a sheet drawn from other data; give the data the sheet was drawn from")
    if set(known) != set(classes):
        raise HeadcountError(f"{path} is of a model with classes {', '.join(known)}, this one has {', '.join(classes)}")
    if row.min() < 0 or not np.isin(row, reading.rows).all():
        raise HeadcountError(f"{path} names input rows that were not read")
    return row, stratum, held

"""Predictions as other programs read them: one row per input row in CSV, TSV or Parquet, or one HDF5 file per bag.

    the user's own columns, bag, prediction, p_<class> ...      rows that could not be read have no prediction
    bag, instances, label, prediction, then share_, low_ and high_<class> for each class, then p_majority_<class>

Rows are written a chunk at a time, beside their place, and renamed into it: a file is whole or absent.
"""

from __future__ import annotations

import io
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from headcount.errors import HeadcountError
from headcount.inference.predict import Predictions
from headcount.io import atomic_folder, atomic_path, atomic_write
from headcount.readers import BagDataset
from headcount.readers.preprocessing import factorize

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")
HDF5_SUFFIXES = (".h5", ".hdf5")
_CHUNK = 1 << 16
_PREFIX = "headcount_"
_MOST_HDF5 = 1 << 30


# -- places -----------------------------------------------------------------------------------------------------------------


def output_kind(path: Path) -> str:
    """table, hdf5 (one file, a group per bag) or folder (one HDF5 file per bag), by the ending."""
    suffix = path.suffix.lower()
    if suffix in TABLE_SUFFIXES:
        return "table"
    if suffix in HDF5_SUFFIXES:
        return "hdf5"
    if suffix and not path.is_dir():
        raise HeadcountError(
            f"{path} ends in {suffix}; give {', '.join(TABLE_SUFFIXES)}, .h5, or a folder for one HDF5 file per bag"
        )
    return "folder"


def unique_file_names(names: Sequence[str], ending: str) -> list[str]:
    """A file name for each bag: its own name without what a disk cannot hold, no two alike.

    >>> file_names(["a/b", "a_b", "../x", "", "Ünit 7"], ".png")
    ['a_b.png', 'a_b-2.png', 'x.png', 'bag.png', 'Ünit 7.png']
    """
    taken: set[str] = set()
    found = []
    for name in names:
        kept = "".join(c if c.isalnum() or c in " .-_()+,=@" else "_" for c in unicodedata.normalize("NFC", name))
        kept = re.sub(r"^[. _]+|[. _]+$", "", kept).encode()[:120].decode("utf-8", "ignore") or "bag"
        own, k = kept, 1
        while own.casefold() in taken:
            own, k = f"{kept}-{k + 1}", k + 1
        taken.add(own.casefold())
        found.append(own + ending)
    return found


# -- rows -------------------------------------------------------------------------------------------------------------------


def bag_column(dataset: BagDataset) -> str:
    """The user's column that says the bag."""
    candidates = (dataset.schema.roles.bag, "bag", "slide")
    return next(n for n in candidates if n is not None and n in dataset.ids.column_names)


def bag_of_rows(dataset: BagDataset) -> np.ndarray:
    """(inputs,) the bag of each input row, those left out too; -1 where the row is in no bag that was read."""
    code, values = factorize(dataset.ids.column(bag_column(dataset)))
    place = {name: b for b, name in enumerate(dataset.bags.names or ())}
    bag = np.array([place.get(v, -1) for v in values] + [-1])[code]
    bag[dataset.rows] = dataset.bags.bag.numpy()
    return bag


def added_columns(dataset: BagDataset, classes: Sequence[str]) -> tuple[list[str], str]:
    """Names of the columns we add (bag, prediction, p_...), with a prefix if the user's have one of them; and a note."""
    ours = ["bag", "prediction", *(f"p_{c}" for c in classes)]
    own = set(dataset.ids.column_names)
    ours = ours[1:] if bag_column(dataset) == "bag" else ours
    clash = [n for n in ours if n in own]
    if not clash:
        return ours, ""
    prefixed = [_PREFIX + n for n in ours]
    if again := [n for n in prefixed if n in own]:
        raise HeadcountError(f"the data have columns {clash[0]!r} and {again[0]!r} already; rename one of them")
    return prefixed, f"the data have a column {clash[0]!r}: what is added is called {_PREFIX}..."


def prediction_chunks(dataset: BagDataset, predictions: Predictions) -> Iterator[pa.Table]:
    """The output rows in input order, a chunk at a time."""
    names, _ = added_columns(dataset, predictions.classes)
    where = np.full(dataset.n_rows, -1)
    where[dataset.rows] = np.arange(len(dataset.rows))
    bag = bag_of_rows(dataset) if len(names) > len(predictions.classes) + 1 else None
    words, bags = (pa.array(names, pa.string()) for names in (predictions.classes, dataset.bags.names))
    for start in range(0, dataset.n_rows, _CHUNK):
        own = where[start : start + _CHUNK]
        gone = own < 0
        p = predictions.instance_probabilities[np.maximum(own, 0)]
        added: list[Any] = []
        if bag is not None:
            code = bag[start : start + _CHUNK]
            added.append(bags.take(pa.array(code, mask=code < 0)))
        added.append(words.take(pa.array(p.argmax(1), mask=gone)))
        added += [pa.array(p[:, k], mask=gone) for k in range(p.shape[1])]
        table = _plain(dataset.ids.slice(start, _CHUNK))
        for name, column in zip(names, added, strict=True):
            table = table.append_column(name, column)
        yield table


def _plain(table: pa.Table) -> pa.Table:
    """Without dictionaries: the same type in every chunk."""
    for i, f in enumerate(table.schema):
        if pa.types.is_dictionary(f.type):
            table = table.set_column(i, f.name, table.column(i).cast(f.type.value_type))
        elif pa.types.is_null(f.type):
            table = table.set_column(i, f.name, table.column(i).cast(pa.string()))
    return table


def bag_table(dataset: BagDataset, predictions: Predictions) -> pa.Table:
    """One row per bag."""
    laid = dataset.bags
    words = pa.array(predictions.classes, pa.string())
    columns: dict[str, Any] = {
        "bag": pa.array(laid.names, pa.string()),
        "instances": laid.sizes.numpy(),
        "label": pa.array(laid.label_names, pa.string()),
        "prediction": words.take(pa.array(predictions.bag_prediction)),
    }
    for k, c in enumerate(predictions.classes):
        columns |= {
            f"share_{c}": predictions.shares[:, k],
            f"low_{c}": predictions.shares_low[:, k],
            f"high_{c}": predictions.shares_high[:, k],
        }
    columns |= {f"p_majority_{c}": predictions.bag_probabilities[:, k] for k, c in enumerate(predictions.classes)}
    return pa.table(columns)


# -- writing ----------------------------------------------------------------------------------------------------------------


@contextmanager
def atomic_table(path: Path, chunks: Iterable[pa.Table]) -> Iterator[None]:
    """CSV, TSV or Parquet by the ending, chunk by chunk: written at once, in its place when the block ends well."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as part:
        with open_sink(part) as sink:
            writer: Any = None
            try:
                for table in chunks:
                    writer = writer or _writer(path, sink, table.schema)
                    writer.write_table(table)
            except pa.ArrowException as e:
                raise HeadcountError(f"{path} cannot hold the data's columns ({e}); write .parquet instead") from None
            finally:
                if writer is not None:
                    writer.close()
            sink.flush()
            os.fsync(sink.fileno())
        yield


def write_table(path: Path, chunks: Iterable[pa.Table]) -> None:
    with atomic_table(path, chunks):
        pass


def open_sink(path: Path) -> Any:
    return open(path, "wb")


def _writer(path: Path, sink: Any, schema: pa.Schema) -> Any:
    if path.suffix.lower() in (".parquet", ".pq"):
        return pq.ParquetWriter(sink, schema)
    for f in schema:
        if pa.types.is_nested(f.type) or pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type):
            raise HeadcountError(
                f"column {f.name!r} holds {f.type}, which {path.suffix} cannot; write .parquet instead"
            )
    sign = "\t" if path.suffix.lower() == ".tsv" else ","
    return pacsv.CSVWriter(sink, schema, write_options=pacsv.WriteOptions(delimiter=sign))


def require_h5py() -> Any:
    try:
        import h5py
    except ImportError:
        raise HeadcountError("HDF5 needs h5py: pip install 'headcount[slides]'") from None
    return h5py


def write_hdf5(path: Path, dataset: BagDataset, predictions: Predictions) -> None:
    """One file with a group per bag, made in memory: a full disk is noticed by us and not inside the library."""
    if predictions.instance_probabilities.nbytes > _MOST_HDF5:
        raise HeadcountError(
            f"{path} would hold {predictions.instance_probabilities.nbytes / 1e9:.1f} GB; give a folder for one HDF5 file per bag"
        )
    h5py, made = require_h5py(), io.BytesIO()
    with h5py.File(made, "w") as f:
        for name, b, rows in _bags(dataset, ""):
            _fill(f.create_group(name), dataset, predictions, b, rows)
    atomic_write(path, lambda sink: sink.write(made.getbuffer()))


def write_hdf5_folder(path: Path, dataset: BagDataset, predictions: Predictions) -> None:
    """One file per bag."""
    h5py = require_h5py()
    with atomic_folder(path) as folder:
        for name, b, rows in _bags(dataset, ".h5"):
            made = io.BytesIO()
            with h5py.File(made, "w") as f:
                _fill(f, dataset, predictions, b, rows)
            atomic_write(folder / name, lambda sink, made=made: sink.write(made.getbuffer()))


def _bags(reading: BagDataset, ending: str) -> Iterator[tuple[str, int, np.ndarray]]:
    """(file name, bag, its input rows in their order, those left out too)."""
    bag = bag_of_rows(reading)
    order = np.argsort(bag, kind="stable")
    ends = np.searchsorted(bag[order], np.arange(len(reading.bags) + 1))
    for b, name in enumerate(unique_file_names(reading.bags.names or (), ending)):
        yield name, b, order[ends[b] : ends[b + 1]]


def _fill(group: Any, reading: BagDataset, said: Predictions, b: int, rows: np.ndarray) -> None:
    """prediction (n,) class numbers, -1 where the row could not be read; p (n, C), coords (n, 2), row (n,) in the input."""
    ends = reading.bags.offsets
    here = slice(int(ends[b]), int(ends[b + 1]))
    p = np.full((len(rows), len(said.classes)), np.nan, np.float32)
    at = np.searchsorted(rows, reading.rows[here])
    p[at] = said.instance_probabilities[here]
    prediction = np.full(len(rows), -1, np.int32)
    prediction[at] = said.instance_probabilities[here].argmax(1)
    group["prediction"], group["p"], group["row"] = prediction, p, rows
    if reading.coords is not None:
        coords = np.full((len(rows), 2), np.nan)
        coords[at] = reading.coords[here]
        group["coords"] = coords
        if (
            reading.tile_sizes is not None
            and np.isfinite(tile := reading.tile_sizes[here]).all()
            and len(set(tile.tolist())) == 1
        ):
            group["coords"].attrs["patch_size_level0"] = tile[0]
    group.attrs["bag"] = (reading.bags.names or ())[b]
    group.attrs["classes"] = list(said.classes)

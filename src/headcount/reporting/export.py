"""Predictions for other programs: one row per input row in CSV, TSV or Parquet, or one HDF5 file per bag.

    the user's own columns, bag, prediction, p_<class> ...      rows that could not be read have no prediction
    bag, instances, label, prediction, then share_, low_ and high_<class> for each class, then p_majority_<class>

Rows are written in chunks to a temporary file that is renamed at the end: a file is complete or absent.
"""

import io
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_path, atomic_write, is_free
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.readers.columns import factorize

TABLE_SUFFIXES = (".csv", ".tsv", ".parquet", ".pq")
HDF5_SUFFIXES = (".h5", ".hdf5")
FILE_SUFFIXES = (*TABLE_SUFFIXES, *HDF5_SUFFIXES, ".html", ".htm", ".onnx", ".geojson", ".json", ".tif", ".tiff")
FOLDER_OPTIONS = ("geojson", "heatmap")  # folders, with any suffix
_PREFIX = "headcount_"
_MAX_HDF5 = 1 << 30  # bytes of probabilities in one file


def require_table(option: str, path: Path) -> None:
    """Refuse a path that is no table."""
    if path.suffix.lower() not in TABLE_SUFFIXES:
        raise HeadcountError(f"{option} writes a table, {', '.join(TABLE_SUFFIXES)}; got {path}")


def is_table(path: Path) -> bool:
    """Whether its suffix is that of a table, rather than of HDF5 (a file, or a folder with one per bag), which needs h5py."""
    suffix = path.suffix.lower()
    if suffix and suffix not in (*TABLE_SUFFIXES, *HDF5_SUFFIXES) and not path.is_dir():
        choices = ", ".join(TABLE_SUFFIXES)
        raise HeadcountError(f"{path} ends in {suffix}; give {choices}, .h5, or a folder for one HDF5 file per bag")
    if suffix not in TABLE_SUFFIXES and find_spec("h5py") is None:
        raise HeadcountError("HDF5 needs h5py: pip install 'headcount[slides]'")
    return suffix in TABLE_SUFFIXES


def _real_path(path: Path) -> Path:
    return Path(os.path.realpath(path.expanduser()))  # of links in a circle too, which Path.resolve refuses


def check_outputs(data: str | None, model: Path | None, labels: str | Path | None = None, /, **paths: Path | None) -> None:
    """Refuse outputs (by option name) that share a path, overwrite an input or cannot be written, before any work begins."""
    inputs = {"the data": data, "the labels": labels, "the model": model}
    taken = {_real_path(Path(path)): name for name, path in inputs.items() if path is not None}
    for option, path in paths.items():
        if path is None:
            continue
        resolved = _real_path(path)
        for other, name in taken.items():
            in_data = name == "the data" and other in resolved.parents and resolved.is_file()
            if resolved == other or in_data or (name == "the model" and other in resolved.parents):
                what = "a file of the data" if in_data else name
                raise HeadcountError(f"--{option} {path} would overwrite {what}; choose another path")
        taken[resolved] = f"--{option}"
        check_output_path(option, path)
        if option in FOLDER_OPTIONS or path.suffix.lower() not in FILE_SUFFIXES:
            if path.exists() and not path.is_dir():
                raise HeadcountError(f"--{option} {path} is a file that stands where a folder is wanted; choose another path")
            if not is_free(path, filter(None, paths.values())):
                raise HeadcountError(f"--{option} {path} is there already; choose another path, or empty the folder first")
        elif path.exists() and not path.is_file():
            kind = "folder" if path.is_dir() else "device"
            raise HeadcountError(f"--{option} {path} is a {kind}, not a file; choose another path")


def check_output_path(option: str, path: Path) -> None:
    """Refuse a path whose parent folder cannot be made or written to."""
    parent = next((p for p in path.parents if os.path.lexists(p)), Path())
    if not parent.is_dir():
        raise HeadcountError(f"--{option} {path}: {parent} is a file that stands where a folder is wanted; choose another path")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise HeadcountError(f"--{option} {path}: {parent} is not writable; choose another folder")


def unique_file_names(names: Sequence[str], suffix: str) -> list[str]:
    """A distinct file name for each bag: its name without the characters that file systems refuse."""
    stems, taken = [], set()
    for name in names:
        base = "".join(c if c.isalnum() or c in " .-_()+,=@" else "_" for c in unicodedata.normalize("NFC", name))
        base = re.sub(r"^[. _]+|[. _]+$", "", base).encode()[:120].decode("utf-8", "ignore") or "bag"
        stem, n = base, 1
        while stem.casefold() in taken:
            stem, n = f"{base}-{n + 1}", n + 1
        taken.add(stem.casefold())
        stems.append(stem)
    return [stem + suffix for stem in stems]


def bag_column(dataset: BagDataset) -> str | None:
    """The column of the user's data that names the bag; None for rows without bags."""
    candidates = (dataset.schema.roles.bag, "bag", "slide")
    return next((n for n in candidates if n is not None and n in dataset.ids.column_names), None)


def bag_of_rows(dataset: BagDataset) -> np.ndarray:
    """(rows,) the bag of each input row, skipped ones included; -1 where the bag was not read."""
    if (column := bag_column(dataset)) is None:
        return dataset.broadcast(dataset.bags.bag.numpy(), -1)
    code, values = factorize(dataset.ids.column(column))
    number = {name: b for b, name in enumerate(dataset.bags.names or ())}
    bag = np.array([*(number.get(v, -1) for v in values), -1])[code]
    bag[dataset.rows] = dataset.bags.bag.numpy()
    return bag


def added_columns(dataset: BagDataset, classes: Sequence[str]) -> tuple[list[str], str]:
    """Names of the added columns (bag, prediction, p_...), prefixed if the data have one of them, and a note on that."""
    existing = set(dataset.ids.column_names)
    names = ["prediction", *(f"p_{c}" for c in classes)]
    names = names if bag_column(dataset) in ("bag", None) else ["bag", *names]
    clash = [n for n in names if n in existing]
    if not clash:
        return names, ""
    prefixed = [_PREFIX + n for n in names]
    if both := [n for n in prefixed if n in existing]:
        raise HeadcountError(f"the data have columns {clash[0]!r} and {both[0]!r} already; rename one of them")
    return prefixed, f"the data have a column {clash[0]!r}: added columns are called {_PREFIX}..."


def prediction_chunks(dataset: BagDataset, predictions: Predictions, rows: int = 1 << 16) -> Iterator[pa.Table]:
    """The output rows in input order, in tables of ``rows`` each."""
    names, _ = added_columns(dataset, predictions.classes)
    instance_of_row = dataset.broadcast(np.arange(len(dataset.rows)), -1)
    bag = bag_of_rows(dataset) if len(names) > len(predictions.classes) + 1 else None
    class_names, bag_names = (pa.array(a, pa.string()) for a in (predictions.classes, dataset.bags.names))
    schema = pa.schema([(f.name, _plain_type(f.type)) for f in dataset.ids.schema])
    for start in range(0, dataset.n_rows, rows):
        instance = instance_of_row[start : start + rows]
        skipped = instance < 0
        p = predictions.instance_probabilities[np.maximum(instance, 0)]
        columns: list[Any] = [class_names.take(pa.array(p.argmax(1), mask=skipped))]
        columns += [pa.array(p[:, k], mask=skipped) for k in range(p.shape[1])]
        if bag is not None:
            code = bag[start : start + rows]
            columns.insert(0, bag_names.take(pa.array(code, mask=code < 0)))
        ids = dataset.ids.slice(start, rows).cast(schema)  # without columns if all of them are features
        yield pa.table([*ids.columns, *columns], names=[*ids.column_names, *names])


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Without dictionaries and columns of nulls, so that every chunk has the same schema."""
    return kind.value_type if pa.types.is_dictionary(kind) else pa.string() if pa.types.is_null(kind) else kind


def bag_table(dataset: BagDataset, predictions: Predictions) -> pa.Table:
    """One row per bag."""
    bags = dataset.bags
    columns: dict[str, Any] = {
        "bag": pa.array(bags.names, pa.string()),
        "instances": bags.sizes.numpy(),
        "label": pa.array(bags.label_names, pa.string()),
        "prediction": pa.array(predictions.classes, pa.string()).take(pa.array(predictions.bag_prediction)),
    }
    shares = {"share": predictions.shares, "low": predictions.shares_low, "high": predictions.shares_high}
    for k, c in enumerate(predictions.classes):
        columns |= {f"{name}_{c}": values[:, k] for name, values in shares.items()}
    columns |= {f"p_majority_{c}": predictions.bag_probabilities[:, k] for k, c in enumerate(predictions.classes)}
    return pa.table(columns)


def write_table(path: Path, chunks: Iterable[pa.Table]) -> None:
    """Write CSV, TSV or Parquet (by suffix) atomically."""
    chunks = iter(chunks)
    first = next(chunks)
    with atomic_path(path) as part, open_sink(part) as sink:
        try:
            with _open_writer(path, sink, first.schema) as writer:
                for table in chain([first], chunks):
                    writer.write_table(table)
        except pa.ArrowException as e:
            raise HeadcountError(f"{path} cannot hold the data's columns ({e}); write .parquet instead") from None
        sink.flush()
        os.fsync(sink.fileno())


def open_sink(path: Path) -> Any:
    return open(path, "wb")


def _open_writer(path: Path, sink: Any, schema: pa.Schema) -> Any:
    suffix = path.suffix.lower()
    if suffix in (".parquet", ".pq"):
        return pq.ParquetWriter(sink, schema)
    for f in schema:
        if pa.types.is_nested(f.type) or pa.types.is_binary(f.type) or pa.types.is_large_binary(f.type):
            raise HeadcountError(f"column {f.name!r} holds {f.type}, which {suffix} cannot; write .parquet instead")
    return pacsv.CSVWriter(sink, schema, write_options=pacsv.WriteOptions(delimiter="\t" if suffix == ".tsv" else ","))


def write_hdf5(path: Path, dataset: BagDataset, predictions: Predictions) -> None:
    """One file with a group per bag, or a folder with one file per bag."""
    if path.suffix.lower() not in HDF5_SUFFIXES:
        with atomic_folder(path) as folder:
            for name, b, rows in _rows_by_bag(dataset, ".h5"):
                with _open_h5(folder / name) as f:
                    _fill_group(f, dataset, predictions, b, rows)
        return
    if (size := predictions.instance_probabilities.nbytes) > _MAX_HDF5:
        raise HeadcountError(f"{path} would hold {size / 1e9:.1f} GB; give a folder for one HDF5 file per bag")
    with _open_h5(path) as f:
        for name, b, rows in _rows_by_bag(dataset, ""):
            _fill_group(f.create_group(name), dataset, predictions, b, rows)


@contextmanager
def _open_h5(path: Path) -> Iterator[Any]:
    """Made in memory first, so that a full disk is an error of ours and not one inside the library."""
    import h5py

    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as f:
        yield f
    atomic_write(path, lambda sink: sink.write(buffer.getbuffer()))


def _rows_by_bag(dataset: BagDataset, suffix: str) -> Iterator[tuple[str, int, np.ndarray]]:
    """(file name, bag, its input rows in order, skipped ones included)."""
    bag = bag_of_rows(dataset)
    order = np.argsort(bag, kind="stable")
    ends = np.searchsorted(bag[order], np.arange(len(dataset.bags) + 1))
    for b, name in enumerate(unique_file_names(dataset.bags.names or (), suffix)):
        yield name, b, order[ends[b] : ends[b + 1]]


def _fill_group(group: Any, dataset: BagDataset, predictions: Predictions, b: int, rows: np.ndarray) -> None:
    """prediction (n,) class numbers, -1 for skipped rows; p (n, C), coords (n, 2), row (n,) of the input."""
    here = slice(*dataset.bags.offsets[b : b + 2].tolist())
    at = np.searchsorted(rows, dataset.rows[here])
    p = np.full((len(rows), len(predictions.classes)), np.nan, np.float32)
    p[at] = predictions.instance_probabilities[here]
    prediction = np.full(len(rows), -1, np.int32)
    prediction[at] = p[at].argmax(1)
    group["prediction"], group["p"], group["row"] = prediction, p, rows
    if dataset.coords is not None:
        coords = np.full((len(rows), 2), np.nan)
        coords[at] = dataset.coords[here]
        group["coords"] = coords
        tiles = set() if dataset.tile_sizes is None else set(dataset.tile_sizes[here].tolist())
        if len(tiles) == 1 and np.isfinite(tile := tiles.pop()):
            group["coords"].attrs["patch_size_level0"] = tile
    group.attrs["bag"] = (dataset.bags.names or ())[b]
    group.attrs["classes"] = list(predictions.classes)

"""CSV, TSV and Parquet files, DataFrames of any library and dicts of columns, all as one pyarrow table.

Columns with a role stay as they are written (a bag called 007 stays 007); the others are numbers if all their values are,
else text. Nothing loops over rows.
"""

import codecs
import csv
import hashlib
import io
import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from headcount.errors import HeadcountError
from headcount.loading import check_declared_size
from headcount.readers.columns import NO_ROLES, Codes, ColumnRoles, abbreviate, factorize, first_duplicate, nfc, preview
from headcount.readers.dataset import ErrorPolicy
from headcount.readers.transforms import as_float, parse_number

TABLE_SUFFIXES = (".csv", ".tsv", ".tab", ".parquet", ".pq")
_BLOCK = 1 << 24
_NAME_TYPE = pa.dictionary(pa.int32(), pa.string())  # few values in many rows
_NAME_ROLES = ("bag", "label", "group", "truth", "known")
MISSING_VALUES = ["", "?", "NA", "N/A", "#N/A", "nan", "NaN", "-nan", "-NaN", "null", "NULL", "None", "n/a", "<NA>"]


def file_suffix(path: Path) -> str:
    """The suffix without that of a compression: .csv for data.csv.gz."""
    suffixes = [s.lower() for s in path.suffixes]
    if len(suffixes) > 1 and suffixes[-1] in (".gz", ".zst", ".bz2"):
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def is_dataframe(data: Any) -> bool:
    """Whether this is a table of pandas, polars, pyarrow or another library with the Arrow or interchange protocol."""
    if isinstance(data, pa.Table) or hasattr(data, "__dataframe__"):
        return True
    return hasattr(data, "__arrow_c_stream__") and hasattr(data, "columns")  # a Series has no columns


@dataclass(frozen=True)
class SourceTable:
    """A table, its name in messages, the sha256 of its content, and the roles of its columns."""

    table: pa.Table
    origin: str
    digest: str
    roles: ColumnRoles = NO_ROLES

    def __contains__(self, name: str | None) -> bool:
        return name in self.table.column_names

    @property
    def columns(self) -> str:
        """The names of the columns, as a message lists them."""
        return preview(self.table.column_names, 12)

    def row(self, row: int) -> str:
        return f"{self.origin} row {row + 1}"

    def factorize(self, name: str) -> Codes:
        return factorize(self.table.column(name), f"column {name!r} of {self.origin}")

    def numbers(self, name: str) -> np.ndarray:
        """(n,) float64 of a column that must hold numbers, NaN where missing."""
        column = self.table.column(name)
        if pa.types.is_dictionary(column.type) or pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            codes, values = factorize(column)
            parsed = np.array([*map(parse_number, values), np.nan])
            if np.isnan(parsed[:-1]).any():
                k = int(np.flatnonzero(np.isnan(parsed))[0])
                row = self.row(int(np.flatnonzero(codes == k)[0]))
                raise HeadcountError(f"{row}: {abbreviate(values[k])} in column {name!r} is not a number")
            return parsed[codes]
        try:
            return as_float(column)
        except (pa.ArrowException, TypeError) as e:
            raise HeadcountError(f"column {name!r} of {self.origin} holds {column.type}, not numbers ({e})") from None


def open_table(
    data: Any, roles: ColumnRoles = NO_ROLES, errors: ErrorPolicy | None = None, verbatim: bool = False
) -> SourceTable:
    """Open a file or a DataFrame; ``verbatim``: every CSV column stays text."""
    is_file = isinstance(data, (str, Path))
    origin = str(Path(data)) if is_file else "the table"
    if is_file:
        is_parquet, errors = file_suffix(Path(data)) in (".parquet", ".pq"), errors or ErrorPolicy(skip=False)
        try:
            table = _read_parquet(Path(data)) if is_parquet else _read_csv(Path(data), roles, errors, verbatim)
        except HeadcountError:
            raise
        except (pa.ArrowException, OSError, UnicodeError, csv.Error, ValueError, MemoryError, NotImplementedError) as e:
            raise HeadcountError(f"cannot read {origin} as a table: {e or type(e).__name__}") from None
    else:
        table = from_memory(data)
    if table.num_columns == 0 or table.num_rows == 0:
        what = "no columns" if table.num_columns == 0 else "a header and no rows"
        raise HeadcountError(f"{origin} has {what}; give one row per instance")
    older = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}  # not every function supports views yet
    columns = [c.cast(older.get(c.type, c.type)) for c in table.columns]
    table = pa.table(columns, names=list(map(nfc, table.column_names)))
    if not is_file:
        return SourceTable(table, origin, _table_hash(table))
    with open(data, "rb") as f:
        return SourceTable(table, origin, hashlib.file_digest(f, "sha256").hexdigest())


def _read_parquet(path: Path) -> pa.Table:
    """The table, if its size is plausible: repeated values take no room in the file, and texts are repeated last."""
    metadata, schema = pq.read_metadata(path), pq.read_schema(path)
    width = [{"BOOLEAN": 0.125, "INT64": 8, "DOUBLE": 8, "INT96": 12}.get(c.physical_type, 4) for c in metadata.schema]
    groups = [metadata.row_group(g) for g in range(metadata.num_row_groups)]
    n_bytes = sum(group.column(c).num_values * w for group in groups for c, w in enumerate(width))
    check_declared_size(path, n_bytes)
    texts = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
    table = pq.ParquetFile(path, read_dictionary=texts).read()
    for chunk in (chunk for name in texts for chunk in table.column(name).chunks):
        lengths = pc.call_function("binary_length", [chunk.dictionary]).cast(pa.int64()).take(chunk.indices)
        n_bytes += pc.call_function("sum", [lengths]).as_py() or 0
    check_declared_size(path, n_bytes)
    return table.cast(schema)


def from_memory(data: Any) -> pa.Table:
    if any(str(kind).startswith("Sparse") for kind in getattr(data, "dtypes", ())):
        data = data.astype({c: kind.subtype for c, kind in data.dtypes.items() if str(kind).startswith("Sparse")})
    try:
        if isinstance(data, pa.Table):
            return data
        if isinstance(data, Mapping):
            return pa.table({str(k): v for k, v in data.items()})
        if hasattr(data, "__arrow_c_stream__"):
            return pa.table(data)
        from pyarrow.interchange import from_dataframe

        return from_dataframe(data)
    except (pa.ArrowException, TypeError, ValueError, NotImplementedError, RuntimeError) as e:
        raise HeadcountError(f"cannot take the DataFrame: {e}; give each column one type") from None


def _read_header(path: Path) -> tuple[list[str], str]:
    """The names in the first line that is not blank, and the delimiter between them."""
    with pa.input_stream(str(path)) as f:
        head = f.read(1 << 20)
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        raise HeadcountError(f"{path} is UTF-16; save it as UTF-8")
    try:
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head, final=len(head) < 1 << 20)
    except UnicodeDecodeError as e:
        line = head[: e.start].count(b"\n") + 1
        raise HeadcountError(f"{path} is not UTF-8 (line {line}, byte {e.start}); save it as UTF-8") from None
    delimiters = ["\t", ",", ";"] if file_suffix(path) in (".tsv", ".tab") else [",", ";", "\t"]
    candidates = []
    for delimiter in delimiters:
        lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        candidates.append((next((line for line in lines if line), []), delimiter))
    names, delimiter = max(candidates, key=lambda c: len(c[0]))  # the first of equally long ones
    if not names:
        raise HeadcountError(f"{path} is empty; its first line must name the columns")
    return names, delimiter


def _read_csv(path: Path, roles: ColumnRoles, errors: ErrorPolicy, verbatim: bool) -> pa.Table:
    written, delimiter = _read_header(path)
    names = list(map(nfc, written))
    if (duplicate := first_duplicate(names)) is not None:
        raise HeadcountError(f"{path} has two columns called {duplicate!r}; give each column its own name")
    if file_suffix(path) == path.suffix.lower():
        _check_quotes_closed(path, delimiter)
    else:
        with pa.input_stream(str(path)) as f:
            n_bytes = 0
            while block := f.read(_BLOCK):
                n_bytes += len(block)
                check_declared_size(path, 4 * n_bytes)  # "1," becomes a number of eight bytes
    with suppress(HeadcountError):  # raised again, with the name of the file, when the table is open
        roles = roles.resolve(names)
    type_of = dict.fromkeys(_NAME_ROLES, _NAME_TYPE) | dict.fromkeys(("path", "text", "id"), pa.string())
    types = dict.fromkeys(roles.categories, _NAME_TYPE)  # of columns with a role; the others are inferred from their values
    types |= {name: type_of[role] for role, name in roles.assigned_columns() if role in type_of}
    types = dict.fromkeys(names, pa.string()) if verbatim else types
    types = {name: types[n] for name, n in zip(written, names, strict=True) if n in types}

    def parse(threads: bool, handler: Any = None) -> pa.Table:
        return pacsv.read_csv(
            str(path),
            read_options=pacsv.ReadOptions(block_size=_BLOCK, use_threads=threads),
            parse_options=pacsv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=handler),
            convert_options=pacsv.ConvertOptions(column_types=types, null_values=MISSING_VALUES),
        )

    messages: list[str] = []

    def record_invalid(row: Any) -> str:  # reported later: an exception cannot leave the parser
        cells = f"{row.actual_columns} cells for {row.expected_columns} columns"
        messages.append(f"{path} row {row.number - 1} has {cells}: {abbreviate(row.text)}")  # the header is row 1 to Arrow
        return "skip"

    try:
        table = parse(threads=True)
    except pa.ArrowInvalid as e:
        if "columns, got" not in str(e):
            raise
        table = parse(threads=False, handler=record_invalid)  # again in one thread, so that rows have numbers
        for message in messages:
            errors.report(message)
    for name, column in zip(names, table.columns, strict=True):
        if pa.types.is_binary(column.type):
            raise HeadcountError(f"{path} is not UTF-8 in column {name!r}; save it as UTF-8")
    return table.rename_columns([n if n.strip() else f"column {i + 1}" for i, n in enumerate(names)])


def _check_quotes_closed(path: Path, delimiter: str) -> None:
    """An unclosed quote would silently swallow the rest of the file. Only an odd number of quotes can leave one open."""
    with open(path, "rb") as f, mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ) as whole:
        quotes = sum(whole[i : i + _BLOCK].count(b'"') for i in range(0, len(whole), _BLOCK))
    if quotes % 2 == 0:
        return
    last_line = 0
    with open(path, encoding="utf-8-sig", errors="replace", newline="") as f:
        lines = csv.reader(f, delimiter=delimiter, strict=True)
        try:
            for _ in lines:
                last_line = lines.line_num
        except csv.Error as e:
            if "unexpected end" in str(e):
                raise HeadcountError(f"{path} opens a quote after line {last_line} and never closes it") from None


def _table_hash(table: pa.Table) -> str:
    digest = hashlib.sha256()
    sink = SimpleNamespace(write=digest.update, flush=bool, close=bool, closed=False)  # a file that keeps nothing
    table = table.replace_schema_metadata(None)
    with pa.ipc.new_stream(pa.PythonFile(sink, mode="w"), table.schema) as stream:
        stream.write_table(table, max_chunksize=1 << 16)
    return digest.hexdigest()

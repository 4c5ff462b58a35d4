"""The values of a column as arrays: floats with NaN where missing, names as integer codes, lists as rows; and names made uniform."""

from __future__ import annotations

import math
import unicodedata
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headcount.errors import HeadcountError

_TICKS = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second


def as_float(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) float64, NaN where missing; dates, times and durations in seconds at any resolution."""
    kind, a_second = column.type, 1.0
    if pa.types.is_dictionary(kind):
        column, kind = column.cast(kind.value_type), kind.value_type
    if time_kind(kind):
        days = pa.types.is_date32(kind)
        a_second = 1 / 86_400 if days else _TICKS["ms" if pa.types.is_date64(kind) else kind.unit]
        column = column.cast(pa.int32() if days or pa.types.is_time32(kind) else pa.int64())
    if column.type != pa.float64():
        column = column.cast(pa.int8()) if pa.types.is_boolean(column.type) else column
        column = pc.cast(column, pa.float64(), safe=False)
    x = column.to_numpy() if column.null_count == 0 else column.fill_null(math.nan).to_numpy()
    return x if a_second == 1 else x / a_second


def time_kind(kind: pa.DataType) -> str:
    """What a column of dates or times holds: dates, times of day or durations; empty for any other type.

    >>> time_kind(pa.date32()), time_kind(pa.timestamp("ns")), time_kind(pa.time32("s")), time_kind(pa.float64())
    ('dates', 'dates', 'times of day', '')
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "dates"
    return "times of day" if pa.types.is_time(kind) else "durations" if pa.types.is_duration(kind) else ""


def dictionary_codes(column: pa.ChunkedArray, column_name: str = "a column") -> tuple[np.ndarray, pa.Array]:
    """(n,) codes, -1 where missing, and the values they stand for."""
    try:
        # chunks that are encoded together share one dictionary already: to unify it would hash it again for each of them
        encoded = pa.types.is_dictionary(column.type)
        column = column.unify_dictionaries() if encoded else column.dictionary_encode()
    except pa.ArrowException:
        raise HeadcountError(f"{column_name} holds {column.type}; give texts or numbers") from None
    if column.num_chunks == 0:
        return np.zeros(0, np.int64), pa.array([], pa.string())
    codes = np.concatenate([c.indices.cast(pa.int64()).fill_null(-1).to_numpy() for c in column.chunks])
    return codes, column.chunk(0).dictionary


def factorize(column: pa.ChunkedArray, column_name: str = "a column") -> tuple[np.ndarray, list[str]]:
    """(n,) codes, -1 where missing, and the values as text, in order of first appearance."""
    codes, dictionary = dictionary_codes(column, column_name)
    values = [clean_name(v) for v in dictionary.to_pylist()]
    first_row = np.full(len(values) + 1, len(codes))
    first_row[codes[::-1]] = np.arange(len(codes))[::-1]  # assigned backwards, so that the first row remains
    code_of: dict[str, int] = {}
    new_codes = np.full(len(values) + 1, -1)
    for k in np.argsort(first_row[:-1], kind="stable").tolist():
        value = values[k]
        if value is not None and first_row[k] < len(codes):
            new_codes[k] = code_of.setdefault(value, len(code_of))
    return new_codes[codes], list(code_of)


def drop_values(code: np.ndarray, values: Sequence[str], dropped: Container[str]) -> tuple[np.ndarray, list[str]]:
    """(n,) codes, -1 also for the values that are dropped, and the values that remain.

    >>> drop_values(np.array([0, 1, 2, -1]), ["a", "NA", "b"], {"NA"})
    (array([ 0, -1,  1, -1]), ['a', 'b'])
    """
    kept = [v for v in values if v not in dropped]
    if len(kept) == len(values):
        return code, kept
    new_code = {v: k for k, v in enumerate(kept)}
    return np.array([*(new_code.get(v, -1) for v in values), -1])[code], kept


def clean_name(value: Any) -> str | None:
    """A name as a person reads it: 3.0 becomes 3, surrounding blanks go, accented letters are composed (some file systems
    decompose them); an empty text and NaN become None.

    >>> clean_name(3.0), clean_name(" cat "), clean_name(float("nan")), clean_name(""), clean_name("cafe\u0301") == "caf\u00e9"
    ('3', 'cat', None, None, True)
    """
    text = as_text(value)
    return text and nfc(text)


def nfc(text: str) -> str:
    """A text in Unicode normal form C: a letter and its accent are one character."""
    return unicodedata.normalize("NFC", text)


def as_text(value: Any) -> str | None:
    """As :func:`clean_name`, but without normalising the letters: a file is found under its exact name only."""
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return None
        value = int(value) if abs(value) < 1e15 and value == int(value) else float(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = "" if value is None else str(value).strip()
    return text.encode("utf-8", "backslashreplace").decode() or None


def clean_names(words: np.ndarray) -> np.ndarray:
    """(n,) texts as clean names; an array of anything else is returned as it is."""
    if not len(words) or not (words.dtype.kind in "UT" or all(isinstance(w, str) for w in words)):
        return words
    spellings, code = np.unique(words, return_inverse=True)
    return np.array([clean_name(w) or "" for w in spellings], dtype=object if words.dtype == object else None)[code]


def unify_unicode(words: np.ndarray) -> np.ndarray:
    """(n,) texts with one spelling for each clean name: the clean name where spellings differ, else the spelling itself, so
    that users find the names they gave.

    >>> unify_unicode(np.array(["caf\u00e9", "cafe\u0301", "the\u0301"])).tolist() == ["caf\u00e9", "caf\u00e9", "the\u0301"]
    True
    """
    if (names := clean_names(words)) is words:
        return words
    spellings, first, code = np.unique(words, return_index=True, return_inverse=True)
    count = Counter(names[first].tolist())
    unified = [str(name) if count[name] > 1 else way for way, name in zip(spellings, names[first], strict=True)]
    return np.array(unified, dtype=object if words.dtype == object else None)[code]


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that occurs a second time, None if all differ.

    >>> first_duplicate(["a", "b", "a", "b"]), first_duplicate("ab")
    ('a', None)
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Groups of names that differ only in capitals or blanks: perhaps one name in two spellings.

    >>> similar_names(["Ville", "forest", "ville", "the  sea", "The sea"])
    [['Ville', 'ville'], ['the  sea', 'The sea']]
    """
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(" ".join(name.lower().split()), []).append(name)
    return [them for them in spellings.values() if len(them) > 1]


def abbreviate(value: Any, most: int = 40) -> str:
    """A value as an error message shows it."""
    text = repr(value)
    return text if len(text) <= most else text[: most - 3] + "..."


def preview(values: Sequence[Any], most: int = 3) -> str:
    """The first few of many.

    >>> preview(["a", "b", "c", "d"])
    "'a', 'b', 'c' and 1 more"
    """
    shown = ", ".join(abbreviate(v) for v in values[:most])
    return shown + (f" and {len(values) - most:,} more" if len(values) > most else "")


def as_vectors(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """(n, length) float64 of a column of lists."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + 1
        raise HeadcountError(f"column {name!r} has no list in row {row}; fill it in or leave the row out")
    lengths = pc.call_function("list_value_length", [column]).to_numpy()
    differs = np.flatnonzero(lengths != lengths[:1])
    if len(differs) or lengths[0] == 0:
        row = int(differs[0]) if len(differs) else 0
        raise HeadcountError(
            f"column {name!r} holds a list of {int(lengths[row])} numbers in row {row + 1}; all must be of one length"
        )
    flat = pc.call_function("list_flatten", [column]).cast(pa.float64()).to_numpy()
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~(np.abs(flat) <= np.finfo(np.float32).max))
    if len(bad):
        row = int(bad[0]) // int(lengths[0]) + 1
        raise HeadcountError(f"column {name!r} has {flat[bad[0]]} in its list in row {row}; every number must be finite")
    return flat.reshape(-1, int(lengths[0]))

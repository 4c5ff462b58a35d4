"""A column's values as arrays: numbers with NaN where missing, names as numbers of a word list, lists as rows."""

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
    """(n,) float64, NaN where missing; dates, times and durations in seconds, however finely they were written."""
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
    """What of a clock or a calendar a column holds, if anything.

    >>> clock(pa.date32()), clock(pa.timestamp("ns")), clock(pa.time32("s")), clock(pa.float64())
    ('dates', 'dates', 'times of day', '')
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "dates"
    return "times of day" if pa.types.is_time(kind) else "durations" if pa.types.is_duration(kind) else ""


def dictionary_codes(column: pa.ChunkedArray, column_name: str = "a column") -> tuple[np.ndarray, pa.Array]:
    """(n,) codes, -1 where missing, and the values they stand for."""
    try:
        # pieces encoded together share one word list: unifying it would hash it again for each of them
        shared = not pa.types.is_dictionary(column.type)
        column = column.dictionary_encode() if shared else column.unify_dictionaries()
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
    first = np.full(len(values) + 1, len(codes))
    first[codes[::-1]] = np.arange(len(codes))[::-1]  # the last to write is the first row
    number: dict[str, int] = {}
    to = np.full(len(values) + 1, -1)
    for k in np.argsort(first[:-1], kind="stable").tolist():
        value = values[k]
        if value is not None and first[k] < len(codes):
            to[k] = number.setdefault(value, len(number))
    return to[codes], list(number)


def drop_values(code: np.ndarray, values: Sequence[str], dropped: Container[str]) -> tuple[np.ndarray, list[str]]:
    """(n,) codes, -1 also for these words, and the values that are left.

    >>> without(np.array([0, 1, 2, -1]), ["a", "NA", "b"], {"NA"})
    (array([ 0, -1,  1, -1]), ['a', 'b'])
    """
    kept = [v for v in values if v not in dropped]
    if len(kept) == len(values):
        return code, kept
    place = {v: k for k, v in enumerate(kept)}
    return np.array([*(place.get(v, -1) for v in values), -1])[code], kept


def clean_name(value: Any) -> str | None:
    """A name as a person reads it: 3.0 is 3, blanks around it do not count, an é is one letter whether it was written as one or
    as two (some systems take file names apart), nothing and NaN are None.

    >>> plain(3.0), plain(" cat "), plain(float("nan")), plain(""), plain("cafe\u0301") == "caf\u00e9"
    ('3', 'cat', None, None, True)
    """
    text = as_text(value)
    return text and nfc(text)


def nfc(text: str) -> str:
    """A letter with its accent as one sign."""
    return unicodedata.normalize("NFC", text)


def as_text(value: Any) -> str | None:
    """The same, letter by letter as it stands: a file is found under no other name."""
    if isinstance(value, (float, np.floating)):
        if math.isnan(value):
            return None
        value = int(value) if abs(value) < 1e15 and value == int(value) else float(value)
    if isinstance(value, bytes):
        value = value.decode("utf-8", "backslashreplace")
    text = "" if value is None else str(value).strip()
    return text.encode("utf-8", "backslashreplace").decode() or None


def clean_names(words: np.ndarray) -> np.ndarray:
    """(n,) texts as plain names; anything else as it is."""
    if not len(words) or not (words.dtype.kind in "UT" or all(isinstance(w, str) for w in words)):
        return words
    ways, code = np.unique(words, return_inverse=True)
    return np.array([clean_name(w) or "" for w in ways], dtype=object if words.dtype == object else None)[code]


def unify_unicode(words: np.ndarray) -> np.ndarray:
    """(n,) texts, those of one plain name written alike: by that name, or, where all were written in one way, as they were, so
    that who gave them finds them again.

    >>> one_spelling(np.array(["caf\u00e9", "cafe\u0301", "the\u0301"])).tolist() == ["caf\u00e9", "caf\u00e9", "the\u0301"]
    True
    """
    if (names := clean_names(words)) is words:
        return words
    ways, first, code = np.unique(words, return_index=True, return_inverse=True)
    many = Counter(names[first].tolist())
    spelled = [str(name) if many[name] > 1 else way for way, name in zip(ways, names[first], strict=True)]
    return np.array(spelled, dtype=object if words.dtype == object else None)[code]


def first_duplicate(names: Iterable[str]) -> str | None:
    """The first name that has stood there before, None if each stands once.

    >>> again(["a", "b", "a", "b"]), again("ab")
    ('a', None)
    """
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def similar_names(names: Iterable[str]) -> list[list[str]]:
    """Names that differ only in capitals or blanks: perhaps one and the same, written by two people.

    >>> nearly_alike(["Ville", "forest", "ville", "the  sea", "The sea"])
    [['Ville', 'ville'], ['the  sea', 'The sea']]
    """
    spellings: dict[str, list[str]] = {}
    for name in names:
        spellings.setdefault(" ".join(name.lower().split()), []).append(name)
    return [them for them in spellings.values() if len(them) > 1]


def as_vectors(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """(n, length) float64 of a column of lists."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + 1
        raise HeadcountError(f"column {name!r} has no list in row {row}; fill it in or leave the row out")
    lengths = pc.call_function("list_value_length", [column]).to_numpy()
    odd = np.flatnonzero(lengths != lengths[:1])
    if len(odd) or not len(lengths) or lengths[0] == 0:
        row = int(odd[0]) if len(odd) else 0
        got = int(lengths[row]) if len(lengths) else 0
        raise HeadcountError(
            f"column {name!r} holds a list of {got} numbers in row {row + 1}; all must be of one length"
        )
    flat = pc.call_function("list_flatten", [column]).cast(pa.float64()).to_numpy()
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~(np.abs(flat) <= np.finfo(np.float32).max))
    if len(bad):
        row = int(bad[0]) // int(lengths[0]) + 1
        raise HeadcountError(
            f"column {name!r} has {flat[bad[0]]} in its list in row {row}; every number must be finite"
        )
    return flat.reshape(-1, int(lengths[0]))

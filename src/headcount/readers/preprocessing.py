"""What was learned of the columns: how a number is filled and scaled, which categories there are, which words count.

It is plain JSON and arrays, so that a model file carries it without pickle, and it is examined whole when it comes back.

    number    1 column  (x - centre) / scale, a missing one filled with the median; +1 column "was missing" if training had any;
              dates and times are numbers too, of seconds
    category  1 column for each of the commonest 64 values; a value never seen is zeros; +1 column "was missing" likewise
    text      TF-IDF of words and pairs of words, then a truncated SVD: up to 100 columns
    vector    a list of numbers in one cell, as it is
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.standard_scaler import StandardScaler
from headcount.readers.tfidf import Tfidf
from headcount.readers.values import as_float, as_vectors, factorize, nfc, time_kind

FORMAT = 1
KINDS = ("images", "features", "table", "text")
MAX_CATEGORIES = 64
TIME_KINDS = ("dates", "times of day", "durations")
_MAX_COUNT = 1 << 20
_MAX_INSTANCE_SIZE = 1 << 26  # numbers in one instance


@dataclass(frozen=True)
class Field:
    """A column and how it is taken; after learning, with what was learned of it."""

    name: str
    kind: str  # number, category, text or vector
    fill: float = 0.0
    centre: float = 0.0
    scale: float = 1.0
    missing: bool = False  # training rows had missing values: a column of its own says so
    clock: str = ""  # dates, times of day or durations, in seconds; else plain numbers
    categories: tuple[str, ...] = ()
    length: int = 0  # of a vector
    tfidf: Tfidf | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", nfc(self.name))  # a model of before may have it as its file had

    @property
    def width(self) -> int:
        """Columns of features this becomes."""
        widths = {"number": 1, "category": len(self.categories), "vector": self.length}
        return (self.tfidf.width if self.tfidf else 0 if self.kind == "text" else widths[self.kind]) + self.missing

    @property
    def scaler(self) -> StandardScaler:
        """Of a column of numbers."""
        return StandardScaler(np.array([self.centre]), np.array([self.scale]))

    @property
    def feature_names(self) -> tuple[str, ...]:
        """The features' names, for people who ask a forest what it looked at."""
        tail = (f"{self.name} is missing",) if self.missing else ()
        if self.kind == "number":
            return (self.name, *tail)
        if self.kind == "category":
            return (*(f"{self.name}={c}" for c in self.categories), *tail)
        return tuple(f"{self.name}[{i}]" for i in range(self.width))


@dataclass(frozen=True)
class Preprocessor:
    """The preparation of one model. ``apply`` gives the features of any table that has the columns."""

    kind: str
    fields: tuple[Field, ...] = ()
    shape: tuple[int, ...] = ()  # of one instance
    roles: dict[str, Any] = field(default_factory=dict)  # the roles of the columns, as Named takes them

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(name for f in self.fields for name in f.feature_names)

    def transform(self, raw: Any) -> np.ndarray:
        """(n, D) float32 of a pyarrow table; what is numbers already comes back as it is."""
        if not self.fields:
            return raw
        out = np.zeros((raw.num_rows, self.shape[0]), dtype=np.float32)
        start = 0
        for f in self.fields:
            if f.name not in raw.column_names:
                raise HeadcountError(f"the model needs a column {f.name!r} that the data lack")
            _TRANSFORMS[f.kind](f, raw.column(f.name), out[:, start : start + f.width])
            start += f.width
        return out

    # -- into a model file and back -----------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Everything but the arrays, as JSON takes it."""
        fields = []
        for f in self.fields:
            d: dict[str, Any] = {"name": f.name, "kind": f.kind}
            if f.kind == "number":
                d |= {"fill": f.fill, "centre": f.centre, "scale": f.scale, "missing": f.missing}
                d |= {"clock": f.clock} if f.clock else {}
            if f.kind == "category":
                d |= {"categories": list(f.categories), "missing": f.missing}
            if f.kind == "vector":
                d |= {"length": f.length}
            if f.tfidf is not None:
                d |= {"vocabulary": list(f.tfidf.vocabulary)}
            fields.append(d)
        return {"format": FORMAT, "kind": self.kind, "shape": list(self.shape), "named": self.roles, "fields": fields}

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, by the names under which safetensors keeps them."""
        return {k: v for i, f in enumerate(self.fields) if f.tfidf for k, v in f.tfidf.arrays(f"text.{i}").items()}

    @classmethod
    def from_parts(cls, data: Any, arrays: Mapping[str, Any] | None = None) -> Preprocessor:
        """Back from a file that may be anybody's: every name, number and shape is looked at, nothing is run."""
        from headcount.readers.columns import ColumnRoles

        arrays = dict(arrays or {})
        _check_keys(data, {"format", "kind", "shape", "named", "fields"}, "the preparation")
        if data["format"] != FORMAT:
            raise _damaged(f"it has format {data['format']!r}, this version reads {FORMAT}")
        if data["kind"] not in KINDS:
            raise _damaged(f"kind {data['kind']!r} is none of {', '.join(KINDS)}")
        shape = data["shape"]
        if not (isinstance(shape, list) and len(shape) in (1, 3) and all(_count(n) for n in shape)):
            raise _damaged(f"shape {shape!r}")
        if (data["kind"] == "images") != (len(shape) == 3) or math.prod(shape) > _MAX_INSTANCE_SIZE:
            raise _damaged(f"{data['kind']} of shape {shape}")
        if not isinstance(data["fields"], list) or len(data["fields"]) > _MAX_COUNT:
            raise _damaged("fields must be a list")
        fields = tuple(_parse_field(d, i, arrays) for i, d in enumerate(data["fields"]))
        names = {n for i, f in enumerate(fields) if f.tfidf for n in f.tfidf.arrays(f"text.{i}")}
        if set(arrays) != names:
            raise _damaged(f"arrays {sorted(set(arrays) ^ names)[:4]} do not belong to its columns")
        if bool(fields) != (data["kind"] in ("table", "text")) or (fields and sum(f.width for f in fields) != shape[0]):
            raise _damaged(f"its columns do not make {shape} features")
        if len({f.name for f in fields}) < len(fields):
            raise _damaged("two of its columns have one name")
        if not isinstance(data["named"], dict) or set(data["named"]) - set(ColumnRoles.__dataclass_fields__):
            raise _damaged("named must say roles of columns")
        return cls(data["kind"], fields, tuple(shape), ColumnRoles(**data["named"]).to_json())


# -- learning -----------------------------------------------------------------------------------------------------------


def fit_field(f: Field, column: pa.ChunkedArray, rows: np.ndarray | None) -> Field:
    """One column, over these rows only."""
    if f.kind == "number":
        x = as_float(column)
        x = x if rows is None else x[rows]
        there = x[~np.isnan(x)]
        if len(there) == 0:
            return Field(f.name, "number", missing=False, clock=time_kind(column.type))
        return replace(
            number_fields(there[:, None], [f.name])[0], missing=len(there) < len(x), clock=time_kind(column.type)
        )
    if f.kind == "category":
        codes, values = factorize(column)
        codes = codes if rows is None else codes[rows]
        count = np.bincount(codes[codes >= 0], minlength=len(values))
        best = sorted(range(len(values)), key=lambda k: (-count[k], values[k]))[:MAX_CATEGORIES]
        kept = tuple(sorted(values[k] for k in best if count[k]))
        return Field(f.name, "category", categories=kept, missing=bool((codes < 0).any()))
    if f.kind == "vector":
        return Field(f.name, "vector", length=as_vectors(column, f.name).shape[1])
    return Field(f.name, "text", tfidf=Tfidf.fit(column, rows, f.name))


def number_fields(x: np.ndarray, names: Sequence[str]) -> tuple[Field, ...]:
    """The fields of (N, D) finite numbers whose columns have these names."""
    x = np.asarray(x, np.float64)
    scaler = StandardScaler.fit(x)
    largest = np.abs(x).max(0)
    largest = np.where(largest > 0, largest, 1.0)  # the median of two very large numbers stays finite
    medians = np.median(x / largest, axis=0) * largest
    stats = zip(names, medians.tolist(), scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)
    return tuple(Field(name, "number", fill, mean, scale) for name, fill, mean, scale in stats)


# -- applying -----------------------------------------------------------------------------------------------------------


def check_time_kind(f: Field, column: pa.ChunkedArray, origin: str = "the data") -> None:
    """Numbers are not dates, and a day is not a time of day."""
    if f.kind == "number" and column.null_count < len(column) and (now := time_kind(column.type)) != f.clock:
        has, had = now or "numbers", f.clock or "numbers"
        raise HeadcountError(f"column {f.name!r} of {origin} holds {has}, the model was fitted on {had}")


def _transform_number(f: Field, column: pa.ChunkedArray, out: np.ndarray) -> None:
    check_time_kind(f, column)
    x = as_float(column)
    gone = np.isnan(x)
    if f.missing:
        out[:, 1] = gone
    out[:, 0] = f.scaler.transform(np.where(gone, f.fill, x)[:, None])[:, 0]


def _transform_category(f: Field, column: pa.ChunkedArray, out: np.ndarray) -> None:
    codes, values = factorize(column)
    place = {c: k for k, c in enumerate(f.categories)}
    to = np.array([place.get(v, -1) for v in values] + [-1])[codes]  # code -1 (missing) reads the last entry
    rows = np.flatnonzero(to >= 0)
    out[rows, to[rows]] = 1
    if f.missing:
        out[:, -1] = codes < 0


def _transform_text(f: Field, column: pa.ChunkedArray, out: np.ndarray) -> None:
    assert f.tfidf is not None
    f.tfidf.transform(column, out)


def _transform_vector(f: Field, column: pa.ChunkedArray, out: np.ndarray) -> None:
    x = as_vectors(column, f.name)
    if x.shape[1] != f.length:
        raise HeadcountError(f"column {f.name!r} holds lists of {x.shape[1]} numbers, the model takes {f.length}")
    out[:] = x


_TRANSFORMS: dict[str, Callable[[Field, pa.ChunkedArray, np.ndarray], None]] = {
    "number": _transform_number, "category": _transform_category, "text": _transform_text, "vector": _transform_vector,
}  # fmt: skip


# -- checks of a file that came back --------------------------------------------------------------------------------------


def _parse_field(d: Any, i: int, arrays: Mapping[str, Any]) -> Field:
    kind = d.get("kind") if isinstance(d, dict) else None
    needs = {
        "number": {"fill", "centre", "scale", "missing"},
        "category": {"categories", "missing"},
        "vector": {"length"},
        "text": {"vocabulary"},
    }
    if not isinstance(kind, str) or kind not in needs:
        raise _damaged(f"column {i} has kind {kind!r}")
    _check_keys(d, {"name", "kind"} | needs[kind] | ({"clock"} & set(d) if kind == "number" else set()), f"column {i}")
    if not isinstance(d["name"], str) or not isinstance(d.get("missing", False), bool):
        raise _damaged(f"column {i} is not named, or not said to miss values")
    if kind == "number":
        numbers_ = [d["fill"], d["centre"], d["scale"]]
        if not all(isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in numbers_):
            raise _damaged(f"column {d['name']!r} needs finite numbers, got {numbers_}")
        if d.get("clock", TIME_KINDS[0]) not in TIME_KINDS:
            raise _damaged(f"column {d['name']!r} counts {d['clock']!r}")
        if d["scale"] <= 0:
            raise _damaged(f"column {d['name']!r} is divided by {d['scale']}")
    if kind == "category":
        _check_texts(d["categories"], f"the categories of {d['name']!r}", MAX_CATEGORIES)
        d = d | {"categories": tuple(d["categories"])}
    if kind == "vector" and not _count(d["length"]):
        raise _damaged(f"column {d['name']!r} has length {d['length']!r}")
    if kind == "text":
        _check_texts(d["vocabulary"], f"the words of {d['name']!r}", _MAX_COUNT)
        words = Tfidf.from_arrays(tuple(d["vocabulary"]), arrays, f"text.{i}", _damaged)
        return Field(d["name"], "text", tfidf=words)
    return Field(**d)


def _check_keys(data: Any, wanted: set[str], what: str) -> None:
    if not isinstance(data, dict) or set(data) != wanted:
        got = sorted(map(str, data))[:8] if isinstance(data, dict) else type(data).__name__
        raise _damaged(f"{what} has {got} and not {sorted(wanted)}")


def _check_texts(texts: Any, what: str, most: int) -> None:
    if not isinstance(texts, list) or len(texts) > most or not all(isinstance(v, str) for v in texts):
        raise _damaged(f"{what} must be a list of at most {most} texts")
    if len(set(texts)) < len(texts):
        raise _damaged(f"{what} hold one twice")


def _count(n: Any) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and 0 < n <= _MAX_COUNT


def _damaged(why: str) -> HeadcountError:
    return HeadcountError(f"the model's preparation is damaged or not ours: {why}; fit the model again")

"""From columns of a table to features: what is fitted on training rows, applied to any rows and stored with a model.

    number    1 column  (x - mean) / scale, a missing one filled with the median; +1 column "is missing" if training had any;
              dates and times are numbers of seconds
    category  1 column for each of the 64 most frequent values; a value not seen in training is zeros; +1 column "is missing"
    text      TF-IDF of words and pairs of words, then a truncated SVD: up to 100 columns
    vector    a list of numbers in one cell, unchanged

A fitted preprocessor is plain JSON and arrays, so that a model file needs no pickle, and a file is validated when it is read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import NO_ROLES, ColumnRoles, abbreviate, factorize, nfc
from headcount.readers.transforms import StandardScaler, Tfidf, as_float, as_vectors, time_kind

FORMAT = 2
_KINDS = ("images", "features", "table", "text")
MAX_CATEGORIES = 64
TIME_KINDS = ("", "dates", "times of day", "durations")
_MAX_COUNT, _MAX_INSTANCE_SIZE = 1 << 20, 1 << 26  # words or categories, and numbers in one instance


@dataclass(frozen=True)
class Field:
    """A column and what it is used as; after fitting, with its statistics."""

    name: str
    kind: str  # number, category, text or vector
    fill: float = 0.0  # the median
    mean: float = 0.0
    scale: float = 1.0
    missing: bool = False  # training rows had missing values: an indicator column follows
    time_kind: str = ""  # one of TIME_KINDS, in seconds; empty for plain numbers
    categories: tuple[str, ...] = ()
    length: int = 0  # of a vector
    tfidf: Tfidf | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", nfc(self.name))

    @property
    def width(self) -> int:
        """Number of features."""
        if self.kind == "text":
            return self.tfidf.width if self.tfidf else 0
        return {"number": 1, "category": len(self.categories), "vector": self.length}[self.kind] + self.missing

    @property
    def scaler(self) -> StandardScaler:
        return StandardScaler(np.array([self.mean]), np.array([self.scale]))

    @property
    def feature_names(self) -> tuple[str, ...]:
        indicator = (f"{self.name} is missing",) if self.missing else ()
        if self.kind == "number":
            return (self.name, *indicator)
        if self.kind == "category":
            return (*(f"{self.name}={c}" for c in self.categories), *indicator)
        return tuple(f"{self.name}[{i}]" for i in range(self.width))

    def fit(self, column: pa.ChunkedArray, rows: np.ndarray | None) -> Field:
        """This column, fitted to these rows only."""
        rows = np.arange(len(column)) if rows is None else rows
        if self.kind == "number":
            kind, x = time_kind(column.type), as_float(column)[rows]
            present = x[~np.isnan(x)]
            if len(present) == 0:
                return Field(self.name, "number", time_kind=kind)
            return replace(number_fields(present[:, None], [self.name])[0], missing=len(present) < len(x), time_kind=kind)
        if self.kind == "category":
            codes, values = factorize(column)
            codes = codes[rows]
            count = np.bincount(codes[codes >= 0], minlength=len(values))
            frequent = sorted(range(len(values)), key=lambda k: (-count[k], values[k]))[:MAX_CATEGORIES]
            categories = tuple(sorted(values[k] for k in frequent if count[k]))
            return replace(self, categories=categories, missing=bool((codes < 0).any()))
        if self.kind == "vector":
            return replace(self, length=as_vectors(column, self.name).shape[1])
        return replace(self, tfidf=Tfidf.fit(column, rows, self.name))

    def check_time_kind(self, column: pa.ChunkedArray, origin: str = "the data") -> None:
        """Refuse dates where the model was fitted on numbers, times of day where it was fitted on dates, and so on."""
        if self.kind == "number" and column.null_count < len(column) and (kind := time_kind(column.type)) != self.time_kind:
            problem = f"column {self.name!r} of {origin} holds {kind or 'numbers'}"
            raise HeadcountError(f"{problem}, the model was fitted on {self.time_kind or 'numbers'}")

    def transform(self, column: pa.ChunkedArray, out: np.ndarray) -> None:
        """Fill ``out`` (n, width)."""
        if self.kind == "number":
            self.check_time_kind(column)
            x = as_float(column)
            missing = np.isnan(x)
            out[:, -1] = missing  # the same column as the next where there is no indicator
            out[:, 0] = self.scaler.transform(np.where(missing, self.fill, x)[:, None])[:, 0]
        elif self.kind == "category":
            codes, values = factorize(column)
            position = {c: k for k, c in enumerate(self.categories)}
            category = np.array([position.get(v, -1) for v in values] + [-1])[codes]  # code -1 (missing) reads the last
            rows = np.flatnonzero(category >= 0)
            out[rows, category[rows]] = 1
            if self.missing:
                out[:, -1] = codes < 0
        elif self.kind == "vector":
            x = as_vectors(column, self.name)
            if x.shape[1] != self.length:
                raise HeadcountError(f"column {self.name!r} holds lists of {x.shape[1]} numbers, the model takes {self.length}")
            out[:] = x
        elif self.tfidf is not None:
            self.tfidf.transform(column, out)


@dataclass(frozen=True)
class Preprocessor:
    """Which columns become features, and how; no fields where instances are numbers already."""

    kind: str  # images, features, table or text
    fields: tuple[Field, ...] = ()
    shape: tuple[int, ...] = ()  # of one instance; of columns it is known when they are fitted
    roles: ColumnRoles = NO_ROLES  # as resolved, so that a model recognises the columns of new data

    @property
    def feature_names(self) -> tuple[str, ...]:
        return tuple(name for f in self.fields for name in f.feature_names)

    def fit(self, table: Any, rows: np.ndarray | None = None) -> Preprocessor:
        """The same, fitted: means, categories and vocabularies of these rows of a pyarrow table (None: all)."""
        if not self.fields:
            return self
        fields = tuple(f.fit(table.column(f.name), rows) for f in self.fields)
        width = sum(f.width for f in fields)
        if width == 0:
            raise HeadcountError("no column is left to learn from: all of them are empty in the training bags")
        return replace(self, fields=fields, shape=(width,))

    def transform(self, raw: Any) -> np.ndarray:
        """(n, D) float32 from a pyarrow table that has the columns; an array is returned unchanged."""
        if not self.fields:
            return raw
        out = np.zeros((raw.num_rows, self.shape[0]), dtype=np.float32)
        start = 0
        for f in self.fields:
            if f.name not in raw.column_names:
                raise HeadcountError(f"the model needs column {f.name!r}, which the data do not have; add it")
            f.transform(raw.column(f.name), out[:, start : start + f.width])
            start += f.width
        return out

    def to_json(self) -> dict[str, Any]:
        """Everything except the arrays."""
        fields = []
        for f in self.fields:
            values = {key: getattr(f, key) for key in ("name", "kind", *_STORED[f.kind]) if key != "vocabulary"}
            data = {key: list(v) if isinstance(v, tuple) else v for key, v in values.items()}
            fields.append(data if f.tfidf is None else data | {"vocabulary": list(f.tfidf.vocabulary)})
        head = {"format": FORMAT, "kind": self.kind, "shape": list(self.shape)}
        return head | {"roles": self.roles.to_json(), "fields": fields}

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays, by their names in the safetensors file."""
        return {k: v for i, f in enumerate(self.fields) if f.tfidf for k, v in f.tfidf.arrays(f"text.{i}").items()}

    @classmethod
    def from_parts(cls, data: Any, arrays: Mapping[str, Any] | None = None) -> Preprocessor:
        """Restore from a file that is not trusted: every name, number and shape is validated, no code is run."""
        arrays = dict(arrays or {})
        _check_keys(data, {"format", "kind", "shape", "roles", "fields"}, "the preprocessor")
        kind, shape = data["kind"], data["shape"]
        if data["format"] != FORMAT:
            raise _invalid(f"it has format {data['format']!r}, this version reads {FORMAT}")
        if kind not in _KINDS:
            raise _invalid(f"kind {kind!r} is none of {', '.join(_KINDS)}")
        is_shape = isinstance(shape, list) and all(map(_is_count, shape)) and math.prod(shape) <= _MAX_INSTANCE_SIZE
        if not is_shape or len(shape) != (3 if kind == "images" else 1):
            raise _invalid(f"{kind} of shape {shape!r}")
        if not isinstance(data["fields"], list):
            raise _invalid("fields must be a list")
        fields = tuple(_parse_field(d, i, arrays) for i, d in enumerate(data["fields"]))
        names = {n for i, f in enumerate(fields) if f.tfidf for n in f.tfidf.arrays(f"text.{i}")}
        if set(arrays) != names:
            raise _invalid(f"arrays {sorted(set(arrays) ^ names)[:4]} do not belong to its columns")
        if bool(fields) != (kind in ("table", "text")) or (fields and sum(f.width for f in fields) != shape[0]):
            raise _invalid(f"its columns do not make {shape} features")
        if len({f.name for f in fields}) < len(fields):
            raise _invalid("two of its columns have one name")
        if not isinstance(data["roles"], dict) or set(data["roles"]) - set(ColumnRoles.__dataclass_fields__):
            raise _invalid("roles must name roles of columns")
        return cls(kind, fields, tuple(shape), ColumnRoles(**data["roles"]))


def number_fields(x: np.ndarray, names: Sequence[str]) -> tuple[Field, ...]:
    """Fields of (N, D) finite numbers whose columns have these names."""
    x = np.asarray(x, np.float64)
    scaler = StandardScaler.fit(x)
    largest = np.abs(x).max(0)
    largest = np.where(largest > 0, largest, 1.0)  # so that the median of two very large numbers stays finite
    medians = np.median(x / largest, axis=0) * largest
    stats = zip(names, medians.tolist(), scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)
    return tuple(Field(name, "number", median, mean, scale) for name, median, mean, scale in stats)


def _parse_field(data: Any, i: int, arrays: Mapping[str, Any]) -> Field:
    kind = data.get("kind") if isinstance(data, dict) else None
    if not isinstance(kind, str) or kind not in _STORED:
        raise _invalid(f"column {i} has kind {kind!r}")
    _check_keys(data, {"name", "kind", *_STORED[kind]}, f"column {i}")
    for key, is_valid in {"name": lambda v: isinstance(v, str), **_STORED[kind]}.items():
        if not is_valid(data[key]):
            raise _invalid(f"column {i} has {key} {abbreviate(data[key])}")
    if kind == "text":
        return Field(data["name"], kind, tfidf=Tfidf.from_arrays(tuple(data["vocabulary"]), arrays, f"text.{i}", _invalid))
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in data.items()}
    return Field(**values)


def _check_keys(data: Any, expected: set[str], what: str) -> None:
    if not isinstance(data, dict) or set(data) != expected:
        got = sorted(map(str, data))[:8] if isinstance(data, dict) else type(data).__name__
        raise _invalid(f"{what} has {got} and not {sorted(expected)}")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value <= _MAX_COUNT


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _are_texts(value: Any, most: int) -> bool:
    are_texts = isinstance(value, list) and all(isinstance(v, str) for v in value)
    return are_texts and len({*value}) == len(value) <= most


_STORED: dict[str, dict[str, Callable[[Any], bool]]] = {  # of a field besides its name and kind, and what is valid
    "number": {
        "fill": _is_finite, "mean": _is_finite, "scale": lambda v: _is_finite(v) and v > 0,
        "missing": lambda v: isinstance(v, bool), "time_kind": TIME_KINDS.__contains__,
    },
    "category": {"categories": lambda v: _are_texts(v, MAX_CATEGORIES), "missing": lambda v: isinstance(v, bool)},
    "vector": {"length": _is_count},
    "text": {"vocabulary": lambda v: _are_texts(v, _MAX_COUNT)},
}  # fmt: skip


def _invalid(why: str) -> HeadcountError:
    return HeadcountError(f"the model's preprocessor is damaged or not from headcount: {why}; fit the model again")

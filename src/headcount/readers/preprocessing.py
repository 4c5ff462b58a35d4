"""From columns of a table to features: what is fitted on training rows, applied to any rows and stored with a model.

    number    1 column  (x - mean) / scale, a missing one filled with the median; +1 column "is missing" if training had any;
              dates and times are numbers of seconds
    category  1 column for each of the 64 most frequent values; a value not seen in training is zeros; +1 column "is missing"
    text      TF-IDF of words and pairs of words, then a truncated SVD: up to 100 columns
    embedding the numbers that an encoder has made of a text (text_encoders.py): their principal components
    vector    a list of numbers in one cell, unchanged

A fitted preprocessor is plain JSON and arrays, so that a model file needs no pickle, and a file is validated when it is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import NO_ROLES, ColumnRoles, factorize, first_duplicate, nfc, preview
from headcount.readers.transforms import LARGEST, Projection, StandardScaler, Tfidf, as_float, as_vectors, time_kind, value_type

FORMAT = 2
MAX_CATEGORIES = 64
TIME_KINDS = ("", "dates", "times of day", "durations")
_MAX_COUNT, _MAX_SIZE = 1 << 20, 1 << 26  # numbers on one axis of an instance, and in all


@dataclass(frozen=True)
class Field:
    """A column and what it is used as; after fitting, with its statistics."""

    name: str
    kind: str  # number, category, text, embedding or vector
    fill: float = 0.0  # the median
    mean: float = 0.0
    scale: float = 1.0
    missing: bool = False  # training rows had missing values: an indicator column follows
    time_kind: str = ""  # one of TIME_KINDS, in seconds; empty for plain numbers
    categories: tuple[str, ...] = ()
    length: int = 0  # of a vector or an embedding
    encoder: str = ""  # of an embedding: its name, and the sha256 of its files
    digest: str = ""
    tfidf: Tfidf | None = None
    projection: Projection | None = None  # of an embedding

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", nfc(self.name))

    @property
    def width(self) -> int:
        """Number of features."""
        n_words = self.tfidf.width if self.tfidf else 0
        n_components = len(self.projection.components) if self.projection else 0
        widths = {"number": 1, "category": len(self.categories), "text": n_words, "embedding": n_components}
        return widths.get(self.kind, self.length) + self.missing

    @property
    def is_text(self) -> bool:
        return self.kind in ("text", "embedding")

    @property
    def column(self) -> str:
        """The column of the content that becomes features: embeddings stand beside their text."""
        return f"{self.name}: embedding" if self.kind == "embedding" else self.name

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

    def fit(self, column: pa.ChunkedArray, rows: np.ndarray) -> Field:
        """This column, fitted to these rows only."""
        if self.kind == "number":
            kind, x = time_kind(value_type(column)), as_float(column)[rows]
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
        if self.kind == "embedding":
            return replace(self, projection=Projection.fit(as_vectors(column, self.name)[rows]))
        return replace(self, tfidf=Tfidf.fit(column, rows, self.name))

    def check_time_kind(self, column: pa.ChunkedArray, origin: str = "the data") -> None:
        """Refuse dates where the model was fitted on numbers, times of day where it was fitted on dates, and so on."""
        kind = time_kind(value_type(column))
        if self.kind == "number" and column.null_count < len(column) and kind != self.time_kind:
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
        elif self.kind in ("vector", "embedding"):
            x = as_vectors(column, self.name)
            if x.shape[1] != self.length:
                raise HeadcountError(f"column {self.name!r} holds lists of {x.shape[1]} numbers, the model takes {self.length}")
            out[:] = x if self.projection is None else self.projection.transform(x)
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
        rows = np.arange(table.num_rows) if rows is None else rows
        fields = tuple(f.fit(table.column(f.column), rows) for f in self.fields)
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
            if f.column not in raw.column_names:
                raise HeadcountError(f"the model needs column {f.name!r}, which the data do not have; add it")
            f.transform(raw.column(f.column), out[:, start : start + f.width])
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
        fitted = [(i, f.tfidf or f.projection) for i, f in enumerate(self.fields)]
        return {k: v for i, part in fitted if part for k, v in part.arrays(f"text.{i}").items()}

    @classmethod
    def from_parts(cls, data: Any, arrays: Mapping[str, Any] | None = None) -> Preprocessor:
        """Restore from a file that is not trusted: it must hold just what would be written, and no code is run."""
        arrays = dict(arrays or {})
        try:
            if data["format"] != FORMAT:
                raise HeadcountError(f"it has format {data['format']!r}, this version reads {FORMAT}")
            fields = []  # what has another type becomes another value, and is noticed below
            for i, d in enumerate(data["fields"]):
                values: dict[str, Any] = {key: convert(d[key]) for key, convert in _STORED[d["kind"]].items()}
                if "vocabulary" in values:
                    values = {"tfidf": Tfidf.from_arrays(values["vocabulary"], arrays, f"text.{i}")}
                if d["kind"] == "embedding":
                    values["projection"] = Projection.from_arrays(values["length"], arrays, f"text.{i}")
                fields.append(Field(str(d["name"]), d["kind"], **values))
            shape = tuple(map(int, data["shape"]))
            preprocessor = cls(str(data["kind"]), tuple(fields), shape, ColumnRoles(**data["roles"]))
            preprocessor._validate()
            restored, given = (json.dumps(value, sort_keys=True) for value in (preprocessor.to_json(), data))
            if restored != given or set(preprocessor.arrays()) != set(arrays):
                raise HeadcountError("its JSON and its arrays do not belong together")
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as e:
            why = str(e) if isinstance(e, HeadcountError) else f"{type(e).__name__} {e}"
            problem = f"the model's preprocessor is damaged or not from headcount: {why[:200]}"
            raise HeadcountError(f"{problem}; fit the model again") from None
        return preprocessor

    def _validate(self) -> None:
        """Refuse what no fitting makes."""
        n_axes = {"images": 3, "features": 1, "table": 1, "text": 1}.get(self.kind)
        if n_axes != len(self.shape) or not all(0 < n <= _MAX_COUNT for n in self.shape) or math.prod(self.shape) > _MAX_SIZE:
            raise HeadcountError(f"{self.kind} of shape {self.shape}")
        is_table = self.kind in ("table", "text")
        if is_table != bool(self.fields) or (is_table and sum(f.width for f in self.fields) != self.shape[0]):
            raise HeadcountError(f"its columns do not make {self.shape} features")
        if (name := first_duplicate(f.name for f in self.fields)) is not None:
            raise HeadcountError(f"two of its columns are called {name!r}")
        for f in self.fields:
            is_finite = all(map(math.isfinite, (f.fill, f.mean, f.scale))) and f.scale > 0
            is_unique = len({*f.categories}) == len(f.categories) <= MAX_CATEGORIES
            if not is_finite or not is_unique or f.time_kind not in TIME_KINDS:
                values = (f.fill, f.mean, f.scale, f.time_kind, *f.categories)
                raise HeadcountError(f"column {f.name!r} has values that fitting does not give: {preview(values, 4)}")


def number_fields(x: np.ndarray, names: Sequence[str]) -> tuple[Field, ...]:
    """Fields of (N, D) finite numbers whose columns have these names."""
    scaler, medians = StandardScaler.fit(x), np.median(np.clip(x, -LARGEST, LARGEST), axis=0)
    stats = zip(names, medians.tolist(), scaler.mean_.tolist(), scaler.scale_.tolist(), strict=True)
    return tuple(Field(name, "number", median, mean, scale) for name, median, mean, scale in stats)


def _texts(values: Any) -> tuple[str, ...]:
    return tuple(map(str, values))


_STORED: dict[str, dict[str, Callable[[Any], Any]]] = {  # of a field besides its name and kind, and the type of each
    "number": {"fill": float, "mean": float, "scale": float, "missing": bool, "time_kind": str},
    "category": {"categories": _texts, "missing": bool},
    "vector": {"length": int},
    "embedding": {"length": int, "encoder": str, "digest": str},
    "text": {"vocabulary": _texts},
}

"""Columns as numbers: their values, standardisation (the one place for it in the package) and TF-IDF of texts.

Standardisation is computed in float64 and only the result rounded: a time stamp (1.7e9) has no digits left in float32 until
its mean is gone. Texts become TF-IDF of words and pairs of words, then a truncated SVD, stored as a vocabulary and two arrays.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from headcount.errors import HeadcountError

LARGEST = 1e140  # of a number, so that sums of squares stay finite
MAX_COMPONENTS = 100
_MAX_VOCABULARY = 20_000
_SAMPLE = 200_000  # texts that suffice to fit the vocabulary
_CHUNK = 1 << 14
_MAX_DEVIATIONS = 1e6  # an outlier stays finite in float32, and so do the squares taken of it
_NUMBERS_AT_ONCE = 1 << 16
_TICKS = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second


def value_type(column: pa.ChunkedArray) -> pa.DataType:
    """The type of a column's values, whether or not they are encoded by a dictionary."""
    return column.type.value_type if pa.types.is_dictionary(column.type) else column.type


def parse_number(text: str) -> float:
    """A number as people write one; NaN for anything else."""
    try:
        return float(text.replace("_", "x"))  # Python accepts 1_000
    except ValueError:
        return math.nan


def as_float(column: pa.ChunkedArray) -> np.ndarray:
    """(n,) float64, NaN where missing; dates, times and durations in seconds at any resolution."""
    kind, a_second = value_type(column), 1.0
    column = column.cast(kind)
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
    """What a column of dates or times holds: dates, times of day or durations; empty for any other type."""
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return "dates"
    return "times of day" if pa.types.is_time(kind) else "durations" if pa.types.is_duration(kind) else ""


def as_vectors(column: pa.ChunkedArray, name: str) -> np.ndarray:
    """(n, length) float64 of a column of lists."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy())[0]) + 1
        raise HeadcountError(f"column {name!r} has no list in row {row}; fill it in or leave the row out")
    lengths = pc.call_function("list_value_length", [column]).to_numpy()
    differs = np.flatnonzero(lengths != lengths[:1])
    if len(differs) or lengths[0] == 0:
        row = int(differs[0]) if len(differs) else 0
        problem = f"column {name!r} holds a list of {int(lengths[row])} numbers in row {row + 1}"
        raise HeadcountError(f"{problem}; all must be of one length")
    flat = pc.call_function("list_flatten", [column]).cast(pa.float64()).to_numpy()
    with np.errstate(invalid="ignore"):
        bad = np.flatnonzero(~(np.abs(flat) <= np.finfo(np.float32).max))
    if len(bad):
        row = int(bad[0]) // int(lengths[0]) + 1
        raise HeadcountError(f"column {name!r} has {flat[bad[0]]} in its list in row {row}; every number must be finite")
    return flat.reshape(-1, int(lengths[0]))


@dataclass(frozen=True, eq=False)
class StandardScaler:
    """(x - mean) / scale for each of D columns, in float64; the scale of a column that does not vary is 1."""

    mean_: np.ndarray  # (D,)
    scale_: np.ndarray  # (D,)

    @classmethod
    def fit(cls, x: np.ndarray, min_deviation: float = 0.0) -> Self:
        """Mean and standard deviation of the columns of (N, D) finite numbers; beyond 1e140 a number counts as 1e140. A column
        whose deviation is not above ``min_deviation``, or not above the rounding error of its mean, is constant."""
        return cls.fit_chunks(lambda: (np.clip(x[b].astype(np.float64), -LARGEST, LARGEST) for b in _blocks(x)), min_deviation)

    @classmethod
    def fit_chunks(cls, chunks: Callable[[], Iterable[np.ndarray]], min_deviation: float = 0.0) -> Self:
        """The same for numbers that need not be in memory at once: ``chunks()`` yields (n, D) arrays, and is called twice."""
        total, squares, count = np.zeros(1), np.zeros(1), 0
        for chunk in chunks():
            total = total + chunk.astype(np.float64, copy=False).sum(0)
            count += len(chunk)
        mean = total / count
        for chunk in chunks():
            deviation = chunk.astype(np.float64, copy=False) - mean
            squares = squares + np.einsum("nd,nd->d", deviation, deviation)
        deviation = np.sqrt(squares / count)
        varies = deviation > np.maximum(1e-12 * np.abs(mean), max(min_deviation, 1e-300))
        return cls(mean, np.where(varies, deviation, 1.0))

    def deviations(self, x: np.ndarray) -> np.ndarray:
        """(n, D) float64: how many standard deviations each number lies from the mean; NaN stays NaN."""
        with np.errstate(over="ignore", invalid="ignore"):
            return x / self.scale_ - self.mean_ / self.scale_

    def transform(self, x: np.ndarray, dtype: Any = np.float32) -> np.ndarray:
        """(n, D) standardised numbers, at most a million deviations from the mean; NaN becomes 0, the mean."""
        x = np.asarray(x)
        z = np.empty(x.shape, dtype)
        for block in _blocks(x):
            part = self.deviations(x[block].astype(np.float64))
            part[np.isnan(part)] = 0.0
            z[block] = np.clip(part, -_MAX_DEVIATIONS, _MAX_DEVIATIONS, out=part)
        return z


def _blocks(x: np.ndarray) -> Iterator[slice]:
    """Rows that stay in the processor's cache together, so that no float64 copy is made of the whole."""
    rows = max(1, _NUMBERS_AT_ONCE // max(1, x.shape[1]))
    return (slice(start, start + rows) for start in range(0, len(x), rows))


@dataclass(frozen=True, eq=False)
class Tfidf:
    """V words, their idf (V,), and the K singular vectors (K, V) that texts are projected on; None: no projection."""

    vocabulary: tuple[str, ...]
    idf: np.ndarray
    components: np.ndarray | None

    @property
    def width(self) -> int:
        return len(self.vocabulary) if self.components is None else len(self.components)

    @classmethod
    def fit(cls, column: pa.ChunkedArray, rows: np.ndarray, name: str) -> Self:
        """Fit to the texts in these rows; deterministic."""
        from sklearn.decomposition import TruncatedSVD

        rows = rows[:: -(-len(rows) // _SAMPLE) or 1]
        vectorizer = _vectorizer(min_df=2 if len(rows) >= 50 else 1, max_features=_MAX_VOCABULARY)
        try:
            # the chunks are joined first: taking rows out of many chunks would search all of them
            texts, starts = pa.concat_arrays(column.cast(pa.large_string()).chunks), range(0, len(rows), _CHUNK)
            chunks = (_strings(texts.take(pa.array(rows[start : start + _CHUNK]))) for start in starts)
            x = vectorizer.fit_transform(chain.from_iterable(chunks))
        except ValueError:  # scikit-learn: empty vocabulary
            raise HeadcountError(f"column {name!r} has no words to learn from; is it the text?") from None
        words, idf = tuple(map(str, vectorizer.get_feature_names_out())), np.asarray(vectorizer.idf_, dtype=np.float64)
        k = min(MAX_COMPONENTS, len(rows) - 1)
        if len(words) <= MAX_COMPONENTS or k < 1:
            return cls(words, idf, None)
        svd = TruncatedSVD(k, random_state=0).fit(x)
        return cls(words, idf, np.ascontiguousarray(svd.components_, dtype=np.float32))

    def transform(self, column: pa.ChunkedArray, out: np.ndarray) -> None:
        """Fill ``out`` (n, K); a text without a known word is zeros."""
        vectorizer = _vectorizer(vocabulary={w: i for i, w in enumerate(self.vocabulary)})
        vectorizer.idf_ = self.idf
        for start in range(0, len(column), _CHUNK):
            x = vectorizer.transform(_strings(column.slice(start, _CHUNK)))
            out[start : start + _CHUNK] = x.toarray() if self.components is None else x @ self.components.T

    def count_oov(self, column: pa.ChunkedArray) -> tuple[int, int]:
        """How many texts have no known word, and how many were examined: those with any word among the first 20,000."""
        vocabulary, analyzer = {*self.vocabulary}, _vectorizer().build_analyzer()
        documents = [words for text in _strings(column.slice(0, _SAMPLE // 10)) if (words := analyzer(text))]
        return sum(vocabulary.isdisjoint(words) for words in documents), len(documents)

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        arrays = {f"{prefix}.idf": self.idf}
        return arrays if self.components is None else {**arrays, f"{prefix}.components": self.components}

    @classmethod
    def from_arrays(cls, words: tuple[str, ...], arrays: Mapping[str, Any], prefix: str) -> Self:
        """Restore from a file that is not trusted."""
        idf, components = arrays[f"{prefix}.idf"], arrays.get(f"{prefix}.components")
        if not 0 < len({*words}) == len(words):
            raise HeadcountError("it has no words, or a word twice")
        for a, dtype, most in ((idf, np.float64, None), (components, np.float32, MAX_COMPONENTS)):
            if a is None:
                continue
            shape = (len(words),) if most is None else (min(len(a), most), len(words))
            if not isinstance(a, np.ndarray) or a.dtype != dtype or a.shape != shape or not np.isfinite(a).all():
                raise HeadcountError(f"the arrays {prefix} do not fit its {len(words)} words")
        return cls(words, idf, components)


@dataclass(frozen=True, eq=False)
class Projection:
    """The first K principal components (K, D) of N rows, and their mean (D,). K is the square root of N: a few hundred bags say
    little about the many directions in which embeddings hardly differ."""

    mean: np.ndarray
    components: np.ndarray

    @classmethod
    def fit(cls, x: np.ndarray) -> Self:
        x = x[:: -(-len(x) // _SAMPLE)]
        mean = x.mean(0)
        _, vectors = np.linalg.eigh((x - mean).T @ (x - mean))
        largest = vectors[:, ::-1][:, : max(1, math.isqrt(len(x)))].T
        signs = np.sign(largest[np.arange(len(largest)), np.abs(largest).argmax(1)])  # eigenvectors have none of their own
        return cls(mean.astype(np.float32), np.ascontiguousarray(largest * signs[:, None], dtype=np.float32))

    def transform(self, x: np.ndarray) -> np.ndarray:
        """(n, D) -> (n, K)"""
        return (x - self.mean) @ self.components.T

    def arrays(self, prefix: str) -> dict[str, np.ndarray]:
        return {f"{prefix}.mean": self.mean, f"{prefix}.components": self.components}

    @classmethod
    def from_arrays(cls, length: int, arrays: Mapping[str, Any], prefix: str) -> Self:
        """Restore from a file that is not trusted."""
        mean, components = arrays[f"{prefix}.mean"], arrays[f"{prefix}.components"]
        for a, shape in ((mean, (length,)), (components, (min(len(components), length), length))):
            if not isinstance(a, np.ndarray) or a.dtype != np.float32 or a.shape != shape or not np.isfinite(a).all():
                raise HeadcountError(f"the arrays {prefix} do not fit embeddings of {length} numbers")
        return cls(mean, components)


def _vectorizer(**options: Any) -> Any:
    from sklearn.feature_extraction.text import TfidfVectorizer

    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, token_pattern=r"(?u)\b\w+\b", **options)


def _strings(values: Any) -> list[str]:
    return ["" if value is None else str(value) for value in values.to_pylist()]

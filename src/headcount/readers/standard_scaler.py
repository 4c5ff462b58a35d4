"""Numbers in a person's hands (an array, a DataFrame) as a method of ours takes them: centred in float64, then float32.

A time stamp (1.7e9) has no digits left in float32 until its mean is gone. Columns are prepared as those of a table that was
read (learned.py), so that a model fitted on a DataFrame can be asked about a file with the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from headcount.readers.columns import ColumnRoles, FeatureSchema
from headcount.readers.preprocessing import Field, Preprocessor


@dataclass(frozen=True, eq=False)
class StandardScaler:
    """Mean and deviation of D columns."""

    columns: Preprocessor  # numbered, whatever people call them

    @classmethod
    def fit(cls, x: np.ndarray) -> StandardScaler:
        """Learned from (N, D) finite numbers."""
        fields = tuple(Field(str(i), "number") for i in range(x.shape[1]))
        return cls(FeatureSchema("table", fields).fit(_table(x)))

    def transform(self, x: np.ndarray) -> np.ndarray:
        """(n, D) -> (n, D) float32."""
        return self.columns.transform(_table(x))

    @property
    def mean_(self) -> np.ndarray:
        return np.array([f.centre for f in self.columns.fields])

    @property
    def scale_(self) -> np.ndarray:
        return np.array([f.scale for f in self.columns.fields])

    def to_preprocessor(self, names: Sequence[str], bag: str | None) -> Preprocessor:
        """The preparation of a table whose columns are called so."""
        fields = tuple(replace(f, name=str(n)) for f, n in zip(self.columns.fields, names, strict=True))
        return replace(self.columns, fields=fields, roles=ColumnRoles(bag=bag).to_json())


def _table(x: np.ndarray) -> pa.Table:
    return pa.table({str(i): column for i, column in enumerate(np.ascontiguousarray(x.T))})

"""Numbers in a person's hands (an array, a DataFrame) as a method of ours takes them: centred in float64, then float32.

A time stamp (1.7e9) has no digits left in float32 until its mean is gone. Columns are prepared as those of a table that was
read (learned.py), so that a model fitted on a DataFrame can be asked about a file with the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from headcount.data.columns import Columns, Named
from headcount.data.learned import Field, Learned


@dataclass(frozen=True, eq=False)
class Standard:
    """Mean and deviation of D columns."""

    columns: Learned  # numbered, whatever people call them

    @classmethod
    def of(cls, x: np.ndarray) -> Standard:
        """Learned from (N, D) finite numbers."""
        fields = tuple(Field(str(i), "number") for i in range(x.shape[1]))
        return cls(Columns("table", fields).learn(_table(x)))

    def apply(self, x: np.ndarray) -> np.ndarray:
        """(n, D) -> (n, D) float32."""
        return self.columns.apply(_table(x))

    @property
    def centre(self) -> np.ndarray:
        return np.array([f.centre for f in self.columns.fields])

    @property
    def scale(self) -> np.ndarray:
        return np.array([f.scale for f in self.columns.fields])

    def named(self, names: Sequence[str], bag: str | None) -> Learned:
        """The preparation of a table whose columns are called so."""
        fields = tuple(replace(f, name=str(n)) for f, n in zip(self.columns.fields, names, strict=True))
        return replace(self.columns, fields=fields, named=Named(bag=bag).to_json())


def _table(x: np.ndarray) -> pa.Table:
    return pa.table({str(i): column for i, column in enumerate(np.ascontiguousarray(x.T))})

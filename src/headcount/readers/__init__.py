"""Reading a person's own files, tables and arrays as bags: ``read`` returns a ``BagDataset``."""

from headcount.readers.columns import ColumnRoles
from headcount.readers.dataset import BagDataset
from headcount.readers.reader import read

__all__ = ["BagDataset", "ColumnRoles", "read"]

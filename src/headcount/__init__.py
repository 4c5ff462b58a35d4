"""headcount: learn a classifier for single instances from the majority labels of bags."""

__version__ = "0.1.0"

"""Functions of records: which of MPEM's removals to report, paired tests, and the rows of a table."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record


def best_removal(sweep: list[Record]) -> Record:
    """The r with the smallest validation loss; the smallest r on ties. This is how the paper reports MPEM."""
    return min(sweep, key=lambda r: (r.data["fit"]["valid_loss"], r.recipe.removal))


@dataclass(frozen=True)
class Row:
    """One method on one data set and scenario: a record for each fold (and seed)."""

    label: str
    source: str
    scenario: str
    records: tuple[Record, ...]

    def score(self, metric: str) -> tuple[float, float, int]:
        """Mean, population standard deviation and number of runs; runs in which the metric is undefined do not count."""
        return mean_and_deviation(r.scores.get(metric) for r in self.records)


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float, float, int]:
    """As the paper prints them: the standard deviation divides by n.

    >>> mean_and_deviation([1.0, 3.0, None])
    (2.0, 1.0, 2)
    """
    defined = [v for v in values if v is not None and not math.isnan(v)]
    if not defined:
        return math.nan, math.nan, 0
    mean = math.fsum(defined) / len(defined)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in defined) / len(defined)), len(defined)


@dataclass(frozen=True)
class PairedTest:
    """One method against another on the same folds: the mean difference, a paired t-test's p, the number of folds."""

    difference: float
    p: float
    n: int


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """How much ``a`` is above ``b``, fold by fold; p is NaN for fewer than two folds, or if all differences are equal.

    >>> test = paired_t_test([0.50, 0.52, 0.54], [0.48, 0.49, 0.53])
    >>> round(test.difference, 3), round(test.p, 3), test.n
    (0.02, 0.074, 3)
    """
    if len(a) != len(b):
        raise HeadcountError(f"a paired test needs the same folds twice, got {len(a)} and {len(b)} values")
    differences = [x - y for x, y in zip(a, b, strict=True)]
    if not differences:
        return PairedTest(math.nan, math.nan, 0)
    mean = math.fsum(differences) / len(differences)
    if max(differences) - min(differences) <= 1e-9:  # one fold, or differences that are equal up to rounding: no test
        return PairedTest(mean, math.nan, len(differences))
    from scipy.stats import ttest_rel  # takes half a second to import

    return PairedTest(mean, float(ttest_rel(a, b).pvalue), len(differences))


def rows(records: Iterable[Record]) -> list[Row]:
    """Group records into table rows: folds and seeds go together, and MPEM's removals become one row by `best_removal`.

    Runs on other data, or with another version of a custom head, are another row.
    """
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    table = []
    for group in groups.values():
        members, first = _without_repetitions(group), group[0]
        if first.recipe.removal:
            sweeps: dict[tuple[int, int], list[Record]] = {}
            for record in members:
                sweeps.setdefault((record.recipe.fold, record.recipe.seed), []).append(record)
            members = [best_removal(sweep) for _, sweep in sorted(sweeps.items())]
        members = sorted(members, key=lambda r: (r.recipe.fold, r.recipe.seed))
        table.append(Row(first.label, first.recipe.source, first.recipe.scenario, tuple(members)))
    return table


def _without_repetitions(records: list[Record]) -> list[Record]:
    """Each run once: t1=1 and t1=1.0 are the same recipe under two keys. The newest counts."""
    newest: dict[Recipe, Record] = {}
    for record in sorted(records, key=lambda r: (str(r.data.get("provenance", {}).get("started")), r.key)):
        newest[record.recipe] = record
    if repeated := len(records) - len(newest):
        message = f"{repeated} of {len(records)} records of {records[0].label} repeat a run under another key"
        warnings.warn(f"{message}; the newest of each counts", HeadcountWarning, stacklevel=3)
    return [r for r in records if r is newest[r.recipe]]

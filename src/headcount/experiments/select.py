"""Rules over records: which removal to keep, and what a table row says. None of them looks at instance labels,
except ``oracle_removal``, which is named for it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headcount.errors import HeadcountError, HeadcountWarning
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

Rule = Callable[[list[Record]], Record]


def best_removal(sweep: list[Record]) -> Record:
    """The r with the smallest validation loss; the smallest r on ties. This is how the paper reports MPEM."""
    return min(sweep, key=lambda r: (r.data["fit"]["valid_loss"], r.recipe.removal))


def oracle_removal(sweep: list[Record]) -> Record:
    """The r with the best *test* instance accuracy: an upper bound, not a method."""
    return max(sweep, key=lambda r: (r.scores["instance_accuracy"], -r.recipe.removal))


@dataclass(frozen=True)
class Row:
    """One method on one data set and scenario: a record for each fold (and seed)."""

    label: str
    source: str
    scenario: str
    records: tuple[Record, ...]

    def score(self, metric: str) -> tuple[float, float, int]:
        """Mean, population deviation and number of runs; runs where the metric is undefined are left out."""
        return mean_and_deviation(r.scores.get(metric) for r in self.records)


def mean_and_deviation(values: Iterable[float | None]) -> tuple[float, float, int]:
    """As the paper prints them: the deviation divides by n.

    >>> mean_and_deviation([1.0, 3.0, None])
    (2.0, 1.0, 2)
    """
    seen = [v for v in values if v is not None and not math.isnan(v)]
    if not seen:
        return math.nan, math.nan, 0
    mean = math.fsum(seen) / len(seen)
    return mean, math.sqrt(math.fsum((v - mean) ** 2 for v in seen) / len(seen)), len(seen)


@dataclass(frozen=True)
class PairedTest:
    """One method against another on the same folds: the mean difference, a paired t-test's p, the number of folds."""

    difference: float
    p: float
    n: int


def paired_t_test(a: Sequence[float], b: Sequence[float]) -> PairedTest:
    """How much ``a`` is above ``b``, fold by fold; p is NaN for fewer than two folds, or where all differences are one.

    >>> made = paired([0.50, 0.52, 0.54], [0.48, 0.49, 0.53])
    >>> round(made.difference, 3), round(made.p, 3), made.n
    (0.02, 0.074, 3)
    """
    if len(a) != len(b):
        raise HeadcountError(f"a pair needs both its halves, got {len(a)} and {len(b)} values; give the same folds")
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    if not gaps:
        return PairedTest(math.nan, math.nan, 0)
    mean = math.fsum(gaps) / len(gaps)
    if max(gaps) - min(gaps) <= 1e-9:  # one fold, or differences that only rounding tells apart: no test
        return PairedTest(mean, math.nan, len(gaps))
    from scipy.stats import ttest_rel  # half a second to import: only who tests pays for it

    return PairedTest(mean, float(ttest_rel(a, b).pvalue), len(gaps))


def rows(records: Iterable[Record], rule: Rule = best_removal) -> list[Row]:
    """Group records into table rows: folds and seeds go together, and MPEM's removals become one row by the rule.
    What saw other data, or is another head's code, is another row."""
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(record.method, []).append(record)
    made = []
    for members in groups.values():
        members, first = _newest(members), members[0]
        if first.recipe.removal:
            folds: dict[tuple[int, int], list[Record]] = {}
            for m in members:
                folds.setdefault((m.recipe.fold, m.recipe.seed), []).append(m)
            members = [rule(sweep) for _, sweep in sorted(folds.items())]
        members = sorted(members, key=lambda m: (m.recipe.fold, m.recipe.seed))
        made.append(Row(first.label, first.recipe.source, first.recipe.scenario, tuple(members)))
    return made


def _newest(members: list[Record]) -> list[Record]:
    """Each run once: t1=1 and t1=1.0 are one recipe under two keys, and no two runs."""
    runs: dict[Recipe, Record] = {}
    for record in sorted(members, key=lambda r: (str(r.data.get("provenance", {}).get("started")), r.key)):
        runs[record.recipe] = record
    if more := len(members) - len(runs):
        said = f"{more} of {len(members)} records of {members[0].label} repeat a run under another key"
        warnings.warn(f"{said}; the newest of each counts", HeadcountWarning, stacklevel=3)
    return [r for r in members if r is runs[r.recipe]]

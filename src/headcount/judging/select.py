"""Rules over records: which removal to keep, and what a table row says. None of them looks at instance labels,
except ``oracle_removal``, which is named for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from headcount.judging.records import Record
from headcount.training.recipe import Recipe

Rule = Callable[[list[Record]], Record]


def best_removal(sweep: list[Record]) -> Record:
    """The r with the smallest validation loss; the smallest r on ties. This is how the paper reports MPEM."""
    return min(sweep, key=lambda r: (r.body["fit"]["valid_loss"], r.recipe.removal))


def oracle_removal(sweep: list[Record]) -> Record:
    """The r with the best *test* instance accuracy: an upper bound, not a method."""
    return max(sweep, key=lambda r: (r.scores["instance_accuracy"], -r.recipe.removal))


def fixed_removal(removal: float) -> Rule:
    """Always this r."""
    return lambda sweep: next(r for r in sweep if math.isclose(r.recipe.removal, removal))


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


def rows(records: Iterable[Record], rule: Rule = best_removal) -> list[Row]:
    """Group records into table rows: folds and seeds go together, and MPEM's removals become one row by the rule."""
    groups: dict[Recipe, list[Record]] = {}
    for record in records:
        recipe = record.recipe
        groups.setdefault(recipe.but(fold=0, seed=0, removal=float(recipe.removal > 0)), []).append(record)
    made = []
    for recipe, members in groups.items():
        if recipe.removal:
            folds: dict[tuple[int, int], list[Record]] = {}
            for m in members:
                folds.setdefault((m.recipe.fold, m.recipe.seed), []).append(m)
            members = [rule(sweep) for _, sweep in sorted(folds.items())]
        members = sorted(members, key=lambda m: (m.recipe.fold, m.recipe.seed))
        made.append(Row(recipe.label, recipe.source, recipe.scenario, tuple(members)))
    return made

"""Shares of each class in groups of instances (the values of a column, such as income or region), in all bags and in each.

The probabilities q of the instances of a bag are first made to agree with the bag's shares, and these with its label
(majority/bounds.py): q = P(y = k | x, bag). With weights w, group g of bag b has the count N_bg = sum w q among n_bg = sum w. Of the
whole bag, the interval of its share says by how much its count may be off, n_b s_b; of the group this is

    E_bg = n_b s_b V_bg / V_b,        Var N_bg = V_bg (1 - V_bg / V_b) + E_bg^2,        V = sum w^2 q (1 - q)

The share of the group is X = sum_b N_bg / n with n = sum_b n_bg. The errors E of all bags have one model as their cause, and are
added up as if they were the same; the others are independent; and bags (or groups of bags, which may resemble each other) vary
around X as a sample of G:

    n^2 Var X = sum_b V_bg (1 - V_bg / V_b) + (sum_b E_bg)^2 + G / (G - 1) sum_b (N_bg - X n_bg)^2

The interval is that of a beta distribution, cut at the bounds; Student's quantile widens the variance between few bags. A class
that might win a bag and never does has the bounds as its interval: labels say nothing of it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import pyarrow as pa
import torch
from scipy import stats

from headcount.bags import Bags, Segments
from headcount.errors import HeadcountError, check_choice, check_number
from headcount.inference.evaluate import has_votes
from headcount.majority.bounds import cell_bounds, match_shares, share_bounds, shares_given_labels
from headcount.majority.homogeneity import flip_shift, share_range
from headcount.majority.metrics import check_level
from headcount.majority.proportions import beta_interval
from headcount.models.predictions import Predictions
from headcount.readers.columns import factorize, preview
from headcount.readers.dataset import BagDataset

OF = ("all", "counted")
NUMBERS = ("share", "low", "high", "bound_low", "bound_high", "odds_low", "odds_high")
MAX_GROUPS = 200
_MAX_STEADY = 200_000  # instances from which steady_odds are found
_Z90 = 1.6448536  # the intervals of Predictions are this many standard deviations to each side


@dataclass(frozen=True)
class ShareTable:
    """The shares of C classes in R groups of instances.

    Attributes
    ----------
    classes
        (C,) names.
    bag, group
        (R,) the bag, or None for all of them, and the group. The first group is "all" instances.
    instances, bags
        (R,) how many instances there are, and in how many bags.
    share, low, high, bound_low, bound_high
        (R, C) the share, its interval, and the bounds that labels and sizes prove.
    odds_low, odds_high
        (R, C) how far the share moves if the odds of the class are wrong for every instance, by the factor that was asked for.
    steady_odds
        (R,) the least factor by which odds must be wrong for another class to become the largest; infinite if very large, NaN in single bags.
    """

    classes: tuple[str, ...]
    bag: Sequence[str | None]
    group: Sequence[str]
    instances: np.ndarray
    bags: np.ndarray
    share: np.ndarray
    low: np.ndarray
    high: np.ndarray
    bound_low: np.ndarray
    bound_high: np.ndarray
    odds_low: np.ndarray
    odds_high: np.ndarray
    steady_odds: np.ndarray

    def to_arrow(self) -> pa.Table:
        """A row for each group and class, with the columns (bag,) group, choice, share, low, high, bound_low, bound_high,
        odds_low, odds_high, instances, bags."""
        n = len(self.classes)
        columns: dict[str, Any] = {} if None in self.bag else {"bag": np.repeat(np.array(self.bag), n)}
        columns |= {"group": np.repeat(self.group, n), "choice": self.classes * len(self.group)}
        columns |= {name: getattr(self, name).ravel() for name in NUMBERS}
        return pa.table(columns | {"instances": np.repeat(self.instances, n), "bags": np.repeat(self.bags, n)})

    def take(self, rows: np.ndarray) -> Self:
        """These rows, by their numbers."""
        named = {key: [getattr(self, key)[r] for r in rows.tolist()] for key in ("bag", "group")}
        return replace(self, **named, **{key: v[rows] for key, v in vars(self).items() if isinstance(v, np.ndarray)})


def suppress_small(groups: ShareTable, in_bags: ShareTable, k: int) -> tuple[ShareTable, ShareTable]:
    """The tables of :func:`tabulate_shares` for readers who may not see fewer than k instances: of the bags only whole ones, which
    have k or more, and no group of fewer, or of fewer beside bags that lie in it entirely. What is then missing from the total
    could be computed, so it is two groups or more and k instances or more."""
    _, first, bag = np.unique(np.array(in_bags.bag), return_index=True, return_inverse=True)  # a bag's first row is all of it
    inside = in_bags.instances == in_bags.instances[first][bag]
    inside[first] = False
    number, size = {name: g for g, name in enumerate(groups.group[1:])}, groups.instances[1:]
    elsewhere = size.copy()  # the instances of a group in bags of several groups
    for row in np.flatnonzero(inside).tolist():
        elsewhere[number[in_bags.group[row]]] -= in_bags.instances[row]
    hidden = (size < k) | ((elsewhere > 0) & (elsewhere < k))
    for g in np.argsort(size, kind="stable"):
        if hidden.any() and (hidden.sum() == 1 or size[hidden].sum() < k):
            hidden[g] = True
    return groups.take(np.append(0, 1 + np.flatnonzero(~hidden))), in_bags.take(np.sort(first))


def tabulate_shares(
    dataset: BagDataset,
    predictions: Predictions,
    by: Sequence[str] = (),
    *,
    of: str = "all",
    level: float = 0.9,
    odds: float = 1.5,
) -> tuple[ShareTable, ShareTable]:
    """The shares of each class in each group of instances, in all bags, and in each bag, with intervals and bounds.

    Parameters
    ----------
    dataset, predictions
        What ``model.read`` returned, and what the model predicts of it. Labels in the dataset bound the shares.
    by
        Columns of the data whose values, or combinations of values, are the groups.
    of
        ``all`` instances, or only those of classes that are ``counted`` in the vote.
    level
        Of the intervals.
    odds
        The factor by which the odds of a class may be wrong, for ``odds_low`` and ``odds_high``.

    Examples
    --------
    >>> groups, bags = tabulate_shares(dataset, predictions, by=["tenure"])             # doctest: +SKIP
    >>> groups.to_arrow().to_pandas()                                                   # doctest: +SKIP
    """
    check_choice("of", of, OF)
    check_level(level)
    check_number("odds", odds, 1, 1e6, integer=False)
    bags, segments = dataset.bags, dataset.bags.segments()
    if bags.label_noise:  # a label that may have been replaced proves nothing
        bags = replace(bags, target=torch.zeros_like(bags.target))
    exact = bags.votes is not None or has_votes(bags)
    counted = torch.ones(len(bags.classes), dtype=torch.bool) if of == "all" or bags.counted is None else bags.counted
    share = shares_given_labels(torch.from_numpy(predictions.shares), bags, share_bounds(bags, exact=exact), exact=exact)
    q = match_shares(torch.from_numpy(predictions.instance_probabilities), segments, share)[:, counted].numpy()
    bound_low, bound_high = (b[:, counted].numpy() for b in share_bounds(bags, exact=exact, among_counted=of == "counted"))
    of_counted = share[:, counted].sum(1, keepdim=True).numpy()
    ends = (
        np.clip(end[:, counted] / of_counted, bound_low, bound_high)
        for end in (predictions.shares_low, predictions.shares_high)
    )
    deviation = np.subtract(*reversed([*ends])) / (2 * _Z90)
    # the count of each class, its variance, and the size: of instances, of bags, and of cells, which are the groups of a bag
    weight, size, bag = segments.instance_weights().double().numpy()[:, None], q.sum(1, keepdims=True), bags.bag.numpy()
    parts = weight * q, weight**2 * q * (1 - q / size.clip(1e-300)), weight * size
    _, bag_variance, bag_size = (_sums(bag, x, len(bags)) for x in parts)
    group, names = group_instances(dataset, by)
    rows = np.flatnonzero(~segments.removed)
    group, rows = (
        (np.append(np.zeros_like(rows), 1 + group[rows]), np.append(rows, rows)) if by else (np.zeros_like(rows), rows)
    )
    names = ["all", *names] if by else ["all"]  # each instance is in its group, and in that of all
    cells, cell, instances = np.unique(bag[rows] * len(names) + group, return_inverse=True, return_counts=True)
    b, g = cells // len(names), cells % len(names)
    count, variance, size = (_sums(cell, x[rows], len(cells)) for x in parts)
    part = np.divide(variance, bag_variance[b], out=np.zeros_like(variance), where=variance > 0)
    variance, common = variance * (1 - part), part * bag_size[b] * deviation[b]
    if not exact and bool(bags.labelled.any()):  # labels say nothing of a class that might win and never does
        could_win = torch.ones_like(counted) if bags.counted is None else bags.counted
        variance[:, (could_win & (bags.target == 0).all(0))[counted].numpy()] = np.inf
    low, high, whole = bound_low[b], bound_high[b], (instances == segments.n_instances().numpy()[b])[:, None]
    if bool(counted.all()):
        low, high = cell_bounds(low, high, np.minimum(size / bag_size[b], 1))
    else:  # a part of the bag may have hardly an instance of counted classes
        low, high = np.where(whole, low, 0), np.where(whole, high, 1)
    group_of_rows, n, total = torch.from_numpy(group), len(names), _sums(g, size, len(names))
    p, of_kept = q[rows] / q[rows].sum(1, keepdims=True).clip(1e-300), torch.from_numpy(parts[2][rows, 0])
    range_in_cells = share_range(
        torch.from_numpy(p), Segments(torch.from_numpy(cell), len(cells), weight=of_kept), math.log(odds)
    )
    odds_low, odds_high = (np.clip(end.numpy(), low, high) for end in range_in_cells)
    some = slice(None, None, 1 + len(rows) // _MAX_STEADY)
    flips = flip_shift(torch.from_numpy(p[some]), Segments(group_of_rows[some], n, weight=of_kept[some]))
    bag_names, classes = bags.names or (), tuple(c for c, kept in zip(bags.classes, counted.tolist(), strict=True) if kept)
    in_bags = _make_table(
        (variance + common**2) / size**2, level, classes=classes, bag=[bag_names[i] for i in b.tolist()],
        group=[names[k] for k in g.tolist()], instances=instances, bags=np.ones_like(b), share=count / size, bound_low=low,
        bound_high=high, odds_low=odds_low, odds_high=odds_high, steady_odds=np.full(len(b), np.nan),
    )  # fmt: skip
    share = _sums(g, count, n) / total
    between = _variance_between(count - share[g] * size, b, g, bags, level)
    variance = (_sums(g, variance, n) + _sums(g, common, n) ** 2 + between) / total**2
    if bool(counted.all()):
        low, high = (_sums(g, size * end, n) / total for end in (low, high))
    else:  # any mean of the cells
        low, high = (np.stack([reach(end[g == k], 0) for k in range(n)]) for reach, end in ((np.min, low), (np.max, high)))
    odds_low, odds_high = (np.clip(_sums(g, size * end, n) / total, low, high) for end in (odds_low, odds_high))
    groups = _make_table(
        variance, level, classes=classes, bag=[None] * n, group=names, instances=np.bincount(g, instances).astype(int),
        bags=np.bincount(g), share=share, bound_low=low, bound_high=high, odds_low=odds_low, odds_high=odds_high,
        steady_odds=flips.exp().numpy(),
    )  # fmt: skip
    return groups, in_bags


def _sums(code: np.ndarray, values: np.ndarray, n: int) -> np.ndarray:
    """(n, ...) the sum of the values (m, ...) of each code."""
    out = np.zeros((n, *values.shape[1:]))
    np.add.at(out, code, values)
    return out


def _variance_between(residual: np.ndarray, bag: np.ndarray, group: np.ndarray, bags: Bags, level: float) -> np.ndarray:
    """(R, C) the variance of counts between bags, or between groups of bags; zero where there is only one."""
    n, cluster = int(group.max()) + 1, bag if bags.group is None else np.unique(bags.group, return_inverse=True)[1][bag]
    used, code = np.unique(cluster * n + group, return_inverse=True)
    clusters = np.bincount(used % n, minlength=n)
    others = np.maximum(clusters - 1, 1)
    student = stats.t.ppf((1 + level) / 2, others) / stats.norm.ppf((1 + level) / 2)
    factor = np.where(clusters > 1, clusters / others * student**2, 0.0)
    return factor[:, None] * _sums(used % n, _sums(code, residual, len(used)) ** 2, n)


def _make_table(variance: np.ndarray, level: float, *, share: np.ndarray, **fields: Any) -> ShareTable:
    """With the interval of these shares (R, C), which is that of the bounds where the variance is infinite."""
    bound_low, bound_high = fields["bound_low"], fields["bound_high"]
    share = np.clip(share, bound_low, bound_high)
    interval = beta_interval(torch.from_numpy(share), torch.from_numpy(variance), level)
    low, high = np.clip(interval.low.numpy(), bound_low, share), np.clip(interval.high.numpy(), share, bound_high)
    low, high = (np.where(np.isinf(variance), bound, end) for bound, end in ((bound_low, low), (bound_high, high)))
    return ShareTable(share=share, low=low, high=high, **fields)


def group_instances(dataset: BagDataset, by: Sequence[str]) -> tuple[np.ndarray, list[str]]:
    """(N,) the group of each instance, and the names of the groups: combinations of the columns' values, in order."""
    names, group = [()], np.zeros(len(dataset.rows), np.int64)
    content = dataset.content if isinstance(dataset.content, pa.Table) else pa.table({})
    for name in by:
        table, rows = (dataset.ids, dataset.rows) if name in dataset.ids.column_names else (content, dataset.bags.index.numpy())
        if name not in table.column_names:
            columns = preview([*dataset.ids.column_names, *content.column_names], 12)
            raise HeadcountError(f"no column {name!r} to group by; there are {columns}")
        code, values = factorize(table.column(name), f"column {name!r}")
        values = [*values, "no value"]
        used, group = np.unique(group * len(values) + code[rows] % len(values), return_inverse=True)  # -1 is the last
        if len(used) > MAX_GROUPS:
            problem = f"{', '.join(by)}: at most {MAX_GROUPS} groups are tabulated, and there are {len(used):,}"
            raise HeadcountError(f"{problem}; name columns of few values, such as age bands")
        names = [(*names[u // len(values)], values[u % len(values)]) for u in used.tolist()]
    order = sorted(range(len(names)), key=names.__getitem__)
    return np.argsort(order)[group], [", ".join(names[k]) for k in order]

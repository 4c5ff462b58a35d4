"""Shares by group: against a reckoning with loops, inside the bounds, with intervals that hold where the probabilities are right."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, norm, t

import read_factory as make
from headcount.errors import HeadcountError
from headcount.inference.predict import predict_dataset
from headcount.inference.share_advice import assess_assumption, merging_advice, steadiness
from headcount.inference.share_table import ShareTable, group_instances, suppress_small, tabulate_shares
from headcount.models.predictions import Predictions
from headcount.readers import ColumnRoles, read
from model_factory import fitted, people

CLASSES = ("no", "yes", "abstained")


def predicted(dataset, p, shares=None, width=0.0):
    """Predictions with these probabilities; shares are their means unless they are given."""
    shares = dataset.bags.segments().mean(torch.from_numpy(p)).numpy() if shares is None else shares
    low, high = (np.clip(shares + side * width / 2, 0, 1).astype(np.float32) for side in (-1, 1))
    bag_p = np.full((len(shares), p.shape[1]), 1 / p.shape[1], np.float32)
    seen = np.zeros(len(shares), bool)
    return Predictions(dataset.bags.classes, p.astype(np.float32), bag_p, shares.astype(np.float32), low, high, seen)


def survey(sizes=(4, 5, 6), classes=CLASSES[:2], labels=None, uncounted=(), votes=None, **columns: Any):
    """Rows of bags of these sizes, with groups in turn; unlabelled unless there are labels or votes."""
    n = sum(sizes)
    table: dict[str, Any] = {
        "bag": [f"b{b}" for b, size in enumerate(sizes) for _ in range(size)],
        "x": np.arange(n) / 7,
        "group_of": [("old", "young")[i % 2] for i in range(n)],
        **columns,
    }
    roles = ColumnRoles(bag="bag", features=("x",))
    named = None if labels is None else {f"b{b}": label for b, label in enumerate(labels)}
    named = {f"b{b}": row for b, row in enumerate(votes)} if votes is not None else named
    return read(table, roles, labels=named, classes=classes, uncounted=uncounted, need_labels=named is not None)


def by_loops(dataset, p, shares, deviation, members, level):
    """The share of a group with its interval, of unweighted bags whose shares are the means of p; one class after the other."""
    bag, result = dataset.bags.bag.tolist(), []
    for k in range(p.shape[1]):
        counts, sizes, variances, common = {}, {}, {}, 0.0
        for b in sorted({bag[i] for i in members}):
            inside = [i for i in members if bag[i] == b]
            v_bag = sum(p[i, k] * (1 - p[i, k]) for i in range(len(bag)) if bag[i] == b)
            v_cell = sum(p[i, k] * (1 - p[i, k]) for i in inside)
            common += v_cell / v_bag * deviation * bag.count(b)
            counts[b], sizes[b] = sum(p[i, k] for i in inside), len(inside)
            variances[b] = v_cell * (1 - v_cell / v_bag)
        n, clusters = sum(sizes.values()), len(counts)
        x = sum(counts.values()) / n
        student = t.ppf((1 + level) / 2, clusters - 1) / norm.ppf((1 + level) / 2)
        between = sum((counts[b] - x * sizes[b]) ** 2 for b in counts) * clusters / (clusters - 1) * student**2
        variance = (sum(variances.values()) + common**2 + between) / n**2
        precision = x * (1 - x) / variance - 1
        ends = beta.ppf([(1 - level) / 2, (1 + level) / 2], x * precision, (1 - x) * precision)
        result.append((x, *ends))
    return np.array(result)


def test_groups_agree_with_a_reckoning_by_hand():
    dataset, rng = survey(), np.random.default_rng(0)
    p = rng.dirichlet((2, 3), 15).astype(np.float32)
    answer = predicted(dataset, p, width=0.2)
    groups, bags = tabulate_shares(dataset, answer, ["group_of"], level=0.8)
    assert groups.group == ["all", "old", "young"]
    assert groups.instances.tolist() == [15, 8, 7]
    assert groups.bags.tolist() == [3, 3, 3]
    for r, members in enumerate((range(15), range(0, 15, 2), range(1, 15, 2))):
        own = by_loops(dataset, p.astype(float), answer.shares, 0.2 / (2 * norm.ppf(0.95)), list(members), 0.8)
        assert np.stack([groups.share[r], groups.low[r], groups.high[r]], 1) == pytest.approx(own, abs=2e-5)
    assert bags.bag[:3] == ["b0", "b0", "b0"]
    assert bags.share[0] == pytest.approx(p[:4].mean(0), abs=1e-6)
    assert bags.share[1] == pytest.approx(p[[0, 2]].mean(0), abs=1e-6)  # old, of the first bag
    odds = p[::2].astype(float) / (1 - p[::2]) * 1.5
    assert groups.odds_high[1] == pytest.approx((odds / (1 + odds)).mean(0), abs=1e-6)
    assert (groups.odds_low < groups.share).all()
    rows = groups.to_arrow().to_pylist()
    names = ["group", "choice", "share", "low", "high", "bound_low", "bound_high", "odds_low", "odds_high", "instances", "bags"]
    assert list(rows[0]) == names
    assert rows[2]["group"] == "old"
    assert rows[2]["share"] == pytest.approx(p[::2, 0].mean(), abs=1e-6)
    assert "bag" in bags.to_arrow().column_names


@pytest.mark.parametrize("of", ["all", "counted"])
@pytest.mark.parametrize("votes", [False, True])
def test_labels_bound_the_shares_and_parts_add_up(of, votes):
    sizes, rng = rng_sizes(), np.random.default_rng(1)
    label = rng.integers(0, 2, len(sizes))
    given = {"votes": rng.dirichlet((3, 2), len(sizes)) @ np.eye(2, 3)} if votes else {"labels": [CLASSES[k] for k in label]}
    dataset = survey(sizes, CLASSES, uncounted=("abstained",), **given)
    n = sum(sizes)
    answer = predicted(dataset, rng.dirichlet((0.5, 0.5, 0.5), n), rng.dirichlet((0.3, 0.3, 0.3), len(sizes)), width=0.3)
    groups, bags = tabulate_shares(dataset, answer, ["group_of"], of=of)
    for table in (groups, bags):
        assert table.share.sum(1) == pytest.approx(np.ones(len(table.group)), abs=1e-4)
        for lower, upper in (
            (table.bound_low, table.low),
            (table.low, table.share),
            (table.share, table.high),
            (table.high, table.bound_high),
        ):
            assert (lower <= upper).all()
    whole = [r for r, group in enumerate(bags.group) if group == "all"]
    counted = bags.share[whole][:, :2]
    if votes:
        assert counted / counted.sum(1, keepdims=True) == pytest.approx(given["votes"][:, :2], abs=1e-4)
    else:
        assert (counted[range(len(label)), label] >= counted.max(1) - 1e-5).all()
    if of == "counted":
        assert groups.classes == CLASSES[:2]
    else:
        parts = groups.share[1:] * groups.instances[1:, None]
        assert parts.sum(0) == pytest.approx(groups.share[0] * n, abs=1e-4)


def rng_sizes():
    return np.random.default_rng(2).integers(1, 12, 40).tolist()


def test_intervals_hold_where_probabilities_and_shares_do():
    """80 samples of 25 bags whose shares differ: the share among all such instances lies in 9 of 10 intervals."""
    rng, sizes, hits = np.random.default_rng(3), [20] * 25, []
    dataset = survey(sizes)
    bag = dataset.bags.bag.numpy()
    old = np.arange(500) % 2 == 0
    for _ in range(80):
        theta = rng.beta(4, 4, 25)
        p = np.clip(theta[bag] + np.where(old, 0.1, -0.1), 0.01, 0.99)
        p = np.stack([p, 1 - p], 1)
        groups, _ = tabulate_shares(dataset, predicted(dataset, p), ["group_of"])
        hits.append([groups.low[r, 0] <= true <= groups.high[r, 0] for r, true in enumerate((0.5, 0.6, 0.4))])
    assert (np.abs(np.mean(hits, 0) - 0.9) < 0.07).all()


def test_removed_instances_weights_and_single_bags():
    dataset = survey((3, 3), weight=[1, 2, 3, 1, 1, 0])
    weighted = replace(dataset, bags=replace(dataset.bags, weight=torch.tensor([1.0, 2, 3, 1, 1, 0])))
    p = np.random.default_rng(0).dirichlet((1, 1), 6)
    weights = np.array([1, 2, 3, 1, 1, 0])
    groups, _ = tabulate_shares(weighted, predicted(weighted, p))
    assert groups.group == ["all"]
    assert groups.share[0] == pytest.approx(np.average(p, axis=0, weights=weights), abs=1e-6)
    assert groups.instances.tolist() == [5]
    one = survey((6,))
    groups, bags = tabulate_shares(one, predicted(one, p, width=0.2))
    assert (groups.low, groups.high) == (pytest.approx(bags.low), pytest.approx(bags.high))


def test_groups_are_values_of_columns_and_their_combinations(tmp_path):
    table = make.rows(bags=6, size=5)
    table["region"] = [None if i == 4 else ("north", "south")[i % 2] for i in range(30)]
    dataset = read(table, ColumnRoles(features=("age", "colour")))
    group, names = group_instances(dataset, ["region"])
    assert names == ["no value", "north", "south"]
    assert group[:5].tolist() == [1, 2, 1, 2, 0]
    group, names = group_instances(dataset, ["colour", "region"])  # one of them is a feature
    assert "green, north" in names
    assert [names[g].split(", ")[0] for g in group] == table["colour"]
    with pytest.raises(HeadcountError, match="no column 'race' to group by; there are"):
        group_instances(dataset, ["race"])
    many = survey((300,), label_of=[f"v{i}" for i in range(300)])
    with pytest.raises(HeadcountError, match="at most 200 groups are tabulated, and there are 300"):
        group_instances(many, ["label_of"])
    with pytest.raises(HeadcountError, match="no of 'voters'; there are all, counted"):
        tabulate_shares(many, predicted(many, np.full((300, 2), 0.5)), of="voters")


def test_advice_names_what_is_sparse_and_what_is_not_told_apart():
    sizes = [8] * 12
    region = ["tiny" if i < 3 else ("east", "west")[i % 2] for i in range(96)]
    dataset = survey(sizes, labels=["no"] * 10 + ["yes"] * 2, region=region)
    p = np.random.default_rng(0).dirichlet((2, 2), 96)
    groups, _ = tabulate_shares(dataset, predicted(dataset, p, width=0.3), ["region"])
    lines = merging_advice(groups, dataset.bags)
    assert lines[0] == "yes wins 2 of 12 labelled bags: merge it with another class, or do not rely on it"
    assert lines[1] == "tiny: only 3 instances in 1 bags; merge it with another group"
    assert lines[2].startswith("east and west: their intervals overlap for every class")
    assert len(lines) == 3


def rows_of(instances, bag, group):
    """A table with these rows, whose shares are the numbers of the rows."""
    n, x = len(instances), np.arange(len(instances), dtype=float)[:, None]
    return ShareTable(("a",), bag, group, np.array(instances), np.ones(n, int), *[x] * 7, x[:, 0])


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [
        ((50, 40, 4), ["all", "g0"]),  # one small group: the next would give it away with the total
        ((50, 40, 4, 3), ["all", "g0"]),  # two that are too small together
        ((50, 40, 6, 7), ["all", "g0", "g1"]),
        ((50, 40, 10), ["all", "g0", "g1", "g2"]),
        ((4, 96), ["all"]),
    ],
)
def test_small_groups_are_suppressed_and_cannot_be_computed(sizes, shown):
    groups = rows_of([sum(sizes), *sizes], [None] * (len(sizes) + 1), ["all", *(f"g{i}" for i in range(len(sizes)))])
    cells = [sum(s // 2 for s in sizes), *(s // 2 for s in sizes), sum(s - s // 2 for s in sizes), *(s - s // 2 for s in sizes)]
    in_bags = rows_of(cells, ["x"] * (len(sizes) + 1) + ["w"] * (len(sizes) + 1), [*groups.group, *groups.group])
    kept, bags = suppress_small(groups, in_bags, 10)
    assert kept.group == shown
    assert kept.share[:, 0].tolist() == [float(list(groups.group).index(name)) for name in shown]
    assert (bags.bag, bags.group, bags.share[:, 0].tolist()) == (["x", "w"], ["all", "all"], [0.0, len(sizes) + 1.0])
    hidden = sorted(set(groups.group) - set(shown))
    missing = sum(sizes) - sum(kept.instances[1:])
    assert not hidden or (len(hidden) > 1 and missing >= 10)


def test_a_group_of_whole_bags_and_a_few_others_is_suppressed():
    """Bag x lies in g0 entirely, and three others of g0 in bag w: x's row would give them away."""
    groups = rows_of([73, 23, 20, 30], [None] * 4, ["all", "g0", "g1", "g2"])
    in_bags = rows_of([20, 20, 53, 3, 20, 30], ["x", "x", "w", "w", "w", "w"], ["all", "g0", "all", "g0", "g1", "g2"])
    assert suppress_small(groups, in_bags, 10)[0].group == ["all", "g2"]


def test_a_class_that_never_wins_has_the_bounds_as_its_interval():
    dataset = survey((6, 7, 8), CLASSES, labels=["no", "yes", "no"])
    p = np.random.default_rng(0).dirichlet((2, 2, 2), 21)
    groups, _ = tabulate_shares(dataset, predicted(dataset, p), ["group_of"])
    assert (groups.low[:, 2] == groups.bound_low[:, 2]).all()
    assert (groups.high[:, 2] == groups.bound_high[:, 2]).all()
    assert (groups.high[:, 1] < groups.bound_high[:, 1]).all()


def test_how_wrong_the_odds_must_be_for_another_class_to_lead():
    dataset = survey((20,))
    p = np.full((20, 2), [0.6, 0.4])
    p[1::2] = [0.001, 0.999]
    groups, bags = tabulate_shares(dataset, predicted(dataset, p), ["group_of"])
    assert groups.steady_odds[1] == pytest.approx(1.5, rel=1e-3)
    assert np.isnan(bags.steady_odds).all()
    lines = steadiness(groups)
    assert lines[1] == "old: no is the largest class unless the odds of single instances are wrong by a factor of 1.5"
    assert (
        lines[2] == "young: yes is the largest class unless the odds of single instances are wrong by a factor of 100 or more"
    )


def test_the_assumption_is_tested_on_what_the_model_did_not_learn_by_heart():
    def line(effect: float, seen: bool, bags: int = 30):
        table = people(bags=bags, size=12, seed=1)
        shift = np.random.default_rng(0).normal(0, effect, bags)
        noise = np.random.default_rng(2).normal(size=bags * 12)
        table["income"] = [x + shift[int(p[1:])] for x, p in zip(noise, table["precinct"], strict=True)]
        dataset = read(table, ColumnRoles(features=("height", "income")))
        model = fitted(dataset)
        answer = predict_dataset(model, dataset, use_context=False)
        return assess_assumption(model, dataset, replace(answer, seen_in_training=np.full(bags, seen)))

    assert line(0, seen=True).startswith("no sign that instances of a class look different from bag to bag (p = 0.")
    assert "by the features of 360 instances" in line(2, seen=True)
    assert line(2, seen=True).endswith("the shares may be biased")
    assert "by the predictions of 360 instances" in line(0, seen=False)
    assert line(0, seen=True, bags=8).startswith("not tested whether")


def test_a_label_that_may_have_been_replaced_proves_nothing():
    dataset = survey((6, 7, 8), labels=["no", "yes", "no"])
    p = np.random.default_rng(0).dirichlet((2, 2), 21)
    noised = replace(dataset, bags=replace(dataset.bags, label_noise=0.2))
    groups, _ = tabulate_shares(noised, predicted(noised, p))
    assert (groups.bound_low.tolist(), groups.bound_high.tolist()) == ([[0, 0]], [[1, 1]])
    assert groups.share[0] == pytest.approx(p.mean(0), abs=1e-6)
    assert tabulate_shares(dataset, predicted(dataset, p))[0].bound_low.max() > 0.2

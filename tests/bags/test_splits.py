"""Folds keep groups together and use their random streams; split and subsampled bags hold the right instances."""

from __future__ import annotations

import numpy as np
import pytest

from headcount.bags import Bags, Pool
from headcount.bags.splits import (
    assign_folds,
    exclude_groups,
    has_distinct_labels,
    make_splits,
    sample_rows,
    split_large_bags,
    subsample_bags,
    train_valid_split,
)
from headcount.errors import HeadcountError


def bags_of_size_two(labels, group=None):
    n = len(labels)
    pool = Pool(np.arange(2 * n, dtype=np.float32)[:, None])
    return Bags.of(pool, sizes=[2] * n, labels=labels, classes=2, group=group)


def test_folds_are_equal_in_size_and_keep_groups():
    bags = bags_of_size_two([0, 1] * 9, [f"g{i // 2}" for i in range(18)])
    fold = assign_folds(bags, 3)
    assert (fold[::2] == fold[1::2]).all()
    assert np.bincount(fold).tolist() == [6, 6, 6]
    assert not np.array_equal(fold, assign_folds(bags, 3, seed=1))
    with pytest.raises(HeadcountError, match="10 folds need as many groups of bags, and there are 9; give fewer folds"):
        assign_folds(bags, 10)


def test_splits_test_every_labelled_bag_once_and_train_on_unlabelled_ones():
    bags = bags_of_size_two([0, 1] * 10 + [-1] * 4)
    splits = make_splits(bags, 4, seed=0)
    assert np.sort(np.concatenate([s.test for s in splits])).tolist() == list(range(20))
    for s in splits:
        parts = np.concatenate([s.train, s.valid, s.test])
        assert np.sort(parts).tolist() == list(range(24))
        assert set(range(20, 24)) <= set(s.train.tolist())
        assert not s.valid_is_train


def test_an_unlabelled_bag_is_excluded_with_its_group():
    bags = bags_of_size_two([0, 1] * 6 + [-1], ["a", "b", "c", "d", "e", "f"] * 2 + ["a"])
    assert exclude_groups(bags, np.array([12]), np.array([0])).tolist() == []
    assert exclude_groups(bags, np.array([12]), np.array([1])).tolist() == [12]
    for s in make_splits(bags, 3, seed=0):
        assert not {bags.group[b] for b in s.test} & {bags.group[b] for b in [*s.train, *s.valid]}


def test_few_bags_are_training_and_validation_bags():
    bags = bags_of_size_two([0, 1, 0])
    split = train_valid_split(bags, np.arange(3), np.zeros(0, int), seed=0)
    assert split.valid_is_train
    assert split.train.tolist() == split.valid.tolist() == [0, 1, 2]
    assert make_splits(bags_of_size_two([0, 0, 0, 0]), 2, seed=0) == []
    assert not has_distinct_labels(bags_of_size_two([1, 1, -1]))
    assert has_distinct_labels(bags)


def test_large_bags_are_split_evenly():
    pool = Pool(np.zeros((12, 1)))
    parts = split_large_bags(Bags.of(pool, sizes=[7, 5], labels=[1, 0], classes=2), 3)
    assert parts.sizes.tolist() == [3, 2, 2, 3, 2]
    assert parts.label.tolist() == [1, 1, 1, 0, 0]
    assert parts.index.tolist() == list(range(12))


def test_random_streams_stay_as_they_are():
    """Seeds and their purposes are fixed: a change would give other folds, samples and results for the same seed."""
    bags = bags_of_size_two([0, 1, 0, 1, 0, 1])
    assert assign_folds(bags, 3, seed=1).tolist() == [2, 1, 1, 2, 0, 0]
    assert sample_rows(bags, 6, seed=1).tolist() == [0, 3, 4, 7, 8, 11]
    sample, rows = subsample_bags(bags, 6, seed=1)
    assert rows.tolist() == [4, 5, 8, 9, 10, 11]
    assert sample.sizes.tolist() == [2, 2, 2]

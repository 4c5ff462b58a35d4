"""Bags and pools: selecting, removing, blinding; and every invalid input is refused in one line that names it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError


def pool(count=10, dim=3):
    return Pool(np.arange(count * dim, dtype=np.float32).reshape(count, dim))


def bags(**changes):
    fields = {
        "sizes": [2, 3, 5],
        "labels": [0, 1, -1],
        "classes": ["cat", "dog"],
        "names": ["a", "b", "c"],
        "group": ["x", "x", "y"],
        "weight": np.ones(10),
        "known": [-1] * 9 + [1],
        "truth": [0, 1] * 5,
    }
    return Bags.of(pool(), **{**fields, **changes})


def test_properties():
    b = bags()
    assert len(b) == 3
    assert b.sizes.tolist() == [2, 3, 5]
    assert b.label.tolist() == [0, 1, -1]
    assert b.target.tolist() == [[1, 0], [0, 1], [0, 0]]
    assert b.bag.tolist() == [0, 0, 1, 1, 1, 2, 2, 2, 2, 2]
    assert "3 bags, 10 instances" in repr(b)


def test_votes_become_shares():
    b = bags(labels=[[3, 1], [2, 2], [0, 0]])
    assert b.target.tolist() == [[0.75, 0.25], [0.5, 0.5], [0, 0]]
    assert b.label.tolist() == [0, 0, -1]


def test_take_selects_every_field():
    b = bags().take([2, 0])
    assert b.index.tolist() == [5, 6, 7, 8, 9, 0, 1]
    assert b.names == ("c", "a")
    assert b.group == ("y", "x")
    assert b.truth.tolist() == [1, 0, 1, 0, 1, 0, 1]
    assert b.known.tolist() == [-1, -1, -1, -1, 1, -1, -1]
    assert b.label.tolist() == [-1, 0]
    assert b.pool is not None


def test_take_shares_the_pool():
    b = bags()
    assert b.take([1]).pool is b.pool


def test_without_keeps_removed_instances_and_drop_removed_does_not():
    removed = torch.zeros(10, dtype=torch.bool)
    removed[[0, 5]] = True
    b = bags().without(removed)
    assert b.segments().total_weight().tolist() == [1, 3, 4]
    assert b.without(torch.arange(10) == 6).segments().total_weight().tolist() == [1, 3, 3], "what was removed stays removed"
    dropped = b.drop_removed()
    assert dropped.sizes.tolist() == [1, 3, 4]
    assert dropped.index.tolist() == [1, 2, 3, 4, 6, 7, 8, 9]
    assert dropped.removed is None


def test_blind_removes_the_truth_only():
    b = bags().blind()
    assert b.truth is None
    assert b.known is not None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sizes": [2, 0, 8]}, r"bag 1 \(b\) is empty"),
        ({"sizes": [2, 3, 4]}, "the bags hold 9 instances, 10 addresses were given"),
        ({"sizes": None, "offsets": [0, 5, 4, 10]}, r"offsets must increase: bag 1 \(b\) runs from 5 to 4"),
        ({"sizes": None, "offsets": [1, 5, 7, 10]}, "offsets start at 0"),
        ({"sizes": None}, "either sizes or offsets"),
        ({"labels": [0, 2, 1]}, r"label 2 of bag 1 \(b\) is out of range; classes are 0 to 1"),
        ({"labels": [0, -2, 1]}, "label -2 of bag 1"),
        ({"labels": [0, 1]}, "2 labels for 3 bags"),
        ({"labels": [0.5, 1.0, 0.0]}, "labels are whole numbers"),
        ({"labels": [[1, 2, 3]] * 3}, "one column per class: 2 classes, 3 columns"),
        ({"labels": [[1, 2], [1, np.nan], [0, 1]]}, r"votes of bag 1 \(b\) are \[1.0, nan\]"),
        ({"labels": [[1, 2], [1, -1], [0, 1]]}, "votes of bag 1"),
        ({"classes": ["cat"]}, "at least two classes"),
        ({"truth": [0] * 9}, r"truth has shape \(9,\) for 10 instances"),
        ({"truth": [0] * 9 + [7]}, "truth 7 of instance 9 is out of range"),
        ({"known": [0] * 9 + [-3]}, "known -3 of instance 9"),
        ({"index": [0] * 9 + [10]}, "address 10 at row 9 points outside the pool of 10"),
        ({"index": [0] * 9 + [-1]}, "address -1 at row 9"),
        ({"index": np.array([0] * 9 + [2**63 + 5], dtype=np.uint64)}, "address 9223372036854775813 at row 9"),
        ({"index": np.zeros(10)}, "addresses must be a flat list of whole numbers"),
        ({"weight": [1] * 9 + [-1]}, "instance 9 has weight -1.0"),
        ({"weight": [1] * 9 + [np.inf]}, "instance 9 has weight inf"),
        ({"weight": [0, 0] + [1] * 8}, r"bag 0 \(a\) has no instance left to count"),
        ({"removed": [True, True] + [False] * 8}, r"bag 0 \(a\) has no instance left to count"),
        ({"names": ["a", "b"]}, "names has 2 entries for 3 bags"),
        ({"counted": [True, False]}, "at least two true"),
    ],
)
def test_invalid_input_is_refused(changes, message):
    with pytest.raises(HeadcountError, match=message) as e:
        bags(**changes)
    assert "\n" not in str(e.value)


def test_removing_all_instances_is_refused():
    with pytest.raises(HeadcountError, match=r"bag 0 \(a\) has no instance left"):
        bags().without(torch.arange(10) < 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.array([[1.0, 2.0], [np.nan, 0.0]]), "row 1 of the features has nan in column 0"),
        (np.array([[1.0, np.inf]]), "row 0 of the features has inf in column 1"),
        (np.zeros((2, 3, 4)), "a pool holds images as uint8"),
        (np.array([["a", "b"]]), "a pool holds numbers"),
    ],
)
def test_invalid_pools_are_refused(data, message):
    with pytest.raises(HeadcountError, match=message):
        Pool(data)


def test_pool_from_npy(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(12, dtype=np.float32).reshape(4, 3))
    assert Pool.from_npy(tmp_path / "x.npy").take(torch.tensor([2])).tolist() == [[6, 7, 8]]
    with pytest.raises(HeadcountError, match=r"cannot read .*y\.npy"):
        Pool.from_npy(tmp_path / "y.npy")
    (tmp_path / "z.npy").write_bytes(b"not an array")
    with pytest.raises(HeadcountError, match=r".*z\.npy"):
        Pool.from_npy(tmp_path / "z.npy")


def test_gray_images_get_a_channel():
    assert Pool(np.zeros((2, 8, 8), np.uint8)).shape == (8, 8, 1)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "uint64", "int8", "bool"])
def test_labels_of_any_integer_type(kind):
    pool = Pool(np.zeros((4, 2), np.float32))
    assert Bags.of(pool, sizes=[2, 2], labels=np.array([0, 1], kind), classes=2).label.tolist() == [0, 1]
    if kind != "bool":
        with pytest.raises(HeadcountError, match="label 2 of bag 1 is out of range"):
            Bags.of(pool, sizes=[2, 2], labels=np.array([0, 2], kind), classes=2)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        (np.array([True, False]), "a mask over 3 bags needs 3 values, got 2"),
        (np.ones(40, bool), "a mask over 3 bags needs 3 values, got 40"),
        ([0.5], "bags to take must be a flat list of whole numbers, got float64"),
        (2, r"bags to take must be a flat list of whole numbers, got int64 of shape \(\)"),
        ([[0], [1, 2]], "bags to take must be a flat list"),
        ([-1], "bags are numbered 0 to 2"),
        ([3], "bags are numbered 0 to 2"),
    ],
)
def test_invalid_selections_are_refused(which, message):
    bags = Bags.of(Pool(np.zeros((6, 2), np.float32)), sizes=[2, 2, 2], labels=[0, 1, 0], classes=2)
    with pytest.raises(HeadcountError, match=message):
        bags.take(which)
    assert bags.take([True, False, True]).label.tolist() == bags.take(torch.tensor([0, 2])).label.tolist() == [0, 0]


def test_unknown_fields_and_non_numbers_are_refused():
    make = lambda **more: Bags.of(Pool(np.eye(4, dtype=np.float32)), sizes=[2, 2], labels=[0, 1], **more)  # noqa: E731
    assert make(classes=np.int64(2)).classes == ("0", "1")
    with pytest.raises(HeadcountError, match=r"no field of bags 'wieght'.*did you mean 'weight'"):
        make(classes=2, wieght=[1, 1, 1, 1])
    with pytest.raises(HeadcountError, match="weight must be numbers, one per instance, got list"):
        make(classes=2, weight=["a"] * 4)
    with pytest.raises(HeadcountError, match="instance 2 has weight nan"):
        make(classes=2, weight=[1, 1, np.nan, 1])

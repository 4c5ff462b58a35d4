"""Bounds of class shares against brute force, and probabilities that are made to agree with shares."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool, Segments
from headcount.majority.bounds import cell_bounds, fit_to_bounds, match_shares, share_bounds, shares_given_labels


def bags_of(sizes, target, counted=None, weight=None):
    x = np.zeros((int(np.sum(sizes)), 1), np.float32)
    return Bags.of(Pool(x), sizes=sizes, labels=target, classes=target.shape[1], counted=counted, weight=weight)


def labels_of(votes, counted, split_ties, rng):
    """(B, C) the label of each bag by its votes: the winner, or all of them in a tie; of a tie that is not split, any one."""
    eligible = np.where(counted, votes, -1)
    won = (eligible == eligible.max(1, keepdims=True)) & (eligible > 0)
    if not split_ties:
        won = won & (np.cumsum(won, 1) == rng.integers(0, won.sum(1).clip(min=1))[:, None] + 1)
    return won.astype(float)


@pytest.mark.parametrize("split_ties", [True, False])
@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("uncounted", [0, 1])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_bag_violates_its_bounds(split_ties, classes, uncounted, weighted):
    """24 x 420 = 10,080 random bags: their shares, the shares of a group in them, and those among counted classes."""
    rng = np.random.default_rng([classes, uncounted, split_ties, weighted])
    n_classes, sizes = classes + uncounted, rng.integers(1, 14, 600)
    bag = np.repeat(np.arange(600), sizes)
    prior = rng.dirichlet(np.ones(n_classes), 600)
    truth = (prior[bag].cumsum(1) < rng.random((len(bag), 1))).sum(1).clip(max=n_classes - 1)
    weight = rng.integers(1, 4, len(bag)).astype(float) if weighted else np.ones(len(bag))
    votes = np.zeros((600, n_classes))
    np.add.at(votes, (bag, truth), weight)
    counted = np.arange(n_classes) < classes
    keep = np.flatnonzero(votes[:, counted].sum(1) > 0)[:420]
    assert len(keep) == 420
    target = labels_of(votes, counted, split_ties, rng)
    bags = bags_of(sizes, target, counted, weight if weighted else None).take(keep.tolist())
    inside = np.isin(bag, keep)
    bag, truth, weight, votes = np.searchsorted(keep, bag[inside]), truth[inside], weight[inside], votes[keep]
    share, (low, high) = votes / votes.sum(1, keepdims=True), (b.numpy() for b in share_bounds(bags))
    assert (low <= share + 1e-9).all()
    assert (share <= high + 1e-9).all()
    among, (low_c, high_c) = votes * counted / votes[:, counted].sum(1, keepdims=True), share_bounds(bags, among_counted=True)
    assert (low_c.numpy() <= among + 1e-9).all()
    assert (among <= high_c.numpy() + 1e-9).all()
    member = rng.random(len(bag)) < 0.6
    in_group = np.zeros((420, n_classes))
    np.add.at(in_group, (bag[member], truth[member]), weight[member])
    used = in_group.sum(1) > 0
    cells = cell_bounds(low[used], high[used], (in_group.sum(1) / votes.sum(1))[used, None])
    cell_share = in_group[used] / in_group[used].sum(1, keepdims=True)
    assert (cells[0] <= cell_share + 1e-9).all()
    assert (cell_share <= cells[1] + 1e-9).all()


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("classes", [2, 3, 4])
def test_the_bounds_of_a_label_are_the_best_possible(n, classes):
    """All ways in which n instances may be of the classes, of which the label's is the most frequent."""
    votes = np.array([v for v in product(range(n + 1), repeat=classes) if sum(v) == n and v[0] == max(v)]) / n
    low, high = share_bounds(bags_of([n], np.eye(classes)[:1]))
    assert low.numpy()[0] == pytest.approx(votes.min(0))
    assert high.numpy()[0] == pytest.approx(votes.max(0))


def test_votes_unlabelled_bags_and_impossible_ties():
    votes = np.array([[0.5, 0.3, 0.2], [0, 0, 0]])
    low, high = share_bounds(bags_of([10, 4], votes), exact=True)
    assert low.numpy()[0] == pytest.approx(votes[0])
    assert high.numpy()[0] == pytest.approx(votes[0])
    assert low[1].tolist() == [0, 0, 0]
    assert high[1].tolist() == [1, 1, 1]
    bags = bags_of([10], np.array([[0.6, 0.4, 0]]), counted=[True, True, False])
    assert share_bounds(bags, exact=True)[1].numpy()[0] == pytest.approx([0.6, 0.4, 0.9])
    assert share_bounds(bags, exact=True, among_counted=True)[1].numpy()[0] == pytest.approx([0.6, 0.4, 0])
    low, high = share_bounds(bags_of([3], np.array([[1.0, 1.0]])))  # three instances in two halves: as if they were many
    assert low.tolist() == high.tolist() == [[0.5, 0.5]]


def test_shares_given_labels_stay_inside_and_keep_the_label_largest():
    g = torch.Generator().manual_seed(0)
    share = torch.distributions.Dirichlet(torch.full((4,), 0.5)).sample((300,))
    label = torch.randint(0, 4, (300,), generator=g)
    bags = bags_of(np.full(300, 9), np.eye(4)[label.numpy()])
    bounds = share_bounds(bags)
    given = shares_given_labels(share, bags, bounds)
    assert given.sum(1).numpy() == pytest.approx(np.ones(300))
    assert bool(((given >= bounds[0] - 1e-12) & (given <= bounds[1] + 1e-12)).all())
    unchanged = ((share >= bounds[0]) & (share <= bounds[1])).all(1) & (share.argmax(1) == label)
    assert unchanged.sum() > 20
    assert given[unchanged].numpy() == pytest.approx(share[unchanged].numpy(), abs=1e-6)
    votes = bags_of([5], np.array([[0.75, 0.25, 0]]), np.array([True, True, False]))
    exact = shares_given_labels(torch.tensor([[0.2, 0.2, 0.6]]), votes, share_bounds(votes, exact=True), exact=True)
    assert exact.numpy()[0] == pytest.approx([0.3, 0.1, 0.6])
    assert fit_to_bounds(torch.tensor([[1.0, 0, 0]]).double(), (torch.zeros(1, 3), torch.tensor([[0.5, 1, 1]])))[0, 0] == 0.5


def test_matched_probabilities_have_the_shares_and_the_odds_ratios():
    rng = np.random.default_rng(0)
    p, share = rng.dirichlet(np.ones(3), 12), rng.dirichlet(np.ones(3), 2)
    weight = torch.from_numpy(rng.integers(0, 4, 12).astype(np.float32))
    segments = Segments.from_sizes([5, 7]).with_weight(weight)
    q = match_shares(torch.from_numpy(p), segments, torch.from_numpy(share)).numpy()
    for b, rows in enumerate((slice(0, 5), slice(5, 12))):
        assert np.average(q[rows], axis=0, weights=weight[rows]) == pytest.approx(share[b], abs=1e-6)
        kept = weight[rows].numpy() > 0
        odds = q[rows][kept] / p[rows][kept]
        odds /= odds[:, :1]
        assert odds == pytest.approx(np.broadcast_to(odds[0], odds.shape))  # one factor for each class of a bag
        assert q[rows][~kept].sum() == 0


def test_counts_of_some_of_the_instances_bound_the_others():
    votes = np.array([[3.0, 1, 0], [6, 4, 0], [30, 10, 0], [0, 0, 0]])
    bags = bags_of([10] * 4, votes)
    low, high = share_bounds(replace(bags, votes=torch.from_numpy(votes)), exact=True)
    assert low.numpy() == pytest.approx(np.array([[0.3, 0.1, 0], [0.6, 0.4, 0], [0, 0, 0], [0, 0, 0]]))
    assert high.numpy() == pytest.approx(np.array([[0.9, 0.7, 0.6], [0.6, 0.4, 0], [1, 1, 1], [1, 1, 1]]))
    abstaining = replace(bags, votes=torch.from_numpy(votes), counted=torch.tensor([True, True, False]))
    bounds = low, high = share_bounds(abstaining, exact=True)
    assert low.numpy()[:2] == pytest.approx(np.array([[0.3, 0.1, 0], [0.6, 0.4, 0]]))
    assert high.numpy()[:2] == pytest.approx(np.array([[0.3, 0.1, 0.6], [0.6, 0.4, 0]]))
    given = shares_given_labels(torch.full((4, 3), 1 / 3), abstaining, bounds, exact=True)
    assert given.numpy()[:2] == pytest.approx(np.array([[0.3, 0.1, 0.6], [0.6, 0.4, 0]]), abs=1e-6)

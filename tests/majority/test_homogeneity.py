"""The test of the assumption: its size under a true null and its power; the sensitivity against a fine grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority.homogeneity import assess_homogeneity, flip_shift, prediction_scores, share_range


def simulate(seed, effect=0.0, bags=50, classes=3):
    """Features, P(y | x) up to a temperature, segments and labels; a violation shifts the features of a bag by ``effect``."""
    g = np.random.default_rng(seed)
    sizes = g.integers(6, 30, bags)
    centres = g.normal(size=(classes, 4))
    y = np.concatenate([g.choice(classes, n, p=g.dirichlet([1.5] * classes)) for n in sizes])
    x = centres[y] + g.normal(size=(len(y), 4)) + effect * g.normal(size=(bags, 4)).repeat(sizes, 0)
    p = torch.tensor(-0.35 * ((x[:, None] - centres) ** 2).sum(2)).softmax(1)
    counts = np.stack([np.bincount(part, minlength=classes) for part in np.split(y, sizes.cumsum()[:-1])])
    target = torch.nn.functional.one_hot(torch.from_numpy(counts.argmax(1)), classes).double()
    return torch.tensor(x), p, Segments.from_sizes(sizes), target


def p_value(scores, segments, target, draws=59):
    return assess_homogeneity(scores, segments, target, generator=torch.Generator().manual_seed(0), draws=draws).p_value


def test_size_under_the_null():
    """5 % of 200 simulations, up to three standard errors, of predictions at a wrong temperature and of plain features."""
    data = [simulate(seed, bags=30) for seed in range(200)]
    for rejected in (
        np.mean([p_value(prediction_scores(p), s, t) <= 0.05 for _, p, s, t in data]),
        np.mean([p_value(x, s, t) <= 0.05 for x, _, s, t in data]),
    ):
        assert abs(rejected - 0.05) < 3 * math.sqrt(0.05 * 0.95 / 200)


def test_power_against_a_bag_effect():
    data = [simulate(seed, effect=0.5) for seed in range(10)]
    assert np.mean([p_value(prediction_scores(p), s, t) <= 0.05 for _, p, s, t in data]) >= 0.8
    assert np.mean([p_value(x, s, t) <= 0.05 for x, _, s, t in data]) == 1
    x, _, s, t = simulate(0, effect=2.0)
    assert 0.5 < assess_homogeneity(x, s, t, generator=torch.Generator(), draws=9).excess < 1  # 4 / 5 of the variance


def test_what_cannot_be_tested():
    x, p, segments, target = simulate(0)
    with pytest.raises(HeadcountError, match="at least 10 labelled bags"):
        p_value(x, segments, target * (torch.arange(len(target)) < 9)[:, None])
    with pytest.raises(HeadcountError, match="more numbers of an instance than labels less one"):
        p_value(x[:, :1], segments, target)
    few = segments.without(torch.arange(len(x)) % 3 == 0)
    removed = x.masked_fill(few.removed[:, None], 1e6)
    assert p_value(removed, few, target) == p_value(torch.where(few.removed[:, None], 0.0, x), few, target)
    assert prediction_scores(p).shape == (len(p), 5)


def test_range_of_shares_is_that_of_every_shift():
    p = torch.distributions.Dirichlet(torch.ones(3)).sample((9,)).double()
    segments = Segments.from_sizes([4, 5])
    low, high = share_range(p, segments, 0.8)
    for shift in np.linspace(-0.8, 0.8, 9):
        for k in range(3):
            moved = (p.log() + torch.nn.functional.one_hot(torch.tensor(k), 3) * shift).softmax(1)
            share = segments.mean(moved)[:, k]
            assert (low[:, k] - 1e-6 <= share).all()
            assert (share <= high[:, k] + 1e-6).all()
            if abs(shift) == 0.8:
                torch.testing.assert_close(share, (low if shift < 0 else high)[:, k])
    torch.testing.assert_close(share_range(p, segments, 0)[0], segments.mean(p))
    with pytest.raises(HeadcountError, match="shift of log-odds"):
        share_range(p, segments, -1)


def test_the_least_shift_that_changes_the_largest_class():
    torch.manual_seed(0)
    p = torch.distributions.Dirichlet(torch.tensor([3.0, 2.0, 1.0])).sample((40,)).double()
    segments = Segments.from_sizes([10, 30])
    found, most = flip_shift(p, segments), segments.mean(p).argmax(1)
    for b in range(2):
        rows = p[segments.index == b]

        def flips(shift, rows=rows, leader=int(most[b])):
            moved = [rows.log() + shift / 2 * (torch.eye(3)[r] - torch.eye(3)[leader]) for r in range(3) if r != leader]
            shares = [m.softmax(1).mean(0) for m in moved]
            return any(s[leader] <= s[r] for s, r in zip(shares, (r for r in range(3) if r != leader), strict=True))

        grid = np.arange(0, 20, 0.001)
        assert float(found[b]) == pytest.approx(next(d for d in grid if flips(d)), abs=0.0011)
    certain = torch.tensor([[1.0, 0.0, 0.0]] * 3)
    assert math.isinf(float(flip_shift(certain, Segments.from_sizes([3]))[0]))

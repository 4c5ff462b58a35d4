"""Intervals of shares: against slow counting, with P(y | x) the same in every bag or P(x | y), and with known shares."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError
from headcount.majority.proportions import Proportions, laplace_proportions, mean_proportions
from headcount.majority.share_intervals import (
    ShareCalibration,
    ShareModel,
    calibrate_shares,
    estimate_share_intervals,
    fit_share_model,
    win_probabilities,
)

PRIOR = torch.full((3,), 1 / 3, dtype=torch.float64)


def voters(seed, bags=150):
    """Bags whose features differ while P(y | x), which is returned, is the same everywhere; with the true shares and labels."""
    g = np.random.default_rng(seed)
    sizes = g.integers(25, 70, bags)
    x = np.concatenate([g.normal(g.normal(0, 1.0, 2), 1.0, (n, 2)) for n in sizes])
    logits = np.stack([1.5 * x[:, 0], 1.5 * x[:, 1], np.zeros(len(x))], 1)
    y = (logits + g.gumbel(size=logits.shape)).argmax(1)
    return sizes, torch.tensor(logits).log_softmax(1), *share_and_label(y, sizes)


def mixtures(seed, bags=150, apart=1.5):
    """Bags whose shares differ while P(x | y) is the same everywhere, with P(y | x) in all of them together."""
    g = np.random.default_rng(seed)
    sizes = g.integers(25, 70, bags)
    y = np.concatenate([g.choice(3, n, p=g.dirichlet([1.0] * 3)) for n in sizes])
    x = apart * np.eye(3)[y] + g.normal(size=(len(y), 3))
    return sizes, torch.tensor(apart * x).log_softmax(1), *share_and_label(y, sizes)


def share_and_label(y, sizes):
    counts = torch.stack([torch.bincount(part, minlength=3) for part in torch.tensor(y).split(sizes.tolist())]).double()
    return counts / counts.sum(1, keepdim=True), torch.nn.functional.one_hot(counts.argmax(1), 3).double()


def coverage(estimate, true):
    return float(((estimate.low - 1e-6 <= true) & (true <= estimate.high + 1e-6)).double().mean())


@pytest.mark.parametrize("counted", [None, [True, False, True, True]])
def test_win_probabilities_are_those_of_dirichlet_draws(counted):
    share = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.97, 0.01, 0.01, 0.01], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    for precision in (2.0, 30.0):
        counted_tensor = None if counted is None else torch.tensor(counted)
        found = win_probabilities(share, share * (1 - share) / (precision + 1), counted_tensor).numpy()
        for row, p in zip(share.numpy(), found, strict=True):
            draws = np.random.default_rng(0).dirichlet(row * precision, 20_000)
            draws = draws if counted is None else np.where(counted, draws, -1)
            np.testing.assert_allclose(p, np.bincount(draws.argmax(1), minlength=4) / 20_000, atol=0.02)


@pytest.mark.parametrize("world", [voters, mixtures])
def test_intervals_hold_whichever_assumption_does(world):
    """One of the simple estimates has intervals that are too narrow in each world; without a look at the truth the mixture holds."""
    sizes, log_p, _, target = world(0)
    segments = Segments.from_sizes(sizes)
    model = fit_share_model(log_p, segments, target, PRIOR, 2.0)
    assert sum(model.weight) == pytest.approx(1)
    assert all(0 <= rho <= 0.6 for rho in model.spread)
    sizes, log_p, true, _ = world(1)
    segments = Segments.from_sizes(sizes)
    estimate = estimate_share_intervals(log_p, segments, PRIOR, 2.0, model)
    assert ((estimate.low <= estimate.share) & (estimate.share <= estimate.high)).all()
    torch.testing.assert_close(estimate.share.sum(1), torch.ones(len(sizes)))
    assert coverage(estimate, true) >= 0.85
    assert float((estimate.high - estimate.low).mean()) < 0.5
    wrong = laplace_proportions(log_p, segments, PRIOR, 2.0) if world is voters else mean_proportions(log_p.exp(), segments)
    assert coverage(wrong, true) < 0.7


def test_features_without_information_give_wide_intervals_around_the_frequencies():
    sizes, _, true, target = mixtures(0)
    log_p, segments = PRIOR.log().expand(int(sizes.sum()), 3), Segments.from_sizes(sizes)
    estimate = estimate_share_intervals(log_p, segments, PRIOR, 2.0, fit_share_model(log_p, segments, target, PRIOR, 2.0))
    torch.testing.assert_close(estimate.share, PRIOR.float().expand(len(sizes), 3), atol=1e-3, rtol=0)
    assert coverage(estimate, true) >= 0.85


def test_single_instances_and_equal_weights():
    log_p, model = torch.tensor([[0.7, 0.2, 0.1]]).double().log(), ShareModel((0.2, 0.4, 0.4), (0.1, 0.1, 0.1))
    estimate = estimate_share_intervals(log_p, Segments.from_sizes([1]), PRIOR, 2.0, model)
    torch.testing.assert_close(estimate.share, log_p.exp().float())
    sizes, log_p, _, _ = mixtures(2, bags=5)
    light, heavy = (
        estimate_share_intervals(log_p, Segments.from_sizes(sizes).with_weight(torch.full((len(log_p),), w)), PRIOR, 2.0, model)
        for w in (1.0, 50.0)
    )
    torch.testing.assert_close(light.share, heavy.share)
    torch.testing.assert_close(light.high, heavy.high)


def test_the_factor_is_the_least_that_controls_the_risk():
    g = np.random.default_rng(0)
    scores = tuple(tuple(g.exponential(1, g.integers(1, 5)).tolist()) for _ in range(25))
    calibration = ShareCalibration((0.0, 0.0), 1.0, scores)
    for level in (0.5, 0.8, 0.9):
        candidates = sorted(s for row in scores for s in row)
        risks = [(sum(np.mean(np.array(row) > q) for row in scores) + 1) / 26 for q in candidates]
        assert calibration.factor(level) == next(q for q, risk in zip(candidates, risks, strict=True) if risk <= 1 - level)
    assert math.isinf(calibration.factor(0.97))


def biased_estimates(g, bags):
    """Estimates that are far off, with intervals that are far too narrow."""
    true = torch.from_numpy(g.dirichlet([2.0, 1.0, 1.0], bags)).float()
    share = (true**2 + 0.3 * torch.tensor([0.0, 1.0, 0.0])) * torch.from_numpy(g.uniform(0.5, 1.5, (bags, 3))).float()
    share = share / share.sum(1, keepdim=True)
    return Proportions(share, (share - 0.02).clamp_min(0), (share + 0.02).clamp_max(1)), true


def test_known_shares_make_intervals_hold_and_correct_the_bias():
    g, covered, before, after = np.random.default_rng(0), [], [], []
    for repetition in range(150):
        estimate, true = biased_estimates(g, 130)
        known, new = slice(0, 30), slice(30, None)
        calibration = calibrate_shares(Proportions(*(a[known] for a in estimate)), true[known], seed=repetition)
        rest = Proportions(*(a[new] for a in estimate))
        result = calibration.apply(rest, 0.9)
        covered.append(coverage(result, true[new]))
        before.append((rest.share - true[new]).mean(0).abs().mean())
        after.append((result.share - true[new]).mean(0).abs().mean())
        assert coverage(rest, true[new]) < 0.5
    error = np.std(covered) / math.sqrt(150)
    assert 0.9 - 2 * error < np.mean(covered) < 0.96
    assert np.mean(after) < 0.6 * np.mean(before)


def test_groups_are_the_units_and_other_levels_scale_the_interval():
    estimate, true = biased_estimates(np.random.default_rng(1), 60)
    by_group = calibrate_shares(estimate, true, [f"county {b // 4}" for b in range(60)])
    assert len(by_group.scores) == 10
    assert {len(row) for row in by_group.scores} == {12}
    few = calibrate_shares(Proportions(*(a[:9] for a in estimate)), true[:9])
    assert few.slope == 1
    assert few.intercept == (0, 0, 0)
    widths = [(e.high - e.low).mean() for e in (few.apply(estimate, level) for level in (0.5, 0.8, 0.95))]
    assert widths[0] < widths[1] < widths[2] == 1
    with pytest.raises(HeadcountError, match="known shares are"):
        calibrate_shares(estimate, true[:, :2])


def test_files_are_checked():
    assert ShareModel.from_json(None) is None
    assert ShareCalibration.from_json(None, 3) is None
    for weight, spread in (([0.5, 0.5], [0, 0]), ([0.5, 0.5, 0.5], [0, 0, 0]), ([1, 0, 0], [0, 0, 2])):
        with pytest.raises(HeadcountError, match="share model"):
            ShareModel.from_json({"weight": weight, "spread": spread})
    for intercept, slope, scores in (([0, 0], 0.5, [[1]]), ([0, 0, 0], 1, [[1]]), ([0, 0], 1, []), ([0, 0], 1, [[-1]])):
        with pytest.raises(HeadcountError, match="calibration of shares"):
            ShareCalibration.from_json({"intercept": intercept, "slope": slope, "scores": scores}, 2)

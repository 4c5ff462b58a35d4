"""Intervals hold as often as they say, and an audit's draw is what its weights claim: simulations with a known truth."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from headcount.bags import Segments
from headcount.errors import HeadcountError
from headcount.inference import evaluate
from headcount.majority import metrics, proportions

DRAWS = 300


def population(classes: int, accuracy: float, seed: int, n: int = 4000) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Predictions of n instances, their confidence, and whether they are correct: more often where confidence is high."""
    g = np.random.default_rng(seed)
    confidence = np.clip(g.beta(8, 2, n), 1 / classes, 1)
    predicted = g.choice(classes, n, p=g.dirichlet(np.full(classes, 2.0)))
    return predicted, confidence, g.random(n) < np.clip(confidence + accuracy - confidence.mean(), 0.02, 0.995)


@pytest.mark.parametrize(("classes", "accuracy"), [(2, 0.98), (4, 0.8), (20, 0.7), (60, 0.6)])
def test_the_interval_covers_and_the_estimate_is_unbiased(classes, accuracy):
    predicted, confidence, correct = population(classes, accuracy, seed=classes)
    true, g = correct.mean(), np.random.default_rng(1)
    estimates = []
    for _ in range(DRAWS):
        sample = evaluate.draw_sample(predicted, confidence, 100, g)
        estimates.append(evaluate.stratified_accuracy(correct[sample.instance], sample.stratum, sample.stratum_sizes))
    covered = np.mean([e.low <= true <= e.high for e in estimates])
    values = np.array([e.value for e in estimates])
    assert 0.91 <= covered <= 0.995
    assert abs(values.mean() - true) < 4 * values.std() / np.sqrt(DRAWS)
    assert values.std() < 1.25 * np.sqrt(true * (1 - true) / 100)  # no worse than a plain sample, by and large


def test_strata_by_confidence_reduce_the_variance():
    g = np.random.default_rng(0)
    confidence = np.where(np.arange(6000) % 3 == 0, 0.55, 0.99) + 0.005 * g.random(6000)
    correct = np.where(confidence < 0.6, g.random(6000) < 0.5, True)
    predicted = np.arange(6000) % 2
    values = []
    for _ in range(200):
        sample = evaluate.draw_sample(predicted, confidence, 100, g)
        values.append(evaluate.stratified_accuracy(correct[sample.instance], sample.stratum, sample.stratum_sizes).value)
    plain = np.sqrt(correct.mean() * (1 - correct.mean()) / 100)
    assert np.std(values) < 0.75 * plain


def test_weights_add_up_to_all_instances():
    predicted, confidence, _ = population(4, 0.8, 0)
    sample = evaluate.draw_sample(predicted, confidence, 100, np.random.default_rng(0))
    assert len(sample.instance) == len(set(sample.instance.tolist())) == 100
    assert evaluate.stratum_weights(sample.stratum, sample.stratum_sizes).sum() == pytest.approx(len(predicted))
    assert np.bincount(sample.stratum).min() >= 2
    for h in range(len(sample.stratum_sizes)):  # a stratum is of one predicted class
        assert len(set(predicted[sample.instance[sample.stratum == h]].tolist())) == 1


def test_more_is_drawn_from_uncertain_strata():
    predicted, confidence, _ = population(2, 0.9, 0)
    sample = evaluate.draw_sample(predicted, confidence, 100, np.random.default_rng(0))
    each = np.bincount(sample.stratum) / sample.stratum_sizes
    assert each[0] > each[2]
    assert each[3] > each[5]


def test_the_order_is_independent_of_the_strata():
    predicted, confidence, _ = population(3, 0.9, 0)
    runs = [evaluate.draw_sample(predicted, confidence, 100, np.random.default_rng(s)).stratum for s in range(30)]
    place = [stats.spearmanr(np.arange(100), r).statistic for r in runs]
    assert abs(np.mean(place)) < 0.06
    assert np.std(place) > 0.03


def test_few_instances_are_all_drawn_and_the_estimate_is_exact():
    predicted, confidence, correct = population(2, 0.8, 0, n=30)
    sample = evaluate.draw_sample(predicted, confidence, 100, np.random.default_rng(0))
    assert sorted(sample.instance.tolist()) == list(range(30))
    e = evaluate.stratified_accuracy(correct[sample.instance], sample.stratum, sample.stratum_sizes)
    assert e.low == e.value == e.high == pytest.approx(correct.mean())
    for all_ in (np.ones(30), np.zeros(30)):
        e = evaluate.stratified_accuracy(all_, sample.stratum, sample.stratum_sizes)
        assert e.low == e.value == e.high == all_[0], "nor where all are correct, or none"


def test_the_estimate_follows_the_formula():
    """Written once more, stratum by stratum, from the words at the top of the module."""
    g = np.random.default_rng(0)
    for _ in range(20):
        sizes = g.integers(5, 400, 6)
        stratum = np.repeat(np.arange(6), g.integers(2, 6, 6))
        correct = g.random(len(stratum)) < g.random(6)[stratum]
        if correct.all() or not correct.any():
            continue
        p = sum(sizes[h] / sizes.sum() * correct[stratum == h].mean() for h in range(6))
        v = 0.0
        for h in range(6):
            mine = correct[stratum == h]
            q = (mine.sum() + p) / (len(mine) + 1)
            v += (sizes[h] / sizes.sum()) ** 2 * q * (1 - q) / len(mine) * (1 - len(mine) / sizes[h])
        want = (p, *metrics.wilson_interval(p, p * (1 - p) / v))
        assert evaluate.stratified_accuracy(correct, stratum, sizes)[:3] == pytest.approx(want)


def test_blank_strata_are_pooled_with_their_neighbours():
    sizes = np.array([100, 100, 200])
    e = evaluate.stratified_accuracy(np.array([1, 0, 1, 1]), np.array([0, 0, 2, 2]), sizes)
    assert e.value == pytest.approx(0.5 * 200 / 400 + 1.0 * 200 / 400)  # stratum 1 went to stratum 0
    assert evaluate.stratified_accuracy(np.zeros(0), np.zeros(0, int), sizes) == metrics.NO_ESTIMATE


def test_all_correct_is_not_certain():
    e = evaluate.stratified_accuracy(np.ones(100), np.arange(100) % 10, np.full(10, 500))
    assert e.value == e.high == 1
    assert e.low == pytest.approx(metrics.wilson_interval(1, 100)[0])
    uneven = evaluate.stratified_accuracy(np.ones(4), np.array([0, 0, 1, 1]), np.array([10, 990]))
    assert uneven.low < metrics.wilson_interval(1, 3)[0]


def test_too_few_to_draw():
    with pytest.raises(HeadcountError, match="at least 2"):
        evaluate.draw_sample(np.zeros(5, int), np.ones(5), 1, np.random.default_rng(0))


# -- other intervals ----------------------------------------------------------------------------------------------------------


def test_the_wilson_interval():
    for k, n in ((0, 10), (3, 10), (97, 100), (10, 10)):
        want = stats.binomtest(k, n).proportion_ci(0.9, method="wilson")
        low, high = metrics.wilson_interval(k / n, n, 0.9)
        assert (low, high) == pytest.approx((want.low, want.high), abs=1e-9)


def test_groups_widen_the_interval():
    """Instances of a bag are correct or wrong together: an interval that took them as independent would hold far too seldom."""
    g = np.random.default_rng(0)
    covered, naive = [], []
    for _ in range(DRAWS):
        p = g.beta(4, 1, 30)  # each bag its own share correct
        n = g.integers(5, 60, 30)
        correct = g.binomial(n, p)
        e = metrics.clustered_estimate(correct, n)
        covered.append(e.low <= 0.8 <= e.high)
        low, high = metrics.wilson_interval(correct.sum() / n.sum(), n.sum())
        naive.append(low <= 0.8 <= high)
    assert 0.91 <= np.mean(covered) <= 0.99
    assert np.mean(naive) < 0.7


def test_one_group_tells_nothing_about_others():
    assert metrics.clustered_estimate(np.array([9]), np.array([10]))[:3] == (0.9, 0.0, 1.0)
    assert metrics.clustered_estimate(np.array([0]), np.array([0])) == metrics.NO_ESTIMATE


@pytest.mark.parametrize("weighted", [False, True])
def test_shares_of_bags_hold_if_the_probabilities_do(weighted):
    g = torch.Generator().manual_seed(0)
    sizes = torch.randint(4, 120, (300,), generator=g)
    n = int(sizes.sum())
    p = (torch.randn(n, 3, generator=g) * 2).softmax(1)
    weight = torch.rand(n, generator=g) * 3 if weighted else None
    segments = Segments.from_sizes(sizes).with_weight(weight)
    share, low, high = proportions.mean_proportions(p, segments, level=0.9)
    truth = torch.nn.functional.one_hot(torch.multinomial(p, 1, generator=g)[:, 0], 3).float()
    true = segments.mean(truth)
    inside = ((low <= true + 1e-6) & (true <= high + 1e-6)).float().mean()
    assert 0.88 <= float(inside) <= 0.93
    assert torch.allclose(share, segments.mean(p), atol=1e-5)
    assert abs(float((share - true).mean())) < 0.01
    confidence = proportions.mean_proportions(torch.eye(3)[[0, 0, 1]], Segments.from_sizes([3]))
    assert torch.equal(confidence[1], confidence[2])

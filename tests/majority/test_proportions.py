"""Class shares of bags and prediction in context: slow loops, simulated bags, coverage of intervals, when not to use context."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.majority import calibration as contexts, proportions as censuses
from headcount.majority.proportions import (
    estimate_proportions,
    fit_concentration,
    fit_shares,
    laplace_proportions,
    log_posterior_given_share,
    mean_proportions,
    posterior_in_context,
    prior_means,
    project_to_majority,
    split_half_gain,
)
from headcount.majority.transition import Transition, mix_from_shares

C = 4
EVEN = torch.full((C,), 1 / C, dtype=torch.float64)


def world(seed, bags=80, size=30, apart=1.8, spread=0.7):
    """Logits that are calibrated for single instances, and bags with truth."""
    rng = np.random.default_rng(seed)
    y = np.stack([rng.choice(C, size, p=t) for t in rng.dirichlet(np.full(C, spread), bags)])
    counts = np.stack([np.bincount(row, minlength=C) for row in y])
    x = rng.normal(size=(bags * size, C))
    x[np.arange(len(x)), y.ravel()] += apart
    pool = Pool(x.astype(np.float32))
    bags = Bags.of(pool, sizes=[size] * bags, labels=counts.argmax(1), classes=C, truth=y.ravel())
    return torch.tensor(apart * x), bags, torch.from_numpy(counts / size)


@cache
def fitted_context(seed):
    z, valid, _ = world(seed, bags=60)
    return contexts.fit_context(z, valid.blind())


def accuracy(p, bags):
    return float((p.argmax(1) == bags.truth).float().mean())


# -- the parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.01, 3.0, 100.0])
def test_equal_weights_do_not_change_intervals(weight):
    g = torch.Generator().manual_seed(0)
    log_p = (2 * torch.randn(300, 3, generator=g)).log_softmax(1)
    plain, target = Segments.from_sizes([30] * 10), torch.zeros(10, 3)
    even = Transition(mix_from_shares(1 / 3, 3), torch.ones(3) / 3)
    one, other = (
        censuses.estimate_proportions(log_p, s, target, even, 2.0, torch.Generator().manual_seed(1))
        for s in (plain, plain.with_weight(torch.full((300,), weight)))
    )
    for name in ("share", "low", "high"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name))


@pytest.mark.parametrize("weight", [0.01, 3.0, 100.0])
def test_equal_weights_do_not_change_context(weight):
    z, bags, _ = world(3, bags=40)
    log_p, plain = z.log_softmax(1), bags.segments()
    heavy = plain.with_weight(torch.full((len(z),), weight))
    one, other = (fit_concentration(log_p, s, EVEN.expand(40, -1), EVEN) for s in (plain, heavy))
    assert one[0] == other[0]  # the concentration is a number of instances, not of votes
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-4)
    one, other = (posterior_in_context(log_p, s, EVEN, 2.0).exp() for s in (plain, heavy))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_an_uncounted_class_may_exceed_the_label():
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(30, t) for t in rng.dirichlet([6, 2, 2], 60)])  # class 0 is background
    y = np.concatenate([np.repeat(np.arange(3), row) for row in counts])
    x = rng.normal(size=(len(y), 3))
    x[np.arange(len(y)), y] += 2.5
    labels = 1 + counts[:, 1:].argmax(1)
    bags = Bags.of(Pool(x.astype(np.float32)), sizes=[30] * 60, labels=labels, classes=3, counted=[False, True, True])
    z = torch.tensor(2.5 * x + np.log(counts.mean(0)))
    found = contexts.calibrated_proportions(contexts.fit_context(z, bags), z, bags)
    real = torch.from_numpy(counts / 30).float()
    assert float((found.share - real).abs().mean()) < 0.04  # 0.12 if background had to stay below the label's class
    inside = (real >= found.low - 1e-6) & (real <= found.high + 1e-6)
    assert float(inside.float().mean()) > 0.85


def test_projection_with_an_uncounted_class():
    share, target, counted = torch.tensor([[0.2, 0.3, 0.5]]), torch.eye(3)[:1], torch.tensor([True, True, False])
    torch.testing.assert_close(project_to_majority(share, target, counted), torch.tensor([[0.25, 0.25, 0.5]]))


def test_either_winner_of_a_tie_may_be_the_largest():
    """It used to be always the first, as if the other had lost."""
    share, tied = torch.tensor([[0.3, 0.4, 0.3], [0.4, 0.3, 0.3]]), torch.tensor([[0.5, 0.5, 0.0]] * 2)
    torch.testing.assert_close(project_to_majority(share, tied), share)
    lost = torch.tensor([[0.2, 0.3, 0.5]])
    torch.testing.assert_close(project_to_majority(lost, tied[:1]), torch.tensor([[0.2, 0.4, 0.4]]))


def test_a_tie_favours_neither_winner():
    log_p = torch.full((200, 2), 0.5).log()
    tied, even = torch.full((20, 2), 0.5), Transition(mix_from_shares(0.5, 2), torch.ones(2) / 2)
    found = estimate_proportions(log_p, Segments.from_sizes([10] * 20), tied, even, 4.0, torch.Generator().manual_seed(0))
    assert abs(float(found.share[:, 0].mean()) - 0.5) < 0.02  # 0.7 if only the first of them might be the largest


def test_fit_shares_against_a_loop():
    rng = np.random.default_rng(0)
    p, sizes, prior = rng.dirichlet(np.ones(3), 7), [3, 4], np.array([0.2, 0.3, 0.5])
    centre, concentration = rng.dirichlet(np.ones(3), 2), 1.7
    want, start = [], 0
    for b, size in enumerate(sizes):
        theta = list(centre[b])
        for _ in range(20):
            found = [concentration * centre[b][k] for k in range(3)]
            for row in p[start : start + size]:
                q = [row[k] * theta[k] / prior[k] for k in range(3)]
                found = [found[k] + q[k] / sum(q) for k in range(3)]
            theta = [v / (size + concentration) for v in found]
        want.append(theta)
        start += size
    got = fit_shares(
        torch.tensor(p).log(), Segments.from_sizes(sizes), torch.tensor(centre), torch.tensor(prior), concentration
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)  # sizes are counted in float32


def test_prior_shares_change_nothing():
    log_p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(C), 12)).log()
    same = log_posterior_given_share(log_p, Segments.from_sizes([5, 7]), EVEN.expand(2, -1), EVEN)
    torch.testing.assert_close(same, log_p)


def test_project_to_majority():
    """The label's class leads, the sum stays, valid shares stay as they are, and no nearer valid shares exist."""
    rng = np.random.default_rng(0)
    share = torch.tensor(rng.dirichlet(np.ones(C), 200))
    target = torch.eye(C)[torch.from_numpy(rng.integers(0, C, 200))].double()
    target[:20] = 0
    found = project_to_majority(share, target)
    torch.testing.assert_close(found[:20], share[:20])
    own = (found * target).sum(1)[20:]
    assert (own >= found[20:].amax(1) - 1e-12).all()
    torch.testing.assert_close(found.sum(1), torch.ones(200).double())
    valid = (share * target).sum(1) >= share.amax(1)
    torch.testing.assert_close(found[valid], share[valid])
    for b in range(20, 40):
        drawn = torch.tensor(rng.dirichlet(np.ones(C), 3000))
        drawn = drawn[drawn.argmax(1) == target[b].argmax()]
        assert (drawn - share[b]).square().sum(1).min() >= (found[b] - share[b]).square().sum() - 1e-9


def test_halves_of_bags_inform_each_other_only_where_bags_differ():
    z, bags, _ = world(0)
    s, centre = bags.segments(), EVEN.expand(len(bags), -1)
    concentration, gain = fit_concentration(z.log_softmax(1), s, centre, EVEN)
    assert concentration <= 8
    assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5
    mixed = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    concentration, gain = fit_concentration(z[mixed].log_softmax(1), s, centre, EVEN)
    assert concentration >= 128
    assert abs(gain.mean()) < 0.1
    assert split_half_gain(z[mixed].log_softmax(1), s, centre, EVEN, 1.0).mean() < 0


def test_prior_means():
    mix = mix_from_shares(torch.tensor(0.7, dtype=torch.float64), C)
    target = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0.5, 0.5, 0]], dtype=torch.float64)
    found = prior_means(Transition(mix, EVEN), target)
    torch.testing.assert_close(found, torch.stack([mix[0], EVEN, (mix[1] + mix[2]) / 2]))


# -- context ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_labels", [True, False])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_intervals_cover(use_labels, level):
    """Between the level (up to sampling error) and somewhat more: shares of 30 instances come in steps."""
    hits, far = [], []
    for seed in range(3):
        context = fitted_context(2 * seed)
        z, test, true = world(2 * seed + 1, bags=60)
        found = contexts.calibrated_proportions(context, z, test.blind(), use_labels=use_labels, level=level)
        hits.append(((true >= found.low - 1e-6) & (true <= found.high + 1e-6)).float().mean())
        far.append((found.share - true).abs().mean() - (test.segments().mean(z.softmax(1)) - true).abs().mean())
        assert ((found.low <= found.share) & (found.share <= found.high)).all()
        torch.testing.assert_close(found.share.sum(1), torch.ones(len(test)))
        if use_labels:
            assert ((found.share * test.target).sum(1) >= found.share.amax(1) - 0.02).all()
    assert level - 0.04 < np.mean(hits) < min(0.99, level + 0.18)
    assert np.mean(far) < -0.01, "nearer to the truth than the mean of the probabilities"


def test_a_lower_level_is_a_narrower_interval():
    context, (z, bags, _) = fitted_context(0), world(3, bags=20)
    wide, narrow = (contexts.calibrated_proportions(context, z, bags.blind(), level=level) for level in (0.9, 0.5))
    assert (wide.high - wide.low).mean() > 1.5 * (narrow.high - narrow.low).mean()
    with pytest.raises(HeadcountError, match="level of an interval lies between 0 and 1, got 1"):
        contexts.calibrated_proportions(context, z, bags.blind(), level=1)


@pytest.mark.parametrize(("size", "apart", "spread"), [(8, 1.8, 0.7), (30, 1.8, 0.7), (30, 1.0, 4.0), (200, 1.8, 0.3)])
def test_laplace_agrees_with_sampling(size, apart, spread):
    """Shares and intervals of the Laplace approximation against Gibbs sampling, and both against the truth."""
    z, valid, _ = world(0, bags=60, size=size, apart=apart, spread=spread)
    context = contexts.fit_context(z, valid.blind())
    z, test, true = world(1, bags=60, size=size, apart=apart, spread=spread)
    log_p, prior = (z / context.temperature).log_softmax(1), context.transition.prior.double()
    share, low, high = laplace_proportions(log_p, test.segments(), prior, context.assessment.concentration)
    sampled = contexts.calibrated_proportions(context, z, test.blind(), use_labels=False)
    assert (share - sampled.share).abs().mean() < 0.25 * (share - true).abs().mean() + 0.003
    assert abs(float(((high - low) / (sampled.high - sampled.low).mean()).mean()) - 1) < 0.15
    assert 0.83 <= float(((true >= low - 1e-6) & (true <= high + 1e-6)).float().mean()) <= 0.99
    plain = mean_proportions(log_p.exp(), test.segments())
    assert (share - true).abs().mean() <= (plain[0] - true).abs().mean() + 0.002
    torch.testing.assert_close(share.sum(1), torch.ones(len(test)))


@pytest.mark.parametrize("concentration", [None, 0.5, 300.0])
@pytest.mark.parametrize("weight", [None, 7.0])
def test_the_share_of_a_single_instance_is_its_probability(concentration, weight):
    """However alike bags are. The interval is that of one draw: it leaves out what is less likely than a tail of the level."""
    p = torch.tensor([[0.97, 0.02, 0.01], [0.6, 0.36, 0.04], [1.0, 0.0, 0.0]])
    segments = Segments.from_sizes([1, 1, 1]).with_weight(None if weight is None else torch.full((3,), weight))
    if concentration is None:
        share, low, high = mean_proportions(p, segments, level=0.9)
    else:
        prior = torch.tensor([0.2, 0.3, 0.5])
        share, low, high = laplace_proportions(p.clamp_min(1e-30).log(), segments, prior, concentration, level=0.9)
    torch.testing.assert_close(share, p)
    torch.testing.assert_close(low, torch.tensor([[0.97, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))
    torch.testing.assert_close(high, torch.tensor([[1.0, 0.02, 0.01], [1.0, 1.0, 0.04], [1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("level", [0.5, 0.9])
def test_intervals_of_single_instances_cover(level):
    g = torch.Generator().manual_seed(0)
    p = (2.5 * torch.randn(4000, 3, generator=g)).softmax(1)
    truth = torch.nn.functional.one_hot(torch.multinomial(p, 1, generator=g)[:, 0], 3)
    _, low, high = laplace_proportions(p.log(), Segments.from_sizes([1] * 4000), torch.full((3,), 1 / 3), 2.0, level=level)
    assert level <= float(((low <= truth + 1e-6) & (truth <= high + 1e-6)).float().mean())
    assert float(((high - low) > 0.99).float().mean()) < 0.9 - 0.4 * (level == 0.5), "not all of them are 0 to 1"


def test_laplace_in_chunks_with_weights_and_removed_instances():
    z, bags, _ = world(2, bags=12, size=9)
    log_p, s = z.log_softmax(1), bags.segments()
    whole = laplace_proportions(log_p, s, EVEN, 4.0)
    ragged = laplace_proportions(log_p, Segments(s.index, s.n_bags), EVEN, 4.0)
    parts = laplace_proportions(log_p, Segments(s.index, s.n_bags), EVEN, 4.0, max_products=3 * C * C)
    for a, b, c in zip(whole, ragged, parts, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)
    removed = torch.arange(len(z)) % 3 == 0
    fewer = laplace_proportions(log_p, s.without(removed), EVEN, 4.0)
    left = laplace_proportions(log_p[~removed], Segments(s.index[~removed], s.n_bags), EVEN, 4.0)
    for a, b in zip(fewer, left, strict=True):
        torch.testing.assert_close(a, b)
    heavy = [laplace_proportions(log_p, s.with_weight(torch.full((len(z),), w)), EVEN, 4.0) for w in (1.0, 1e6)]
    for a, b in zip(*heavy, strict=True):
        torch.testing.assert_close(a, b)  # votes are not evidence
    first = laplace_proportions(log_p, s.with_weight(torch.where(torch.arange(len(z)) % 9 == 0, 1e6, 1.0)), EVEN, 4.0)[0]
    assert (first.argmax(1) == log_p[::9].argmax(1)).all(), "one instance holds nearly all the votes"


def test_own_prediction_is_excluded_from_context():
    log_p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(C), 10)).log()
    torch.testing.assert_close(posterior_in_context(log_p, Segments.from_sizes([1] * 10), EVEN, 1.0), log_p)
    weighted = Segments.from_sizes([1] * 10).with_weight(torch.full((10,), 7.0))
    torch.testing.assert_close(posterior_in_context(log_p, weighted, EVEN, 1.0), log_p)
    two = posterior_in_context(log_p[:2], Segments.from_sizes([2]), EVEN, 1e-6).exp()
    want = log_p[0].exp() * fit_shares(log_p[1:2], Segments.from_sizes([1]), EVEN[None], EVEN, 1e-6)[0] / EVEN
    assert (two[0] - want / want.sum()).abs().max() < 0.2, "the other instance is used"
    removed = torch.tensor([True, False])
    torch.testing.assert_close(posterior_in_context(log_p[:2], Segments.from_sizes([2]).without(removed), EVEN, 1.0), log_p[:2])


def test_context_helps_where_classes_overlap_and_shares_vary():
    context = fitted_context(4)
    assert context.assessment.helps
    z, test, _ = world(5)
    alone, in_context = (
        contexts.calibrated_probabilities(context, z, test.blind(), use_context=use_context) for use_context in (False, True)
    )
    assert accuracy(in_context, test) > accuracy(alone, test) + 0.04
    assert torch.equal(contexts.calibrated_probabilities(context, z, test.blind()), in_context)
    assert accuracy(alone, test) == accuracy(z, test), "a temperature changes no predicted class"


def test_probabilities_and_shares_use_the_temperature():
    context, (z, bags, _) = fitted_context(0), world(3, bags=10)
    warm = replace(context, temperature=2 * context.temperature)
    for use_context in (False, True):
        want = contexts.calibrated_probabilities(context, z / 2, bags.blind(), use_context=use_context)
        torch.testing.assert_close(contexts.calibrated_probabilities(warm, z, bags.blind(), use_context=use_context), want)
    assert torch.equal(
        contexts.calibrated_proportions(warm, z, bags.blind()).share,
        contexts.calibrated_proportions(context, z / 2, bags.blind()).share,
    )


def test_context_is_off_where_bags_are_similar():
    z, valid, _ = world(6, spread=1000.0)
    context = contexts.fit_context(z, valid.blind())
    assert not context.assessment.helps
    z, test, _ = world(7, spread=1000.0)
    assert torch.equal(
        contexts.calibrated_probabilities(context, z, test.blind()), (z / context.temperature).softmax(1).float()
    )


def test_context_is_off_where_it_explains_labels_worse():
    """A network biased to class 0 in every second bag, as by one laboratory's stain: the halves of a bag agree, and are wrong
    together, which the labels reveal."""
    z, valid, _ = world(8, bags=60, apart=1.5, spread=4.0)
    z = z + 2.0 * ((valid.bag % 2 == 0)[:, None] & (torch.arange(C) == 0))
    context = contexts.fit_context(z, valid.blind())
    assert context.assessment.gain > contexts.MIN_STANDARD_ERRORS * context.assessment.gain_error
    assert not context.assessment.helps
    assert accuracy(contexts.calibrated_probabilities(context, z, valid, use_context=True), valid) < accuracy(z, valid) - 0.01


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_the_temperature_is_fitted_to_the_labels(factor):
    """Logits too flat or too steep by a factor of two are improved, by the likelihood of the truth."""
    found, before, after = [], 0.0, 0.0
    for seed in range(3):
        z, valid, _ = world(10 + seed, bags=100, apart=1.6)
        scaled = z / factor
        tau = contexts.fit_instance_temperature(scaled, valid.segments(), valid.target.double())
        found.append(tau)
        truth = valid.truth[:, None]
        before -= float(scaled.log_softmax(1).gather(1, truth).mean())
        after -= float((scaled / tau).log_softmax(1).gather(1, truth).mean())
    assert after < before - 0.02
    assert abs(np.log(np.array(found) * factor)).mean() < 0.5 * abs(np.log(factor))


def test_calibrated_logits_keep_their_temperature():
    z, valid, _ = world(13)
    assert contexts.fit_instance_temperature(z, valid.segments(), valid.target.double()) == 1


def test_truth_is_not_used_and_shapes_are_checked():
    z, valid, _ = world(14, bags=20)
    with pytest.raises(HeadcountError, match=r"600 instances of 4 classes need as many logits, got \(599, 4\)"):
        contexts.fit_context(z[1:], valid)
    wrong_truth = Bags(**{**vars(valid), "truth": valid.truth.flip(0)})
    assert contexts.fit_context(z, valid).temperature == contexts.fit_context(z, wrong_truth).temperature


def test_a_bag_without_accepted_draws_is_projected():
    """Every instance certainly of class 1 in a bag labelled 0: no draw is accepted, and the result still obeys the label."""
    z = torch.tensor([[0.0, 60.0, 0.0]]).repeat(6, 1)
    transition = Transition(mix_from_shares(0.6, 3), torch.full((3,), 1 / 3))
    found = estimate_proportions(
        z.log_softmax(1), Segments.from_sizes([6]), torch.eye(3)[:1], transition, 4.0, torch.Generator()
    )
    torch.testing.assert_close(found.share, torch.tensor([[0.5, 0.5, 0.0]]))

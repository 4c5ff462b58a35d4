"""Shares of single bags and context at prediction: loops, simulated bags, coverage of the intervals, and when to keep out."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool, Segments
from headcount.errors import HeadcountError
from headcount.majority import context as contexts
from headcount.majority import proportions as censuses
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
    """Logits that are exactly right for an instance alone, and bags with truth."""
    rng = np.random.default_rng(seed)
    y = np.stack([rng.choice(C, size, p=t) for t in rng.dirichlet(np.full(C, spread), bags)])
    counts = np.stack([np.bincount(row, minlength=C) for row in y])
    x = rng.normal(size=(bags * size, C))
    x[np.arange(len(x)), y.ravel()] += apart
    pool = Pool(x.astype(np.float32))
    made = Bags.of(pool, sizes=[size] * bags, labels=counts.argmax(1), classes=C, truth=y.ravel())
    return torch.tensor(apart * x), made, torch.from_numpy(counts / size)


@cache
def learned(seed):
    z, valid, _ = world(seed, bags=60)
    return contexts.fit_context(z, valid.blind())


def accuracy(p, bags):
    return float((p.argmax(1) == bags.truth).float().mean())


# -- the parts --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.01, 3.0, 100.0])
def test_weights_that_are_alike_change_no_interval(weight):
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
def test_weights_that_are_alike_change_nothing_of_what_is_heard(weight):
    z, made, _ = world(3, bags=40)
    log_p, plain = z.log_softmax(1), made.segments()
    heavy = plain.with_weight(torch.full((len(z),), weight))
    one, other = (fit_concentration(log_p, s, EVEN.expand(40, -1), EVEN) for s in (plain, heavy))
    assert one[0] == other[0]  # the census counts instances, and so must what it is told of bags
    torch.testing.assert_close(one[1], other[1], rtol=1e-4, atol=1e-4)
    one, other = (posterior_in_context(log_p, s, EVEN, 2.0).exp() for s in (plain, heavy))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_a_class_that_is_not_counted_may_be_larger_than_the_label():
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(30, t) for t in rng.dirichlet([6, 2, 2], 60)])  # class 0 is background
    y = np.concatenate([np.repeat(np.arange(3), row) for row in counts])
    x = rng.normal(size=(len(y), 3))
    x[np.arange(len(y)), y] += 2.5
    labels = 1 + counts[:, 1:].argmax(1)
    made = Bags.of(Pool(x.astype(np.float32)), sizes=[30] * 60, labels=labels, classes=3, counted=[False, True, True])
    z = torch.tensor(2.5 * x + np.log(counts.mean(0)))
    found = contexts.calibrated_proportions(contexts.fit_context(z, made), z, made)
    real = torch.from_numpy(counts / 30).float()
    assert float((found.share - real).abs().mean()) < 0.04  # 0.12 if background had to stay below the label's class
    inside = (real >= found.low - 1e-6) & (real <= found.high + 1e-6)
    assert float(inside.float().mean()) > 0.85


def test_crowned_with_a_class_that_is_not_counted():
    share, target, counted = torch.tensor([[0.2, 0.3, 0.5]]), torch.eye(3)[:1], torch.tensor([True, True, False])
    torch.testing.assert_close(project_to_majority(share, target, counted), torch.tensor([[0.25, 0.25, 0.5]]))


def test_of_a_tie_either_winner_may_be_crowned():
    """It was always the first: its rival was levelled with it, as if it had lost."""
    share, tied = torch.tensor([[0.3, 0.4, 0.3], [0.4, 0.3, 0.3]]), torch.tensor([[0.5, 0.5, 0.0]] * 2)
    torch.testing.assert_close(project_to_majority(share, tied), share)
    lost = torch.tensor([[0.2, 0.3, 0.5]])
    torch.testing.assert_close(project_to_majority(lost, tied[:1]), torch.tensor([[0.2, 0.4, 0.4]]))


def test_a_tie_crowns_neither_of_its_winners():
    log_p = torch.full((200, 2), 0.5).log()
    tied, even = torch.full((20, 2), 0.5), Transition(mix_from_shares(0.5, 2), torch.ones(2) / 2)
    found = estimate_proportions(
        log_p, Segments.from_sizes([10] * 20), tied, even, 4.0, torch.Generator().manual_seed(0)
    )
    assert abs(float(found.share[:, 0].mean()) - 0.5) < 0.02  # 0.7 if only the first of them might be the largest


def test_shares_against_a_loop():
    rng = np.random.default_rng(0)
    p, sizes, prior = rng.dirichlet(np.ones(3), 7), [3, 4], np.array([0.2, 0.3, 0.5])
    centre, alike = rng.dirichlet(np.ones(3), 2), 1.7
    want, start = [], 0
    for b, size in enumerate(sizes):
        theta = list(centre[b])
        for _ in range(20):
            found = [alike * centre[b][k] for k in range(3)]
            for row in p[start : start + size]:
                q = [row[k] * theta[k] / prior[k] for k in range(3)]
                found = [found[k] + q[k] / sum(q) for k in range(3)]
            theta = [v / (size + alike) for v in found]
        want.append(theta)
        start += size
    got = fit_shares(
        torch.tensor(p).log(), Segments.from_sizes(sizes), torch.tensor(centre), torch.tensor(prior), alike
    )
    np.testing.assert_allclose(got, want, rtol=1e-6)  # sizes are counted in float32


def test_context_without_difference_is_none():
    log_p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(C), 12)).log()
    same = log_posterior_given_share(log_p, Segments.from_sizes([5, 7]), EVEN.expand(2, -1), EVEN)
    torch.testing.assert_close(same, log_p)


def test_the_crown():
    """The label's class leads, the sum stays, lawful shares stay as they are, and no nearer lawful shares exist."""
    rng = np.random.default_rng(0)
    share = torch.tensor(rng.dirichlet(np.ones(C), 200))
    target = torch.eye(C)[torch.from_numpy(rng.integers(0, C, 200))].double()
    target[:20] = 0
    found = project_to_majority(share, target)
    torch.testing.assert_close(found[:20], share[:20])
    own = (found * target).sum(1)[20:]
    assert (own >= found[20:].amax(1) - 1e-12).all()
    torch.testing.assert_close(found.sum(1), torch.ones(200).double())
    lawful = (share * target).sum(1) >= share.amax(1)
    torch.testing.assert_close(found[lawful], share[lawful])
    for b in range(20, 40):
        drawn = torch.tensor(rng.dirichlet(np.ones(C), 3000))
        drawn = drawn[drawn.argmax(1) == target[b].argmax()]
        assert (drawn - share[b]).square().sum(1).min() >= (found[b] - share[b]).square().sum() - 1e-9


def test_halves_tell_of_each_other_only_where_bags_differ():
    z, bags, _ = world(0)
    s, centre = bags.segments(), EVEN.expand(len(bags), -1)
    alike, gain = fit_concentration(z.log_softmax(1), s, centre, EVEN)
    assert alike <= 8
    assert gain.mean() > 5 * gain.std() / len(gain) ** 0.5
    mixed = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    alike, gain = fit_concentration(z[mixed].log_softmax(1), s, centre, EVEN)
    assert alike >= 128
    assert abs(gain.mean()) < 0.1
    assert split_half_gain(z[mixed].log_softmax(1), s, centre, EVEN, 1.0).mean() < 0


def test_centres():
    mix = mix_from_shares(torch.tensor(0.7, dtype=torch.float64), C)
    target = torch.tensor([[1.0, 0, 0, 0], [0, 0, 0, 0], [0, 0.5, 0.5, 0]], dtype=torch.float64)
    found = prior_means(Transition(mix, EVEN), target)
    torch.testing.assert_close(found, torch.stack([mix[0], EVEN, (mix[1] + mix[2]) / 2]))


# -- together ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_labels", [True, False])
@pytest.mark.parametrize("level", [0.6, 0.9])
def test_intervals_cover(use_labels, level):
    """Between the level (less what chance allows) and somewhat more: shares of 30 instances come in steps."""
    hits, far = [], []
    for seed in range(3):
        context = learned(2 * seed)
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


def test_a_sharper_level_is_a_narrower_interval():
    context, (z, bags, _) = learned(0), world(3, bags=20)
    wide, narrow = (contexts.calibrated_proportions(context, z, bags.blind(), level=level) for level in (0.9, 0.5))
    assert (wide.high - wide.low).mean() > 1.5 * (narrow.high - narrow.low).mean()
    with pytest.raises(HeadcountError, match="level of an interval lies between 0 and 1, got 1"):
        contexts.calibrated_proportions(context, z, bags.blind(), level=1)


@pytest.mark.parametrize(("size", "apart", "spread"), [(8, 1.8, 0.7), (30, 1.8, 0.7), (30, 1.0, 4.0), (200, 1.8, 0.3)])
def test_the_formula_agrees_with_the_lots(size, apart, spread):
    """Shares and intervals by curvature against Gibbs sampling, and both against the truth."""
    z, valid, _ = world(0, bags=60, size=size, apart=apart, spread=spread)
    context = contexts.fit_context(z, valid.blind())
    z, test, true = world(1, bags=60, size=size, apart=apart, spread=spread)
    log_p, prior = (z / context.temperature).log_softmax(1), context.transition.prior.double()
    share, low, high = laplace_proportions(log_p, test.segments(), prior, context.concentration)
    lots = contexts.calibrated_proportions(context, z, test.blind(), use_labels=False)
    assert (share - lots.share).abs().mean() < 0.25 * (share - true).abs().mean() + 0.003
    assert abs(float(((high - low) / (lots.high - lots.low).mean()).mean()) - 1) < 0.15
    assert 0.83 <= float(((true >= low - 1e-6) & (true <= high + 1e-6)).float().mean()) <= 0.99
    plain = mean_proportions(log_p.exp(), test.segments())
    assert (share - true).abs().mean() <= (plain[0] - true).abs().mean() + 0.002
    torch.testing.assert_close(share.sum(1), torch.ones(len(test)))


def test_the_formula_in_parts_with_weights_and_without_the_removed(monkeypatch):
    z, bags, _ = world(2, bags=12, size=9)
    log_p, s = z.log_softmax(1), bags.segments()
    whole = laplace_proportions(log_p, s, EVEN, 4.0)
    ragged = laplace_proportions(log_p, Segments(s.index, s.n_bags), EVEN, 4.0)
    monkeypatch.setattr(censuses, "_MAX_PRODUCTS", 3 * C * C)
    parts = laplace_proportions(log_p, Segments(s.index, s.n_bags), EVEN, 4.0)
    for a, b, c in zip(whole, ragged, parts, strict=True):
        torch.testing.assert_close(a, b)
        torch.testing.assert_close(a, c)
    gone = torch.arange(len(z)) % 3 == 0
    fewer = laplace_proportions(log_p, s.without(gone), EVEN, 4.0)
    left = laplace_proportions(log_p[~gone], Segments(s.index[~gone], s.n_bags), EVEN, 4.0)
    for a, b in zip(fewer, left, strict=True):
        torch.testing.assert_close(a, b)
    heavy = [laplace_proportions(log_p, s.with_weight(torch.full((len(z),), w)), EVEN, 4.0) for w in (1.0, 1e6)]
    for a, b in zip(*heavy, strict=True):
        torch.testing.assert_close(a, b)  # votes are not witnesses
    first = laplace_proportions(log_p, s.with_weight(torch.where(torch.arange(len(z)) % 9 == 0, 1e6, 1.0)), EVEN, 4.0)[
        0
    ]
    assert (first.argmax(1) == log_p[::9].argmax(1)).all(), "one instance holds nearly all the votes"


def test_nobody_is_a_witness_for_himself():
    log_p = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(C), 10)).log()
    torch.testing.assert_close(posterior_in_context(log_p, Segments.from_sizes([1] * 10), EVEN, 1.0), log_p)
    weighted = Segments.from_sizes([1] * 10).with_weight(torch.full((10,), 7.0))
    torch.testing.assert_close(posterior_in_context(log_p, weighted, EVEN, 1.0), log_p)
    two = posterior_in_context(log_p[:2], Segments.from_sizes([2]), EVEN, 1e-6).exp()
    want = log_p[0].exp() * fit_shares(log_p[1:2], Segments.from_sizes([1]), EVEN[None], EVEN, 1e-6)[0] / EVEN
    assert (two[0] - want / want.sum()).abs().max() < 0.2, "the other is heard"
    gone = torch.tensor([True, False])
    torch.testing.assert_close(
        posterior_in_context(log_p[:2], Segments.from_sizes([2]).without(gone), EVEN, 1.0), log_p[:2]
    )


def test_context_helps_where_classes_overlap_and_shares_vary():
    context = learned(4)
    assert context.helps
    z, test, _ = world(5)
    alone, joined = (
        contexts.calibrated_probabilities(context, z, test.blind(), use_context=listen) for listen in (False, True)
    )
    assert accuracy(joined, test) > accuracy(alone, test) + 0.04
    assert torch.equal(contexts.calibrated_probabilities(context, z, test.blind()), joined)
    assert accuracy(alone, test) == accuracy(z, test), "a temperature changes nobody's class"


def test_answers_and_shares_use_the_temperature():
    context, (z, bags, _) = learned(0), world(3, bags=10)
    warm = replace(context, temperature=2 * context.temperature)
    for listen in (False, True):
        want = contexts.calibrated_probabilities(context, z / 2, bags.blind(), use_context=listen)
        torch.testing.assert_close(contexts.calibrated_probabilities(warm, z, bags.blind(), use_context=listen), want)
    assert torch.equal(
        contexts.calibrated_proportions(warm, z, bags.blind()).share,
        contexts.calibrated_proportions(context, z / 2, bags.blind()).share,
    )


def test_context_keeps_out_where_bags_are_alike():
    z, valid, _ = world(6, spread=1000.0)
    context = contexts.fit_context(z, valid.blind())
    assert not context.helps
    z, test, _ = world(7, spread=1000.0)
    assert torch.equal(
        contexts.calibrated_probabilities(context, z, test.blind()), (z / context.temperature).softmax(1).float()
    )


def test_context_keeps_out_where_it_spoils_the_labels():
    """A network with a weakness for class 0 in every second bag, as one laboratory's stain might give it: halves agree, and
    are wrong together. The labels tell."""
    z, valid, _ = world(8, bags=60, apart=1.5, spread=4.0)
    z = z + 2.0 * ((valid.bag % 2 == 0)[:, None] & (torch.arange(C) == 0))
    context = contexts.fit_context(z, valid.blind())
    assert context.assessment.gain > contexts.MIN_STANDARD_ERRORS * context.assessment.gain_error
    assert not context.helps
    assert (
        accuracy(contexts.calibrated_probabilities(context, z, valid, use_context=True), valid)
        < accuracy(z, valid) - 0.01
    )


@pytest.mark.parametrize("heat", [0.5, 2.0])
def test_the_temperature_is_found_from_the_labels(heat):
    """Logits too flat or too steep by a factor of two come out nearer to right, by the likelihood of the truth."""
    found, before, after = [], 0.0, 0.0
    for seed in range(3):
        z, valid, _ = world(10 + seed, bags=100, apart=1.6)
        spoilt = z / heat
        tau = contexts.fit_instance_temperature(spoilt, valid.segments(), valid.target.double())
        found.append(tau)
        truth = valid.truth[:, None]
        before -= float(spoilt.log_softmax(1).gather(1, truth).mean())
        after -= float((spoilt / tau).log_softmax(1).gather(1, truth).mean())
    assert after < before - 0.02
    assert abs(np.log(np.array(found) * heat)).mean() < 0.5 * abs(np.log(heat))


def test_right_logits_are_left_alone():
    z, valid, _ = world(13)
    assert contexts.fit_instance_temperature(z, valid.segments(), valid.target.double()) == 1


def test_truth_is_never_asked_and_shapes_are_checked():
    z, valid, _ = world(14, bags=20)
    with pytest.raises(HeadcountError, match=r"600 instances of 4 classes need as many logits, got \(599, 4\)"):
        contexts.fit_context(z[1:], valid)
    lying = Bags(**{**vars(valid), "truth": valid.truth.flip(0)})
    assert contexts.fit_context(z, valid).temperature == contexts.fit_context(z, lying).temperature


def test_a_bag_that_cannot_be_explained_is_levelled():
    """Every instance surely of class 1 in a bag labelled 0: no draw fits, and the answer still obeys the label."""
    z = torch.tensor([[0.0, 60.0, 0.0]]).repeat(6, 1)
    tilt = Transition(mix_from_shares(0.6, 3), torch.full((3,), 1 / 3))
    found = estimate_proportions(
        z.log_softmax(1), Segments.from_sizes([6]), torch.eye(3)[:1], tilt, 4.0, torch.Generator(), draws=30
    )
    torch.testing.assert_close(found.share, torch.tensor([[0.5, 0.5, 0.0]]))

"""The transition and its EM against slow loops, and against simulated bags whose true transition is known."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headcount.bags import Segments
from headcount.errors import HeadcountError
from headcount.majority import transition
from oracles import examine


def random_mix(rng, classes):
    """A valid mix: in each row the label's class is the largest."""
    rows = rng.dirichlet(np.ones(classes), classes)
    for c, row in enumerate(rows):
        top = row.argmax()
        row[c], row[top] = row[top], row[c]
    return rows


def near(a, b, tolerance=1e-9):
    np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=tolerance, atol=tolerance)


# -- slow loops ----------------------------------------------------------------------------------------------------------


def slow_matrix(mix, labels):
    """T[k][c] = P(label c | y = k), by Bayes' rule."""
    classes = range(len(mix))
    prior = [sum(labels[c] * mix[c][k] for c in classes) for k in classes]
    return [[labels[c] * mix[c][k] / prior[k] for c in classes] for k in classes], prior


def slow_posterior(p, c, mix, prior):
    q = [p[k] * mix[c][k] / prior[k] for k in range(len(p))]
    return [v / sum(q) for v in q]


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_formulas_against_loops(classes):
    rng = np.random.default_rng(classes)
    mix, labels = random_mix(rng, classes), rng.dirichlet(np.ones(classes))
    p, y = rng.dirichlet(np.ones(classes), 9), rng.integers(0, classes, 9)
    y[3] = -1
    target = torch.tensor(np.eye(classes)[y] * (y >= 0)[:, None])
    t_mix, t_labels, log_p = torch.tensor(mix), torch.tensor(labels), torch.tensor(p).log()
    matrix, prior = slow_matrix(mix, labels)
    near(transition.Transition(t_mix, t_labels).matrix, matrix)
    near(transition.Transition(t_mix, t_labels).prior, prior)
    near(transition.Transition(t_mix, t_labels).matrix.sum(1), np.ones(classes))
    joint = torch.tensor(prior)[:, None] * transition.Transition(t_mix, t_labels).matrix  # the same from T and P(y)
    near((joint / joint.sum(0)).T, mix)
    near(joint.sum(0), labels)
    label_p = [[sum(p[i][k] * matrix[k][c] for k in range(classes)) for c in range(classes)] for i in range(9)]
    near(transition.forward_correct(log_p, t_mix, t_labels).exp(), label_p)
    weight = torch.arange(9.0).double()
    labelled = [i for i in range(9) if y[i] >= 0]
    loss = -sum(i * math.log(label_p[i][y[i]]) for i in labelled) / sum(labelled)
    near(transition.forward_loss(log_p, target, t_mix, t_labels, weight), loss)
    q = transition.posterior(log_p, target, t_mix, t_labels)
    for i in range(9):
        near(q[i], slow_posterior(p[i], y[i], mix, prior) if y[i] >= 0 else p[i])
    near(transition.label_likelihood_ratio(target, t_mix, t_labels)[3], np.ones(classes))
    counts = np.zeros((classes, classes))
    for i in labelled:
        counts[y[i]] += i * np.array(slow_posterior(p[i], y[i], mix, prior))
    near(transition.e_step(torch.tensor(p), weight[:, None] * target, t_mix, t_labels), counts)


def test_autocast_changes_nothing():
    rng = np.random.default_rng(0)
    log_p, target = torch.tensor(rng.dirichlet(np.ones(5), 40)).float().log(), torch.eye(5)[torch.arange(40) % 5]
    given = log_p, target, transition.mix_from_shares(0.3, 5), torch.full((5,), 0.2)
    plain = transition.forward_loss(*given), transition.posterior(*given), transition.e_step(log_p.exp(), *given[1:])
    with torch.autocast("cpu", torch.bfloat16):
        again = (transition.forward_loss(*given), transition.posterior(*given), transition.e_step(log_p.exp(), *given[1:]))
    for a, b in zip(plain, again, strict=True):
        near(a, b, 1e-6)


def test_a_soft_label_adds_to_the_counts_of_each_label():
    rng = np.random.default_rng(0)
    mix, labels = torch.tensor(random_mix(rng, 3)), torch.tensor([0.2, 0.3, 0.5])
    p = torch.tensor(rng.dirichlet(np.ones(3), 1))
    whole = [transition.e_step(p, torch.eye(3)[[c]].double(), mix, labels.double()) for c in range(3)]
    mixed = transition.e_step(p, torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64), mix, labels.double())
    near(mixed, 0.5 * whole[0] + 0.3 * whole[1] + 0.2 * whole[2])


@pytest.mark.parametrize(("size", "classes"), [(1, 3), (2, 2), (5, 3), (24, 10), (64, 4), (300, 5)])
def test_random_majority_share_equals_simulation(size, classes):
    rng = np.random.default_rng(0)
    drawn = rng.multinomial(size, np.full(classes, 1 / classes), 40_000).max(1) / size
    assert transition.random_majority_share(size, classes) == pytest.approx(drawn.mean(), abs=4 * drawn.std() / 200 + 0.001)
    assert 1 / classes < transition.random_majority_share(size, classes)
    assert min(transition.random_majority_share(size, classes), 0.999) <= transition.initial_share(size, classes) < 1


@pytest.mark.parametrize(("classes", "too_much"), [(2, 0.01), (10, 0.05), (100, 0.26)])
def test_random_majority_share_of_large_bags_is_slightly_too_large(classes, too_much):
    """Of many votes the largest count leads by the expected largest of C normal numbers times the root of S / C."""
    x = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    upto = torch.special.ndtr(x) ** classes
    top = float(((x[1:] + x[:-1]) / 2 * upto.diff()).sum())
    excess = (transition.random_majority_share(10**6, classes) - 1 / classes) * 1000 * math.sqrt(classes)
    assert -0.01 < excess / top - 1 < too_much


def test_condition_number():
    even = torch.full((4,), 0.25)
    assert transition.Transition(torch.eye(4), even).condition_number == pytest.approx(1)
    steep, slight = (transition.Transition(transition.mix_from_shares(s, 4), even).condition_number for s in (0.7, 0.3))
    assert 1 < steep < slight < math.inf
    lead = (0.7 - 0.1) / 1  # the eigenvalues of such a T are 1 and the lead
    assert steep == pytest.approx(1 / lead, rel=1e-5)
    assert (
        transition.Transition(transition.mix_from_shares(0.7, 4), torch.tensor([0.5, 0.5, 0.0, 0.0])).condition_number
        == math.inf
    )
    y = torch.arange(600) % 4
    never = transition.estimate_transition(torch.eye(4)[y], Segments.from_sizes([10] * 60), torch.eye(4)[torch.arange(60) % 3])
    assert never.condition_number == math.inf, "label 3 never occurs"
    rare = transition.estimate_transition(
        torch.eye(4)[y], Segments.from_sizes([10] * 60), torch.eye(4)[torch.arange(60).clamp_max(3)]
    )
    assert rare.condition_number < math.inf


# -- estimation -----------------------------------------------------------------------------------------------------------


def world(seed, bags, size, classes, apart=2.0, spread=1.0, tie="lowest"):
    """Bags of Gaussian instances: exact posteriors under equal priors, truth, majority labels and the true mix."""
    rng = np.random.default_rng(seed)
    theta = rng.dirichlet(np.full(classes, spread), bags)
    counts = np.stack([rng.multinomial(size, t) for t in theta])
    label = counts.argmax(1)
    y = np.concatenate([np.repeat(np.arange(classes), n) for n in counts])
    x = rng.normal(size=(len(y), classes))
    x[np.arange(len(y)), y] += apart
    p = torch.tensor(apart * x).softmax(1)  # the likelihood ratio of unit Gaussians at the corners
    mix = np.stack([counts[label == c].sum(0) / max(1, counts[label == c].sum()) for c in range(classes)])
    return p, y, torch.from_numpy(label), mix, Segments.from_sizes([size] * bags)


@pytest.mark.parametrize("form", transition.TRANSITION_FORMS)
@pytest.mark.parametrize(("classes", "spread"), [(2, 1.0), (4, 1.0), (4, 5.0)])
def test_the_estimate_converges(form, classes, spread):
    """With many bags the error is small, and smaller than with few, also for overlapping classes."""
    errors = []
    for bags in (20, 2000):
        off = []
        for seed in range(3):
            p, _, label, mix, segments = world(seed, bags, 20, classes, apart=1.8, spread=spread)
            estimate = transition.estimate_transition(p, segments, torch.eye(classes)[label], form=form)
            if bags == 2000:  # against the bags' own mix
                off.append(abs(estimate.share.numpy() - np.diag(mix)).max())
            else:
                off.append(abs(estimate.share.mean().item() - np.diag(mix).mean()))
        errors.append(np.mean(off))
    assert errors[1] < 0.02
    assert errors[0] < 0.15


def test_the_full_form_finds_structure_that_the_simple_one_cannot():
    """In bags labelled c, class c + 1 is always the second."""
    rng = np.random.default_rng(0)
    true = np.array([[0.5, 0.4, 0.1], [0.1, 0.5, 0.4], [0.4, 0.1, 0.5]])
    label = np.repeat(np.arange(3), 150)
    y = np.concatenate([rng.choice(3, 20, p=true[c]) for c in label])
    x = rng.normal(size=(len(y), 3))
    x[np.arange(len(y)), y] += 2.5
    p, segments = torch.tensor(2.5 * x).softmax(1), Segments.from_sizes([20] * 450)
    full, one = (transition.estimate_transition(p, segments, torch.eye(3)[label], form=f).mix.numpy() for f in ("full", "one"))
    assert abs(full - true).max() < 0.03
    assert abs(one - true).max() > 0.1


def test_few_bags_get_the_simple_form():
    """Two bags of each label: the rows are shrunk to a common one; two thousand keep their own."""
    rows = torch.tensor([[0.9, 0.05, 0.05], [0.1, 0.6, 0.3], [0.1, 0.3, 0.6]], dtype=torch.float64)
    few, many = (transition.m_step(rows * 100, torch.full((3,), n).double()) for n in (2.0, 2000.0))
    near(many, rows, 0.01)
    common = transition.mix_from_shares(torch.tensor(0.7, dtype=torch.float64), 3)
    assert abs(few - common).max() < 0.5 * abs(rows - common).max()
    near(transition.m_step(rows * 100, torch.full((3,), 2000.0).double(), "one"), common)


def test_an_uninformative_classifier_keeps_the_initial_share():
    """With uninformative probabilities every mix explains the labels equally, and the estimate stays at the start."""
    label = torch.arange(40) % 4
    p, segments = torch.full((400, 4), 0.25), Segments.from_sizes([10] * 40)
    estimate = transition.estimate_transition(p, segments, torch.eye(4)[label])
    near(estimate.share, np.full(4, transition.initial_share(10, 4)), 1e-4)


def test_the_mix_is_never_degenerate():
    """For any counts: rows add to one, nothing is zero, the label's class leads its row, T can be inverted."""

    def check(classes, seed, form, few):
        rng = np.random.default_rng(seed)
        counts = torch.tensor(rng.gamma(0.05, 100, (classes, classes))) * (torch.rand(classes, 1) > 0.2)
        bags = torch.tensor(rng.integers(0, 3 if few else 300, classes)).double()
        mix = transition.m_step(counts, bags, form, min_share=0.3 if classes > 3 else 0.0)
        near(mix.sum(1), np.ones(classes))
        assert (mix > 0).all()
        others = mix.masked_fill(torch.eye(classes, dtype=torch.bool), 0)
        assert (mix.diagonal() > others.amax(1)).all()
        labels = transition.label_prior_from_counts(bags)
        assert labels.sum() == pytest.approx(1)
        assert torch.isfinite(transition.Transition(mix, labels).matrix).all()

    examine(
        check,
        60,
        classes=st.integers(2, 6),
        seed=st.integers(0, 999),
        form=st.sampled_from(transition.TRANSITION_FORMS),
        few=st.booleans(),
    )


def test_an_uncounted_background_may_be_the_largest():
    """A class that cannot win takes most of every bag."""
    rng = np.random.default_rng(0)
    counted, label = torch.tensor([True, True, True, False]), np.arange(300) % 3
    true = np.array([[0.2, 0.05, 0.05, 0.7], [0.05, 0.2, 0.05, 0.7], [0.05, 0.05, 0.2, 0.7]])
    y = np.concatenate([rng.choice(4, 30, p=true[c]) for c in label])
    x = rng.normal(size=(len(y), 4))
    x[np.arange(len(y)), y] += 3
    prior = torch.tensor([0.1, 0.1, 0.1, 0.7]).log()
    p = (torch.tensor(3 * x) + prior).softmax(1)
    estimate = transition.estimate_transition(p, Segments.from_sizes([30] * 300), torch.eye(4)[label], counted=counted)
    assert abs(estimate.mix[:3].numpy() - true).max() < 0.04
    assert estimate.label_prior[3] == 0


def test_unlabelled_single_instances_do_not_affect_the_bag_size():
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(64, t) for t in rng.dirichlet(np.full(10, 8.0), 100)])
    y = torch.from_numpy(np.concatenate([np.repeat(np.arange(10), row) for row in counts]))
    p, label = torch.eye(10)[y], torch.eye(10)[torch.from_numpy(counts.argmax(1))]
    alone = transition.estimate_transition(p, Segments.from_sizes([64] * 100), label)
    p, label = torch.cat([p, torch.full((2000, 10), 0.1)]), torch.cat([label, torch.zeros(2000, 10)])
    with_singles = transition.estimate_transition(p, Segments.from_sizes([64] * 100 + [1] * 2000), label)
    near(with_singles.mix, alone.mix, 1e-6)  # they once raised the share from 0.19 to 0.38, that of random bags of four


def test_random_bags_of_many_sizes_are_above_the_lower_bound():
    """With the mean size for all bags, the share of a perfect classifier was 0.173 instead of 0.138."""
    rng, sizes = np.random.default_rng(0), [1] * 900 + [500] * 100
    y = rng.integers(10, size=sum(sizes))
    bag = np.repeat(np.arange(1000), sizes)
    counts = np.zeros((1000, 10))
    np.add.at(counts, (bag, y), 1)
    label = torch.eye(10)[torch.from_numpy(counts.argmax(1))]
    estimate = transition.estimate_transition(torch.eye(10)[torch.from_numpy(y)], Segments.from_sizes(sizes), label, form="one")
    assert float(estimate.share[0]) == pytest.approx(counts.max(1).sum() / sum(sizes), abs=1e-4)
    assert transition.effective_bag_size(Segments.from_sizes([24] * 7), torch.eye(10)[:7]) == pytest.approx(24)


def test_weights_removal_and_unlabelled_bags():
    p, _, label, _, segments = world(1, 60, 12, 3)
    target = torch.eye(3)[label]
    plain = transition.estimate_transition(p, segments, target).mix
    weight = torch.arange(720) % 4
    rows = torch.arange(720).repeat_interleave(weight)
    twins = transition.estimate_transition(p[rows], Segments.from_sizes([18] * 60), target).mix
    near(transition.estimate_transition(p, segments.with_weight(weight.float()), target).mix, twins, 1e-5)
    assert abs(twins - plain).max() > 1e-3
    extended = torch.cat([p, torch.eye(3)[[0] * 24].double()])
    more = Segments.from_sizes([12] * 62)
    silent = transition.estimate_transition(extended, more, torch.cat([target, torch.zeros(2, 3)])).mix
    near(silent, plain, 1e-5)
    removed = torch.arange(720) % 12 == 5
    kept = transition.estimate_transition(p[~removed], Segments.from_sizes([11] * 60), target).mix
    outlying = torch.where(removed[:, None], torch.eye(3)[[0]].double(), p)
    near(transition.estimate_transition(outlying, segments.without(removed), target).mix, kept, 1e-5)


def test_invalid_input_is_refused_by_the_estimate():
    segments = Segments.from_sizes([2, 2])
    with pytest.raises(HeadcountError, match="no bag has a label"):
        transition.estimate_transition(torch.ones(4, 3) / 3, segments, torch.zeros(2, 3))
    with pytest.raises(HeadcountError, match=r"got shapes \(5, 3\) and \(2, 3\)"):
        transition.estimate_transition(torch.ones(5, 3) / 3, segments, torch.zeros(2, 3))
    with pytest.raises(HeadcountError, match="no form of the transition 'half'; there are one, class, full"):
        transition.m_step(torch.eye(3), torch.ones(3), "half")


@pytest.mark.parametrize("weight", [0.1, 1.0])
def test_weights_below_one_do_not_make_bags_smaller(weight):
    """Areas that add up to one in each bag: the same transition as without weights, not that of bags of one."""
    label = torch.arange(90) % 3
    y = (label[:, None] + torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 2, 2])) % 3
    p = torch.eye(3)[y.flatten()] * 0.97 + 0.01
    segments = Segments.from_sizes([10] * 90).with_weight(torch.full((900,), weight))
    assert transition.estimate_transition(p, segments, torch.eye(3)[label]).share.tolist() == pytest.approx([0.6] * 3, abs=0.02)

"""Heads, losses, MPEM and metrics against the slow loops of oracles.py, on random ragged bags.

At least 200 cases for each family; ``examine`` counts them. HEADCOUNT_CASES=20 tries twenty times as many.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

import oracles
from headcount.bags import Segments
from headcount.majority import metrics
from headcount.models.heads import Batch, build_head
from headcount.training.mpem import dissenters, distances, prototypes
from oracles import examine, ragged

TEMPERATURES = st.sampled_from([0.1, 0.1, 0.3, 1.0, 2.0])
FORMS = ("official", "nll", "tempered", "logit")
CASES = 200


def close(got, want, tolerance=1e-5):
    got = got.detach().numpy() if isinstance(got, torch.Tensor) else np.asarray(got, dtype=float)
    np.testing.assert_allclose(got, np.asarray(want, dtype=float), rtol=tolerance, atol=tolerance)


# -- the oracles themselves --------------------------------------------------------------------------------------------

Z, ONE, LABEL = [[2, 1, 0], [0.5, 0, 0.2], [0, 1, 0.9], [1, 0, 2]], [[0, 1, 2, 3]], [[1, 0, 0]]


def test_oracles_know_the_specifications_vectors():
    shares, _, p = oracles.counting_network(Z, ONE)
    close(shares[0], [0.486633, 0.184364, 0.329003], 2e-6)
    close(p[0], [0.796554, 0.038768, 0.164678], 2e-6)
    close(oracles.counting_loss(p, LABEL), 0.075820, 2e-6)
    close(oracles.counting_loss(p, LABEL, "paper"), 0.227461, 2e-6)
    close(oracles.counting_loss(oracles.counting_network(Z, ONE, 1.0)[2], LABEL), 0.269324, 2e-6)
    close(oracles.counting_loss(oracles.counting_network(Z, ONE, 1.0, 1.0)[2], LABEL), 0.352959, 2e-6)
    close(oracles.counting_loss(oracles.counting_network(Z, [[0, 1, 2]])[2], LABEL), 0.007298, 2e-6)
    _, counts, p = oracles.counting_network(Z, ONE, mode="count")
    close(counts[0], [1.946532, 0.737457, 1.316011], 2e-6)
    close(oracles.counting_loss(p, LABEL, "paper"), 0.001831, 1e-6)
    for form, want in {"official": 1.085251, "nll": 0.982264, "tempered": 0.352959}.items():
        close(oracles.output_mean_loss(oracles.output_mean(Z, ONE, form), LABEL, form), want, 2e-6)
    close(oracles.miou([[8, 2, 0], [1, 6, 3], [0, 0, 10]]), 0.665501, 1e-6)


# -- heads -------------------------------------------------------------------------------------------------------------


def election(bags, classes, width=None):
    """What a head is asked: features, its classifier, a target (hard, soft or missing), and which classes count."""
    rng = bags.rng(21)
    h = rng.normal(size=(bags.n, width)) if width else rng.normal(size=(bags.n, classes)) * rng.choice([0.3, 1, 4])
    weight = rng.normal(size=(classes, width)) if width else np.eye(classes)
    bias = rng.normal(size=classes) if width else np.zeros(classes)
    counted = None
    if classes > 2 and rng.random() < 0.3:
        counted = rng.random(classes) < 0.5
        counted[rng.permutation(classes)[:2]] = True
    able = np.ones(classes, dtype=bool) if counted is None else counted
    target = np.zeros((len(bags.sizes), classes))
    for i in range(len(target)):
        kind = rng.random()
        if kind < 0.5:
            target[i, rng.choice(np.flatnonzero(able))] = 1
        elif kind < 0.85:
            target[i, able] = rng.dirichlet(np.ones(able.sum()))
    return h, weight, bias, target, counted


def asked(name, options, bags, h, weight, bias, target, counted, grad=False):
    """Our answer: (output, loss, features with a gradient)."""
    mask = None if counted is None else torch.tensor(counted)
    head = build_head(name, h.shape[1], len(bias), options, mask).double()
    with torch.no_grad():
        head.classifier.weight.copy_(torch.tensor(weight))
        head.classifier.bias.copy_(torch.tensor(bias))
    x = torch.tensor(h, requires_grad=grad)
    s = Segments.from_sizes(bags.sizes).with_weight(torch.tensor(bags.weight)).without(torch.tensor(bags.removed))
    output = head(x, s)
    batch = Batch(s, torch.tensor(target), torch.arange(s.n_bags), torch.arange(len(h)))
    return output, head.loss(output, batch), x


def told(name, options, bags, h, weight, bias, target, counted):
    """The oracle's answer: (logits, shares, probabilities, loss)."""
    sits = oracles.seats(bags.index, len(bags.sizes), bags.removed, bags.weight)
    logits = oracles.linear(h.tolist(), weight.tolist(), bias.tolist())
    target = target.tolist()
    if name == "output_mean":
        form = options["form"]
        p = oracles.output_mean(logits, sits, form, counted)
        return logits, None, p, oracles.output_mean_loss(p, target, form)
    t1, t2, mode = options["t1"], options["t2"], options["mode"]
    shares, _, p = oracles.counting_network(logits, sits, t1, t2, mode, counted)
    return logits, shares, p, oracles.counting_loss(p, target, options["reduction"])


def compare(name, options, bags, case):
    output, loss, _ = asked(name, options, bags, *case)
    logits, shares, p, want = told(name, options, bags, *case)
    close(output.instance, logits)
    close(output.bag.exp(), p)
    close(loss, want)
    assert output.instance.argmax(1).tolist() == [oracles.majority(z) for z in np.float32(logits).tolist()]
    if shares is not None:
        close(output.parts["sums"] / output.parts["total"][:, None], shares)


def compare_slopes(name, options, bags, case):
    """The gradient against central differences of the loop."""
    h, rest = case[0], case[1:]
    _, loss, x = asked(name, options, bags, *case, grad=True)
    loss.backward()
    for at in np.ndindex(h.shape):
        up, down = h.copy(), h.copy()
        up[at] += 1e-5
        down[at] -= 1e-5
        rise = told(name, options, bags, up, *rest)[3] - told(name, options, bags, down, *rest)[3]
        close(x.grad[at], rise / 2e-5, 1e-4)


@pytest.mark.parametrize("reduction", ["official", "paper"])
@pytest.mark.parametrize("mode", ["proportion", "count"])
def test_counting_network(mode, reduction):
    def law(bags, classes, width, t1, t2):
        options = {"t1": t1, "t2": t2, "mode": mode, "reduction": reduction}
        compare("count", options, bags, election(bags, classes, width))

    width = st.sampled_from([None, 1, 5])
    examine(law, CASES, bags=ragged(), classes=st.integers(2, 5), width=width, t1=TEMPERATURES, t2=TEMPERATURES)


@pytest.mark.parametrize("form", FORMS)
def test_output_mean(form):
    def law(bags, classes, width):
        compare("output_mean", {"form": form}, bags, election(bags, classes, width))

    examine(law, CASES, bags=ragged(), classes=st.integers(2, 5), width=st.sampled_from([None, 1, 5]))


@pytest.mark.parametrize("reduction", ["official", "paper"])
@pytest.mark.parametrize("mode", ["proportion", "count"])
def test_counting_network_slopes(mode, reduction):
    def law(bags, classes, t1, t2):
        options = {"t1": t1, "t2": t2, "mode": mode, "reduction": reduction}
        compare_slopes("count", options, bags, election(bags, classes))

    warm = st.sampled_from([0.3, 1.0])
    examine(law, 20, bags=ragged(most=3), classes=st.integers(2, 3), t1=warm, t2=warm)


@pytest.mark.parametrize("form", FORMS)
def test_output_mean_slopes(form):
    def law(bags, classes):
        compare_slopes("output_mean", {"form": form}, bags, election(bags, classes))

    examine(law, 20, bags=ragged(most=3), classes=st.integers(2, 3))


# -- MPEM --------------------------------------------------------------------------------------------------------------


def poll(bags, classes, width=3):
    """Features, votes, labels (some missing) and what was said of the bags; most of them loyal."""
    rng, b = bags.rng(22), len(bags.sizes)
    label = np.where(rng.random(b) < 0.15, -1, rng.integers(0, classes, b))
    bag_said = np.where(rng.random(b) < 0.6, np.maximum(label, 0), rng.integers(0, classes, b))
    own = np.maximum(label, 0)[bags.index]
    said = np.where(rng.random(bags.n) < rng.choice([0.0, 0.4, 0.8]), own, rng.integers(0, classes, bags.n))
    h = rng.normal(size=(bags.n, width)) + said[:, None]
    return h, said, np.array(bags.index), label, bag_said


def measured(h, said, bag, label, bag_said, classes, which, metric):
    h, said, bag, label, bag_said = map(torch.tensor, (h, said, bag, label, bag_said))
    found = prototypes(h, said, bag, label, bag_said, classes, which, metric)
    return found, distances(h, bag, label, found)


def heard(distance):
    return [None if math.isnan(d) else d for d in distance.tolist()]


REMOVAL = st.one_of(st.sampled_from([round(0.1 * i, 1) for i in range(11)]), st.floats(0, 1))
MOST_MPEM = 9


@pytest.mark.parametrize("metric", ["euclidean", "mahalanobis"])
@pytest.mark.parametrize("which", ["correct", "all"])
def test_prototypes_and_distances(which, metric):
    def law(bags, classes, width):
        case = poll(bags, classes, width)
        found, got = measured(*case, classes, which, metric)
        h, said, bag, label, bag_said = (a.tolist() for a in case)
        want, centres = oracles.mpem_distances(h, said, bag, label, bag_said, classes, which, metric)
        for c, centre in enumerate(centres):
            members = oracles.loyal(said, bag, label, bag_said, c, which)
            assert bool(found.members[c]) == (centre is not None)
            if centre is not None:
                assert int(found.members[c]) == len(members)
                close(found.centre[c], centre)
        assert [d is None for d in want] == got.isnan().tolist()
        close([d for d in heard(got) if d is not None], [d for d in want if d is not None])

    examine(law, CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 4), width=st.integers(1, 4))


def test_dissenters():
    def law(bags, classes, removal):
        h, said, bag, label, bag_said = poll(bags, classes)
        _, distance = measured(h, said, bag, label, bag_said, classes, "all", "euclidean")
        want = oracles.mpem_removed(heard(distance), said.tolist(), bag.tolist(), label.tolist(), removal)
        got = dissenters(distance, *map(torch.tensor, (said, bag, label)), removal)
        assert got.tolist() == want

    examine(law, 2 * CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 4), removal=REMOVAL)


@pytest.mark.parametrize("metric", ["euclidean", "mahalanobis"])
@pytest.mark.parametrize("which", ["correct", "all"])
def test_mpem_from_end_to_end(which, metric):
    def law(bags, classes, removal):
        case = poll(bags, classes)
        h, said, bag, label, bag_said = (a.tolist() for a in case)
        distance, _ = oracles.mpem_distances(h, said, bag, label, bag_said, classes, which, metric)
        want = oracles.mpem_removed(distance, said, bag, label, removal)
        _, got = measured(*case, classes, which, metric)
        assert dissenters(got, *map(torch.tensor, (said, bag, label)), removal).tolist() == want

    examine(law, CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 3), removal=REMOVAL)


def test_a_bag_of_dissenters_keeps_its_nearest():
    def law(size, seed):
        distance = torch.from_numpy(np.random.default_rng(seed).permutation(size + 2).astype(float))
        said, bag = torch.ones(size + 2, dtype=torch.int64), torch.tensor([0] * size + [1, 1])
        gone = dissenters(distance, said, bag, torch.tensor([0, 1]), 1.0)
        assert (~gone[:size]).nonzero().flatten().tolist() == [int(distance[:size].argmin())]
        assert not gone[size:].any()

    examine(law, 50, size=st.integers(1, 12), seed=st.integers(0, 10**6))


def test_equal_distances_remove_the_right_number():
    def law(bags, classes, removal):
        _, said, bag, label, _ = poll(bags, classes)
        distance = torch.tensor(np.where(label[bag] >= 0, 1.0, np.nan))
        gone = dissenters(distance, *map(torch.tensor, (said, bag, label)), removal).numpy()
        assert not gone[(said == label[bag]) | (label[bag] < 0)].any()
        for i, size in enumerate(bags.sizes):
            many = int(((said != label[i]) & (bag == i)).sum()) if label[i] >= 0 else 0
            assert gone[bag == i].sum() == min(int(many * removal), size - 1)

    examine(law, CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 4), removal=REMOVAL)


def test_bags_need_not_lie_in_order():
    def law(bags, removal):
        h, said, bag, label, bag_said = poll(bags, 3)
        order = bags.rng(23).permutation(bags.n)
        plain, mixed = (
            dissenters(measured(*case, 3, "all", "euclidean")[1], *map(torch.tensor, case[1:4]), removal)
            for case in ((h, said, bag, label, bag_said), (h[order], said[order], bag[order], label, bag_said))
        )
        assert plain[order].tolist() == mixed.tolist()

    examine(law, 50, bags=ragged(most=MOST_MPEM), removal=REMOVAL)


def test_perfect_votes_are_removed_perfectly():
    """When every vote is true and the label is the majority: only minorities go, the label stays the majority."""

    def law(bags, removal):
        true, bag = bags.rng(24).integers(0, 3, bags.n), np.array(bags.index)
        label = metrics.count_votes(true, bag, len(bags.sizes), 3).argmax(1)
        h = bags.rng(25).normal(size=(bags.n, 2))
        _, distance = measured(h, true, bag, label, label, 3, "correct", "euclidean")
        gone = dissenters(distance, *map(torch.tensor, (true, bag, label)), removal).numpy()
        assert metrics.agreement_rate(true, label, bag, gone, 3) == 1
        assert metrics.purity(true, label, bag, gone) == 1 or not gone.any()
        before, after = (metrics.label_share(true, label, bag, kept) for kept in (None, ~gone))
        assert (after >= before).all()

    examine(law, 50, bags=ragged(most=MOST_MPEM), removal=REMOVAL)


@pytest.mark.parametrize("removal", [-0.1, 1.1, math.nan])
def test_removal_is_a_share(removal):
    with pytest.raises(ValueError, match="from 0 to 1"):
        dissenters(torch.ones(1), torch.ones(1).long(), torch.zeros(1).long(), torch.zeros(1).long(), removal)


# -- metrics -----------------------------------------------------------------------------------------------------------


def verdicts(bags, classes):
    """(true, said, label, bag_said, bag): the label is the true majority, the rest is right about half the time."""
    rng, b = bags.rng(31), len(bags.sizes)
    bag = np.array(bags.index)
    true = rng.integers(0, classes, bags.n)
    label = metrics.count_votes(true, bag, b, classes).argmax(1)
    said = np.where(rng.random(bags.n) < 0.5, true, rng.integers(0, classes, bags.n))
    bag_said = np.where(rng.random(b) < 0.5, label, rng.integers(0, classes, b))
    return true, said, label, bag_said, bag


def test_metrics_of_answers():
    def law(bags, classes):
        true, said, label, bag_said, bag = verdicts(bags, classes)
        sits = oracles.seats(bags.index, len(bags.sizes))
        assert label.tolist() == [oracles.majority(oracles.tally(true, sit, classes)) for sit in sits]
        assert metrics.count_votes(said, bag, len(label), classes).tolist() == [oracles.tally(said, s, classes) for s in sits]
        close(metrics.instance_accuracy(true, said), oracles.accuracy(true, said))
        close(metrics.bag_accuracy(label, bag_said), oracles.accuracy(label, bag_said))
        want = oracles.consistency_rate(label, bag_said, said, sits, classes)
        close(metrics.consistency_rate(label, bag_said, said, bag, classes), want)
        close(metrics.label_share(said, label, bag), oracles.share(said, label, sits))
        close(metrics.share_difference(true, said, label, bag), oracles.share_difference(true, said, label, sits))

    examine(law, CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 5))


def test_metrics_of_removal():
    def law(bags, classes):
        true, _, label, _, bag = verdicts(bags, classes)
        gone = np.array(bags.removed)
        kept = oracles.seats(bags.index, len(bags.sizes), bags.removed)
        close(metrics.purity(true, label, bag, gone), oracles.purity(true, label, bag, gone))
        close(metrics.agreement_rate(true, label, bag, gone, classes), oracles.agreement_rate(true, label, kept, classes))
        close(metrics.label_share(true, label, bag, ~gone), oracles.share(true, label, kept))

    examine(law, CASES, bags=ragged(most=MOST_MPEM), classes=st.integers(2, 5))


def test_confusion_and_miou():
    def law(bags, classes, balanced, unknown):
        true, said, *_ = verdicts(bags, classes)
        true = np.where(bags.rng(32).random(bags.n) < unknown, -1, true)
        counts = metrics.confusion_matrix(true, said, classes)
        assert counts.tolist() == oracles.confusion(true, said, classes)
        close(metrics.mean_iou(counts, balanced), oracles.miou(counts.tolist(), balanced))
        close(metrics.instance_accuracy(true, said), oracles.accuracy(true, said))

    unknown = st.sampled_from([0.0, 0.5, 1.0])
    examine(law, CASES, bags=ragged(), classes=st.integers(2, 5), balanced=st.booleans(), unknown=unknown)


def test_a_rate_over_nothing_is_nan():
    one = np.zeros(1, dtype=int)
    assert math.isnan(metrics.consistency_rate(one, one + 1, one, one, 2))
    assert math.isnan(metrics.purity(one, one, one, one > 0))
    assert math.isnan(metrics.instance_accuracy(one - 1, one))


def test_random_control_removes_as_many():
    def law(bags):
        gone, bag = np.array(bags.removed), np.array(bags.index)
        control = metrics.random_removal(bag, gone, bags.rng(33))
        assert np.bincount(bag, control).tolist() == np.bincount(bag, gone).tolist()

    examine(law, CASES, bags=ragged(most=MOST_MPEM, spare=False))


def test_random_control_is_fair():
    """Everybody in the bag is as likely to go, whoever went at first."""
    bag, gone = np.repeat([0, 1], [4, 6]), np.array([True, False, False, False] + [True, True] + [False] * 4)
    rng = np.random.default_rng(0)
    often = sum(metrics.random_removal(bag, gone, rng).astype(int) for _ in range(3000)) / 3000
    np.testing.assert_allclose(often, [1 / 4] * 4 + [1 / 3] * 6, atol=0.04)


UNKNOWN = {
    "agreement, first bag": lambda t, label, bag, gone: metrics.agreement_rate(t[::-1], label[::-1], bag, gone, 3),
    "agreement": lambda t, label, bag, gone: metrics.agreement_rate(t, label, bag, gone, 3),
    "purity": lambda t, label, bag, gone: 1 - metrics.purity(t, label, bag, np.isin(np.arange(8), [0, 4])),
    "share": lambda t, label, bag, gone: float(metrics.label_share(t, label, bag).min()),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_unknown_truth_is_left_out(what):
    """Bag 0 is two of class 2 and two of class 1 (a tie: 1); bag 1 one of class 1 and four unknown."""
    true, label = np.array([1, 2, 1, 2, -1, -1, -1, 1]), np.array([1, 1])
    bag, gone = np.repeat([0, 1], 4), np.zeros(8, dtype=bool)
    want = 0.5 if what == "share" else 1.0
    assert UNKNOWN[what](true, label, bag, gone) == want


def test_unlabelled_bags_are_left_out_of_agreement():
    true, bag = np.array([0, 0, 1, 1]), np.array([0, 0, 1, 1])
    assert metrics.agreement_rate(true, np.array([0, -1]), bag, true < 0, 2) == 1

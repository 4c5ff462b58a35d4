"""The likelihood of vote counts against brute-force enumeration and hand calculation, and what bags, heads and EM make of counts."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import RandomForestClassifier
from torch._subclasses.fake_tensor import FakeTensorMode

from headcount import MajorityClassifier
from headcount.bags import Bags, Pool, Segments
from headcount.bags.bags import fingerprint
from headcount.bags.splits import split_large_bags
from headcount.errors import HeadcountError
from headcount.majority import vote_counts, vote_likelihood
from headcount.majority.vote_counts import count_log_likelihood, expected_class_counts, posterior_given_votes
from headcount.models.heads import Batch, build_head
from headcount.training.em import em

F64 = torch.float64


def logits(*rows):
    return torch.tensor(rows, dtype=F64).log()


def enumerate_votes(z, votes):
    """log P(votes): the sum over all ways to assign a class to each instance."""
    p, total = z.softmax(1), torch.zeros((), dtype=z.dtype)
    for classes in itertools.product(range(z.shape[1]), repeat=len(z)):
        if np.bincount(classes, minlength=z.shape[1]).tolist() == [int(v) for v in votes]:
            total = total + torch.stack([p[i, k] for i, k in enumerate(classes)]).prod()
    return total.log()


def random_case(sizes, classes, seed=0, spread=1.5):
    rng = torch.Generator().manual_seed(seed)
    segments = Segments.from_sizes(sizes)
    z = (torch.randn(sum(sizes), classes, generator=rng, dtype=F64) * spread).requires_grad_()
    votes = segments.sum(torch.nn.functional.one_hot(torch.randint(classes, (sum(sizes),), generator=rng), classes).double())
    return segments, z, votes


def test_by_hand():
    one, two = Segments.from_sizes([2]), logits([0.5, 0.3, 0.2], [0.2, 0.5, 0.3])
    p = lambda *votes: float(count_log_likelihood(two, one, torch.tensor([votes])).exp())  # noqa: E731
    assert p(1, 1, 0) == pytest.approx(0.5 * 0.5 + 0.3 * 0.2)
    assert p(0, 2, 0) == pytest.approx(0.3 * 0.5)
    assert p(0, 1, 0) == pytest.approx(0.4)  # one of the two voted: the mean of p
    assert p(0, 0, 0) == 1  # no counts
    binary = logits([0.3, 0.7], [0.6, 0.4], [0.9, 0.1])
    got = count_log_likelihood(binary, Segments.from_sizes([3]), torch.tensor([[2, 1]])).exp()
    assert float(got) == pytest.approx(0.3 * 0.6 * 0.1 + 0.3 * 0.4 * 0.9 + 0.7 * 0.6 * 0.9)


@pytest.mark.parametrize(("sizes", "classes"), [([4, 4, 4], 3), ([1, 5, 3], 3), ([7, 2], 2), ([3, 5], 4)])
def test_small_bags_are_exact_with_their_gradient(sizes, classes):
    segments, z, votes = random_case(sizes, classes)
    got = count_log_likelihood(z, segments, votes)
    want = torch.stack([enumerate_votes(part, v) for part, v in zip(z.split(sizes), votes, strict=True)])
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), z)[0], torch.autograd.grad(want.sum(), z)[0])


def test_weights_are_repeated_votes():
    segments, z, _ = random_case([2, 3], 3)
    weighted = segments.with_weight(torch.tensor([2.0, 1, 1, 3, 0]))
    votes = torch.tensor([[1, 2, 0], [2, 1, 1]])
    repeated = z[[0, 0, 1, 2, 3, 3, 3]]
    want = count_log_likelihood(repeated, Segments.from_sizes([3, 4]), votes)
    torch.testing.assert_close(count_log_likelihood(z, weighted, votes), want)
    same_size = Segments.from_sizes([2]).with_weight(torch.tensor([2.0, 1]))
    torch.testing.assert_close(count_log_likelihood(z[:2], same_size, votes[:1]), want[:1])


@pytest.mark.parametrize("form", ["binomial", "saddlepoint"])
def test_larger_bags_are_close_to_exact(form, monkeypatch):
    """Seven votes for three classes, which are enumerated by default, by the forms for larger bags."""
    monkeypatch.setattr(vote_counts, "MAX_AUTO_OUTCOMES", 8)
    monkeypatch.setattr(vote_counts, "MAX_COUNTED_VOTES", 128 if form == "binomial" else 1)
    segments, z, votes = random_case([7] * 4, 3, seed=1, spread=1.0)
    got = count_log_likelihood(z, segments, votes)
    want = torch.stack([enumerate_votes(part, v) for part, v in zip(z.split(7), votes, strict=True)])
    slope, exact = torch.autograd.grad(got.sum(), z)[0], torch.autograd.grad(want.sum(), z)[0]
    assert float((got - want).detach().abs().mean()) < 0.35
    assert torch.nn.functional.cosine_similarity(slope.flatten(), exact.flatten(), dim=0) > 0.97


def test_equal_instances_of_a_large_bag_are_a_multinomial():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=F64)
    votes = torch.tensor([[150.0, 90, 60], [0, 200, 100], [300, 0, 0]], dtype=F64)
    z = p.log().expand(900, 3)
    want = torch.lgamma(torch.tensor(301.0).double()) - torch.lgamma(votes + 1).sum(1) + (votes * p.log()).sum(1)
    torch.testing.assert_close(count_log_likelihood(z, Segments.from_sizes([300] * 3), votes), want, atol=1e-6, rtol=0)


def test_gradient_of_large_bags_is_that_of_cross_entropy_with_the_matched_posterior():
    segments, z, votes = random_case([140, 200], 4, spread=2.0)
    slope = torch.autograd.grad(count_log_likelihood(z, segments, votes).sum(), z)[0]
    q = posterior_given_votes(z.detach().softmax(1), segments, votes)
    torch.testing.assert_close(slope, q - z.detach().softmax(1), atol=1e-6, rtol=0)
    torch.testing.assert_close(segments.sum(q), votes, atol=0.1, rtol=0)


def test_bags_without_counts_have_no_gradient():
    segments, z, votes = random_case([4, 200, 3, 5], 3)
    votes = votes * torch.tensor([1, 1, 0, 0])[:, None]
    segments = segments.without(torch.arange(212) > 206)  # the last bag is empty
    slope = torch.autograd.grad(count_log_likelihood(z, segments, votes).sum(), z)[0]
    assert slope.isfinite().all()
    assert slope[:204].abs().amin(0).max() > 0
    assert slope[204:].abs().max() == 0
    q = posterior_given_votes(z.detach().softmax(1), segments, votes)
    assert q.isfinite().all()
    assert q[204:].abs().max() == 0


def test_expected_class_counts():
    predicted = torch.tensor([[2.0, 2, 0]] * 5)
    votes = torch.tensor([[1.0, 3, 0], [1, 0, 0], [10, 30, 0], [0, 0, 0], [1, 1, 0]])
    got = expected_class_counts(votes, predicted)
    assert got[0].tolist() == [1, 3, 0]
    torch.testing.assert_close(got[1], torch.tensor([1 + 3 * 1.5 / 2, 3 * 0.5 / 2, 0]))
    assert got[2].tolist() == [1, 3, 0]
    assert got[3].tolist() == [0, 0, 0]
    assert got.sum(1).tolist() == pytest.approx([4, 4, 4, 0, 4])
    counted = torch.tensor([True, True, False])
    background = expected_class_counts(votes[:1], torch.tensor([[1.0, 1, 2]]), counted)
    torch.testing.assert_close(background, torch.tensor([[0.5, 1.5, 2]]))


# -- heads ----------------------------------------------------------------------------------------------------------------

Z = torch.tensor([[2.0, 1, 0], [0.5, 0, 0.2], [0, 1, 0.9], [1, 0, 2]])  # of tests/majority/test_vectors.py


def head_loss(name, votes, target, options=None, z=Z, sizes=(4,)):
    head = build_head(name, 3, 3, options or {})
    with torch.no_grad():
        head.classifier.weight.copy_(torch.eye(3))
        head.classifier.bias.zero_()
    segments = Segments.from_sizes(list(sizes))
    batch = Batch(segments, target, torch.arange(len(sizes)), torch.arange(len(z)), votes=votes)
    return head.loss(head(z, segments), batch).item()


def test_label_proportions_by_hand():
    """The mean of p is (0.374462, 0.258288, 0.367250)."""
    target, votes = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[2.0, 1, 1]])
    want = -(0.5 * math.log(0.374462) + 0.25 * math.log(0.258288) + 0.25 * math.log(0.367250))
    assert want == pytest.approx(1.079981, abs=1e-6)
    assert head_loss("proportion", None, target) == pytest.approx(want, abs=2e-6)
    assert head_loss("proportion", votes, target, {"likelihood": "proportion"}) == pytest.approx(want, abs=2e-6)
    exact = -float(enumerate_votes(Z.double(), [2, 1, 1])) / 4
    assert head_loss("proportion", votes, target) == pytest.approx(exact, rel=1e-5)
    assert head_loss("election", votes, target) == pytest.approx(4 * exact, rel=1e-5)


@pytest.mark.parametrize(("name", "options"), [("election", {}), ("proportion", {})])
def test_counts_and_labels_in_one_batch(name, options):
    target, votes = torch.tensor([[0.5, 0.25, 0.25], [0, 1, 0]]), torch.tensor([[2.0, 1, 1], [0, 0, 0]])
    both = head_loss(name, votes, target, options, torch.cat([Z, Z]), (4, 4))
    apart = head_loss(name, votes[:1], target[:1], options), head_loss(name, None, target[1:], options)
    assert both == pytest.approx(sum(apart) / 2, rel=1e-5)


def tilt_loss(votes, target, over="bags", counted=None, z=Z, sizes=(4,)):
    head = build_head("tilt", 3, 3, {"teach": 0, "over": over}, counted)
    segments = Segments.from_sizes(list(sizes))
    head.setup(segments, target)
    with torch.no_grad():
        head.classifier.weight.copy_(torch.eye(3))
        head.classifier.bias.zero_()
    if over == "instances":
        bag = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        segments, target, votes = Segments(torch.arange(len(z)), len(z), 1), target[bag], votes[bag]
    batch = Batch(segments, target, torch.arange(len(target)), torch.arange(len(z)), over=over, votes=votes)
    return head, batch, z.clone().requires_grad_()


@pytest.mark.parametrize("over", ["bags", "instances"])
def test_tilt_uses_the_shares_of_the_bag(over):
    """-log sum_k p_k r_k, r the shares with one more vote over the frequencies of the labels; and of whole bags the counts."""
    votes, target = torch.tensor([[2.0, 1, 1], [0, 3, 1]]), torch.tensor([[0.5, 0.25, 0.25], [0, 0.75, 0.25]])
    head, batch, z = tilt_loss(votes, target, over, z=torch.cat([Z, Z]), sizes=(4, 4))
    loss = head.loss(head(z, batch.segments), batch)
    prior = np.array([0.25, 0.5, 0.25]) + 1e-3 / 3
    prior = torch.from_numpy(prior / prior.sum())
    p, terms = torch.cat([Z, Z]).double().softmax(1), []
    for i in range(8):
        ratio = (votes[i // 4] + prior) / 5 / prior
        terms.append(-math.log(float((p[i] * ratio).sum())))
    want = np.mean(terms)
    if over == "bags":
        exact = [enumerate_votes(p[:4].log(), votes[0]), enumerate_votes(p[:4].log(), votes[1])]
        want += float(head.bag_weight()) * -float(sum(exact)) / 8
    assert loss.item() == pytest.approx(want, rel=1e-4)


def test_tilt_learns_nothing_of_uncounted_classes_from_votes():
    """The votes of two classes do not say how much background there is: its logit has the gradient that the label gives it."""
    votes, target, counted = torch.tensor([[2.0, 1, 0]]), torch.tensor([[2 / 3, 1 / 3, 0]]), torch.tensor([True, True, False])
    slopes = []
    for known in (votes, torch.zeros(1, 3)):
        head, batch, z = tilt_loss(known, target, counted=counted)
        head.bag = 0.0
        head.loss(head(z, batch.segments), batch).backward()
        slopes.append(z.grad[:, 2])
    assert float((slopes[0] - slopes[1]).abs().max()) < 0.02
    assert float(slopes[0].abs().max()) < 0.1


@pytest.mark.parametrize("name", ["tilt", "election", "proportion"])
@pytest.mark.parametrize("extras", ["plain", "weighted", "counted"])
def test_a_step_reads_nothing_from_the_device(name, extras, monkeypatch):
    """As for labels: bags of one size can be captured as a graph."""
    monkeypatch.setattr(vote_likelihood, "_enumerate_outcomes", vote_likelihood._enumerate_outcomes.__wrapped__)
    with FakeTensorMode():
        counted = torch.tensor([True, False, True, True]) if extras == "counted" else None
        head = build_head(name, 5, 4, {}, counted)
        segments = Segments(torch.arange(21) // 7, 3, 7).with_weight(torch.rand(21) if extras == "weighted" else None)
        target, bag, position = torch.rand(3, 4), torch.arange(3), torch.arange(21)
        batch = Batch(segments, target, bag, position, epoch=torch.zeros((), dtype=torch.int64), votes=7 * target)
        head.train().loss(head(torch.randn(21, 5), segments), batch).backward()
        head.eval().loss(head(torch.randn(21, 5), segments), batch)


# -- bags -----------------------------------------------------------------------------------------------------------------


def make_bags(counts=True, seed=0, n=40, size=8, noise=0.7):
    """Three classes in the plane; the shares of each bag differ."""
    rng = np.random.default_rng(seed)
    share = rng.dirichlet([1.0] * 3, n)
    truth = np.stack([rng.choice(3, size, p=s) for s in share])
    x = np.eye(3)[truth.ravel()] @ np.array([[0, 0], [2, 0], [0, 2]]) + noise * rng.normal(size=(n * size, 2))
    votes = np.stack([np.bincount(row, minlength=3) for row in truth])
    extra = {"votes": votes} if counts else {}
    pool = Pool(x.astype(np.float32))
    return Bags.of(pool, sizes=[size] * n, labels=votes, classes=3, truth=truth.ravel(), **extra)


def test_bags_carry_votes():
    bags = make_bags(n=4)
    assert bags.take([2, 0]).votes.tolist() == bags.votes[[2, 0]].tolist()
    assert bags.blind().votes is bags.votes
    assert split_large_bags(bags, 4).votes.shape == (8, 3)
    assert fingerprint(bags) != fingerprint(replace(bags, votes=None))
    assert bags.target.sum(1).tolist() == pytest.approx([1] * 4)
    with pytest.raises(HeadcountError, match=r"votes of bag 1 are \[0.5, .*whole numbers"):
        Bags.of(bags.pool, sizes=[16, 16], labels=[0, 1], classes=3, votes=[[1, 0, 0], [0.5, 1, 0]])
    with pytest.raises(HeadcountError, match=r"votes of bag 1 .*that have a label"):
        Bags.of(bags.pool, sizes=[16, 16], labels=[0, -1], classes=3, votes=[[1, 0, 0], [1, 1, 0]])
    with pytest.raises(HeadcountError, match=r"one count per bag and class \(2, 3\)"):
        Bags.of(bags.pool, sizes=[16, 16], labels=[0, 1], classes=3, votes=[[1, 0], [1, 1]])


def test_em_uses_counts():
    """The classes of bags are known by number: instances are told apart better than by shares as soft labels."""
    test = make_bags(seed=9, n=60)
    forest = RandomForestClassifier(30, min_samples_leaf=3)

    def accuracy(counts):
        train, valid = (make_bags(counts, seed).blind() for seed in (0, 1))
        fitted = em(forest, train, valid, rounds=4).classifier
        return float((fitted.predict(test.pool.data.numpy()) == test.truth.numpy()).mean())

    assert accuracy(counts=True) > accuracy(counts=False) + 0.01


@pytest.mark.parametrize(("factor", "counts"), [(1, True), (0.5, False)])
def test_the_estimator_takes_whole_votes_as_counts(factor, counts, monkeypatch):
    bags, made = make_bags(n=12), []
    of = Bags.of.__func__
    monkeypatch.setattr(Bags, "of", classmethod(lambda cls, *args, **how: made.append(of(cls, *args, **how)) or made[-1]))
    model = MajorityClassifier("logistic").fit(bags.pool.data.numpy().reshape(12, 8, 2), factor * bags.votes.numpy())
    assert (made[0].votes is not None) == counts
    assert model.classes_.tolist() == [0, 1, 2]

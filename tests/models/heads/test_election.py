"""The election against its definition: all outcomes of a small vote, drawn votes of a large one.

The bounds on the errors were measured (benchmarks/election.py, docs/explanation/election.md) and rounded up.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from headcount.bags import Segments
from headcount.datasets import share_sampler
from headcount.errors import HeadcountError
from headcount.majority import vote_likelihood
from headcount.majority.ragged_votes import ELECTION_FORMS, MAX_COUNTED_VOTES, choose_form, election_log_probs
from headcount.models.heads.base import Batch
from headcount.models.heads.count import Election
from oracles import examine, ragged

APPROXIMATE = ("independent", "conditioned", "normal")
VOTERS = {"vague": (0.8, 0.5), "unsure": (2.5, 1.0), "confident": (6.0, 1.5)}  # logit of the own class, noise on all


def all_outcomes(p, counted=None):
    """P(each class has the most votes), ties shared, from every one of the C^n ways to vote."""
    n, classes = len(p), len(p[0])
    able = [k for k in range(classes) if counted is None or counted[k]]
    won = [0.0] * classes
    for ways in itertools.product(range(classes), repeat=n):
        chance = math.prod(p[i][k] for i, k in enumerate(ways))
        most = max(ways.count(k) for k in able)
        winners = [k for k in able if ways.count(k) == most]
        for k in winners:
            won[k] += chance / len(winners)
    return won


def drawn(p, draws, rng):
    """The same from drawn votes."""
    counts = np.zeros((draws, p.shape[1]), np.int16)
    flat, row = counts.reshape(-1), np.arange(0, counts.size, p.shape[1])
    for cdf in p.cumsum(1).astype(np.float32):
        flat[row + np.searchsorted(cdf[:-1], rng.random(draws, np.float32), side="right")] += 1
    top = counts == counts.max(1, keepdims=True)
    return (top / top.sum(1, keepdims=True)).mean(0)


def bag(share, n, voters, rng):
    strength, noise = VOTERS[voters]
    z = rng.normal(size=(n, len(share))) * noise
    z[np.arange(n), rng.choice(len(share), n, p=share)] += strength
    return torch.from_numpy(z)


def log_p(z, form, sizes=None, counted=None):
    """(B, C) log-probabilities, as the head makes them."""
    segments = sizes if isinstance(sizes, Segments) else Segments.from_sizes([len(z)] if sizes is None else sizes)
    able = election_log_probs(z, segments, form, counted)
    return (able if counted is None else able.masked_fill(~counted, -torch.inf)).log_softmax(1)


def said(z, form, sizes=None, counted=None):
    return log_p(z, form, sizes, counted).exp().numpy()


def random_logits(seed, n, classes, scale=1.5):
    return torch.randn(n, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.double) * scale


# -- exact -------------------------------------------------------------------------------------------------------------


def test_exact_is_the_sum_over_all_outcomes():
    def law(n, classes, seed, scale, drop):
        z = random_logits(seed, n, classes, scale)
        counted = torch.ones(classes, dtype=torch.bool)
        counted[classes - 1] = not drop
        want = all_outcomes(z.softmax(1).tolist(), counted.tolist())
        np.testing.assert_allclose(said(z, "exact", counted=counted)[0], want, rtol=1e-9, atol=1e-12)

    examine(
        law, 60, n=st.integers(1, 5), classes=st.integers(2, 4), seed=st.integers(0, 2**31),
        scale=st.sampled_from([0.3, 1.5, 8.0]), drop=st.booleans(),
    )  # fmt: skip


def test_one_voter_decides():
    z = random_logits(0, 1, 10)
    np.testing.assert_allclose(said(z, "auto"), z.softmax(1).numpy(), rtol=1e-9)


def test_two_classes_are_exact():
    def law(n, seed, scale):
        z = random_logits(seed, n, 2, scale)
        np.testing.assert_allclose(said(z, "conditioned")[0], all_outcomes(z.softmax(1).tolist()), rtol=1e-9, atol=1e-12)

    examine(law, 30, n=st.integers(1, 9), seed=st.integers(0, 2**31), scale=st.sampled_from([0.3, 3.0]))


def test_laws_of_the_counts():
    """One vote after the other, as the definition of the Poisson-binomial has it; and its far tail."""
    p = random_logits(1, 37, 3, 4.0).softmax(1)
    law = vote_likelihood.count_log_pmfs(p.log()[None], (-p).log1p()[None])[0].exp().numpy()
    for k in range(3):
        want = np.array([1.0])
        for chance in p[:, k].tolist():
            want = np.convolve(want, [1 - chance, chance])
        np.testing.assert_allclose(law[k], want, rtol=1e-9)
    sure = torch.full((1, 64, 1), -50.0, dtype=torch.double)
    tail = vote_likelihood.count_log_pmfs(sure, (-sure.exp()).log1p())[0, 0]
    assert tail[64] == pytest.approx(-3200)
    assert tail[1] == pytest.approx(math.log(64) - 50)


@pytest.mark.parametrize("scale", [0.3, 4.0, 60.0])
def test_laws_one_by_one_and_two_by_two(scale):
    """A processor's way and a card's: the same laws and the same slopes, in the far tails and beside empty places too."""
    log_p, log_q = (t.unflatten(0, (4, 19)) for t in vote_likelihood.log_p_and_complement(random_logits(3, 76, 5, scale)))
    empty = torch.arange(19) >= torch.tensor([19, 12, 1, 0])[:, None]
    log_p, log_q = log_p.masked_fill(empty[..., None], vote_likelihood.LOG_ZERO), log_q.masked_fill(empty[..., None], 0)
    found = []
    for way in (vote_likelihood.count_pmf_sequential, vote_likelihood.count_pmf_tree):
        p, q = log_p.clone().requires_grad_(), log_q.clone().requires_grad_()
        law = way(p, q)
        possible = torch.arange(20) <= (~empty).sum(1)[:, None, None]
        assert (law.masked_fill(possible, vote_likelihood.LOG_ZERO) < vote_likelihood.LOG_ZERO / 2).all()
        law = law.masked_fill(~possible, 0)
        (law * torch.linspace(-1, 2, law.numel()).view_as(law)).sum().backward()
        found.append([law.detach(), p.grad, q.grad])
    for here, there in zip(*found, strict=True):
        torch.testing.assert_close(here, there, rtol=1e-10, atol=1e-10)


# -- how far the approximations are from it ----------------------------------------------------------------------------

SMALL = {  # classes, votes -> the largest error of independent, conditioned, normal over 30 bags
    (2, 9): (0.08, 1e-9, 0.075),
    (3, 8): (0.09, 0.015, 0.075),
    (4, 9): (0.08, 0.04, 0.085),
    (5, 6): (0.075, 0.04, 0.07),
    (10, 4): (0.06, 0.03, 0.065),
}


@pytest.mark.parametrize("shape", SMALL)
def test_error_on_small_bags(shape):
    classes, n = shape
    rng = np.random.default_rng(classes)
    bags = [bag(rng.dirichlet(np.ones(classes)), n, v, rng) for v in VOTERS for _ in range(10)]
    exact = said(torch.cat(bags), "exact", [n] * len(bags))
    for form, bound in zip(APPROXIMATE, SMALL[shape], strict=True):
        assert np.abs(said(torch.cat(bags), form, [n] * len(bags)) - exact).max() < bound, form


@pytest.mark.parametrize("voters", VOTERS)
@pytest.mark.parametrize("scenario", ["small", "various", "large"])
def test_error_on_64_votes_for_10_classes(scenario, voters):
    """Against 200,000 elections, which are themselves off by up to 0.003."""
    rng = np.random.default_rng([len(scenario), len(voters)])
    share = min(share_sampler.sample_shares(scenario, 10, 10, rng), key=max)  # the closest race of ten
    z = bag(share, 64, voters, rng)
    want = drawn(z.softmax(1).numpy(), 200_000, rng)
    for form, bound in (("independent", 0.045), ("conditioned", 0.01), ("normal", 0.012)):
        assert np.abs(said(z, form)[0] - want).max() < bound, form


def test_error_on_large_bags():
    rng = np.random.default_rng(2)
    for voters in VOTERS:
        z = bag(np.full(10, 0.1), 200, voters, rng)
        assert choose_form("auto", 200, 10) == "normal"
        assert np.abs(said(z, "auto")[0] - drawn(z.softmax(1).numpy(), 60_000, rng)).max() < 0.01


def test_error_beside_a_class_that_cannot_win():
    rng = np.random.default_rng(3)
    counted = torch.tensor([True, True, False, True, True])
    bags = torch.cat([bag(np.array([0.2, 0.1, 0.5, 0.1, 0.1]), 6, v, rng) for v in VOTERS for _ in range(8)])
    exact = said(bags, "exact", [6] * 24, counted)
    assert not exact[:, 2].any()
    for form, bound in (("independent", 0.05), ("conditioned", 0.04), ("normal", 0.06)):
        assert np.abs(said(bags, form, [6] * 24, counted) - exact).max() < bound, form


# -- laws --------------------------------------------------------------------------------------------------------------

ALL = ("exact", *APPROXIMATE)


@pytest.mark.parametrize("form", ALL)
def test_symmetries(form):
    """Probabilities add up to one; neither the names of the classes nor the order of the voters matter."""

    def law(bags, classes, scale):
        z = random_logits(bags.seed, bags.n, classes, scale)
        p = said(z, form, bags.sizes)
        np.testing.assert_allclose(p.sum(1), 1)
        names = torch.from_numpy(bags.rng(1).permutation(classes))
        np.testing.assert_allclose(said(z[:, names], form, bags.sizes), p[:, names], atol=1e-9)
        order = torch.from_numpy(bags.rng(2).permutation(bags.n))
        index = torch.tensor(bags.index)[order]
        np.testing.assert_allclose(said(z[order], form, Segments(index, len(bags.sizes))), p, atol=1e-9)

    examine(law, 15, bags=ragged(), classes=st.integers(2, 5), scale=st.sampled_from([0.5, 5.0]))


@pytest.mark.parametrize("form", ALL)
def test_ties_are_shared(form):
    z = torch.zeros(4, 4, dtype=torch.double)
    z[[0, 1, 2, 3], [0, 0, 2, 2]] = 60.0  # two votes each, for certain
    np.testing.assert_allclose(said(z, form), [[0.5, 0, 0.5, 0]], atol=1e-6)
    np.testing.assert_allclose(said(z[[0, 2]], form, [2]), [[0.5, 0, 0.5, 0]], atol=2e-2)
    np.testing.assert_allclose(said(torch.zeros(5, 4), form), np.full((1, 4), 0.25), atol=1e-9)


@pytest.mark.parametrize("form", ALL)
def test_gradients(form):
    for sizes, classes in (([4], 3), ([3, 2], 4)):
        z = random_logits(4, sum(sizes), classes).requires_grad_()
        segments = Segments.from_sizes(sizes)
        assert torch.autograd.gradcheck(lambda z, s=segments: log_p(z, form, s), z)
        counted = torch.arange(classes) != 1
        assert torch.autograd.gradcheck(lambda z, s=segments, k=counted: log_p(z, form, s, k)[:, ::2], z)


def test_slopes_of_slopes_are_refused():
    """They would be wrong without a word."""
    log_p = torch.randn(1, 3, 2, dtype=torch.float64).log_softmax(2).requires_grad_()
    law = vote_likelihood.count_pmf_sequential(log_p, torch.log1p(-log_p.exp()))
    with pytest.raises(HeadcountError, match="no second derivatives, and create_graph=True asks for them; leave it out"):
        torch.autograd.grad(law[..., 2].sum(), log_p, create_graph=True)


@pytest.mark.parametrize("gap", [6.0, 40.0, 1e4])
@pytest.mark.parametrize("form", ["exact", "independent", "conditioned"])
def test_a_hopeless_class_is_told_what_would_help(form, gap):
    """Everybody speaks against it, and still each voter's slope lifts it, and lowers the one who wins."""
    n = 6 if form == "exact" else 64
    z = torch.zeros(n, 5)
    z[:, 0] = gap
    z.requires_grad_()
    lost = log_p(z, form)[0, 3]
    assert -2 * n * gap < lost < -n * gap / 3
    (slope,) = torch.autograd.grad(lost, z)
    assert slope.isfinite().all()
    assert (slope[:, 3] > 0.1).all()
    assert (slope[:, 0] < -0.1).all()


def test_a_hopeless_class_of_a_large_bag():
    z = torch.zeros(500, 5)
    z[:, 0] = 8.0
    z.requires_grad_()
    (slope,) = torch.autograd.grad(log_p(z, "normal")[0, 3], z)
    assert slope.isfinite().all()
    assert (slope[:, 3] > 0).all()
    assert (slope[:, 0] < 0).all()


# -- bags --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ELECTION_FORMS)
def test_removal_and_weights(form):
    """Removed is forgotten, twice is two; and bags of one size are answered as if they were not."""

    def law(bags, even):
        z, gone, weight = random_logits(bags.seed, bags.n, 4), torch.tensor(bags.removed), torch.tensor(bags.weight)
        whole = Segments.from_sizes(bags.sizes)
        whole = whole if even else Segments(whole.index, whole.n_bags)
        left = np.bincount(bags.index, ~gone.numpy()).astype(int)
        np.testing.assert_allclose(said(z, form, whole.without(gone)), said(z[~gone], form, left), atol=1e-9)
        twins = z.repeat_interleave(weight, 0)
        many = np.bincount(bags.index, weight.numpy()).astype(int)
        np.testing.assert_allclose(said(z, form, whole.with_weight(weight.float())), said(twins, form, many), atol=1e-9)

    examine(law, 12, bags=ragged(most=6), even=st.booleans())


def test_weights_beyond_the_sheet_and_fractions():
    z = random_logits(5, 6, 4)
    for weight in (torch.full((6,), 0.5), torch.tensor([400.0, 2, 3, 4, 5, 6])):
        for segments in (Segments.from_sizes([6]), Segments(torch.zeros(6, dtype=torch.int64), 1)):
            got = said(z, "conditioned", segments.with_weight(weight))
            np.testing.assert_allclose(got, said(z, "normal", segments.with_weight(weight)))


def test_a_bag_is_the_same_in_any_company():
    z = random_logits(6, 1 + 3 + 40 + 200, 4)
    sizes = [1, 3, 40, 200]
    assert {choose_form("auto", n, 4) for n in sizes} == {"exact", "conditioned", "normal"}
    together = said(z, "auto", sizes)
    for b, alone in enumerate(z.split(sizes)):
        np.testing.assert_allclose(together[b], said(alone, "auto")[0], atol=1e-9)


@pytest.mark.parametrize("form", ALL)
def test_an_emptied_bag_is_a_tie(form):
    z = random_logits(7, 4, 3)
    for segments in (Segments.from_sizes([2, 2]), Segments.from_sizes([3, 1]), Segments(torch.zeros(4).long(), 1)):
        empty = segments.without(segments.index == segments.n_bags - 1)
        np.testing.assert_allclose(said(z, form, empty)[-1], np.full(3, 1 / 3), atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("form", ELECTION_FORMS)
@pytest.mark.parametrize("places", [3, 20, MAX_COUNTED_VOTES + 1])
def test_bags_of_one_size_are_never_looked_at(form, weighted, places):
    """On a device without values whatever asks for one fails: so no step waits for the device, and all can be captured."""
    if form == "exact" and (weighted or places > 20):
        pytest.skip("exact asks how many votes there are")
    z = torch.randn(2 * places, 4, device="meta", requires_grad=True)
    segments = Segments(torch.zeros(2 * places, dtype=torch.int64, device="meta"), 2, places)
    segments = segments.with_weight(torch.ones(2 * places, device="meta")) if weighted else segments
    counted = torch.ones(4, dtype=torch.bool, device="meta")
    out = election_log_probs(z, segments.without(z[:, 0] > 0), form, counted)
    assert out.shape == (2, 4)
    out.sum().backward()


# -- the head ----------------------------------------------------------------------------------------------------------


def test_which_form_a_bag_gets():
    assert [choose_form("auto", n, 10) for n in (1, 4, 5, MAX_COUNTED_VOTES, MAX_COUNTED_VOTES + 1)] == [
        "exact", "exact", "conditioned", "conditioned", "normal",
    ]  # fmt: skip
    assert choose_form("auto", 3, 2) == choose_form("exact", 3, 2) == "conditioned"  # exact for two classes
    assert choose_form("independent", 5, 4) == "independent"
    assert choose_form("independent", 5000, 4) == "normal"
    with pytest.raises(HeadcountError, match="outcomes for 64 votes and 10 classes"):
        choose_form("exact", 64, 10)
    with pytest.raises(HeadcountError, match="no form 'exakt'; there are auto, exact"):
        Election(3, 4, form="exakt")


def test_names():
    assert Election.display_name({}) == Election.display_name({"form": "auto"}) == "Election"
    assert Election.display_name({"form": "normal"}) == "Election (normal)"


@pytest.mark.parametrize("form", ELECTION_FORMS)
def test_half_precision_features(form):
    """The votes are counted in full precision, whatever the features come in."""
    torch.manual_seed(0)
    head, segments = Election(5, 4, form=form), Segments.from_sizes([9, 9])
    h = torch.randn(18, 5).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        output = head(h, segments)
    assert output.instance.dtype is output.bag.dtype is torch.float32
    np.testing.assert_allclose(output.bag.detach().exp(), said(output.instance.detach(), form, segments), rtol=1e-6)


def test_it_learns_who_is_who():
    """From the majorities of bags of nine alone, on points in the plane."""
    rng = np.random.default_rng(0)
    truth = np.concatenate([rng.choice(3, 9, p=rng.dirichlet(np.ones(3))) for _ in range(60)])
    x = torch.from_numpy(rng.normal(size=(540, 2)) * 0.3 + np.array([[0, 2], [-2, -1], [2, -1]])[truth]).float()
    votes = np.stack([np.bincount(t, minlength=3) for t in truth.reshape(60, 9)])
    top = votes == votes.max(1, keepdims=True)
    target = torch.from_numpy(top / top.sum(1, keepdims=True)).float()
    torch.manual_seed(0)
    head, segments = Election(2, 3), Segments.from_sizes([9] * 60)
    optimizer = torch.optim.Adam(head.parameters(), 0.1)
    batch = Batch(segments, target, torch.arange(60), torch.arange(540))
    for _ in range(40):
        loss = head.loss(head(x, segments), batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (head(x, segments).instance.argmax(1).numpy() == truth).mean() > 0.95

"""The generator against the specification: folds, bins, rounding, ties, label prior, and the losses of known classifiers."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import irwinhall

from headcount.bags import Segments
from headcount.datasets import share_sampler
from headcount.datasets.protocol import SPLITS, Protocol, draw_counts, majority_bags, split_indices
from headcount.datasets.registry import Source, load_source
from headcount.datasets.share_sampler import majority_labels, round_shares
from headcount.errors import HeadcountError
from headcount.models.heads import Batch, build_head

# C, scenario: ties at the top, realised majority share min / mean / max (specification 1.5, 60,000 simulated bags)
EXPECTED = [
    (10, "various", 0.059, 0.125, 0.532, 0.984),
    (10, "small", 0.212, 0.109, 0.250, 0.422),
    (10, "large", 0.0, 0.562, 0.797, 1.0),
    (9, "various", 0.056, 0.125, 0.540, 1.0),
    (9, "small", 0.191, 0.125, 0.256, 0.422),
    (9, "large", 0.0, 0.562, 0.797, 1.0),
    (4, "various", 0.034, 0.250, 0.621, 1.0),
    (4, "small", 0.185, 0.250, 0.326, 0.406),
    (4, "large", 0.0, 0.594, 0.798, 1.0),
]


def draw_many(classes, scenario, bags=8000, seed=0, **options):
    rng = np.random.default_rng(seed)
    rows = [draw_counts(Protocol(scenario, **options), classes, 400, rng) for _ in range(bags // 400)]
    return np.concatenate([c for c, _ in rows]), np.concatenate([y for _, y in rows])


@pytest.mark.parametrize(("classes", "scenario", "ties", "low", "mean", "high"), EXPECTED)
def test_statistics(classes, scenario, ties, low, mean, high):
    counts, labels = draw_many(classes, scenario)
    top = counts.max(1)
    assert (counts.sum(1) == 64).all()
    assert (counts >= 0).all()
    assert (counts[np.arange(len(counts)), labels] == top).all()
    tied = (counts == top[:, None]).sum(1) > 1
    assert tied.mean() == pytest.approx(ties, abs=0.015)
    assert (counts[tied].argmax(1) == labels[tied]).all(), "a tie goes to the lowest class"
    share = top / 64
    assert share.mean() == pytest.approx(mean, abs=0.006)
    assert share.min() >= low - 0.017  # the extremes of a sample are one instance or so apart
    assert share.max() <= high + 0.017


def test_label_prior_is_skewed_by_ties():
    """Small: P(label = 0) = 0.135 ... P(label = 9) = 0.079; with four classes 0.306, 0.261, 0.231, 0.202."""
    prior = np.bincount(draw_many(10, "small", 16000)[1], minlength=10) / 16000
    assert prior[0] == pytest.approx(0.135, abs=0.012)
    assert prior[9] == pytest.approx(0.079, abs=0.012)
    prior = np.bincount(draw_many(4, "small", 16000)[1], minlength=4) / 16000
    np.testing.assert_allclose(prior, (0.306, 0.261, 0.231, 0.202), atol=0.015)


@pytest.mark.parametrize("scenario", ["various", "small", "large"])
def test_forty_bags_in_each_bin_before_rounding(scenario):
    p = share_sampler.sample_shares(scenario, 10, 400, np.random.default_rng(1))
    np.testing.assert_allclose(p.sum(1), 1)
    assert np.histogram(p.max(1), share_sampler.bin_edges(scenario, 10))[0].tolist() == [40] * 10


def test_samples_per_law():
    """The staged procedure, without its blocks of ten million: mean number of samples from each law, per bin."""
    rng = np.random.default_rng(0)
    drawn = [share_sampler.samples_per_law("various", 10, np.full(10, 40), rng) for _ in range(200)]
    mean = [{law: np.mean([d[b].get(law, 0) for d in drawn]) for law in "UAB"} for b in range(10)]
    assert all(mean[b]["U"] == 40 for b in range(5))
    assert mean[5]["U"] == pytest.approx(4.4, abs=0.6)
    assert mean[6]["A"] == pytest.approx(39.9, abs=0.2)
    assert mean[8]["A"] == pytest.approx(0.7, abs=0.3)
    assert mean[9]["B"] == pytest.approx(40, abs=0.1)


@pytest.mark.parametrize(("scenario", "classes", "block"), [("various", 6, 30_000), ("large", 7, 4000)])
def test_samples_per_law_equal_those_of_drawn_blocks(monkeypatch, scenario, classes, block):
    """All stages of both scenarios that have several, against blocks that are drawn."""
    monkeypatch.setattr(share_sampler, "BLOCK", block)
    stages = {"various": "U" * 5 + "A" * 3 + "B" * 2, "large": "A" * 4 + "B" * 3 + "G" * 3}[scenario]
    rng, legacy, edges = np.random.default_rng(0), np.random.RandomState(0), share_sampler.bin_edges(scenario, classes)
    ours, drawn = np.zeros((2, 4, 10))
    for _ in range(40):
        for b, parts in enumerate(share_sampler.samples_per_law(scenario, classes, np.full(10, 4), rng)):
            for law, count in parts.items():
                ours["UABG".index(law), b] += count / 40
        left = np.full(10, 4)
        for law in dict.fromkeys(stages):
            until = stages.rindex(law) + 1
            while (np.sum(left == 0) < until) if (scenario, law) == ("large", "B") else left[:until].any():
                got = np.minimum(left, np.histogram(share_sampler._block(law, classes, block, legacy).max(1), edges)[0])
                drawn["UABG".index(law)] += got / 40
                left -= got
    assert (drawn[["UABG".index(law) for law in dict.fromkeys(stages)]].sum(1) > 1).all(), "every law has its part"
    np.testing.assert_allclose(ours, drawn, atol=0.6)


@pytest.mark.parametrize(("law", "scenario"), [("U", "various"), ("A", "large"), ("B", "large"), ("G", "large")])
def test_conditional_samples_follow_the_law(law, scenario):
    """Against unconditional draws that fall into the bin: same mean share, and same spread of the minority classes."""
    rng = np.random.default_rng(2)
    e = share_sampler.bin_edges(scenario, 4)
    plain = share_sampler._block(law, 4, 400_000, np.random.RandomState(0))
    b = int(np.argmax([np.count_nonzero((e[i] < plain.max(1)) & (plain.max(1) < e[i + 1])) for i in range(10)]))
    want = plain[(e[b] < plain.max(1)) & (plain.max(1) < e[b + 1])]
    got = share_sampler.sample_given_bin(law, 4, e[b], e[b + 1], 4000, rng)
    assert len(want) > 4000
    assert share_sampler.bin_probability(law, 4, e[b], e[b + 1]) == pytest.approx(len(want) / 400_000, rel=0.1)
    for figure in (lambda p: p.max(1), lambda p: p.min(1), lambda p: np.sort(p, 1)[:, 1]):
        assert figure(got).mean() == pytest.approx(figure(want).mean(), rel=0.02)
        assert figure(got).std() == pytest.approx(figure(want).std(), rel=0.08)


@pytest.mark.parametrize("classes", [2, 3, 7, 100])
def test_any_number_of_classes(classes):
    for scenario in ("various", "large") if classes == 2 else ("various", "small", "large"):
        p = share_sampler.sample_shares(scenario, classes, 40, np.random.default_rng(0))
        assert p.shape == (40, classes)
        assert np.histogram(p.max(1), share_sampler.bin_edges(scenario, classes))[0].tolist() == [4] * 10


@pytest.mark.parametrize("n", [1, 2, 9, 25, 99])
def test_the_distribution_of_a_sum_of_uniforms(n):
    x = np.linspace(-0.5, n + 0.5, 301)
    ours = share_sampler._irwin_hall(n, x)
    assert ours == pytest.approx(irwinhall.cdf(np.clip(x, 0, n), n), rel=1e-9, abs=1e-12)
    corner = np.linspace(0.1, 0.99, 50)
    assert ours.max() == pytest.approx(1, abs=1e-14)
    assert np.log(share_sampler._irwin_hall(n, corner)) == pytest.approx(n * np.log(corner) - math.lgamma(n + 1), rel=1e-12)


def test_official_sampler_has_the_same_statistics(monkeypatch):
    """The block procedure on smaller blocks: same bins, same ties."""
    monkeypatch.setattr(share_sampler, "BLOCK", 200_000)
    rng = np.random.RandomState(42)
    rows = [share_sampler.sample_shares_official("small", 4, 400, rng, block=200_000) for _ in range(5)]
    p = np.concatenate(rows)
    assert np.histogram(p.max(1), share_sampler.bin_edges("small", 4))[0].tolist() == [200] * 10
    counts = round_shares(p, 64)
    for row in counts:
        rng.shuffle(row)
    tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
    assert tied.mean() == pytest.approx(0.185, abs=0.03)


MINORS_AND_MAJOR = {"A": (0.3, 0.8), "B": (0.1, 0.9), "G": (0.05, 0.95)}


def released_shares(scenario, classes, bags, rng, block):
    """Sections 1.4 and 1.5 of the specification, literally: stages of laws, every block adds to all bins, rows shuffled."""
    low, high = {"various": (1 / classes, 1), "small": (1 / classes, 0.4), "large": (0.6, 1)}[scenario]
    bins, laws = [[] for _ in range(10)], set()

    def full(*which):
        return sum(len(bins[i]) == bags // 10 for i in which)

    stops = {
        "various": [("U", lambda: full(*range(5)) == 5), ("A", lambda: full(*range(8)) == 8)],
        "small": [],
        "large": [("A", lambda: full(*range(4)) == 4), ("B", lambda: full(*range(10)) >= 7)],
    }[scenario]
    last = {"various": "B", "small": "U", "large": "G"}[scenario]
    for law, stop in [*stops, (last, lambda: full(*range(10)) == 10)]:
        while not stop():
            laws.add(law)
            if law == "U":
                rows = rng.rand(block, classes)
            else:
                alpha, beta = MINORS_AND_MAJOR[law]
                minors = rng.uniform(0, alpha, (block, classes - 1))
                rows = np.column_stack([minors, rng.uniform(beta, 1, block)])
            for row in rows:
                p = row / row.sum()
                for i in range(10):
                    above, below = low + (high - low) * i / 10, low + (high - low) * (i + 1) / 10
                    if above < p.max() < below and len(bins[i]) < bags // 10:
                        bins[i].append(p)
    rows = np.array([p for held in bins for p in held])
    rng.shuffle(rows)
    return rows, laws


def released_counts(p, size):
    counts = []
    for share in p[:-1]:
        counts.append(min(round(size * share), size - sum(counts)))  # Python rounds half to even
    return [*counts, size - sum(counts)]


@pytest.mark.parametrize(
    ("scenario", "classes", "block", "uses"), [("small", 10, 4000, "U"), ("various", 6, 3000, "UAB"), ("large", 7, 100, "ABG")]
)
def test_official_bags_follow_the_released_random_numbers(monkeypatch, scenario, classes, block, uses):
    """Class lists are shuffled with separate random numbers; every share, count and label is as the released code draws it."""
    monkeypatch.setattr(share_sampler, "sample_shares_official", partial(share_sampler.sample_shares_official, block=block))
    truth = np.random.default_rng(0).integers(0, classes, 3003)
    source = Source("toy", np.zeros((3003, 1), np.float32), truth, tuple(map(str, range(classes))), "0")
    given = Protocol(scenario=scenario, bag_size=16, train_bags=20, valid_bags=10, test_bags=10, sampler="official")
    rng, order, used = np.random.RandomState(42), np.arange(3003), set()
    rng.shuffle(order)
    blocks = [order[600 * i : 600 * (i + 1)].tolist() for i in range(5)]
    for fold in range(2):
        made = majority_bags(source, fold, given)
        parts = {"train": blocks[fold + 2] + blocks[(fold + 3) % 5] + blocks[(fold + 4) % 5]}
        for split, pool in {**parts, "valid": blocks[fold + 1], "test": blocks[fold]}.items():
            p, laws = released_shares(scenario, classes, getattr(given, f"{split}_bags"), rng, block)
            used |= laws
            wanted = [released_counts(row, 16) for row in p]
            for counts in wanted:
                rng.shuffle(counts)
            for counts in wanted:
                for c, n in enumerate(counts):
                    rng.choice([i for i in pool if truth[i] == c], n, replace=False)
                rng.shuffle(np.arange(16))
            bags = made[split]
            held = [np.bincount(truth[bags.index[bags.bag == b]], minlength=classes).tolist() for b in range(len(p))]
            assert held == wanted, (fold, split)
            assert bags.label.tolist() == [counts.index(max(counts)) for counts in wanted]
            assert set(bags.index.tolist()) <= set(pool)
    assert used == set(uses)


def test_official_needs_a_multiple_of_ten():
    with pytest.raises(HeadcountError, match="divide by 10"):
        share_sampler.sample_shares_official("small", 4, 25, np.random.RandomState(0), block=1000)


# -- rules ------------------------------------------------------------------------------------------------------------------


def test_tie_rules():
    counts, _ = draw_many(10, "small", 2000, tie="reject")
    assert ((counts == counts.max(1, keepdims=True)).sum(1) == 1).all()
    counts, _ = draw_many(2, "large", 400, tie="reject", bag_size=4)  # where law A cannot go
    assert (counts[:, 0] != counts[:, 1]).all()
    tied = np.array([[3, 5, 5, 1]] * 400)
    drawn = majority_labels(tied, "random", np.random.default_rng(0))
    assert set(drawn) == {1, 2}
    assert 0.4 < (drawn == 1).mean() < 0.6
    assert set(majority_labels(tied, "lowest", np.random.default_rng(0))) == {1}


def test_largest_remainder_sums_and_stays_close():
    p = share_sampler.sample_shares("various", 10, 400, np.random.default_rng(3))
    counts = round_shares(p, 64, "largest_remainder")
    assert (counts.sum(1) == 64).all()
    assert np.abs(counts - 64 * p).max() < 1


def test_rounding_is_limited_to_the_bag_size():
    assert round_shares(np.array([[0.5, 0.51, 0.1, 0.0]]), 10).tolist() == [[5, 5, 0, 0]]


# -- folds and bags ---------------------------------------------------------------------------------------------------------


def test_folds_are_the_released_permutation():
    order = np.arange(103)
    np.random.seed(42)  # noqa: NPY002  the released code's legacy generator
    np.random.shuffle(order)  # noqa: NPY002
    made = [split_indices(103, fold)["test"] for fold in range(5)]
    assert np.concatenate(made).tolist() == order[:100].tolist()
    assert [len(f) for f in made] == [20] * 5


@pytest.mark.parametrize("fold", range(5))
def test_no_instance_is_in_two_splits(fold):
    made = split_indices(1797, fold)
    seen = np.concatenate([made[s] for s in SPLITS])
    assert len(seen) == len(set(seen.tolist())) == 5 * (1797 // 5)
    assert len(made["train"]) == 3 * len(made["test"])


def small(**options):
    return Protocol(**{"bag_size": 24, "train_bags": 40, "valid_bags": 20, "test_bags": 20, **options})


def test_bags_match_their_labels_and_splits():
    source = load_source("digits")
    made = majority_bags(source, 2, small())
    for split, bags in made.items():
        truth, bag = bags.truth.numpy(), bags.bag.numpy()
        assert (truth == source.truth[bags.index.numpy()]).all()
        assert set(bags.index.tolist()) <= set(split_indices(len(source), 2)[split].tolist())
        for b in range(len(bags)):
            mine = bags.index.numpy()[bag == b]
            assert len(mine) == len(set(mine.tolist())) == 24, "no instance twice in a bag"
            assert np.bincount(truth[bag == b], minlength=10).argmax() == bags.label[b]


def test_bags_depend_on_seed_and_fold():
    source = load_source("digits")
    one, two = (majority_bags(source, 0, small())["train"] for _ in range(2))
    assert torch.equal(one.index, two.index)
    assert not torch.equal(one.index, majority_bags(source, 0, small(seed=43))["train"].index)
    assert not torch.equal(one.label, majority_bags(source, 1, small())["train"].label)


def test_pinned_bags():
    """Records identify bags by recipe: if this changes, all records are invalid."""
    bags = majority_bags(load_source("digits"), 0, small())["train"]
    assert bags.label[:12].tolist() == [8, 0, 3, 3, 1, 4, 1, 8, 9, 0, 9, 0]
    assert bags.index[:8].tolist() == [182, 852, 1527, 465, 556, 1284, 1302, 130]


def test_without_overlap_no_instance_is_shared():
    source = load_source("digits")
    made = majority_bags(source, 0, small(overlap=False, train_bags=40))
    assert len(set(made["train"].index.tolist())) == len(made["train"].index)
    assert len(made["train"]) == len(made["train"].label) < 40  # the pool runs out, and the labels are cut with it


def test_a_data_set_that_is_too_small():
    source = Source("few", np.zeros((50, 2), np.float32), np.arange(50) % 5, tuple("abcde"), "0")
    with pytest.raises(HeadcountError, match=r"class '.' has \d+ instances in the train part of few, a bag needs \d+"):
        majority_bags(source, 0, Protocol(bag_size=64))
    none = Source("few", np.zeros((500, 2), np.float32), np.arange(500) % 4, tuple("abcde"), "0")
    with pytest.raises(HeadcountError, match=r"class 'e' has 0 instances .*; drop the class, or add some"):
        majority_bags(none, 0, Protocol(bag_size=8))


# -- the loss of known classifiers on generated bags ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("classes", "scenario", "perfect", "tolerance"),
    [
        (10, "various", 0.454, 0.03),
        (10, "small", 1.193, 0.03),
        (10, "large", 0.0085, 0.002),
        (9, "various", 0.422, 0.03),
        (9, "small", 1.143, 0.03),
        (9, "large", 0.0080, 0.002),
        (4, "various", 0.233, 0.02),
        (4, "small", 0.876, 0.03),
        (4, "large", 0.0061, 0.002),
    ],
)
def test_loss_of_a_perfect_classifier(classes, scenario, perfect, tolerance):
    counts, labels = draw_many(classes, scenario, 4000)
    head = build_head("count", classes, classes, {"reduction": "paper"})
    votes = torch.from_numpy(counts).float()
    batch = Batch(Segments.from_sizes([1]), torch.eye(classes)[labels], torch.zeros(1), torch.zeros(1))
    log_p = head.readout_sums(votes, torch.full((len(votes),), 64.0))
    loss = float(head.loss(type("O", (), {"bag": log_p})(), batch))
    assert loss == pytest.approx(perfect, abs=tolerance)
    majority = torch.nn.functional.one_hot(torch.from_numpy(labels), classes).float() * 64
    log_p = head.readout_sums(majority, torch.full((len(votes),), 64.0))
    degenerate = float(head.loss(type("O", (), {"bag": log_p})(), batch))
    assert degenerate == pytest.approx({10: 4.1e-4, 9: 3.6e-4, 4: 1.4e-4}[classes], rel=0.05)


@pytest.mark.parametrize(("scenario", "perfect"), [("various", 2.247), ("small", 2.287), ("large", 2.208)])
def test_output_mean_of_a_perfect_classifier(scenario, perfect):
    """Ten classes: after three softmaxes perfect knowledge hardly differs from none (2.303)."""
    counts, labels = draw_many(10, scenario, 4000)
    head = build_head("output_mean", 10, 10, {})
    log_p = head.readout_sums(torch.from_numpy(counts).float(), torch.full((len(counts),), 64.0))
    assert -log_p[torch.arange(len(labels)), labels].mean().item() == pytest.approx(perfect, abs=0.003)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bag_size": 2.5}, "bag_size is a whole number from 1 to 1048576, got 2.5"),
        ({"bag_size": "8"}, "bag_size is a whole number from 1 to 1048576, got '8'"),
        ({"train_bags": None}, "train_bags is a whole number from 1"),
        ({"test_bags": True}, "test_bags is a whole number from 1"),
        ({"seed": -1}, "seed is a whole number from 0"),
        ({"overlap": "no"}, "overlap is true or false, got 'no'"),
    ],
)
def test_invalid_protocols(options, message):
    with pytest.raises(HeadcountError, match=message):
        small(**options)


@pytest.mark.parametrize("fold", ["0", 0.5, None, -1, 5, True])
def test_invalid_folds(fold):
    for sampler in ("conditional", "official"):
        with pytest.raises(HeadcountError, match="fold is a whole number from 0 to 4, got"):
            majority_bags(load_source("digits"), fold, small(sampler=sampler))


def test_numpy_numbers_make_the_same_protocol():
    assert small(bag_size=np.int64(24), overlap=np.True_) == small()

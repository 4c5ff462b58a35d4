"""Randomised response against a slow sum over winners, classes and labels; and what it does to an estimate."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from headcount.bags import Bags, Pool, Segments
from headcount.bags.bags import fingerprint
from headcount.errors import HeadcountError
from headcount.majority import label_noise, transition
from headcount.majority.calibration import bag_losses, fit_transition_loss
from headcount.models.heads import Batch, build_head
from headcount.models.network import ModelConfig, build_model
from headcount.training.config import TrainConfig
from headcount.training.em import em
from headcount.training.loop import train

MIX = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.7, 0.1], [0.25, 0.25, 0.5]], dtype=torch.float64)
PRIOR = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
NOISE = 0.4


def channel(noise: float, counted: torch.Tensor | None = None) -> torch.Tensor:
    """(winner, label), from the definition."""
    allowed = [True] * 3 if counted is None else counted.tolist()
    m = torch.zeros(3, 3, dtype=torch.float64)
    for w in range(3):
        for c in range(3):
            m[w, c] = (1 - noise) * (w == c) + noise * allowed[c] / sum(allowed)
    return m


@pytest.mark.parametrize("counted", [None, torch.tensor([True, True, False])])
def test_reported_log_probabilities_are_sums_over_winners(counted: torch.Tensor | None) -> None:
    scores = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, -50.0]], dtype=torch.float64, requires_grad=True)
    log_p = (scores if counted is None else scores.masked_fill(~counted, -torch.inf)).log_softmax(1)
    reported = label_noise.report_log_probs(log_p, NOISE, counted)
    expected = log_p.exp() @ channel(NOISE, counted)
    assert torch.allclose(reported.exp(), expected, atol=1e-12)
    reported[:, 0].sum().backward()
    assert scores.grad is not None
    assert bool(scores.grad.isfinite().all())
    assert label_noise.report_log_probs(log_p, 0.0, counted) is log_p


def test_labels_and_winners_follow_from_each_other() -> None:
    joint = PRIOR[:, None] * channel(NOISE)  # (winner, label)
    label_prior = joint.sum(0)
    mix = torch.stack([sum(joint[w, c] / label_prior[c] * MIX[w] for w in range(3)) for c in range(3)])
    found_mix, found_prior = label_noise.report(MIX, PRIOR, NOISE)
    assert torch.allclose(found_mix, mix)
    assert torch.allclose(found_prior, label_prior)
    assert torch.allclose(label_noise.winner_prior(label_prior, NOISE), PRIOR)
    entropy = -sum(float(v * v.log()) for v in channel(NOISE)[0])
    assert label_noise.label_entropy(NOISE, 3).item() == pytest.approx(entropy)


def test_the_e_step_counts_winners() -> None:
    """Row w, column k: the sum over instances of P(winner w, class k | x, label), by enumeration."""
    p = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.3, 0.4]], dtype=torch.float64)
    labels, prior, m = [0, 2, 1], PRIOR @ MIX, channel(NOISE)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for i, c in enumerate(labels):
        joint = torch.zeros(3, 3, dtype=torch.float64)
        for w in range(3):
            for k in range(3):
                joint[w, k] = p[i, k] / prior[k] * PRIOR[w] * MIX[w, k] * m[w, c]
        expected += joint / joint.sum()
    rows = torch.nn.functional.one_hot(torch.tensor(labels), 3).double()
    assert torch.allclose(transition.e_step(p, rows, MIX, PRIOR, NOISE), expected)


def noised_bags(noise: float, known: bool, n_bags: int = 600, size: int = 12) -> tuple[Bags, torch.Tensor]:
    """Bags of three classes, and the winners; the instances are their classes."""
    rng = np.random.default_rng(3)
    classes = np.array([rng.choice(3, size, p=MIX[b % 3].numpy()) for b in range(n_bags)])
    winners = np.array([np.bincount(row, minlength=3).argmax() for row in classes])
    labels = label_noise.randomize_labels(winners, noise, 3, seed=5)
    x = np.eye(3, dtype=np.float32)[classes.ravel()]
    extras = {"label_noise": noise} if known else {}
    return Bags.of(Pool(x), sizes=[size] * n_bags, labels=labels, classes=3, **extras), torch.from_numpy(winners)


def test_the_majority_share_is_that_of_the_winners() -> None:
    clean = fit_transition_loss(noised_bags(0.0, False)[0].pool.data * 0.98 + 0.0066, noised_bags(0.0, False)[0])[1].share
    shares = {}
    for known in (True, False):
        bags, _ = noised_bags(0.5, known)
        shares[known] = fit_transition_loss(bags.pool.data * 0.98 + 0.0066, bags)[1].share
    assert (shares[True] - clean).abs().max() < 0.06
    assert (clean - shares[False]).min() > 0.05


@pytest.mark.parametrize("name", ["count", "tilt", "output_mean", "election"])
def test_the_loss_of_a_head_takes_the_noise(name: str) -> None:
    head = build_head(name, 3, 3, {"teach": 0.0} if name == "tilt" else {}).eval().requires_grad_(requires_grad=False)
    segments, target = Segments.from_sizes([4, 4]), torch.eye(3)[:2]
    h = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    batch = Batch(segments, target, torch.arange(2), torch.arange(8))
    losses = {}
    for noise in (0.0, 0.9):
        head.label_noise = noise
        head.setup(segments, target)
        losses[noise] = head.loss(head.report(head(h, segments)), batch)
        assert bool(losses[noise].isfinite().all())
    assert float(losses[0.9]) != pytest.approx(float(losses[0.0]))
    if name == "election":
        p = head(h, segments).bag.exp().double() @ channel(0.9)
        assert float(losses[0.9]) == pytest.approx(-float((p[0, 0].log() + p[1, 1].log()) / 2), rel=1e-5)


def test_training_uses_the_noise_of_its_bags() -> None:
    curves = {}
    for known in (True, False):
        bags, _ = noised_bags(0.5, known, n_bags=40)
        parts = bags.take(range(30)), bags.take(range(30, 40))
        model = build_model(ModelConfig.for_bags(bags, backbone="linear", head="tilt"), parts[0])
        curves[known] = train(model, *parts, TrainConfig(epochs=2)).progress.curve
        result = em(LogisticRegression(), *parts, rounds=2, folds=2)
        curves[known] += [tuple(result.curve)]
    assert curves[True] != curves[False]
    assert all(math.isfinite(v) for row in curves[True] for v in row)


def test_a_certain_and_wrong_prediction_costs_what_the_noise_allows() -> None:
    log_p = torch.tensor([[0.999999, 5e-7, 5e-7]]).double().log()
    wrong = torch.tensor([[0.0, 1.0, 0.0]])
    assert float(bag_losses(log_p, wrong, 0.3)) == pytest.approx(-math.log(0.1), abs=1e-4)
    assert float(bag_losses(log_p, wrong)) > 10


def test_randomised_response() -> None:
    labels = np.where(np.arange(30_000) % 10 < 9, 1, -1)
    noised = label_noise.randomize_labels(labels, 0.3, 3, seed=1)
    assert (noised[labels < 0] == -1).all()
    rates = np.bincount(noised[labels >= 0], minlength=3) / (labels >= 0).sum()
    assert np.abs(rates - [0.1, 0.8, 0.1]).max() < 0.01  # five standard errors
    assert (label_noise.randomize_labels(labels, 0.5, 3) != label_noise.randomize_labels(labels, 0.5, 3)).any()
    with pytest.raises(HeadcountError, match="class numbers from 0 to 2"):
        label_noise.randomize_labels(np.array([3]), 0.1, 3)
    with pytest.raises(HeadcountError, match="label_noise"):
        label_noise.randomize_labels(labels, 1.0, 3)


def test_the_noise_is_part_of_a_fingerprint_only_where_there_is_some() -> None:
    plain, noised = noised_bags(0.2, False, 20)[0], noised_bags(0.2, True, 20)[0]
    assert fingerprint(plain) != fingerprint(noised)
    assert noised.take([1]).label_noise == 0.2
    with pytest.raises(HeadcountError, match="label_noise"):
        Bags.of(Pool(np.eye(2, dtype=np.float32)), sizes=[2], labels=[0], classes=2, label_noise=2)


def test_a_wrong_label_is_noticed_by_the_votes() -> None:
    log_p, target = torch.tensor([[0.9, 0.08, 0.02], [0.3, 0.3, 0.4]]).double().log(), torch.eye(3).double()[[1, 1]]
    found = label_noise.winner_posterior(log_p, target, 0.3)
    joint = log_p.exp() * channel(0.3)[:, 1]
    assert torch.allclose(found, joint / joint.sum(1, keepdim=True))
    assert found[0].argmax() == 0
    assert found[1].argmax() == 1

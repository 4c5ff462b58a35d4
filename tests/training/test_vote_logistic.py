"""Logistic regression by the likelihood of the vote, against an oracle that lists all outcomes of a vote."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import headcount as hc
from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.readers import read
from headcount.training.vote_logistic import VoteLogistic, maximize_posterior

SIZE = 3


def small_bags(n: int = 30, seed: int = 0) -> tuple[Bags, np.ndarray]:
    """Bags of three instances of two classes, and the classes."""
    g = np.random.default_rng(seed)
    truth = (g.random((n, SIZE)) < g.choice([0.2, 0.8], (n, 1))).astype(int)
    x = g.normal(size=(n * SIZE, 2)) * [1, 100] + 2 * truth.ravel()[:, None] * [1, 100]
    return Bags.of(
        Pool(x.astype(np.float32)), sizes=[SIZE] * n, labels=(truth.sum(1) > 1).astype(int), classes=2
    ), truth.ravel()


def log_posterior(weight: np.ndarray, bias: np.ndarray, x: np.ndarray, labels: np.ndarray) -> float:
    """The objective, of standardised columns, by every outcome of every vote."""
    z = x @ weight.T + bias
    p = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    total = 0.0
    for b, label in enumerate(labels):
        votes = p[b * SIZE : (b + 1) * SIZE]
        outcomes = product(range(2), repeat=SIZE)
        total += np.log(sum(np.prod(votes[range(SIZE), o]) for o in outcomes if (sum(o) > 1) == label))
    return total - x.shape[1] / 2 * float((weight**2).sum())


def test_it_is_the_maximum_of_the_posterior():
    bags, _ = small_bags()
    x = bags.pool.data.numpy().astype(float)
    mean, scale = x.mean(0), x.std(0)
    z, labels, g = (x - mean) / scale, bags.label.numpy(), np.random.default_rng(1)
    parameters = maximize_posterior([(torch.from_numpy(z), bags)]).numpy()
    weight, bias = parameters[:-1].T, parameters[-1]
    best = log_posterior(weight, bias, z, labels)
    for _ in range(20):
        step = 0.05 * g.normal(size=weight.shape), 0.05 * g.normal(size=bias.shape)
        assert log_posterior(weight + step[0], bias + step[1], z, labels) < best + 1e-6


def test_units_do_not_matter_and_instances_are_learned():
    bags, truth = small_bags(100)
    p = VoteLogistic().fit_bags(bags, small_bags(40, 7)[0])[0].predict_proba(bags.pool.data.numpy())
    assert (p.argmax(1) == truth).mean() > 0.8
    other = Bags.of(Pool(bags.pool.data.numpy() * np.float32([1000, 1])), sizes=[SIZE] * 100, labels=bags.label, classes=2)
    valid, units = small_bags(40, 7)[0], np.float32([1000, 1])
    valid = Bags.of(Pool(valid.pool.data.numpy() * units), sizes=[SIZE] * 40, labels=valid.label, classes=2)
    np.testing.assert_allclose(VoteLogistic().fit_bags(other, valid)[0].predict_proba(other.pool.data.numpy()), p, atol=1e-4)


def test_it_is_a_method_of_fit_and_not_of_auto(tmp_path):
    x, truth = small_bags(60)
    table = {"bag": np.repeat(np.arange(60), SIZE), "label": np.repeat(x.label.numpy(), SIZE).astype(str)}
    table |= {f"x{j}": x.pool.data.numpy()[:, j] for j in range(2)}
    model = hc.fit(read(table), "vote_logistic", folds=2)
    assert model.metadata["method"]["name"] == "vote_logistic"
    assert not model.metadata["method"]["baseline"]
    model.save(tmp_path / "model")
    np.testing.assert_allclose(hc.FittedModel.load(tmp_path / "model").predict_proba(table), model.predict_proba(table))
    estimator = hc.MajorityClassifier("vote_logistic").fit(
        [x.pool.data.numpy()[3 * b : 3 * b + 3] for b in range(60)], x.label.numpy()
    )
    assert (estimator.predict(x.pool.data.numpy()) == truth).mean() > 0.75
    with pytest.raises(HeadcountError, match="reads features, and these are images"):
        hc.MajorityClassifier("vote_logistic").fit(np.zeros((4, 2, 8, 8, 1), np.uint8), [0, 1, 0, 1])


def test_uncounted_classes_noisy_labels_and_known_instances():
    bags, truth = small_bags(100)
    x, known = bags.pool.data.numpy(), np.where(np.arange(300) < 6, 2, -1)  # class 2 never wins
    x[:6] = [-10, -1000]
    third = Bags.of(
        Pool(x), sizes=[SIZE] * 100, labels=bags.label, classes=3, counted=[True, True, False], known=known, label_noise=0.1
    )
    predicted = VoteLogistic().fit_bags(third, third)[0].predict_proba(x).argmax(1)
    assert (predicted[:6] == 2).all()
    assert (predicted[6:] == truth[6:]).mean() > 0.75

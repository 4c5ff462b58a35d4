"""The statements of docs/explanation/theory.md, seen in small worlds (benchmarks/theory.py draws the same, larger)."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import theory


@pytest.mark.parametrize("never", [-1, 3])
def test_equation_1_holds_in_simulated_bags(never):
    """Equation (1): the labels of a symbol's bags are distributed by T and P(class | symbol), up to the noise of 40,000 bags."""
    rng = np.random.default_rng(0)
    w = theory.world(4, 24, 0.4, rng)
    T, eta = theory.truth(w, 16, 0.7, 100, never=never)
    seen = theory.counted(*theory.draw(w, 40_000, 16, 0.7, rng, never=never), 24, 4)
    seen /= seen.sum(1, keepdims=True)
    assert theory.wrong(seen, eta @ T) < 0.008
    if never >= 0:  # the classes are not equally frequent, so it matters
        assert theory.wrong(seen, w.lean @ T) > 0.025


def test_the_forward_corrected_loss_is_consistent_and_the_label_as_class_is_not():
    found = theory.consistency(bags=(100, 1600), seeds=2)
    few, many = found["forward-corrected"]
    assert many < 0.45 * few  # sixteen times the bags: a quarter of the error, by the root law
    assert found["label as class"][1] > 3 * many
    assert found["label as class"][1] > 0.9 * found["label as class"][0]


def test_the_error_grows_as_the_majority_vanishes():
    found = theory.vanishing(shares=(0.3, 0.9), seeds=2)
    assert found["error"][0] > 3 * found["error"][1]
    assert found["condition"][0] > 4 * found["condition"][1]


def test_label_noise_only_flattens_the_transition():
    found = theory.noise(rates=(0.0, 0.3), seeds=2)
    assert found["T with the noise in it"][1] < 0.5 * found["T without"][1]
    assert found["T with the noise in it"][1] < 4 * found["T with the noise in it"][0]


def test_a_class_that_never_wins():
    found = theory.never(overlaps=(0.0,), bags=800, seeds=2)
    assert found["one never wins"][0] > 3 * found["all win"][0]
    assert found["one never wins, symbols pure"][0] < 0.25 * found["one never wins"][0]


def test_the_bag_term_saturates():
    found = theory.saturation(margins=(0.05, 0.2), sizes=(16, 256))
    assert found["S = 256"][1] < 1e-3 < found["S = 256"][0]
    assert found["S = 16"][1] > 0.2
    for size in (16, 256):
        assert all(slope <= bound + 0.02 for slope, bound in zip(found[f"S = {size}"], found[f"bound {size}"], strict=True))


def test_the_share_is_estimated():
    found = theory.estimated(bags=(800,), seeds=3, rounds=(10, 50))
    true = found["true"][0]
    assert found["tilt known"][0] == pytest.approx(true, abs=0.03)
    early, late = (found[f"unknown, {n} rounds"][0] for n in (10, 50))
    assert true - 0.03 < early < late < true + 0.09, "it climbs, and keeps climbing"

"""Probes: the traps are what they say, a told network escapes them, and a known victim is caught."""

from __future__ import annotations

import numpy as np
import pytest

from headcount.experiments.sanity_checks import (
    BAG_SIZE,
    CLASSES,
    SANITY_CHECKS,
    recipe_for,
    run_sanity_check,
    sanity_check_bags,
)


@pytest.mark.parametrize("name", SANITY_CHECKS)
def test_labels_are_majorities(name):
    for bags in sanity_check_bags(name).values():
        counts = np.stack([np.bincount(row, minlength=CLASSES) for row in bags.truth.numpy().reshape(-1, BAG_SIZE)])
        assert (counts.argmax(1) == bags.label.numpy()).all()
        top = np.sort(counts, 1)
        if name == "one_vote":
            assert (top[:, -1] - top[:, -2] == 1).all()
        if name == "present":
            other = (bags.label.numpy() + 1) % CLASSES
            assert (counts[np.arange(len(counts)), other] >= 4).all()
        if name == "never":
            assert (bags.label.numpy() < CLASSES - 1).all()
            assert (counts[:, -1] == 4).all()


def test_the_loud_one_betrays_the_label_in_training_only():
    for split, bags in sanity_check_bags("loud").items():
        x = bags.pool.data.numpy().reshape(len(bags), BAG_SIZE, -1)[:, :, 2:]
        shouted = x.max(1).argmax(1)
        agrees = (shouted == bags.label.numpy()).mean()
        assert agrees == 1 if split == "train" else agrees < 0.5


def test_a_told_network_escapes_and_max_pooling_does_not():
    assert all(
        run_sanity_check(recipe_for("supervised"), name, seeds=1).instance_accuracy > 0.95 for name in SANITY_CHECKS
    )
    assert run_sanity_check(recipe_for("count"), "loud", seeds=1).instance_accuracy > 0.9
    assert run_sanity_check(recipe_for("feature_max"), "loud", seeds=1).instance_accuracy < 0.6

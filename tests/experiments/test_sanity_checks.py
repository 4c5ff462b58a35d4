"""Sanity checks: the traps are as described, full supervision avoids them, and max pooling is caught by one."""

from __future__ import annotations

import numpy as np
import pytest

from headcount.experiments.sanity_checks import BAG_SIZE, CLASSES, SANITY_CHECKS, run_sanity_check, sanity_check_bags


@pytest.mark.parametrize("check", SANITY_CHECKS)
def test_labels_are_majorities(check):
    for bags in sanity_check_bags(check).values():
        counts = np.stack([np.bincount(row, minlength=CLASSES) for row in bags.truth.numpy().reshape(-1, BAG_SIZE)])
        assert (counts.argmax(1) == bags.label.numpy()).all()
        top = np.sort(counts, 1)
        if check == "one_vote":
            assert (top[:, -1] - top[:, -2] == 1).all()
        if check == "present":
            other = (bags.label.numpy() + 1) % CLASSES
            assert (counts[np.arange(len(counts)), other] >= 4).all()
        if check == "never":
            assert (bags.label.numpy() < CLASSES - 1).all()
            assert (counts[:, -1] == 4).all()


def test_the_loud_instance_gives_the_label_away_in_training_only():
    for split, bags in sanity_check_bags("loud").items():
        x = bags.pool.data.numpy().reshape(len(bags), BAG_SIZE, -1)[:, :, 2:]
        loudest = x.max(1).argmax(1)
        agrees = (loudest == bags.label.numpy()).mean()
        assert agrees == 1 if split == "train" else agrees < 0.5


def test_full_supervision_avoids_the_traps_and_max_pooling_does_not():
    assert all(run_sanity_check(check, "supervised", seeds=1).instance_accuracy > 0.95 for check in SANITY_CHECKS)
    assert run_sanity_check("loud", "count", seeds=1).instance_accuracy > 0.9
    assert run_sanity_check("loud", "feature_max", seeds=1).instance_accuracy < 0.6

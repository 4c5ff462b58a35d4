"""Fitting a temperature: over candidates, with a tolerance, and continuously."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headcount.majority.calibration import (
    BAG_TEMPERATURES,
    apply_temperature,
    bag_losses,
    fit_bag_temperature,
    fit_temperature,
    standard_error,
)


def squared_log(t):
    return torch.tensor([math.log(t / 1.9) ** 2])


def test_the_best_candidate_is_taken_and_the_first_of_equal_ones():
    assert fit_temperature(squared_log, (0.5, 1.0, 2.0, 4.0)) == 2.0
    assert fit_temperature(lambda t: torch.zeros(3), (0.5, 1.0, 2.0)) == 0.5


def test_of_candidates_within_the_tolerance_the_one_nearest_to_one_is_taken():
    assert fit_temperature(squared_log, (0.5, 1.0, 2.0, 4.0), tolerance=lambda excess: 0.5) == 1.0
    assert fit_temperature(squared_log, (0.5, 1.0, 2.0, 4.0), tolerance=lambda excess: 0.3) == 2.0
    losses = {1.0: torch.tensor([1.0, 3.0]), 2.0: torch.tensor([1.9, 1.9])}  # excess 0.1, with a standard error of 1
    assert fit_temperature(losses.__getitem__, (2.0, 1.0), tolerance=standard_error) == 1.0


def test_the_bag_temperature_undoes_a_scaling():
    g = torch.Generator().manual_seed(0)
    log_p = (2 * torch.randn(4000, 3, generator=g)).log_softmax(1)
    target = torch.eye(3)[torch.multinomial(log_p.exp(), 1, generator=g)[:, 0]]
    for scale in (0.25, 4.0):
        fitted = fit_bag_temperature(scale * log_p, target)
        assert fitted in BAG_TEMPERATURES
        assert fitted == pytest.approx(scale, rel=0.15)
        scaled = (scale * log_p / fitted).log_softmax(1)
        assert bag_losses(scaled, target).mean() < bag_losses((scale * log_p).log_softmax(1), target).mean()


def test_apply_temperature():
    p = torch.tensor([[0.8, 0.2]])
    assert apply_temperature(p, 1.0) is p
    torch.testing.assert_close(apply_temperature(p, 0.5), torch.tensor([[0.64, 0.04]]) / 0.68)


def test_standard_error_of_arrays_and_tensors():
    assert standard_error(np.array([1.0, 3.0])) == standard_error(torch.tensor([1.0, 3.0])) == pytest.approx(1.0)
    assert standard_error(np.array([1.0])) == math.inf

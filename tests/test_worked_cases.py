"""Small cases whose results can be verified by hand: the mathematics, hashes, errors and seeds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from headcount.bags import Bags, Pool, Segments
from headcount.bags.bags import bag_hashes, hashes_from_hex, hashes_to_hex
from headcount.bags.seeds import seed_for
from headcount.errors import HeadcountError, check_choice, check_number
from headcount.majority.calibration import fit_temperature
from headcount.majority.proportions import (
    fit_shares,
    laplace_proportions,
    log_posterior_given_share,
    mean_proportions,
    posterior_in_context,
    project_to_majority,
)
from headcount.majority.ragged_votes import choose_form
from headcount.majority.transition import (
    Transition,
    estimate_transition,
    forward_correct,
    mix_from_shares,
    posterior,
    random_majority_share,
)
from headcount.majority.vote_likelihood import exact

HALF = torch.tensor([0.5, 0.5])
LABEL_PRIOR = torch.tensor([0.75, 0.25])


def to_four_digits(given, expected):
    torch.testing.assert_close(torch.as_tensor(given).float(), torch.tensor(expected), rtol=0, atol=5.1e-5)


def test_transition():
    to_four_digits(mix_from_shares(0.6, 3), [[0.6, 0.2, 0.2], [0.2, 0.6, 0.2], [0.2, 0.2, 0.6]])
    mix = mix_from_shares(0.6, 2)
    to_four_digits(Transition(mix, LABEL_PRIOR).matrix, [[0.8182, 0.1818], [0.6667, 0.3333]])
    to_four_digits(forward_correct(torch.tensor([[1.0, 0.0]]).log(), mix, LABEL_PRIOR).exp(), [[0.8182, 0.1818]])
    given_label = posterior(HALF[None].log(), torch.tensor([[1.0, 0.0]]), mix_from_shares(0.8, 2), HALF)
    to_four_digits(given_label, [[0.8, 0.2]])


def test_the_estimated_transition():
    assert (round(random_majority_share(2, 2), 3), round(random_majority_share(24, 10), 3)) == (0.75, 0.209)
    g = torch.Generator().manual_seed(0)
    label = torch.randint(3, (300,), generator=g)
    y = torch.where(torch.rand(300, 10, generator=g) < 0.5, label[:, None], torch.randint(3, (300, 10), generator=g))
    transition = estimate_transition(torch.eye(3)[y.flatten()], Segments.from_sizes([10] * 300), torch.eye(3)[label])
    to_four_digits(transition.share, [0.6749, 0.6523, 0.6604])  # 0.5 + 0.5 / 3


def test_shares():
    to_four_digits(
        log_posterior_given_share(HALF[None].log(), Segments.from_sizes([1]), torch.tensor([[0.8, 0.2]]), HALF).exp(),
        [[0.8, 0.2]],
    )
    p = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.9, 0.1]])
    to_four_digits(fit_shares(p.log(), Segments.from_sizes([4]), HALF[None], HALF, concentration=2.0), [[0.7980, 0.2020]])
    by_itself = posterior_in_context(p[:1].log(), Segments.from_sizes([1]), HALF, concentration=1.0)
    to_four_digits(by_itself.exp(), [[0.9, 0.1]])


def test_shares_in_which_the_label_leads():
    label = torch.tensor([[1.0, 0.0, 0.0]])
    to_four_digits(project_to_majority(torch.tensor([[0.2, 0.5, 0.3]]), label), [[0.35, 0.35, 0.3]])
    to_four_digits(project_to_majority(torch.tensor([[0.3, 0.5, 0.2]]), label), [[0.4, 0.4, 0.2]])


def test_intervals():
    p = torch.tensor([[0.9, 0.1]] * 30 + [[0.1, 0.9]] * 10)  # the mean is 0.7
    share, low, high = laplace_proportions(p.log(), Segments.from_sizes([40]), HALF, concentration=2.0)
    to_four_digits(share, [[0.8005, 0.1995]])
    to_four_digits(low, [[0.7, 0.125]])
    to_four_digits(high, [[0.875, 0.3]])
    to_four_digits(mean_proportions(torch.tensor([[0.9, 0.1], [0.7, 0.3]]), Segments.from_sizes([2])).share, [[0.8, 0.2]])


def test_votes():
    log_p = torch.tensor([[[0.5, 0.5], [0.8, 0.2]]]).log()
    to_four_digits(exact(log_p).exp(), [[0.65, 0.35]])  # 0.4 win, 0.1 lose, the rest tie
    forms = choose_form("auto", 4, 10), choose_form("auto", 64, 10), choose_form("auto", 5000, 10)
    assert forms == ("exact", "conditioned", "normal")


def test_temperature():
    def losses(t):
        return torch.tensor([(t - 1.9) ** 2])

    assert fit_temperature(losses, (0.5, 1.0, 2.0)) == 2
    assert fit_temperature(losses, (0.5, 1.0, 2.0), tolerance=lambda excess: 1.0) == 1


def test_hashes():
    pool = Pool(np.arange(6, dtype=np.float32)[:, None])
    first = Bags.of(pool, index=[0, 1, 2, 3, 4, 5], sizes=[2, 4], labels=[0, 1], classes=["a", "b"])
    second = Bags.of(pool, index=[5, 4, 3, 2, 0], sizes=[4, 1], labels=[0, 1], classes=["a", "b"])
    assert (bag_hashes(first)[:, None] == bag_hashes(second)).tolist() == [[False, False], [True, False]]
    assert hashes_from_hex(hashes_to_hex(np.array([7, 3], np.uint64))).tolist() == [3, 7]
    assert hashes_from_hex(None).tolist() == []


def test_errors_name_what_was_given_and_the_choices():
    assert check_choice("tie rule", "lowest", ["lowest", "random"]) == "lowest"
    with pytest.raises(HeadcountError) as e:
        check_choice("head", "cuont", ["count", "output_mean"])
    assert str(e.value) == "no head 'cuont'; there are count, output_mean (did you mean 'count'?)"
    lr = check_number("lr", 1, 0.0, 10.0, integer=False)
    assert (lr, type(lr)) == (1.0, float)
    with pytest.raises(HeadcountError) as e:
        check_number("fold", 2.5, 0, 4, integer=True)
    assert str(e.value) == "fold is a whole number from 0 to 4, got 2.5"


def test_a_seed_depends_on_its_purpose():
    assert seed_for(0, "order", 3) == seed_for(0, "order", 3) != seed_for(0, "order", 4)

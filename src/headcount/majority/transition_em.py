"""How steep the tilt of some bags is: estimated from what is said of their instances, and the bags' labels, alone.

    heaped    every instance is laid on its label's heap, by its posterior under the mix believed so far
    settled   the shares of the heap, shrunk to a simpler form where bags are few, are the next mix
    estimate  both in turn, from a low first guess, until nothing moves

Letters are those of tilt.py, and

    heap    (C, C)  how many instances of class k lie, by all we know, in bags labelled c

A training gathers its heap batch by batch, and lets it settle when all have been heard: neither step asks a tensor for its
value, so a captured one may take them. Nothing here knows a model or an instance's true class. Why the estimate climbs from
below: docs/explanation/tilt.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.majority.transition import UNSEEN_SHARE, Transition, class_prior, matmul_full_precision, mix_from_shares

TRANSITION_FORMS = ("one", "class", "full")
SHRINKAGE_BAGS = 10.0  # bags of a label that weigh as much as what the simpler form says of it
MIN_PROBABILITY = 1e-3  # nothing is impossible: the smallest share of a class in a mix


# -- where it begins ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def random_majority_share(size: int, classes: int) -> float:
    """The expected majority share of bags filled by lot, all classes alike: the least a label can be expected to say.

    >>> round(least_share(2, 2), 3), round(least_share(24, 10), 3), round(least_share(64, 10), 3)
    (0.75, 0.209, 0.165)
    """
    if size > 128:  # the excess over 1/C fades with the root of the size; at first a little faster
        return 1 / classes + (random_majority_share(128, classes) - 1 / classes) * math.sqrt(128 / size)
    mean = size / classes  # independent Poisson counts, given that they add up to the size, are a bag filled by lot
    pmf = np.array([math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(size + 1)])
    whole = math.exp(size * math.log(size) - size - math.lgamma(size + 1))
    expected = 0.0
    for most in range(size):
        sums = np.ones(1)
        for _ in range(classes):
            sums = np.convolve(sums, pmf[: most + 1])[: size + 1]
        expected += 1 - (sums[size] / whole if len(sums) > size else 0.0)  # P(somebody has more than that)
    return float(expected / size)


def effective_bag_size(segments: Segments, target: Tensor) -> float:
    """The size at which bags filled by lot lean as these would, of those with a label: loose instances, given as bags of one
    without, are no elections. A weight of two stands for two of them; weights that are shares of a bag, all below one, make no
    bag smaller.

    What a winner has beyond 1/C goes as the root of a bag's size, and the share is of an instance drawn from all bags: the
    mean size would make a few large bags among many small ones look steeper than by lot.
    """
    size, labelled = torch.maximum(segments.total_weight(), segments.n_instances()).double(), target.sum(1) > 0
    size = size[labelled] if bool(labelled.any()) else size
    return float((size.sum() / size.sqrt().sum().clamp_min(1e-12)) ** 2)


def min_majority_share(size: float, classes: int, counted: Tensor | None = None) -> float:
    """The share below which no estimate falls: that of bags filled by lot. Bags may be filled more evenly, by design; a weak
    classifier's answers look so too, and are far more frequent. Where some class cannot win there is no floor."""
    return 0.0 if counted is not None else random_majority_share(max(1, round(size)), classes)


def initial_share(size: float, classes: int) -> float:
    """A majority share to begin with: low, a tenth of the way from that of bags filled by lot to the whole. From below, an
    estimate climbs as far as the classifier's confidence bears it; from above it would stay wherever doubt explains it."""
    lowest = random_majority_share(max(1, round(size)), classes)
    return min(lowest + 0.1 * (1 - lowest), 1 - MIN_PROBABILITY)


def label_prior_from_counts(counts: Tensor, counted: Tensor | None = None) -> Tensor:
    """(C,) label frequencies, from how often each was seen: never is still a small chance, unless a class cannot win."""
    total = counts.sum()  # of weights that may be tiny: only where there are none is one of all taken
    counts = counts + UNSEEN_SHARE * torch.where(total > 0, total, 1.0) / len(counts)
    counts = counts if counted is None else counts * counted
    return counts / counts.sum()


# -- how it climbs ------------------------------------------------------------------------------------------------------------


def e_step(p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(C, C) the heap these instances add: row c, how many of each class lie in bags labelled c, by their posterior.

    ``target`` (N, C) may be scaled by an instance's weight; a row of zeros adds nothing.
    """
    ratio = (mix / class_prior(mix, label_prior).clamp_min(1e-30)).to(p.dtype)  # (c, k)
    label_ratio = matmul_full_precision(p, ratio.T).clamp_min(1e-30)  # (N, c), P(label = c | x) / P(label = c)
    return ratio * matmul_full_precision((target / label_ratio).T, p)


def m_step(
    expected_counts: Tensor,
    n_bags: Tensor,
    form: str = "full",
    min_share: float | Tensor = 0.0,
    counted: Tensor | None = None,
) -> Tensor:
    """(C, C) the mix of a heap. ``bags`` (C,): how many bags had each label.

        one    one majority share for all labels; the rest evenly
        class  a share for each label; the rest by one profile of the classes' frequencies
        full   every row by itself

    Bags, not instances, are what was drawn independently, so each step from a form to the next is shrunk by their number:
    own x n / (n + 10) + simpler x 10 / (n + 10). With few bags the estimate is the simple form, with many it is its own.
    By definition the label's class is the largest: no other counted class may exceed it in its row, nor may it fall below
    ``least``. Nothing is ever zero.
    """
    check_choice("form of the tilt", form, TRANSITION_FORMS)
    classes = len(expected_counts)
    total = expected_counts.sum(1)
    rows = expected_counts / total.clamp_min(1e-12)[:, None]
    share = _clamp_share(expected_counts.diagonal().sum() / total.sum().clamp_min(1e-12), min_share).clamp_min(
        1 / classes + MIN_PROBABILITY
    )
    mix = mix_from_shares(share, classes)
    if form == "one":
        return mix
    trust = (n_bags / (n_bags + SHRINKAGE_BAGS)).to(expected_counts.dtype)
    total_bags = n_bags.sum()
    off_diagonal = expected_counts * (
        1 - torch.eye(classes, dtype=expected_counts.dtype, device=expected_counts.device)
    )
    chances = (total - expected_counts.diagonal()).sum() - (
        total - expected_counts.diagonal()
    )  # of k to be somebody else's minority
    rest = off_diagonal.sum(0) / chances.clamp_min(1e-12)
    rest = rest / rest.sum().clamp_min(1e-12)
    rest = (total_bags * rest + SHRINKAGE_BAGS / classes) / (total_bags + SHRINKAGE_BAGS)
    diagonal = trust * rows.diagonal() + (1 - trust) * share
    mix = mix_from_shares(diagonal, classes, rest)
    if form == "full":
        mix = trust[:, None] * rows + (1 - trust)[:, None] * mix
    return _make_valid(mix, min_share, counted)


def _clamp_share(share: Tensor, min_share: float | Tensor) -> Tensor:
    share = torch.maximum(share, min_share) if isinstance(min_share, Tensor) else share.clamp_min(min_share)
    return share.clamp(MIN_PROBABILITY, 1 - MIN_PROBABILITY)


def _make_valid(mix: Tensor, min_share: float | Tensor, counted: Tensor | None) -> Tensor:
    """Nothing zero, the label's class the largest of its row, and at least so large."""
    mix = mix.clamp_min(MIN_PROBABILITY / len(mix))
    mix = mix / mix.sum(1, keepdim=True)
    diagonal = _clamp_share(mix.diagonal(), min_share)
    is_diagonal = torch.eye(len(mix), dtype=torch.bool, device=mix.device)
    others = mix.masked_fill(is_diagonal, 0)
    others = others * ((1 - diagonal) / others.sum(1).clamp_min(1e-12))[:, None]
    capped = torch.minimum(others, 0.98 * diagonal[:, None])  # 0.98: with no lead at all T could not be inverted
    others = capped if counted is None else torch.where(counted, capped, others)
    mix = others + torch.diag(diagonal)
    return mix / mix.sum(1, keepdim=True)


def instance_targets(segments: Segments, target: Tensor) -> Tensor:
    """(N, C) float64: the label of each instance's bag, as heavy as the instance; zeros where the bag has none, or the instance
    was removed."""
    rows = segments.broadcast(target.double())
    return rows if segments.weight is None else rows * segments.weight.double()[:, None]


def estimate_transition(
    p: Tensor,
    segments: Segments,
    target: Tensor,
    *,
    form: str = "full",
    counted: Tensor | None = None,
    start_share: float | None = None,
    max_iterations: int = 200,
) -> Transition:
    """The tilt of bags, by EM from instance probabilities ``p`` (N, C) and the bags' ``target`` (B, C) alone.

    Weights and removal come with the segments; unlabelled bags (rows of zeros) say nothing. ``p`` should come from instances
    its classifier was not trained on (validation bags, or cross-fitted): on its own training bags a classifier remembers
    labels, and the tilt comes out too steep. ``start`` is the majority share to begin with; the default is a low one.

    >>> g = torch.Generator().manual_seed(0)
    >>> label = torch.randint(3, (300,), generator=g)
    >>> y = torch.where(torch.rand(300, 10, generator=g) < 0.5, label[:, None], torch.randint(3, (300, 10), generator=g))
    >>> p = torch.eye(3)[y.flatten()]
    >>> estimate(p, Segments.from_sizes([10] * 300), torch.eye(3)[label]).share  # 0.5 + 0.5 / 3
    tensor([0.6749, 0.6523, 0.6604])
    """
    if p.ndim != 2 or p.shape[1] != target.shape[1] or len(p) != len(segments.index) or len(target) != segments.n_bags:
        raise HeadcountError(
            f"the tilt is estimated from probabilities (instances, classes) and targets (bags, classes), got shapes "
            f"{tuple(p.shape)} and {tuple(target.shape)} for {segments!r}"
        )
    classes = p.shape[1]
    n_bags = target.double().sum(0)
    if not float(n_bags.sum()) > 0:
        raise HeadcountError("no bag has a label, so there is no tilt to estimate; give at least one labelled bag")
    rows = instance_targets(segments, target)
    size = effective_bag_size(segments, target)
    min_share = min_majority_share(size, classes, counted)
    label_prior = label_prior_from_counts(rows.sum(0), counted)
    guess = initial_share(size, classes) if start_share is None else start_share
    mix = mix_from_shares(torch.tensor(guess, dtype=torch.float64), classes)
    p = p.double().masked_fill(segments.removed[:, None], 1 / classes)
    for _ in range(max_iterations):
        before, mix = mix, m_step(e_step(p, rows, mix, label_prior), n_bags, form, min_share, counted)
        if float((mix - before).abs().max()) < 1e-7:
            break
    return Transition(mix.float(), label_prior.float())

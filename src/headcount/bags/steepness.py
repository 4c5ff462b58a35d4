"""How steep the tilt of some bags is: estimated from what is said of their instances, and the bags' labels, alone.

    heaped    every instance is laid on its label's heap, by its posterior under the mix believed so far
    settled   the shares of the heap, shrunk to a simpler form where bags are few, are the next mix
    estimate  both in turn, from a low first guess, until nothing moves

Letters are those of tilt.py, and

    heap    (C, C)  how many instances of class k lie, by all we know, in bags labelled c

A training gathers its heap batch by batch, and lets it settle when all have been heard: neither step asks a tensor for its
value, so a captured one may take them. Nothing here knows a model or an instance's true class. Why the estimate climbs from
below: docs/tilt.md.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from headcount.bags.segments import Segments
from headcount.bags.tilt import SLIGHT, Tilt, mix_of, prior_of, times
from headcount.errors import HeadcountError, choose

FORMS = ("one", "class", "full")
TRUST = 10.0  # bags of a label that weigh as much as what the simpler form says of it
LEAST = 1e-3  # nothing is impossible: the smallest share of a class in a mix


# -- where it begins ----------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def least_share(size: int, classes: int) -> float:
    """The expected majority share of bags filled by lot, all classes alike: the least a label can be expected to say.

    >>> round(least_share(2, 2), 3), round(least_share(24, 10), 3), round(least_share(64, 10), 3)
    (0.75, 0.209, 0.165)
    """
    if size > 128:  # the excess over 1/C fades with the root of the size; at first a little faster
        return 1 / classes + (least_share(128, classes) - 1 / classes) * math.sqrt(128 / size)
    mean = size / classes  # independent Poisson counts, given that they add up to the size, are a bag filled by lot
    law = np.array([math.exp(j * math.log(mean) - mean - math.lgamma(j + 1)) for j in range(size + 1)])
    whole = math.exp(size * math.log(size) - size - math.lgamma(size + 1))
    expected = 0.0
    for most in range(size):
        sums = np.ones(1)
        for _ in range(classes):
            sums = np.convolve(sums, law[: most + 1])[: size + 1]
        expected += 1 - (sums[size] / whole if len(sums) > size else 0.0)  # P(somebody has more than that)
    return float(expected / size)


def size_of(segments: Segments, target: Tensor) -> float:
    """The size at which bags filled by lot lean as these would, of those with a label: loose instances, given as bags of one
    without, are no elections. A weight of two stands for two of them; weights that are shares of a bag, all below one, make no
    bag smaller.

    What a winner has beyond 1/C goes as the root of a bag's size, and the share is of an instance drawn from all bags: the
    mean size would make a few large bags among many small ones look steeper than by lot.
    """
    size, told = torch.maximum(segments.total(), segments.instances()).double(), target.sum(1) > 0
    size = size[told] if bool(told.any()) else size
    return float((size.sum() / size.sqrt().sum().clamp_min(1e-12)) ** 2)


def floor(size: float, classes: int, counted: Tensor | None = None) -> float:
    """The share below which no estimate falls: that of bags filled by lot. Bags may be filled more evenly, by design; a weak
    classifier's answers look so too, and are far more frequent. Where some class cannot win there is no floor."""
    return 0.0 if counted is not None else least_share(max(1, round(size)), classes)


def first_guess(size: float, classes: int) -> float:
    """A majority share to begin with: low, a tenth of the way from that of bags filled by lot to the whole. From below, an
    estimate climbs as far as the classifier's confidence bears it; from above it would stay wherever doubt explains it."""
    least = least_share(max(1, round(size)), classes)
    return min(least + 0.1 * (1 - least), 1 - LEAST)


def labels_of(seen: Tensor, counted: Tensor | None = None) -> Tensor:
    """(C,) label frequencies, from how often each was seen: never is still a small chance, unless a class cannot win."""
    total = seen.sum()  # of weights that may be tiny: only where there are none is one of all taken
    seen = seen + SLIGHT * torch.where(total > 0, total, 1.0) / len(seen)
    seen = seen if counted is None else seen * counted
    return seen / seen.sum()


# -- how it climbs ------------------------------------------------------------------------------------------------------------


def heaped(p: Tensor, target: Tensor, mix: Tensor, labels: Tensor) -> Tensor:
    """(C, C) the heap these instances add: row c, how many of each class lie in bags labelled c, by their posterior.

    ``target`` (N, C) may be scaled by an instance's weight; a row of zeros adds nothing.
    """
    lean = (mix / prior_of(mix, labels).clamp_min(1e-30)).to(p.dtype)  # (c, k)
    said = times(p, lean.T).clamp_min(1e-30)  # (N, c), P(label = c | x) / P(label = c)
    return lean * times((target / said).T, p)


def settled(
    heap: Tensor, bags: Tensor, form: str = "full", least: float | Tensor = 0.0, counted: Tensor | None = None
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
    choose("form of the tilt", form, FORMS)
    classes = len(heap)
    total = heap.sum(1)
    rows = heap / total.clamp_min(1e-12)[:, None]
    share = _between(heap.diagonal().sum() / total.sum().clamp_min(1e-12), least).clamp_min(1 / classes + LEAST)
    mix = mix_of(share, classes)
    if form == "one":
        return mix
    trust = (bags / (bags + TRUST)).to(heap.dtype)
    every = bags.sum()
    off = heap * (1 - torch.eye(classes, dtype=heap.dtype, device=heap.device))
    chances = (total - heap.diagonal()).sum() - (total - heap.diagonal())  # of k to be somebody else's minority
    rest = off.sum(0) / chances.clamp_min(1e-12)
    rest = rest / rest.sum().clamp_min(1e-12)
    rest = (every * rest + TRUST / classes) / (every + TRUST)
    own = trust * rows.diagonal() + (1 - trust) * share
    mix = mix_of(own, classes, rest)
    if form == "full":
        mix = trust[:, None] * rows + (1 - trust)[:, None] * mix
    return _lawful(mix, least, counted)


def _between(share: Tensor, least: float | Tensor) -> Tensor:
    share = torch.maximum(share, least) if isinstance(least, Tensor) else share.clamp_min(least)
    return share.clamp(LEAST, 1 - LEAST)


def _lawful(mix: Tensor, least: float | Tensor, counted: Tensor | None) -> Tensor:
    """Nothing zero, the label's class the largest of its row, and at least so large."""
    mix = mix.clamp_min(LEAST / len(mix))
    mix = mix / mix.sum(1, keepdim=True)
    own = _between(mix.diagonal(), least)
    eye = torch.eye(len(mix), dtype=torch.bool, device=mix.device)
    others = mix.masked_fill(eye, 0)
    others = others * ((1 - own) / others.sum(1).clamp_min(1e-12))[:, None]
    capped = torch.minimum(others, 0.98 * own[:, None])  # 0.98: with no lead at all T could not be inverted
    others = capped if counted is None else torch.where(counted, capped, others)
    mix = others + torch.diag(own)
    return mix / mix.sum(1, keepdim=True)


def witnesses(segments: Segments, target: Tensor) -> Tensor:
    """(N, C) float64: the label of each instance's bag, as heavy as the instance; zeros where the bag has none, or the instance
    was removed."""
    rows = segments.spread(target.double())
    return rows if segments.weight is None else rows * segments.weight.double()[:, None]


def estimate(
    p: Tensor,
    segments: Segments,
    target: Tensor,
    *,
    form: str = "full",
    counted: Tensor | None = None,
    start: float | None = None,
    rounds: int = 200,
) -> Tilt:
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
    if p.ndim != 2 or p.shape[1] != target.shape[1] or len(p) != len(segments.index) or len(target) != segments.bags:
        raise HeadcountError(
            f"the tilt is estimated from probabilities (instances, classes) and targets (bags, classes), got shapes "
            f"{tuple(p.shape)} and {tuple(target.shape)} for {segments!r}"
        )
    classes = p.shape[1]
    bags = target.double().sum(0)
    if not float(bags.sum()) > 0:
        raise HeadcountError("no bag has a label, so there is no tilt to estimate; give at least one labelled bag")
    rows = witnesses(segments, target)
    size = size_of(segments, target)
    least = floor(size, classes, counted)
    labels = labels_of(rows.sum(0), counted)
    guess = first_guess(size, classes) if start is None else start
    mix = mix_of(torch.tensor(guess, dtype=torch.float64), classes)
    p = p.double().masked_fill(segments.removed[:, None], 1 / classes)
    for _ in range(rounds):
        before, mix = mix, settled(heaped(p, rows, mix, labels), bags, form, least, counted)
        if float((mix - before).abs().max()) < 1e-7:
            break
    return Tilt(mix.float(), labels.float())

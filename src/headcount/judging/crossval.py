"""Cross-validation on bag labels: every bag is answered once by somebody who never saw it, nor anyone of its group.

Bag scores carry intervals (Wilson's, over bags or their groups). Nothing here sees an instance's class; ``with_truth`` is
called afterwards, where the data bring one, and changes no choice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, tilt
from headcount.data.read import Reading
from headcount.errors import HeadcountError
from headcount.judging import intervals, metrics, shares
from headcount.judging.candidates import MOST, Body
from headcount.judging.fewer import some_bags, some_rows, thinned
from headcount.models.fitted import Fitted, tempered
from headcount.training.criterion import Judgement, bag_losses, best_temperature, judge
from headcount.training.splits import bag_folds, groups_of

LISTENED = 20_000  # instances from which it is learned what a bag tells of its instances
VALID = 5  # one bag of so many, of those to train on, chooses the epoch


@dataclass(frozen=True)
class Split:
    """Bag numbers: who is learned from, who chooses the epoch, who is asked at the end."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    shared: bool = False  # there were too few bags: validation bags are training bags


@dataclass(frozen=True)
class Unit:
    """What one candidate said of one fold."""

    bags: np.ndarray  # (b,) bag numbers
    instance: Tensor  # (n, C) probabilities, bag after bag
    bag: Tensor  # (b, C) log-probabilities, not yet tempered
    seconds: float


@dataclass(frozen=True)
class Score:
    """What a candidate's answers are worth, by bag labels alone. ``loss`` is what decides (training/criterion.py)."""

    loss: float
    error: float  # standard error of the loss, over bags
    judgement: Judgement
    bag_accuracy: float
    bag_low: float
    bag_high: float
    bag_loss: float  # nll of bag labels, tempered
    temperature: float
    confusion: list[list[int]]
    instance_accuracy: float | None = None  # only where truth was brought, and only after everything was chosen
    instance_low: float | None = None
    instance_high: float | None = None


def splits(bags: Bags, folds: int, seed: int) -> list[Split]:
    """Folds over labelled bags; unlabelled ones (with what is known of their instances) are always learned from.

    Empty where bags are too few: every training part needs two different labels.
    """
    told, free = (np.flatnonzero(bags.labelled.numpy() == has) for has in (True, False))
    labelled = bags.take(told)
    folds = min(folds, groups_of(labelled))
    if folds < 2:
        return []
    fold, made = bag_folds(labelled, folds, seed), []
    for k in range(folds):
        test = told[fold == k]
        rest = np.concatenate([told[fold != k], _strangers(bags, free, test)])
        if not differs(bags.take(rest)):
            return []
        made.append(inner(bags, rest, test, seed))
    return made


def inner(bags: Bags, rest: np.ndarray, test: np.ndarray, seed: int) -> Split:
    """Part the bags to learn from into training and validation. Where that would lose a label, validation shares them."""
    told = rest[bags.labelled.numpy()[rest]]
    held = bags.take(told)
    if groups_of(held) >= VALID:
        fold = bag_folds(held, VALID, seed + 1)
        valid = told[fold == 0]
        train = np.concatenate([told[fold > 0], _strangers(bags, np.setdiff1d(rest, told), valid)])
        if len(valid) and _labels(bags, train) == _labels(bags, rest):
            return Split(np.sort(train), np.sort(valid), np.sort(test))
    return Split(np.sort(rest), np.sort(told), np.sort(test), shared=True)


def _strangers(bags: Bags, which: np.ndarray, to: np.ndarray) -> np.ndarray:
    """Those of ``which`` whose group has nobody in ``to``."""
    if bags.group is None:
        return which
    met = {bags.group[b] for b in to.tolist()}
    return np.array([b for b in which.tolist() if bags.group[b] not in met], dtype=int)


def _labels(bags: Bags, which: np.ndarray) -> set[int]:
    return set(bags.target[which].sum(0).nonzero().flatten().tolist())


def differs(bags: Bags) -> bool:
    """Whether the labels say at least two different things: nothing is learned from bags that all say the same."""
    told = bags.target[bags.labelled]
    return len(told) > 1 and bool((told != told[0]).any())


def prepared(reading: Reading, split: Split) -> tuple[Bags, Bags, Bags, Any]:
    """Training, validation and test bags, blind, over features prepared by what the training bags teach."""
    learned = reading.learn(split.train)
    bags = reading.bags(learned).blind()
    return bags.take(split.train), bags.take(split.valid), bags.take(split.test), learned


def answers(body: Body, bags: Bags, learned: Any, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(N, C) probabilities and (B, C) log-probabilities of a body."""
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    any_tilt = tilt.Tilt(torch.eye(len(bags.classes)), torch.ones(len(bags.classes)))
    said = Fitted(body, bags.classes, learned, any_tilt, counted).to(device).say(bags)
    return said.instance, said.bag


# -- scores ---------------------------------------------------------------------------------------------------------------


def score(units: Sequence[Unit], bags: Bags) -> Score:
    """The score of a candidate's units on blind bags."""
    if bags.truth is not None:
        raise HeadcountError("these bags carry truth, and choosing must not see it; pass bags.blind()")
    which = np.concatenate([u.bags for u in units])
    held = bags.take(which)
    p, log_p = torch.cat([u.instance for u in units]), torch.cat([u.bag for u in units])
    found = judge(p, held, (some_rows(held, MOST), thinned(held, MOST)))
    temperature = best_temperature(log_p, held.target)
    label, said = held.label.numpy(), log_p.argmax(1).numpy()
    right = intervals.in_groups(metrics.right_bags(held.target.numpy(), said), held.group)
    return Score(
        loss=found.loss, error=float(found.each.std() / math.sqrt(max(1, len(label) - 1))), judgement=found,
        bag_accuracy=right.value, bag_low=right.low, bag_high=right.high, temperature=temperature,
        bag_loss=float(bag_losses((log_p.double() / temperature).log_softmax(1), held.target).mean()),
        confusion=metrics.confusion(label, said, len(bags.classes)).tolist(),
    )  # fmt: skip


def overheard(found: Score, units: Sequence[Unit], bags: Bags) -> shares.Overheard:
    """Whether instances of held-out bags are answered better in the light of their bags."""
    held, rows = some_bags(bags.take(np.concatenate([u.bags for u in units])), LISTENED)
    p, judged = torch.cat([u.instance for u in units])[rows].double().clamp_min(1e-30), found.judgement
    log_p = tempered(p, judged.instance_temperature).log()
    return shares.overheard(log_p, held.segments(), held.target.double(), judged.tilt.prior.double(), held.counted)


def in_context(fitted: Fitted, units: Sequence[Unit], bags: Bags) -> list[Unit]:
    """The same answers, each instance heard with its bag."""
    made = []
    for u in units:
        p = tempered(u.instance, fitted.instance_temperature)
        made.append(replace(u, instance=fitted.heard(p, bags.take(u.bags).segments())))
    return made


def with_truth(found: Score, units: Sequence[Unit], bags: Bags) -> Score:
    """The instance accuracy of the same held-out answers, with an interval over bags. Looked at last, used for nothing."""
    assert bags.truth is not None
    held = bags.take(np.concatenate([u.bags for u in units]))
    said = torch.cat([u.instance for u in units]).argmax(1)
    assert held.truth is not None
    known = held.truth >= 0
    if not bool(known.any()):
        return found
    # bags, or their groups, are what was drawn; instances of one go wrong together
    bag = held.bag[known].numpy()
    rate = intervals.in_groups(
        (said == held.truth)[known].numpy(), bag if held.group is None else np.array(held.group)[bag]
    )
    return replace(found, instance_accuracy=rate.value, instance_low=rate.low, instance_high=rate.high)

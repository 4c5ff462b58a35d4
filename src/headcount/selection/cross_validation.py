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

from headcount.bags import Bags
from headcount.bags.splits import Split, sample_rows, subsample_bags, subsample_instances
from headcount.errors import HeadcountError
from headcount.majority import calibration, metrics
from headcount.majority.calibration import apply_temperature, bag_losses, fit_bag_temperature
from headcount.majority.criterion import CriterionResult, evaluate_criterion
from headcount.models.fitted import FittedModel
from headcount.models.network import Model
from headcount.models.predictions import estimator_probabilities
from headcount.readers import BagDataset
from headcount.selection.methods import MAX_FIT_INSTANCES, Estimator

CONTEXT_INSTANCES = 20_000  # instances from which it is learned what a bag tells of its instances


@dataclass(frozen=True)
class FoldResult:
    """What one candidate said of one fold."""

    bags: np.ndarray  # (b,) bag numbers
    instance: Tensor  # (n, C) probabilities, bag after bag
    bag: Tensor  # (b, C) log-probabilities, not yet tempered
    seconds: float


@dataclass(frozen=True)
class MethodScore:
    """What a candidate's answers are worth, by bag labels alone. ``loss`` is what decides (majority/criterion.py)."""

    loss: float
    error: float  # standard error of the loss, over bags
    criterion: CriterionResult
    bag_accuracy: float
    bag_low: float
    bag_high: float
    bag_loss: float  # nll of bag labels, tempered
    temperature: float
    confusion: list[list[int]]
    instance_accuracy: float | None = None  # only where truth was brought, and only after everything was chosen
    instance_low: float | None = None
    instance_high: float | None = None


def prepare_split(dataset: BagDataset, split: Split) -> tuple[Bags, Bags, Bags, Any]:
    """Training, validation and test bags, blind, over features prepared by what the training bags teach."""
    learned = dataset.fit_preprocessor(split.train)
    bags = dataset.to_bags(learned).blind()
    return bags.take(split.train), bags.take(split.valid), bags.take(split.test), learned


def predict_estimator(estimator: Estimator, bags: Bags, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(N, C) probabilities of instances and (B, C) log-probabilities of labels, before any calibration."""
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    return estimator_probabilities(estimator.to(device) if isinstance(estimator, Model) else estimator, bags, counted)


# -- scores ---------------------------------------------------------------------------------------------------------------


def score_method(results: Sequence[FoldResult], bags: Bags) -> MethodScore:
    """The score of a candidate's units on blind bags."""
    if bags.truth is not None:
        raise HeadcountError("these bags carry truth, and choosing must not see it; pass bags.blind()")
    which = np.concatenate([u.bags for u in results])
    held = bags.take(which)
    p, log_p = torch.cat([u.instance for u in results]), torch.cat([u.bag for u in results])
    found = evaluate_criterion(
        p, held, (sample_rows(held, MAX_FIT_INSTANCES), subsample_instances(held, MAX_FIT_INSTANCES))
    )
    temperature = fit_bag_temperature(log_p, held.target)
    label, said = held.label.numpy(), log_p.argmax(1).numpy()
    right = metrics.grouped_estimate(metrics.correct_bags(held.target.numpy(), said), held.group)
    return MethodScore(
        loss=found.loss, error=float(found.loss_per_bag.std() / math.sqrt(max(1, len(label) - 1))), criterion=found,
        bag_accuracy=right.value, bag_low=right.low, bag_high=right.high, temperature=temperature,
        bag_loss=float(bag_losses((log_p.double() / temperature).log_softmax(1), held.target).mean()),
        confusion=metrics.confusion_matrix(label, said, len(bags.classes)).tolist(),
    )  # fmt: skip


def assess_held_out_context(
    score: MethodScore, results: Sequence[FoldResult], bags: Bags
) -> calibration.ContextAssessment:
    """Whether instances of held-out bags are answered better in the light of their bags."""
    held, rows = subsample_bags(bags.take(np.concatenate([u.bags for u in results])), CONTEXT_INSTANCES)
    p, judged = torch.cat([u.instance for u in results])[rows].double().clamp_min(1e-30), score.criterion
    log_p = apply_temperature(p, judged.instance_temperature).log()
    return calibration.assess_context(
        log_p, held.segments(), held.target.double(), judged.transition.prior.double(), held.counted
    )


def apply_context(fitted: FittedModel, results: Sequence[FoldResult], bags: Bags) -> list[FoldResult]:
    """The same answers, each instance heard with its bag."""
    made = []
    for u in results:
        p = apply_temperature(u.instance, fitted.instance_temperature)
        made.append(replace(u, instance=fitted.posterior_in_context(p, bags.take(u.bags).segments())))
    return made


def add_instance_accuracy(score: MethodScore, results: Sequence[FoldResult], bags: Bags) -> MethodScore:
    """The instance accuracy of the same held-out answers, with an interval over bags. Looked at last, used for nothing."""
    assert bags.truth is not None
    held = bags.take(np.concatenate([u.bags for u in results]))
    said = torch.cat([u.instance for u in results]).argmax(1)
    assert held.truth is not None
    known = held.truth >= 0
    if not bool(known.any()):
        return score
    # bags, or their groups, are what was drawn; instances of one go wrong together
    bag = held.bag[known].numpy()
    rate = metrics.grouped_estimate(
        (said == held.truth)[known].numpy(), bag if held.group is None else np.array(held.group)[bag]
    )
    return replace(score, instance_accuracy=rate.value, instance_low=rate.low, instance_high=rate.high)

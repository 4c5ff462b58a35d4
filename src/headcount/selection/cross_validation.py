"""Cross-validation on bag labels: each bag is predicted by a model trained without its group.

Instance classes are not used; :func:`add_instance_accuracy` is called where the data bring them, after everything is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags
from headcount.bags.splits import Split, sample_rows, subsample_bags, subsample_instances
from headcount.errors import HeadcountError
from headcount.inference.evaluate import calibration_table
from headcount.io import atomic_write
from headcount.loading import open_npz
from headcount.majority import calibration, metrics
from headcount.majority.calibration import (
    ContextAssessment,
    CriterionResult,
    apply_temperature,
    bag_losses,
    evaluate_criterion,
    fit_bag_temperature,
    fit_transition_loss,
)
from headcount.majority.share_intervals import ShareModel, fit_share_model
from headcount.majority.transition import Transition
from headcount.models.fitted import FittedModel
from headcount.models.network import Model
from headcount.models.predictions import Estimator, estimator_probabilities
from headcount.readers import BagDataset
from headcount.readers.preprocessing import Preprocessor
from headcount.selection.methods import MAX_FIT_INSTANCES, FitResult

CONTEXT_INSTANCES = 20_000  # used to learn how alike the instances of a bag are
MIN_TEMPERATURE = 0.4  # of one validation part: a handful of bags, all predicted correctly, would prefer the lowest there is


@dataclass(frozen=True)
class FoldResult:
    """One method's predictions for the test bags of one fold."""

    bags: np.ndarray  # (b,) bag numbers
    instance_probabilities: Tensor  # (n, C), bag after bag
    bag_log_probabilities: Tensor  # (b, C), without temperature
    seconds: float


def save_fold(file: Path, result: FoldResult) -> None:
    instance, bag = result.instance_probabilities.numpy(), result.bag_log_probabilities.numpy()
    atomic_write(file, lambda f: np.savez(f, bags=result.bags, instance=instance, bag=bag, seconds=result.seconds))


def load_fold(file: Path, test: np.ndarray, bags: Bags) -> FoldResult | None:
    """The finished fold with these test bags; None if there is none, or a damaged one."""
    try:
        with open_npz(file, "a fold") as z:
            result = FoldResult(z["bags"], torch.from_numpy(z["instance"]), torch.from_numpy(z["bag"]), float(z["seconds"]))
            shapes = tuple((tuple(t.shape), t.dtype) for t in (result.instance_probabilities, result.bag_log_probabilities))
            rows, classes = (int(bags.sizes[test].sum()), len(test)), len(bags.classes)
            valid = np.array_equal(result.bags, test) and shapes == tuple(((n, classes), torch.float32) for n in rows)
            valid = valid and 0 <= result.instance_probabilities.min() <= result.instance_probabilities.max() < math.inf
            valid = valid and bool(result.bag_log_probabilities.isfinite().all()) and math.isfinite(result.seconds)
            return result if valid else None
    except HeadcountError:
        return None


@dataclass(frozen=True)
class MethodScore:
    """How good a method's out-of-fold predictions are. ``loss`` decides between methods (majority/calibration.py)."""

    loss: float
    error: float  # standard error of the loss, over bags
    criterion: CriterionResult
    bag_accuracy: float
    bag_low: float
    bag_high: float
    bag_loss: float  # -log P(label) of bags, at ``temperature``
    temperature: float
    confusion: list[list[int]]
    calibration: dict[str, Any]  # of the bags' predicted labels, at ``temperature``
    instance_accuracy: float | None = None  # only where the data bring instance classes
    instance_low: float | None = None
    instance_high: float | None = None


def prepare_split(dataset: BagDataset, split: Split) -> tuple[Bags, Bags, Bags, Preprocessor]:
    """Blind training, validation and test bags, with features prepared by what the training bags teach."""
    preprocessor = dataset.fit_preprocessor(split.train)
    bags = dataset.to_bags(preprocessor).blind()
    return bags.take(split.train), bags.take(split.valid), bags.take(split.test), preprocessor


def predict_estimator(estimator: Estimator, bags: Bags, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """(N, C) probabilities and (B, C) log-probabilities, without temperatures."""
    counted = None if bags.counted is None else tuple(bags.counted.tolist())
    p, log_p = estimator_probabilities(estimator.to(device) if isinstance(estimator, Model) else estimator, bags, counted)
    return p, log_p.log_softmax(1)


def score_method(results: Sequence[FoldResult], bags: Bags) -> MethodScore:
    if bags.truth is not None:
        raise HeadcountError("these bags carry truth, and the choice of a method must not see it; pass bags.blind()")
    p, log_p, test = _concatenate(results, bags)
    sample = sample_rows(test, MAX_FIT_INSTANCES), subsample_instances(test, MAX_FIT_INSTANCES)
    criterion = evaluate_criterion(p, test, sample)
    labels = test.target, test.label_noise, test.counted
    temperature = fit_bag_temperature(log_p, *labels)
    label, predicted = test.label.numpy(), log_p.argmax(1).numpy()
    correct = metrics.correct_bags(test.target.numpy(), predicted)
    accuracy = metrics.grouped_estimate(correct, test.group)
    tempered = (log_p.double() / temperature).log_softmax(1)
    return MethodScore(
        loss=criterion.loss, error=float(criterion.loss_per_bag.std() / math.sqrt(max(1, len(label) - 1))),
        criterion=criterion, bag_accuracy=accuracy.value, bag_low=accuracy.low, bag_high=accuracy.high,
        bag_loss=float(bag_losses(tempered, *labels).mean()),
        calibration=calibration_table(tempered.amax(1).exp().numpy(), correct), temperature=temperature,
        confusion=metrics.confusion_matrix(label, predicted, len(bags.classes)).tolist(),
    )  # fmt: skip


def _concatenate(results: Sequence[FoldResult], bags: Bags) -> tuple[Tensor, Tensor, Bags]:
    """The predictions of all folds, and the bags in their order."""
    p = torch.cat([r.instance_probabilities for r in results])
    log_p = torch.cat([r.bag_log_probabilities for r in results])
    return p, log_p, bags.take(np.concatenate([r.bags for r in results]))


def _context_sample(score: MethodScore, results: Sequence[FoldResult], bags: Bags) -> tuple[Bags, Tensor]:
    """Some of the bags, and log P(y | x) of their instances, without context."""
    p, _, test = _concatenate(results, bags)
    sample, rows = subsample_bags(test, CONTEXT_INSTANCES)
    return sample, apply_temperature(p[rows].double().clamp_min(1e-30), score.criterion.instance_temperature).log()


def assess_held_out_context(score: MethodScore, results: Sequence[FoldResult], bags: Bags) -> ContextAssessment:
    sample, log_p = _context_sample(score, results, bags)
    prior = score.criterion.transition.prior.double()
    return calibration.assess_context(
        log_p, sample.segments(), sample.target.double(), prior, sample.counted, sample.label_noise
    )


def add_instance_accuracy(
    score: MethodScore, results: Sequence[FoldResult], bags: Bags, in_context_of: FittedModel | None = None
) -> MethodScore:
    """The score with the instance accuracy of the same predictions, where some classes are known, and an interval over bags;
    with a model, of its predictions with the rest of each instance's bag as context."""
    p, _, test = _concatenate(results, bags)
    assert test.truth is not None
    if in_context_of is not None:
        p = apply_temperature(p, in_context_of.instance_temperature)
        p = in_context_of.posterior_in_context(p, test.segments())
    known = test.truth >= 0
    if not bool(known.any()):
        return score
    # bags, or their groups, were sampled; errors on instances of one bag are correlated
    bag = test.bag[known].numpy()
    cluster = bag if test.group is None else np.array(test.group)[bag]
    accuracy = metrics.grouped_estimate((p.argmax(1) == test.truth)[known].numpy(), cluster)
    return replace(score, instance_accuracy=accuracy.value, instance_low=accuracy.low, instance_high=accuracy.high)


class ModelCalibration(NamedTuple):
    """What held-out bags say about a model: the fields of :class:`FittedModel` of the same names."""

    transition: Transition
    temperature: float = 1.0
    instance_temperature: float = 1.0
    concentration: float | None = None
    use_context: bool = False
    share_model: ShareModel | None = None


def calibrate_on_folds(
    score: MethodScore, assessment: ContextAssessment, results: Sequence[FoldResult], bags: Bags
) -> ModelCalibration:
    """The calibration that out-of-fold predictions of all bags suggest."""
    temperatures, concentration = (score.temperature, score.criterion.instance_temperature), assessment.concentration
    sample, log_p = _context_sample(score, results, bags)
    prior, counted = score.criterion.transition.prior.double().clamp_min(1e-6), sample.counted
    shares = fit_share_model(log_p, sample.segments(), sample.target, prior / prior.sum(), concentration, counted)
    return ModelCalibration(score.criterion.transition, *temperatures, concentration, assessment.helps, shares)


def calibrate_on_validation(
    result: FitResult, bags: Bags, split: Split, device: torch.device, bags_given: bool = True
) -> ModelCalibration:
    """The calibration that the validation bags of one training suggest; only the transition, if they were training bags too, or
    the bags were not given."""
    valid = bags.take(split.valid)
    p, log_p = predict_estimator(result.estimator, valid, device)
    if split.valid_is_train or result.saw_validation or not bags_given:
        return ModelCalibration(result.transition or fit_transition_loss(p, valid)[1])
    fold = [FoldResult(split.valid, p, log_p, seconds=0.0)]
    score = score_method(fold, bags)
    if score.criterion.instance_temperature < MIN_TEMPERATURE:
        transition = fit_transition_loss(apply_temperature(p, MIN_TEMPERATURE), valid)[1]
        criterion = replace(score.criterion, instance_temperature=MIN_TEMPERATURE, transition=transition)
        score = replace(score, criterion=criterion)
    suggested = calibrate_on_folds(score, assess_held_out_context(score, fold, bags), fold, bags)
    return suggested._replace(temperature=max(MIN_TEMPERATURE, suggested.temperature), use_context=False)

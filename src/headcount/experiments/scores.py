"""Scores of a run: the only place where predictions are compared with instance labels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headcount.bags import Bags
from headcount.majority import metrics
from headcount.majority.calibration import calibrated_probabilities, calibrated_proportions, fit_context
from headcount.majority.criterion import evaluate_criterion
from headcount.majority.proportions import Proportions
from headcount.majority.transition import Transition
from headcount.models.heads import Output
from headcount.training.mpem import dissenters

REMOVALS = tuple(round(0.1 * i, 1) for i in range(1, 11))
FIGURE7_REMOVALS = (0.3, 0.5, 0.8, 1.0)  # those that the paper's figure 7 shows
N_CONTROLS = 10  # repetitions of the random control


def score_test(predictions: Output, test: Bags) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Scores for the record, and the predictions themselves for the arrays beside it."""
    truth, label, bag, n_classes = _truth(test)
    instance, bag_prediction = predictions.instance.argmax(1).numpy(), predictions.bag.argmax(1).numpy()
    confusion = metrics.confusion_matrix(truth, instance, n_classes)
    share_difference = metrics.share_difference(truth, instance, label, bag)
    data = {
        "scores": {
            "instance_accuracy": metrics.instance_accuracy(truth, instance),
            "bag_accuracy": metrics.bag_accuracy(label, bag_prediction),
            "consistency_rate": _or_none(metrics.consistency_rate(label, bag_prediction, instance, bag, n_classes)),
            "miou": metrics.mean_iou(confusion),
            "miou_usual": metrics.mean_iou(confusion, balanced=False),
            "share_difference": float(np.nanmean(share_difference)),
        },
        "confusion": confusion.tolist(),
        "share_difference": [round(float(v), 4) for v in share_difference],
    }
    arrays = {
        "test_index": test.index.cpu().numpy(),
        "test_offsets": test.offsets.cpu().numpy(),
        "test_label": label,
        "test_bag_said": bag_prediction.astype(np.int16),
        "test_truth": truth.astype(np.int16),
        "test_said": instance.astype(np.int16),
        "test_confidence": predictions.instance.softmax(1).amax(1).numpy().astype(np.float32),
    }
    return data, arrays


def score_transition(
    transition: Transition, predictions: Output, train: Bags, valid: Bags, test: Bags, valid_predictions: Output
) -> dict[str, Any]:
    """The estimated transition beside the true one, and the gain from using the rest of a bag as context.

    ``valid_predictions`` are those for the validation bags, to which the calibration is fitted.
    """
    truth, label, bag, n_classes = _truth(train)
    counts = metrics.confusion_matrix(label[bag], truth, n_classes)  # a row per label
    true_mix = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    truth, _, bag, _ = _truth(test)
    true_shares = metrics.count_votes(truth, bag, len(test), n_classes)
    true_shares = true_shares / np.maximum(true_shares.sum(1, keepdims=True), 1)

    context = fit_context(valid_predictions.instance, valid.blind())
    in_context = calibrated_probabilities(context, predictions.instance, test.blind(), use_context=True)
    labelled, unlabelled = (
        calibrated_proportions(context, predictions.instance, test.blind(), use_labels=use_labels)
        for use_labels in (True, False)
    )
    mean_probability = test.segments().to("cpu").mean(predictions.instance.softmax(1)).numpy()
    criterion = evaluate_criterion(valid_predictions.instance.softmax(1), valid.blind().to("cpu"))
    condition = transition.condition_number
    return {
        "share": [round(float(v), 4) for v in transition.share],
        "true_share": [round(float(v), 4) for v in np.diag(true_mix)],
        "criterion": round(criterion.loss, 5),  # of the validation bags
        "mix_error": _mean_error(transition.mix.cpu().numpy(), true_mix),
        "condition": round(condition, 3) if math.isfinite(condition) else None,
        "temperature": round(context.temperature, 3),
        "context_helps": context.helps,
        "context_instance_accuracy": metrics.instance_accuracy(truth, in_context.argmax(1).numpy()),
        "shares_error": _mean_error(mean_probability, true_shares),
        "shares_error_in_context": _mean_error(labelled.share.numpy(), true_shares),
        "shares_inside": _coverage(labelled, true_shares),  # 90 % intervals; the test bags' labels are known here
        "shares_error_unlabelled": _mean_error(unlabelled.share.numpy(), true_shares),
        "shares_inside_unlabelled": _coverage(unlabelled, true_shares),
    }


def _mean_error(estimated: np.ndarray, true: np.ndarray) -> float:
    return round(float(np.abs(estimated - true).mean()), 5)


def _coverage(proportions: Proportions, true_shares: np.ndarray) -> float:
    """The fraction of true shares inside their intervals."""
    low, high = proportions.low.numpy() - 1e-6, proportions.high.numpy() + 1e-6
    return round(float(((true_shares >= low) & (true_shares <= high)).mean()), 4)


def score_removal(removed: Tensor, train: Bags) -> dict[str, Any]:
    """How well MPEM removed: purity, agreement (with its random control), the majority's share before and after."""
    truth, label, bag, n_classes = _truth(train)
    mask = removed.cpu().numpy()
    controls = [metrics.random_removal(bag, mask, np.random.default_rng(i)) for i in range(N_CONTROLS)]
    control_rates = [metrics.agreement_rate(truth, label, bag, control, n_classes) for control in controls]
    return {
        "removed": int(mask.sum()),
        "purity": _or_none(metrics.purity(truth, label, bag, mask)),
        "agreement": metrics.agreement_rate(truth, label, bag, mask, n_classes),
        "agreement_random": round(float(np.mean(control_rates)), 6),
        "share_before": round(float(np.nanmean(metrics.label_share(truth, label, bag))), 6),
        "share_after": round(float(np.nanmean(metrics.label_share(truth, label, bag, ~mask))), 6),
    }


def score_removal_sweep(votes: Mapping[str, Tensor], train: Bags) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What each removal would do to the training bags, by a network's votes: figures 7 to 9 need no further training."""
    truth, label, bag, _ = _truth(train)
    vote, distance = votes["train_said"].long(), votes["train_euclidean_correct"]
    sweep: dict[str, list[Any]] = {"removal": list(REMOVALS)}
    # the share of the label's class, true and as voted: their difference is figure 6 on training bags
    both = {"before": truth, "said": vote.cpu().numpy()}
    arrays = {f"train_share_{k}": metrics.label_share(v, label, bag).astype(np.float32) for k, v in both.items()}
    for removal in REMOVALS:
        removed = dissenters(distance, vote, train.bag, train.label, removal)
        for name, value in score_removal(removed, train).items():
            sweep.setdefault(name, []).append(value if value is None else round(value, 5))
        if removal in FIGURE7_REMOVALS:
            after = metrics.label_share(truth, label, bag, ~removed.cpu().numpy())
            arrays[f"train_share_after_{removal}"] = after.astype(np.float32)
    return {"sweep": sweep}, arrays


def _truth(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Class and bag of each instance, label of each bag, number of classes."""
    assert bags.truth is not None, "scoring needs truth"
    return bags.truth.cpu().numpy(), bags.label.cpu().numpy(), bags.bag.cpu().numpy(), len(bags.classes)


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value

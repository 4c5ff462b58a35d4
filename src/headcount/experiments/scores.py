"""Scores: what a run's answers are worth. Only here do answers meet the truth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from headcount.bags import Bags
from headcount.majority import metrics
from headcount.majority.context import calibrated_probabilities, calibrated_proportions, fit_context
from headcount.majority.criterion import evaluate_criterion
from headcount.majority.proportions import Proportions
from headcount.majority.transition import Transition
from headcount.models.heads import Output
from headcount.training.mpem import dissenters

REMOVALS = tuple(round(0.1 * i, 1) for i in range(1, 11))
FIGURE7_REMOVALS = (0.3, 0.5, 0.8, 1.0)  # the removals of the paper's figure 7
N_CONTROLS = 10  # seeds of the random control


def score_test(predictions: Output, test: Bags) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Scores for the record, and the answers themselves for the arrays beside it."""
    true, label, bag, classes = _truth(test)
    instance, bag_said = predictions.instance.argmax(1).numpy(), predictions.bag.argmax(1).numpy()
    counts = metrics.confusion_matrix(true, instance, classes)
    off = metrics.share_difference(true, instance, label, bag)
    body = {
        "scores": {
            "instance_accuracy": metrics.instance_accuracy(true, instance),
            "bag_accuracy": metrics.bag_accuracy(label, bag_said),
            "consistency_rate": _or_none(metrics.consistency_rate(label, bag_said, instance, bag, classes)),
            "miou": metrics.mean_iou(counts),
            "miou_usual": metrics.mean_iou(counts, balanced=False),
            "share_difference": float(np.nanmean(off)),
        },
        "confusion": counts.tolist(),
        "share_difference": [round(float(v), 4) for v in off],
    }
    arrays = {
        "test_index": test.index.cpu().numpy(),
        "test_offsets": test.offsets.cpu().numpy(),
        "test_label": label,
        "test_bag_said": bag_said.astype(np.int16),
        "test_truth": true.astype(np.int16),
        "test_said": instance.astype(np.int16),
        "test_confidence": predictions.instance.softmax(1).amax(1).numpy().astype(np.float32),
    }
    return body, arrays


def score_transition(
    transition: Transition, predictions: Output, train: Bags, valid: Bags, test: Bags, valid_predictions: Output
) -> dict[str, Any]:
    """What was estimated of the bags beside what is true of them: the tilt; and what the context of a bag is worth.

    ``heard``: what was said of the validation bags, from which the context is learned."""
    true, label, bag, classes = _truth(train)
    hits = metrics.confusion_matrix(label[bag], true, classes)  # a row per label
    mix = hits / np.maximum(hits.sum(1, keepdims=True), 1)
    context = fit_context(valid_predictions.instance, valid.blind())
    answered = calibrated_probabilities(context, predictions.instance, test.blind(), use_context=True)
    counted, unseen = (
        calibrated_proportions(context, predictions.instance, test.blind(), use_labels=known) for known in (True, False)
    )
    truth, _, where, _ = _truth(test)
    real = metrics.count_votes(truth, where, len(test), classes)
    real = real / np.maximum(real.sum(1, keepdims=True), 1)
    plain = test.segments().to("cpu").mean(predictions.instance.softmax(1)).numpy()
    return {
        "share": [round(float(v), 4) for v in transition.share],
        "true_share": [round(float(v), 4) for v in np.diag(mix)],
        "criterion": round(
            evaluate_criterion(valid_predictions.instance.softmax(1), valid.blind().to("cpu")).loss, 5
        ),  # of the validation bags
        "mix_error": round(float(np.abs(transition.mix.cpu().numpy() - mix).mean()), 5),
        "condition": round(transition.condition_number, 3) if math.isfinite(transition.condition_number) else None,
        "temperature": round(context.temperature, 3),
        "context_helps": context.helps,
        "context_instance_accuracy": metrics.instance_accuracy(truth, answered.argmax(1).numpy()),
        "shares_error": round(float(np.abs(plain - real).mean()), 5),
        "shares_error_in_context": round(float(np.abs(counted.share.numpy() - real).mean()), 5),
        "shares_inside": _inside(counted, real),  # intervals of 90 %, the test bags' labels known, as in the line above
        "shares_error_unlabelled": round(float(np.abs(unseen.share.numpy() - real).mean()), 5),
        "shares_inside_unlabelled": _inside(unseen, real),
    }


def _inside(counted: Proportions, real: np.ndarray) -> float:
    """Which part of the true shares lies inside its interval."""
    inside = (real >= counted.low.numpy() - 1e-6) & (real <= counted.high.numpy() + 1e-6)
    return round(float(inside.mean()), 4)


def score_removal(removed: Tensor, train: Bags) -> dict[str, Any]:
    """How well MPEM removed: purity, agreement (with its random control), the majority's share before and after."""
    true, label, bag, classes = _truth(train)
    gone = removed.cpu().numpy()
    controls = [metrics.random_removal(bag, gone, np.random.default_rng(i)) for i in range(N_CONTROLS)]
    agree = [metrics.agreement_rate(true, label, bag, control, classes) for control in controls]
    return {
        "removed": int(gone.sum()),
        "purity": _or_none(metrics.purity(true, label, bag, gone)),
        "agreement": metrics.agreement_rate(true, label, bag, gone, classes),
        "agreement_random": round(float(np.mean(agree)), 6),
        "share_before": round(float(np.nanmean(metrics.label_share(true, label, bag))), 6),
        "share_after": round(float(np.nanmean(metrics.label_share(true, label, bag, ~gone))), 6),
    }


def score_removal_sweep(votes: Mapping[str, Tensor], train: Bags) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What each removal would do to the training bags, by a network's votes: figures 7 to 9 need no further training."""
    true, label, bag, _ = _truth(train)
    said, distance = votes["train_said"].long(), votes["train_euclidean_correct"]
    found: dict[str, list[Any]] = {"removal": list(REMOVALS)}
    # of the label's class, as it is and as it is said: their difference is figure 6 asked of training bags
    both = {"before": true, "said": said.cpu().numpy()}
    arrays = {f"train_share_{k}": metrics.label_share(of, label, bag).astype(np.float32) for k, of in both.items()}
    for removal in REMOVALS:
        removed = dissenters(distance, said, train.bag, train.label, removal)
        for name, value in score_removal(removed, train).items():
            found.setdefault(name, []).append(value if value is None else round(value, 5))
        if removal in FIGURE7_REMOVALS:
            after = metrics.label_share(true, label, bag, ~removed.cpu().numpy())
            arrays[f"train_share_after_{removal}"] = after.astype(np.float32)
    return {"sweep": found}, arrays


def _truth(bags: Bags) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    assert bags.truth is not None, "scoring needs truth"
    return bags.truth.cpu().numpy(), bags.label.cpu().numpy(), bags.bag.cpu().numpy(), len(bags.classes)


def _or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(value) else value

"""What the validation bags of one training tell of its model: the tilt, the temperatures, and how alike bags are.

``headcount fit`` learns the same from every bag, by cross-validation (selection/cross_validation.py); MajorityClassifier trains once, and
has a fifth of the bags for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headcount.bags import Bags
from headcount.bags.splits import Split
from headcount.majority.calibration import apply_temperature
from headcount.majority.criterion import fit_transition_loss
from headcount.selection import cross_validation
from headcount.selection.cross_validation import FoldResult
from headcount.selection.methods import FitResult

# Under a lower temperature answers are all but certain, and so are the intervals of shares. A handful of bags, all of them said
# right, would prefer the lowest there is.
MIN_TEMPERATURE = 0.4


def calibrate_on_validation(
    result: FitResult, bags: Bags, split: Split, device: torch.device, bags_given: bool = True
) -> dict[str, Any]:
    """Of a :class:`Fitted`: its tilt and, where validation bags are bags (``apart``) and were not learned from, the
    temperatures and ``alike``."""
    valid = bags.take(split.valid)
    p, log_p = cross_validation.predict_estimator(result.estimator, valid, device)
    if split.valid_is_train or not bags_given:
        return {"transition": result.transition or fit_transition_loss(p, valid)[1]}
    strangers = [FoldResult(split.valid, p, log_p, seconds=0.0)]
    score = cross_validation.score_method(strangers, bags)
    if score.criterion.instance_temperature < MIN_TEMPERATURE:
        mild = fit_transition_loss(apply_temperature(p, MIN_TEMPERATURE), valid)[1]
        score = replace(
            score, criterion=replace(score.criterion, instance_temperature=MIN_TEMPERATURE, transition=mild)
        )
    return {
        "transition": score.criterion.transition,
        "temperature": max(MIN_TEMPERATURE, score.temperature),
        "instance_temperature": score.criterion.instance_temperature,
        "concentration": cross_validation.assess_held_out_context(score, strangers, bags).concentration,
    }

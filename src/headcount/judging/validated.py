"""What the validation bags of one training tell of its model: the tilt, the temperatures, and how alike bags are.

``headcount fit`` learns the same from every bag, by cross-validation (judging/crossval.py); MajorityClassifier trains once, and
has a fifth of the bags for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from headcount.bags import Bags
from headcount.data.learned import Learned
from headcount.judging import crossval
from headcount.judging.candidates import Trained
from headcount.judging.crossval import Split, Unit
from headcount.models.fitted import tempered
from headcount.training.criterion import label_loss

# Under a lower temperature answers are all but certain, and so are the intervals of shares. A handful of bags, all of them said
# right, would prefer the lowest there is.
BOLDEST = 0.4


def validated(trained: Trained, bags: Bags, split: Split, device: torch.device, apart: bool = True) -> dict[str, Any]:
    """Of a :class:`Fitted`: its tilt and, where validation bags are bags (``apart``) and were not learned from, the
    temperatures and ``alike``."""
    valid = bags.take(split.valid)
    p, log_p = crossval.answers(trained.body, valid, Learned(bags.pool.kind, shape=bags.pool.shape), device)
    if split.shared or not apart:
        return {"tilt": trained.tilt or label_loss(p, valid)[1]}
    strangers = [Unit(split.valid, p, log_p, seconds=0.0)]
    score = crossval.score(strangers, bags)
    if score.judgement.instance_temperature < BOLDEST:
        mild = label_loss(tempered(p, BOLDEST), valid)[1]
        score = replace(score, judgement=replace(score.judgement, instance_temperature=BOLDEST, tilt=mild))
    return {
        "tilt": score.judgement.tilt,
        "temperature": max(BOLDEST, score.temperature),
        "instance_temperature": score.judgement.instance_temperature,
        "alike": crossval.overheard(score, strangers, bags).alike,
    }

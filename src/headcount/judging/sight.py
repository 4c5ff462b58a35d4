"""Sight: how bags of pictures are seen before a fit, where somebody chose a backbone of timm or torchvision for them.

Frozen, it is an eye (models/eye.py): each picture is looked at once, and what is fitted, cross-validated and compared are the
candidates for features. Trained, it is where the networks for pictures start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from headcount.bags import Bags, Pool
from headcount.data.read import Reading
from headcount.errors import HeadcountError
from headcount.models import vision
from headcount.models.eye import Eye
from headcount.training.views import FEATURE_VIEWS

Keep = Callable[[Eye, Bags], Bags]  # bags of pictures -> the same bags over features


class Sight(NamedTuple):
    """The bags that are fitted to, over features where there is an eye; and what stands before or under the fit."""

    bags: Bags
    start: vision.Start | None = None  # a backbone that is trained
    eye: Eye | None = None  # on the CPU
    facts: dict[str, Any] | None = None  # of the eye

    def over(self, reading: Reading) -> Reading:
        """The reading these bags came from, as it is fitted to."""
        if self.eye is None or self.facts is None:
            return reading
        said = "{backbone} (frozen, weights {weights}) makes {features:,} features of each picture".format(**self.facts)
        columns = replace(reading.columns, kind="features", shape=(self.eye.dim,))
        return replace(reading, laid=self.bags, columns=columns, described=[*reading.described, said])


def in_memory(eye: Eye, bags: Bags) -> Bags:
    """Features of all pictures at once, kept nowhere."""
    return replace(bags, pool=Pool(torch.cat(list(eye.look(bags.pool)))))


def sight(
    bags: Bags,
    backbone: str | None,
    device: torch.device,
    *,
    frozen: bool | None = None,
    weights: str | None = None,
    size: int | None = None,
    views: str | None = None,
    keep: Keep = in_memory,
    tell: Callable[[str], None] | None = None,
) -> Sight:
    """The bags as this backbone is to see them; as they are, if the backbone is one of ours. ``keep`` makes the features."""
    vision.check_choice(backbone, frozen, weights, size)
    if backbone is None or not vision.foreign(backbone):
        return Sight(bags)
    start = vision.chosen(backbone, bags.pool.shape, frozen=frozen, weights=weights, size=size, tell=tell)
    if not start.frozen:
        return Sight(bags, start)
    if views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {views!r} change pictures, and a frozen backbone looks at each once; leave views out, or train it"
        )
    eye = Eye.of(start, bags.pool.shape).to(device)
    return Sight(keep(eye, bags), None, eye.cpu(), {**start.facts, "features": eye.dim})

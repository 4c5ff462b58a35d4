"""Sight: how bags of pictures are seen before a fit, where somebody chose a backbone of timm or torchvision for them.

Frozen, it is an eye (models/frozen_backbone.py): each picture is looked at once, and what is fitted, cross-validated and compared are the
candidates for features. Trained, it is where the networks for pictures start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.models import library_backbones
from headcount.models.frozen_backbone import FrozenBackbone
from headcount.readers import BagDataset
from headcount.training.augment import FEATURE_VIEWS

ExtractFeatures = Callable[[FrozenBackbone, Bags], Bags]  # bags of pictures -> the same bags over features


class BackboneSetup(NamedTuple):
    """The bags that are fitted to, over features where there is an eye; and what stands before or under the fit."""

    bags: Bags
    pretrained: library_backbones.PretrainedBackbone | None = None  # a backbone that is trained
    frozen_backbone: FrozenBackbone | None = None  # on the CPU
    metadata: dict[str, Any] | None = None  # of the eye

    def apply_to(self, dataset: BagDataset) -> BagDataset:
        """The reading these bags came from, as it is fitted to."""
        if self.frozen_backbone is None or self.metadata is None:
            return dataset
        said = "{backbone} (frozen, weights {weights}) makes {features:,} features of each picture".format(
            **self.metadata
        )
        columns = replace(dataset.schema, kind="features", shape=(self.frozen_backbone.dim,))
        return replace(dataset, bags=self.bags, schema=columns, description=[*dataset.description, said])


def extract_in_memory(frozen_backbone: FrozenBackbone, bags: Bags) -> Bags:
    """Features of all pictures at once, kept nowhere."""
    return replace(bags, pool=Pool(torch.cat(list(frozen_backbone.iter_features(bags.pool)))))


def prepare_backbone(
    bags: Bags,
    backbone: str | None,
    device: torch.device,
    *,
    frozen: bool | None = None,
    weights: str | None = None,
    size: int | None = None,
    views: str | None = None,
    extract: ExtractFeatures = extract_in_memory,
    log: Callable[[str], None] | None = None,
) -> BackboneSetup:
    """The bags as this backbone is to see them; as they are, if the backbone is one of ours. ``keep`` makes the features."""
    library_backbones.check_backbone_options(backbone, frozen, weights, size)
    if backbone is None or not library_backbones.is_library_backbone(backbone):
        return BackboneSetup(bags)
    start = library_backbones.load_pretrained(
        backbone, bags.pool.shape, frozen=frozen, weights=weights, size=size, log=log
    )
    if not start.frozen:
        return BackboneSetup(bags, start)
    if views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {views!r} change pictures, and a frozen backbone looks at each once; leave views out, or train it"
        )
    eye = FrozenBackbone.from_pretrained(start, bags.pool.shape).to(device)
    return BackboneSetup(extract(eye, bags), None, eye.cpu(), {**start.metadata, "features": eye.dim})

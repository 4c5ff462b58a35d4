"""Which network is trained on bags like these, how long, and what its backbone starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from headcount.bags import Bags, Pool, splits
from headcount.errors import HeadcountError, check_choice
from headcount.models import library_backbones
from headcount.models.backbones import BACKBONES
from headcount.models.heads import find_head, head_options
from headcount.models.heads.chunked_head import SumHead
from headcount.models.library_backbones import PretrainedBackbone
from headcount.models.network import FrozenBackbone, ModelConfig
from headcount.models.predictions import LazyFeaturePool
from headcount.readers import BagDataset
from headcount.training.augment import FEATURE_VIEWS
from headcount.training.config import TrainConfig

CHUNK_INSTANCES = 16_384  # of a large bag, processed at once
MLP_OPTIONS = {"hidden": 128, "layers": 2, "dropout": 0.3}
ExtractFeatures = Callable[[FrozenBackbone, Bags], Bags]  # bags of images -> the same bags over features


@dataclass(frozen=True)
class NetworkOptions:
    """What a user may choose about networks; None: chosen by the bags. ``options`` are the head's."""

    backbone: str | None = None
    views: str | None = None
    epochs: int | None = None
    options: dict[str, Any] | None = None
    pretrained: PretrainedBackbone | None = None  # a library's backbone that is trained further


def network_configs(head: str, bags: Bags, chosen: NetworkOptions) -> tuple[ModelConfig, TrainConfig]:
    """A network with this head for these bags: enough steps to learn from them, few enough to wait for."""
    images, sizes = bags.pool.kind == "images", bags.sizes.double()
    step_instances = 512 if images else 1024
    batch_bags = int(min(max(2, min(step_instances / float(sizes.mean()), len(bags) / 4)), 64))
    steps = max(-(-len(bags) // batch_bags), len(bags.index) / step_instances)  # of an epoch
    # enough epochs for 1500 (500) steps, at least 20 or those of 4000 steps, at most 100 (80)
    fewest = int(min(20, max(3, -(-4000 // steps))))
    epochs = int(min(max(fewest, -(-(1500 if images else 500) // steps)), 100 if images else 80))
    backbone, backbone_options = _default_backbone(bags, chosen)
    chunked = not images and float(sizes.max()) > 4 * CHUNK_INSTANCES and issubclass(find_head(head), SumHead)
    has_weights = chosen.pretrained is not None and chosen.pretrained.state is not None
    options = _tilt_defaults(bags) if head == "tilt" else {}
    if chosen.options and set(chosen.options) <= set(head_options(head)):  # else they belong to another head
        options = {**options, **chosen.options}
    options, backbone_options = tuple(options.items()), tuple(backbone_options.items())
    model_config = ModelConfig.for_bags(bags, head=head, options=options, backbone=backbone, backbone_options=backbone_options)
    train_config = TrainConfig(
        epochs=chosen.epochs if chosen.epochs is not None else epochs, batch_bags=batch_bags,
        batch_instances=step_instances, chunk_instances=CHUNK_INSTANCES if chunked else 0, optimizer="adamw",
        lr=(1e-4 if has_weights else 1e-3) if images else 2e-3,  # pretrained weights change slowly
        weight_decay=0.05 if images else 0.5, decay="weights", schedule="cosine", warmup=0.05, selection="mean",
        views=chosen.views or ("digit" if images else "feature"),
    )  # fmt: skip
    return model_config, train_config


def _default_backbone(bags: Bags, chosen: NetworkOptions) -> tuple[str, dict[str, Any]]:
    """The backbone chosen, or the default one, with options for instances like these."""
    if chosen.pretrained is not None:
        return chosen.pretrained.name, chosen.pretrained.options
    images = bags.pool.kind == "images"
    side = min(bags.pool.shape[:2]) if images else 0
    small = images and 8 <= side <= 64  # a quarter of the time (benchmarks/pictures.py)
    name = chosen.backbone or ("quick" if small else "resnet18" if images else "mlp")
    stem = "small" if side <= 20 else "pool" if side <= 64 else "paper"
    width = {"width": 32 if side <= 20 else 64}
    defaults = {"quick": width, "resnet18": {"stem": stem, **width}, "mlp": MLP_OPTIONS}
    return check_choice("backbone", name, BACKBONES), defaults.get(name, {})


def _tilt_defaults(bags: Bags) -> dict[str, Any]:
    largest = int(bags.sizes.max())
    if largest == 1:  # bag labels are instance labels: there is no vote and nothing to estimate
        return {"bag": 0.0, "teach": 0.0}
    if largest > splits.MAX_BAG_SIZE and bags.pool.kind != "images":  # without the vote, pieces of a bag serve as well
        return {"over": "instances", "bag": 0.0, "piece": len(bags) / len(splits.split_large_bags(bags))}
    return {}


class BackboneSetup(NamedTuple):
    """The bags to fit to and the backbone in front of or under the model."""

    bags: Bags  # over features, where the backbone is frozen
    pretrained: PretrainedBackbone | None = None  # a backbone that is trained further
    frozen_backbone: FrozenBackbone | None = None  # on the CPU
    metadata: dict[str, Any] | None = None  # of the frozen backbone

    def apply_to(self, dataset: BagDataset) -> BagDataset:
        """The dataset these bags came from, over the features."""
        if self.frozen_backbone is None or self.metadata is None:
            return dataset
        schema = replace(dataset.schema, kind="features", shape=(self.frozen_backbone.dim,))
        line = "{backbone} (frozen, weights {weights}) computes {features:,} features of each image".format(**self.metadata)
        return replace(dataset, bags=self.bags, schema=schema, description=[*dataset.description, line])


def extract_in_memory(frozen_backbone: FrozenBackbone, bags: Bags) -> Bags:
    return replace(bags, pool=Pool(LazyFeaturePool(bags.pool, frozen_backbone).take(torch.arange(len(bags.pool)))))


def prepare_backbone(
    bags: Bags, backbone: str | None, device: torch.device, *, frozen: bool | None = None, weights: str | None = None,
    size: int | None = None, views: str | None = None, extract: ExtractFeatures = extract_in_memory,
    log: Callable[[str], None] | None = None,
) -> BackboneSetup:  # fmt: skip
    """Load a backbone of timm or torchvision. Frozen, its features are computed once by ``extract``, and any method for features
    is fitted to them; otherwise networks start from it. With any other backbone nothing changes."""
    library_backbones.check_backbone_options(backbone, frozen, weights, size)
    if backbone is None or not library_backbones.is_library_backbone(backbone):
        return BackboneSetup(bags)
    pretrained = library_backbones.load_pretrained(
        backbone, bags.pool.shape, frozen=frozen, weights=weights, size=size, log=log
    )
    if not pretrained.frozen:
        return BackboneSetup(bags, pretrained)
    if views not in FEATURE_VIEWS:
        raise HeadcountError(
            f"views {views!r} augment images, but the features of a frozen backbone are computed once; leave views out, or "
            "train the backbone"
        )
    network = FrozenBackbone.from_pretrained(pretrained, bags.pool.shape).to(device)
    features = extract(network, bags)
    return BackboneSetup(features, None, network.cpu(), {**pretrained.metadata, "features": network.dim})

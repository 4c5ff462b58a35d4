"""The recipe of a network for bags like these: enough steps to learn, few enough to wait for."""

from __future__ import annotations

from typing import Any

from headcount.bags import Bags, splits
from headcount.bags.splits import split_large_bags
from headcount.experiments.recipe import Recipe
from headcount.models.heads import SumHead, find_head, head_options
from headcount.models.library_backbones import PretrainedBackbone

CHUNK_INSTANCES = 16_384  # instances of a large bag in work at once
_MLP_OPTIONS = {"hidden": 128, "layers": 2, "dropout": 0.3}


def network_recipe(
    head: str,
    bags: Bags,
    backbone: str | None,
    views: str | None,
    epochs: int | None,
    options: dict[str, Any],
    start: PretrainedBackbone | None = None,
) -> Recipe:
    """A network with this head; what is None, or not said, follows from the bags."""
    pictures, sizes = bags.pool.kind == "images", bags.sizes.double()
    room = 512 if pictures else 1024  # instances in a step
    batch = int(min(max(2, min(room / float(sizes.mean()), len(bags) / 4)), 64))
    steps = -(-len(bags) // batch)
    few, many = (20, 100) if pictures else (20, 80)
    backbone, own = (start.name, start.options) if start else _default_backbone(bags, backbone)
    taught = start is not None and start.state is not None
    # they are the named head's, not the baseline's
    options = options if set(options) <= set(head_options(head)) else {}
    options = {**(_tilt_defaults(bags) if head == "tilt" else {}), **options}
    whole = pictures or float(sizes.max()) <= 4 * CHUNK_INSTANCES or not issubclass(find_head(head), SumHead)
    steps = max(steps, len(bags.index) / room)
    few = int(min(few, max(3, -(-4000 // steps))))
    return Recipe(
        source="digits",  # never loaded: the bags are somebody's own
        head=head,
        options=tuple(options.items()),
        backbone=backbone,
        backbone_options=tuple(own.items()),
        epochs=epochs if epochs is not None else int(min(max(few, -(-(1500 if pictures else 500) // steps)), many)),
        batch_bags=batch,
        batch_instances=room,
        chunk_instances=0 if whole else CHUNK_INSTANCES,
        optimizer="adamw",
        lr=(1e-4 if taught else 1e-3) if pictures else 2e-3,  # weights that know something are not to forget it
        weight_decay=0.05 if pictures else 0.5,
        decay="weights",
        schedule="cosine",
        warmup=0.05,
        views=views or ("digit" if pictures else "feature"),
        selection="mean",
    )


def _default_backbone(bags: Bags, name: str | None) -> tuple[str, dict[str, Any]]:
    """A backbone of ours, the usual one where none is named, and its options for instances like these."""
    pictures = bags.pool.kind == "images"
    side = min(bags.pool.shape[:2]) if pictures else 0
    small = pictures and 8 <= side <= 64  # benchmarks/pictures.py: a quarter of the time
    stem = "small" if side <= 20 else "pool" if side <= 64 else "paper"
    width = {"width": 32 if side <= 20 else 64}
    usual = {"quick": width, "resnet18": {"stem": stem, **width}, "mlp": _MLP_OPTIONS}
    name = name or ("quick" if small else "resnet18" if pictures else "mlp")
    return name, usual.get(name, {})


def _tilt_defaults(bags: Bags) -> dict[str, Any]:
    """What the tilt head need not do for bags of one, and cannot for the largest."""
    most = int(bags.sizes.max())
    if most == 1:  # the labels are the instances' own: nothing to vote on, nothing to guess
        return {"bag": 0.0, "teach": 0.0}
    if most > splits.MAX_BAG_SIZE and bags.pool.kind != "images":  # nobody votes: pieces of a bag do as well
        return {"over": "instances", "bag": 0.0, "piece": len(bags) / len(split_large_bags(bags))}
    return {}

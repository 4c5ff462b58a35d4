"""What is looked at once, before a training begins: do model, bags and recipe belong together, is there anything to learn?"""

from __future__ import annotations

import copy

import torch

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.models.heads import HEADS, Head, Output
from headcount.models.network import Model
from headcount.training.augment import FEATURE_VIEWS
from headcount.training.config import TrainConfig
from headcount.training.loader import BagLoader


def check_compatible(model: Model, train: Bags, valid: Bags, config: TrainConfig) -> None:
    """Refuse what does not belong together, and bags from which nothing can be learned or chosen."""
    for what, bags in (("training", train), ("validation", valid)):
        _fitting(model, what, bags)
    if train.pool.kind == "features" and config.views not in FEATURE_VIEWS:
        there = ", ".join(filter(None, FEATURE_VIEWS))
        raise HeadcountError(
            f"views={config.views} change pictures, and the instances are features; give one of {there}"
        )
    if not train.target.any() and train.known is None:
        raise HeadcountError("no training bag has a label, so there is nothing to learn from; label some")
    if not valid.target.any() and config.selection != "last":
        raise HeadcountError(
            f"no validation bag has a label to choose an epoch by; label some, or give selection=last (it is "
            f"{config.selection})"
        )


def _fitting(model: Model, what: str, bags: Bags) -> None:
    if not len(bags):
        raise HeadcountError(f"there are no {what} bags; give at least one")
    if bags.pool.shape != tuple(model.config.shape):
        raise HeadcountError(
            f"an instance of the {what} bags has shape {bags.pool.shape}, the model was built for {model.config.shape}"
        )
    if bags.classes != model.config.classes:
        theirs, ours = (", ".join(classes[:8]) for classes in (bags.classes, model.config.classes))
        raise HeadcountError(
            f"the {what} bags have the classes {theirs}, the model {ours}; give the same ones in the same order"
        )


@torch.no_grad()
def check_head_output(head: Head, loader: BagLoader) -> None:
    """Let a head of one's own speak once, of made-up features in two small bags: is what it says an Output?"""
    if type(head) in HEADS.values():
        return
    few = loader.bags.sizes.argsort()[:2]
    batch, place = loader.batch_info(few)
    h = torch.randn(len(place), head.dim, generator=torch.Generator().manual_seed(0)).to(loader.device)
    output = copy.deepcopy(head).eval()(h, batch.segments)
    own = type(head).__name__
    if not isinstance(output, Output):
        raise HeadcountError(f"head {own} gives {type(output).__name__}; give Output(instance, bag, parts)")
    for name, rows in (("instance", len(place)), ("bag", len(few))):
        want, got = (rows, head.classes), tuple(getattr(output, name).shape)
        if want != got:
            raise HeadcountError(
                f"head {own}: {name} of its Output has shape {got}, not {want}: a row each, a column a class"
            )
    total = output.bag.float().logsumexp(1)
    if (total.abs() > 1e-2).any():  # what is no number at all is the training's to tell
        raise HeadcountError(
            f"head {own}: bag of its Output holds no log-probabilities (they sum to {float(total.exp()[0]):.3g}, not 1); "
            "give self.elect(scores)"
        )

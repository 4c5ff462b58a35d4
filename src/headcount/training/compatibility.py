"""Checks before a training: do model, bags and configuration fit together, and is there anything to learn?"""

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
    """Refuse bags that do not fit the model, and bags from which nothing can be learned or chosen."""
    for role, bags in (("training", train), ("validation", valid)):
        if not len(bags):
            raise HeadcountError(f"there are no {role} bags; give at least one")
        if bags.pool.shape != tuple(model.config.shape):
            raise HeadcountError(
                f"an instance of the {role} bags has shape {bags.pool.shape}, the model was built for {model.config.shape}"
            )
        if bags.classes != model.config.classes:
            given, expected = (", ".join(classes[:8]) for classes in (bags.classes, model.config.classes))
            raise HeadcountError(
                f"the {role} bags have the classes {given}, the model {expected}; give the same ones in the same order"
            )
    if train.pool.kind == "features" and config.views not in FEATURE_VIEWS:
        choices = ", ".join(filter(None, FEATURE_VIEWS))
        raise HeadcountError(
            f"views={config.views} are for images, and the instances are features; give one of {choices}"
        )
    if not train.target.any() and train.known is None:
        raise HeadcountError("no training bag has a label, so there is nothing to learn from; label some")
    if not valid.target.any() and config.selection != "last":
        raise HeadcountError(
            f"no validation bag has a label to choose an epoch by; label some, or give selection=last (it is "
            f"{config.selection})"
        )


@torch.no_grad()
def check_head_output(head: Head, loader: BagLoader) -> None:
    """Call a custom head once, with random features of two small bags: does it return a valid Output?"""
    if type(head) in HEADS.values():
        return
    ids = loader.bags.sizes.argsort()[:2]
    batch, position = loader.batch_info(ids)
    h = torch.randn(len(position), head.dim, generator=torch.Generator().manual_seed(0)).to(loader.device)
    output = copy.deepcopy(head).eval()(h, batch.segments)
    name = type(head).__name__
    if not isinstance(output, Output):
        raise HeadcountError(f"head {name} returns {type(output).__name__}; return Output(instance, bag, parts)")
    for part, rows in (("instance", len(position)), ("bag", len(ids))):
        expected, shape = (rows, head.classes), tuple(getattr(output, part).shape)
        if expected != shape:
            raise HeadcountError(
                f"head {name}: {part} of its Output has shape {shape}, not {expected}: one row each, one column per class"
            )
    total = output.bag.float().logsumexp(1)
    if (total.abs() > 1e-2).any():  # NaN is reported by the training itself
        raise HeadcountError(
            f"head {name}: bag of its Output holds no log-probabilities (they sum to {float(total.exp()[0]):.3g}, not 1); "
            "return self.masked_log_softmax(scores)"
        )

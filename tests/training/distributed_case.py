"""Trainings that one process and several (``torchrun distributed_case.py OUT``) should end alike: ragged bags, some without a
label, weights, removed instances, a last step too short for everybody. The test imports this; torchrun runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from headcount.bags import Bags, Pool
from headcount.experiments.recipe import Recipe
from headcount.models.heads import HEADS, head_options
from headcount.models.network import Model, ModelConfig
from headcount.training.loop import save_checkpoint
from headcount.training.trainer import Trainer

D, C, BAGS, EPOCHS = 6, 3, 11, 2
CUSTOM_HEAD = f"{Path(__file__).parent.parent / 'toy_head.py'}:Toy"
NEVER_SPLIT = ("tilt",)
SMALL = {"width": 8, "student_width": 8, "layers": 2, "heads": 2, "drop_path": 0.0, "dropout": 0.0}
MORE = {"additive_trans": {"attn": "exact"}}
NAMES = [*(name for name in HEADS if name not in NEVER_SPLIT), CUSTOM_HEAD]


def bags() -> Bags:
    rng = np.random.default_rng(3)
    sizes = [4, 7, 2, 9, 3, 5, 2, 8, 6, 4, 3]
    n = sum(sizes)
    pool = Pool(rng.normal(size=(n, D)).astype(np.float32))
    labels = rng.integers(0, C, BAGS)
    labels[[2, 7]] = -1
    weight = rng.choice([1.0, 2.0, 3.0], n)
    ends = np.concatenate([[0], np.cumsum(sizes)[:-1]])
    removed = rng.random(n) < 0.2
    removed[ends] = False
    known = rng.integers(-1, C, n)
    return Bags.of(pool, sizes=sizes, labels=labels, classes=C, weight=weight, removed=removed, known=known)


def training(name: str) -> Trainer:
    options = {k: v for k, v in SMALL.items() if k in head_options(name)} | MORE.get(name, {})
    given = bags()
    torch.manual_seed(1)
    design = ModelConfig((D,), given.classes, "mlp", (("hidden", 8),), name, tuple(options.items()))
    # without momentum's help or Adam's: what differs in a gradient differs as much in the weights
    recipe = Recipe(backbone="mlp", head=name, options=options, batch_bags=5, lr=0.05, optimizer="sgd", epochs=EPOCHS)
    return Trainer(Model(design), given, given.take(range(7)), recipe.train_config)


def has_batch_norm(state: Trainer) -> bool:
    return any(isinstance(m, nn.BatchNorm1d) for m in state.model.modules())


def outcome(name: str) -> dict[str, torch.Tensor]:
    """Weights, buffers and losses after a few epochs."""
    state = training(name)
    losses = [torch.stack([state.train_epoch(e).double(), state.valid_loss()]) for e in range(EPOCHS)]
    kept = {k: v.clone() for k, v in state.model.state_dict().items()}
    kept |= {f"buffer.{k}": v.clone() for k, v in state.model.named_buffers()}
    kept |= {f"teacher.{k}": v.clone() for k, v in (state.teacher.state_dict().items() if state.teacher else ())}
    return kept | {"losses": torch.stack(losses)}


def main(out: Path) -> None:
    for i, name in enumerate(NAMES):
        kept = outcome(name)
        state = training(name)
        save_checkpoint(out / f"{i}-{state.process_group.rank}.safetensors", kept, {"of": state.process_group.size})


if __name__ == "__main__":
    main(Path(sys.argv[1]))

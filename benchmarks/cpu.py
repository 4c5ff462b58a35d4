"""Ours beside a plain PyTorch loop, on this machine's CPU: the demo's recipe, epochs per second of both, in one run.

    python benchmarks/cpu.py

The plain loop is what one would write first (plain.py): a Dataset of bags, a DataLoader, a model, Adam; "image by image" is
the released code's way of reading. Same network, same bags, same number of steps, validation included.
"""

from __future__ import annotations

import json
import time

import torch
from plain import Pictures, PlainLoop, Tensors
from torch import nn

from headcount.cli.running import demo_recipes
from headcount.experiments import run as runs
from headcount.training import accel
from headcount.training.trainer import Trainer

EPOCHS = 15


def main() -> None:
    recipe = demo_recipes(1)[3]
    bags = {name: b.blind() for name, b in runs.make_bags(recipe).items()}
    state = Trainer(runs.initial_model(recipe, bags["train"]), bags["train"], bags["valid"], recipe.train_config)

    def plain(kind: type[Tensors]) -> PlainLoop:
        model = runs.initial_model(recipe, bags["train"])
        data = [kind(bags[name], model.normalize.mean, model.normalize.std) for name in ("train", "valid")]
        layers = nn.Sequential(model.backbone, model.head.classifier)
        return PlainLoop(layers, *data, recipe.batch_bags, recipe.lr, workers=0)

    tensors, pictures = plain(Tensors), plain(Pictures)
    seconds = {}
    for name, epoch in (
        ("ours", lambda e: (state.train_epoch(e), state.valid_loss())),
        ("plain loop", lambda e: tensors.epoch()),
        ("image by image", lambda e: pictures.epoch()),
    ):
        epoch(0)
        started = time.perf_counter()
        for e in range(EPOCHS):
            epoch(e)
        seconds[name] = (time.perf_counter() - started) / EPOCHS
        ratio = seconds[name] / seconds["ours"]
        print(f"{name:16} {1 / seconds[name]:8.1f} epochs/s  {seconds[name] * 1e3:7.1f} ms per epoch  {ratio:5.1f} times ours")
    print(f"{accel.device_name(torch.device('cpu'))}, torch {torch.__version__}")
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()

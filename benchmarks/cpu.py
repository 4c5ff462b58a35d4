"""Ours beside a plain PyTorch loop, on this machine's CPU: the demo's recipe, epochs per second of both, in one run.

    python benchmarks/cpu.py

The plain loop is what one would write first: a Dataset of bags, a DataLoader, float images normalised one by one, a model,
Adam. Same network, same bags, same number of steps.
"""

from __future__ import annotations

import json
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from headcount.bags import Bags
from headcount.demo import recipes
from headcount.judging import run as runs
from headcount.training import speed
from headcount.training.train import Training

EPOCHS = 15


class PlainBags(Dataset):
    """One bag at a time, one image at a time."""

    def __init__(self, bags: Bags, mean: torch.Tensor, std: torch.Tensor) -> None:
        self.bags, self.mean, self.std = bags, mean, std

    def __len__(self) -> int:
        return len(self.bags)

    def __getitem__(self, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = int(self.bags.offsets[b]), int(self.bags.offsets[b + 1])
        images = []
        for address in self.bags.index[start:end].tolist():
            image = self.bags.pool.data[address].float() / 255
            images.append(((image - self.mean) / self.std).permute(2, 0, 1))
        return torch.stack(images), self.bags.label[b]


def plain_epoch(model: nn.Module, head: nn.Linear, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    for images, labels in loader:
        z = head(model(images.flatten(0, 1)))
        votes = (z / 0.1).softmax(1).unflatten(0, images.shape[:2]).mean(1)
        loss = nn.functional.cross_entropy(votes / 0.1, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    recipe = recipes(1)[3]
    bags = {name: b.blind() for name, b in runs.bags_for(recipe).items()}
    ours = Training(runs.model_for(recipe, bags["train"]), bags["train"], bags["valid"], recipe)
    plain = runs.model_for(recipe, bags["train"])
    parameters = [*plain.backbone.parameters(), *plain.head.parameters()]
    data = PlainBags(bags["train"], plain.prepare.mean, plain.prepare.std)
    loader = DataLoader(data, recipe.batch_bags, shuffle=True)
    optimizer = torch.optim.Adam(parameters, recipe.lr)
    seconds = {}
    for name, epoch in (
        ("ours", lambda e: ours.train_epoch(e)),
        ("plain DataLoader loop", lambda e: plain_epoch(plain.backbone, plain.head.classifier, loader, optimizer)),
    ):
        epoch(0)
        started = time.perf_counter()
        for e in range(EPOCHS):
            epoch(e)
        seconds[name] = (time.perf_counter() - started) / EPOCHS
        print(f"{name:24} {1 / seconds[name]:8.1f} epochs/s  {seconds[name] * 1e3:7.1f} ms per epoch")
    ratio = seconds["plain DataLoader loop"] / seconds["ours"]
    print(f"ratio {ratio:.1f}, {speed.describe(torch.device('cpu'))}, torch {torch.__version__}")
    print(json.dumps({**seconds, "ratio": ratio}))


if __name__ == "__main__":
    main()

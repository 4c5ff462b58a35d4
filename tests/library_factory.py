"""Test doubles of timm and torchvision: a small network, weights that look published, and a list of downloads; and images."""

from __future__ import annotations

import sys
import types

import numpy as np
import torch
from torch import nn

from headcount.readers import BagDataset, read

CLASSES = ("a", "b")


class Net(nn.Module):
    """A small convolution network with batch-norm and a classifier called fc."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.1, 3)]  # the libraries' networks do so while they are built
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, classes) if classes else nn.Identity()

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


class Picky(Net):
    """Takes one size only, as transformers do."""

    def forward(self, x):
        assert x.shape[2:] == (16, 16), f"Input height ({x.shape[2]}) doesn't match model (16)."
        return super().forward(x)


def published(net: Net) -> Net:
    """The weights the library would download."""
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    return net


def replace_libraries(monkeypatch) -> list[str]:
    """Replace both libraries; returns the list of downloads."""
    downloads: list[str] = []

    def create_model(name, pretrained, num_classes=10, in_chans=3):
        downloads.extend([name] if pretrained else [])
        if name == "offline" and pretrained:
            raise OSError("[Errno -3] Temporary failure in name resolution\nTry again")
        net = (Picky if name == "picky" else Net)(in_chans, num_classes)
        net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
        return published(net) if pretrained else net

    def get_model(name, weights):
        downloads.extend([name] if weights else [])
        return published(Net(3, 10)) if weights else Net(3, 10)

    timm = types.ModuleType("timm")
    timm.__dict__.update(create_model=create_model, is_model=lambda name: name in ("small", "picky", "offline"))
    models = types.ModuleType("torchvision.models")
    models.__dict__.update(get_model=get_model, list_models=lambda: ["small"])
    torchvision = types.ModuleType("torchvision")
    torchvision.__dict__["models"] = models
    for name, module in (("timm", timm), ("torchvision", torchvision), ("torchvision.models", models)):
        monkeypatch.setitem(sys.modules, name, module)
    return downloads


def image_bags(bags: int = 12, size: int = 4, side: int = 8, channels: int = 3) -> list[np.ndarray]:
    """Class a is dark, class b is bright; one of each bag is of the other class."""
    g = np.random.default_rng(0)
    images = []
    for b in range(bags):
        bright = np.array([b % 2] * (size - 1) + [1 - b % 2])
        pixels = g.integers(0, 128, (size, side, side, channels)) + 100 * bright[:, None, None, None]
        images.append(pixels.astype(np.uint8))
    return images


def dark_and_bright(**options: int) -> BagDataset:
    """These images, with the majority as label."""
    images = image_bags(**options)
    return read(images, labels=[CLASSES[b % 2] for b in range(len(images))])

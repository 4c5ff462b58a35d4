"""Stand-ins for timm and torchvision: one small network, weights that look published, and a list of who asked for them."""

from __future__ import annotations

import sys
import types

import torch
from torch import nn

CLASSES = ("a", "b")


class Net(nn.Module):
    """A small convolution network with batch-norm and a classifier called fc."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.rates = [
            rate.item() for rate in torch.linspace(0, 0.1, 3)
        ]  # the libraries' networks do so while they are built
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


def stand_in(monkeypatch) -> list[str]:
    """Both libraries; each download is written down."""
    asked: list[str] = []

    def create_model(name, pretrained, num_classes=10, in_chans=3):
        asked.extend([name] if pretrained else [])
        if name == "offline" and pretrained:
            raise OSError("[Errno -3] Temporary failure in name resolution\nTry again")
        net = (Picky if name == "picky" else Net)(in_chans, num_classes)
        net.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}
        return published(net) if pretrained else net

    def get_model(name, weights):
        asked.extend([name] if weights else [])
        return published(Net(3, 10)) if weights else Net(3, 10)

    timm = types.ModuleType("timm")
    timm.__dict__.update(create_model=create_model, is_model=lambda name: name in ("small", "picky", "offline"))
    models = types.ModuleType("torchvision.models")
    models.__dict__.update(get_model=get_model, list_models=lambda: ["small"])
    torchvision = types.ModuleType("torchvision")
    torchvision.__dict__["models"] = models
    for name, module in (("timm", timm), ("torchvision", torchvision), ("torchvision.models", models)):
        monkeypatch.setitem(sys.modules, name, module)
    return asked

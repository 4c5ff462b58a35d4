"""What ours is measured against, written the way one would first write it: Datasets of bags, a DataLoader, a loop.

``Tensors`` makes a bag's images floats in one go; ``Pictures`` takes them image by image through a picture object, a tensor
and a normalisation, as the released code's loader does (our own rewriting of it).
"""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from headcount.bags import Bags


class Tensors(Dataset):
    """One bag at a time."""

    def __init__(self, bags: Bags, mean: Tensor, std: Tensor) -> None:
        self.bags, self.label = bags, bags.label.tolist()
        self.mean, self.std = mean.view(-1, 1, 1), std.view(-1, 1, 1)

    def __len__(self) -> int:
        return len(self.bags)

    def __getitem__(self, b: int) -> tuple[Tensor, int]:
        start, end = int(self.bags.offsets[b]), int(self.bags.offsets[b + 1])
        images = self.bags.pool.data[self.bags.index[start:end]].permute(0, 3, 1, 2)
        return (images.float() / 255 - self.mean) / self.std, self.label[b]


class Pictures(Tensors):
    """One bag at a time, one image at a time."""

    def __getitem__(self, b: int) -> tuple[Tensor, int]:
        start, end = int(self.bags.offsets[b]), int(self.bags.offsets[b + 1])
        images = []
        for address in self.bags.index[start:end].tolist():
            picture = Image.fromarray(self.bags.pool.data[address].numpy().squeeze())
            pixels = torch.from_numpy(np.array(picture)).reshape(*self.bags.pool.shape).permute(2, 0, 1).contiguous()
            images.append((pixels.float() / 255 - self.mean) / self.std)
        return torch.stack(images), self.label[b]


class PlainLoop:
    """Training and validation of a Counting Network, float32 (TF32 convolutions where the card has them)."""

    def __init__(self, model: nn.Module, train: Dataset, valid: Dataset, batch: int, lr: float, workers: int) -> None:
        self.model, self.device = model, next(model.parameters()).device
        keep = {"num_workers": workers, "pin_memory": self.device.type == "cuda", "persistent_workers": workers > 0}
        self.train = DataLoader(train, batch, shuffle=True, **keep)
        self.valid = DataLoader(valid, batch, **keep)
        self.optimizer = torch.optim.Adam(model.parameters(), lr)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        images, labels = images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)
        z = self.model(images.flatten(0, 1))
        votes = (z / 0.1).softmax(1).unflatten(0, images.shape[:2]).mean(1)
        return nn.functional.cross_entropy(votes / 0.1, labels)

    def epoch(self) -> float:
        self.model.train()
        total = 0.0
        for images, labels in self.train:
            loss = self.loss(images, labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            total += loss.item()
        self.model.eval()
        with torch.no_grad():
            for images, labels in self.valid:
                total += self.loss(images, labels).item()
        return total

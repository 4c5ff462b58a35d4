"""Views: the same instances, seen a little differently. They run on the device, after normalisation, inside the step.

    images    (n, channels, H, W)
    features  (n, D)

A kind of view is a list from weak to strong; a head that asks for V views gets the first V of them, the last one repeated.
They draw from torch's default generator, which training seeds for each epoch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

View = Callable[[Tensor], Tensor]


def same(x: Tensor) -> Tensor:
    return x


def crop(x: Tensor) -> Tensor:
    """Shift by up to an eighth of the side, the border reflected: 4 pixels of 32."""
    n, channels, height, width = x.shape
    p = max(1, height // 8)
    padded = F.pad(x, (p, p, p, p), mode="reflect")
    dy, dx = torch.randint(0, 2 * p + 1, (2, n, 1), device=x.device)
    rows = (torch.arange(height, device=x.device) + dy).view(n, 1, height, 1).expand(n, channels, height, width + 2 * p)
    columns = (torch.arange(width, device=x.device) + dx).view(n, 1, 1, width).expand(n, channels, height, width)
    return padded.gather(2, rows).gather(3, columns)


def flip(x: Tensor) -> Tensor:
    """Mirror half of the images."""
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)


def flip_crop(x: Tensor) -> Tensor:
    return crop(flip(x))


def noise(x: Tensor) -> Tensor:
    """A tenth of a deviation on every number."""
    return x + 0.1 * torch.randn_like(x)


VIEWS: dict[str, tuple[View, ...]] = {
    "none": (same,),
    "crop": (crop,),
    "flip_crop": (flip_crop,),
    "noise": (noise,),
}


def several(x: Tensor, kind: str, count: int) -> Tensor:
    """(n, ...) -> (count * n, ...): one whole set of views after the other."""
    views = VIEWS[kind]
    seen = [views[min(v, len(views) - 1)](x) for v in range(count)]
    return seen[0] if count == 1 else torch.cat(seen)

"""Views: the same instances, seen a little differently. They run on the device, after normalisation, inside the step.

    images    (n, channels, H, W)
    features  (n, D)

A kind of view is a list from weak to strong; a head that asks for V views gets the first V of them, the last one repeated.
They draw from torch's default generator, which training seeds for each epoch; shapes never depend on what was drawn.

    none, crop, flip_crop, noise   one kind, however many are asked for
    image    flip and crop, then strong: photographs of things
    digit    crop, then strong: what a mirror would change
    tissue   quarter turns and mirror images, then colour and cutout: what has no upright
    feature  a little noise, then noise, mask and a trace of somebody else: embeddings and tables
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

View = Callable[[Tensor], Tensor]


def identity(x: Tensor) -> Tensor:
    return x


def crop(x: Tensor) -> Tensor:
    """Shift by up to an eighth of the side, the border reflected: 4 pixels of 32."""
    n, channels, height, width = x.shape
    p, q = (min(max(1, side // 8), side - 1) for side in (height, width))
    padded = F.pad(x, (q, q, p, p), mode="reflect")
    dy, dx = torch.randint(0, 2 * p + 1, (2, n, 1), device=x.device)
    dx = dx if p == q else torch.randint(0, 2 * q + 1, (n, 1), device=x.device)
    rows = (torch.arange(height, device=x.device) + dy).view(n, 1, height, 1).expand(n, channels, height, width + 2 * q)
    columns = (torch.arange(width, device=x.device) + dx).view(n, 1, 1, width).expand(n, channels, height, width)
    return padded.gather(2, rows).gather(3, columns)


def flip(x: Tensor) -> Tensor:
    """Mirror half of the images."""
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)


def flip_crop(x: Tensor) -> Tensor:
    return crop(flip(x))


def dihedral(x: Tensor) -> Tensor:
    """One of the eight ways a square can lie: quarter turns and their mirror images. An oblong is only turned by halves."""
    way = torch.rand(3, len(x), 1, 1, 1, device=x.device) < 0.5
    x = torch.where(way[0], x.flip(3), x)
    x = torch.where(way[1], x.flip(2), x)
    return torch.where(way[2], x.transpose(2, 3), x) if x.shape[2] == x.shape[3] else x


def affine(x: Tensor) -> Tensor:
    """Turn by up to 25 degrees, scale by up to a quarter, shear by up to 0.25, shift by up to an eighth; borders reflected."""
    u = 2 * torch.rand(6, len(x), device=x.device) - 1
    angle, scale = u[0] * math.radians(25), torch.exp2(0.32 * u[1])
    cos, sin = angle.cos() * scale, angle.sin() * scale
    rows = torch.stack(
        [cos, 0.25 * u[2] - sin, 0.25 * u[4], sin + 0.25 * u[3], cos, 0.25 * u[5]], 1
    )  # half a side is 1
    grid = F.affine_grid(rows.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)


def colour(x: Tensor) -> Tensor:
    """Brightness, contrast and saturation, each by up to four tenths, in units of the normalised image."""
    u = 0.4 * (2 * torch.rand(3, len(x), 1, 1, 1, device=x.device) - 1)
    x = x + u[0]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (1 + u[1]) * (x - mean)
    grey = x.mean(1, keepdim=True)
    return grey + (1 + u[2]) * (x - grey)


def cutout(x: Tensor) -> Tensor:
    """A square of half the side, anywhere, turned to the mean: 16 pixels of 32."""
    n, _, height, width = x.shape
    u = torch.rand(2, n, 1, device=x.device)
    far = [
        (torch.arange(side, device=x.device) + 0.5 - at * side).abs() < side / 4
        for side, at in zip((height, width), u, strict=True)
    ]
    return x.masked_fill((far[0][:, :, None] & far[1][:, None, :])[:, None], 0.0)


def strong(x: Tensor) -> Tensor:
    return cutout(colour(affine(crop(x))))


def strong_flip(x: Tensor) -> Tensor:
    return strong(flip(x))


def strong_turn(x: Tensor) -> Tensor:
    """Colour is what differs from one laboratory to the next; shape is what counts, so it is left alone."""
    return cutout(colour(crop(dihedral(x))))


def noise(x: Tensor) -> Tensor:
    """A tenth of a deviation on every number."""
    return x + 0.1 * torch.randn_like(x)


def mask(x: Tensor) -> Tensor:
    """A fifth of the numbers turned to their mean."""
    return x * (torch.rand_like(x) >= 0.2)


def mixup(x: Tensor) -> Tensor:
    """Up to a fifth of another instance: mixup, where the larger part keeps its class."""
    part = 0.2 * torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device)
    other = torch.rand(len(x), device=x.device).argsort()
    return (1 - part) * x + part * x[other]


def strong_feature(x: Tensor) -> Tensor:
    return mask(mixup(x + 0.2 * torch.randn_like(x)))


VIEWS: dict[str, tuple[View, ...]] = {
    "none": (identity,),
    "crop": (crop,),
    "flip_crop": (flip_crop,),
    "noise": (noise,),
    "image": (flip_crop, strong_flip),
    "digit": (crop, strong),
    "tissue": (dihedral, strong_turn),
    "feature": (noise, strong_feature),
}

FEATURE_VIEWS = (None, "none", "noise", "feature")  # the others change pictures


def apply_views(x: Tensor, kind: str, count: int, weak: bool = False) -> Tensor:
    """(n, ...) -> (count * n, ...): one whole set of views after the other; ``weak``: all of them of the first sort."""
    views = VIEWS[kind]
    seen = [views[0 if weak else min(v, len(views) - 1)](x) for v in range(count)]
    return seen[0] if count == 1 else torch.cat(seen)

"""Augmentation: views of instances, made on the device, after normalisation, inside the step.

    images    (n, channels, H, W)
    features  (n, D)

A policy is a list of views from weak to strong; a head that asks for V views gets the first V of them, the last one repeated.
Views draw from torch's default generator, which training seeds for each epoch; shapes never depend on what is drawn.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

View = Callable[[Tensor], Tensor]
Policy = str | View | tuple[View, ...]


def identity(x: Tensor) -> Tensor:
    return x


def crop(x: Tensor) -> Tensor:
    """Shift by up to an eighth of the side with reflected borders: 4 pixels of 32."""
    n, channels, height, width = x.shape
    p, q = (min(max(1, side // 8), side - 1) for side in (height, width))
    padded = F.pad(x, (q, q, p, p), mode="reflect")
    dy, dx = torch.randint(0, 2 * p + 1, (2, n, 1), device=x.device)
    dx = dx if p == q else torch.randint(0, 2 * q + 1, (n, 1), device=x.device)
    rows = (torch.arange(height, device=x.device) + dy).view(n, 1, height, 1).expand(n, channels, height, width + 2 * q)
    columns = (torch.arange(width, device=x.device) + dx).view(n, 1, 1, width).expand(n, channels, height, width)
    return padded.gather(2, rows).gather(3, columns)


def flip(x: Tensor) -> Tensor:
    """Flip half of the images horizontally."""
    return torch.where(torch.rand(len(x), 1, 1, 1, device=x.device) < 0.5, x.flip(3), x)


def dihedral(x: Tensor) -> Tensor:
    """A random symmetry of the square: rotations by 90 degrees and flips. A rectangle is rotated by 180 degrees only."""
    apply = torch.rand(3, len(x), 1, 1, 1, device=x.device) < 0.5
    x = torch.where(apply[0], x.flip(3), x)
    x = torch.where(apply[1], x.flip(2), x)
    return torch.where(apply[2], x.transpose(2, 3), x) if x.shape[2] == x.shape[3] else x


def affine(x: Tensor) -> Tensor:
    """Rotate by up to 25 degrees, scale by up to 25 %, shear by up to 0.25, shift by up to an eighth."""
    u = 2 * torch.rand(6, len(x), device=x.device) - 1
    angle, scale = u[0] * math.radians(25), torch.exp2(0.32 * u[1])
    cos, sin = angle.cos() * scale, angle.sin() * scale
    matrix = torch.stack([cos, 0.25 * u[2] - sin, 0.25 * u[4], sin + 0.25 * u[3], cos, 0.25 * u[5]], 1)  # half a side is 1
    grid = F.affine_grid(matrix.view(-1, 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x.float(), grid, padding_mode="reflection", align_corners=False)


def colour(x: Tensor) -> Tensor:
    """Brightness, contrast and saturation, each by up to 0.4, in units of the normalised image."""
    u = 0.4 * (2 * torch.rand(3, len(x), 1, 1, 1, device=x.device) - 1)
    x = x + u[0]
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (1 + u[1]) * (x - mean)
    grey = x.mean(1, keepdim=True)
    return grey + (1 + u[2]) * (x - grey)


def cutout(x: Tensor) -> Tensor:
    """A random square of half the side is set to the mean: 16 pixels of 32."""
    u = torch.rand(2, len(x), 1, device=x.device)
    sides = zip(x.shape[2:], u, strict=True)
    rows, columns = ((torch.arange(n, device=x.device) + 0.5 - at * n).abs() < n / 4 for n, at in sides)
    return x.masked_fill((rows[:, :, None] & columns[:, None, :])[:, None], 0.0)


def noise(x: Tensor, deviation: float = 0.1) -> Tensor:
    """Gaussian noise, in standard deviations of the features."""
    return x + deviation * torch.randn_like(x)


def mask(x: Tensor) -> Tensor:
    """A fifth of the numbers set to their mean."""
    return x * (torch.rand_like(x) >= 0.2)


def mixup(x: Tensor) -> Tensor:
    """Up to a fifth of another instance; the class is that of the larger part."""
    part = 0.2 * torch.rand(len(x), *[1] * (x.ndim - 1), device=x.device)
    other = torch.rand(len(x), device=x.device).argsort()
    return (1 - part) * x + part * x[other]


def strong(x: Tensor) -> Tensor:
    return cutout(colour(affine(crop(x))))


VIEWS: dict[str, tuple[View, ...]] = {
    "none": (identity,),
    "crop": (crop,),
    "flip_crop": (lambda x: crop(flip(x)),),
    "noise": (noise,),
    "image": (lambda x: crop(flip(x)), lambda x: strong(flip(x))),  # photographs of objects
    "digit": (crop, strong),  # no flips
    # images without an upright direction; laboratories differ in colour, and the shape of cells is informative
    "tissue": (dihedral, lambda x: cutout(colour(crop(dihedral(x))))),
    "feature": (noise, lambda x: mask(mixup(noise(x, 0.2)))),  # embeddings and tables
}

FEATURE_VIEWS = (None, "none", "noise", "feature")  # the others are for images


def apply_views(x: Tensor, kind: Policy, count: int, weak: bool = False) -> Tensor:
    """(n, ...) -> (count * n, ...): one whole set of views after the other; ``weak``: all of the weakest kind."""
    views = VIEWS[kind] if isinstance(kind, str) else kind if isinstance(kind, tuple) else (kind,)
    results = [views[0 if weak else min(v, len(views) - 1)](x) for v in range(count)]
    return results[0] if count == 1 else torch.cat(results)

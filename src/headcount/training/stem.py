"""The stem of ResNet18 in few passes over memory: convolution, batch-norm, ReLU and max-pool as one operation (Triton).

The stem is where a step's bytes are: its maps are four times as large as what the pool leaves of them. Written layer by
layer, the large map and its gradients pass through memory some sixteen times a step; here six:

    forward    y = conv(x)        statistics of y    pooled = max of relu(norm(y)), the winner's place and its raw y
    backward   sums over winners  gradient of y      gradient of the weights

``FusedStem`` is the same function of the same weights as the layers it replaces, up to rounding; the tests hold it to them,
on the CPU by Triton's interpreter. Where Triton is missing, or the shapes are others, the layers run as they are.

Letters: n images, Y X the map after the convolution, P Q after the pool, K output channels (a power of two).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.models.backbones import ResNet18

DEPTH = 16  # channels of a block of 2x2 pixels, filled up
ROWS = 4  # a 7x7 stride-2 convolution is 4x4 on blocks
_TILE = 64  # places of a tile
_PARTS = 512  # programs of a reduction, a power of two


@cache
def kernels() -> Any:
    """Loaded when first wanted: who has no card does not wait for Triton. None where there is no Triton."""
    try:
        return import_module("headcount.training.kernels")  # a language of its own: type checkers stay outside
    except ImportError:
        return None


def usable(network: nn.Module) -> bool:
    """Whether this network's stem is the one written here, and Triton is there to run it."""
    if type(network) is not ResNet18 or kernels() is None:
        return False
    conv, pool = network.conv1, network.maxpool
    return (
        conv.out_channels == 64
        and (conv.kernel_size, conv.stride, conv.padding) == ((7, 7), (2, 2), (3, 3))
        and conv.in_channels * 4 <= DEPTH
        and isinstance(pool, nn.MaxPool2d)
        and (pool.kernel_size, pool.stride, pool.padding) == (3, 2, 1)
    )


def in_blocks(x: Tensor) -> Tensor:
    """(n, channels, H, W) -> (n, H/2 + 3, W/2 + 3, 16): each 2x2 block of pixels one place, padded for the convolution."""
    n, channels, height, width = x.shape
    blocks = x.permute(0, 2, 3, 1).reshape(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    return F.pad(blocks.flatten(3), (0, DEPTH - 4 * channels, 2, 1, 2, 1))


def weight_in_blocks(weight: Tensor) -> Tensor:
    """(K, channels, 7, 7) -> (K, 4, 4, 16): eight taps a side, the first of them zero, in four blocks of two."""
    w = F.pad(weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3)
    return F.pad(w, (0, DEPTH - w.shape[3]))


# What is kept for the way back is flat: the compiler lays every tensor of four dimensions that it keeps out anew, channels
# last, and would so turn y around twice a step.


@torch.library.custom_op("headcount::stem", mutates_args=())
def stem(x: Tensor, height: int, width: int, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    """(n, (Y + 3) (X + 3) 16) blocks of images of this size -> pooled (n, K, P, Q), and for the way back y (n Y X, K), top and
    winner (n P Q, K) and the line: four rows of K, mean, variance, scale and shift."""
    (n, Y, X, K), (P, Q) = (len(x), height // 2, width // 2, len(weight)), _pooled(height, width)
    blocks = x.view(n, Y + 3, X + 3, DEPTH).permute(0, 3, 1, 2)
    y = F.conv2d(blocks, weight.view(K, ROWS, ROWS, DEPTH).permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()
    line = _statistics(y.view(-1, K), gamma, beta, eps)
    pooled, top = y.new_empty(n, P, Q, K), y.new_empty(n * P * Q, K)
    winner = torch.empty(n * P * Q, K, dtype=torch.uint8, device=y.device)
    kernels().pool[(_up(len(top), _TILE),)](y, line, pooled, top, winner, len(top), Y, X, P, Q, K, _TILE, num_warps=8)
    return [pooled.permute(0, 3, 1, 2), y.view(-1, K), top, winner, line]


def _pooled(height: int, width: int) -> tuple[int, int]:
    return (height // 2 + 1) // 2, (width // 2 + 1) // 2


def _statistics(y: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
    M, K = y.shape
    parts, step = _parts(M, 2 * _TILE)
    mean, spread = y.new_empty(2, parts, K, dtype=torch.float32)
    count, line = y.new_empty(parts, dtype=torch.float32), y.new_empty(4, K, dtype=torch.float32)
    kernels().moments[(parts,)](y, mean, spread, count, M, step, K, 2 * _TILE, num_warps=4)
    kernels().merge[(1,)](mean, spread, count, gamma, beta, eps, line, parts, M, K, _PARTS, num_warps=16)
    return line


def _up(a: int, b: int) -> int:
    return -(-a // b)


def _parts(places: int, tile: int) -> tuple[int, int]:
    """How many programs share these places, and how many tiles each of them takes."""
    tiles = _up(places, tile)
    step = _up(tiles, _PARTS)
    return _up(tiles, step), step


@stem.register_fake
def _(x: Tensor, height: int, width: int, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    n, K, (P, Q) = len(x), len(weight), _pooled(height, width)
    y, top = x.new_empty(n * (height // 2) * (width // 2), K), x.new_empty(n * P * Q, K)
    line = x.new_empty(4, K, dtype=torch.float32)
    return [x.new_empty(n, P, Q, K).permute(0, 3, 1, 2), y, top, torch.empty_like(top, dtype=torch.uint8), line]


@torch.library.custom_op("headcount::stem_backward", mutates_args=())
def stem_backward(
    grad: Tensor, x: Tensor, height: int, width: int, y: Tensor, top: Tensor, winner: Tensor, line: Tensor, eps: float
) -> list[Tensor]:
    """The gradients of weight (K, 4 4 16), gamma and beta. Images have none."""
    (M, K), places, Y, X, (P, Q) = y.shape, len(top), height // 2, width // 2, _pooled(height, width)
    grad = grad.permute(0, 2, 3, 1).contiguous()
    x = x if x.is_cuda else x.float()  # Triton's interpreter multiplies no bf16
    parts, step = _parts(places, _TILE)
    sums = grad.new_empty(2, parts, K, dtype=torch.float32)
    kernels().sums[(parts,)](grad, top, line, eps, sums[0], sums[1], places, step, K, _TILE, num_warps=4)
    total, along = sums.sum(1)
    dy = torch.empty_like(y, dtype=x.dtype)
    kernels().dealt[(_up(places, _TILE),)](
        y, grad, winner, line, total, along, eps, dy, places, M, Y, X, P, Q, K, _TILE, num_warps=8
    )
    tiles = _up(M, _TILE)
    parts = min(tiles, _programs(y.device))
    out = x.new_empty(parts, K, ROWS * ROWS * DEPTH, dtype=torch.float32)
    kernels().weights[(parts,)](
        x, dy, out, M, _up(tiles, parts), X + 3, Y, X, K, ROWS * DEPTH, _TILE, num_warps=4, num_stages=3
    )
    return [out.sum(0), along.clone(), total.clone()]  # results may not share memory


def _programs(device: torch.device) -> int:
    """Programs of the weights' gradient, two for each multiprocessor: their sums are added up afterwards."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@stem_backward.register_fake
def _(
    grad: Tensor, x: Tensor, height: int, width: int, y: Tensor, top: Tensor, winner: Tensor, line: Tensor, eps: float
) -> list[Tensor]:
    like = line.new_empty(line.shape[1])
    return [line.new_empty(len(like), ROWS * ROWS * DEPTH), like, like.clone()]


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.height, ctx.width, _, _, _, ctx.eps = inputs
    ctx.save_for_backward(x, *output[1:])


def _back(ctx: Any, grads: Any) -> tuple[Tensor | None, ...]:
    x, *rest = ctx.saved_tensors
    weight, gamma, beta = stem_backward(grads[0], x, ctx.height, ctx.width, *rest, ctx.eps)
    return None, None, None, weight.to(x.dtype), gamma, beta, None


stem.register_autograd(_back, setup_context=_remember)


class FusedStem(ResNet18):
    """A ResNet18 whose stem is the operation above while it learns; asked in eval mode, the layers themselves answer."""

    def stem(self, x: Tensor) -> Tensor:
        n, _, height, width = x.shape
        count = n * height * width // 4  # addresses are 32 bits wide: a larger map takes the ordinary way
        if not self.training or x.requires_grad or height % 2 or width % 2 or 64 * count >= 1 << 31:
            return super().stem(x)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        norm: Any = self.bn1
        blocks, weight = in_blocks(x).to(kind).flatten(1), weight_in_blocks(self.conv1.weight).to(kind).flatten(1)
        pooled, *_, line = stem(blocks, height, width, weight, norm.weight, norm.bias, norm.eps)
        with torch.no_grad():
            norm.running_mean.lerp_(line[0], norm.momentum)
            norm.running_var.lerp_(line[1] * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
        return pooled


def try_out(device: torch.device) -> None:
    """One way there and back on 64 images of 32x32; whatever the kernels cannot do here is raised."""
    network = ResNet18(3).to(device)
    network.__class__ = FusedStem
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        pooled = network.train().stem(torch.zeros(64, 32, 32, 3, device=device).permute(0, 3, 1, 2))
    pooled.float().sum().backward()

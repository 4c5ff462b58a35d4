"""The stem of ResNet18 as one operation (Triton): convolution, batch-norm, ReLU and max-pool in few passes over memory.

Layer by layer, the large map and its gradients pass through memory about sixteen times a step; here three times:

    forward    y = conv(x) and its statistics    C, below    pooled = max of relu(norm(y)), and the position of the maximum
    backward   sum over maxima of their gradient times x under the taps

The backward pass needs nothing else, because y is linear in the weights W. Batch-norm's gradient subtracts from dz, that of the
normalised map, its mean and its regression on y. So with D the sum of dz times x under the taps, C that of y times the same
(computed in the forward pass) and S that of x alone, the gradient of W is linear in D, S and C, and the sum of dz y is that of
W D.

Images are stored as padded rows of pixels. Two neighbouring positions see nine neighbouring pixels of seven rows, at most 32
numbers of each: a matrix product over pairs of positions moves half the bytes of one over positions.

``FusedStem`` is the same function of the same weights as the layers it replaces, up to rounding (tested with Triton's
interpreter). Without Triton, or with other shapes, the layers run as they are.

Letters: n images, Y X the map after the convolution, P Q after the pool, K output channels (a power of two).
"""

import os
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.errors import HeadcountError
from headcount.models.backbones import ResNet18

SPAN = 32  # numbers of a row under the taps of a pair, padded
TAPS = 8 * SPAN  # seven rows, and one more to be a power of two
LINE = 64  # numbers of bf16 in a cache line of the GPU
MAX_ELEMENTS = 1 << 31  # numbers that a kernel can address


class KernelConfig(NamedTuple):
    """How a kernel is run: elements of a tile, warps, stages, and programs for each multiprocessor."""

    tile: int
    warps: int
    stages: int
    programs_per_core: int

    def partition(self, elements: int, device: torch.device) -> tuple[int, int]:
        """The number of programs for these elements, and of tiles for each."""
        cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
        tiles = _ceil_div(elements, self.tile)
        steps = _ceil_div(tiles, self.programs_per_core * cores)
        return _ceil_div(tiles, steps), steps

    @property
    def settings(self) -> dict[str, int]:
        return {"TILE": self.tile, "num_warps": self.warps, "num_stages": self.stages}


# The fastest found on an H200 by benchmarks/kernels.py; elements are pairs of positions, channels, and windows of the pool.
CONVOLVE = KernelConfig(64, 4, 1, 2)
CORRELATE = KernelConfig(32, 8, 4, 1)
MERGE_MOMENTS = KernelConfig(16, 8, 1, 1)
MAX_POOL = KernelConfig(16, 4, 1, 1)
GRADIENT = KernelConfig(32, 8, 1, 1)


@cache
def kernels() -> Any:
    """Imported on first use, so that Triton is not loaded without need; None if it is not installed."""
    try:
        return import_module("headcount.training.kernels")  # Triton's language, not for type checkers
    except ImportError:
        return None


def can_fuse(network: nn.Module) -> bool:
    """Whether the stem of this network is the one fused here, and Triton is installed."""
    if type(network) is not ResNet18 or kernels() is None:
        return False
    conv, norm = network.conv1, network.bn1
    return (
        conv.out_channels == 64
        and (conv.kernel_size, conv.stride, conv.padding) == ((7, 7), (2, 2), (3, 3))
        and conv.in_channels * 9 <= SPAN
        and (norm.affine, norm.track_running_stats, norm.momentum is None) == (True, True, False)
    )


class StemSizes(NamedTuple):
    """Of the rows of pixels in x, and of the maps."""

    rows: int  # of an image
    pitch: int  # numbers of a row
    stride: int  # numbers between pairs
    Y: int
    X: int
    P: int
    Q: int

    @classmethod
    def of(cls, channels: int, height: int, width: int) -> Self:
        Y, X = _ceil_div(height, 2), _ceil_div(width, 2)
        P, Q = _ceil_div(Y, 2), _ceil_div(X, 2)
        # whole cache lines: the compiler would pad images of another length, and copy them for every use
        return cls(2 * Y + 6, LINE * _ceil_div(4 * channels * (Q - 1) + SPAN, LINE), 4 * channels, Y, X, P, Q)


def in_rows(x: Tensor) -> Tensor:
    """(n, channels, height, width) -> (n, rows pitch), padded for the convolution."""
    _, channels, height, width = x.shape
    sizes = StemSizes.of(channels, height, width)
    pixels = x.permute(0, 2, 3, 1).flatten(2)
    after = sizes.pitch - 3 * channels - pixels.shape[2], sizes.rows - 3 - height
    return F.pad(pixels, (3 * channels, after[0], 3, after[1])).flatten(1)


def weight_in_rows(weight: Tensor) -> Tensor:
    """(K, channels, 7, 7) -> (2 K, TAPS): for the first position of a pair, and for the second, two pixels further."""
    rows, on = weight.permute(0, 2, 3, 1).flatten(2), 2 * weight.shape[1]
    return torch.stack([F.pad(rows, (o, SPAN - o - rows.shape[2], 0, 1)) for o in (0, on)]).flatten(2).flatten(0, 1)


# What is saved for the backward pass is flat: the compiler copies every four-dimensional tensor that it saves to channels-last,
# and back. Sums are returned in parts: the compiler adds them where it uses them.
@torch.library.custom_op("headcount::stem", mutates_args=())
def stem(
    x: Tensor, sizes: list[int], weight: Tensor, gamma: Tensor, beta: Tensor, eps: float, known: Tensor | None
) -> list[Tensor]:
    """Rows of images -> pooled (n, K, P, Q), and for the backward pass winner (n P Q, K), the moments (four rows of K: mean,
    variance, scale and shift), and C (2 K, TAPS) in parts. With ``known`` moments (eval mode) none are computed."""
    rows, pitch, stride, Y, X, P, Q = sizes
    n, K, pairs, pixels = len(x), len(gamma), len(x) * Y * Q, _for_dots(x)
    y, layout = pixels.new_empty(n * Y * X, K), (rows, pitch, stride, Y, X, Q, K, TAPS, SPAN)
    parts, steps = CONVOLVE.partition(pairs, x.device)
    partials = _sums(x, 3, parts, 2 * K)
    convolve = kernels().convolve[(parts,)]
    convolve(pixels, _for_dots(weight), y, *partials, pairs, steps, known is None, *layout, **CONVOLVE.settings)
    moments, cross = known, _sums(x, 0)
    if moments is None:
        moments, most = _sums(x, 4, K), 1 << (2 * parts - 1).bit_length()  # the two positions of a pair are two parts
        merge = kernels().merge_moments[(_ceil_div(K, MERGE_MOMENTS.tile),)]
        merge(*partials, gamma, beta, eps, moments, 2 * parts, n * Y * X, K, most, **MERGE_MOMENTS.settings)
        parts, steps = CORRELATE.partition(pairs, x.device)
        cross = _sums(x, parts, 2 * K, TAPS)
        kernels().correlate[(parts,)](pixels, y, cross, pairs, steps, *layout, **CORRELATE.settings)
    pooled, winner = x.new_empty(n, P, Q, K), x.new_empty(n * P * Q, K, dtype=torch.uint8)
    max_pool = kernels().max_pool[(_ceil_div(len(winner), MAX_POOL.tile),)]
    max_pool(y, moments, pooled, winner, len(winner), Y, X, P, Q, K, **MAX_POOL.settings)
    return [pooled.permute(0, 3, 1, 2), winner, moments if known is None else moments.clone(), cross]


@stem.register_fake
def _(
    x: Tensor, sizes: list[int], weight: Tensor, gamma: Tensor, beta: Tensor, eps: float, known: Tensor | None
) -> list[Tensor]:
    (_, _, _, Y, _, P, Q), n, K = sizes, len(x), len(gamma)
    parts, _ = CORRELATE.partition(n * Y * Q, x.device)
    pooled, winner = x.new_empty(n, P, Q, K).permute(0, 3, 1, 2), x.new_empty(n * P * Q, K, dtype=torch.uint8)
    return [pooled, winner, _sums(x, 4, K), _sums(x, parts, 2 * K, TAPS) if known is None else _sums(x, 0)]


@torch.library.custom_op("headcount::stem_backward", mutates_args=())
def stem_backward(grad: Tensor, x: Tensor, sizes: list[int], winner: Tensor) -> list[Tensor]:
    """D (2 K, TAPS), rows 2k and 2k + 1 for the positions of a pair, and the sum of dz (K), both in parts."""
    (rows, pitch, stride, Y, _, P, Q), (windows, K) = sizes, winner.shape
    parts, steps = GRADIENT.partition(windows, x.device)
    D, total, layout = _sums(x, parts, 2 * K, TAPS), _sums(x, parts, K), (rows, pitch, stride, Y, P, Q, K, TAPS, SPAN)
    grad = grad.permute(0, 2, 3, 1).contiguous()
    kernels().gradient[(parts,)](grad, winner, _for_dots(x), D, total, windows, steps, *layout, **GRADIENT.settings)
    return [D, total]


@stem_backward.register_fake
def _(grad: Tensor, x: Tensor, sizes: list[int], winner: Tensor) -> list[Tensor]:
    K, (parts, _) = winner.shape[1], GRADIENT.partition(len(winner), x.device)
    return [_sums(x, parts, 2 * K, TAPS), _sums(x, parts, K)]


def _sums(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(*shape, dtype=torch.float32)


def _for_dots(x: Tensor) -> Tensor:
    """Triton's interpreter cannot multiply bf16, and truncates when it rounds to it."""
    return x if x.is_cuda else x.float()


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _save_for_backward(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.sizes, weight, _, _, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight, *output[1:])


def _backward(ctx: Any, grads: Any) -> tuple[Tensor | None, ...]:
    """The gradients of weight, gamma and beta. Images have none. C, D and the moments are constants here, so that a second
    derivative would silently be wrong."""
    if torch.is_grad_enabled():
        advice = "take another precision than bf16, in which the stem runs layer by layer"
        raise HeadcountError(f"the fused stem has no second derivatives, and create_graph=True asks for them; {advice}")
    x, weight, winner, moments, cross = ctx.saved_tensors
    sizes, (mean, variance, scale, _), K = StemSizes(*ctx.sizes), moments, moments.shape[1]
    positions, r = len(x) * sizes.Y * sizes.X, (variance + ctx.eps).rsqrt()
    D, total = (part.sum(0) for part in stem_backward(grads[0], x, ctx.sizes, winner))
    # by position in the pair, channel and tap, as C and the weight; D's kernel joins the two positions of a channel
    D = D.view(K, 2, TAPS).transpose(0, 1)
    # S: the sum of the numbers under the taps of all pairs, and of those with a second position
    image = x.view(-1, sizes.rows, sizes.pitch).sum(0, dtype=torch.float32)
    taps = image.unfold(0, 8, 2).sum(0).unfold(0, SPAN, sizes.stride)  # (pairs, 8, SPAN)
    S = torch.stack([taps[:pairs].sum(0).flatten() for pairs in (sizes.Q, sizes.X // 2)])[:, None]
    C = cross.sum(0).view(2, K, TAPS)
    gamma_grad = r * ((weight.float().view(2, K, TAPS) * D).sum((0, 2)) - mean * total)
    slope = (r * gamma_grad / positions)[:, None] * (C - mean[:, None] * S)
    dw = scale[:, None] * (D - (total / positions)[:, None] * S - slope)
    return None, None, dw.flatten(0, 1).to(weight.dtype), gamma_grad, total, None, None


stem.register_autograd(_backward, setup_context=_save_for_backward)


class FusedStem(ResNet18):
    """A ResNet18 with a fused stem: the statistics of the batch in training, the running ones otherwise."""

    def stem(self, x: Tensor) -> Tensor:
        norm: Any = self.bn1
        sizes = StemSizes.of(*x.shape[1:])
        count = len(x) * sizes.Y * sizes.X  # positions; the layers have the error message for a single one
        addressed = len(x) * max(64 * sizes.Y * sizes.X, sizes.rows * sizes.pitch) < MAX_ELEMENTS
        # float32 needs too much shared memory of a GPU; Triton's interpreter is for tests
        supported = _dtype(x) == torch.bfloat16 if x.is_cuda else os.environ.get("TRITON_INTERPRET") == "1"
        fits = count > 1 and addressed and supported
        if x.requires_grad or not fits or (torch.is_grad_enabled() and not norm.training):
            return super().stem(x)
        rows, weight = (t.to(_dtype(x)) for t in (in_rows(x), weight_in_rows(self.conv1.weight)))
        known = None if norm.training else _eval_moments(norm)
        pooled, _, moments, _ = stem(rows, list(sizes), weight, norm.weight, norm.bias, norm.eps, known)
        if norm.training:
            with torch.no_grad():
                norm.running_mean.lerp_(moments[0], norm.momentum)
                norm.running_var.lerp_(moments[1] * (count / (count - 1)), norm.momentum)
                norm.num_batches_tracked.add_(1)
        return pooled


def _dtype(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _eval_moments(norm: Any) -> Tensor:
    """Batch-norm in eval mode: mean, variance, scale and shift."""
    mean, variance = norm.running_mean, norm.running_var
    scale = norm.weight / (variance + norm.eps).sqrt()
    return torch.stack([mean, variance, scale, norm.bias - mean * scale]).detach()


def self_test(device: torch.device) -> None:
    """One forward and backward pass on 64 images of 32x32; raises what the kernels cannot do here."""
    network = ResNet18(3).to(device)
    network.__class__ = FusedStem
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
        pooled = network.train().stem(torch.zeros(64, 32, 32, 3, device=device).permute(0, 3, 1, 2))
    pooled.float().sum().backward()

"""The stem of ResNet18 in few passes over memory: convolution, batch-norm, ReLU and max-pool as one operation (Triton).

The stem is where a step's bytes are: its maps are four times as large as what the pool leaves of them. Written layer by
layer, the large map is read or written eleven times a step; here it is written once and read three times:

    forward    y = conv(x)        statistics of y      pooled = max of relu(norm(y)), the winner's place and its raw y
    backward   sums over winners  the gradient of y, made tile by tile and at once multiplied with x: never stored

``FusedStem`` is the same function of the same weights as the layers it replaces, up to rounding; the tests hold it to them,
on the CPU by Triton's interpreter. Where Triton is missing, or the shapes are others, the layers run as they are.

Letters: n images, Y X the map after the convolution, P Q after the pool, K output channels (a power of two).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.models.backbones import ResNet18

try:
    import triton
    import triton.language as tl
except ImportError:  # no Triton on this machine: `usable` says so
    triton = None

DEPTH = 16  # channels of a block of 2x2 pixels, filled up
ROWS = 4  # a 7x7 stride-2 convolution is 4x4 on blocks
_TILE = 64  # places of a tile
_PARTS = 1024  # partial sums of a reduction


def usable(network: nn.Module) -> bool:
    """Whether this network's stem is the one written here, and Triton is there to run it."""
    if triton is None or type(network) is not ResNet18:
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


if triton is not None:

    @triton.jit
    def _moments(y, mean, spread, count, places, STEP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
        """Each program: mean and summed squared deviation of its places, tile after tile merged (Chan et al., 1983)."""
        part = tl.program_id(0)
        k = tl.arange(0, K)
        m = tl.zeros((K,), tl.float32)
        s = tl.zeros((K,), tl.float32)
        seen = 0.0
        for t in range(STEP):
            p = (part * STEP + t) * TILE + tl.arange(0, TILE)
            here = (p < places)[:, None]
            v = tl.load(y + p.to(tl.int64)[:, None] * K + k[None, :], mask=here, other=0.0).to(tl.float32)
            now = tl.minimum(tl.maximum(places - (part * STEP + t) * TILE, 0), TILE).to(tl.float32)
            own = tl.sum(v, 0) / tl.maximum(now, 1.0)
            off = tl.where(here, v - own[None, :], 0.0)
            total = tl.maximum(seen + now, 1.0)
            gap = own - m
            s += tl.sum(off * off, 0) + gap * gap * (seen * now / total)
            m += gap * (now / total)
            seen += now
        tl.store(mean + part * K + k, m)
        tl.store(spread + part * K + k, s)
        tl.store(count + part, seen)

    @triton.jit
    def _pool(
        y, scale, shift, pooled, top, winner, places,
        Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """pooled = max over 3x3 of relu(scale * y + shift); the first of equals wins, as in the layer."""
        p = tl.program_id(0) * TILE + tl.arange(0, TILE)
        k = tl.arange(0, K)
        image, i, j = (p // (P * Q)).to(tl.int64), (p // Q) % P, p % Q
        a, b = tl.load(scale + k)[None, :], tl.load(shift + k)[None, :]
        best = tl.full((TILE, K), -1.0, tl.float32)
        raw = tl.zeros((TILE, K), tl.float32)
        who = tl.zeros((TILE, K), tl.int32)
        for tap in tl.static_range(9):
            r, c = 2 * i - 1 + tap // 3, 2 * j - 1 + tap % 3
            there = ((r >= 0) & (r < Y) & (c >= 0) & (c < X) & (p < places))[:, None]
            v = tl.load(y + ((image * Y + r) * X + c)[:, None] * K + k[None, :], mask=there, other=0.0).to(tl.float32)
            z = tl.where(there, tl.maximum(a * v + b, 0.0), -1.0)
            more = z > best
            best, raw, who = tl.where(more, z, best), tl.where(more, v, raw), tl.where(more, tap, who)
        to = p.to(tl.int64)[:, None] * K + k[None, :]
        tl.store(pooled + to, best.to(pooled.dtype.element_ty), mask=(p < places)[:, None])
        tl.store(top + to, raw.to(top.dtype.element_ty), mask=(p < places)[:, None])
        tl.store(winner + to, who.to(tl.uint8), mask=(p < places)[:, None])

    @triton.jit
    def _sums(
        grad, top, scale, shift, mean, rstd, total, along, places,
        STEP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """Over the winners alone: the sum of the gradient (for beta) and of gradient times normalised y (for gamma)."""
        part = tl.program_id(0)
        k = tl.arange(0, K)
        a, b = tl.load(scale + k)[None, :], tl.load(shift + k)[None, :]
        m, r = tl.load(mean + k)[None, :], tl.load(rstd + k)[None, :]
        one = tl.zeros((K,), tl.float32)
        two = tl.zeros((K,), tl.float32)
        for t in range(STEP):
            p = (part * STEP + t) * TILE + tl.arange(0, TILE)
            at = p.to(tl.int64)[:, None] * K + k[None, :]
            v = tl.load(top + at, mask=(p < places)[:, None], other=0.0).to(tl.float32)
            g = tl.load(grad + at, mask=(p < places)[:, None], other=0.0).to(tl.float32)
            g = tl.where(a * v + b > 0, g, 0.0)
            one += tl.sum(g, 0)
            two += tl.sum(g * (v - m) * r, 0)
        tl.store(total + part * K + k, one)
        tl.store(along + part * K + k, two)

    @triton.jit
    def _won(grad, winner, image, i, j, k, tap, there, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr):
        """The gradient of window (i, j) where its winner stood at this tap, else zero."""
        at = ((image * P + i) * Q + j)[:, None] * K + k[None, :]
        g = tl.load(grad + at, mask=there[:, None], other=0.0).to(tl.float32)
        w = tl.load(winner + at, mask=there[:, None], other=9)
        return tl.where(w == tap, g, 0.0)

    @triton.jit
    def _dealt(
        y, grad, winner, u, q, w, a, b, image, i, j, k, inside,
        OY: tl.constexpr, OX: tl.constexpr,
        Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    ):  # fmt: skip
        """(TILE, K) the gradient of y at places (2i + OY, 2j + OX), which up to four windows share."""
        r, c = 2 * i + OY, 2 * j + OX
        there = inside & (r < Y) & (c < X)
        v = tl.load(y + ((image * Y + r) * X + c)[:, None] * K + k[None, :], mask=there[:, None], other=0.0)
        v = v.to(tl.float32)
        dz = _won(grad, winner, image, i, j, k, (1 + OY) * 3 + 1 + OX, inside, P, Q, K)
        if OX == 1:
            dz += _won(grad, winner, image, i, j + 1, k, (1 + OY) * 3, inside & (j + 1 < Q), P, Q, K)
        if OY == 1:
            dz += _won(grad, winner, image, i + 1, j, k, 1 + OX, inside & (i + 1 < P), P, Q, K)
        if OX == 1 and OY == 1:
            dz += _won(grad, winner, image, i + 1, j + 1, k, 0, inside & (i + 1 < P) & (j + 1 < Q), P, Q, K)
        dz = tl.where(a * v + b > 0, dz, 0.0)
        # batch-norm's backward, a straight line in dz and y: a * dz + u + q * (y - mean)
        return tl.where(there[:, None], a * dz + u + q * (v - w), 0.0)

    @triton.jit
    def _weights(
        x, y, grad, winner, scale, shift, u, q, mean, out, places,
        STEP: tl.constexpr, HX: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr,
        K: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
    ):  # fmt: skip
        """(K, ROW) of the weight's gradient for one row of taps: sum over places of dy^T times the ROW numbers of x there.

        Four taps side by side are ROW = 4 * 16 neighbouring numbers, so a row of taps is one matrix product.
        """
        part = tl.program_id(0)
        k = tl.arange(0, K)
        e = tl.arange(0, ROW)
        a, b = tl.load(scale + k)[None, :], tl.load(shift + k)[None, :]
        uu, qq, m = tl.load(u + k)[None, :], tl.load(q + k)[None, :], tl.load(mean + k)[None, :]
        acc0 = tl.zeros((K, ROW), tl.float32)
        acc1 = tl.zeros((K, ROW), tl.float32)
        acc2 = tl.zeros((K, ROW), tl.float32)
        acc3 = tl.zeros((K, ROW), tl.float32)
        deep: tl.constexpr = ROW // 4
        for t in range(STEP):
            p = (part * STEP + t) * TILE + tl.arange(0, TILE)
            image, i, j = (p // (P * Q)).to(tl.int64), (p // Q) % P, p % Q
            inside = p < places
            for o in tl.static_range(4):
                dy = _dealt(
                    y, grad, winner, uu, qq, m, a, b, image, i, j, k, inside, o // 2, o % 2, Y, X, P, Q, K
                )  # fmt: skip
                d = tl.trans(dy.to(x.dtype.element_ty))
                r, c = 2 * i + o // 2, 2 * j + o % 2
                there = (inside & (r < Y) & (c < X))[:, None]
                at = ((image * (Y + 3) + r) * HX + c)[:, None] * deep + e[None, :]
                acc0 += tl.dot(d, tl.load(x + at, mask=there, other=0.0))
                acc1 += tl.dot(d, tl.load(x + at + HX * deep, mask=there, other=0.0))
                acc2 += tl.dot(d, tl.load(x + at + 2 * HX * deep, mask=there, other=0.0))
                acc3 += tl.dot(d, tl.load(x + at + 3 * HX * deep, mask=there, other=0.0))
        to = out + part * (4 * K * ROW) + k[:, None] * (4 * ROW) + e[None, :]
        tl.store(to, acc0)
        tl.store(to + ROW, acc1)
        tl.store(to + 2 * ROW, acc2)
        tl.store(to + 3 * ROW, acc3)


@torch.library.custom_op("headcount::stem", mutates_args=())
def stem(x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    """(n, Y + 3, X + 3, 16) blocks -> pooled (n, P, Q, K), and for the way back y, top, winner, mean, variance."""
    n, Y, X, K = x.shape[0], x.shape[1] - 3, x.shape[2] - 3, len(weight)
    P, Q = (Y + 1) // 2, (X + 1) // 2
    y = F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).contiguous()
    mean, variance = _statistics(y.view(-1, K))
    a = gamma * (variance + eps).rsqrt()
    pooled, top = y.new_empty(n, P, Q, K), y.new_empty(n, P, Q, K)
    winner = torch.empty(n, P, Q, K, dtype=torch.uint8, device=y.device)
    places = n * P * Q
    _pool[(triton.cdiv(places, _TILE),)](
        y, a, beta - mean * a, pooled, top, winner, places, Y, X, P, Q, K, _TILE, num_warps=4
    )
    return [pooled, y, top, winner, mean, variance]


def _statistics(y: Tensor) -> tuple[Tensor, Tensor]:
    """(M, K) -> mean and (biased) variance of each column, from partial moments."""
    M, K = y.shape
    step = triton.cdiv(triton.cdiv(M, 2 * _TILE), _PARTS)
    parts = triton.cdiv(triton.cdiv(M, 2 * _TILE), step)
    mean, spread = y.new_empty(2, parts, K, dtype=torch.float32)
    count = y.new_empty(parts, dtype=torch.float32)
    _moments[(parts,)](y, mean, spread, count, M, step, K, 2 * _TILE, num_warps=4)
    whole = (mean * count[:, None]).sum(0) / M
    return whole, (spread + count[:, None] * (mean - whole).square()).sum(0) / M


@stem.register_fake
def _(x: Tensor, weight: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> list[Tensor]:
    n, Y, X, K = x.shape[0], x.shape[1] - 3, x.shape[2] - 3, len(weight)
    small = (n, (Y + 1) // 2, (X + 1) // 2, K)
    mean = x.new_empty(K, dtype=torch.float32)
    winner = x.new_empty(small, dtype=torch.uint8)
    return [x.new_empty(small), x.new_empty(n, Y, X, K), x.new_empty(small), winner, mean, mean.clone()]


@torch.library.custom_op("headcount::stem_backward", mutates_args=())
def stem_backward(
    grad: Tensor, x: Tensor, y: Tensor, top: Tensor, winner: Tensor, mean: Tensor, variance: Tensor,
    gamma: Tensor, beta: Tensor, eps: float,
) -> list[Tensor]:  # fmt: skip
    """The gradients of weight (K, 4, 4, 16), gamma and beta. Images have none."""
    (n, Y, X, K), (P, Q) = y.shape, top.shape[1:3]
    grad, places = grad.contiguous(), n * P * Q
    x = x if x.is_cuda else x.float()  # Triton's interpreter multiplies no bf16
    rstd = (variance + eps).rsqrt()
    a = gamma * rstd
    b = beta - mean * a
    step = triton.cdiv(triton.cdiv(places, _TILE), _PARTS)
    parts = triton.cdiv(triton.cdiv(places, _TILE), step)
    sums = grad.new_empty(2, parts, K, dtype=torch.float32)
    _sums[(parts,)](grad, top, a, b, mean, rstd, sums[0], sums[1], places, step, K, _TILE, num_warps=4)
    total, along = (s.clone() for s in sums.sum(1))  # an operation's results may not share memory
    M = n * Y * X
    u, q = -a * total / M, -a * rstd * along / M
    parts = min(triton.cdiv(places, _TILE), _programs(y.device))
    step = triton.cdiv(triton.cdiv(places, _TILE), parts)
    out = x.new_empty(parts, K, ROWS * ROWS * DEPTH, dtype=torch.float32)
    _weights[(parts,)](
        x, y, grad, winner, a, b, u, q, mean, out, places,
        step, X + 3, Y, X, P, Q, K, ROWS * DEPTH, _TILE, num_warps=8,
    )  # fmt: skip
    return [out.sum(0).view(K, ROWS, ROWS, DEPTH), along, total]


def _programs(device: torch.device) -> int:
    """One weight-gradient program for each multiprocessor: their sums are added up afterwards."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


@stem_backward.register_fake
def _(grad, x, y, top, winner, mean, variance, gamma, beta, eps):  # type: ignore[no-untyped-def]
    K = len(gamma)
    like = grad.new_empty(K, dtype=torch.float32)
    return [grad.new_empty(K, ROWS, ROWS, DEPTH, dtype=torch.float32), like, like.clone()]


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    x, _, gamma, beta, eps = inputs
    _, y, top, winner, mean, variance = output
    ctx.save_for_backward(x, y, top, winner, mean, variance, gamma, beta)
    ctx.eps = eps


def _back(ctx: Any, grads: Any) -> tuple[Tensor | None, ...]:
    x, y, top, winner, mean, variance, gamma, beta = ctx.saved_tensors
    weight, g, b = stem_backward(grads[0], x, y, top, winner, mean, variance, gamma, beta, ctx.eps)
    return None, weight.to(x.dtype), g, b, None


stem.register_autograd(_back, setup_context=_remember)


class FusedStem(ResNet18):
    """A ResNet18 whose stem is the operation above while it learns; asked in eval mode, the layers themselves answer."""

    def stem(self, x: Tensor) -> Tensor:
        if not self.training or x.requires_grad or x.shape[2] % 2 or x.shape[3] % 2:
            return super().stem(x)
        kind = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        norm = self.bn1
        pooled, *_, mean, variance = stem(
            in_blocks(x).to(kind), weight_in_blocks(self.conv1.weight).to(kind), norm.weight, norm.bias, norm.eps
        )
        with torch.no_grad():
            count = x.shape[0] * x.shape[2] * x.shape[3] // 4
            norm.running_mean.lerp_(mean, norm.momentum)
            norm.running_var.lerp_(variance * (count / (count - 1)), norm.momentum)
            norm.num_batches_tracked.add_(1)
        return pooled.permute(0, 3, 1, 2)

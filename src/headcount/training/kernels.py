"""Triton kernels of the stem; :mod:`headcount.training.stem` says what they are for and calls them.

Letters: Y X the map after the convolution, P Q after the pool, K channels (a power of two); places are rows of K numbers.
"""

import triton
import triton.language as tl


@triton.jit
def moments(y, mean, spread, count, places, STEP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    """Each program: mean and summed squared deviation of its places, tile after tile merged (Chan et al., 1983)."""
    part = tl.program_id(0)
    k = tl.arange(0, K)
    m = tl.zeros((K,), tl.float32)
    s = tl.zeros((K,), tl.float32)
    seen = 0.0
    for t in range(STEP):
        first = (part * STEP + t) * TILE
        p = first + tl.arange(0, TILE)
        here = (p < places)[:, None]
        v = tl.load(y + p[:, None] * K + k[None, :], mask=here, other=0.0).to(tl.float32)
        now = tl.minimum(tl.maximum(places - first, 0), TILE).to(tl.float32)
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
def merge(
    mean, spread, count, gamma, beta, eps, out, parts, places, K: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The parts' moments -> mean, variance, and batch-norm as a line: scale, shift (the rows of ``out``)."""
    k = tl.arange(0, K)
    r = tl.arange(0, PARTS)
    at = r[:, None] * K + k[None, :]
    m = tl.load(mean + at, mask=(r < parts)[:, None], other=0.0)
    s = tl.load(spread + at, mask=(r < parts)[:, None], other=0.0)
    n = tl.load(count + r, mask=r < parts, other=0.0)[:, None]
    whole = tl.sum(m * n, 0) / places
    gap = m - whole[None, :]
    variance = tl.sum(s + n * gap * gap, 0) / places
    scale = tl.load(gamma + k) / tl.sqrt(variance + eps)
    tl.store(out + k, whole)
    tl.store(out + K + k, variance)
    tl.store(out + 2 * K + k, scale)
    tl.store(out + 3 * K + k, tl.load(beta + k) - whole * scale)


@triton.jit
def pool(
    y, line, pooled, top, winner, places,
    Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """pooled = max over 3x3 of relu(scale * y + shift); the first of equals wins, as in the layer.

    A line is monotone: its largest value stands where y is largest, or smallest if the scale is negative. (If the scale
    is exactly zero all are equal and the layer takes the first; here the largest y stands for them.)
    """
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, K)
    image, i, j = p // (P * Q), (p // Q) % P, p % Q
    a, b = tl.load(line + 2 * K + k)[None, :], tl.load(line + 3 * K + k)[None, :]
    sign = tl.where(a < 0, -1.0, 1.0)
    best = tl.full((TILE, K), float("-inf"), tl.float32)
    who = tl.zeros((TILE, K), tl.int32)
    for tap in tl.static_range(9):
        r, c = 2 * i - 1 + tap // 3, 2 * j - 1 + tap % 3
        there = ((r >= 0) & (r < Y) & (c >= 0) & (c < X) & (p < places))[:, None]
        v = tl.load(y + ((image * Y + r) * X + c)[:, None] * K + k[None, :], mask=there, other=0.0).to(tl.float32)
        v = tl.where(there, sign * v, float("-inf"))
        who = tl.where(v > best, tap, who)
        best = tl.maximum(v, best)
    raw = sign * best
    to = p[:, None] * K + k[None, :]
    inside = (p < places)[:, None]
    tl.store(pooled + to, tl.maximum(a * raw + b, 0.0).to(pooled.dtype.element_ty), mask=inside)
    tl.store(top + to, raw.to(top.dtype.element_ty), mask=inside)
    tl.store(winner + to, who.to(tl.uint8), mask=inside)


@triton.jit
def sums(grad, top, line, eps, total, along, places, STEP: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr):
    """Over the winners alone: the sum of the gradient (for beta) and of gradient times normalised y (for gamma)."""
    part = tl.program_id(0)
    k = tl.arange(0, K)
    a, b = tl.load(line + 2 * K + k)[None, :], tl.load(line + 3 * K + k)[None, :]
    m, r = tl.load(line + k)[None, :], 1.0 / tl.sqrt(tl.load(line + K + k) + eps)[None, :]
    one = tl.zeros((K,), tl.float32)
    two = tl.zeros((K,), tl.float32)
    for t in range(STEP):
        p = (part * STEP + t) * TILE + tl.arange(0, TILE)
        at = p[:, None] * K + k[None, :]
        v = tl.load(top + at, mask=(p < places)[:, None], other=0.0).to(tl.float32)
        g = tl.load(grad + at, mask=(p < places)[:, None], other=0.0).to(tl.float32)
        g = tl.where(a * v + b > 0, g, 0.0)
        one += tl.sum(g, 0)
        two += tl.sum(g * (v - m) * r, 0)
    tl.store(total + part * K + k, one)
    tl.store(along + part * K + k, two)


@triton.jit
def won(grad, winner, window, k, tap, there, K: tl.constexpr):
    """The gradient of a window where its winner stood at this tap, else zero."""
    at = window[:, None] * K + k[None, :]
    g = tl.load(grad + at, mask=there[:, None], other=0.0).to(tl.float32)
    w = tl.load(winner + at, mask=there[:, None], other=9)
    return tl.where(w == tap, g, 0.0)


@triton.jit
def dealt(
    y, grad, winner, line, total, along, eps, out, places, everywhere,
    Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The gradient of y at (2i + o, 2j + h), which up to four windows share; o and h are the program's."""
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, K)
    a, b = tl.load(line + 2 * K + k)[None, :], tl.load(line + 3 * K + k)[None, :]
    m, r = tl.load(line + k)[None, :], 1.0 / tl.sqrt(tl.load(line + K + k) + eps)[None, :]
    u = -a * tl.load(total + k)[None, :] / everywhere
    q = -a * r * r * tl.load(along + k)[None, :] / r / everywhere
    image, i, j = p // (P * Q), (p // Q) % P, p % Q
    inside = p < places
    right, below = inside & (j + 1 < Q), inside & (i + 1 < P)
    for o in tl.static_range(4):
        row, column = 2 * i + o // 2, 2 * j + o % 2
        there = (inside & (row < Y) & (column < X))[:, None]
        at = ((image * Y + row) * X + column)[:, None] * K + k[None, :]
        v = tl.load(y + at, mask=there, other=0.0).to(tl.float32)
        dz = won(grad, winner, p, k, (1 + o // 2) * 3 + 1 + o % 2, inside, K)
        if o % 2 == 1:
            dz += won(grad, winner, p + 1, k, (1 + o // 2) * 3, right, K)
        if o // 2 == 1:
            dz += won(grad, winner, p + Q, k, 1 + o % 2, below, K)
        if o == 3:
            dz += won(grad, winner, p + Q + 1, k, 0, right & below, K)
        dz = tl.where(a * v + b > 0, dz, 0.0)
        tl.store(out + at, (a * dz + u + q * (v - m)).to(out.dtype.element_ty), mask=there)


@triton.jit
def weights(
    x, dy, out, places, steps,
    HX: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, K: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """(K, 4 * ROW) of the weight's gradient: sum over places of dy^T times the numbers of x under the taps.

    Four taps side by side are ROW = 4 * 16 neighbouring numbers, so a row of taps is one matrix product.
    """
    part = tl.program_id(0)
    k = tl.arange(0, K)
    e = tl.arange(0, 4 * ROW)
    deep: tl.constexpr = ROW // 4
    under = (e // ROW) * (HX * deep) + e % ROW
    acc = tl.zeros((K, 4 * ROW), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        here = (p < places)[:, None]
        place = ((p // (Y * X)) * (Y + 3) + (p // X) % Y) * HX + p % X
        d = tl.load(dy + p[:, None] * K + k[None, :], mask=here, other=0.0)
        v = tl.load(x + place[:, None] * deep + under[None, :], mask=here, other=0.0)
        acc += tl.dot(tl.trans(d), v)
    tl.store(out + part * (4 * K * ROW) + k[:, None] * (4 * ROW) + e[None, :], acc)

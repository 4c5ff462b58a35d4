"""Triton kernels of the fused stem; :mod:`headcount.training.stem` explains and calls them.

Letters: Y X the map after the convolution, P Q after the pool, K channels (a power of two). Positions of the map come in pairs
of neighbours in a row, numbered (image, row, pair); there are Q pairs in a row. Under the taps of a pair are TAPS numbers of x:
eight rows of SPAN, the first at twice the pair's row and STRIDE times the pair.
"""

import triton
import triton.language as tl


@triton.jit
def load_patches(x, first, valid, e, PITCH: tl.constexpr, SPAN: tl.constexpr):
    """The numbers under the taps of pairs, of which ``first`` is the address of the first; zero for invalid pairs."""
    under = (e // SPAN) * PITCH + e % SPAN
    return tl.load(x + first[:, None] + under[None, :], mask=valid[:, None], other=0.0)


@triton.jit
def load_pairs(
    x, y, p, pairs, k, e, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of pairs: the numbers under their taps, the addresses of their 2 K numbers in y, and which of these exist: the last pair of
    an odd row has one position."""
    row, j = p // Q, p % Q
    valid = p < pairs
    first = ((row // Y) * ROWS + 2 * (row % Y)) * PITCH + STRIDE * j
    inside = valid[:, None] & (2 * j[:, None] + k[None, :] // K < X)
    return load_patches(x, first, valid, e, PITCH, SPAN), y + ((row * X + 2 * j) * K)[:, None] + k[None, :], inside


@triton.jit
def convolve(
    x, w, y, mean, spread, count, pairs, steps, LEARNS: tl.constexpr,
    ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x by w, which has a row of TAPS for each of a pair's 2 K numbers. LEARNS: also the moments of y, in
    parts: mean, sum of squared deviations, count."""
    part = tl.program_id(0)
    k = tl.arange(0, 2 * K)
    e = tl.arange(0, TAPS)
    weight = tl.load(w + k[None, :] * TAPS + e[:, None])
    # sums stay in their threads and are reduced once, at the end: a sum over a tile needs exchanges between all threads
    sums = tl.zeros((TILE, 2 * K), tl.float32)
    squares = tl.zeros((TILE, 2 * K), tl.float32)
    n_pairs = tl.zeros((TILE,), tl.float32)
    n_single = tl.zeros((TILE,), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        v, at, inside = load_pairs(x, y, p, pairs, k, e, ROWS, PITCH, STRIDE, Y, X, Q, K, SPAN)
        result = tl.where(inside, tl.dot(v, weight), 0.0).to(y.dtype.element_ty)
        tl.store(at, result, mask=inside)
        if LEARNS:
            wide = result.to(tl.float32)
            sums += wide
            squares += wide * wide
            n_pairs += (p < pairs).to(tl.float32)
            n_single += ((p < pairs) & (2 * (p % Q) + 1 == X)).to(tl.float32)
    if LEARNS:
        n = tl.sum(n_pairs, 0) - tl.where(k < K, 0.0, tl.sum(n_single, 0))
        total = tl.sum(sums, 0)
        at = part * 2 * K + k
        tl.store(mean + at, total / tl.maximum(n, 1.0))
        deviations = tl.sum(squares, 0) - total * total / tl.maximum(n, 1.0)
        tl.store(spread + at, tl.maximum(deviations, 0.0, propagate_nan=tl.PropagateNan.ALL))
        tl.store(count + at, n)


@triton.jit
def correlate(
    x, y, out, pairs, steps, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum over pairs of their 2 K numbers of y times the numbers under the taps (2 K, TAPS)."""
    part = tl.program_id(0)
    k = tl.arange(0, 2 * K)
    e = tl.arange(0, TAPS)
    product = tl.zeros((2 * K, TAPS), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        v, at, inside = load_pairs(x, y, p, pairs, k, e, ROWS, PITCH, STRIDE, Y, X, Q, K, SPAN)
        product = tl.dot(tl.trans(tl.load(at, mask=inside, other=0.0)), v, product)
    tl.store(out + part * (2 * K * TAPS) + k[:, None] * TAPS + e[None, :], product)


@triton.jit
def merge_moments(
    mean, spread, count, gamma, beta, eps, out, parts, positions, K: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The moments of the parts -> mean, variance, and batch-norm's scale and shift (the rows of ``out``), merged by Chan et al.,
    1983. A program has TILE of the channels."""
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    r = tl.arange(0, PARTS)
    at = r[:, None] * K + k[None, :]
    m = tl.load(mean + at, mask=(r < parts)[:, None], other=0.0)
    s = tl.load(spread + at, mask=(r < parts)[:, None], other=0.0)
    n = tl.load(count + at, mask=(r < parts)[:, None], other=0.0)
    merged = tl.sum(m * n, 0) / positions
    gap = m - merged[None, :]
    variance = tl.sum(s + n * gap * gap, 0) / positions
    scale = tl.load(gamma + k) / tl.sqrt(variance + eps)
    tl.store(out + k, merged)
    tl.store(out + K + k, variance)
    tl.store(out + 2 * K + k, scale)
    tl.store(out + 3 * K + k, tl.load(beta + k) - merged * scale)


@triton.jit
def max_pool(
    y, moments, pooled, winner, windows,
    Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """pooled = max over 3x3 of relu(scale * y + shift); the first of equal values wins, as in the layer, and none (9) below
    zero. The function is monotone: its maximum is where y is largest, or smallest if the scale is negative. (With a scale of
    exactly zero all are equal and the layer takes the first; here it is the largest y.)"""
    p = tl.program_id(0) * TILE + tl.arange(0, TILE)
    k = tl.arange(0, K)
    image, i, j = p // (P * Q), (p // Q) % P, p % Q
    a, b = tl.load(moments + 2 * K + k)[None, :], tl.load(moments + 3 * K + k)[None, :]
    sign = tl.where(a < 0, -1.0, 1.0)
    best = tl.full((TILE, K), float("-inf"), tl.float32)
    best_tap = tl.zeros((TILE, K), tl.int32)
    for tap in tl.static_range(9):
        r, c = 2 * i - 1 + tap // 3, 2 * j - 1 + tap % 3
        on_map = ((r >= 0) & (r < Y) & (c >= 0) & (c < X) & (p < windows))[:, None]
        v = tl.load(y + ((image * Y + r) * X + c)[:, None] * K + k[None, :], mask=on_map, other=0.0).to(tl.float32)
        v = tl.where(on_map, sign * v, float("-inf"))
        best_tap = tl.where(v > best, tap, best_tap)
        best = tl.maximum(v, best, propagate_nan=tl.PropagateNan.ALL)
    result = tl.maximum(a * sign * best + b, 0.0, propagate_nan=tl.PropagateNan.ALL)
    to = p[:, None] * K + k[None, :]
    inside = (p < windows)[:, None]
    tl.store(pooled + to, result.to(pooled.dtype.element_ty), mask=inside)
    tl.store(winner + to, tl.where(result > 0, best_tap, 9).to(tl.uint8), mask=inside)


@triton.jit
def at_winner(g, w, tap):
    """The gradient of a window whose winner is at this tap; otherwise zero."""
    return tl.where(w == tap, g, 0.0)


@triton.jit
def gradient(
    grad, winner, x, out, total, windows, steps, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum over pairs of the gradient of the normalised map times the numbers under the taps (2 K rows of TAPS, rows 2k and
    2k + 1 for the positions of a pair); and the sum of that gradient.

    Window (i, j) of the pool is centred at the position (2i, 2j); so the four positions (2i, 2j) to (2i + 1, 2j + 1), a pair below
    another, are in this window, the one to the right, the one below and the one between these, and in no other. At an edge these
    are windows of another row or image, whose winners are never at the taps that are compared here.
    """
    part = tl.program_id(0)
    k = tl.arange(0, K)
    e = tl.arange(0, TAPS)
    product = tl.zeros((2 * K, TAPS), tl.float32)
    sums = tl.zeros((TILE, K), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        row, j = p // Q, p % Q
        i = row % P
        valid, right, below, last = p < windows, p + 1 < windows, p + Q < windows, p + Q + 1 < windows
        at = p[:, None] * K + k[None, :]
        g = tl.load(grad + at, mask=valid[:, None], other=0.0).to(tl.float32)
        w = tl.load(winner + at, mask=valid[:, None], other=9)
        gr = tl.load(grad + at + K, mask=right[:, None], other=0.0).to(tl.float32)
        wr = tl.load(winner + at + K, mask=right[:, None], other=9)
        gb = tl.load(grad + at + Q * K, mask=below[:, None], other=0.0).to(tl.float32)
        wb = tl.load(winner + at + Q * K, mask=below[:, None], other=9)
        gd = tl.load(grad + at + Q * K + K, mask=last[:, None], other=0.0).to(tl.float32)
        wd = tl.load(winner + at + Q * K + K, mask=last[:, None], other=9)
        first = ((row // P) * ROWS + 4 * i) * PITCH + STRIDE * j
        v = load_patches(x, first, valid, e, PITCH, SPAN)
        d = tl.reshape(tl.join(at_winner(g, w, 4), at_winner(g, w, 5) + at_winner(gr, wr, 3)), (TILE, 2 * K))
        product = tl.dot(tl.trans(d.to(v.dtype)), v, product)
        v = load_patches(x, first + 2 * PITCH, valid & (2 * i + 1 < Y), e, PITCH, SPAN)
        left = at_winner(g, w, 7) + at_winner(gb, wb, 1)
        second = at_winner(g, w, 8) + at_winner(gr, wr, 6) + at_winner(gb, wb, 2) + at_winner(gd, wd, 0)
        d = tl.reshape(tl.join(left, second), (TILE, 2 * K))
        product = tl.dot(tl.trans(d.to(v.dtype)), v, product)
        sums += tl.where(w < 9, g, 0.0)
    r = tl.arange(0, 2 * K)
    tl.store(out + part * (2 * K * TAPS) + r[:, None] * TAPS + e[None, :], product)
    tl.store(total + part * K + k, tl.sum(sums, 0))

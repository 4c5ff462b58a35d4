"""Triton kernels of the stem; :mod:`headcount.training.accel.stem` says what they are for and calls them.

Letters: Y X the map after the convolution, P Q after the pool, K channels (a power of two). Places of the map come in pairs,
two neighbours of a row, and are numbered (image, row, pair); there are Q pairs in a row. Under the taps of a pair lie TAPS
numbers of x: eight rows of SPAN, whose first stands at twice the pair's row and STRIDE times the pair.
"""

import triton
import triton.language as tl


@triton.jit
def beneath(x, first, here, e, PITCH: tl.constexpr, SPAN: tl.constexpr):
    """The numbers under the taps of pairs, the first of each at its place; zero where no pair is."""
    under = (e // SPAN) * PITCH + e % SPAN
    return tl.load(x + first[:, None] + under[None, :], mask=here[:, None], other=0.0)


@triton.jit
def paired(
    x, y, p, pairs, k, e, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Of pairs: the numbers under their taps, where their 2 K numbers stand in y, and which of these there are: the last pair
    of an odd row is one place."""
    row, j = p // Q, p % Q
    here = p < pairs
    first = ((row // Y) * ROWS + 2 * (row % Y)) * PITCH + STRIDE * j
    there = here[:, None] & (2 * j[:, None] + k[None, :] // K < X)
    return beneath(x, first, here, e, PITCH, SPAN), y + ((row * X + 2 * j) * K)[:, None] + k[None, :], there


@triton.jit
def mapped(
    x, w, y, mean, spread, count, pairs, steps, LEARNS: tl.constexpr,
    ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr, Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr,
    K: tl.constexpr, TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """y = the convolution of x by w, which has a row of TAPS for each of a pair's 2 K numbers. LEARNS: y's moments too, in
    parts: mean, summed squared deviation, how many."""
    part = tl.program_id(0)
    k = tl.arange(0, 2 * K)
    e = tl.arange(0, TAPS)
    line = tl.load(w + k[None, :] * TAPS + e[:, None])
    # sums are kept where they arise and added up once, in the end: a sum over a tile passes between all its threads
    one = tl.zeros((TILE, 2 * K), tl.float32)
    two = tl.zeros((TILE, 2 * K), tl.float32)
    many = tl.zeros((TILE,), tl.float32)
    lone = tl.zeros((TILE,), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        v, at, there = paired(x, y, p, pairs, k, e, ROWS, PITCH, STRIDE, Y, X, Q, K, SPAN)
        got = tl.where(there, tl.dot(v, line), 0.0).to(y.dtype.element_ty)
        tl.store(at, got, mask=there)
        if LEARNS:
            seen = got.to(tl.float32)
            one += seen
            two += seen * seen
            many += (p < pairs).to(tl.float32)
            lone += ((p < pairs) & (2 * (p % Q) + 1 == X)).to(tl.float32)
    if LEARNS:
        n = tl.sum(many, 0) - tl.where(k < K, 0.0, tl.sum(lone, 0))
        whole = tl.sum(one, 0)
        at = part * 2 * K + k
        tl.store(mean + at, whole / tl.maximum(n, 1.0))
        off = tl.sum(two, 0) - whole * whole / tl.maximum(n, 1.0)
        tl.store(spread + at, tl.maximum(off, 0.0, propagate_nan=tl.PropagateNan.ALL))
        tl.store(count + at, n)


@triton.jit
def crossed(
    x, y, out, pairs, steps, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, X: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum over pairs of their 2 K numbers of y times the numbers under the taps (2 K, TAPS)."""
    part = tl.program_id(0)
    k = tl.arange(0, 2 * K)
    e = tl.arange(0, TAPS)
    both = tl.zeros((2 * K, TAPS), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        v, at, there = paired(x, y, p, pairs, k, e, ROWS, PITCH, STRIDE, Y, X, Q, K, SPAN)
        both = tl.dot(tl.trans(tl.load(at, mask=there, other=0.0)), v, both)
    tl.store(out + part * (2 * K * TAPS) + k[:, None] * TAPS + e[None, :], both)


@triton.jit
def merge(
    mean, spread, count, gamma, beta, eps, out, parts, places, K: tl.constexpr, PARTS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """The parts' moments -> mean, variance, and batch-norm as a line: scale, shift (the rows of ``out``). Merged, not summed up
    (Chan et al., 1983). A program sees to TILE of the channels."""
    k = tl.program_id(0) * TILE + tl.arange(0, TILE)
    r = tl.arange(0, PARTS)
    at = r[:, None] * K + k[None, :]
    m = tl.load(mean + at, mask=(r < parts)[:, None], other=0.0)
    s = tl.load(spread + at, mask=(r < parts)[:, None], other=0.0)
    n = tl.load(count + at, mask=(r < parts)[:, None], other=0.0)
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
    y, line, pooled, winner, windows,
    Y: tl.constexpr, X: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """pooled = max over 3x3 of relu(scale * y + shift); the first of equals wins, as in the layer, and nobody (9) below zero.

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
        there = ((r >= 0) & (r < Y) & (c >= 0) & (c < X) & (p < windows))[:, None]
        v = tl.load(y + ((image * Y + r) * X + c)[:, None] * K + k[None, :], mask=there, other=0.0).to(tl.float32)
        v = tl.where(there, sign * v, float("-inf"))
        who = tl.where(v > best, tap, who)
        best = tl.maximum(v, best, propagate_nan=tl.PropagateNan.ALL)
    said = tl.maximum(a * sign * best + b, 0.0, propagate_nan=tl.PropagateNan.ALL)
    to = p[:, None] * K + k[None, :]
    inside = (p < windows)[:, None]
    tl.store(pooled + to, said.to(pooled.dtype.element_ty), mask=inside)
    tl.store(winner + to, tl.where(said > 0, who, 9).to(tl.uint8), mask=inside)


@triton.jit
def won(g, w, tap):
    """The gradient of a window where its winner stood at this tap, else zero."""
    return tl.where(w == tap, g, 0.0)


@triton.jit
def dealt(
    grad, winner, x, out, total, windows, steps, ROWS: tl.constexpr, PITCH: tl.constexpr, STRIDE: tl.constexpr,
    Y: tl.constexpr, P: tl.constexpr, Q: tl.constexpr, K: tl.constexpr,
    TAPS: tl.constexpr, SPAN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The sum over pairs of the gradient of the normalised map times the numbers under the taps (2 K rows of TAPS, rows 2k and
    2k + 1 for the places of a pair); and the sum of that gradient.

    Window (i, j) of the pool stands around the place (2i, 2j); so the four places (2i, 2j) to (2i + 1, 2j + 1), a pair below
    another, lie in this window, the one to the right, the one below and the one between these, and in no other. At an edge
    these are windows of another row or image; none of them has its winner outside its own, where the taps asked for here are.
    """
    part = tl.program_id(0)
    k = tl.arange(0, K)
    e = tl.arange(0, TAPS)
    both = tl.zeros((2 * K, TAPS), tl.float32)
    alone = tl.zeros((TILE, K), tl.float32)
    for t in range(steps):
        p = (part * steps + t) * TILE + tl.arange(0, TILE)
        row, j = p // Q, p % Q
        i = row % P
        here, right, below, last = p < windows, p + 1 < windows, p + Q < windows, p + Q + 1 < windows
        at = p[:, None] * K + k[None, :]
        g = tl.load(grad + at, mask=here[:, None], other=0.0).to(tl.float32)
        w = tl.load(winner + at, mask=here[:, None], other=9)
        gr = tl.load(grad + at + K, mask=right[:, None], other=0.0).to(tl.float32)
        wr = tl.load(winner + at + K, mask=right[:, None], other=9)
        gb = tl.load(grad + at + Q * K, mask=below[:, None], other=0.0).to(tl.float32)
        wb = tl.load(winner + at + Q * K, mask=below[:, None], other=9)
        gd = tl.load(grad + at + Q * K + K, mask=last[:, None], other=0.0).to(tl.float32)
        wd = tl.load(winner + at + Q * K + K, mask=last[:, None], other=9)
        first = ((row // P) * ROWS + 4 * i) * PITCH + STRIDE * j
        v = beneath(x, first, here, e, PITCH, SPAN)
        d = tl.reshape(tl.join(won(g, w, 4), won(g, w, 5) + won(gr, wr, 3)), (TILE, 2 * K))
        both = tl.dot(tl.trans(d.to(v.dtype)), v, both)
        v = beneath(x, first + 2 * PITCH, here & (2 * i + 1 < Y), e, PITCH, SPAN)
        left = won(g, w, 7) + won(gb, wb, 1)
        d = tl.reshape(tl.join(left, won(g, w, 8) + won(gr, wr, 6) + won(gb, wb, 2) + won(gd, wd, 0)), (TILE, 2 * K))
        both = tl.dot(tl.trans(d.to(v.dtype)), v, both)
        alone += tl.where(w < 9, g, 0.0)
    r = tl.arange(0, 2 * K)
    tl.store(out + part * (2 * K * TAPS) + r[:, None] * TAPS + e[None, :], both)
    tl.store(total + part * K + k, tl.sum(alone, 0))

"""Class shares of bags, and the counts they become: ten equal bins of the majority's share, filled as the paper's generator fills them.

The paper's generator draws blocks of ten million proposals from a distribution ("law"), keeps for each bin the first that fall into
it, and moves on to the next law when the bins of the stage are full. A bin is therefore a sample from "law, given the bin", which
``sample_shares`` draws in milliseconds; ``sample_shares_official`` repeats the blocks, in the released order of random numbers.

Shapes: p (n, C) rows that sum to one, the majority in the last column for laws A, B, G and in any column for U.
"""

from functools import lru_cache
from itertools import pairwise
from math import ceil

import numpy as np

from headcount.errors import HeadcountError, check_choice

Array = np.ndarray
BINS = 10
BLOCK = 10_000_000

# (alpha, beta): the minority classes are uniform on (0, alpha), the majority on (beta, 1); U draws all from (0, 1)
LAWS = {"U": (1.0, 0.0), "A": (0.3, 0.8), "B": (0.1, 0.9), "G": (0.05, 0.95)}

# (law, bins that must be full before the next law): a tuple of bins, or how many bins of any kind
Stages = tuple[tuple[str, tuple[int, ...] | int], ...]
UNIFORM: Stages = (("U", BINS),)  # also of a scenario that is given as a range
STAGES: dict[str, Stages] = {
    "various": (("U", tuple(range(5))), ("A", tuple(range(8))), ("B", 10)),
    "small": UNIFORM,
    "large": (("A", tuple(range(4))), ("B", 7), ("G", 10)),
}


def check_scenario(given: str) -> str:
    """The name of a scenario, or a range of the majority's share, always spelled the same."""
    try:
        low, high = map(float, given.split("-"))
    except (AttributeError, ValueError):
        return check_choice("scenario", given, [*STAGES, "LOW-HIGH such as 0.3-0.5"])
    if not 0.001 <= low < high <= 1:
        raise HeadcountError(f"scenario {given} is no range of the majority's share; give two shares up to 1, such as 0.3-0.5")
    return f"{low:.12g}-{high:.12g}"


def bin_edges(scenario: str, classes: int) -> Array:
    """(11,) the edges of the bins of the majority's share."""
    ranges = {"various": (1 / classes, 1.0), "small": (1 / classes, 0.4), "large": (0.6, 1.0)}
    low, high = ranges[scenario] if scenario in ranges else map(float, scenario.split("-"))
    if low >= high:
        raise HeadcountError(f"scenario {scenario} needs at least {3 if scenario == 'small' else 2} classes, got {classes}")
    if low < 1 / classes:
        raise HeadcountError(f"scenario {scenario}: the largest of {classes} shares is at least {1 / classes:.4g}; start there")
    return low + (high - low) * np.arange(BINS + 1) / BINS


def sample_shares(scenario: str, classes: int, bags: int, rng: np.random.Generator) -> Array:
    """(bags, C) shares, the majority's share distributed evenly over the bins, rows in random order."""
    need = np.full(BINS, bags // BINS)
    need[rng.choice(BINS, bags % BINS, replace=False)] += 1
    bins = zip(pairwise(bin_edges(scenario, classes)), samples_per_law(scenario, classes, need, rng), strict=True)
    rows = [sample_given_bin(law, classes, *edges, n, rng) for edges, parts in bins for law, n in parts.items()]
    return rng.permutation(np.concatenate(rows))


def samples_per_law(scenario: str, classes: int, need: Array, rng: np.random.Generator) -> list[dict[str, int]]:
    """For each bin, how many samples come from which law, when blocks are drawn stage by stage. Proposals fall into a bin as a
    Poisson process, so the block of each can be drawn without drawing the blocks."""
    e, left = bin_edges(scenario, classes), need.copy()
    parts: list[dict[str, int]] = [{} for _ in range(BINS)]
    for law, stop in STAGES.get(scenario, UNIFORM):
        rates = [BLOCK * max(bin_probability(law, classes, *edges), 1e-280) for edges in pairwise(e)]
        # for each bin, the block in which its 1st, 2nd, ... proposal falls
        hits = [np.ceil((rng.standard_exponential(n) / rate).cumsum()) for n, rate in zip(left, rates, strict=True)]
        full = np.array([c[-1] if len(c) else 0.0 for c in hits])
        last = full[list(stop)].max() if isinstance(stop, tuple) else np.sort(full)[stop - 1]
        for b in range(BINS):
            if count := int(np.count_nonzero(hits[b] <= last)):
                reachable = law_or_uniform(law, classes, e[b], e[b + 1])
                parts[b][reachable] = parts[b].get(reachable, 0) + count
                left[b] -= count
    return parts


def law_or_uniform(law: str, classes: int, low: float, high: float) -> str:
    """The law, or U where it never reaches the bin (two classes, Large: the released loop never ends); U reaches every bin."""
    return law if bin_probability(law, classes, low, high) > 0 else "U"


@lru_cache
def bin_probability(law: str, classes: int, low: float, high: float) -> float:
    """The probability that the majority's share of one proposal lies in (low, high). The share is above s where the sum of the
    minority classes is below major * (1/s - 1), and a sum of uniforms follows the Irwin-Hall distribution. For U, whose
    minority classes are uniform below the majority, the majority cancels."""
    alpha, beta = LAWS[law]
    major = np.array([1.0]) if law == "U" else beta + (1 - beta) * (np.arange(200) + 0.5) / 200
    below = [_irwin_hall(classes - 1, major * (1 / s - 1) / alpha).mean() for s in (low, high)]
    return max(0.0, float(below[0] - below[1]))


def _irwin_hall(n: int, x: np.ndarray) -> Array:
    """P(the sum of n uniforms < x): B-splines of degree n at x, x - 1, ..., by their recurrence, summed. Only positive numbers
    are added, so that small probabilities keep their precision."""
    t = np.clip(x, 0, n)[:, None] - np.arange(n + 1)
    spline = ((t >= 0) & (t < 1)).astype(float)
    for m in range(1, n + 1):
        later = np.pad(spline[:, 1:], ((0, 0), (0, 1)))
        spline = (t * spline + (m + 1 - t) * later) / m
    return spline.sum(1)


def sample_given_bin(law: str, classes: int, low: float, high: float, count: int, rng: np.random.Generator) -> Array:
    """(count, C) rows of the law, given that the majority's share lies in (low, high)."""
    by_rejection = law == "U" and bin_probability("U", classes, low, high) > _acceptance(classes, low, high)
    accepted_rows, missing, tries = [], count, 4 * count + 64
    for _ in range(60):
        if by_rejection:
            p = rng.random((tries, classes))
            share = p.max(1) / p.sum(1)
            p = p[(low < share) & (share < high)]
        else:
            p, accepted = _propose(law, classes, low, high, tries, rng)
            p = p[accepted]
            if law == "U":  # the majority may be any class
                p = rng.permuted(p, axis=1)
        accepted_rows.append(p[:missing] / p[:missing].sum(1, keepdims=True))
        missing -= len(accepted_rows[-1])
        if not missing:
            return np.concatenate(accepted_rows)
        tries = min(4 * tries, ceil(2e6 / classes) + 64)
    raise HeadcountError(f"no class shares found with a majority of {low:.3f} to {high:.3f} among {classes} classes")


@lru_cache
def _acceptance(classes: int, low: float, high: float) -> float:
    return float(_propose("U", classes, low, high, 50_000, np.random.default_rng(0))[1].mean())


def _propose(law: str, classes: int, low: float, high: float, tries: int, rng: np.random.Generator) -> tuple[Array, Array]:
    """Proposals whose minority classes are uniform on the simplex {x >= 0, sum x < 1/low - 1}, and which of them to accept."""
    alpha, beta = LAWS[law]
    major = rng.uniform(beta, 1, tries)
    direction = rng.standard_exponential((tries, classes - 1))
    direction /= direction.sum(1, keepdims=True)
    minors = direction * ((1 / low - 1) * rng.random(tries) ** (1 / (classes - 1)))[:, None]
    share = major / (major + minors.sum(1))
    limit = major if law == "U" else np.full(tries, alpha)
    accepted = (minors <= limit[:, None]).all(1) & (low < share) & (share < high)
    return np.column_stack([minors, major]), accepted


def sample_shares_official(scenario: str, classes: int, bags: int, rng: np.random.RandomState, block: int = BLOCK) -> Array:
    """(bags, C) shares by the released procedure: blocks of proposals, each of which adds to all bins."""
    if bags % BINS:
        raise HeadcountError(f"the official sampler fills ten equal bins: {bags} bags do not divide by 10")
    e, need = bin_edges(scenario, classes), bags // BINS
    bins = [np.empty((0, classes)) for _ in range(BINS)]
    for law, stop in STAGES[scenario]:
        while True:
            full = [len(rows) >= need for rows in bins]
            if all(full[b] for b in stop) if isinstance(stop, tuple) else sum(full) >= stop:
                break
            p = _block(law, classes, block, rng)
            share = p.max(1)
            for b in range(BINS):
                if len(bins[b]) < need:
                    hit = p[(e[b] < share) & (share < e[b + 1])]
                    bins[b] = np.concatenate([bins[b], hit])[:need]
    rows = np.concatenate(bins)
    rng.shuffle(rows)
    return rows


def _block(law: str, classes: int, block: int, rng: np.random.RandomState) -> Array:
    alpha, beta = LAWS[law]
    if law == "U":
        p = rng.rand(block, classes)
    else:
        minors = rng.uniform(0, alpha, (block, classes - 1))  # minorities first, then majorities: the released order
        p = np.concatenate([minors, rng.uniform(beta, 1, (block, 1))], axis=1)
    return p / p.sum(1, keepdims=True)


def round_shares(p: Array, bag_size: int, rounding: str = "official") -> Array:
    """(n, C) shares -> (n, C) counts that sum to the bag size.

    ``official``: each column is rounded half to even, limited to what is left of the bag, and the *last* gets the remainder:

    >>> round_shares(np.full((1, 10), 0.1), 64)
    array([[ 6,  6,  6,  6,  6,  6,  6,  6,  6, 10]])
    >>> round_shares(np.full((1, 10), 0.1), 64, "largest_remainder")
    array([[7, 7, 7, 7, 6, 6, 6, 6, 6, 6]])
    """
    if rounding == "largest_remainder":
        exact = p * bag_size
        counts = np.floor(exact).astype(np.int64)
        order = np.argsort(counts - exact, axis=1, kind="stable")  # the largest remainder first, then the lowest column
        extra = np.arange(p.shape[1]) < (bag_size - counts.sum(1))[:, None]
        np.put_along_axis(counts, order, np.take_along_axis(counts, order, 1) + extra, 1)
        return counts
    counts = np.rint(p * bag_size).astype(np.int64)
    left = np.full(len(p), bag_size)
    for c in range(p.shape[1] - 1):
        counts[:, c] = np.minimum(counts[:, c], left)
        left -= counts[:, c]
    counts[:, -1] = left
    return counts


def majority_labels(counts: Array, tie: str, rng: np.random.Generator | np.random.RandomState) -> Array:
    """(n,) the class with the largest count; a tie goes to the lowest class, or to one of the tied at random."""
    if tie != "random":
        return counts.argmax(1)
    top = counts == counts.max(1, keepdims=True)
    return np.array([rng.choice(np.flatnonzero(row)) for row in top])

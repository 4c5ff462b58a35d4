"""The paper's protocol: a labelled data set becomes five folds, and each fold becomes majority-labelled bags.

Class shares are drawn (share_sampler.py), rounded to counts and assigned to the classes at random; the label is the class with
the largest count, by default the lowest in case of a tie. Instances are drawn without replacement within a bag. All random
numbers come from the generator that is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headcount.bags import Bags, Pool
from headcount.datasets import share_sampler
from headcount.datasets.registry import Source
from headcount.errors import HeadcountError, check_bool, check_choice, check_number

SCENARIOS = ("various", "small", "large")
SPLITS = ("train", "valid", "test")
FOLDS = 5
RANGES = {
    "bag_size": (1, 1 << 20),
    **dict.fromkeys(("train_bags", "valid_bags", "test_bags"), (1, 1 << 24)),
    "seed": (0, (1 << 32) - 1),
}


@dataclass(frozen=True)
class Protocol:
    """What determines the bags; the defaults are the paper's.

    Parameters
    ----------
    scenario : {"various", "small", "large"}
        Distribution of the majority's share.
    bag_size, train_bags, valid_bags, test_bags : int
        Instances per bag, and bags per split.
    seed : int
        Seed of the folds and the bags.
    sampler : {"conditional", "official"}
        Draw class shares directly, or follow the released code's order of random numbers.
    tie : {"lowest", "random", "reject"}
        The label of a tied bag: the lowest of the tied classes, one at random, or draw the bag again.
    rounding : {"official", "largest_remainder"}
        How shares become counts; see :func:`round_shares`.
    overlap : bool
        Whether bags may share instances.
    """

    scenario: str = "various"
    bag_size: int = 64
    train_bags: int = 400
    valid_bags: int = 100
    test_bags: int = 100
    seed: int = 42
    sampler: str = "conditional"
    tie: str = "lowest"
    rounding: str = "official"
    overlap: bool = True

    def __post_init__(self) -> None:
        check_choice("scenario", self.scenario, SCENARIOS)
        check_choice("sampler", self.sampler, ("conditional", "official"))
        check_choice("tie rule", self.tie, ("lowest", "random", "reject"))
        check_choice("rounding", self.rounding, ("official", "largest_remainder"))
        for name, (low, high) in RANGES.items():
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, integer=True))
        object.__setattr__(self, "overlap", check_bool("overlap", self.overlap))

    def n_bags(self, split: str) -> int:
        """Number of bags of a split."""
        return {"train": self.train_bags, "valid": self.valid_bags, "test": self.test_bags}[split]


def fold_blocks(count: int, seed: int = 42) -> list[np.ndarray]:
    """Five blocks of one permutation, without the remainder; seed 42 gives the released permutation."""
    order = np.arange(count)
    np.random.RandomState(seed).shuffle(order)
    length = count // FOLDS
    if length == 0:
        raise HeadcountError(f"five folds need at least {FOLDS} instances, got {count}")
    return [order[i * length : (i + 1) * length] for i in range(FOLDS)]


def split_indices(count: int, fold: int, seed: int = 42) -> dict[str, np.ndarray]:
    """Indices of the splits of a fold: test is block i, validation the next, training the other three in order."""
    fold = check_number("fold", fold, 0, FOLDS - 1, integer=True)
    blocks = fold_blocks(count, seed)
    train = np.concatenate([blocks[(fold + k) % FOLDS] for k in (2, 3, 4)])
    return {"train": train, "valid": blocks[(fold + 1) % FOLDS], "test": blocks[fold]}


def majority_bags(source: Source, fold: int, protocol: Protocol | None = None) -> dict[str, Bags]:
    """The training, validation and test bags of one fold. They carry truth; call ``.blind()`` before training.

    Parameters
    ----------
    source : Source
        See :func:`headcount.load_source`.
    fold : int
        0 to 4.
    protocol : Protocol, optional
        Default: the paper's.

    >>> from headcount.datasets.registry import load_source
    >>> bags = majority_bags(load_source("digits"), 0, Protocol(bag_size=24, train_bags=40, valid_bags=10, test_bags=10))
    >>> bags["train"]
    Bags(40 bags, 960 instances, 10 classes, with truth)
    """
    protocol, fold = protocol or Protocol(), check_number("fold", fold, 0, FOLDS - 1, integer=True)
    if protocol.sampler == "official":
        return _official_bags(source, fold, protocol)
    bags, pool = {}, source.pool()
    for split, indices in split_indices(len(source), fold, protocol.seed).items():
        scenario = SCENARIOS.index(protocol.scenario)
        rng = np.random.default_rng([protocol.seed, fold, SPLITS.index(split), scenario])
        counts, labels = draw_counts(protocol, len(source.classes), protocol.n_bags(split), rng)
        bags[split] = fill_bags(source, pool, indices, counts, labels, rng, overlap=protocol.overlap, split=split)
    return bags


def _official_bags(source: Source, fold: int, protocol: Protocol) -> dict[str, Bags]:
    """The released order of random numbers: one legacy stream over the permutation and folds 0, 1, ... up to this one."""
    rng = np.random.RandomState(protocol.seed)
    rng.shuffle(np.arange(len(source)))  # the permutation is the stream's first use
    bags, pool = {}, source.pool()
    for f in range(fold + 1):
        for split, indices in split_indices(len(source), f, protocol.seed).items():
            counts, labels = draw_counts(protocol, len(source.classes), protocol.n_bags(split), rng)
            bags[split] = fill_bags(source, pool, indices, counts, labels, rng, overlap=protocol.overlap, split=split)
    return bags


Rng = np.random.Generator | np.random.RandomState


def draw_counts(protocol: Protocol, classes: int, bags: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """(bags, C) instances of each class, and (bags,) the label of each bag."""
    if isinstance(rng, np.random.RandomState):
        p = share_sampler.sample_shares_official(protocol.scenario, classes, bags, rng)
    else:
        p = share_sampler.sample_shares(protocol.scenario, classes, bags, rng)
    counts = round_shares(p, protocol.bag_size, protocol.rounding)
    for row in counts:
        rng.shuffle(row)
    for _ in range(1000):
        tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
        if protocol.tie != "reject" or not tied.any():
            return counts, majority_labels(counts, protocol.tie, rng)
        counts[tied] = _redraw(protocol, p[tied], rng)
    raise HeadcountError(
        f"bags of {protocol.bag_size} over {classes} classes are tied too often; use larger bags or another tie rule"
    )


def _redraw(protocol: Protocol, p: np.ndarray, rng: Rng) -> np.ndarray:
    """New counts for tied rows, from new shares in the same bins as the old ones."""
    e = share_sampler.bin_edges(protocol.scenario, p.shape[1])
    law = {"various": "U", "small": "U", "large": "A"}[protocol.scenario]
    generator = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(rng.randint(1 << 31))
    bins = np.clip(np.searchsorted(e, p.max(1)) - 1, 0, share_sampler.BINS - 1)
    # as in samples_per_law: U where the law never reaches the bin (two classes, Large)
    laws = [law if share_sampler.bin_probability(law, p.shape[1], e[b], e[b + 1]) > 0 else "U" for b in bins]
    pairs = zip(laws, bins, strict=True)
    shares = [share_sampler.sample_given_bin(w, p.shape[1], e[b], e[b + 1], 1, generator) for w, b in pairs]
    return generator.permuted(round_shares(np.concatenate(shares), protocol.bag_size, protocol.rounding), axis=1)


def round_shares(p: np.ndarray, bag_size: int, rounding: str = "official") -> np.ndarray:
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


def majority_labels(counts: np.ndarray, tie: str, rng: Rng) -> np.ndarray:
    """(n,) the class with the largest count; a tie goes to the lowest class, or to one of the tied at random."""
    if tie != "random":
        return counts.argmax(1)
    top = counts == counts.max(1, keepdims=True)
    return np.array([rng.choice(np.flatnonzero(row)) for row in top])


def fill_bags(
    source: Source,
    pool: Pool,
    indices: np.ndarray,
    counts: np.ndarray,
    labels: np.ndarray,
    rng: Rng,
    *,
    overlap: bool = True,
    split: str = "train",
) -> Bags:
    """Draw the instances: none twice in a bag, and between bags only if ``overlap``, else there may be fewer bags."""
    members = [indices[source.truth[indices] == c] for c in range(len(source.classes))]
    for c, of_class in enumerate(members):
        # the released code shuffles these with Python's random numbers, which leaves its stream of numpy's unchanged
        (np.random.RandomState(c) if isinstance(rng, np.random.RandomState) else rng).shuffle(of_class)
        if counts[:, c].max() > len(of_class):
            advice = "use smaller bags (--bag-size) or more data" if len(of_class) else "drop the class, or add some"
            raise HeadcountError(
                f"class {source.classes[c]!r} has {len(of_class)} instances in the {split} part of {source.name}, "
                f"a bag needs {counts[:, c].max()}; {advice}"
            )
    used = np.zeros(len(members), dtype=np.int64)
    rows = []
    for count in counts:
        if overlap:
            row = np.concatenate([rng.choice(m, n, replace=False) for m, n in zip(members, count, strict=True)])
        elif any(used[c] + n > len(members[c]) for c, n in enumerate(count)):
            break
        else:
            row = np.concatenate([m[u : u + n] for m, u, n in zip(members, used, count, strict=True)])
            used += count
        rng.shuffle(row)
        rows.append(row)
    if not rows:
        raise HeadcountError(f"the {split} part of {source.name} is too small for one bag of {counts[0].sum()}")
    index = np.concatenate(rows)
    sizes = [len(row) for row in rows]
    return Bags.of(
        pool, index=index, sizes=sizes, labels=labels[: len(rows)], classes=source.classes, truth=source.truth[index]
    )

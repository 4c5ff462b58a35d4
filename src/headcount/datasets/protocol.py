"""The paper's protocol: a labelled data set becomes five folds, and each fold becomes majority-labelled bags.

Class shares are drawn (share_sampler.py), rounded to counts and assigned to the classes at random; the label is the class with
the largest count, by default the lowest in case of a tie. Instances are drawn without replacement within a bag.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.datasets import share_sampler
from headcount.datasets.registry import Source
from headcount.errors import HeadcountError, check_bool, check_choice, check_number

SCENARIOS = tuple(share_sampler.STAGES)
SPLITS = ("train", "valid", "test")
FOLDS = 5
Rng = np.random.Generator | np.random.RandomState
RANGES = {"bag_size": (1, 1 << 20), "seed": (0, (1 << 32) - 1)}
RANGES |= dict.fromkeys(("train_bags", "valid_bags", "test_bags"), (1, 1 << 24))


@dataclass(frozen=True)
class Protocol:
    """What determines the bags; the defaults are the paper's.

    Parameters
    ----------
    scenario : {"various", "small", "large"} or str
        Distribution of the majority's share; a range such as "0.3-0.5": evenly between two shares.
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
        object.__setattr__(self, "scenario", share_sampler.check_scenario(self.scenario))
        check_choice("sampler", self.sampler, ("conditional", "official"))
        if self.sampler == "official" and self.scenario not in SCENARIOS:
            raise HeadcountError(f"the official sampler knows {', '.join(SCENARIOS)}, not the range {self.scenario}")
        check_choice("tie rule", self.tie, ("lowest", "random", "reject"))
        check_choice("rounding", self.rounding, ("official", "largest_remainder"))
        for name, (low, high) in RANGES.items():
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, integer=True))
        object.__setattr__(self, "overlap", check_bool("overlap", self.overlap))


def split_indices(count: int, fold: int, seed: int = 42) -> dict[str, np.ndarray]:
    """Indices of the splits of a fold, from five blocks of one permutation (seed 42: the released one), without the remainder:
    test is block i, validation the next, training the other three in order."""
    fold = check_number("fold", fold, 0, FOLDS - 1, integer=True)
    order = np.arange(count)
    np.random.RandomState(seed).shuffle(order)
    length = count // FOLDS
    if length == 0:
        raise HeadcountError(f"five folds need at least {FOLDS} instances, got {count}")
    blocks = [order[i * length : (i + 1) * length] for i in range(FOLDS)]
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
    official = protocol.sampler == "official"  # one legacy stream over the permutation and folds 0, 1, ... up to this one
    rng: Rng = np.random.RandomState(protocol.seed)
    rng.shuffle(np.arange(len(source)))  # the permutation is the stream's first use
    bags, pool, name = {}, source.pool(), protocol.scenario
    scenario = (SCENARIOS.index(name),) if name in SCENARIOS else (len(SCENARIOS), *name.encode())
    for f in range(fold + 1) if official else (fold,):
        for split, indices in split_indices(len(source), f, protocol.seed).items():
            if not official:
                rng = np.random.default_rng([protocol.seed, f, SPLITS.index(split), *scenario])
            counts, labels = draw_counts(protocol, len(source.classes), getattr(protocol, f"{split}_bags"), rng)
            rows = draw_instances(source, indices, counts, rng, overlap=protocol.overlap, split=split)
            index, sizes, labels = np.concatenate(rows), [len(row) for row in rows], labels[: len(rows)]
            truth = source.truth[index]
            bags[split] = Bags.of(pool, index=index, sizes=sizes, labels=labels, classes=source.classes, truth=truth)
    return bags


def draw_counts(protocol: Protocol, classes: int, bags: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """(bags, C) instances of each class, and (bags,) the label of each bag."""
    if isinstance(rng, np.random.RandomState):
        p = share_sampler.sample_shares_official(protocol.scenario, classes, bags, rng)
    else:
        p = share_sampler.sample_shares(protocol.scenario, classes, bags, rng)
    counts = share_sampler.round_shares(p, protocol.bag_size, protocol.rounding)
    for row in counts:
        rng.shuffle(row)
    for _ in range(1000):
        tied = (counts == counts.max(1, keepdims=True)).sum(1) > 1
        if protocol.tie != "reject" or not tied.any():
            return counts, share_sampler.majority_labels(counts, protocol.tie, rng)
        counts[tied] = _redraw(protocol, p[tied], rng)
    problem = f"bags of {protocol.bag_size} over {classes} classes are tied too often"
    raise HeadcountError(f"{problem}; use larger bags or another tie rule")


def _redraw(protocol: Protocol, p: np.ndarray, rng: Rng) -> np.ndarray:
    """New counts for tied rows, from new shares in the same bins as the old ones."""
    classes, e = p.shape[1], share_sampler.bin_edges(protocol.scenario, p.shape[1])
    generator = rng if isinstance(rng, np.random.Generator) else np.random.default_rng(rng.randint(1 << 31))
    shares = []
    for b in np.clip(np.searchsorted(e, p.max(1)) - 1, 0, share_sampler.BINS - 1):
        law = share_sampler.law_or_uniform("A" if protocol.scenario == "large" else "U", classes, e[b], e[b + 1])
        shares.append(share_sampler.sample_given_bin(law, classes, e[b], e[b + 1], 1, generator))
    counts = share_sampler.round_shares(np.concatenate(shares), protocol.bag_size, protocol.rounding)
    return generator.permuted(counts, axis=1)


def draw_instances(
    source: Source, indices: np.ndarray, counts: np.ndarray, rng: Rng, *, overlap: bool, split: str
) -> list[np.ndarray]:
    """The instances of each bag: none twice in a bag, and between bags only if ``overlap``, else there may be fewer bags."""
    members = [indices[source.truth[indices] == c] for c in range(len(source.classes))]
    for c, of_class in enumerate(members):
        # the released code shuffles these with Python's random numbers, which leaves its stream of numpy's unchanged
        (np.random.RandomState(c) if isinstance(rng, np.random.RandomState) else rng).shuffle(of_class)
        if counts[:, c].max() > len(of_class):
            advice = "use smaller bags (--bag-size) or more data" if len(of_class) else "drop the class, or add some"
            has = f"class {source.classes[c]!r} has {len(of_class)} instances in the {split} part of {source.name}"
            raise HeadcountError(f"{has}, a bag needs {counts[:, c].max()}; {advice}")
    used, rows = np.zeros(len(members), dtype=np.int64), []
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
    return rows


CORRUPTION_RANGES = {"wrong": (0, 1), "unequal": (1, 10**6), "never": (0, 1 << 20), "merge": (1, 1 << 20)}


def check_corruption(corruption: Mapping[str, Any]) -> None:
    """Raise for an unknown name or a value out of range. The recipe's field and the errors call it ``trouble``.

    wrong    the fraction of bags that get another class's label, chosen at random
    unequal  how many times rarer the last class's label is than the first's: bags are dropped, by a constant ratio
    never    the number of a class that is never the majority: bags with its label are dropped
    merge    this many training bags with the same label become one; the label stays true, and a remainder is dropped
    """
    for name, value in corruption.items():
        check_choice("trouble", name, CORRUPTION_RANGES)
        check_number(f"trouble {name}", value, *CORRUPTION_RANGES[name], integer=name in ("never", "merge"))


def corrupt(bags: Mapping[str, Bags], corruption: Mapping[str, Any], seed: int) -> dict[str, Bags]:
    """Corruption as it occurs in practice, of training and validation bags; test bags stay as they are."""
    corrupted = dict(bags)
    for i, split in enumerate(("train", "valid")):
        rng = np.random.default_rng([seed, i, 7])
        kept = _drop_bags(bags[split], corruption, rng)
        if wrong := corruption.get("wrong", 0):
            changed, target = rng.permutation(len(kept))[: round(wrong * len(kept))], kept.target.clone()
            shifts = rng.integers(1, len(kept.classes), len(changed))
            for b, shift in zip(changed.tolist(), shifts.tolist(), strict=True):
                target[b] = torch.roll(target[b], shift)
            kept = replace(kept, target=target)
        corrupted[split] = kept
    rng = np.random.default_rng([seed, 2, 7])
    return corrupted | {"train": _merge_bags(corrupted["train"], corruption.get("merge", 1), rng)}


def _drop_bags(bags: Bags, corruption: Mapping[str, Any], rng: np.random.Generator) -> Bags:
    label, classes = bags.label.cpu().numpy(), len(bags.classes)
    keep = np.ones(len(bags), bool)
    if "never" in corruption:
        if corruption["never"] >= classes:
            raise HeadcountError(f"trouble never is a class from 0 to {classes - 1}, got {corruption['never']}")
        keep &= label != corruption["never"]
    for c in range(classes):
        members = np.flatnonzero(label == c)
        n_dropped = len(members) - round(len(members) * float(corruption.get("unequal", 1)) ** (-c / (classes - 1)))
        keep[rng.permutation(members)[:n_dropped]] = False
    if not keep.any():
        raise HeadcountError("after this trouble no bag is left")
    return bags if keep.all() else bags.take(np.flatnonzero(keep))


def _merge_bags(bags: Bags, count: int, rng: np.random.Generator) -> Bags:
    if count == 1:
        return bags
    label, groups = bags.label.cpu().numpy(), []
    for c in np.unique(label):
        members = rng.permutation(np.flatnonzero(label == c))
        groups.append(members[: len(members) // count * count])
    order = np.concatenate(groups)
    if not len(order):
        raise HeadcountError(f"no label has {count} training bags to merge")
    bags = bags.take(order)
    return replace(bags, offsets=bags.offsets[::count], target=bags.target[::count], group=None, names=None)

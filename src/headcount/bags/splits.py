"""Splits, folds and subsamples of bags. In folds, the bags of a group (a patient, a site) stay together."""

from dataclasses import dataclass, replace

import numpy as np
import torch

from headcount.bags.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.errors import HeadcountError

VALID_FOLDS = 5  # one in five of the bags to train on is a validation bag
MAX_BAG_SIZE = 8192  # instances; an election of this many votes is hardly ever close
CONTEXT_BAG_SIZE = 200  # instances of a bag that show what they tell about each other


@dataclass(frozen=True)
class Split:
    """Bag numbers of the training, validation and test bags."""

    train: np.ndarray
    valid: np.ndarray
    test: np.ndarray
    valid_is_train: bool = False  # there were too few bags: the validation bags are training bags too


def make_splits(bags: Bags, n_folds: int, seed: int) -> list[Split]:
    """Splits for cross-validation over the labelled bags; unlabelled bags are always training bags. Returns an empty list where
    bags are too few: every training part needs two different labels."""
    labelled, unlabelled = (np.flatnonzero(bags.labelled.numpy() == has_label) for has_label in (True, False))
    n_folds = min(n_folds, count_groups(bags.take(labelled)))
    if n_folds < 2:
        return []
    fold, splits = assign_folds(bags.take(labelled), n_folds, seed), []
    for k in range(n_folds):
        test = labelled[fold == k]
        rest = np.concatenate([labelled[fold != k], exclude_groups(bags, unlabelled, test)])
        if not has_distinct_labels(bags.take(rest)):
            return []
        splits.append(train_valid_split(bags, rest, test, seed))
    return splits


def train_valid_split(bags: Bags, available: np.ndarray, test: np.ndarray, seed: int) -> Split:
    """Split the available bags into training and validation bags. Where the training bags would lose a label, all available
    bags are training bags, and the labelled ones validation bags."""
    labelled = available[bags.labelled.numpy()[available]]
    if count_groups(bags.take(labelled)) >= VALID_FOLDS:
        fold = assign_folds(bags.take(labelled), VALID_FOLDS, seed + 1)
        valid = labelled[fold == 0]
        train = np.concatenate([labelled[fold > 0], exclude_groups(bags, np.setdiff1d(available, labelled), valid)])
        if len(valid) and torch.equal(bags.target[train].any(0), bags.target[available].any(0)):
            return Split(np.sort(train), np.sort(valid), np.sort(test))
    return Split(np.sort(available), np.sort(labelled), np.sort(test), valid_is_train=True)


def assign_folds(bags: Bags, n_folds: int, seed: int = 0) -> np.ndarray:
    """(B,) the fold of each bag: whole groups, labels spread evenly. Groups are assigned one by one, the largest first, each to
    the fold that has least of the group's labels (and, where that is equal, fewest bags), so that every fold gets its share of
    every label as far as the groups allow. No fold is empty."""
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    return assign_group_folds(bags.target.cpu().numpy().astype(np.float64), group, n_folds, seed)


def assign_group_folds(target: np.ndarray, group: np.ndarray, n_folds: int, seed: int = 0) -> np.ndarray:
    """(B,) the fold of bags with these targets (B, C) and group numbers (B,)."""
    n_groups = int(group.max()) + 1
    if n_folds < 1 or n_groups < n_folds:
        raise HeadcountError(f"{n_folds} folds need as many groups of bags, and there are {n_groups}; give fewer folds")
    group_totals = np.zeros((n_groups, target.shape[1] + 1))
    np.add.at(group_totals, group, np.column_stack([target, np.ones(len(target))]))  # the last column counts the bags
    rng = np.random.default_rng(seed_for(seed, "folds", n_folds))
    order = rng.permutation(n_groups)
    order = order[np.argsort(-group_totals[order, -1], kind="stable")]
    fold_totals, fold_of = np.zeros((n_folds, group_totals.shape[1])), np.empty(n_groups, dtype=int)
    label_totals = np.maximum(group_totals[:, :-1].sum(0), 1e-12)
    for g in order.tolist():
        label_shares = group_totals[g, :-1] / label_totals
        overlap = (fold_totals[:, :-1] * label_shares).sum(1).round(9)
        k = min(range(n_folds), key=lambda k: (overlap[k], fold_totals[k, -1]))
        fold_totals[k] += group_totals[g]
        fold_of[g] = k
    return fold_of[group]


def count_groups(bags: Bags) -> int:
    """The number of groups; without groups every bag is one."""
    return len(bags) if bags.group is None else len(set(bags.group))


def exclude_groups(bags: Bags, bag_numbers: np.ndarray, held_out: np.ndarray) -> np.ndarray:
    """Those of ``bag_numbers`` that share no group with ``held_out``."""
    if bags.group is None:
        return bag_numbers
    excluded = {bags.group[b] for b in held_out.tolist()}
    return np.array([b for b in bag_numbers.tolist() if bags.group[b] not in excluded], dtype=int)


def has_distinct_labels(bags: Bags) -> bool:
    """Whether at least two bags have different labels: otherwise there is nothing to learn."""
    targets = bags.target[bags.labelled]
    return len(targets) > 1 and bool((targets != targets[0]).any())


def split_large_bags(bags: Bags, max_size: int | None = None) -> Bags:
    """The same instances in the same order, with bags larger than ``max_size`` cut into equal parts of the same label. As good
    as the bag for methods that use one instance at a time. The groups and names of bags are dropped."""
    max_size = max_size or MAX_BAG_SIZE
    parts = [-(-size // max_size) for size in bags.sizes.tolist()]
    sizes = [size // n + (i < size % n) for size, n in zip(bags.sizes.tolist(), parts, strict=True) for i in range(n)]
    offsets = torch.tensor([0, *np.cumsum(sizes)], device=bags.offsets.device)
    times = torch.tensor(parts, device=bags.target.device)
    target, votes = (None if v is None else v.repeat_interleave(times, 0) for v in (bags.target, bags.votes))
    return replace(bags, offsets=offsets, target=target, votes=votes, group=None, names=None)


def subsample_instances(bags: Bags, max_instances: int, seed: int = 0) -> Bags:
    """At most ``max_instances``, the same fraction of every bag and at least one; instances of known class are all kept. The
    sampled instances are weighted to represent those left out, so that a bag keeps its size and the weight of its known
    classes."""
    if len(bags.index) <= max_instances:
        return bags
    rows = sample_rows(bags, max_instances, seed)
    subsample, bag = bags.blind().keep_instances(rows), bags.bag
    weight = torch.ones(len(bags.index), device=bag.device) if bags.weight is None else bags.weight
    drawn = weight if bags.known is None else weight.masked_fill(bags.known >= 0, 0)  # known classes represent themselves
    total, sampled = (torch.bincount(bag[r], drawn[r].double(), len(bags)) for r in (slice(None), rows))
    factor = (total / sampled.clamp_min(1e-30))[subsample.bag].to(weight.dtype)
    return replace(subsample, weight=weight[rows] - drawn[rows] + drawn[rows] * factor)


def sample_rows(bags: Bags, max_instances: int, seed: int = 0) -> torch.Tensor:
    """The instances that :func:`subsample_instances` keeps."""
    n = len(bags.index)
    if n <= max_instances:
        return torch.arange(n)
    quota = np.maximum(1, bags.sizes.cpu().numpy() * max_instances // n)
    return draw_rows(bags, quota, np.random.default_rng(seed_for(seed, "thinned")))


def subsample_bags(bags: Bags, max_instances: int, seed: int = 0) -> tuple[Bags, torch.Tensor]:
    """Random bags with at most ``max_instances`` together, and the numbers of these instances. For what the instances of a bag
    tell about each other bags stay whole; ``CONTEXT_BAG_SIZE`` or more represent a larger bag."""
    if len(bags.index) <= max_instances:
        return bags, torch.arange(len(bags.index))
    rng = np.random.default_rng(seed_for(seed, "some bags"))
    size = min(max_instances, max(CONTEXT_BAG_SIZE, max_instances // len(bags)))
    quota, order = bags.sizes.cpu().numpy().clip(max=size), rng.permutation(len(bags))
    quota[order[quota[order].cumsum() > max_instances]] = 0
    rows = draw_rows(bags, quota, rng)
    return bags.blind().keep_instances(rows).take(quota > 0), rows


def draw_rows(bags: Bags, quota: np.ndarray, rng: np.random.Generator) -> torch.Tensor:
    """Random instances of each bag, ``quota`` (B,) many; where that is not zero, also all of known class."""
    n, bag = len(bags.index), bags.bag.cpu().numpy()
    known = np.zeros(n, bool) if bags.known is None else bags.known.cpu().numpy() >= 0
    order = np.lexsort((rng.random(n), known, bag))  # known classes are kept anyway
    rank = np.arange(n) - bags.offsets[:-1].cpu().numpy()[bag[order]]
    keep = np.zeros(n, bool)
    keep[order] = rank < quota[bag[order]]
    return torch.from_numpy(np.flatnonzero(keep | (known & (quota > 0)[bag])))

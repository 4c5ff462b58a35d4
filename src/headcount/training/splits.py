"""Folds of bags: whole groups together (a patient, a site), labels spread evenly, the same for the same seed."""

from __future__ import annotations

import numpy as np

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.training.seeds import seed_for


def bag_folds(bags: Bags, folds: int, seed: int = 0) -> np.ndarray:
    """(B,) the fold of each bag.

    Groups are dealt one by one, the largest first, each to the fold that is poorest in the group's labels (and, where that
    is the same, in bags), so that every fold gets its part of every label as far as the groups allow. No fold is empty.
    """
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    return deal(bags.target.cpu().numpy().astype(np.float64), group, folds, seed)


def groups_of(bags: Bags) -> int:
    """How many groups there are to deal: as many as bags, where nobody named any."""
    return len(bags) if bags.group is None else len(set(bags.group))


def deal(target: np.ndarray, group: np.ndarray, folds: int, seed: int = 0) -> np.ndarray:
    """(B,) folds of bags with these targets (B, C) and group numbers (B,)."""
    groups = int(group.max()) + 1
    if folds < 1 or groups < folds:
        raise HeadcountError(f"{folds} folds need as many groups of bags, and there are {groups}")
    held = np.zeros((groups, target.shape[1] + 1))
    np.add.at(held, group, np.column_stack([target, np.ones(len(target))]))  # the last column counts the bags
    rng = np.random.default_rng(seed_for(seed, "folds", folds))
    order = rng.permutation(groups)
    order = order[np.argsort(-held[order, -1], kind="stable")]
    has, fold_of = np.zeros((folds, held.shape[1])), np.empty(groups, dtype=int)
    whole = np.maximum(held[:, :-1].sum(0), 1e-12)
    for g in order.tolist():
        own = held[g, :-1] / whole
        rich = (has[:, :-1] * own).sum(1).round(9)
        k = min(range(folds), key=lambda k: (rich[k], has[k, -1]))
        has[k] += held[g]
        fold_of[g] = k
    return fold_of[group]

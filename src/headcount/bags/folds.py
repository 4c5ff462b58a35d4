"""Folds of bags: whole groups together (a patient, a site), labels spread evenly, the same for the same seed."""

from __future__ import annotations

import numpy as np

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.seeds import seed_for


def assign_folds(bags: Bags, n_folds: int, seed: int = 0) -> np.ndarray:
    """(B,) the fold of each bag.

    Groups are dealt one by one, the largest first, each to the fold that is poorest in the group's labels (and, where that
    is the same, in bags), so that every fold gets its part of every label as far as the groups allow. No fold is empty.
    """
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    return assign_group_folds(bags.target.cpu().numpy().astype(np.float64), group, n_folds, seed)


def count_groups(bags: Bags) -> int:
    """How many groups there are to deal: as many as bags, where nobody named any."""
    return len(bags) if bags.group is None else len(set(bags.group))


def assign_group_folds(target: np.ndarray, group: np.ndarray, n_folds: int, seed: int = 0) -> np.ndarray:
    """(B,) folds of bags with these targets (B, C) and group numbers (B,)."""
    n_groups = int(group.max()) + 1
    if n_folds < 1 or n_groups < n_folds:
        raise HeadcountError(f"{n_folds} folds need as many groups of bags, and there are {n_groups}")
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

"""Bags whose label looks wrong: ranked by the probability that models which never saw the bag give to its label.

Asked of a model that was trained on the same bags the ranking is worth less, for it may have learned the wrong labels too.
``cross_fitted`` needs no model: forests on the bag's label of every instance, each bag judged by the forests of other folds.

Letters: N instances, B bags, C classes, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from headcount.bags import Bags
from headcount.bags.splits import assign_random_folds
from headcount.errors import HeadcountError
from headcount.majority.calibration import fit_temperature
from headcount.readers import BagDataset

TREES, FOLDS = 100, 5
LIKELIHOOD_RATIO = 20  # times as likely: nothing speaks for the label
_MAX_PER_BAG = 200  # instances of a bag that a forest learns from, and that it is asked about
_MAX_BLOCKS = 12  # pictures are looked at in small: a forest wants few columns


def cross_val_bag_probabilities(dataset: BagDataset, folds: int = FOLDS, seed: int = 0) -> np.ndarray:
    """(B, C) probability of each label for each bag, by forests that saw none of its group; NaN rows for unlabelled bags."""
    bags = dataset.bags
    label = bags.label.numpy()
    rng = np.random.default_rng([seed, 2701])
    fold = assign_random_folds(bags, folds, rng)
    p = np.full((len(bags), len(bags.classes)), np.nan)
    for k in range(folds):
        fit = np.flatnonzero((fold != k) & (fold >= 0))
        held_out = np.flatnonzero(fold == k)
        if len(np.unique(label[fit])) < 2:
            raise HeadcountError(f"fold {k + 1} of {folds} leaves bags of one label only; give more bags, or a model")
        p[held_out] = _forest_predict(dataset, fit, held_out, rng)
    return fit_and_apply_temperature(p, label)


def _forest_predict(dataset: BagDataset, fit: np.ndarray, held_out: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(len(asked), C) mean answer of a forest trained on other bags; the preparation too is learned on those alone."""
    from sklearn.ensemble import RandomForestClassifier

    preprocessor = dataset.fit_preprocessor(fit) if dataset.schema.fields else None
    label, sizes = dataset.bags.label.numpy(), dataset.bags.sizes.numpy()
    (x, bag), (new, new_bag) = (_sample_instances(dataset, preprocessor, which, rng) for which in (fit, held_out))
    weight = 1 / np.minimum(sizes, _MAX_PER_BAG)[bag]  # a bag is one witness, however large
    forest = RandomForestClassifier(TREES, min_samples_leaf=3, random_state=int(rng.integers(1 << 31)))
    forest.fit(x, label[bag], sample_weight=weight * len(weight) / weight.sum())
    p = np.zeros((len(new), len(dataset.bags.classes)))
    p[:, forest.classes_] = forest.predict_proba(new)
    row = np.searchsorted(held_out, new_bag)
    count = np.bincount(row, minlength=len(held_out))[:, None]
    total = np.zeros((len(held_out), p.shape[1]))
    np.add.at(total, row, p)
    return total / count


def _sample_instances(
    dataset: BagDataset, preprocessor: Any, which: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(n, D) features of at most so many instances of each bag, and (n,) their bag."""
    ends = dataset.bags.offsets.numpy()
    picked, bag = [], []
    for b in which.tolist():
        rows = np.arange(ends[b], ends[b + 1])
        rows = rows if len(rows) <= _MAX_PER_BAG else np.sort(rng.choice(rows, _MAX_PER_BAG, replace=False))
        picked.append(rows)
        bag.append(np.full(len(rows), b))
    address = dataset.bags.index.numpy()[np.concatenate(picked)]
    if preprocessor is not None:
        x = preprocessor.transform(dataset.content.take(pa.array(address)))
    else:
        x = downsample(np.asarray(dataset.content[np.sort(address)]))[np.argsort(np.argsort(address, kind="stable"))]
    return x, np.concatenate(bag)


def downsample(x: np.ndarray) -> np.ndarray:
    """Features as they are; pictures as the means of at most 12x12 blocks."""
    if x.ndim == 2:
        return x.astype(np.float32)
    for axis in (1, 2):
        edges = np.linspace(0, x.shape[axis], min(_MAX_BLOCKS, x.shape[axis]) + 1).astype(int)
        x = np.add.reduceat(x.astype(np.float32), edges[:-1], axis) / np.diff(edges).reshape(
            [-1 if a == axis else 1 for a in range(x.ndim)]
        )
    return x.reshape(len(x), -1)


def fit_and_apply_temperature(p: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(B, C) the probabilities under the temperature that makes the given labels likeliest; NaN rows stay."""
    labelled = (label >= 0) & np.isfinite(p).all(1)
    log_p = np.log(np.maximum(p, 1e-6))

    def scaled(temperature: float) -> np.ndarray:
        z = log_p / temperature
        z = np.exp(z - z.max(1, keepdims=True))
        return z / z.sum(1, keepdims=True)

    def losses(temperature: float) -> np.ndarray:
        return -np.log(np.maximum(scaled(temperature)[labelled, label[labelled]], 1e-12))

    return np.where(labelled[:, None], scaled(fit_temperature(losses)), p)


def find_label_issues(bags: Bags, p: np.ndarray) -> pa.Table:
    """Labelled bags, the least believed label first. ``p`` (B, C): what is said of each bag's label.

    A bag with votes or a tie is given the probability of its likeliest winner. A label looks wrong if another class is the
    likeliest, and as likely as it usually is in bags of its own label (confident learning, Northcutt et al. 2021) or twenty
    times as likely as the label.
    """
    target = bags.target.numpy()
    labelled = np.flatnonzero(bags.labelled.numpy() & np.isfinite(p).all(1))
    wins = target >= target.max(1, keepdims=True) - 1e-6
    own = np.where(wins, p, -1)[labelled]
    label, p_label = own.argmax(1), own.max(1)
    suggestion, likeliest = p[labelled].argmax(1), p[labelled].max(1)
    usual = np.array([np.mean(p[labelled][label == k, k]) if (label == k).any() else np.inf for k in range(p.shape[1])])
    wrong = (suggestion != label) & ((likeliest >= usual[suggestion]) | (likeliest >= LIKELIHOOD_RATIO * p_label))
    order = np.argsort(p_label, kind="stable")
    words = pa.array(bags.classes, pa.string())
    names, winners = bags.names or tuple(map(str, range(len(bags)))), bags.label_names
    return pa.table({
        "rank": np.arange(1, len(labelled) + 1),
        "bag": pa.array([names[b] for b in labelled[order]], pa.string()),
        "label": pa.array([winners[b] for b in labelled[order]], pa.string()),
        "p_label": p_label[order].astype(np.float32),
        "suggestion": words.take(pa.array(suggestion[order])),
        "p_suggestion": likeliest[order].astype(np.float32),
        "looks_wrong": wrong[order],
        "instances": bags.sizes.numpy()[labelled][order],
    })  # fmt: skip

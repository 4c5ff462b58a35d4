"""Bags whose label looks wrong, ranked by the probability that models which never saw the bag give to its label.

A model that was trained on the same bags may have learned the wrong labels too; ``cross_val_bag_probabilities`` needs no model.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from scipy.special import softmax

from headcount.bags import Bags
from headcount.bags.splits import assign_random_folds
from headcount.errors import HeadcountError
from headcount.majority.calibration import fit_temperature
from headcount.readers import BagDataset
from headcount.readers.preprocessing import Preprocessor

TREES, FOLDS = 100, 5
LIKELIHOOD_RATIO = 20  # of another class to the label: nothing supports the label
_MAX_PER_BAG = 200  # instances of a bag that a forest is trained on, and that it predicts
_MAX_BLOCKS = 12  # a side: a forest needs few columns


def cross_val_bag_probabilities(dataset: BagDataset, folds: int = FOLDS, seed: int = 0, trees: int = TREES) -> np.ndarray:
    """(B, C) out-of-fold probabilities of each bag's label, by random forests trained on the bag's label of every instance; NaN
    rows for unlabelled bags. A group of bags stays in one fold."""
    bags = dataset.bags
    label = bags.label.numpy()
    rng = np.random.default_rng([seed, 2701])
    fold = assign_random_folds(bags, folds, rng)
    p = np.full((len(bags), len(bags.classes)), np.nan)
    for k in range(folds):
        fit, held_out = np.flatnonzero((fold != k) & (fold >= 0)), np.flatnonzero(fold == k)
        if len(np.unique(label[fit])) < 2:
            raise HeadcountError(f"fold {k + 1} of {folds} leaves bags of one label only; give more bags, or a model")
        p[held_out] = _forest_predict(dataset, fit, held_out, rng, trees)
    return fit_and_apply_temperature(p, label)


def _forest_predict(
    dataset: BagDataset, fit: np.ndarray, held_out: np.ndarray, rng: np.random.Generator, trees: int
) -> np.ndarray:
    """(len(held_out), C) mean prediction of a forest, which is trained on other bags, as its preprocessor is."""
    from sklearn.ensemble import RandomForestClassifier

    preprocessor = dataset.fit_preprocessor(fit) if dataset.schema.fields else None
    label, sizes = dataset.bags.label.numpy(), dataset.bags.sizes.numpy()
    (x, bag), (new, new_bag) = (_sample_instances(dataset, preprocessor, which, rng) for which in (fit, held_out))
    weight = 1 / np.minimum(sizes, _MAX_PER_BAG)[bag]  # bags of all sizes count alike
    forest = RandomForestClassifier(trees, min_samples_leaf=3, random_state=int(rng.integers(1 << 31)))
    forest.fit(x, label[bag], sample_weight=weight * len(weight) / weight.sum())
    row, total = np.searchsorted(held_out, new_bag), np.zeros((len(held_out), len(dataset.bags.classes)))
    np.add.at(total, (row[:, None], forest.classes_), forest.predict_proba(new))
    return total / np.bincount(row, minlength=len(held_out))[:, None]


def _sample_instances(
    dataset: BagDataset, preprocessor: Preprocessor | None, which: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(n, D) features of at most ``_MAX_PER_BAG`` instances of each bag, and (n,) their bag."""
    ends = dataset.bags.offsets.numpy()
    rows = [np.arange(ends[b], ends[b + 1]) for b in which]
    rows = [r if len(r) <= _MAX_PER_BAG else np.sort(rng.choice(r, _MAX_PER_BAG, replace=False)) for r in rows]
    address = dataset.bags.index.numpy()[np.concatenate(rows)]
    if preprocessor is not None:
        x = preprocessor.transform(dataset.content.take(pa.array(address)))
    else:
        position = np.argsort(np.argsort(address, kind="stable"))  # files are read in order
        x = downsample(np.asarray(dataset.content[np.sort(address)]))[position]
    return x, np.repeat(which, [len(r) for r in rows])


def downsample(x: np.ndarray) -> np.ndarray:
    """Features as they are; images as the means of at most 12x12 blocks."""
    if x.ndim == 2:
        return x.astype(np.float32)
    for axis in (1, 2):
        edges = np.linspace(0, x.shape[axis], min(_MAX_BLOCKS, x.shape[axis]) + 1).astype(int)
        size = np.diff(edges).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        x = np.add.reduceat(x.astype(np.float32), edges[:-1], axis) / size
    return x.reshape(len(x), -1)


def fit_and_apply_temperature(p: np.ndarray, label: np.ndarray) -> np.ndarray:
    """(B, C) the probabilities under the temperature that makes the given labels likeliest; NaN rows stay."""
    labelled, log_p = (label >= 0) & np.isfinite(p).all(1), np.log(np.maximum(p, 1e-6))

    def losses(temperature: float) -> np.ndarray:
        return -np.log(np.maximum(softmax(log_p / temperature, 1)[labelled, label[labelled]], 1e-12))

    return np.where(labelled[:, None], softmax(log_p / fit_temperature(losses), 1), p)


def find_label_issues(bags: Bags, p: np.ndarray) -> pa.Table:
    """Labelled bags, the least probable label first. ``p`` (B, C): probabilities of each bag's label. A bag with votes or a tie
    has the label of its more probable winner. A label looks wrong if another class is more probable, and as probable as on
    average in bags with that label (confident learning, Northcutt et al. 2021) or twenty times as probable as the label."""
    target = bags.target.numpy()
    labelled = np.flatnonzero(bags.labelled.numpy() & np.isfinite(p).all(1))
    wins = target >= target.max(1, keepdims=True) - 1e-6
    p_winners = np.where(wins, p, -1)[labelled]
    p = p[labelled]
    label, suggestion = p_winners.argmax(1), p.argmax(1)
    p_label, p_suggestion = p_winners.max(1), p.max(1)
    usual = np.array([p[label == k, k].mean() if (label == k).any() else np.inf for k in range(p.shape[1])])
    unlikely = (p_suggestion >= usual[suggestion]) | (p_suggestion >= LIKELIHOOD_RATIO * p_label)
    wrong = (suggestion != label) & unlikely
    order = np.argsort(p_label, kind="stable")
    class_names = pa.array(bags.classes, pa.string())
    names, winners = bags.names or tuple(map(str, range(len(bags)))), bags.label_names
    return pa.table({
        "rank": np.arange(1, len(labelled) + 1),
        "bag": pa.array([names[b] for b in labelled[order]], pa.string()),
        "label": pa.array([winners[b] for b in labelled[order]], pa.string()),
        "p_label": p_label[order].astype(np.float32),
        "suggestion": class_names.take(pa.array(suggestion[order])),
        "p_suggestion": p_suggestion[order].astype(np.float32),
        "looks_wrong": wrong[order],
        "instances": bags.sizes.numpy()[labelled][order],
    })  # fmt: skip

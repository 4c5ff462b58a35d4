"""Bags whose label looks wrong, ranked by the probability that models which never saw the bag give to its label.

A model that was trained on the same bags may have learned the wrong labels too; ``cross_val_bag_probabilities`` needs no model.
"""

import numpy as np
import pyarrow as pa
import torch

from headcount.bags import Bags
from headcount.bags.splits import assign_folds, draw_rows
from headcount.errors import HeadcountError
from headcount.majority.calibration import fit_bag_temperature
from headcount.readers import BagDataset

TREES, FOLDS = 100, 5
LIKELIHOOD_RATIO = 20  # of another class to the label: nothing supports the label
_MAX_PER_BAG = 200  # instances of a bag that a forest is trained on, and that it predicts
_MAX_BLOCKS = 12  # a side: a forest needs few columns


def cross_val_bag_probabilities(dataset: BagDataset, folds: int = FOLDS, seed: int = 0, trees: int = TREES) -> np.ndarray:
    """(B, C) out-of-fold probabilities of each bag's label: the mean predictions of random forests that were trained on the bag's
    label of every instance of other bags; NaN rows for unlabelled bags. A group of bags stays in one fold."""
    from sklearn.ensemble import RandomForestClassifier

    bags, rng = dataset.bags, np.random.default_rng([seed, 2701])
    labelled, fold = bags.labelled.numpy(), np.full(len(bags), -1)
    fold[labelled] = assign_folds(bags.take(labelled), folds, seed)
    rows = draw_rows(bags, np.where(labelled, bags.sizes.numpy().clip(max=_MAX_PER_BAG), 0), rng).numpy()
    x, bag = _features(dataset, bags.index.numpy()[rows]), bags.bag.numpy()[rows]
    label, count = bags.label.numpy(), np.bincount(bag, minlength=len(bags))
    p = np.where(labelled[:, None], np.zeros((len(bags), len(bags.classes))), np.nan)
    for k in range(folds):
        held_out = fold[bag] == k
        fit, of_bag = bag[~held_out], bag[held_out]
        if len(np.unique(label[fit])) < 2:
            raise HeadcountError(f"fold {k + 1} of {folds} leaves bags of one label only; give more bags, or a model")
        forest = RandomForestClassifier(trees, min_samples_leaf=3, random_state=int(rng.integers(1 << 31)))
        forest.fit(x[~held_out], label[fit], sample_weight=1 / count[fit])  # bags of all sizes count alike
        np.add.at(p, (of_bag[:, None], forest.classes_), forest.predict_proba(x[held_out]) / count[of_bag, None])
    log_p = torch.from_numpy(p).clamp_min(1e-6).log()
    return (log_p / fit_bag_temperature(log_p, bags.target)).softmax(1).numpy()


def _features(dataset: BagDataset, address: np.ndarray) -> np.ndarray:
    """(n, D) of the instances at these addresses. Preparing them needs no label, so all folds share it."""
    if dataset.schema.fields:
        return dataset.fit_preprocessor().transform(dataset.content.take(pa.array(address)))
    position = np.argsort(np.argsort(address, kind="stable"))  # files are read in order
    return downsample(np.asarray(dataset.content[np.sort(address)]))[position]


def downsample(x: np.ndarray) -> np.ndarray:
    """Features as they are; images as the means of at most 12x12 blocks."""
    if x.ndim == 2:
        return x.astype(np.float32)
    for axis in (1, 2):
        edges = np.linspace(0, x.shape[axis], min(_MAX_BLOCKS, x.shape[axis]) + 1).astype(int)
        size = np.diff(edges).reshape([-1 if a == axis else 1 for a in range(x.ndim)])
        x = np.add.reduceat(x.astype(np.float32), edges[:-1], axis) / size
    return x.reshape(len(x), -1)


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
    mean_confidence = np.array([p[label == k, k].mean() if (label == k).any() else np.inf for k in range(p.shape[1])])
    unlikely = (p_suggestion >= mean_confidence[suggestion]) | (p_suggestion >= LIKELIHOOD_RATIO * p_label)
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

"""Bags whose label looks wrong: ranked by the probability that models which never saw the bag give to its label.

Asked of a model that was trained on the same bags the ranking is worth less, for it may have learned the wrong labels too.
``cross_fitted`` needs no model: forests on the bag's label of every instance, each bag judged by the forests of other folds.

Letters: N instances, B bags, C classes, D features.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from scipy.optimize import minimize_scalar

from headcount.bags import Bags
from headcount.data.read import Reading
from headcount.errors import HeadcountError

TREES, FOLDS = 100, 5
SURELY = 20  # times as likely: nothing speaks for the label
_PER_BAG = 200  # instances of a bag that a forest learns from, and that it is asked about
_SIDE = 12  # pictures are looked at in small: a forest wants few columns


def cross_fitted(reading: Reading, folds: int = FOLDS, seed: int = 0) -> np.ndarray:
    """(B, C) probability of each label for each bag, by forests that saw none of its group; NaN rows for unlabelled bags."""
    bags = reading.laid
    label = bags.label.numpy()
    rng = np.random.default_rng([seed, 2701])
    fold = _folds(bags, folds, rng)
    p = np.full((len(bags), len(bags.classes)), np.nan)
    for k in range(folds):
        fit = np.flatnonzero((fold != k) & (fold >= 0))
        asked = np.flatnonzero(fold == k)
        if len(np.unique(label[fit])) < 2:
            raise HeadcountError(f"fold {k + 1} of {folds} leaves bags of one label only; give more bags, or a model")
        p[asked] = _forest_says(reading, fit, asked, rng)
    return tempered(p, label)


def _folds(bags: Bags, folds: int, rng: np.random.Generator) -> np.ndarray:
    """(B,) the fold of each labelled bag, -1 for the others; a group stays together."""
    told = np.flatnonzero(bags.label.numpy() >= 0)
    names = bags.group or bags.names or tuple(map(str, range(len(bags))))
    groups = sorted({names[b] for b in told})
    if len(groups) < folds:
        raise HeadcountError(
            f"{len(groups)} labelled bags or groups are too few for {folds} folds; give at least {folds}"
        )
    place = {g: int(i) % folds for g, i in zip(groups, rng.permutation(len(groups)), strict=True)}
    fold = np.full(len(bags), -1)
    fold[told] = [place[names[b]] for b in told]
    return fold


def _forest_says(reading: Reading, fit: np.ndarray, asked: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(len(asked), C) mean answer of a forest trained on other bags; the preparation too is learned on those alone."""
    from sklearn.ensemble import RandomForestClassifier

    learned = reading.learn(fit) if reading.columns.fields else None
    label, sizes = reading.laid.label.numpy(), reading.laid.sizes.numpy()
    (x, bag), (new, new_bag) = (_sample(reading, learned, which, rng) for which in (fit, asked))
    weight = 1 / np.minimum(sizes, _PER_BAG)[bag]  # a bag is one witness, however large
    forest = RandomForestClassifier(TREES, min_samples_leaf=3, random_state=int(rng.integers(1 << 31)))
    forest.fit(x, label[bag], sample_weight=weight * len(weight) / weight.sum())
    said = np.zeros((len(new), len(reading.laid.classes)))
    said[:, forest.classes_] = forest.predict_proba(new)
    row = np.searchsorted(asked, new_bag)
    count = np.bincount(row, minlength=len(asked))[:, None]
    total = np.zeros((len(asked), said.shape[1]))
    np.add.at(total, row, said)
    return total / count


def _sample(
    reading: Reading, learned: Any, which: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(n, D) features of at most so many instances of each bag, and (n,) their bag."""
    ends = reading.laid.offsets.numpy()
    picked, bag = [], []
    for b in which.tolist():
        rows = np.arange(ends[b], ends[b + 1])
        rows = rows if len(rows) <= _PER_BAG else np.sort(rng.choice(rows, _PER_BAG, replace=False))
        picked.append(rows)
        bag.append(np.full(len(rows), b))
    address = reading.laid.index.numpy()[np.concatenate(picked)]
    if learned is not None:
        x = learned.apply(reading.content.take(pa.array(address)))
    else:
        x = in_small(np.asarray(reading.content[np.sort(address)]))[np.argsort(np.argsort(address, kind="stable"))]
    return x, np.concatenate(bag)


def in_small(x: np.ndarray) -> np.ndarray:
    """Features as they are; pictures as the means of at most 12x12 blocks."""
    if x.ndim == 2:
        return x.astype(np.float32)
    for axis in (1, 2):
        edges = np.linspace(0, x.shape[axis], min(_SIDE, x.shape[axis]) + 1).astype(int)
        x = np.add.reduceat(x.astype(np.float32), edges[:-1], axis) / np.diff(edges).reshape(
            [-1 if a == axis else 1 for a in range(x.ndim)]
        )
    return x.reshape(len(x), -1)


def tempered(p: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Mean answers sharpened (or dulled) by one temperature, the one under which the given labels are likeliest."""
    told = (label >= 0) & np.isfinite(p).all(1)
    log_p = np.log(np.maximum(p, 1e-6))

    def at(log_t: float) -> np.ndarray:
        z = log_p / np.exp(log_t)
        z = np.exp(z - z.max(1, keepdims=True))
        return z / z.sum(1, keepdims=True)

    def loss(log_t: float) -> float:
        return float(-np.log(np.maximum(at(log_t)[told, label[told]], 1e-12)).mean())

    best = minimize_scalar(loss, bounds=(-4, 2), method="bounded").x
    return np.where(told[:, None], at(float(best)), p)


def doubtful(bags: Bags, p: np.ndarray) -> pa.Table:
    """Labelled bags, the least believed label first. ``p`` (B, C): what is said of each bag's label.

    A bag with votes or a tie is given the probability of its likeliest winner. A label looks wrong if another class is the
    likeliest, and as likely as it usually is in bags of its own label (confident learning, Northcutt et al. 2021) or twenty
    times as likely as the label.
    """
    target = bags.target.numpy()
    told = np.flatnonzero(bags.labelled.numpy() & np.isfinite(p).all(1))
    wins = target >= target.max(1, keepdims=True) - 1e-6
    own = np.where(wins, p, -1)[told]
    label, believed = own.argmax(1), own.max(1)
    said, likeliest = p[told].argmax(1), p[told].max(1)
    usual = np.array([np.mean(p[told][label == k, k]) if (label == k).any() else np.inf for k in range(p.shape[1])])
    wrong = (said != label) & ((likeliest >= usual[said]) | (likeliest >= SURELY * believed))
    order = np.argsort(believed, kind="stable")
    words = pa.array(bags.classes, pa.string())
    names, winners = bags.names or tuple(map(str, range(len(bags)))), bags.winners
    return pa.table({
        "rank": np.arange(1, len(told) + 1),
        "bag": pa.array([names[b] for b in told[order]], pa.string()),
        "label": pa.array([winners[b] for b in told[order]], pa.string()),
        "p_label": believed[order].astype(np.float32),
        "suggestion": words.take(pa.array(said[order])),
        "p_suggestion": likeliest[order].astype(np.float32),
        "looks_wrong": wrong[order],
        "instances": bags.sizes.numpy()[told][order],
    })  # fmt: skip

"""A quick look at instances, by bag labels alone: a softmax regression under the tilt, every bag answered by a stranger.

    x     (N, D)  features, standardised; many columns as their first principal components; waves of them (random Fourier
                  features, an approximate Gaussian kernel) are added where held-out labels are explained better with them
    W_f           the regression of fold f: least forward-corrected loss (bags/tilt.py) on the bags of the other folds
    mix           one for all folds, by EM from the strangers' answers, begun low (docs/tilt.md says why)

It is the consistent instance loss of docs/theory.md, section 2, with the plainest of models, in place of a training: seconds
instead of minutes, and no luck of an optimiser. A fold's answers depend on its own labels only through the mix.

Letters: N instances, B bags, C classes, D features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.spatial.distance import pdist
from scipy.special import softmax
from torch import Tensor

from headcount.bags import Bags, steepness, tilt
from headcount.training.criterion import Judgement, judge
from headcount.training.seeds import seed_for
from headcount.training.splits import bag_folds

FOLDS = 3
ROUNDS = 6  # of regression and mix, in turn
STEPS = 25  # of L-BFGS in each
COLUMNS = 48  # principal components
WAVES, FEW = 192, 50  # waves, and classes above which they would take too long
RIDGES = {False: (1e-3, 1e-2), True: (1e-3,)}  # tried without and with waves


@dataclass(frozen=True)
class Look:
    """What strangers said of every instance, and how it is best read."""

    p: Tensor  # (N, C)
    judgement: Judgement  # the tilt and the temperature under which held-out labels are explained best
    dispute: float  # how often regressions fitted to other bags name another class
    waves: bool  # whether more than straight lines were needed


def look(x: np.ndarray, bags: Bags, folds: int = FOLDS, mix: Tensor | None = None, seed: int = 0) -> Look:
    """Look at bags with features ``x`` (N, D), blind; ``mix`` (C, C) where it is known."""
    fold = bag_folds(bags, folds, seed)[bags.bag.numpy()]
    x = standard(x, seed)
    looks = []
    for waves in (False, True) if len(bags.classes) <= FEW else (False,):
        columns = waved(x, seed) if waves else x
        for ridge in RIDGES[waves]:
            p, dispute = _strangers(columns, bags, fold, ridge, mix)
            looks.append(Look(p, judge(p, bags), dispute, waves))
    return min(looks, key=lambda said: said.judgement.loss)


def standard(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, at most COLUMNS + 1) columns of mean nought and deviation one, or their first principal components, and a column
    of ones. Needs no label."""
    x = x.astype(np.float64)
    x = x - x.mean(0)
    spread = x.std(0)
    x = x[:, spread > 1e-9] / spread[spread > 1e-9]
    if x.shape[1] > COLUMNS and len(x) > COLUMNS:
        from sklearn.decomposition import PCA

        x = PCA(COLUMNS, svd_solver="randomized", random_state=seed_for(seed, "columns") % (1 << 31)).fit_transform(x)
        x = x / x[:, 0].std()
    return np.column_stack([x, np.ones(len(x))])


def waved(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, D + WAVES) with random Fourier features (Rahimi and Recht 2007) of the usual distance between instances."""
    rng = np.random.default_rng(seed_for(seed, "waves"))
    few = x[rng.choice(len(x), min(len(x), 500), replace=False)]
    usual = max(float(np.median(pdist(few))), 1e-6) if len(few) > 1 else 1.0
    angle = x @ (rng.normal(size=(x.shape[1], WAVES)) * math.sqrt(2) / usual)
    waves = np.cos(angle + rng.uniform(0, 2 * math.pi, WAVES)) * math.sqrt(2 * x.shape[1] / WAVES)
    return np.column_stack([x, waves])


def _strangers(x: np.ndarray, bags: Bags, fold: np.ndarray, ridge: float, known: Tensor | None) -> tuple[Tensor, float]:
    """(N, C) what regressions say of bags they were not fitted to, and how often the others would name another class."""
    segments, classes = bags.segments(), len(bags.classes)
    rows = steepness.witnesses(segments, bags.target)
    size = steepness.size_of(segments, bags.target)
    least = steepness.floor(size, classes, bags.counted)
    labels, count = steepness.labels_of(rows.sum(0), bags.counted), bags.target.double().sum(0)
    guess = torch.tensor(steepness.first_guess(size, classes)).double()
    mix = tilt.mix_of(guess, classes) if known is None else known
    folds, told = int(fold.max()) + 1, rows.sum(1).numpy() > 0
    x, seen = x.astype(np.float32), rows.numpy().astype(np.float32)  # half the time, and labels are noisier than that
    w = [np.zeros((x.shape[1], classes)) for _ in range(folds)]
    p = torch.full((len(x), classes), 1 / classes, dtype=torch.float64)
    for _ in range(ROUNDS):
        matrix = tilt.matrix_of(mix, labels).numpy()
        for k in range(folds):
            mine = told & (fold != k)
            w[k] = _fit(w[k], x[mine], seen[mine], matrix.astype(np.float32), ridge)
            p[fold == k] = torch.from_numpy(softmax(x[fold == k] @ w[k], axis=1))
        for _ in range(3 if known is None else 0):
            mix = steepness.settled(steepness.heaped(p, rows, mix, labels), count, "full", least, bags.counted)
    said = np.stack([(x @ v).argmax(1) for v in w])  # (folds, N)
    own = said[fold, np.arange(len(x))]
    return p, float((said != own).sum(0).mean() / max(1, folds - 1))


def _fit(w: np.ndarray, x: np.ndarray, rows: np.ndarray, matrix: np.ndarray, ridge: float) -> np.ndarray:
    """(D, C) some steps of ``w`` towards the least forward-corrected loss, from where it stands.

    The slope of -log sum_k p_k T[k, c] in the logits is p - q, with q the posterior once the label is known.
    """
    total = rows.sum()

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = flat.reshape(x.shape[1], -1).astype(np.float32)
        p = softmax(x @ w, axis=1)
        said = np.maximum(p @ matrix, 1e-30)
        slope = x.T @ (p * (rows.sum(1, keepdims=True) - (rows / said) @ matrix.T))
        value = -(rows * np.log(said)).sum() / total + ridge * (w * w).sum()
        return float(value), (slope / total + 2 * ridge * w).ravel().astype(np.float64)

    found = minimize(loss, w.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": STEPS, "maxcor": 8})
    return found.x.reshape(w.shape)

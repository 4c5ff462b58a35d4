"""A quick look at instances, by bag labels alone: a softmax regression under the tilt, every bag answered by a stranger.

    x     (N, D)  features, standardised; many columns as their first principal components; waves of them (random Fourier
                  features, an approximate Gaussian kernel) are added where held-out labels are explained better with them
    W_f           the regression of fold f: least forward-corrected loss (majority/transition.py) on the bags of the other folds
    mix           one for all folds, by EM from the strangers' answers, begun low (docs/explanation/tilt.md says why)

It is the consistent instance loss of docs/explanation/theory.md, section 2, with the plainest of models, in place of a training: seconds
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

from headcount.bags import Bags
from headcount.bags.folds import assign_folds
from headcount.majority import transition, transition_em
from headcount.majority.criterion import CriterionResult, evaluate_criterion
from headcount.readers.standard_scaler import StandardScaler
from headcount.seeds import seed_for

N_FOLDS = 3
ALTERNATIONS = 6  # of regression and mix, in turn
LBFGS_STEPS = 25  # of L-BFGS in each
MAX_COMPONENTS = 48  # principal components
FOURIER_FEATURES, MAX_FOURIER_CLASSES = 192, 50  # waves, and classes above which they would take too long
RIDGE_PENALTIES = {False: (1e-3, 1e-2), True: (1e-3,)}  # tried without and with waves


@dataclass(frozen=True)
class LinearBaseline:
    """What strangers said of every instance, and how it is best read."""

    p: Tensor  # (N, C)
    criterion: CriterionResult  # the tilt and the temperature under which held-out labels are explained best
    fold_disagreement: float  # how often regressions fitted to other bags name another class
    uses_fourier: bool  # whether more than straight lines were needed


def fit_linear_baseline(
    x: np.ndarray, bags: Bags, folds: int = N_FOLDS, mix: Tensor | None = None, seed: int = 0
) -> LinearBaseline:
    """Look at bags with features ``x`` (N, D), blind; ``mix`` (C, C) where it is known."""
    fold = assign_folds(bags, folds, seed)[bags.bag.numpy()]
    x = standardized_components(x, seed)
    looks = []
    for waves in (False, True) if len(bags.classes) <= MAX_FOURIER_CLASSES else (False,):
        columns = add_fourier_features(x, seed) if waves else x
        for ridge in RIDGE_PENALTIES[waves]:
            p, dispute = _predict_out_of_fold(columns, bags, fold, ridge, mix)
            looks.append(LinearBaseline(p, evaluate_criterion(p, bags), dispute, waves))
    return min(looks, key=lambda look: look.criterion.loss)


def standardized_components(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, at most COLUMNS + 1) columns of mean nought and deviation one, or their first principal components, and a column
    of ones. Needs no label."""
    varies = x.std(0, dtype=np.float64) > 1e-9
    x = StandardScaler.fit(x[:, varies]).transform(x[:, varies], np.float64)
    if x.shape[1] > MAX_COMPONENTS and len(x) > MAX_COMPONENTS:
        from sklearn.decomposition import PCA

        x = PCA(
            MAX_COMPONENTS, svd_solver="randomized", random_state=seed_for(seed, "columns") % (1 << 31)
        ).fit_transform(x)
        x = x / x[:, 0].std()
    return np.column_stack([x, np.ones(len(x))])


def add_fourier_features(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, D + WAVES) with random Fourier features (Rahimi and Recht 2007) of the usual distance between instances."""
    rng = np.random.default_rng(seed_for(seed, "waves"))
    few = x[rng.choice(len(x), min(len(x), 500), replace=False)]
    usual = max(float(np.median(pdist(few))), 1e-6) if len(few) > 1 else 1.0
    angle = x @ (rng.normal(size=(x.shape[1], FOURIER_FEATURES)) * math.sqrt(2) / usual)
    waves = np.cos(angle + rng.uniform(0, 2 * math.pi, FOURIER_FEATURES)) * math.sqrt(2 * x.shape[1] / FOURIER_FEATURES)
    return np.column_stack([x, waves])


def _predict_out_of_fold(
    x: np.ndarray, bags: Bags, fold: np.ndarray, ridge: float, known: Tensor | None
) -> tuple[Tensor, float]:
    """(N, C) what regressions say of bags they were not fitted to, and how often the others would name another class."""
    segments, classes = bags.segments(), len(bags.classes)
    rows = transition_em.instance_targets(segments, bags.target)
    size = transition_em.effective_bag_size(segments, bags.target)
    least = transition_em.min_majority_share(size, classes, bags.counted)
    labels, count = transition_em.label_prior_from_counts(rows.sum(0), bags.counted), bags.target.double().sum(0)
    guess = torch.tensor(transition_em.initial_share(size, classes)).double()
    mix = transition.mix_from_shares(guess, classes) if known is None else known
    folds, told = int(fold.max()) + 1, rows.sum(1).numpy() > 0
    x, seen = x.astype(np.float32), rows.numpy().astype(np.float32)  # half the time, and labels are noisier than that
    w = [np.zeros((x.shape[1], classes)) for _ in range(folds)]
    p = torch.full((len(x), classes), 1 / classes, dtype=torch.float64)
    for _ in range(ALTERNATIONS):
        matrix = transition.transition_matrix(mix, labels).numpy()
        for k in range(folds):
            mine = told & (fold != k)
            w[k] = _fit_softmax(w[k], x[mine], seen[mine], matrix.astype(np.float32), ridge)
            p[fold == k] = torch.from_numpy(softmax(x[fold == k] @ w[k], axis=1))
        for _ in range(3 if known is None else 0):
            mix = transition_em.m_step(transition_em.e_step(p, rows, mix, labels), count, "full", least, bags.counted)
    said = np.stack([(x @ v).argmax(1) for v in w])  # (folds, N)
    own = said[fold, np.arange(len(x))]
    return p, float((said != own).sum(0).mean() / max(1, folds - 1))


def _fit_softmax(w: np.ndarray, x: np.ndarray, rows: np.ndarray, matrix: np.ndarray, ridge: float) -> np.ndarray:
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

    found = minimize(loss, w.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": LBFGS_STEPS, "maxcor": 8})
    return found.x.reshape(w.shape)

"""A softmax regression fitted to bag labels alone, cross-validated: seconds of work that show what labels tell of instances.

    x     (N, D)  standardised features; many columns are replaced by their first principal components; random Fourier
                  features (an approximate Gaussian kernel) are added where held-out labels are explained better with them
    W_f           the regression of fold f: least forward-corrected loss (majority/transition.py) on the bags of the other folds
    mix           one for all folds, by EM from the out-of-fold predictions, started low (docs/explanation/tilt.md says why)

It minimises the consistent instance loss of docs/explanation/theory.md, section 2, with the simplest of models: seconds instead of
minutes, and no luck of an optimiser. The predictions of a fold depend on its own labels only through the mix.

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
from headcount.bags.splits import assign_folds
from headcount.majority import transition, transition_em
from headcount.majority.criterion import CriterionResult, evaluate_criterion
from headcount.readers.standard_scaler import StandardScaler
from headcount.seeds import seed_for

N_FOLDS = 3
ALTERNATIONS = 6  # between the regressions and the mix
LBFGS_STEPS = 25  # of each regression, in each alternation
MAX_COMPONENTS = 48  # principal components
FOURIER_FEATURES, MAX_FOURIER_CLASSES = 192, 50  # with more classes the Fourier features would take too long
RIDGE_PENALTIES = {False: (1e-3, 1e-2), True: (1e-3,)}  # tried without and with Fourier features


@dataclass(frozen=True)
class LinearBaseline:
    """Out-of-fold predictions for every instance, and how well they explain the labels."""

    p: Tensor  # (N, C)
    criterion: CriterionResult  # with the transition and the temperature under which held-out labels are explained best
    fold_disagreement: float  # how often regressions fitted to other bags name another class
    uses_fourier: bool  # whether the Fourier features helped


def fit_linear_baseline(
    x: np.ndarray, bags: Bags, folds: int = N_FOLDS, mix: Tensor | None = None, seed: int = 0
) -> LinearBaseline:
    """Cross-validate regressions on blind bags with features ``x`` (N, D), and keep the best; ``mix`` (C, C) where it is known."""
    fold = assign_folds(bags, folds, seed)[bags.bag.numpy()]
    x = standardized_components(x, seed)
    baselines = []
    for fourier in (False, True) if len(bags.classes) <= MAX_FOURIER_CLASSES else (False,):
        features = add_fourier_features(x, seed) if fourier else x
        for ridge in RIDGE_PENALTIES[fourier]:
            p, disagreement = _predict_out_of_fold(features, bags, fold, ridge, mix)
            baselines.append(LinearBaseline(p, evaluate_criterion(p, bags), disagreement, fourier))
    return min(baselines, key=lambda baseline: baseline.criterion.loss)


def standardized_components(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, at most MAX_COMPONENTS + 1) standardised columns, or their first principal components, and a column of ones."""
    varies = x.std(0, dtype=np.float64) > 1e-9
    x = StandardScaler.fit(x[:, varies]).transform(x[:, varies], np.float64)
    if x.shape[1] > MAX_COMPONENTS and len(x) > MAX_COMPONENTS:
        from sklearn.decomposition import PCA

        pca_seed = seed_for(seed, "columns") % (1 << 31)
        x = PCA(MAX_COMPONENTS, svd_solver="randomized", random_state=pca_seed).fit_transform(x)
        x = x / x[:, 0].std()
    return np.column_stack([x, np.ones(len(x))])


def add_fourier_features(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, D + FOURIER_FEATURES) Random Fourier features (Rahimi and Recht 2007); the bandwidth is the median distance."""
    rng = np.random.default_rng(seed_for(seed, "waves"))
    sample = x[rng.choice(len(x), min(len(x), 500), replace=False)]
    bandwidth = max(float(np.median(pdist(sample))), 1e-6) if len(sample) > 1 else 1.0
    angle = x @ (rng.normal(size=(x.shape[1], FOURIER_FEATURES)) * math.sqrt(2) / bandwidth)
    phase = rng.uniform(0, 2 * math.pi, FOURIER_FEATURES)
    return np.column_stack([x, np.cos(angle + phase) * math.sqrt(2 * x.shape[1] / FOURIER_FEATURES)])


def _predict_out_of_fold(
    x: np.ndarray, bags: Bags, fold: np.ndarray, ridge: float, known: Tensor | None
) -> tuple[Tensor, float]:
    """(N, C) out-of-fold probabilities, and how often the regressions of other folds name another class."""
    segments, classes = bags.segments(), len(bags.classes)
    targets = transition_em.instance_targets(segments, bags.target)
    size = transition_em.effective_bag_size(segments, bags.target)
    min_share = transition_em.min_majority_share(size, classes, bags.counted)
    prior = transition_em.label_prior_from_counts(targets.sum(0), bags.counted)
    bags_won = bags.target.double().sum(0)
    start = torch.tensor(transition_em.initial_share(size, classes)).double()
    mix = transition.mix_from_shares(start, classes) if known is None else known
    folds, labelled = int(fold.max()) + 1, targets.sum(1).numpy() > 0
    # float32 halves the time, and labels are noisier than its rounding
    x, rows = x.astype(np.float32), targets.numpy().astype(np.float32)
    weights = [np.zeros((x.shape[1], classes)) for _ in range(folds)]
    p = torch.full((len(x), classes), 1 / classes, dtype=torch.float64)
    for _ in range(ALTERNATIONS):
        matrix = transition.transition_matrix(mix, prior).numpy().astype(np.float32)
        for k in range(folds):
            train = labelled & (fold != k)
            weights[k] = _fit_softmax(weights[k], x[train], rows[train], matrix, ridge)
            p[fold == k] = torch.from_numpy(softmax(x[fold == k] @ weights[k], axis=1))
        for _ in range(3 if known is None else 0):
            expected = transition_em.e_step(p, targets, mix, prior)
            mix = transition_em.m_step(expected, bags_won, "full", min_share, bags.counted)
    predicted = np.stack([(x @ w).argmax(1) for w in weights])  # (folds, N)
    out_of_fold = predicted[fold, np.arange(len(x))]
    return p, float((predicted != out_of_fold).sum(0).mean() / max(1, folds - 1))


def _fit_softmax(w: np.ndarray, x: np.ndarray, rows: np.ndarray, matrix: np.ndarray, ridge: float) -> np.ndarray:
    """(D, C) ``w`` after some steps of L-BFGS on the forward-corrected loss.

    The gradient of -log sum_k p_k T[k, c] in the logits is p - q, with q the posterior once the label is known.
    """
    total = rows.sum()

    def loss(flat: np.ndarray) -> tuple[float, np.ndarray]:
        w = flat.reshape(x.shape[1], -1).astype(np.float32)
        p = softmax(x @ w, axis=1)
        p_label = np.maximum(p @ matrix, 1e-30)
        gradient = x.T @ (p * (rows.sum(1, keepdims=True) - (rows / p_label) @ matrix.T))
        value = -(rows * np.log(p_label)).sum() / total + ridge * (w * w).sum()
        return float(value), (gradient / total + 2 * ridge * w).ravel().astype(np.float64)

    result = minimize(loss, w.ravel(), jac=True, method="L-BFGS-B", options={"maxiter": LBFGS_STEPS, "maxcor": 8})
    return result.x.reshape(w.shape)

"""What can be expected of learning instances from the labels of these bags, estimated with a cross-validated softmax regression.

It minimises the consistent instance loss of docs/explanation/theory.md, section 2, in seconds; docs/how-to/check.md explains the
estimates. Letters: N instances, B bags, C classes, D features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.spatial.distance import pdist
from scipy.special import softmax
from torch import Tensor

from headcount.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.bags.splits import assign_folds
from headcount.majority import calibration
from headcount.majority.calibration import CriterionResult, apply_temperature, standard_error
from headcount.majority.transition import (
    Transition,
    e_step,
    effective_bag_size,
    initial_share,
    instance_targets,
    label_prior_from_counts,
    m_step,
    min_majority_share,
    mix_from_shares,
)
from headcount.readers.transforms import StandardScaler

N_FOLDS = 3
ALTERNATIONS = 6  # between the regressions and the mix
LBFGS_STEPS = 25  # of each regression, in each alternation
MAX_COMPONENTS = 48  # principal components
FOURIER_FEATURES, MAX_FOURIER_CLASSES = 192, 50  # with more classes the Fourier features would take too long
RIDGE_PENALTIES = {False: (1e-3, 1e-2), True: (1e-3,)}  # tried without and with Fourier features
Z_90 = 1.645  # standard errors of a 90 % interval
BOOTSTRAP_DRAWS = 24
# The next three were chosen with benchmarks/check.py.
ERROR_FACTOR, ERROR_MARGIN = 1.3, 0.04  # how the range of accuracies is widened, to hold four trained models of five
MAX_IMPROVEMENT = 2.5  # training divides the disagreement between folds by at most this
SUFFICIENT_BAGS = 4.0  # bags of a class that suffice where majorities are unanimous


@dataclass(frozen=True)
class LinearBaseline:
    """Out-of-fold predictions for every instance, and how well they explain the labels."""

    p: Tensor  # (N, C)
    criterion: CriterionResult  # with the transition and the temperature under which held-out labels are explained best
    fold_disagreement: float  # how often regressions fitted to other bags name another class

    def calibrated(self) -> Tensor:
        """``p`` at the temperature that explains held-out labels best."""
        return apply_temperature(self.p.clamp_min(1e-12), self.criterion.instance_temperature)


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
            baselines.append(LinearBaseline(p, calibration.evaluate_criterion(p, bags), disagreement))
    return min(baselines, key=lambda baseline: baseline.criterion.loss)


def standardized_components(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """(N, at most MAX_COMPONENTS + 1) standardised columns, or their first principal components, and a column of ones."""
    x = x[:, x.std(0, dtype=np.float64) > 1e-9]
    x = StandardScaler.fit(x).transform(x, np.float64)
    if x.shape[1] > MAX_COMPONENTS and len(x) > MAX_COMPONENTS:
        from sklearn.decomposition import PCA

        seed = seed_for(seed, "columns") % (1 << 31)
        x = PCA(MAX_COMPONENTS, svd_solver="randomized", random_state=seed).fit_transform(x)
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
    """(N, C) probabilities by a regression per fold, on the bags of the others, and how often those of other folds name another
    class. One mix for all, by EM from the out-of-fold predictions, started low."""
    targets, size, min_share = _em_inputs(bags)
    classes, bags_won = len(bags.classes), bags.target.double().sum(0)
    prior = label_prior_from_counts(targets.sum(0), bags.counted)
    start = torch.tensor(initial_share(size, classes)).double()
    mix = mix_from_shares(start, classes) if known is None else known
    folds, labelled = int(fold.max()) + 1, targets.sum(1).numpy() > 0
    # float32 halves the time, and labels are noisier than its rounding
    x, rows = x.astype(np.float32), targets.numpy().astype(np.float32)
    weights = [np.zeros((x.shape[1], classes)) for _ in range(folds)]
    p = torch.full((len(x), classes), 1 / classes, dtype=torch.float64)
    for _ in range(ALTERNATIONS):
        matrix = Transition(mix, prior).matrix.numpy().astype(np.float32)
        for k in range(folds):
            train = labelled & (fold != k)
            weights[k] = _fit_softmax(weights[k], x[train], rows[train], matrix, ridge)
            p[fold == k] = torch.from_numpy(softmax(x[fold == k] @ weights[k], axis=1))
        for _ in range(3 if known is None else 0):
            expected = e_step(p, targets, mix, prior)
            mix = m_step(expected, bags_won, "full", min_share, bags.counted)
    predicted = np.stack([(x @ w).argmax(1) for w in weights])  # (folds, N)
    out_of_fold = predicted[fold, np.arange(len(x))]
    return p, float((predicted != out_of_fold).sum(0).mean() / max(1, folds - 1))


def _em_inputs(bags: Bags) -> tuple[Tensor, float, float]:
    """The targets (N, C) of instances, the size of the bags, and the least share of a majority."""
    segments = bags.segments()
    size = effective_bag_size(segments, bags.target)
    min_share = min_majority_share(size, len(bags.classes), bags.counted)
    return instance_targets(segments, bags.target), size, min_share


def _fit_softmax(w: np.ndarray, x: np.ndarray, rows: np.ndarray, matrix: np.ndarray, ridge: float) -> np.ndarray:
    """(D, C) ``w`` after some steps of L-BFGS on the forward-corrected loss -log sum_k p_k T[k, c], whose gradient in the logits is
    p - q, with q the posterior once the label is known."""
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


def most_confused_pair(p: Tensor) -> tuple[tuple[int, int], float]:
    """The two classes that predictions (N, C) confuse most, and the share of all instances confused in this way."""
    joint = (p.double().T @ p.double() / len(p)).fill_diagonal_(0)
    i, j = sorted(divmod(int(joint.argmax()), len(joint)))
    return (i, j), float(2 * joint[i, j])


@dataclass(frozen=True)
class Explanation:
    """How the baseline's predictions, at one temperature, explain held-out labels."""

    transition: Transition
    confidence: float  # mean of the largest probability: the accuracy, if the probabilities are right
    loss_gap: float  # nats by which held-out labels are explained worse than by the best
    error: float  # standard error of loss_gap, over bags


def plausible_explanations(baseline: LinearBaseline, bags: Bags, known: Transition | None = None) -> list[Explanation]:
    """Explanations at all temperatures that explain held-out labels as well as the best one, up to chance; the best first. A steeper
    transition with a less confident classifier explains labels equally well (theory.md, section 4)."""
    p, weight = baseline.p.clamp_min(1e-12), bags.segments().weight
    fits = []
    for temperature in calibration.INSTANCE_TEMPERATURES:
        q = apply_temperature(p, temperature)
        transition = known or calibration.fit_transition_loss(q, bags)[1]
        top = q.max(1).values
        confidence = float(top.mean() if weight is None else (top * weight).sum() / weight.sum())
        fits.append((transition, confidence, calibration.instance_losses(q, bags, transition).numpy()))
    best = min((losses for _, _, losses in fits), key=lambda losses: losses.mean())
    rows = (Explanation(t, c, float((losses - best).mean()), standard_error(losses - best)) for t, c, losses in fits)
    return sorted((r for r in rows if r.loss_gap <= Z_90 * r.error + 1e-12), key=lambda r: r.loss_gap)


def transition_from_votes(bags: Bags) -> Transition:
    """The transition of bags whose votes are the shares of their instances, counted: mix[c] is the mean of the shares, weighted by
    those of c, because to the instance loss a label is drawn from the bag's votes."""
    share, size = bags.target.double(), bags.segments().total_weight().double()
    joint = share.T @ (share * size[:, None])
    labels = joint.sum(1)
    mix = (joint + 1e-9) / (joint + 1e-9).sum(1, keepdim=True)
    return Transition(mix.float(), (labels / labels.sum()).float())


def winners_only(bags: Bags) -> Bags:
    """The bags with votes reduced to their winners. Where instances resemble the others in their bag, overconfident predictions
    explain known shares best; if the shares have to be estimated too, the bias is smaller."""
    share = bags.target
    won = (share >= share.amax(1, keepdim=True) - 1e-6) & bags.labelled[:, None]
    return replace(bags, target=won.to(share.dtype) / won.sum(1, keepdim=True).clamp_min(1))


def bootstrap_share_errors(baseline: LinearBaseline, bags: Bags, start: Transition, seed: int = 0) -> np.ndarray:
    """(C,) standard errors of the estimated shares: a bootstrap over groups of bags, the predictions fixed."""
    rng = np.random.default_rng(seed_for(seed, "shares drawn again"))
    group = np.arange(len(bags)) if bags.group is None else np.unique(bags.group, return_inverse=True)[1]
    groups, segments, shares = int(group.max()) + 1, bags.segments(), []
    p = baseline.calibrated()
    targets, _, min_share = _em_inputs(bags)
    for _ in range(BOOTSTRAP_DRAWS):
        times = torch.from_numpy(np.bincount(rng.integers(0, groups, groups), minlength=groups)[group]).double()
        bags_won, drawn = (bags.target.double() * times[:, None]).sum(0), targets * segments.broadcast(times)[:, None]
        mix, prior = start.mix.double(), label_prior_from_counts(drawn.sum(0), bags.counted)
        for _ in range(25):
            expected = e_step(p, drawn, mix, prior)
            mix = m_step(expected, bags_won, "full", min_share, bags.counted)
        shares.append(mix.diagonal().numpy())
    return np.std(shares, axis=0, ddof=1)


def mean_winner_share(bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """(C,) mean share of the winner in the bags with votes that each class wins, and its standard error; NaN without bags."""
    top, label = bags.target.double().numpy().max(1), bags.label.numpy()
    shares = [top[label == c] for c in range(len(bags.classes))]
    mean = np.array([v.mean() if len(v) else np.nan for v in shares])
    return mean, np.array([v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else np.nan for v in shares])


@dataclass(frozen=True)
class Learnability:
    """What the linear baseline lets us expect."""

    transition: Transition
    share: np.ndarray  # (C,) expected majority share, NaN for a class that wins no bag
    share_low: np.ndarray  # (C,) ends of the 90 % interval
    share_high: np.ndarray
    most_confused: tuple[tuple[int, int], float]  # two classes, and the share of instances
    fold_disagreement: float
    uncertainty: tuple[float, float]  # 1 - confidence: the range among the explanations within one standard error
    accuracy: tuple[float, float]  # expected range for instances
    gain: tuple[float, float]  # nats per bag over the label frequencies, and the standard error
    is_significant: bool  # whether held-out labels are predicted better than by their frequencies


def assess_learnability(baseline: LinearBaseline, bags: Bags, votes: bool, wins: np.ndarray, seed: int = 0) -> Learnability:
    """Assess labelled bags by out-of-fold predictions. ``votes``: the targets are shares; ``wins`` (C,): which classes win."""
    explanations = plausible_explanations(baseline, bags, transition_from_votes(bags) if votes else None)
    best, significant = explanations[0].transition, calibration.is_significant(baseline.criterion)
    if votes:
        share, error = mean_winner_share(bags)
        low, high, error = share, share, np.where(np.isnan(error), 1.0, error)  # of one bag nothing is known
    elif significant:
        shares = np.stack([e.transition.share.double().numpy() for e in explanations])
        share, low, high = shares[0], shares.min(0), shares.max(0)
        error = bootstrap_share_errors(baseline, bags, best, seed)
    else:  # random labels, or features that carry no signal: the shares may be anything
        share = best.share.double().numpy()
        low, high, error = np.full_like(share, 1 / len(wins)), np.ones_like(share), np.zeros_like(share)
    blank = np.where(wins, 0.0, np.nan)
    # with votes the confidence comes from explanations in which the shares are estimated too
    unbiased = plausible_explanations(baseline, winners_only(bags)) if votes else explanations
    uncertain = [1 - e.confidence for e in unbiased if e.loss_gap <= e.error]  # as in majority/calibration.py
    uncertainty, disagreement = (min(uncertain), max(uncertain)), baseline.fold_disagreement
    return Learnability(
        transition=best, share=share + blank, share_low=np.maximum(low - Z_90 * error, 0) + blank,
        share_high=np.minimum(high + Z_90 * error, 1) + blank, most_confused=most_confused_pair(baseline.calibrated()),
        fold_disagreement=disagreement, uncertainty=uncertainty,
        accuracy=expected_accuracy(disagreement, uncertainty, wins, share),
        gain=calibration.gain_over_prior(baseline.criterion), is_significant=significant,
    )  # fmt: skip


def expected_accuracy(
    fold_disagreement: float, uncertainty: tuple[float, float], wins: np.ndarray, share: np.ndarray
) -> tuple[float, float]:
    low = 1 - (ERROR_FACTOR * max(fold_disagreement, uncertainty[1]) + ERROR_MARGIN)
    high = 1 - max(0.0, max(fold_disagreement / MAX_IMPROVEMENT, uncertainty[0]) - ERROR_MARGIN)
    # a class that never wins is never learned: all instances outside the majorities may be lost
    lost = (1 - float(np.nanmean(share[wins]))) * float((~wins).sum()) / max(1, len(wins) - 1)
    return max(0.5 / len(wins), low * (1 - lost)), high  # a model of too few bags may be worse than chance

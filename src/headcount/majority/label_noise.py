"""Labels of bags that were noised before they were given: randomised response with a known probability.

    noise    P: with this probability the winner was replaced by one of the n counted classes, each as likely, itself included
    u (C,)   1 / n for a counted class, 0 for another
    joint    (C, C)  joint[c, w] = P(label c, winner w) = ((1 - P) [c = w] + P u[c]) P(winner w)

The likelihood of a label is log sum_w P(label | winner w) P(winner w). A transition (transition.py) stays that of the winners; the
label reaches an instance through ``report``, and expected counts of labels become counts of winners by Bayes' rule
(``winner_counts``). Without noise nothing is computed.
"""

import math

import numpy as np
import torch
from torch import Tensor

from headcount.bags.validation import check_noise
from headcount.errors import HeadcountError


def randomize_labels(labels: np.ndarray, noise: float, n_classes: int, seed: int | None = None) -> np.ndarray:
    """Replace each label (B,), a class number, with probability ``noise`` by a class drawn at random; -1 stays unlabelled.

    A single label then has local differential privacy with epsilon = log(1 + n_classes (1 - noise) / noise), if the draws stay
    secret: leave ``seed`` out for data that are published, and the operating system supplies the randomness.

    >>> randomize_labels(np.array([0, 1, 2, -1]), 0.5, 3, seed=0).tolist()
    [0, 2, 1, -1]
    """
    labels = np.asarray(labels)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or ((labels < -1) | (labels >= n_classes)).any():
        raise HeadcountError(f"labels to randomize are class numbers from 0 to {n_classes - 1}, or -1; got {labels[:8]!r}")
    generator = np.random.default_rng(seed)
    replaced = (generator.random(len(labels)) < check_noise(noise)) & (labels >= 0)
    return np.where(replaced, generator.integers(0, n_classes, len(labels)), labels)


def _chance(like: Tensor, counted: Tensor | None) -> Tensor:
    """(C,) u."""
    allowed = torch.ones_like(like) if counted is None else counted.to(like)
    return allowed / allowed.sum()


def report_log_probs(log_p: Tensor, noise: float, counted: Tensor | None = None) -> Tensor:
    """(B, C) log P(label) from log P(winner)."""
    if not noise:
        return log_p
    at_random = (noise * _chance(log_p[0].detach(), counted)).log()
    floor = -1e4  # of classes that are not counted: where both are -inf, logaddexp has no gradient
    return torch.logaddexp(log_p.clamp_min(floor) + math.log1p(-noise), at_random.clamp_min(floor).expand_as(log_p))


def winner_prior(label_prior: Tensor, noise: float, counted: Tensor | None = None) -> Tensor:
    """(C,) P(winner) from P(label)."""
    if not noise:
        return label_prior
    chance = _chance(label_prior, counted)
    prior = ((label_prior - noise * chance) / (1 - noise)).clamp_min(1e-3 / len(chance)) * (chance > 0)
    return prior / prior.sum()


def _joint(prior: Tensor, noise: float, counted: Tensor | None) -> Tensor:
    return (1 - noise) * torch.diag(prior) + noise * _chance(prior, counted)[:, None] * prior


def report(mix: Tensor, prior: Tensor, noise: float, counted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The mix (C, C) and the prior (C,) of labels from those of winners."""
    if not noise:
        return mix, prior
    joint = _joint(prior, noise, counted)
    label_prior = joint.sum(1)
    return joint @ mix.to(joint) / label_prior.clamp_min(1e-30)[:, None], label_prior


def winner_counts(counts: Tensor, mix: Tensor, prior: Tensor, noise: float, counted: Tensor | None = None) -> Tensor:
    """(C, C) expected counts of each class in bags won by w, from those in bags labelled c: each count is divided among the winners
    by P(w | label c, class k), proportional to joint[c, w] mix[w, k]."""
    if not noise:
        return counts
    joint, mix = _joint(prior, noise, counted).to(counts), mix.to(counts)
    return mix * (joint.T @ (counts / (joint @ mix).clamp_min(1e-30)))


def winner_posterior(log_p: Tensor, target: Tensor, noise: float, counted: Tensor | None = None) -> Tensor:
    """(B, C) P(winner | instances, label) from log P(winner | instances), up to a constant, and the labels; zeros without a label."""
    channel = (1 - noise) * target + noise * _chance(target[0], counted)
    return (log_p + channel.log()).softmax(1) * (target.sum(1, keepdim=True) > 0)


def label_entropy(noise: float, n_classes: Tensor | int) -> Tensor:
    """() nats that remain in a label when the winner is known."""
    other = noise / torch.as_tensor(n_classes, dtype=torch.float64)
    kept = 1 - noise + other
    return -(kept * kept.log() + torch.xlogy((n_classes - 1) * other, other))

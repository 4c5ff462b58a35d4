"""The transition from classes to majority labels: what the label of a bag says about a single instance drawn from it.

Class c is the largest in every bag labelled c, so the class shares of these bags lean towards c ("tilt"), and the label is a noisy
label of every instance (forward correction: Patrini et al., Making deep neural networks robust to label noise, CVPR 2017):

    P(label = c | x)  =  sum_k  T[k, c] P(y = k | x),      T[k, c] = P(label = c | y = k)

    mix          (C, C)  mix[c, k] = P(y = k | label = c): a row per label; the diagonal is the expected majority share
    label_prior  (C,)    P(label = c) of an instance drawn at random
    prior        (C,)    P(y = k) = label_prior @ mix
    p            (N, C)  P(y = k | x), predicted, for N instances and C classes

T follows from the mix and the label prior; transition_em.py estimates the mix. No function needs the value of a tensor on the
host, so all of them can be part of a CUDA graph. What is identifiable: docs/explanation/theory.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headcount.bags.segments import Segments

UNSEEN_SHARE = 1e-3  # the share of all labels that never occurred, together


def mix_from_shares(share: Tensor | float, classes: int, rest: Tensor | None = None) -> Tensor:
    """(C, C) the mix with these majority shares, one for all labels or one for each; the other classes share the remainder
    evenly, or in proportion to ``rest`` (C,)."""
    share = torch.as_tensor(share)
    others = torch.ones(classes, classes, dtype=share.dtype, device=share.device).fill_diagonal_(0)
    others = others if rest is None else others * rest
    others = others / others.sum(1, keepdim=True)
    return torch.diag(share.expand(classes)) + (1 - share.expand(classes))[:, None] * others


def class_prior(mix: Tensor, label_prior: Tensor) -> Tensor:
    """(C,) P(y = k)."""
    return (label_prior[:, None] * mix).sum(0)


def transition_matrix(mix: Tensor, label_prior: Tensor) -> Tensor:
    """(C, C) T[k, c] = P(label = c | y = k). The rows add up to one."""
    return (label_prior[:, None] * mix / class_prior(mix, label_prior).clamp_min(1e-30)).T


@dataclass(frozen=True)
class Transition:
    """An estimated transition."""

    mix: Tensor  # (C, C)
    label_prior: Tensor  # (C,)

    @property
    def share(self) -> Tensor:
        """(C,) the expected share of class c in a bag labelled c."""
        return self.mix.diagonal()

    @property
    def prior(self) -> Tensor:
        """(C,) P(y = k)."""
        return class_prior(self.mix, self.label_prior)

    @property
    def matrix(self) -> Tensor:
        """(C, C) T[k, c] = P(label = c | y = k)."""
        return transition_matrix(self.mix, self.label_prior)

    @property
    def condition_number(self) -> float:
        """The condition number of T, by which errors may grow from label to class probabilities; infinite if a label never occurs."""
        occurring = self.matrix[:, self.label_prior > UNSEEN_SHARE / len(self.label_prior)].double()
        values = torch.linalg.svdvals(occurring)
        return math.inf if occurring.shape[1] < len(self.mix) or values[-1] <= 0 else float(values[0] / values[-1])


def signal_strength(mix: Tensor) -> Tensor:
    """() from 0 (a label says nothing about an instance) to 1 (it is its class): the mean of (share - 1/C) / (1 - 1/C)."""
    at_random = 1 / len(mix)
    return ((mix.diagonal().mean() - at_random) / (1 - at_random)).clamp(0, 1)


def forward_correct(log_p: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) log P(label = c | x) from log P(y | x): the forward correction."""
    return matmul_full_precision(log_p.exp(), transition_matrix(mix, label_prior)).clamp_min(1e-30).log()


def forward_loss(log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor, weight: Tensor | None = None) -> Tensor:
    """() the forward-corrected loss: -log P(label | x), averaged over the instances whose bag has a label. ``target`` (N, C) is
    the row of each instance's bag: one-hot, soft, or zeros; ``weight`` (N,) is a multiplicity."""
    losses = -(target * forward_correct(log_p, mix, label_prior)).sum(1)
    labelled = (target.sum(1) > 0).to(losses.dtype)
    labelled = labelled if weight is None else labelled * weight
    return (labelled * losses).sum() / labelled.sum().clamp_min(1e-12)


def instance_label_losses(log_p: Tensor, segments: Segments, target: Tensor, transition: Transition) -> Tensor:
    """(b,) -log P(label | x) from log P(y | x) (N, C), averaged over the instances of each of the b labelled bags."""
    log_p_label = forward_correct(log_p, transition.mix.double(), transition.label_prior.double())
    losses = -(segments.broadcast(target.double()) * log_p_label).sum(1)
    return segments.mean(losses)[target.sum(1) > 0]


def label_likelihood_ratio(target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(..., C) P(y = k | label) / P(y = k) for bags with these target rows; one for a bag without a label."""
    ratio = matmul_full_precision(target, mix / class_prior(mix, label_prior).clamp_min(1e-30))
    return torch.where(target.sum(-1, keepdim=True) > 0, ratio, 1.0)


def posterior(log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) P(y = k | x, label): the class probabilities of an instance given the label of its bag."""
    return (log_p + label_likelihood_ratio(target, mix, label_prior).clamp_min(1e-30).log()).softmax(1)


def matmul_full_precision(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product without autocast, which would round every probability to three digits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.to(a.dtype)

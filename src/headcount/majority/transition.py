"""Tilt: what a bag's majority label says of a single instance drawn from it.

Put all bags labelled c into one heap. Class c is the largest in every one of them, so the heap's class shares lean towards c,
and the label is a noisy label of every instance in it:

    P(label = c | x)  =  sum_k  T[k, c] P(y = k | x),      T[k, c] = P(label = c | y = k)

Letters: N instances, B bags, C classes, and

    mix     (C, C)  mix[c, k] = P(y = k | label = c): a row for each label; the diagonal is the expected majority share
    labels  (C,)    P(label = c) of an instance drawn at random
    prior   (C,)    P(y = k) = labels @ mix
    p       (N, C)  P(y = k | x), somebody's answer

T follows from the mix and the label frequencies; how a mix is estimated stands in steepness.py. Nothing here knows a model or
an instance's true class, and no function asks a tensor for its value, so a captured step may use them. What is identifiable:
docs/explanation/tilt.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

UNSEEN_SHARE = 1e-3  # what labels that were never seen share among themselves, when all are counted


# -- the matrix and its faces -------------------------------------------------------------------------------------------------


def mix_from_shares(share: Tensor | float, classes: int, rest: Tensor | None = None) -> Tensor:
    """(C, C) the mix with these majority shares, one for all or one for each label; the others share what is left evenly,
    or in proportion to ``rest`` (C,).

    >>> mix_of(0.6, 3)
    tensor([[0.6000, 0.2000, 0.2000],
            [0.2000, 0.6000, 0.2000],
            [0.2000, 0.2000, 0.6000]])
    """
    share = torch.as_tensor(share)
    others = 1 - torch.eye(classes, dtype=share.dtype, device=share.device)
    others = others if rest is None else others * rest
    others = others / others.sum(1, keepdim=True)
    return torch.diag(share.expand(classes)) + (1 - share.expand(classes))[:, None] * others


def class_prior(mix: Tensor, label_prior: Tensor) -> Tensor:
    """(C,) P(y = k)."""
    return (label_prior[:, None] * mix).sum(0)


def transition_matrix(mix: Tensor, label_prior: Tensor) -> Tensor:
    """(C, C) T[k, c] = P(label = c | y = k). Its rows add up to one.

    >>> matrix_of(mix_of(0.6, 2), torch.tensor([0.75, 0.25]))
    tensor([[0.8182, 0.1818],
            [0.6667, 0.3333]])
    """
    return (label_prior[:, None] * mix / class_prior(mix, label_prior).clamp_min(1e-30)).T


def mix_from_matrix(matrix: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    """The way back: mix and labels from T and P(y).

    >>> mix, labels = mix_from(matrix_of(mix_of(0.6, 2), torch.tensor([0.75, 0.25])), torch.tensor([0.55, 0.45]))
    >>> mix, labels
    (tensor([[0.6000, 0.4000],
            [0.4000, 0.6000]]), tensor([0.7500, 0.2500]))
    """
    joint = prior[:, None] * matrix  # (k, c)
    label_prior = joint.sum(0)
    return (joint / label_prior.clamp_min(1e-30)).T, label_prior


@dataclass(frozen=True)
class Transition:
    """An estimated tilt: what a user is shown, and what every formula here takes."""

    mix: Tensor  # (C, C)
    label_prior: Tensor  # (C,)

    @property
    def share(self) -> Tensor:
        """(C,) the expected share of class c in a bag labelled c."""
        return self.mix.diagonal()

    @property
    def prior(self) -> Tensor:
        return class_prior(self.mix, self.label_prior)

    @property
    def matrix(self) -> Tensor:
        return transition_matrix(self.mix, self.label_prior)

    @property
    def condition_number(self) -> float:
        """How many times larger than the labels' noise the classifier's may get: the condition number of T. Infinite if a
        label never occurs: then a class can be told from the others only by what it is not."""
        seen = self.matrix[:, self.label_prior > UNSEEN_SHARE / len(self.label_prior)].double()
        values = torch.linalg.svdvals(seen)
        return math.inf if seen.shape[1] < len(self.mix) or values[-1] <= 0 else float(values[0] / values[-1])


def signal_strength(mix: Tensor) -> Tensor:
    """() from 0 (labels say nothing of an instance) to 1 (they are its class): (share - 1/C) / (1 - 1/C), averaged."""
    classes = len(mix)
    return ((mix.diagonal().mean() - 1 / classes) / (1 - 1 / classes)).clamp(0, 1)


# -- what follows for an instance ---------------------------------------------------------------------------------------------


def forward_correct(log_p: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) log P(label = c | x), from log P(y | x): the forward correction.

    >>> tilted(torch.tensor([[1.0, 0.0]]).log(), mix_of(0.6, 2), torch.tensor([0.75, 0.25])).exp()
    tensor([[0.8182, 0.1818]])
    """
    return matmul_full_precision(log_p.exp(), transition_matrix(mix, label_prior)).clamp_min(1e-30).log()


def forward_loss(
    log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor, weight: Tensor | None = None
) -> Tensor:
    """() the forward-corrected loss: -log P(label | x), averaged over the instances whose bag has a label.

    ``target`` (N, C) is the row of each instance's bag: one-hot, soft, or zeros; ``weight`` (N,) counts an instance so often.
    """
    losses = -(target * forward_correct(log_p, mix, label_prior)).sum(1)
    labelled = (target.sum(1) > 0).to(losses.dtype)
    labelled = labelled if weight is None else labelled * weight
    return (labelled * losses).sum() / labelled.sum().clamp_min(1e-12)


def label_likelihood_ratio(target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(..., C) P(y = k | label) / P(y = k) of bags with these target rows; one everywhere if there is no label."""
    ratio = matmul_full_precision(target, mix / class_prior(mix, label_prior).clamp_min(1e-30))
    return torch.where(target.sum(-1, keepdim=True) > 0, ratio, 1.0)


def posterior(log_p: Tensor, target: Tensor, mix: Tensor, label_prior: Tensor) -> Tensor:
    """(N, C) q(k | x, label): what is known of an instance once its bag's label is.

    >>> posterior(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[1.0, 0.0]]), mix_of(0.8, 2), torch.tensor([0.5, 0.5]))
    tensor([[0.8000, 0.2000]])
    """
    return (log_p + label_likelihood_ratio(target, mix, label_prior).clamp_min(1e-30).log()).softmax(1)


def matmul_full_precision(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product as it stands: autocast would make it in half precision, and round every chance to three digits."""
    with torch.autocast(a.device.type, enabled=False):
        return a @ b.to(a.dtype)

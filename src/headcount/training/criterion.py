"""The one measure by which methods are compared, and rounds of one method: how well single instances foretell bag labels.

    loss(p)  =  min over tilts T of  - mean over held-out instances of  log sum_k p(k | x) T[k, label of its bag]

Each method's answers p meet the tilt that suits them best (estimated by EM on the same held-out bags, shrunk where bags are
few), so a method that says classes and one that says labels are read alike. It is a proper score of P(label | x): with the
true tilt nothing beats the true P(y | x), and since a tilt can be inverted, who knows the one knows the other. No instance's
class is looked at. Why not the bags' own labels counted from the votes: with landslides every method names all bags right,
and nothing is left to compare; here every instance is a witness.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headcount.bags import Bags, tilt


def label_loss(p: Tensor, bags: Bags, form: str = "full") -> tuple[float, tilt.Tilt]:
    """The loss of instance probabilities ``p`` (N, C) on bags their method never saw, and the tilt that suits them."""
    segments = bags.segments()
    found = tilt.estimate(p, segments, bags.target, form=form, counted=bags.counted)
    return float(instance_losses(p, bags, found).mean()), found


def instance_losses(p: Tensor, bags: Bags, found: tilt.Tilt) -> Tensor:
    """(B',) the mean loss of each labelled bag's instances, so that bags can be drawn again and again."""
    segments = bags.segments()
    rows = segments.spread(bags.target.double())
    each = -(rows * tilt.tilted(p.double().clamp_min(1e-30).log(), found.mix.double(), found.labels.double())).sum(1)
    return segments.mean(each)[bags.target.sum(1) > 0]


def entropy_of(target: Tensor) -> float:
    """What somebody loses who knows nothing but how often each label occurs: the loss to beat."""
    share = target.double().sum(0) / target.double().sum().clamp_min(1e-12)
    return float(-torch.xlogy(share, share).sum())

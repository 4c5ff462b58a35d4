"""Noisy label: every instance is told its bag's label, as if it were its own, only noisy.

The plainest thing to try before any bag method: the label is right for the majority. Generalised cross-entropy forgives
the wrong ones (Zhang and Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels,
NeurIPS 2018): (1 - p^q) / q lies between cross-entropy (q near 0) and mean absolute error (q = 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import Batch, Output, SumHead, nll


class MeanProbability(SumHead):
    """Instances are classified; a bag's probability is the mean of theirs."""

    mean_of_instances = True

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.classifier(h).float()
        return z, z.softmax(1)

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        return self.masked_log_softmax((sums[:, : self.classes] / total[:, None]).clamp_min(1e-30).log())


class NoisyLabel(MeanProbability):
    """Every instance is told its bag's label as if it were its own.

    ``loss``: "ce" (cross-entropy) or "gce" (generalised, with exponent ``q``), averaged over each bag, then over bags."""

    title = "Noisy label"
    cites = (
        "Zhang and Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, "
        "NeurIPS 2018"
    )

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *, loss: str = "ce", q: float = 0.7
    ) -> None:
        super().__init__(dim, classes, counted)
        self.kind = check_choice("loss", loss, ("ce", "gce"))
        if not 0 < q <= 1:
            raise HeadcountError(f"the exponent q lies above 0 and not above 1, got {q}")
        self.q = q

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z, p = super().instance_terms(h)
        log_p = z.log_softmax(1)
        each = log_p if self.kind == "ce" else torch.expm1(self.q * log_p) / self.q  # minus the loss of each class
        return z, torch.cat([p, each], 1)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        mean = output.parts["sums"][:, self.classes :] / output.parts["total"][:, None]
        return nll(mean, batch.target)

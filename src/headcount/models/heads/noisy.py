"""Noisy label: the label of the bag is taken as a noisy label of each of its instances.

The simplest baseline: the label is correct for the majority. Generalised cross-entropy is robust to wrong labels (Zhang and
Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, NeurIPS 2018): (1 - p^q) / q lies
between cross-entropy (q near 0) and mean absolute error (q = 1).
"""

from __future__ import annotations

import torch
from torch import Tensor

from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import Batch, Output, nll
from headcount.models.heads.chunked_head import SumHead


class MeanProbability(SumHead):
    """Base class: instances are classified, and a bag's probabilities are the mean of its instances'."""

    mean_of_instances = True

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.classifier(h).float()
        return z, z.softmax(1)

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        return self.masked_log_softmax((sums[:, : self.classes] / total[:, None]).clamp_min(1e-30).log())


class NoisyLabel(MeanProbability):
    """Cross-entropy of every instance with the label of its bag.

    ``loss``: "ce" (cross-entropy) or "gce" (generalised, with exponent ``q``), averaged over each bag, then over bags.
    """

    title = "Noisy label"
    cites = (
        "Zhang and Sabuncu, Generalized cross entropy loss for training deep neural networks with noisy labels, NeurIPS 2018"
    )

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, loss: str = "ce", q: float = 0.7) -> None:
        super().__init__(dim, classes, counted)
        self.kind = check_choice("loss", loss, ("ce", "gce"))
        if not 0 < q <= 1:
            raise HeadcountError(f"the exponent q must be above 0 and at most 1, got {q}")
        self.q = q

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z, p = super().instance_terms(h)
        log_p = z.log_softmax(1)
        gain = log_p if self.kind == "ce" else torch.expm1(self.q * log_p) / self.q  # minus the loss of each class
        return z, torch.cat([p, gain], 1)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        mean_gain = output.parts["sums"][:, self.classes :] / output.parts["total"][:, None]
        return nll(mean_gain, batch.target)

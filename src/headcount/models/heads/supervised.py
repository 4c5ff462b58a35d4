"""The supervised twin: the same network, taught with the labels of the instances themselves.

It is no method for majority labels but the bound on them, and the only head that may use instance labels (``known``).
"""

from __future__ import annotations

from torch import Tensor

from headcount.errors import HeadcountError
from headcount.models.heads.base import Batch, Output, nll
from headcount.models.heads.noisy import MeanProbability


class Supervised(MeanProbability):
    """Cross-entropy on the instances whose label is known. Validation does the same if it can, else judges the bags."""

    title = "Supervised twin (instance labels given)"
    cites = "cross-entropy on the instances' own labels: the bound, not a method for bags"
    told = True

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.known is None:
            if self.training:
                raise HeadcountError(
                    "head supervised learns from instance labels, and these bags have none; give Bags.of(known=...)"
                )
            return nll(output.bag, batch.target)
        log_p = output.instance.log_softmax(1).gather(1, batch.known.clamp_min(0)[:, None])[:, 0]
        told = ((batch.known >= 0) & ~batch.segments.removed).to(log_p.dtype)
        if batch.segments.weight is not None:
            told = told * batch.segments.weight
        return -(told * log_p).sum() / told.sum().clamp_min(1e-12)

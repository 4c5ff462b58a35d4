"""The Counting Network (also ICASSP 2024, pp. 7025-7029): every instance casts (nearly) one vote, and the votes are counted."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import Batch, Output, SumHead, nll


class Count(SumHead):
    """Counting Network: sharpened votes, their share in the bag, and a second softmax.

    ::

        vote_i = softmax(z_i / t1)        share = mean of vote_i over the bag        bag = softmax(share / t2)

    ``t1=1`` is the ablation "without Count". ``mode="count"`` puts the sum of the votes, not their mean, into the second
    softmax, as the paper's formula has it; the released code uses the mean. ``reduction="official"`` divides the loss by the
    number of classes and adds 1e-8 inside the logarithm; ``"paper"`` does neither.
    """

    title = "Counting Network"
    cites = "Learning from Majority Label, Pattern Recognition 2025, doi 10.1016/j.patcog.2025.112425"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        t1: float = 0.1, t2: float = 0.1, mode: str = "proportion", reduction: str = "official",
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        for name, t in (("t1", t1), ("t2", t2)):
            if not t > 0:
                raise HeadcountError(f"temperature {name} must be above 0, got {t}")
        self.t1, self.t2 = t1, t2
        self.mode = check_choice("mode", mode, ("proportion", "count"))
        self.reduction = check_choice("reduction", reduction, ("official", "paper"))

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        return "Counting Network w/o Count" if dict(options) == {"t1": 1.0} else super().display_name(options)

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.classifier(h).float()
        return z, (z / self.t1).softmax(1)

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        share = sums / total[:, None]
        return self.masked_log_softmax((share if self.mode == "proportion" else sums) / self.t2)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if self.reduction == "official":
            return nll(output.bag, batch.target, eps=1e-8) / self.classes
        return super().loss(output, batch)

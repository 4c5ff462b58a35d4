"""The supervised twin: the same network, taught with the labels of the instances themselves.

It is no method for majority labels but the bound on them, and the only head that must have instance labels (``known``).
"""

from __future__ import annotations

from torch import Tensor

from headcount.errors import HeadcountError, check_choice, check_number
from headcount.models.heads.base import Batch, Output, Pass, instance_cross_entropy, instance_weights, nll
from headcount.models.heads.noisy import MeanProbability


class Supervised(MeanProbability):
    """Cross-entropy on the instances whose label is known. Validation does the same if it can, else judges the bags.

    What the method it bounds may have, it may have too: ``over`` "instances" (batches of loose instances), several ``views``
    from weak to strong, and the ``decay`` of a moving average that answers.
    """

    title = "Supervised twin (instance labels given)"
    cites = "cross-entropy on the instances' own labels: the bound, not a method for bags"
    uses_instance_labels = True

    def __init__(
        self,
        dim: int,
        classes: int,
        counted: Tensor | None = None,
        *,
        over: str = "bags",
        views: int = 1,
        decay: float | None = None,
    ) -> None:
        super().__init__(dim, classes, counted)
        if isinstance(views, bool) or not isinstance(views, int) or views < 1:
            raise HeadcountError(f"views is a whole number from 1 on, got {views!r}")
        if decay is not None:
            check_number("decay", decay, 0, 1, integer=False)
        self.views, self.teacher = views, decay
        self.passes = (Pass(check_choice("over", over, ("bags", "instances"))),)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.known is None:
            if self.training:
                raise HeadcountError(
                    "head supervised learns from instance labels, and these bags have none; give Bags.of(known=...)"
                )
            return nll(output.bag, batch.target)
        return instance_cross_entropy(output.instance, batch.known, instance_weights(batch.segments))

    def loss_weight(self, batch: Batch) -> Tensor:
        return (
            super().loss_weight(batch)
            if batch.known is None
            else (instance_weights(batch.segments) * (batch.known >= 0)).sum()
        )

"""The supervised twin: the same network, trained on instance labels.

It is no method for majority labels but the bound on all of them, and the only head that requires instance labels (``known``).
"""

from __future__ import annotations

from torch import Tensor

from headcount.errors import HeadcountError, check_choice, check_number
from headcount.models.heads.base import Batch, Output, Pass, Teacher, instance_cross_entropy, instance_weights, nll
from headcount.models.heads.noisy import MeanProbability


class Supervised(MeanProbability):
    """Cross-entropy on the instances whose label is known.

    In validation too, where instance labels are known; otherwise the likelihood of the bag labels. It can be given what the method it
    bounds has: ``over`` "instances" (batches of single instances), several ``views`` from weak to strong, and the ``decay`` of a
    moving average of the weights, which is then the model that is kept.
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
            raise HeadcountError(f"views must be a whole number, 1 or more, got {views!r}")
        if decay is not None:
            check_number("decay", decay, 0, 1, integer=False)
        self.views, self.teacher = views, None if decay is None else Teacher(decay)
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
        if batch.known is None:
            return super().loss_weight(batch)
        return (instance_weights(batch.segments) * (batch.known >= 0)).sum()

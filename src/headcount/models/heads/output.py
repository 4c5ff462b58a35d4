"""The mean of the instances' outputs is the bag's output: Output+Mean (Wang et al., 2018), and networks trained on single instances, with
the label of the bag (noisy label) or with their own (the supervised twin)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headcount.errors import HeadcountError, check_choice, check_number
from headcount.models.heads.base import Batch, Output, Pass, SumHead, Teacher, instance_cross_entropy, nll


class OutputMean(SumHead):
    """The bag's output is p = mean of softmax(z_i) over the bag.

    ``form`` is how the bag's log-probabilities and the loss follow from p::

        official   softmax(softmax(p)), with cross-entropy: the baseline was released with three softmaxes
        nll        p, with -log p[label]
        tempered   softmax(p), with the Counting Network's loss (its t1 = t2 = 1)
        logit      softmax of the mean logit
    """

    title = "Output+Mean"
    cites = "Wang et al., Revisiting multiple instance neural networks, Pattern Recognition 2018"

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, form: str = "official") -> None:
        super().__init__(dim, classes, counted)
        self.form = check_choice("form", form, ("official", "nll", "tempered", "logit"))

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        form = options.get("form", "official")
        return cls.title if form == "official" else f"{cls.title} ({form})"

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        z = self.classifier(h).float()
        return z, z if self.form == "logit" else z.softmax(1)

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        mean = sums / total[:, None]
        if self.form == "official":
            return self.masked_log_softmax(self.masked_log_softmax(mean).exp())
        return self.masked_log_softmax(mean.clamp_min(1e-30).log() if self.form == "nll" else mean)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if self.form == "tempered":
            return nll(output.bag, batch.target, eps=1e-8) / self.classes
        return super().loss(output, batch)


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

    The simplest baseline: the label is correct for the majority. ``loss``: "ce" (cross-entropy) or "gce" (generalised, which is
    robust to wrong labels: (1 - p^q) / q lies between cross-entropy, q near 0, and mean absolute error, q = 1), averaged over
    each bag, then over bags.
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


class Supervised(MeanProbability):
    """Cross-entropy on the instances whose label is known.

    No method for majority labels, but the bound on all of them. In validation too, where instance labels are known; otherwise the
    likelihood of the bag labels. It can be given what the method it bounds has: ``over`` "instances" (batches of single
    instances), several ``views`` from weak to strong, and the ``decay`` of a moving average of the weights, which is then the
    model that is kept.
    """

    title = "Supervised twin (instance labels given)"
    cites = "cross-entropy on the instances' own labels: the bound, not a method for bags"
    uses_instance_labels = True

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        over: str = "bags", views: int = 1, decay: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        check_number("views", views, 1, 1 << 10, integer=True)
        if decay is not None:
            check_number("decay", decay, 0, 1, integer=False)
        self.views, self.teacher = views, None if decay is None else Teacher(decay)
        self.passes = (Pass(check_choice("over", over, ("bags", "instances"))),)

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.known is None and self.training:
            raise HeadcountError("head supervised learns from instance labels, and bags have none; give Bags.of(known=...)")
        if batch.known is None:
            return super().loss(output, batch)
        return instance_cross_entropy(output.instance, batch.known, batch.segments.instance_weights())

    def loss_weight(self, batch: Batch) -> Tensor:
        if batch.known is None:
            return super().loss_weight(batch)
        return (batch.segments.instance_weights() * (batch.known >= 0)).sum()

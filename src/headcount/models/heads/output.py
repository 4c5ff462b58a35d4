"""Output+Mean: the mean of the instances' outputs is the bag's output (Wang et al., 2018)."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from headcount.errors import check_choice
from headcount.models.heads.base import Batch, Output, SumHead, nll


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

"""MILLET: each instance gets an attention weight and class scores, and their products are averaged."""

import math

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Output, SumHead


class Millet(SumHead):
    """Conjunctive pooling: a = sigmoid(w tanh(V h)), z = W h; a bag's logits are the mean of a z.

    The mean is over the instances, not over the attention. ``confidence`` is the form of the paper on majority labels: the mean of
    softmax(z), weighted by a, is the bag's probability. ``positions`` adds the sinusoids of the original, meant for time series;
    bags have no order, so it is off.
    """

    title = "MILLET"
    cites = "Early et al., Inherently interpretable time series classification via multiple instance learning, ICLR 2024"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        dropout: float = 0.1, confidence: bool = False, positions: bool = False, width: int = 8,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        self.dropout = nn.Dropout(dropout)
        self.score = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 1), nn.Sigmoid())
        self.confidence, self.depends_on_order = confidence, positions

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.dropout(h)
        a, z = self.score(h).float(), self.classifier(h).float()
        return z, a * torch.cat([z.softmax(1), torch.ones_like(a)], 1) if self.confidence else a * z

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        if self.confidence:
            return self.masked_log_softmax((sums[:, :-1] / sums[:, -1:].clamp_min(1e-12)).clamp_min(1e-30).log())
        return self.masked_log_softmax(sums / total[:, None])

    def forward(self, h: Tensor, segments: Segments) -> Output:
        if self.depends_on_order:  # sine and cosine in turn of each instance's position in its bag, the removed not counted
            _, taken = segments.to_dense(segments.index)
            position = segments.to_flat((taken.cumsum(1) - 1).float())  # (N,)
            slow = torch.arange(0, self.dim, 2, device=h.device) * (-math.log(10000.0) / self.dim)
            angle = position[:, None] * slow.exp()
            h = h + torch.stack([angle.sin(), angle.cos()], 2).flatten(1)[:, : self.dim].to(h.dtype)
        return super().forward(h, segments)

"""AdditiveMIL: a bag's logits are the sum of its instances' logits, so that every instance's part in them can be read off.

Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022.

What is said of an instance depends on its bag: its features are scaled by its attention, a share of one. In a bag of 64 that
leaves about 1/64 of them, and the biases speak.
"""

from __future__ import annotations

from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Head, Output


class Additive(Head):
    """logits of an instance = MLP(attention * h); of a bag = their sum. Batch-norm inside the attention sees every instance."""

    title = "AdditiveMIL"
    cites = (
        "Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022"
    )
    whole_bag = True

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, width: int = 256) -> None:
        super().__init__(dim, classes, counted)
        self.score = nn.Sequential(
            *(nn.Linear(dim, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            *(nn.Linear(width, width), nn.BatchNorm1d(width), nn.LeakyReLU(0.2)),
            nn.Linear(width, 1),
        )
        self.classifier = nn.Sequential(
            nn.Linear(dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )

    def forward(self, h: Tensor, segments: Segments) -> Output:
        share = segments.softmax(self.score(h).float())  # (N, 1)
        instance = self.classifier((share * h).to(h.dtype)).float()
        return Output(instance, self.masked_log_softmax(segments.sum(instance)), {"attention": share})

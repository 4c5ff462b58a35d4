"""AdditiveMIL: a bag's logits are the sum of its instances' logits, so that the contribution of every instance is known.

Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022.

An instance's logits depend on its bag: its features are scaled by its attention, which sums to 1 over the bag. In a bag of 64
about 1/64 of a feature is left, and the biases dominate.
"""

from __future__ import annotations

from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Head, Output


class Additive(Head):
    """Attention-scaled features through an MLP, summed over the bag.

    ::

        a        = softmax of score(h_i) over the bag
        z_i      = MLP(a_i h_i)
        bag      = softmax(sum of z_i over the bag)

    Batch-norm inside the attention includes removed instances.
    """

    title = "AdditiveMIL"
    cites = "Javed et al., Additive MIL: intrinsically interpretable multiple instance learning for pathology, NeurIPS 2022"
    depends_on_bag = True

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
        attention = segments.softmax(self.score(h).float())  # (N, 1)
        instance = self.classifier((attention * h).to(h.dtype)).float()
        return Output(instance, self.masked_log_softmax(segments.sum(instance)), {"attention": attention})

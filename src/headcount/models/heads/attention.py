"""Feature+Attention: a bag's features are averaged with weights that the instances earn (Ilse et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import BagStats, Head, Output
from headcount.models.heads.feature import attention_pool, linear_float32, merge_attention_pools


class Attention(Head):
    """score = w tanh(V h); the classifier reads the mean of h weighted by softmax(score), and single instances as they are.

    ``gated`` multiplies tanh(V h) with sigmoid(U h). The tables' form is not gated.
    """

    title = "Feature+Attention"
    cites = "Ilse, Tomczak and Welling, Attention-based deep multiple instance learning, ICML 2018"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *, gated: bool = False, width: int = 128
    ) -> None:
        super().__init__(dim, classes, counted)
        self.project = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width) if gated else None
        self.score = nn.Linear(width, 1)
        self.classifier = nn.Linear(dim, classes)

    def scores(self, h: Tensor) -> Tensor:
        """(N, 1)"""
        seen = torch.tanh(self.project(h))
        if self.gate is not None:
            seen = seen * torch.sigmoid(self.gate(h))
        return self.score(seen).float()

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), attention_pool(self.scores(h), h, segments)

    def merge(self, pieces: Sequence[BagStats]) -> BagStats:
        return merge_attention_pools(pieces)

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.masked_log_softmax(linear_float32(self.classifier, stats["pool"][:, 0])), {}

    def forward(self, h: Tensor, segments: Segments) -> Output:
        share = segments.softmax(self.scores(h))
        bag, _ = self.readout({"pool": segments.dot(share[:, 0], h)[:, None]})
        return Output(self.classifier(h).float(), bag, {"attention": share})

"""Feature+Attention: a bag's features are averaged with learned weights (Ilse et al., ICML 2018)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Output
from headcount.models.heads.chunked_head import BagStats, ChunkedHead
from headcount.models.heads.feature import attention_pool, linear_float32, merge_attention_pools


class Attention(ChunkedHead):
    """Attention pooling: one linear classifier for the pooled features of the bag, and for single instances.

    ::

        score_i = w tanh(V h_i)                    gated: w (tanh(V h_i) * sigmoid(U h_i))
        a       = softmax of the scores over the bag
        bag     = softmax(W sum_i a_i h_i)         instance = W h_i

    The tables show the form without gate.
    """

    title = "Feature+Attention"
    cites = "Ilse, Tomczak and Welling, Attention-based deep multiple instance learning, ICML 2018"

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, gated: bool = False, width: int = 128) -> None:
        super().__init__(dim, classes, counted)
        self.project = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width) if gated else None
        self.score = nn.Linear(width, 1)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        attention = segments.softmax(self.scores(h))  # (N, 1)
        pooled = segments.dot(attention[:, 0], h)  # (B, D)
        bag = self.masked_log_softmax(linear_float32(self.classifier, pooled))
        return Output(self.classifier(h).float(), bag, {"attention": attention})

    def scores(self, h: Tensor) -> Tensor:
        """(N, 1)"""
        hidden = torch.tanh(self.project(h))
        if self.gate is not None:
            hidden = hidden * torch.sigmoid(self.gate(h))
        return self.score(hidden).float()

    # the same in chunks

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), attention_pool(self.scores(h), h, segments)

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        return merge_attention_pools(chunks)

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.masked_log_softmax(linear_float32(self.classifier, stats["pool"][:, 0])), {}

"""Feature+Attention: a bag's features are averaged with weights that the instances earn (Ilse et al., ICML 2018)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Head, Output
from headcount.models.heads.feature import read


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
        self.look = nn.Linear(dim, width)
        self.gate = nn.Linear(dim, width) if gated else None
        self.score = nn.Linear(width, 1)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        seen = torch.tanh(self.look(h))
        if self.gate is not None:
            seen = seen * torch.sigmoid(self.gate(h))
        share = segments.softmax(self.score(seen).float())  # (N, 1)
        bag = read(self.classifier, segments.sum(share * h))
        return Output(self.classifier(h).float(), self.elect(bag), {"attention": share})

"""Feature+Mean, +Max, +P-norm, +LSE: the features of a bag are pooled, and one linear classifier reads the pool.

The same classifier then reads single instances, which is the weakness of the idea: it never met one in training. Mean and
max are in Ilse et al., Deep multiple instance learning for digital histopathology, 2020; log-sum-exp in Pinheiro and
Collobert, From image-level to pixel-level labeling with convolutional networks, CVPR 2015.

P-norm and LSE were released without dividing by the number of instances (and LSE without dividing by r), so that a bag's
pool lives on another scale than its instances. That is the default; ``norm=True`` is the repaired form, in which a bag of
one is pooled to its instance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.errors import HeadcountError
from headcount.models.heads.base import BagStats, Head, SumHead


def linear_float32(classifier: nn.Linear, pool: Tensor) -> Tensor:
    """(B, D) -> (B, C) in float32 whatever the precision: a bag's few numbers cost nothing, and nobody averages them again."""
    with torch.autocast(pool.device.type, enabled=False):
        return F.linear(pool.float(), classifier.weight.float(), classifier.bias.float())


def attention_pool(score: Tensor, x: Tensor, segments: Segments) -> BagStats:
    """(N, A) scores, (N, K) -> A pools (B, A, K), each the mean of x weighted by softmax(score), and the softmax's sum."""
    share = segments.softmax(score)
    pools = [segments.dot(one, x) for one in share.unbind(1)]
    return {"pool": torch.stack(pools, 1), "lse": segments.logsumexp(score)}


def merge_attention_pools(pieces: Sequence[BagStats]) -> BagStats:
    """A piece weighs as much as its part of the softmax's sum."""
    lse = torch.stack([piece["lse"] for piece in pieces])  # (pieces, B, A)
    pool = torch.stack([piece["pool"] for piece in pieces])
    return {"pool": (lse.softmax(0)[..., None] * pool).sum(0), "lse": lse.logsumexp(0)}


class FeatureMean(SumHead):
    """The classifier reads the mean of the features."""

    title = "Feature+Mean"
    cites = "Ilse, Tomczak and Welling, Deep multiple instance learning for digital histopathology, 2020"

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.classifier(h).float(), h

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        return self.masked_log_softmax(linear_float32(self.classifier, sums / total[:, None]))


class FeaturePNorm(SumHead):
    """The classifier reads (sum of ReLU(h)^p)^(1/p), or with ``norm`` (mean of ReLU(h)^p)^(1/p)."""

    title = "Feature+P-norm"
    cites = "Ilse, Tomczak and Welling, Deep multiple instance learning for digital histopathology, 2020"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *, p: float = 4, norm: bool = False
    ) -> None:
        super().__init__(dim, classes, counted)
        if not 1 <= p < torch.inf:
            raise HeadcountError(f"the exponent p must be 1 or more, got {p}")
        self.p, self.norm = p, norm

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        # powers are added in float64: 1e-5 or 1e5 to the eighth lie beyond what float32 can hold
        return self.classifier(h).float(), h.double().relu() ** self.p

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        mass = sums / total[:, None] if self.norm else sums
        some = mass > 0  # the root of nothing is nothing, but has no slope
        pool = torch.where(some, mass, 1.0) ** (1 / self.p)
        return self.masked_log_softmax(linear_float32(self.classifier, torch.where(some, pool, 0.0)))


class FeatureMax(Head):
    """The classifier reads the largest value of each feature."""

    title = "Feature+Max"
    cites = "Ilse, Tomczak and Welling, Deep multiple instance learning for digital histopathology, 2020"

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__(dim, classes, counted)
        self.classifier = nn.Linear(dim, classes)

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), {"pool": segments.max(h)}  # (B, D)

    def merge(self, pieces: Sequence[BagStats]) -> BagStats:
        return {"pool": torch.stack([piece["pool"] for piece in pieces]).amax(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        pool = stats["pool"]
        pool = torch.where(pool.isfinite(), pool, 0.0)  # of an emptied bag
        return self.masked_log_softmax(linear_float32(self.classifier, pool)), {}


class FeatureLSE(FeatureMax):
    """The classifier reads log sum exp(r h), or with ``norm`` (1/r) log mean exp(r h)."""

    title = "Feature+LSE"
    cites = "Pinheiro and Collobert, From image-level to pixel-level labeling with convolutional networks, CVPR 2015"

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *, r: float = 4, norm: bool = False
    ) -> None:
        super().__init__(dim, classes, counted)
        if not 0 < r < torch.inf:
            raise HeadcountError(f"the sharpness r must be above 0, got {r}")
        self.r, self.norm = r, norm

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), {
            "pool": segments.logsumexp(self.r * h.float()),
            "total": segments.total_weight(),
        }

    def merge(self, pieces: Sequence[BagStats]) -> BagStats:
        pool = torch.stack([piece["pool"] for piece in pieces]).logsumexp(0)
        return {"pool": pool, "total": torch.stack([piece["total"] for piece in pieces]).sum(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        pool = stats["pool"]
        return super().readout({"pool": (pool - stats["total"].log()[:, None]) / self.r if self.norm else pool})

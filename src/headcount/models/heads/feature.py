"""Feature+Mean, +Max, +P-norm, +LSE, +Attention: the features of a bag are pooled, and one linear classifier classifies the pool.

The same classifier then classifies single instances, which it never saw in training: the weakness of the idea. P-norm and LSE were released without dividing by the number of instances (and LSE without dividing by r), so that a bag's pool
has another scale than its instances. That is the default; with ``norm=True`` the pool of a bag of one is its instance.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags import Segments
from headcount.bags.segments import without_autocast
from headcount.errors import HeadcountError
from headcount.models.heads.base import BagStats, ChunkedHead, Output, SumHead

ILSE = "Ilse, Tomczak and Welling, Deep multiple instance learning for digital histopathology, 2020"


def linear_float32(classifier: nn.Linear, pool: Tensor) -> Tensor:
    """(B, D) -> (B, C), in float32 also under autocast: it costs nothing, and no later average smooths rounding errors."""
    with without_autocast(pool.device.type):
        return F.linear(pool.float(), classifier.weight.float(), classifier.bias.float())


def attention_pool(score: Tensor, x: Tensor, segments: Segments) -> BagStats:
    """(N, A) scores, (N, K) -> "pool" (B, A, K): means of x weighted by softmax(score); "lse" (B, A): its normaliser."""
    pools = [segments.dot(attention, x) for attention in segments.softmax(score).unbind(1)]
    return {"pool": torch.stack(pools, 1), "lse": segments.logsumexp(score)}


def merge_attention_pools(chunks: Sequence[BagStats]) -> BagStats:
    """A chunk weighs as much as its part of the softmax's normaliser."""
    lse = torch.stack([chunk["lse"] for chunk in chunks])  # (chunks, B, A)
    pool = torch.stack([chunk["pool"] for chunk in chunks])
    return {"pool": (lse.softmax(0)[..., None] * pool).sum(0), "lse": lse.logsumexp(0)}


class FeatureMean(SumHead):
    """The mean of the features is classified: bag = softmax(W mean h)."""

    title, cites = "Feature+Mean", ILSE

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.classifier(h).float(), h

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        return self.masked_log_softmax(linear_float32(self.classifier, sums / total[:, None]))


class FeaturePNorm(SumHead):
    """The p-norm of the features is classified: bag = softmax(W (sum ReLU(h)^p)^(1/p)).

    ``norm`` takes the mean in place of the sum.
    """

    title, cites = "Feature+P-norm", ILSE

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, p: float = 4, norm: bool = False) -> None:
        super().__init__(dim, classes, counted)
        if not 1 <= p < torch.inf:
            raise HeadcountError(f"the exponent p must be 1 or more, got {p}")
        self.p, self.norm = p, norm

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        # powers are summed in float64: 1e-5 or 1e5 to the eighth is outside the range of float32
        return self.classifier(h).float(), h.double().relu() ** self.p

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        power = sums / total[:, None] if self.norm else sums
        positive = power > 0  # the root of 0 is 0, but has no finite gradient
        pool = torch.where(positive, power, 1.0) ** (1 / self.p)
        return self.masked_log_softmax(linear_float32(self.classifier, torch.where(positive, pool, 0.0)))


class FeatureMax(ChunkedHead):
    """The maximum of each feature is classified: bag = softmax(W max h)."""

    title, cites = "Feature+Max", ILSE

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__(dim, classes, counted)
        self.classifier = nn.Linear(dim, classes)

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), {"pool": segments.max(h)}  # (B, D)

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        return {"pool": torch.stack([chunk["pool"] for chunk in chunks]).amax(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        pool = stats["pool"]
        pool = torch.where(pool.isfinite(), pool, 0.0)  # of an emptied bag
        return self.masked_log_softmax(linear_float32(self.classifier, pool)), {}


class FeatureLSE(FeatureMax):
    """A smooth maximum of the features is classified: bag = softmax(W log sum exp(r h)).

    ``norm`` takes (1/r) log mean exp(r h) instead.
    """

    title = "Feature+LSE"
    cites = "Pinheiro and Collobert, From image-level to pixel-level labeling with convolutional networks, CVPR 2015"

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None, *, r: float = 4, norm: bool = False) -> None:
        super().__init__(dim, classes, counted)
        if not 0 < r < torch.inf:
            raise HeadcountError(f"the sharpness r must be above 0, got {r}")
        self.r, self.norm = r, norm

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        stats = {"pool": segments.logsumexp(self.r * h.float()), "total": segments.total_weight()}
        return self.classifier(h).float(), stats

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        pool = torch.stack([chunk["pool"] for chunk in chunks]).logsumexp(0)
        return {"pool": pool, "total": torch.stack([chunk["total"] for chunk in chunks]).sum(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        pool = stats["pool"]
        return super().readout({"pool": (pool - stats["total"].log()[:, None]) / self.r if self.norm else pool})


class Attention(ChunkedHead):
    """Attention pooling: one linear classifier for the pooled features of the bag, and for single instances.

    ::

        score_i = w tanh(V h_i)                    gated (not in the tables): w (tanh(V h_i) * sigmoid(U h_i))
        a       = softmax of the scores over the bag
        bag     = softmax(W sum_i a_i h_i)         instance = W h_i
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
        bag, _ = self.readout({"pool": segments.dot(attention.squeeze(1), h)[:, None]})
        return Output(self.classifier(h).float(), bag, {"attention": attention})

    def scores(self, h: Tensor) -> Tensor:
        """(N, 1)"""
        hidden = torch.tanh(self.project(h))
        if self.gate is not None:
            hidden = hidden * torch.sigmoid(self.gate(h))
        return self.score(hidden).float()

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.classifier(h).float(), attention_pool(self.scores(h), h, segments)

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        return merge_attention_pools(chunks)

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        return self.masked_log_softmax(linear_float32(self.classifier, stats["pool"].squeeze(1))), {}

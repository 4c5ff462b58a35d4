"""WENO: a teacher that classifies bags by attention and a student that classifies instances learn from each other in turn.

Qu et al.'s is binary, with bags known to be negative; here every bag is positive for its label, and there are no negative bags.
The authors of the majority-label paper released no code for it: the adaptation is ours. An epoch is a pass over bags (encoder and teacher), then a pass over single instances (encoder and student). The teacher's raw
attention score, scaled to 0..1 by the lowest and highest score of its pass, is the probability q that the instance belongs to
the class of its bag. As released, dropout stays active in the teacher when it gives these targets.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import BagStats, Batch, ChunkedHead, Output, Pass, nll
from headcount.models.heads.feature import attention_pool, linear_float32, merge_attention_pools

EPS = 1e-5


class AttentionTeacher(nn.Module):
    """Features -> hidden features (N, width) and raw attention scores (N, 1 or C)."""

    def __init__(self, dim: int, classes: int, width: int, branches: int, dropout: float) -> None:
        super().__init__()
        first, second = nn.Linear(dim, width), nn.Linear(width, width)
        self.embed = nn.Sequential(nn.Dropout(dropout), first, nn.ReLU(), nn.Dropout(dropout), second, nn.ReLU())
        self.score = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, branches))
        self.classifier = nn.Linear(width, classes)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed(h)
        return hidden, self.score(hidden).float()

    def bag_logits(self, pools: Tensor) -> Tensor:
        """(B, 1 or C, width) -> (B, C) logits. With an attention branch per class, each class is scored on its own pool."""
        if pools.shape[1] == 1:
            return linear_float32(self.classifier, pools[:, 0])
        return torch.stack([linear_float32(self.classifier, pool)[:, c] for c, pool in enumerate(pools.unbind(1))], 1)


class Weno(ChunkedHead):
    """Bags are classified by the teacher (attention pooling), instances by the student.

    ::

        loss    of the student: "one_vs_rest" (class of the bag or not), "soft" (1 - q spread over the other classes), or
                "classwise" (an attention branch and a sigmoid for each class).
        w       weight of the negative part.
        mining  the instances that the teacher pools after ``mining_after`` epochs: "off" (all), "threshold" (those to which the
                student gives the class of the bag at most ``threshold``), "lowest" (the ``hardest`` instances with the lowest
                such probability). At least one instance remains.
    """

    title = "WENO"
    cites = (
        "Qu et al., Bi-directional weakly supervised knowledge distillation for whole slide image classification, NeurIPS 2022"
    )
    passes = (Pass("bags", trains=("backbone", "head.teacher_network")), Pass("instances", trains=("backbone", "head.student")))
    compiled = True  # each pass uses one of the two networks' outputs
    minmax_buffers: ClassVar[Mapping[str, str]] = {"lowest": "min", "highest": "max", "range_epoch": "max"}
    lowest: Tensor
    highest: Tensor
    range_epoch: Tensor

    def __init__(
        self, dim: int, classes: int, counted: Tensor | None = None, *,
        loss: str = "one_vs_rest", w: float = 0.2,
        mining: str = "off", mining_after: int = 10, threshold: float = 0.5, hardest: int = 32,
        dropout: float = 0.5, width: int = 1024, student_width: int = 4096,
    ) -> None:  # fmt: skip
        super().__init__(dim, classes, counted)
        self.kind = check_choice("loss", loss, ("one_vs_rest", "soft", "classwise"))
        self.mining = check_choice("mining", mining, ("off", "threshold", "lowest"))
        if not 0 <= w <= 1 or hardest < 1:
            raise HeadcountError(f"the weight w must be from 0 to 1, got {w}, and hardest 1 or more, got {hardest}")
        self.w, self.mining_after, self.threshold, self.hardest = w, mining_after, threshold, hardest
        branches = classes if loss == "classwise" else 1
        self.teacher_network = AttentionTeacher(dim, classes, width, branches, dropout)
        self.student = nn.Sequential(
            *(nn.Linear(dim, student_width), nn.ReLU(), nn.Linear(student_width, student_width), nn.ReLU()),
            nn.Linear(student_width, classes),
        )
        for linear in (m for m in self.modules() if isinstance(m, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.01)
            nn.init.zeros_(linear.bias)
        # the range of the scores in epoch ``range_epoch``; not persistent: every epoch begins with the teacher's pass, which resets it
        self.register_buffer("lowest", torch.zeros(branches), persistent=False)
        self.register_buffer("highest", torch.ones(branches), persistent=False)
        self.register_buffer("range_epoch", torch.tensor(-1), persistent=False)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        hidden, score = self.teacher_network(h)
        bag, parts = self.readout(self.bag_stats(hidden, score, segments))
        return Output(self.student(h).float(), bag, {**parts, "hidden": hidden, "score": score})

    def bag_stats(self, hidden: Tensor, score: Tensor, segments: Segments) -> BagStats:
        """The pooled features of each bag, and the range of its scores."""
        fixed = score.detach()
        return {**attention_pool(score, hidden, segments), "lowest": -segments.max(-fixed), "highest": segments.max(fixed)}

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.over == "instances":
            return self.student_loss(output, batch)
        if not self.training:
            return nll(output.bag, batch.target, EPS)
        self.update_range(output.parts["lowest"].detach().amin(0), output.parts["highest"].detach().amax(0), batch.epoch)
        return nll(output.bag if self.mining == "off" else self.mined_scores(output, batch), batch.target, EPS)

    def loss_weight(self, batch: Batch) -> Tensor:
        return self.labelled_weights(batch).sum() if batch.over == "instances" else super().loss_weight(batch)

    def labelled_weights(self, batch: Batch) -> Tensor:
        """(B,) multiplicities of single instances; 0 for those without a label."""
        return batch.segments.total_weight() * (batch.target.sum(1) > 0)

    @torch.no_grad()
    def update_range(self, lowest: Tensor, highest: Tensor, epoch: Tensor | None) -> None:
        epoch = self.range_epoch if epoch is None else epoch
        same_epoch = epoch == self.range_epoch
        self.lowest.copy_(torch.where(same_epoch, torch.minimum(lowest, self.lowest), lowest))
        self.highest.copy_(torch.where(same_epoch, torch.maximum(highest, self.highest), highest))
        self.range_epoch.copy_(epoch)

    def membership(self, score: Tensor) -> Tensor:
        """(N, 1 or C): q, the probability that an instance belongs to the class of its bag."""
        return ((score.detach() - self.lowest) / (self.highest - self.lowest).clamp_min(1e-12)).clamp(EPS, 1 - EPS)

    def student_loss(self, output: Output, batch: Batch) -> Tensor:
        """Linear in the target, so that the loss of a soft label is a mixture. Instances are bags of one here."""
        z, y, q, w = output.instance, batch.target, self.membership(output.parts["score"]), self.w
        if self.kind == "soft":
            log_p = z.log_softmax(1)
            rest = (log_p.sum(1, keepdim=True) - log_p) / (z.shape[1] - 1)
            losses = -(y * (q * log_p + (1 - q) * rest)).sum(1)
        else:
            p = z.sigmoid() if self.kind == "classwise" else z.softmax(1)
            positive, negative = -(1 - w) * (p + EPS).log(), -w * (1 - p + EPS).log()
            losses = (y * (q * positive + (1 - q) * negative)).sum(1)
            if self.kind == "classwise":  # for the other classes the bag is a negative one: q = 0
                possible = torch.ones_like(y) if self.counted is None else self.counted.to(y.dtype).expand_as(y)
                losses = (losses + (possible * (1 - y) * negative).sum(1)) / possible.sum(1)
        weight = self.labelled_weights(batch)
        return (weight * losses).sum() / weight.sum().clamp_min(1e-12)

    def mined_scores(self, output: Output, batch: Batch) -> Tensor:
        """(B, C): the teacher's log-probabilities from the hard instances alone, once mining has begun."""
        s, z = batch.segments, output.instance.detach()
        p = ((z.sigmoid() if self.kind == "classwise" else z.softmax(1)) * s.broadcast(batch.target)).sum(1)
        if self.mining == "threshold":
            bar = (-s.max(-p)).clamp_min(self.threshold)  # at least the hardest instance stays
        else:
            ascending = s.to_dense(p, fill=torch.inf)[0].sort(1).values
            bar = ascending[:, min(self.hardest, ascending.shape[1]) - 1]
        easy = (p > s.broadcast(bar)) & ((0 if batch.epoch is None else batch.epoch) >= self.mining_after)
        pools = attention_pool(output.parts["score"], output.parts["hidden"], s.without(easy))["pool"]
        return self.masked_log_softmax(self.teacher_network.bag_logits(pools))

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.student(h).float(), self.bag_stats(*self.teacher_network(h), segments)

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        lowest, highest = (torch.stack([chunk[name] for chunk in chunks]) for name in ("lowest", "highest"))
        return {**merge_attention_pools(chunks), "lowest": lowest.amin(0), "highest": highest.amax(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        bag = self.masked_log_softmax(self.teacher_network.bag_logits(stats["pool"]))
        return bag, {"lowest": stats["lowest"], "highest": stats["highest"]}

    def why_whole_bags(self, segments: Segments) -> str:
        return "it searches the whole bag for hard instances" if self.mining != "off" else ""

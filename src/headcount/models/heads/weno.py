"""WENO: a teacher that judges bags by attention and a student that judges instances learn from each other in turn.

Qu et al., Bi-directional weakly supervised knowledge distillation for whole slide image classification, NeurIPS 2022. Theirs
is binary, with bags known to be negative; here every bag is positive for its label, and there are none. The authors of the
majority-label paper released no code for it: the adaptation is ours.

An epoch is a pass over bags (encoder and teacher), then a pass over loose instances (encoder and student). The teacher's raw
attention score, brought to 0..1 by the lowest and highest score of its pass, is the probability q that the instance belongs
to its bag's class. As released, the teacher still drops out while it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.errors import HeadcountError, check_choice
from headcount.models.heads.base import BagStats, Batch, Head, Output, Pass, nll
from headcount.models.heads.feature import attention_pool, linear_float32, merge_attention_pools

EPS = 1e-5


class AttentionTeacher(nn.Module):
    """Features -> what the teacher sees (N, 1024) and its raw attention scores (N, 1 or C)."""

    def __init__(self, dim: int, classes: int, width: int, branches: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Sequential(
            *(nn.Dropout(dropout), nn.Linear(dim, width), nn.ReLU()),
            *(nn.Dropout(dropout), nn.Linear(width, width), nn.ReLU()),
        )
        self.score = nn.Sequential(nn.Linear(width, width // 2), nn.Tanh(), nn.Linear(width // 2, branches))
        self.classifier = nn.Linear(width, classes)

    def forward(self, h: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.embed(h)
        return seen, self.score(seen).float()

    def bag_logits(self, pools: Tensor) -> Tensor:
        """(B, 1 or C, width) -> (B, C) logits. With a branch of attention per class, each class's row reads its own pool."""
        if pools.shape[1] == 1:
            return linear_float32(self.classifier, pools[:, 0])
        return torch.stack([linear_float32(self.classifier, pool)[:, i] for i, pool in enumerate(pools.unbind(1))], 1)


class Weno(Head):
    """Bags are judged by the teacher, instances by the student.

    ::

        loss    of the student: "one_vs_rest" (class of the bag or not), "soft" (1 - q shared out over the other classes), or
                "classwise" (a branch of attention and a sigmoid for each class).
        w       weight of the negative part.
        mining  whom the teacher sees after ``mining_after`` epochs: "off" (everybody), "threshold" (whom the student does not
                already give the bag's class with more than ``threshold``), "lowest" (the ``hardest`` so many). Never nobody.
    """

    title = "WENO"
    cites = (
        "Qu et al., Bi-directional weakly supervised knowledge distillation for whole slide image classification, "
        "NeurIPS 2022"
    )
    passes = (
        Pass("bags", trains=("backbone", "head.teaching")),
        Pass("instances", trains=("backbone", "head.student")),
    )
    minmax_buffers: ClassVar[Mapping[str, str]] = {"low": "min", "high": "max", "ranged": "max"}
    low: Tensor
    high: Tensor
    ranged: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        counted: Tensor | None = None,
        *,
        loss: str = "one_vs_rest",
        w: float = 0.2,
        mining: str = "off",
        mining_after: int = 10,
        threshold: float = 0.5,
        hardest: int = 32,
        dropout: float = 0.5,
        width: int = 1024,
        student_width: int = 4096,
    ) -> None:
        super().__init__(dim, classes, counted)
        self.kind = check_choice("loss", loss, ("one_vs_rest", "soft", "classwise"))
        self.mining = check_choice("mining", mining, ("off", "threshold", "lowest"))
        if not 0 <= w <= 1 or hardest < 1:
            raise HeadcountError(f"the weight w lies in 0 to 1, got {w}, and hardest is 1 or more, got {hardest}")
        self.w, self.mining_after, self.threshold, self.hardest = w, mining_after, threshold, hardest
        branches = classes if loss == "classwise" else 1
        self.teaching = AttentionTeacher(dim, classes, width, branches, dropout)
        self.student = nn.Sequential(
            *(nn.Linear(dim, student_width), nn.ReLU(), nn.Linear(student_width, student_width), nn.ReLU()),
            nn.Linear(student_width, classes),
        )
        for m in self.modules():
            if isinstance(m, nn.Linear):
                nn.init.normal_(m.weight, std=0.01)
                nn.init.zeros_(m.bias)
        # the range of the scores, of the epoch ``ranged``. Every epoch begins with the teacher's pass, which begins it anew:
        # it need not be kept
        self.register_buffer("low", torch.zeros(branches), persistent=False)
        self.register_buffer("high", torch.ones(branches), persistent=False)
        self.register_buffer("ranged", torch.tensor(-1), persistent=False)

    def why_not_chunkable(self, segments: Segments) -> str:
        return super().why_not_chunkable(segments) or (
            "it mines a bag for its hard instances" if self.mining != "off" else ""
        )

    def forward(self, h: Tensor, segments: Segments) -> Output:
        seen, score = self.teaching(h)
        bag, parts = self.readout(self.bag_stats(seen, score, segments))
        return Output(self.student(h).float(), bag, {**parts, "seen": seen, "score": score})

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        return self.student(h).float(), self.bag_stats(*self.teaching(h), segments)

    def bag_stats(self, seen: Tensor, score: Tensor, segments: Segments) -> BagStats:
        known = score.detach()
        return {**attention_pool(score, seen, segments), "low": -segments.max(-known), "high": segments.max(known)}

    def merge(self, pieces: Sequence[BagStats]) -> BagStats:
        low, high = (torch.stack([piece[name] for piece in pieces]) for name in ("low", "high"))
        return {**merge_attention_pools(pieces), "low": low.amin(0), "high": high.amax(0)}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        bag = self.masked_log_softmax(self.teaching.bag_logits(stats["pool"]))
        return bag, {"low": stats["low"], "high": stats["high"]}

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        if batch.over == "instances":
            return self.student_loss(output, batch)
        if not self.training:
            return nll(output.bag, batch.target, EPS)
        self.update_range(output.parts["low"].detach().amin(0), output.parts["high"].detach().amax(0), batch.epoch)
        return nll(output.bag if self.mining == "off" else self.mined_scores(output, batch), batch.target, EPS)

    @torch.no_grad()
    def update_range(self, low: Tensor, high: Tensor, epoch: Tensor | None) -> None:
        epoch = epoch if epoch is not None else self.ranged
        goes_on = epoch == self.ranged
        self.low.copy_(torch.where(goes_on, torch.minimum(low, self.low), low))
        self.high.copy_(torch.where(goes_on, torch.maximum(high, self.high), high))
        self.ranged.copy_(epoch)

    def membership(self, score: Tensor) -> Tensor:
        """(N, 1 or C): q, how surely an instance belongs to its bag's class."""
        return ((score.detach() - self.low) / (self.high - self.low).clamp_min(1e-12)).clamp(EPS, 1 - EPS)

    def student_loss(self, output: Output, batch: Batch) -> Tensor:
        """Linear in the target, so that a soft label is a mixture. Instances stand as bags of one here."""
        z, y, q, w = output.instance, batch.target, self.membership(output.parts["score"]), self.w
        if self.kind == "soft":
            log_p = z.log_softmax(1)
            rest = (log_p.sum(1, keepdim=True) - log_p) / (z.shape[1] - 1)
            each = -(y * (q * log_p + (1 - q) * rest)).sum(1)
        else:
            p = z.sigmoid() if self.kind == "classwise" else z.softmax(1)
            yes, no = -(1 - w) * (p + EPS).log(), -w * (1 - p + EPS).log()
            each = (y * (q * yes + (1 - q) * no)).sum(1)
            if self.kind == "classwise":  # for the other classes the bag is a negative one: q = 0
                able = torch.ones_like(y) if self.counted is None else self.counted.to(y.dtype).expand_as(y)
                each = (each + (able * (1 - y) * no).sum(1)) / able.sum(1)
        stands = self.counted_instances(batch)
        return (stands * each).sum() / stands.sum().clamp_min(1e-12)

    def counted_instances(self, batch: Batch) -> Tensor:
        return batch.segments.total_weight() * (batch.target.sum(1) > 0)

    def loss_weight(self, batch: Batch) -> Tensor:
        return self.counted_instances(batch).sum() if batch.over == "instances" else super().loss_weight(batch)

    def mined_scores(self, output: Output, batch: Batch) -> Tensor:
        """(B, C): the teacher's judgement from the hard instances alone, once the time has come."""
        s, z = batch.segments, output.instance.detach()
        p = ((z.sigmoid() if self.kind == "classwise" else z.softmax(1)) * s.broadcast(batch.target)).sum(1)
        if self.mining == "threshold":
            bar = (-s.max(-p)).clamp_min(self.threshold)  # at least the hardest of all stays
        else:
            sheet = s.to_dense(p, fill=torch.inf)[0].sort(1).values
            bar = sheet[:, min(self.hardest, sheet.shape[1]) - 1]
        epoch = batch.epoch if batch.epoch is not None else torch.zeros((), device=z.device)
        easy = (p > s.broadcast(bar)) & (epoch >= self.mining_after)
        return self.masked_log_softmax(
            self.teaching.bag_logits(
                attention_pool(output.parts["score"], output.parts["seen"], s.without(easy))["pool"]
            )
        )

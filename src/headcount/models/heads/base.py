"""Head and Output: the contract every method keeps.

    h         (N, D)  features of the instances, from the backbone
    segments          which bag each instance stands in
    instance  (N, C)  logits: the argmax is the class said of an instance
    bag       (B, C)  log-probabilities: the argmax is the class said of a bag

A head sees no images, no recipes, no devices. What it needs of the training loop it declares as data: how many ``views`` of
each bag, a ``teacher`` (the decay of a moving average), and its ``passes``. Memory per bag or per instance is a buffer
(made in ``enrol``), so it is checkpointed like the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headcount.bags import Segments


class Output(NamedTuple):
    """What a model says of a batch: one meaning, for every method. ``parts`` are for the head's own loss."""

    instance: Tensor  # (N, C) logits
    bag: Tensor  # (B, C) log-probabilities
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """What a loss may know. With V views the bags stand V times, one whole set after the other (see Segments.repeat)."""

    segments: Segments
    target: Tensor  # (B, C)
    bag: Tensor  # (B,) which training bags these are
    place: Tensor  # (N,) where each instance stands in the training bags' order
    known: Tensor | None = None  # (N,) instance labels given as supervision, -1 where unknown
    epoch: Tensor | None = None  # () the epoch, on the device
    done: Tensor | None = None  # () the share of the training that lies behind, on the device
    over: str = "bags"  # the pass: "bags", or "instances" (each instance a bag of one with its bag's target)
    views: int = 1


@dataclass(frozen=True)
class Pass:
    """One sweep of an epoch: over bags or over loose instances, training the parameters under these prefixes.

    Each prefix has an optimizer of its own, shared by the passes that name it.
    """

    over: str = "bags"
    trains: tuple[str, ...] = ("",)
    taught: bool = True  # false: one view of each bag, and the teacher is not asked


class Head(nn.Module):
    """Give ``forward``; everything else has a default."""

    title: ClassVar[str] = ""  # what tables call it
    cites: ClassVar[str] = ""
    # these three may also follow from the options: then the instance has its own
    views: int = 1
    teacher: float | None = None  # decay of the moving average that plays teacher, and then also answers
    passes: tuple[Pass, ...] = (Pass(),)
    weak_teacher: ClassVar[bool] = False  # true if all the teacher's views are of the weakest kind
    counted: Tensor | None
    told: ClassVar[bool] = False  # true for the one head that is told the instances' classes: a bound, not a method
    whole_bag: ClassVar[bool] = False  # true if what is said of an instance depends on the others in its bag
    order_matters: bool = False  # true if the order of the instances in a bag changes what is said
    batch_matters: bool = False  # true if the other bags of a batch change what is said of a bag, even in eval mode

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__()
        self.dim, self.classes = dim, classes
        self.register_buffer("counted", counted, persistent=False)

    @classmethod
    def named(cls, options: Mapping[str, Any]) -> str:
        """What tables call this head under these options."""
        extra = ", ".join(f"{k}={v}" for k, v in sorted(options.items()))
        return f"{cls.title} ({extra})" if extra else cls.title

    def enrol(self, bags: int, instances: int) -> None:
        """Told once, before training, how many training bags and instances there are: the place to register memory
        (buffers) per bag or per instance. It is checkpointed, and not part of the finished model."""

    def forward(self, h: Tensor, segments: Segments) -> Output:
        raise NotImplementedError

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        """The negative log-likelihood of the bags' labels. In validation there is no teacher."""
        return nll(output.bag, batch.target)

    def elect(self, scores: Tensor) -> Tensor:
        """(B, C) scores -> log-probabilities of winning; classes that do not count cannot win."""
        if self.counted is not None:
            scores = scores.masked_fill(~self.counted, -torch.inf)
        return scores.log_softmax(1)


class Tally(Head):
    """A head that hears every instance alone, adds up what it heard, and then decides.

    ``local(h) -> instance logits, summands (N, K)``; ``top(sums (B, K), total (B,)) -> bag log-probabilities``.
    Written so, a bag of any size can be counted in chunks.
    """

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__(dim, classes, counted)
        self.classifier = nn.Linear(dim, classes)

    def local(self, h: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def top(self, sums: Tensor, total: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, h: Tensor, segments: Segments) -> Output:
        instance, summands = self.local(h)
        sums, total = segments.sum(summands), segments.total()
        total = torch.where(total > 0, total, torch.ones_like(total))
        return Output(instance, self.top(sums, total), {"sums": sums, "total": total})


def nll(log_p: Tensor, target: Tensor, eps: float = 0.0) -> Tensor:
    """-sum(target * log p), averaged over the bags that have a label."""
    if eps:
        log_p = (log_p.exp() + eps).log()
    each = -torch.where(target > 0, target * log_p, torch.zeros_like(log_p)).sum(1)
    return each.sum() / (target.sum(1) > 0).sum().clamp_min(1)


__all__ = ["Batch", "Head", "Output", "Pass", "Tally", "nll"]

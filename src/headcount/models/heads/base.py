"""Head and Output: the contract every method keeps.

    h         (N, D)  features of the instances, from the backbone
    segments          which bag each instance stands in
    instance  (N, C)  logits: the argmax is the class said of an instance
    bag       (B, C)  log-probabilities: the argmax is the class said of a bag

A head that hears instances one by one may say so in three steps, ``hear``, ``join`` and ``decide``: what is noted of pieces
of a bag is joined to what is noted of the bag. Its ``forward`` is then given, and bags of any size follow (training/chunked.py).

A head sees no images, no recipes, no devices. What it needs of the training loop it declares as data: how many ``views`` of
each bag, a ``teacher`` (the decay of a moving average), and its ``passes``. Memory per bag or per instance is a buffer
(made in ``enrol``), so it is checkpointed like the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.majority.transition import Transition

BagStats = dict[str, Tensor]  # what is noted of each bag, or of a piece of it: (B, ...) by name


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
    position: Tensor  # (N,) where each instance stands in the training bags' order
    known: Tensor | None = None  # (N,) instance labels given as supervision, -1 where unknown
    epoch: Tensor | None = None  # () the epoch, on the device
    fraction_done: Tensor | None = None  # () the share of the training that lies behind, on the device
    over: str = "bags"  # the pass: "bags", or "instances" (each instance a bag of one with its bag's target)
    views: int = 1

    def to(self, device: torch.device) -> Batch:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, (Tensor, Segments))}
        return replace(self, **moved)


@dataclass(frozen=True)
class Pass:
    """One sweep of an epoch: over bags or over loose instances, training the parameters under these prefixes.

    Each prefix has an optimizer of its own, shared by the passes that name it.
    """

    over: str = "bags"
    trains: tuple[str, ...] = ("",)
    uses_teacher: bool = True  # false: one view of each bag, and the teacher is not asked
    start: float = 0.0  # the share of the training before which it is left out


class Head(nn.Module):
    """Give ``forward``, or ``hear`` and ``decide`` (and ``join``, if it is no sum); everything else has a default."""

    title: ClassVar[str] = ""  # what tables call it
    cites: ClassVar[str] = ""
    # these three may also follow from the options: then the instance has its own
    views: int = 1
    teacher: float | None = None  # decay of the moving average that plays teacher, and then also answers
    passes: tuple[Pass, ...] = (Pass(),)
    teacher_start: float = 0.0  # the share of the training before the teacher is asked: until then one view is enough
    weak_teacher: ClassVar[bool] = False  # true if all the teacher's views are of the weakest kind
    n_temperatures: int = (
        1  # numbers a validation loss consists of: the same answers read in so many ways, the best counts
    )
    counted: Tensor | None
    minmax_buffers: ClassVar[
        Mapping[str, str]
    ] = {}  # buffers that keep the least or greatest of a pass: name -> min or max
    uses_instance_labels: ClassVar[bool] = (
        False  # true for the one head that is told the instances' classes: a bound, not a method
    )
    whole_bag: ClassVar[bool] = False  # true if what is said of an instance depends on the others in its bag
    mean_of_instances: ClassVar[bool] = False  # true if a bag is nothing but the mean of its instances' probabilities
    order_matters: bool = False  # true if the order of the instances in a bag changes what is said
    requires_full_batch: ClassVar[str] = ""  # why a batch cannot be taken in pieces or shared out; nothing if it can
    batch_matters: bool = False  # true if the other bags of a batch change what is said of a bag, even in eval mode

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__()
        self.dim, self.classes = dim, classes
        self.register_buffer("counted", counted, persistent=False)

    @property
    def estimate(self) -> Transition | None:
        """What training found out of what bags' labels say of instances; None for heads that do not look for it."""
        return None

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        """What tables call this head under these options."""
        extra = ", ".join(f"{k}={v}" for k, v in sorted(options.items()))
        return f"{cls.title} ({extra})" if extra else cls.title

    def setup_memory(self, bags: int, instances: int) -> None:
        """Told once, before training, how many training bags and instances there are: the place to register memory
        (buffers) per bag or per instance. It is checkpointed, and not part of the finished model."""

    def setup_bag_size(self, size: float) -> None:
        """Told once, after ``enrol``, how large the training bags that have a label are (``size_of`` of majority/transition_em.py)."""

    def forward(self, h: Tensor, segments: Segments) -> Output:
        instance, stats = self.accumulate(h, segments)
        return Output(instance, *self.readout(stats))

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        """(N, C) instance logits, and what is to be noted of each bag, or of the piece of it that is here."""
        raise NotImplementedError

    def merge(self, pieces: Sequence[BagStats]) -> BagStats:
        """What was noted of the pieces of a bag, as if it had been heard in one."""
        return {name: torch.stack([piece[name] for piece in pieces]).sum(0) for name in pieces[0]}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(B, C) bag log-probabilities and parts. A bag is decided, and its loss computed, from what was noted alone."""
        raise NotImplementedError

    def why_not_chunkable(self, segments: Segments) -> str:
        """Why bags like these cannot be heard in pieces; nothing if they can."""
        if self.whole_bag:
            return "what it says of an instance depends on the others in the bag"
        if self.order_matters:
            return "the order of a bag's instances matters to it"
        return "it is written without hear and decide" if type(self).accumulate is Head.accumulate else ""

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        """The negative log-likelihood of the bags' labels. In validation there is no teacher."""
        return nll(output.bag, batch.target)

    def loss_weight(self, batch: Batch) -> Tensor:
        """() how much the loss is a mean over: here the bags that have a label. By it, the losses of parts of a batch
        average to the loss of the batch, so that a batch can be shared out or taken bit by bit, exactly."""
        return (batch.target.sum(1) > 0).sum()

    def masked_log_softmax(self, scores: Tensor) -> Tensor:
        """(B, C) scores -> log-probabilities of winning; classes that do not count cannot win."""
        if self.counted is not None:
            scores = scores.masked_fill(~self.counted, -torch.inf)
        return scores.log_softmax(1)


class SumHead(Head):
    """A head that hears every instance alone, adds up what it heard, and then decides.

    ``local(h) -> instance logits, summands (N, K)``; ``top(sums (B, K), total (B,)) -> bag log-probabilities``.
    Written so, a bag of any size can be counted in pieces.
    """

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__(dim, classes, counted)
        self.classifier = nn.Linear(dim, classes)

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        raise NotImplementedError

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        instance, summands = self.instance_terms(h)
        return instance, {"sums": segments.sum(summands), "total": segments.total_weight()}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        sums, total = stats["sums"], stats["total"]
        total = torch.where(total > 0, total, torch.ones_like(total))
        return self.readout_sums(sums, total), {"sums": sums, "total": total}


def nll(log_p: Tensor, target: Tensor, eps: float = 0.0) -> Tensor:
    """-sum(target * log p), averaged over the bags that have a label."""
    if eps:
        log_p = (log_p.exp() + eps).log()
    each = -torch.where(target > 0, target * log_p, torch.zeros_like(log_p)).sum(1)
    return each.sum() / (target.sum(1) > 0).sum().clamp_min(1)


def instance_weights(segments: Segments) -> Tensor:
    """(N,) how often each instance counts: the removed not at all."""
    here = (~segments.removed).float()
    return here if segments.weight is None else here * segments.weight


def instance_cross_entropy(z: Tensor, known: Tensor, weight: Tensor) -> Tensor:
    """() cross-entropy of ``z`` (N, C) on the instances whose own class is given, -1 where it is not."""
    told = weight * (known >= 0)
    each = -z.log_softmax(1).gather(1, known.clamp_min(0)[:, None])[:, 0]
    return (told * each).sum() / told.sum().clamp_min(1e-12)


__all__ = [
    "BagStats",
    "Batch",
    "Head",
    "Output",
    "Pass",
    "SumHead",
    "instance_cross_entropy",
    "instance_weights",
    "nll",
]

"""Head and Output: the contract of every method. A head sees features, no images, recipes or devices. What it needs of the training
loop it declares as data: ``views`` of each bag, a ``teacher`` (a moving average of the model), and its ``passes``.

A ChunkedHead takes bags larger than memory: ``accumulate`` turns each chunk of a bag into a few numbers per bag, ``merge`` combines
those of several chunks, and ``readout`` turns them into the bag's log-probabilities (training/chunked.py). A SumHead is the usual one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.majority.label_noise import report_log_probs

BagStats = dict[str, Tensor]  # what is accumulated of each bag, or of a chunk of it: name -> (B, ...)


class Output(NamedTuple):
    """What a model computes for a batch, with one meaning for every method. ``parts`` are for the head's own loss."""

    instance: Tensor  # (N, C) logits; the argmax is the predicted class of the instance
    bag: Tensor  # (B, C) log-probabilities; the argmax is the predicted class of the bag
    parts: Mapping[str, Tensor]


@dataclass(frozen=True)
class Batch:
    """What a loss may use. With V views the bags are repeated V times, one whole set after the other (Segments.repeat)."""

    segments: Segments
    target: Tensor  # (B, C)
    bag: Tensor  # (B,) indices of the training bags
    position: Tensor  # (N,) positions of the instances among those of all training bags
    known: Tensor | None = None  # (N,) instance labels given as supervision, -1 where unknown
    epoch: Tensor | None = None  # () the epoch, on the device
    fraction_done: Tensor | None = None  # () the fraction of the training that is done, on the device
    over: str = "bags"  # the pass: "bags", or "instances" (each instance a bag of one with the target of its bag)
    views: int = 1
    votes: Tensor | None = None  # (B, C) how many votes were counted for each class, zeros for a bag without counts

    def to(self, device: torch.device) -> Self:
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, (Tensor, Segments))}
        return replace(self, **moved)


@dataclass(frozen=True)
class Pass:
    """One sweep of an epoch, over bags or over single instances, that trains the parameters under these prefixes.

    Each prefix has its own optimizer, shared by the passes that name it.
    """

    over: str = "bags"
    trains: tuple[str, ...] = ("",)
    uses_teacher: bool = True  # False: one view of each bag and no teacher
    start: float = 0.0  # the fraction of the training before which the pass is skipped


@dataclass(frozen=True)
class Teacher:
    """An exponential moving average of the model that gives targets, and is the model that is validated and kept."""

    decay: float
    start: float = 0.0  # the fraction of the training before which it gives no targets and one view is enough
    weak_views: bool = False  # True: all its views are of the weakest kind


class Head(nn.Module):
    """Base class of all methods: write ``forward``; everything else has a default.

    Parameters
    ----------
    dim : int
        D, the number of features of an instance.
    classes : int
        C, the number of classes.
    counted : Tensor, optional
        (C,) booleans: classes that are False cannot be the majority (a background class, for example).

    Examples
    --------
    >>> class MeanLogit(Head):
    ...     title, cites = "Mean logit", "an example"
    ...
    ...     def __init__(self, dim, classes, counted=None):
    ...         super().__init__(dim, classes, counted)
    ...         self.classifier = nn.Linear(dim, classes)
    ...
    ...     def forward(self, h, segments):
    ...         z = self.classifier(h).float()
    ...         return Output(z, self.masked_log_softmax(segments.mean(z)), {})
    >>> MeanLogit(5, 3)(torch.ones(4, 5), Segments.from_sizes([1, 3])).bag.shape
    torch.Size([2, 3])
    """

    title: ClassVar[str] = ""  # the name in tables
    cites: ClassVar[str] = ""  # the paper
    # what the head asks of the training loop; where it depends on the options, __init__ sets it
    views: int = 1
    teacher: Teacher | None = None
    passes: tuple[Pass, ...] = (Pass(),)
    compiled: ClassVar[bool] = False  # compiled as the backbone is: worth the seconds for a head of many small operations
    # facts about the method
    uses_instance_labels: ClassVar[bool] = False  # it learns from instance labels: a bound, not a method
    mean_of_instances: ClassVar[bool] = False  # a bag's probabilities are the mean of its instances'
    depends_on_bag: ClassVar[bool] = False  # an instance's logits depend on the other instances of the bag
    depends_on_order: bool = False  # the order of the instances in a bag matters
    depends_on_batch: bool = False  # the other bags of a batch matter, even in eval mode
    # a fact about the labels, which the trainer sets: the probability that each was replaced by one at random
    label_noise: float = 0.0
    counted: Tensor | None

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__()
        self.dim, self.classes = dim, classes
        self.register_buffer("counted", counted, persistent=False)

    def forward(self, h: Tensor, segments: Segments) -> Output:
        """(N, D) features and the bag of each -> logits of the instances and log-probabilities of the bags."""
        raise NotImplementedError

    def loss(self, output: Output, batch: Batch, teacher: Output | None = None) -> Tensor:
        """() the negative log-likelihood of the bag labels. ``teacher`` is the teacher's output; None in validation."""
        return nll(output.bag, batch.target)

    def loss_weight(self, batch: Batch) -> Tensor:
        """() what the loss is a mean over: the number of labelled bags. Weighted by it, the losses of the parts of a batch average
        to that of the batch. A head whose loss is no such mean raises NotImplementedError with why: its batches are not split."""
        return (batch.target.sum(1) > 0).sum()

    def setup(self, segments: Segments, target: Tensor) -> None:
        """Called once before training with the segments and the target (B, C) of all training bags: the place to register
        buffers per bag or per instance. They are checkpointed, and are not part of the finished model."""

    def masked_log_softmax(self, scores: Tensor) -> Tensor:
        """(B, C) scores -> log-probabilities of the majority; classes that are not counted have probability 0."""
        if self.counted is not None:
            scores = scores.masked_fill(~self.counted, -torch.inf)
        return scores.log_softmax(1)

    def report(self, output: Output) -> Output:
        """The output as the loss takes it: ``bag`` is log P(label), not log P(winner), where labels are noised."""
        return output._replace(bag=report_log_probs(output.bag, self.label_noise, self.counted)) if self.label_noise else output

    @classmethod
    def display_name(cls, options: Mapping[str, Any]) -> str:
        """The name of this head with these options in tables."""
        extra = ", ".join(f"{k}={v}" for k, v in sorted(options.items()))
        return f"{cls.title} ({extra})" if extra else cls.title


class ChunkedHead(Head):
    """A head that gives ``accumulate`` and ``readout`` (and ``merge``, where the statistics are not sums)."""

    minmax_buffers: ClassVar[Mapping[str, str]] = {}  # buffers that hold extremes of a pass: name -> "min" or "max"

    def forward(self, h: Tensor, segments: Segments) -> Output:
        instance, stats = self.accumulate(h, segments)
        return Output(instance, *self.readout(stats))

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        """(N, C) instance logits, and the statistics of each bag, or of the chunk of it that is given."""
        raise NotImplementedError

    def merge(self, chunks: Sequence[BagStats]) -> BagStats:
        """The statistics of a bag from those of its chunks; by default their sum."""
        return {name: torch.stack([chunk[name] for chunk in chunks]).sum(0) for name in chunks[0]}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        """(B, C) bag log-probabilities, and the parts of the output. The loss may use nothing else."""
        raise NotImplementedError

    def why_whole_bags(self, segments: Segments) -> str:
        """Why bags like these must be given whole after all; empty if they need not."""
        return ""


class SumHead(ChunkedHead):
    """A head that maps each instance to terms, sums them over the bag, and reads the sums out.

    Give ``instance_terms(h) -> logits (N, C), terms (N, K)`` and
    ``readout_sums(sums (B, K), total (B,)) -> bag log-probabilities (B, C)``; ``total`` is the number of instances.

    Examples
    --------
    >>> class MeanVote(SumHead):
    ...     title, cites = "Mean vote", "an example"
    ...
    ...     def instance_terms(self, h):
    ...         z = self.classifier(h).float()
    ...         return z, z.softmax(1)
    ...
    ...     def readout_sums(self, sums, total):
    ...         return self.masked_log_softmax((sums / total[:, None]).log())
    >>> MeanVote(5, 3)(torch.ones(4, 5), Segments.from_sizes([1, 3])).bag.shape
    torch.Size([2, 3])
    """

    def __init__(self, dim: int, classes: int, counted: Tensor | None = None) -> None:
        super().__init__(dim, classes, counted)
        self.classifier = nn.Linear(dim, classes)

    def instance_terms(self, h: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def readout_sums(self, sums: Tensor, total: Tensor) -> Tensor:
        raise NotImplementedError

    def accumulate(self, h: Tensor, segments: Segments) -> tuple[Tensor, BagStats]:
        instance, terms = self.instance_terms(h)
        return instance, {"sums": segments.sum(terms), "total": segments.total_weight()}

    def readout(self, stats: BagStats) -> tuple[Tensor, Mapping[str, Tensor]]:
        sums, total = stats["sums"], stats["total"]
        total = torch.where(total > 0, total, torch.ones_like(total))
        return self.readout_sums(sums, total), {"sums": sums, "total": total}


def why_not_chunkable(head: Head, segments: Segments) -> str:
    """Why this head cannot take bags like these in chunks; empty if it can."""
    if head.depends_on_bag:
        return "an instance's prediction depends on the other instances of the bag"
    if head.depends_on_order:
        return "the order of a bag's instances matters to it"
    if not isinstance(head, ChunkedHead):
        return "it is not a ChunkedHead, with accumulate and readout"
    return head.why_whole_bags(segments)


def nll(
    log_p: Tensor, target: Tensor, eps: float = 0.0, *, log_p_votes: Tensor | None = None, votes: Tensor | None = None
) -> Tensor:
    """() -sum(target * log p), averaged over the labelled bags; log(p + eps) if ``eps`` is given. Of bags with counts in ``votes``
    (B, C) the log-likelihood ``log_p_votes`` (B,) is taken instead."""
    if eps:
        log_p = (log_p.exp() + eps).log()
    bag_loss = -torch.where(target > 0, target * log_p, torch.zeros_like(log_p)).sum(1)
    if votes is not None and log_p_votes is not None:
        bag_loss = torch.where(votes.sum(1) > 0, -log_p_votes.to(bag_loss.dtype), bag_loss)
    return bag_loss.sum() / (target.sum(1) > 0).sum().clamp_min(1)


def instance_cross_entropy(z: Tensor, known: Tensor, weight: Tensor) -> Tensor:
    """() weighted cross-entropy of logits ``z`` (N, C) on the instances with a known class (-1: unknown)."""
    weight = weight * (known >= 0)
    losses = -z.log_softmax(1).gather(1, known.clamp_min(0)[:, None])[:, 0]
    return (weight * losses).sum() / weight.sum().clamp_min(1e-12)

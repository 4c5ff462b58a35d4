"""ChunkedHead and SumHead: heads whose bags may be larger than memory. ``accumulate`` turns each chunk of a bag into a few numbers per
bag, ``merge`` combines those of several chunks, and ``readout`` turns them into the bag's log-probabilities (training/chunked.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from headcount.bags import Segments
from headcount.models.heads.base import Head, Output

BagStats = dict[str, Tensor]  # what is accumulated of each bag, or of a chunk of it: name -> (B, ...)


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

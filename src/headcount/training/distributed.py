"""Several processes at one training (``torchrun``): each takes a shard of the bags of every step, and the gradients are added.

Each process multiplies its gradient by the weight of its loss (``Head.loss_weight``: mostly its number of labelled bags), one
all_reduce adds them, and the sum is divided by the total weight: exactly the gradient of one process with the whole batch, however
unequal the shards. torch's DistributedDataParallel takes the unweighted mean over processes, which is correct only for equal
shards, and its hooks do not work in a CUDA graph.

Heads need not know. Their buffers are synchronised after every pass: memory per bag or per instance by adding the changes (exact:
in one pass each bag is in one process), minima and maxima as such, batch-norm's running statistics by their mean. A head that
keeps anything else across bags is refused.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed, nn

from headcount.errors import HeadcountError
from headcount.models.heads import ChunkedHead, Pass

if TYPE_CHECKING:
    from headcount.training.trainer import Trainer

LOST_MESSAGE = "this training was terminated, or lost one of its processes; the same command resumes from the last checkpoint"
Step = Callable[[Tensor], Tensor]


def rank() -> int:
    """The number of this process among those of torchrun; 0 if there is one."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def local_rank() -> int:
    """The number of this process on its machine, and of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if world_size() > 1 else 0


class ProcessGroup:
    """The processes of one training, as one of them sees them."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)

    @property
    def is_main(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def shard(self, ids: Tensor) -> Tensor:
        """This process's part of the ids of a step."""
        return ids if self.size == 1 else ids.tensor_split(self.size)[self.rank]

    def all_reduce(self, x: Tensor, op: Any = distributed.ReduceOp.SUM) -> Tensor:
        """The sum over all processes, in place, with the same bits in each."""
        if self.size > 1:
            try:
                distributed.all_reduce(x, op)
            except RuntimeError as e:  # a broken connection
                raise HeadcountError(LOST_MESSAGE) from e
        return x

    def broadcast(self, flag: bool) -> bool:
        """The flag of the main process."""
        return bool(self.all_reduce(torch.tensor(int(flag and self.is_main), device=self.device)))

    def check_equal(self, what: str, number: int) -> None:
        """Stop all processes unless all have the same number: otherwise they would add gradients of different things."""
        if self.size > 1:
            extremes = torch.tensor([number, -number], device=self.device)
            highest, minus_lowest = self.all_reduce(extremes, distributed.ReduceOp.MAX).tolist()
            if highest != -minus_lowest:
                advice = "give them all the same command and data, and an --out that all of them see"
                raise HeadcountError(f"the {self.size} processes of this training do not agree on {what}; {advice}")

    def barrier(self) -> None:
        self.all_reduce(torch.zeros((), device=self.device))


def process_group(device: torch.device) -> ProcessGroup:
    """The group in which torchrun started this process; otherwise a group of one."""
    return _join(device) if world_size() > 1 else ProcessGroup()


@lru_cache
def _join(device: torch.device) -> ProcessGroup:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # no timeout: the main process may wait for a lock or score for long, and torchrun notices processes that die
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    atexit.register(_leave)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _raise_lost)  # how torchrun ends the other processes when one was lost
    return ProcessGroup(rank(), world_size(), device)


def _leave() -> None:
    with suppress(Exception):  # of a lost process
        distributed.destroy_process_group()


def _raise_lost(*_: Any) -> None:
    raise HeadcountError(LOST_MESSAGE)


def require_single_process(what: str, why: str = "starts its own: use one or the other") -> None:
    """Refuse what several processes cannot do at once."""
    if world_size() > 1:
        raise HeadcountError(f"torchrun already runs {world_size()} processes; {what} {why}")


class DistributedStep:
    """One step of a pass by all processes, each called with the ids of the whole step."""

    def __init__(self, trainer: Trainer, sweep: Pass, capture: Callable[[Step, torch.device], Step]) -> None:
        self.trainer, self.sweep, self.group = trainer, sweep, trainer.process_group
        loader, head = trainer.train_loader, trainer.model.config.head
        if reason := trainer.chunked.why_not_splittable():
            raise HeadcountError(f"head {head} cannot be trained by several processes: {reason}; train it with one process")
        if min(loader.batch_bags, len(loader.bags)) < self.group.size:
            problem = f"a step has {loader.batch_bags} of {len(loader.bags)} bags, too few for {self.group.size} processes"
            raise HeadcountError(f"{problem}; give each at least one (a larger batch_bags, or fewer processes)")
        self.parameters = [p for name, p in trainer.model.named_parameters() if name.startswith(sweep.trains)]
        self.offsets = torch.tensor([0] + [p.numel() for p in self.parameters]).cumsum(0).tolist()
        self.has_gradient = [True] * len(self.parameters)  # the others are not updated, as in one process
        self.weighted_gradient = capture(self._weighted_gradient, trainer.device)
        self.update = capture(self._update, trainer.device)

    def __call__(self, ids: Tensor) -> Tensor:
        shard = self.group.shard(ids)
        empty = torch.zeros(self.offsets[-1] + 2, device=self.group.device)
        return self.update(self.group.all_reduce(self.weighted_gradient(shard) if len(shard) else empty))

    def _weighted_gradient(self, shard: Tensor) -> Tensor:
        """(P + 2,): gradient and loss, both times the weight; and the weight."""
        loss, weight = self.trainer.chunked.gradient(self.sweep, shard)
        self.has_gradient = [p.grad is not None for p in self.parameters]
        gradients = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in self.parameters]
        weight = weight.float()
        return torch.cat([*(g * weight for g in gradients), (loss.float() * weight)[None], weight[None]])

    def _update(self, total: Tensor) -> Tensor:
        mean = total[:-1] / total[-1].clamp_min(1e-12)
        for p, has_gradient, start in zip(self.parameters, self.has_gradient, self.offsets, strict=False):
            p.grad = mean[start : start + p.numel()].view_as(p).to(p.dtype) if has_gradient else None
        self.trainer.optimizer_step(self.sweep)
        return mean[-1].clone()


class BufferSync:
    """The model's buffers at the start of a pass, to combine those of all processes at its end."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.group = trainer, trainer.process_group
        minmax = trainer.head.minmax_buffers if isinstance(trainer.head, ChunkedHead) else {}
        norms = [name for name, m in trainer.model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        n_bags, n_instances = len(trainer.train_loader.bags), len(trainer.train_loader.bag_of)
        self.rules: dict[str, str] = {}
        for name, buffer in trainer.model.named_buffers():
            if name in trainer.setup_buffers and buffer.ndim and len(buffer) in (n_bags, n_instances):
                self.rules[name] = "sum of changes"
            elif (head_name := name.removeprefix("head.")) in minmax:
                self.rules[name] = minmax[head_name]
            elif name.rpartition(".")[0] in norms:
                self.rules[name] = "mean" if buffer.is_floating_point() else "max"
        self.before = self._snapshot()

    def _snapshot(self) -> dict[str, Tensor]:
        return {name: b.clone() for name, b in self.trainer.model.named_buffers()}

    @torch.no_grad()
    def sync(self) -> None:
        for name, buffer in self.trainer.model.named_buffers():
            before, rule = self.before[name], self.rules.get(name)
            if rule in ("min", "max"):
                self.group.all_reduce(buffer, distributed.ReduceOp.MIN if rule == "min" else distributed.ReduceOp.MAX)
            elif rule is not None:
                change = self.group.all_reduce(buffer - before)
                buffer.copy_(before + (change / self.group.size if rule == "mean" else change))
            elif self.group.all_reduce(torch.tensor(int(not torch.equal(buffer, before)), device=self.group.device)):
                problem = f"head {self.trainer.model.config.head} keeps {name.removeprefix('head.')!r} across bags"
                raise HeadcountError(f"{problem}, and each process would keep its own; train it with one process")
        if self.trainer.teacher is not None:
            for (name, buffer), current in zip(self.trainer.teacher.named_buffers(), self.trainer.model.buffers(), strict=True):
                if self.rules.get(name) == "mean":  # the teacher's batch-norm is an average of its own (MovingAverage)
                    buffer.copy_(self.group.all_reduce(buffer.clone()) / self.group.size)
                else:
                    buffer.copy_(current)
        self.before = self._snapshot()

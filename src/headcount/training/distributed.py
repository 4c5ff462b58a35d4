"""Several processes at one training (``torchrun``): each takes its share of every step's bags, and the gradients are added up.

Each process multiplies its gradient by what its loss is a mean over (``Head.mass``: its labelled bags, mostly), one
all_reduce adds up, and the sum is divided by the sum of the masses: exactly the gradient of one process with the whole
batch, however unequal the shares. torch's DistributedDataParallel takes the plain mean over processes instead, which is
right only for equal shares, and its hooks do not go together with a captured step. Forward and backward are captured as one
graph, the update as another, and the all_reduce stands between them.

Heads know nothing of it. What they keep in buffers is brought together after every pass: memory per bag or per instance by
adding up the changes (exact: in one pass a bag is at one process), least and greatest values as such, batch-norm's running
statistics by their mean. A head that keeps anything else across bags is refused.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, distributed, nn

from headcount.errors import HeadcountError
from headcount.models.heads import Pass

LOST_MESSAGE = (
    "this training was told to end, or one of its processes was lost; the same command goes on from the last checkpoint"
)


def rank() -> int:
    """Which of torchrun's processes this is; 0 where there is but one."""
    return int(os.environ.get("RANK", "0")) if world_size() > 1 else 0


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def local_rank() -> int:
    """Which of this machine's: the number of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0")) if world_size() > 1 else 0


class ProcessGroup:
    """The processes at one training, as one of them sees it. Alone, it costs nothing."""

    def __init__(self, rank: int = 0, size: int = 1, device: torch.device | str = "cpu") -> None:
        self.rank, self.size, self.device = rank, size, torch.device(device)

    @property
    def is_main(self) -> bool:
        """The one that writes, logs and shows."""
        return self.rank == 0

    @property
    def seed_suffix(self) -> tuple[int, ...]:
        """What tells this process's draws from the others'; the first (or only) one draws as ever."""
        return () if self.is_main else (self.rank,)

    def shard(self, which: Tensor) -> Tensor:
        """This process's part of a step's bags (or loose instances)."""
        return which if self.size == 1 else which.tensor_split(self.size)[self.rank]

    def all_reduce(self, x: Tensor, how: Any = distributed.ReduceOp.SUM) -> Tensor:
        """The sum over all processes, in place: everybody gets the same bits."""
        if self.size > 1:
            with _noticing():
                distributed.all_reduce(x, how)
        return x

    def broadcast(self, flag: bool) -> bool:
        """What the first process says."""
        return bool(self.all_reduce(torch.tensor(int(flag and self.is_main), device=self.device)))

    def check_equal(self, what: str, number: int) -> None:
        """Everybody has the same number, or all stop: out of step, they would add up gradients of different things."""
        if self.size > 1:
            both = self.all_reduce(
                torch.tensor([number, -number], device=self.device), distributed.ReduceOp.MAX
            ).tolist()
            if both[0] != -both[1]:
                raise HeadcountError(
                    f"the {self.size} processes of this training do not agree on {what}; give them all the same command, "
                    "data and an --out that all of them see"
                )

    def barrier(self) -> None:
        self.all_reduce(torch.zeros((), device=self.device))


def process_group(device: torch.device) -> ProcessGroup:
    """The team torchrun started this process in; otherwise a team of one."""
    return _joined(device) if world_size() > 1 else ProcessGroup()


@lru_cache
def _joined(device: torch.device) -> ProcessGroup:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # no hurry: the first may wait for a lock or score for long, and whoever dies is noticed by torchrun, not by the clock
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    atexit.register(_leave)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _end)  # how torchrun ends the others when one was lost
    return ProcessGroup(rank(), world_size(), device)


def _leave() -> None:
    with suppress(Exception):  # where somebody was lost there is nothing left to take apart
        distributed.destroy_process_group()


def _end(*_: Any) -> None:
    raise HeadcountError(LOST_MESSAGE)


@contextmanager
def _noticing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as e:  # a connection that broke; HeadcountError is none of these
        raise HeadcountError(LOST_MESSAGE) from e


def require_single_process(what: str, why: str = "starts its own: use one or the other") -> None:
    """Refuse what cannot be done by several processes at once."""
    if world_size() > 1:
        raise HeadcountError(f"torchrun already runs {world_size()} processes; {what} {why}")


# -- a step, together ---------------------------------------------------------------------------------------------------------


class DistributedStep:
    """One step of a pass, by all processes together. Called like the step of one process, with the whole step's bags."""

    def __init__(self, training: Any, one: Pass, fast: Callable[[Any], Any]) -> None:
        self.training, self.one, self.team = training, one, training.process_group
        if training.head.requires_full_batch:
            raise HeadcountError(
                f"head {training.model.config.head} cannot be trained by several processes: {training.head.requires_full_batch}; "
                "train it with one process"
            )
        if min(training.train_loader.batch_bags, len(training.train_loader.bags)) < self.team.size:
            raise HeadcountError(
                f"a step has {training.train_loader.batch_bags} of {len(training.train_loader.bags)} bags, too few for {self.team.size} "
                "processes; give each at least one (a larger batch_bags, or fewer processes)"
            )
        names = [n for n, _ in training.model.named_parameters() if n.startswith(one.trains)]
        self.trained = [dict(training.model.named_parameters())[n] for n in names]
        self.ends = torch.tensor([0] + [p.numel() for p in self.trained]).cumsum(0).tolist()
        self.used = [True] * len(self.trained)  # a parameter without a gradient is left alone, as by one process
        self.slope, self.update = fast(self._slope), fast(self._update)

    def __call__(self, which: Tensor) -> Tensor:
        share = self.team.shard(which)
        mine = self.slope(share) if len(share) else torch.zeros(self.ends[-1] + 2, device=self.team.device)
        return self.update(self.team.all_reduce(mine))

    def _slope(self, share: Tensor) -> Tensor:
        """(P + 2,): gradient and loss, both times the mass; and the mass."""
        loss, mass = self.training.backward(self.one, share)
        self.used = [p.grad is not None for p in self.trained]
        slopes = [(torch.zeros_like(p) if p.grad is None else p.grad).flatten().float() for p in self.trained]
        mass = mass.float()
        return torch.cat([*(s * mass for s in slopes), (loss.float() * mass)[None], mass[None]])

    def _update(self, added: Tensor) -> Tensor:
        mean = added[:-1] / added[-1].clamp_min(1e-12)
        for p, used, start in zip(self.trained, self.used, self.ends, strict=False):
            p.grad = mean[start : start + p.numel()].view_as(p).to(p.dtype) if used else None
        self.training.update(self.one)
        return mean[-1].clone()


# -- what heads and batch-norm keep -------------------------------------------------------------------------------------------


class BufferSync:
    """The model's buffers as they were when a pass began, to bring them together when it has ended."""

    def __init__(self, training: Any, enrolled: set[str]) -> None:
        self.training, self.team = training, training.process_group
        model, head = training.model, training.head
        norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.rules: dict[str, str] = {}
        for name, buffer in model.named_buffers():
            own = name.removeprefix("head.")
            if (
                name in enrolled
                and buffer.ndim
                and len(buffer) in (len(training.train_loader.bags), len(training.train_loader.bag_of))
            ):
                self.rules[name] = "changes"
            elif own in head.minmax_buffers:
                self.rules[name] = head.minmax_buffers[own]
            elif name.rpartition(".")[0] in norms:
                self.rules[name] = "mean" if buffer.is_floating_point() else "max"
        self.before = self._now()

    def _now(self) -> dict[str, Tensor]:
        return {name: b.clone() for name, b in self.training.model.named_buffers()}

    @torch.no_grad()
    def sync(self) -> None:
        for name, buffer in self.training.model.named_buffers():
            before, rule = self.before[name], self.rules.get(name)
            if rule is None:
                self._unchanged(name, buffer, before)
            elif rule in ("changes", "mean"):
                change = self.team.all_reduce(buffer - before)
                buffer.copy_(before + (change / self.team.size if rule == "mean" else change))
            else:
                self.team.all_reduce(buffer, distributed.ReduceOp.MIN if rule == "min" else distributed.ReduceOp.MAX)
        if self.training.teacher is not None:
            for (name, kept), now in zip(
                self.training.teacher.named_buffers(), self.training.model.buffers(), strict=True
            ):  # the teacher's own batch-norm is an average too, and must not become its pupil's (docs/tilt.md)
                kept.copy_(
                    self.team.all_reduce(kept.clone()) / self.team.size if self.rules.get(name) == "mean" else now
                )
        self.before = self._now()

    def _unchanged(self, name: str, buffer: Tensor, before: Tensor) -> None:
        changed = self.team.all_reduce(torch.tensor(int(not torch.equal(buffer, before)), device=self.team.device))
        if bool(changed):
            raise HeadcountError(
                f"head {self.training.model.config.head} keeps {name.removeprefix('head.')!r} across bags, and several processes "
                "would each keep their own; train it with one process"
            )

"""Training: what changes while a model learns. Forward, loss, backward, step; the validation loss; what a checkpoint holds.

The loop over epochs is train.py's.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.bags.hashing import fingerprint, tensor_bytes
from headcount.majority.transition_em import effective_bag_size
from headcount.models.heads import Batch, Output, Pass, head_code
from headcount.models.network import Model
from headcount.training import checkpoint, chunked, distributed, loss_curve
from headcount.training.accel import device as speed
from headcount.training.augment import apply_views
from headcount.training.config import TrainConfig
from headcount.training.loader import BagLoader
from headcount.training.optim import (
    build_optimizer,
    ema_rate,
    load_optimizer_state,
    lr_factor,
    optimizer_state,
    set_lr,
    update_ema,
)


@dataclass
class TrainProgress:
    """Where a training stands after an epoch: what the progress bar shows and ``metrics.jsonl`` keeps."""

    epoch: int = 0  # finished epochs
    best_epoch: int = 0  # counted from 1; 0 before the first
    best: float = math.inf
    curve: list[tuple[float, float]] = field(default_factory=list)  # train, validation loss of each epoch
    seconds: float = 0.0


def encode(normalize: nn.Module, backbone: nn.Module, x: Tensor, kind: str, views: int, weak: bool = False) -> Tensor:
    """Stored instances -> features of every view. The heavy part, and the only part that is ever compiled."""
    if (
        views > 1 and kind == "none" and getattr(backbone, "deterministic", False)
    ):  # the same view twice is answered once
        return backbone(normalize(x)).repeat(views, 1)
    return backbone(apply_views(normalize(x), kind, views, weak))


@lru_cache
def _encoder(compile: str, device: str) -> Callable[..., Tensor]:
    """One for the process: runs with the same shapes share what was compiled, whatever their head or fold."""
    return speed.compile_function(encode, compile, torch.device(device))


class Trainer:
    """What changes while a model learns: weights, teacher, optimizers, the best so far."""

    def __init__(self, model: Model, train: Bags, valid: Bags, config: TrainConfig, compile: str = "auto") -> None:
        device = model.device
        self.train_loader = BagLoader(train, config.batch_bags, device, config.batch_instances)
        self.valid_loader = BagLoader(valid, config.batch_bags, device)
        speed.set_tf32(config.precision, device)
        self.model, self.config, self.device = copy.deepcopy(model), config, device
        self.head = self.model.head
        own = {name for name, _ in self.model.named_buffers()}
        self.head.setup_memory(len(train), len(train.index))
        self.head.setup_bag_size(effective_bag_size(train.segments(), train.target))
        enrolled = {name for name, _ in self.model.named_buffers()} - own
        self.model.to(device)  # what enrolling added
        speed.optimize_layout(self.model, device, config.precision)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval() if self.head.teacher is not None else None
        self.eval_model = self.teacher or self.model
        self.encode = _encoder(compile, device.type)
        prefixes = dict.fromkeys(p for one in self.head.passes for p in one.trains)
        learned = [name for name, _ in self.model.named_parameters()]
        prefixes = [prefix for prefix in prefixes if any(name.startswith(prefix) for name in learned)]
        self.optimizers = {prefix: build_optimizer(self.model, prefix, config, device) for prefix in prefixes}
        self.process_group, self.mid_epoch = distributed.process_group(device), False
        self.chunked = chunked.ChunkedStep(self) if config.chunk_instances else None
        still = all(feed.resident and feed.bag_size is not None for feed in (self.train_loader, self.valid_loader))
        # only steps that do the same every time can be captured
        fast = partial(speed.cuda_graph, device=device) if still and self.chunked is None else lambda step: step
        passes = {
            replace(p, uses_teacher=p.uses_teacher and late)
            for p in self.head.passes
            for late in (not self.head.teacher_start, True)
        }
        self.pass_steps = {one: fast(partial(self.step, one)) for one in passes}
        if self.process_group.size > 1:
            self.pass_steps = {one: distributed.DistributedStep(self, one, fast) for one in passes}
            self.memory = distributed.BufferSync(self, enrolled)
        self.run_valid_step = fast(self.valid_step)
        self.total_steps = config.epochs * sum(self.train_loader.n_steps(one.over) for one in self.head.passes)
        self.best_state = {k: v.clone() for k, v in self.eval_model.state_dict().items()}

    def train_epoch(self, epoch: int) -> Tensor:
        """One sweep of every pass; the mean training loss, still on the device."""
        self.train_loader.epoch.fill_(epoch)
        self.valid_loader.epoch.fill_(epoch)
        self.model.train()
        self.mid_epoch = True
        passes = self.passes(epoch)
        total, losses = sum(self.train_loader.n_steps(one.over) for one in passes), []
        for one in passes:
            order = self.train_loader.shuffled(one.over, self.config.seed, epoch)
            with self.train_loader.prefetching(self._reads(one, order)):
                for which in order:
                    done = (epoch * total + len(losses)) / (self.config.epochs * total)
                    self._set_rate(done)
                    self.train_loader.fraction_done.fill_(done)
                    losses.append(self.pass_steps[one](which))
            if self.process_group.size > 1:
                self.memory.sync()
        return torch.stack(losses).mean()

    def passes(self, epoch: int) -> tuple[Pass, ...]:
        """The head's, those that have begun; before it wants to be taught, without teacher and with one view."""
        done = epoch / self.config.epochs
        begun = (one for one in self.head.passes if done >= one.start)
        return tuple(replace(one, uses_teacher=one.uses_teacher and done >= self.head.teacher_start) for one in begun)

    def step(self, one: Pass, which: Tensor) -> Tensor:
        """One batch: forward, loss, backward, step. Returns the loss, still on the device."""
        loss, _ = self.backward(one, which)
        self.update(one)
        return loss

    def backward(self, one: Pass, which: Tensor) -> tuple[Tensor, Tensor]:
        """Forward, loss, backward. The loss, and how much it is a mean over."""
        views = self.views(one)
        if self.chunked is not None and self.chunked.needed(self.train_loader, which, one.over, views):
            return self.chunked.backward(one, which)
        x, batch = self.train_loader.batch(which, one.over, views)
        loss = self.loss(x, batch, one.uses_teacher)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach(), self.head.loss_weight(batch)

    def loss(self, x: Tensor, batch: Batch, taught: bool = True) -> Tensor:
        with speed.autocast(self.config.precision, self.device):
            output = self.head(self.features(self.model, x, self.config.views, batch.views), batch.segments)
            return self.head.loss(output, batch, self._taught(x, batch) if taught else None)

    def features(self, model: Model, x: Tensor, kind: str = "none", views: int = 1, weak: bool = False) -> Tensor:
        return self.encode(model.normalize, model.backbone, x, kind, views, weak)

    def views(self, one: Pass) -> int:
        return self.head.views if one.uses_teacher else 1

    def update(self, one: Pass) -> None:
        for prefix in one.trains:
            if prefix in self.optimizers:  # a linear backbone has nothing to learn
                self.optimizers[prefix].step()
        if self.teacher is not None and self.head.teacher is not None:
            update_ema(
                self.teacher,
                self.model,
                ema_rate(self.head.teacher, self.train_loader.fraction_done * self.total_steps),
            )

    @torch.no_grad()
    def valid_step(self, which: Tensor) -> Tensor:
        if self.chunked is not None and self.chunked.needed(self.valid_loader, which):
            return self.chunked.valid_loss(which)
        return self.batch_valid_loss(*self.valid_loader.batch(which))

    @torch.no_grad()
    def batch_valid_loss(self, x: Tensor, batch: Batch) -> Tensor:
        with speed.autocast(self.config.precision, self.device):
            output = self.eval_model.head(self.features(self.eval_model, x), batch.segments)
            return self.eval_model.head.loss(output, batch, None)

    @torch.no_grad()
    def valid_loss(self) -> Tensor:
        """Officially the plain mean of the batches' losses, so that a short last batch weighs more; ``mean`` repairs it."""
        self.eval_model.eval()
        parts = self.valid_loader.in_order()
        mine = parts[
            self.process_group.rank :: self.process_group.size
        ]  # the others' are theirs, and zero here: the sum is all of them
        each = torch.zeros(len(parts), self.head.n_temperatures, dtype=torch.float64, device=self.device)
        with self.valid_loader.prefetching(
            chunked.read_order(self.valid_loader, mine, budget=self.config.chunk_instances)
        ):
            losses = [self.run_valid_step(which) for which in mine]
        if mine:
            each[self.process_group.rank :: self.process_group.size] = (
                torch.stack(losses).double().reshape(len(mine), -1)
            )
        each = self.process_group.all_reduce(each)
        if self.teacher is not None:  # what its head has noted, the pupil's head knows too
            for own, noted in zip(self.head.buffers(), self.teacher.head.buffers(), strict=True):
                own.copy_(noted)
        labelled = self.valid_loader.bags.labelled.double()
        weight = torch.stack([labelled[which].sum() for which in parts]).to(self.device)
        if self.config.selection == "official":
            weight = (weight > 0).double()
        return (each * weight[:, None]).sum(0).amin() / weight.sum().clamp_min(1e-12)

    def record_epoch(self, progress: TrainProgress, train: float, valid: float) -> None:
        """An epoch is over: is it the one to keep? The best so far; or the last, where the schedule ends in calm and
        differences of the validation loss are smaller than its error."""
        progress.epoch += 1
        self.mid_epoch = False
        progress.curve.append((train, valid))
        if math.isfinite(valid) if self.config.selection == "last" else valid < progress.best:
            progress.best, progress.best_epoch = valid, progress.epoch
            for name, now in self.eval_model.state_dict().items():
                self.best_state[name].copy_(now)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @cached_property
    def key(self) -> str:
        """What a checkpoint must be of: this recipe, from the weights it began with, on the bags that were given, whatever
        source the recipe names. Found when :meth:`resume` asks for it, before the first step."""
        bags = [fingerprint(feed.bags) for feed in (self.train_loader, self.valid_loader)]
        began = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            began.update(tensor_bytes(tensor))
        content = {
            "config": vars(self.config),
            "model": vars(self.model.config),
            "head": hashlib.sha256(head_code(self.model.config.head)).hexdigest(),
            "bags": bags,
            "began": began.hexdigest(),
        }
        content["optimizer"] = "the large first"  # its slots are numbered; they once stood in the network's own order
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, work: Path, progress: TrainProgress) -> None:
        work.mkdir(parents=True, exist_ok=True)
        tensors = self._weights()
        for prefix, optimizer in self.optimizers.items():
            tensors |= {f"optimizer.{prefix}.{k}": v for k, v in optimizer_state(optimizer).items()}
        checkpoint.save(work / "checkpoint.safetensors", tensors, {**vars(progress), "key": self.key})

    def resume(self, work: Path) -> TrainProgress:
        """Take up the checkpoint of this training if there is one; otherwise begin. So too if another version wrote it,
        whose networks remember other things."""
        tensors, facts = checkpoint.load(work / "checkpoint.safetensors") or ({}, {})
        held = {name for name in tensors if not name.startswith("optimizer.")}
        if facts.pop("key", None) != self.key or held != self._weights().keys():
            self._log_again(work, [])
            return TrainProgress()
        self.model.load_state_dict(_under("model.", tensors))
        self.best_state = {k: v.to(self.device) for k, v in _under("best.", tensors).items()}
        if self.teacher is not None:
            self.teacher.load_state_dict(_under("teacher.", tensors))
        for prefix, optimizer in self.optimizers.items():
            load_optimizer_state(optimizer, _under(f"optimizer.{prefix}.", tensors))
        progress = TrainProgress(**facts)
        progress.curve = [(train, valid) for train, valid in facts["curve"]]
        self._log_again(work, progress.curve)
        return progress

    def _weights(self) -> dict[str, Tensor]:
        """All a checkpoint holds but what optimizers remember."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best_state.items()}
        if self.teacher is not None:
            tensors |= {f"teacher.{k}": v for k, v in self.teacher.state_dict().items()}
        return tensors

    def _log_again(self, work: Path, curve: list[loss_curve.Losses]) -> None:
        if self.process_group.is_main:
            loss_curve.rewrite_losses(work, curve)

    # -- inner --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _taught(self, x: Tensor, batch: Batch) -> Output | None:
        """What the teacher says of views of its own."""
        if self.teacher is None:
            return None
        h = self.features(self.teacher, x, self.config.views, batch.views, self.head.weak_teacher)
        return self.teacher.head(h, batch.segments)

    def _reads(self, one: Pass, order: Iterable[Tensor]) -> Iterator[Tensor]:
        shares, times = map(self.process_group.shard, order), self.chunked.times if self.chunked else 1
        return chunked.read_order(
            self.train_loader, shares, one.over, self.views(one), self.config.chunk_instances, times
        )

    def _set_rate(self, done: float) -> None:
        if self.config.schedule == "constant" and not self.config.warmup:
            return
        rate = self.config.lr * lr_factor(self.config.schedule, self.config.warmup, done)
        for optimizer in self.optimizers.values():
            set_lr(optimizer, rate)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

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
from headcount.bags.prints import bytes_of, fingerprint
from headcount.bags.steepness import size_of
from headcount.models.heads import Batch, Output, Pass
from headcount.models.model import Model
from headcount.training import checkpoint, log, parallel, speed, stream
from headcount.training.batches import Feed
from headcount.training.recipe import Recipe
from headcount.training.updates import average, optimizer_for, pace, schedule, set_rate, slots_of, take_up
from headcount.training.views import several


@dataclass
class Progress:
    """Where a training stands after an epoch: what the progress bar shows and ``metrics.jsonl`` keeps."""

    epoch: int = 0  # finished epochs
    best_epoch: int = 0  # counted from 1; 0 before the first
    best: float = math.inf
    curve: list[tuple[float, float]] = field(default_factory=list)  # train, validation loss of each epoch
    seconds: float = 0.0


def encode(prepare: nn.Module, backbone: nn.Module, x: Tensor, kind: str, views: int, weak: bool = False) -> Tensor:
    """Stored instances -> features of every view. The heavy part, and the only part that is ever compiled."""
    if views > 1 and kind == "none" and getattr(backbone, "steady", False):  # the same view twice is answered once
        return backbone(prepare(x)).repeat(views, 1)
    return backbone(several(prepare(x), kind, views, weak))


@lru_cache
def _encoder(compile: str, device: str) -> Callable[..., Tensor]:
    """One for the process: runs with the same shapes share what was compiled, whatever their head or fold."""
    return speed.compiled(encode, compile, torch.device(device))


class Training:
    """What changes while a model learns: weights, teacher, optimizers, the best so far."""

    def __init__(self, model: Model, train: Bags, valid: Bags, recipe: Recipe, compile: str = "auto") -> None:
        device = model.device
        self.train = Feed(train, recipe.batch_bags, device, recipe.batch_instances)
        self.valid = Feed(valid, recipe.batch_bags, device)
        speed.set_convolutions(recipe.precision, device)
        self.model, self.recipe, self.device = copy.deepcopy(model), recipe, device
        self.head = self.model.head
        own = {name for name, _ in self.model.named_buffers()}
        self.head.enrol(len(train), len(train.index))
        self.head.meet(size_of(train.segments(), train.target))
        enrolled = {name for name, _ in self.model.named_buffers()} - own
        self.model.to(device)  # what enrolling added
        speed.arrange(self.model, device, recipe.precision)
        self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval() if self.head.teacher is not None else None
        self.answering = self.teacher or self.model
        self.encode = _encoder(compile, device.type)
        prefixes = dict.fromkeys(p for one in self.head.passes for p in one.trains)
        learned = [name for name, _ in self.model.named_parameters()]
        prefixes = [prefix for prefix in prefixes if any(name.startswith(prefix) for name in learned)]
        self.optimizers = {prefix: optimizer_for(self.model, prefix, recipe, device) for prefix in prefixes}
        self.team, self.midway = parallel.team(device), False
        self.stream = stream.Stream(self) if recipe.chunk_instances else None
        still = all(feed.near and feed.size is not None for feed in (self.train, self.valid))
        # only steps that do the same every time can be captured
        fast = partial(speed.fast, device=device) if still and self.stream is None else lambda step: step
        passes = {
            replace(p, taught=p.taught and late) for p in self.head.passes for late in (not self.head.alone, True)
        }
        self.steps = {one: fast(partial(self.step, one)) for one in passes}
        if self.team.size > 1:
            self.steps = {one: parallel.Step(self, one, fast) for one in passes}
            self.memory = parallel.Memory(self, enrolled)
        self.judge = fast(self.valid_step)
        self.total = recipe.epochs * sum(self.train.steps(one.over) for one in self.head.passes)
        self.best = {k: v.clone() for k, v in self.answering.state_dict().items()}

    def train_epoch(self, epoch: int) -> Tensor:
        """One sweep of every pass; the mean training loss, still on the device."""
        self.train.epoch.fill_(epoch)
        self.valid.epoch.fill_(epoch)
        self.model.train()
        self.midway = True
        passes = self.passes(epoch)
        total, losses = sum(self.train.steps(one.over) for one in passes), []
        for one in passes:
            order = self.train.shuffled(one.over, self.recipe.seed, epoch)
            with self.train.reading(self._reads(one, order)):
                for which in order:
                    done = (epoch * total + len(losses)) / (self.recipe.epochs * total)
                    self._set_rate(done)
                    self.train.done.fill_(done)
                    losses.append(self.steps[one](which))
            if self.team.size > 1:
                self.memory.merge()
        return torch.stack(losses).mean()

    def passes(self, epoch: int) -> tuple[Pass, ...]:
        """The head's, those that have begun; before it wants to be taught, without teacher and with one view."""
        done = epoch / self.recipe.epochs
        begun = (one for one in self.head.passes if done >= one.since)
        return tuple(replace(one, taught=one.taught and done >= self.head.alone) for one in begun)

    def step(self, one: Pass, which: Tensor) -> Tensor:
        """One batch: forward, loss, backward, step. Returns the loss, still on the device."""
        loss, _ = self.backward(one, which)
        self.update(one)
        return loss

    def backward(self, one: Pass, which: Tensor) -> tuple[Tensor, Tensor]:
        """Forward, loss, backward. The loss, and how much it is a mean over."""
        views = self.views(one)
        if self.stream is not None and self.stream.needed(self.train, which, one.over, views):
            return self.stream.backward(one, which)
        x, batch = self.train.deal(which, one.over, views)
        loss = self.loss(x, batch, one.taught)
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        return loss.detach(), self.head.mass(batch)

    def loss(self, x: Tensor, batch: Batch, taught: bool = True) -> Tensor:
        with speed.precise(self.recipe.precision, self.device):
            output = self.head(self.features(self.model, x, self.recipe.views, batch.views), batch.segments)
            return self.head.loss(output, batch, self._taught(x, batch) if taught else None)

    def features(self, model: Model, x: Tensor, kind: str = "none", views: int = 1, weak: bool = False) -> Tensor:
        return self.encode(model.prepare, model.backbone, x, kind, views, weak)

    def views(self, one: Pass) -> int:
        return self.head.views if one.taught else 1

    def update(self, one: Pass) -> None:
        for prefix in one.trains:
            if prefix in self.optimizers:  # a linear backbone has nothing to learn
                self.optimizers[prefix].step()
        if self.teacher is not None and self.head.teacher is not None:
            average(self.teacher, self.model, pace(self.head.teacher, self.train.done * self.total))

    @torch.no_grad()
    def valid_step(self, which: Tensor) -> Tensor:
        if self.stream is not None and self.stream.needed(self.valid, which):
            return self.stream.judge(which)
        return self.judged(*self.valid.deal(which))

    @torch.no_grad()
    def judged(self, x: Tensor, batch: Batch) -> Tensor:
        with speed.precise(self.recipe.precision, self.device):
            output = self.answering.head(self.features(self.answering, x), batch.segments)
            return self.answering.head.loss(output, batch, None)

    @torch.no_grad()
    def valid_loss(self) -> Tensor:
        """Officially the plain mean of the batches' losses, so that a short last batch weighs more; ``mean`` repairs it."""
        self.answering.eval()
        parts = self.valid.in_order()
        mine = parts[self.team.rank :: self.team.size]  # the others' are theirs, and zero here: the sum is all of them
        each = torch.zeros(len(parts), self.head.readings, dtype=torch.float64, device=self.device)
        with self.valid.reading(stream.reads(self.valid, mine, budget=self.recipe.chunk_instances)):
            losses = [self.judge(which) for which in mine]
        if mine:
            each[self.team.rank :: self.team.size] = torch.stack(losses).double().reshape(len(mine), -1)
        each = self.team.add(each)
        if self.teacher is not None:  # what its head has noted, the pupil's head knows too
            for own, noted in zip(self.head.buffers(), self.teacher.head.buffers(), strict=True):
                own.copy_(noted)
        labelled = self.valid.bags.labelled.double()
        weight = torch.stack([labelled[which].sum() for which in parts]).to(self.device)
        if self.recipe.selection == "official":
            weight = (weight > 0).double()
        return (each * weight[:, None]).sum(0).amin() / weight.sum().clamp_min(1e-12)

    def note(self, progress: Progress, train: float, valid: float) -> None:
        """An epoch is over: is it the one to keep? The best so far; or the last, where the schedule ends in calm and
        differences of the validation loss are smaller than its error."""
        progress.epoch += 1
        self.midway = False
        progress.curve.append((train, valid))
        if math.isfinite(valid) if self.recipe.selection == "last" else valid < progress.best:
            progress.best, progress.best_epoch = valid, progress.epoch
            for name, now in self.answering.state_dict().items():
                self.best[name].copy_(now)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @cached_property
    def key(self) -> str:
        """What a checkpoint must be of: this recipe, from the weights it began with, on the bags that were given, whatever
        source the recipe names. Found when :meth:`resume` asks for it, before the first step."""
        bags = [fingerprint(feed.bags) for feed in (self.train, self.valid)]
        began = hashlib.sha256()
        for tensor in self.model.state_dict().values():
            began.update(bytes_of(tensor))
        content = {"recipe": self.recipe.changes, "head": self.recipe.code, "bags": bags, "began": began.hexdigest()}
        content["optimizer"] = "the large first"  # its slots are numbered; they once stood in the network's own order
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def save(self, work: Path, progress: Progress) -> None:
        work.mkdir(parents=True, exist_ok=True)
        tensors = self._weights()
        for prefix, optimizer in self.optimizers.items():
            tensors |= {f"optimizer.{prefix}.{k}": v for k, v in slots_of(optimizer).items()}
        checkpoint.save(work / "checkpoint.safetensors", tensors, {**vars(progress), "key": self.key})

    def resume(self, work: Path) -> Progress:
        """Take up the checkpoint of this training if there is one; otherwise begin. So too if another version wrote it,
        whose networks remember other things."""
        tensors, facts = checkpoint.load(work / "checkpoint.safetensors") or ({}, {})
        held = {name for name in tensors if not name.startswith("optimizer.")}
        if facts.pop("key", None) != self.key or held != self._weights().keys():
            self._log_again(work, [])
            return Progress()
        self.model.load_state_dict(_under("model.", tensors))
        self.best = {k: v.to(self.device) for k, v in _under("best.", tensors).items()}
        if self.teacher is not None:
            self.teacher.load_state_dict(_under("teacher.", tensors))
        for prefix, optimizer in self.optimizers.items():
            take_up(optimizer, _under(f"optimizer.{prefix}.", tensors))
        progress = Progress(**facts)
        progress.curve = [(train, valid) for train, valid in facts["curve"]]
        self._log_again(work, progress.curve)
        return progress

    def _weights(self) -> dict[str, Tensor]:
        """All a checkpoint holds but what optimizers remember."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        if self.teacher is not None:
            tensors |= {f"teacher.{k}": v for k, v in self.teacher.state_dict().items()}
        return tensors

    def _log_again(self, work: Path, curve: list[log.Losses]) -> None:
        if self.team.first:
            log.rewrite(work, curve)

    # -- inner --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _taught(self, x: Tensor, batch: Batch) -> Output | None:
        """What the teacher says of views of its own."""
        if self.teacher is None:
            return None
        h = self.features(self.teacher, x, self.recipe.views, batch.views, self.head.weak_teacher)
        return self.teacher.head(h, batch.segments)

    def _reads(self, one: Pass, order: Iterable[Tensor]) -> Iterator[Tensor]:
        shares, times = map(self.team.share, order), self.stream.times if self.stream else 1
        return stream.reads(self.train, shares, one.over, self.views(one), self.recipe.chunk_instances, times)

    def _set_rate(self, done: float) -> None:
        if self.recipe.schedule == "constant" and not self.recipe.warmup:
            return
        rate = self.recipe.lr * schedule(self.recipe.schedule, self.recipe.warmup, done)
        for optimizer in self.optimizers.values():
            set_rate(optimizer, rate)


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

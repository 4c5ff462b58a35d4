"""Trainer: the state of a training, its step, epoch and validation. The loop over epochs, and its checkpoints, are in loop.py.

``Trainer.step`` is the whole computation. Chunks (chunked.py), CUDA graphs (accel) and processes (distributed.py) are wrapped
around it in ``Trainer._wrap_steps``, and change the memory or the time that it takes.
"""

import copy
import math
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.models.backbones import BACKBONES
from headcount.models.heads import Batch, Head, Output, Pass
from headcount.models.network import Model
from headcount.training import accel, chunked, distributed
from headcount.training.augment import Policy, View, apply_views
from headcount.training.config import MovingAverage, TrainConfig, build_optimizer, set_lr
from headcount.training.loader import BagLoader

Losses = tuple[float, float]  # training, validation


@dataclass
class TrainProgress:
    """The state of a training after an epoch: what a progress bar shows."""

    epoch: int = 0  # finished epochs
    best_epoch: int = 0  # counted from 1; 0 before the first
    best: float = math.inf  # its validation loss
    curve: list[Losses] = field(default_factory=list)  # of each epoch
    seconds: float = 0.0


def encode(normalize: View, backbone: nn.Module, x: Tensor, kind: Policy, views: int, weak: bool = False) -> Tensor:
    """Stored instances -> features of every view: the expensive part, and the only one that is compiled."""
    if views > 1 and kind == "none" and getattr(backbone, "deterministic", False):  # all views are equal
        return backbone(normalize(x)).repeat(views, 1)
    return backbone(apply_views(normalize(x), kind, views, weak))


def head_loss(head: Head, h: Tensor, batch: Batch, teacher: Output | None, precision: str) -> Tensor:
    """The loss from features. Compiled, what it does not need is not computed. Autocast is entered in here, because around
    compiled code it would also lower the precision of a gradient whose forward was computed in float32."""
    with accel.autocast(precision, h.device):
        return head.loss(head.report(head(h, batch.segments)), batch, teacher)


class Trainer:
    """The state of a training: weights, teacher, optimizers, and the best weights so far."""

    def __init__(self, model: Model, train: Bags, valid: Bags, config: TrainConfig, compile: str = "auto") -> None:
        device = model.device
        self.config, self.device, self.mid_epoch = config, device, False
        self.train_loader = BagLoader(train, config.batch_bags, device, config.batch_instances)
        self.valid_loader = BagLoader(valid, config.batch_bags, device)
        self.model = copy.deepcopy(model)
        self.head = self.model.head
        # normalised features would be the same numbers, copied; our heads and backbones do not write into their input
        self.standardized = ":" not in model.config.head and model.config.backbone in BACKBONES and model.normalize.is_identity
        buffers = {name for name, _ in self.model.named_buffers()}
        self.head.label_noise = train.label_noise
        self.head.setup(train.segments(), train.target)
        self.setup_buffers = {name for name, _ in self.model.named_buffers()} - buffers
        self.model.to(device)  # with those buffers
        accel.set_tf32(config.precision, device)
        accel.optimize_layout(self.model, device, config.precision)
        self.parameters, self.teacher = list(self.model.parameters()), None
        if self.head.teacher is not None:
            self.teacher = copy.deepcopy(self.model).requires_grad_(False).eval()
            self.moving_average = MovingAverage(self.teacher, self.model, self.head.teacher.decay)
        self.eval_model = self.teacher or self.model
        self.encode = accel.compile_function(encode, compile, device.type)
        loaders = self.train_loader, self.valid_loader
        self.static = all(loader.resident and loader.bag_size is not None for loader in loaders)  # steps of few shapes
        compile = compile if self.head.compiled and self.static else "off"
        self.head_loss = accel.compile_function(head_loss, compile, device.type)
        names = [name for name, _ in self.model.named_parameters()]
        self.optimizers = {  # a linear backbone has no parameters
            prefix: build_optimizer(self.model, prefix, config, device)
            for prefix in dict.fromkeys(prefix for sweep in self.head.passes for prefix in sweep.trains)
            if any(name.startswith(prefix) for name in names)
        }
        self.total_steps = config.epochs * sum(self.train_loader.n_steps(sweep.over) for sweep in self.head.passes)
        self.best_state = {k: v.clone() for k, v in self.eval_model.state_dict().items()}
        self.process_group = distributed.process_group(device)
        self._wrap_steps()

    def _wrap_steps(self) -> None:
        """What train_epoch and valid_loss call: the steps below, in chunks, captured as CUDA graphs, or shared by processes."""
        self.chunked = chunked.ChunkedStep(self, self.config.chunk_instances)
        built_in = isinstance(self.config.optimizer, str) and isinstance(self.config.views, str)  # others may do anything
        same_steps = self.static and built_in and not self.config.chunk_instances
        capture = accel.cuda_graph if same_steps else lambda step, device: step
        stepper = self.chunked if self.config.chunk_instances else self
        starts = (True,) if self.head.teacher is None or not self.head.teacher.start else (True, False)
        sweeps = {replace(s, uses_teacher=s.uses_teacher and started) for s in self.head.passes for started in starts}
        if self.process_group.size > 1:
            self.train_steps = {s: distributed.DistributedStep(self, s, capture) for s in sweeps}
        else:
            self.train_steps = {s: capture(partial(stepper.step, s), self.device) for s in sweeps}
        self.buffer_sync = distributed.BufferSync(self) if self.process_group.size > 1 else None
        self.run_valid_step = capture(stepper.valid_step, self.device)

    def release(self) -> None:
        """After the last step: without the cycles through the steps Python frees everything at once, and the memory of captured
        graphs, gradients included, goes back to the card, because no other training could use it."""
        del self.train_steps, self.run_valid_step, self.chunked, self.buffer_sync
        self.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def step(self, sweep: Pass, ids: Tensor) -> Tensor:
        """One step. Returns the loss, still on the device."""
        x, batch = self.train_loader.batch(ids, sweep.over, self.n_views(sweep))
        loss = self.loss(x, batch, sweep.uses_teacher)
        self.zero_grad()
        loss.backward()
        self.optimizer_step(sweep)
        return loss.detach()

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def loss(self, x: Tensor, batch: Batch, uses_teacher: bool) -> Tensor:
        """Of every view of the stored instances, through backbone and head."""
        with accel.autocast(self.config.precision, self.device):
            h, teacher = self.features(self.model, x, self.config.views, batch.views), None
            if uses_teacher and self.teacher is not None and self.head.teacher is not None:
                with torch.no_grad():  # of views of its own
                    teacher_h = self.features(self.teacher, x, self.config.views, batch.views, self.head.teacher.weak_views)
                    teacher = self.teacher.head(teacher_h, batch.segments)
        return self.head_loss(self.head, h, batch, teacher, self.config.precision)

    def features(self, model: Model, x: Tensor, kind: Policy = "none", views: int = 1, weak: bool = False) -> Tensor:
        return self.encode(Tensor.float if self.standardized else model.normalize, model.backbone, x, kind, views, weak)

    def optimizer_step(self, sweep: Pass) -> None:
        for prefix in sweep.trains:
            if prefix in self.optimizers:
                self.optimizers[prefix].step()
        if self.teacher is not None:
            self.moving_average.update(self.train_loader.fraction_done * self.total_steps)

    def train_epoch(self, epoch: int) -> Tensor:
        """One sweep of every pass. Returns the mean training loss, still on the device."""
        for loader in (self.train_loader, self.valid_loader):
            loader.epoch.fill_(epoch)
        self.model.train()
        self.mid_epoch = True
        sweeps = self.passes(epoch)
        total, losses = sum(self.train_loader.n_steps(sweep.over) for sweep in sweeps), []
        for sweep in sweeps:
            order = self.train_loader.shuffled(sweep.over, self.config.seed, epoch)
            shards, views, budget = map(self.process_group.shard, order), self.n_views(sweep), self.config.chunk_instances
            reads = chunked.read_order(self.train_loader, shards, sweep.over, views, budget, self.chunked.reads_per_bag)
            with self.train_loader.prefetching(reads):
                for ids in order:
                    done = (epoch * total + len(losses)) / (self.config.epochs * total)
                    set_lr(self.optimizers.values(), self.config, done)
                    self.train_loader.fraction_done.fill_(done)
                    losses.append(self.train_steps[sweep](ids))
            if self.buffer_sync is not None:
                self.buffer_sync.sync()
        return torch.stack(losses).mean()

    def passes(self, epoch: int) -> tuple[Pass, ...]:
        """The head's passes that have started; without teacher, and with one view, before the teacher starts."""
        done = epoch / self.config.epochs
        started = self.head.teacher is None or done >= self.head.teacher.start
        return tuple(replace(s, uses_teacher=s.uses_teacher and started) for s in self.head.passes if done >= s.start)

    def n_views(self, sweep: Pass) -> int:
        return self.head.views if sweep.uses_teacher else 1

    def valid_step(self, ids: Tensor) -> Tensor:
        return self.batch_valid_loss(*self.valid_loader.batch(ids))

    @torch.no_grad()
    def batch_valid_loss(self, x: Tensor, batch: Batch) -> Tensor:
        with accel.autocast(self.config.precision, self.device):
            h = self.features(self.eval_model, x)
        return self.head_loss(self.eval_model.head, h, batch, None, self.config.precision)

    @torch.no_grad()
    def valid_loss(self) -> Tensor:
        """``official``: the mean of the batches' losses, so that the bags of a short last batch weigh more; ``mean``: over bags.
        Where a head gives several losses (one per temperature), the lowest of their means."""
        self.eval_model.eval()
        batches, shard = self.valid_loader.in_order(), slice(self.process_group.rank, None, self.process_group.size)
        order = chunked.read_order(self.valid_loader, batches[shard], budget=self.config.chunk_instances)
        with self.valid_loader.prefetching(order):
            shard_losses = [self.run_valid_step(ids) for ids in batches[shard]]
        width = shard_losses[0].numel() if shard_losses else 1  # several processes train no head with several losses
        losses = torch.zeros(len(batches), width, dtype=torch.float64, device=self.device)
        if shard_losses:
            losses[shard] = torch.stack(shard_losses).double().reshape(len(shard_losses), width)
        losses = self.process_group.all_reduce(losses)
        if self.teacher is not None:  # buffers that the teacher's head updated in validation
            for buffer, updated in zip(self.head.buffers(), self.teacher.head.buffers(), strict=True):
                buffer.copy_(updated)
        labelled = self.valid_loader.bags.labelled.double()
        weight = torch.stack([labelled[ids].sum() for ids in batches]).to(self.device)
        weight = (weight > 0).double() if self.config.selection == "official" else weight
        return (losses * weight[:, None]).sum(0).amin() / weight.sum().clamp_min(1e-12)

    def record_epoch(self, progress: TrainProgress, train: float, valid: float) -> None:
        """After an epoch: keep its weights if it is the best so far, or always with ``selection="last"``, where the schedule
        ends at 0 and differences of the validation loss are smaller than its error."""
        progress.epoch, self.mid_epoch = progress.epoch + 1, False
        progress.curve.append((train, valid))
        if math.isfinite(valid) if self.config.selection == "last" else valid < progress.best:
            progress.best, progress.best_epoch = valid, progress.epoch
            for name, value in self.eval_model.state_dict().items():
                self.best_state[name].copy_(value)

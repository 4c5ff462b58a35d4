"""fit(): the loop. Forward, loss, backward, step; after each epoch the validation loss; the best epoch is kept.

Whatever happens, a training can be taken up again where its last checkpoint stood and ends with the same numbers, bit for
bit on the CPU: every draw comes from (seed, purpose, epoch), and a checkpoint is written between epochs.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.models.heads import Pass
from headcount.models.model import Model
from headcount.training import checkpoint
from headcount.training.batches import Feed
from headcount.training.recipe import Recipe
from headcount.training.seeds import seed_for
from headcount.training.speed import precise
from headcount.training.views import several

CHECKPOINT_SECONDS = 30.0


@dataclass
class Progress:
    """Where a training stands after an epoch: what the progress bar shows and ``metrics.jsonl`` keeps."""

    epoch: int = 0  # finished epochs
    best_epoch: int = 0  # counted from 1; 0 before the first
    best: float = math.inf
    curve: list[tuple[float, float]] = field(default_factory=list)  # train, validation loss of each epoch
    seconds: float = 0.0


@dataclass(frozen=True)
class Fit:
    """A finished training: the model carries the weights of its best epoch."""

    model: Model
    progress: Progress


def fit(
    model: Model,
    train: Bags,
    valid: Bags,
    recipe: Recipe,
    *,
    work: Path | None = None,
    watch: Callable[[Progress], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Fit:
    """Train on blind bags. ``work`` is a folder for checkpoint and ``metrics.jsonl``; ``watch`` is told after each epoch."""
    state = Training(model, train, valid, recipe)
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        progress = state.resume(work) if work else Progress()
        saved = started = time.monotonic() - progress.seconds
        try:
            while progress.epoch < recipe.epochs and not _patience_over(progress, recipe.patience):
                torch.manual_seed(seed_for(recipe.seed, "noise", progress.epoch))  # views and dropout
                losses = state.train_epoch(progress.epoch), state.valid_loss()
                progress.epoch += 1
                progress.curve.append(losses)
                if losses[1] < progress.best:
                    progress.best, progress.best_epoch = losses[1], progress.epoch
                    state.keep_best()
                progress.seconds = time.monotonic() - started
                if work:
                    _log(work, progress)
                    if time.monotonic() - saved > checkpoint_seconds:
                        state.save(work, progress)
                        saved = time.monotonic()
                if watch:
                    watch(progress)
        except KeyboardInterrupt:
            if work and len(progress.curve) == progress.epoch:
                state.save(work, progress)
            raise
    state.answering.load_state_dict(state.best)
    return Fit(state.answering.eval(), progress)


class Training:
    """What changes while a model learns: weights, teacher, optimizers, the best so far."""

    def __init__(self, model: Model, train: Bags, valid: Bags, recipe: Recipe) -> None:
        self.model, self.recipe = model, recipe
        self.train, self.valid = Feed(train, recipe.batch_bags), Feed(valid, recipe.batch_bags)
        self.teacher = copy.deepcopy(model).requires_grad_(False) if model.head.teacher is not None else None
        self.answering = self.teacher or model
        self.passes: tuple[Pass, ...] = model.head.passes
        prefixes = dict.fromkeys(p for one in self.passes for p in one.trains)
        self.optimizers = {prefix: self._optimizer(prefix) for prefix in prefixes}
        self.best: dict[str, Tensor] = {}
        self.keep_best()
        self.steps = sum(self.train.steps(one.over) for one in self.passes)

    def train_epoch(self, epoch: int) -> float:
        """One sweep of every pass; the mean training loss."""
        self.train.epoch.fill_(epoch)
        self.valid.epoch.fill_(epoch)
        self.model.train()
        losses, done = [], epoch * self.steps
        for one in self.passes:
            for which in self.train.shuffled(one.over, self.recipe.seed, epoch):
                self._set_rate(done / (self.recipe.epochs * self.steps))
                losses.append(self.step(which, one))
                done += 1
        return float(torch.stack(losses).mean())

    def step(self, which: Tensor, one: Pass) -> Tensor:
        """One batch: forward, loss, backward, step. Returns the loss, still on the device."""
        model, head = self.model, self.model.head
        x, batch = self.train.deal(which, one.over, head.views)
        with precise(self.recipe.precision, model.device):
            x = several(model.prepare(x), self.recipe.views, head.views)
            output = head(model.backbone(x), batch.segments)
            with torch.no_grad():
                taught = None if self.teacher is None else self.teacher.head(self.teacher.backbone(x), batch.segments)
            loss = head.loss(output, batch, taught)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for prefix in one.trains:
            self.optimizers[prefix].step()
        if self.teacher is not None and head.teacher is not None:
            _average(self.teacher, model, head.teacher)
        return loss.detach()

    @torch.no_grad()
    def valid_loss(self) -> float:
        """Officially the plain mean of the batches' losses, so that a short last batch weighs more; ``mean`` repairs that."""
        model = self.answering.eval()
        losses, weights = [], []
        for which in self.valid.in_order():
            x, batch = self.valid.deal(which)
            with precise(self.recipe.precision, model.device):
                output = model.head(model.backbone(model.prepare(x)), batch.segments)
                losses.append(model.head.loss(output, batch, None))
            weights.append((batch.target.sum(1) > 0).sum())
        each, weight = torch.stack(losses).double(), torch.stack(weights).double()
        if self.recipe.selection == "official":
            weight = (weight > 0).double()
        return float((each * weight).sum() / weight.sum().clamp_min(1e-12))

    def keep_best(self) -> None:
        state = self.answering.state_dict()
        if not self.best:
            self.best = {k: v.clone() for k, v in state.items()}
        for k, v in state.items():
            self.best[k].copy_(v)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, work: Path, progress: Progress) -> None:
        work.mkdir(parents=True, exist_ok=True)
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"best.{k}": v for k, v in self.best.items()}
        if self.teacher is not None:
            tensors |= {f"teacher.{k}": v for k, v in self.teacher.state_dict().items()}
        for prefix, optimizer in self.optimizers.items():
            for i, slots in optimizer.state_dict()["state"].items():
                tensors |= {f"optimizer.{prefix}.{i}.{k}": v for k, v in slots.items() if isinstance(v, Tensor)}
        checkpoint.save(work / "checkpoint.safetensors", tensors, {**vars(progress), "key": self.recipe.key})

    def resume(self, work: Path) -> Progress:
        """Take up the checkpoint of this recipe if there is one; otherwise begin."""
        found = checkpoint.load(work / "checkpoint.safetensors")
        if found is None or found[1].pop("key") != self.recipe.key:
            _rewrite_log(work, [])
            return Progress()
        tensors, facts = found
        self.model.load_state_dict(_under("model.", tensors))
        self.best = {k: v.to(self.model.device) for k, v in _under("best.", tensors).items()}
        if self.teacher is not None:
            self.teacher.load_state_dict(_under("teacher.", tensors))
        for prefix, optimizer in self.optimizers.items():
            state: dict[int, dict[str, Tensor]] = {}
            for name, value in _under(f"optimizer.{prefix}.", tensors).items():
                i, _, slot = name.partition(".")
                state.setdefault(int(i), {})[slot] = value
            optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
        progress = Progress(**{**facts, "curve": [tuple(pair) for pair in facts["curve"]]})
        _rewrite_log(work, progress.curve)
        return progress

    # -- inner --------------------------------------------------------------------------------------------------------

    def _optimizer(self, prefix: str) -> torch.optim.Optimizer:
        r = self.recipe
        chosen = [p for name, p in self.model.named_parameters() if name.startswith(prefix)]
        # a tensor for the rate: it can change under a captured graph
        rate: Any = torch.tensor(r.lr, device=self.model.device) if self.model.device.type == "cuda" else r.lr
        common = {"lr": rate, "weight_decay": r.weight_decay, "fused": True}
        if r.optimizer == "sgd":
            return torch.optim.SGD(chosen, momentum=0.9, nesterov=True, **common)
        common |= {"betas": (0.9, 0.999), "eps": 1e-8, "capturable": self.model.device.type == "cuda"}
        return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[r.optimizer](chosen, **common)

    def _set_rate(self, done: float) -> None:
        if self.recipe.schedule == "constant" and not self.recipe.warmup:
            return
        rate = self.recipe.lr * schedule(self.recipe.schedule, self.recipe.warmup, done)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                if isinstance(group["lr"], Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate


def schedule(kind: str, warmup: float, done: float) -> float:
    """The factor on the rate when this share of training is done.

    >>> schedule("cosine", 0.1, 0.05), schedule("cosine", 0.0, 1.0)
    (0.5, 0.0)
    """
    if done < warmup:
        return done / warmup
    if kind == "constant":
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * (done - warmup) / max(1e-12, 1 - warmup)))


@torch.no_grad()
def _average(teacher: nn.Module, model: nn.Module, decay: float) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(model.parameters()), 1 - decay)
    for kept, now in zip(teacher.buffers(), model.buffers(), strict=True):
        kept.copy_(now)


def _patience_over(progress: Progress, patience: int) -> bool:
    return patience > 0 and progress.epoch - progress.best_epoch >= patience


def _under(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def _log(work: Path, progress: Progress) -> None:
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "metrics.jsonl", "a") as f:
        f.write(_line(progress.epoch, *progress.curve[-1]))


def _rewrite_log(work: Path, curve: list[tuple[float, float]]) -> None:
    """What was logged after the last checkpoint will be trained, and logged, again."""
    work.mkdir(parents=True, exist_ok=True)
    (work / "metrics.jsonl").write_text("".join(_line(e, *pair) for e, pair in enumerate(curve, 1)))


def _line(epoch: int, train: float, valid: float) -> str:
    return json.dumps({"epoch": epoch, "train_loss": train, "valid_loss": valid}) + "\n"

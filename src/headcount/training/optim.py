"""How weights change: the optimizer, its learning rate, and the moving average of the teacher."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headcount.training.config import TrainConfig


def build_optimizer(model: nn.Module, prefix: str, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the parameters whose names begin with ``prefix``, largest first: a fused step takes about thirty of them
    at a time, and only large ones together keep a GPU busy."""
    parameters = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    parameters.sort(key=torch.numel, reverse=True)
    groups: list[Any] = parameters
    if config.decay == "weights":  # neither biases nor batch-norm
        decayed, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr  # a tensor can change under a CUDA graph
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr, 0.9, weight_decay=config.weight_decay, nesterov=True, fused=True)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(groups, lr, (0.9, 0.999), 1e-8, config.weight_decay, capturable=on_gpu, fused=True)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state tensors of an optimizer by "number of the parameter.name"."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v for i, slots in state.items() for k, v in slots.items() if isinstance(v, Tensor)}


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """The inverse of :func:`optimizer_state`."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.items():
        i, _, slot = name.partition(".")
        state.setdefault(int(i), {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight, slots in optimizer.state.items():
        for name, value in slots.items():
            if value.shape == weight.shape:  # with the memory layout of the weight: a fused step needs both in one order
                slots[name] = torch.empty_like(weight).copy_(value)


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def lr_factor(schedule: str, warmup: float, done: float) -> float:
    """The factor on the learning rate after this fraction of the training. ``twice``: cosine to 0 by the middle, and once more
    from half the rate.

    >>> lr_factor("cosine", 0.1, 0.05), lr_factor("cosine", 0.0, 1.0), lr_factor("twice", 0.0, 0.5)
    (0.5, 0.0, 0.5)
    """
    if done < warmup:
        return done / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        start, end, height = warmup, 1.0, 1.0
    else:
        start, end, height = (warmup, 0.5, 1.0) if done < 0.5 else (0.5, 1.0, 0.5)
    return height * 0.5 * (1 + math.cos(math.pi * (done - start) / max(1e-12, end - start)))


@torch.no_grad()
def update_ema(teacher: nn.Module, model: nn.Module, rate: Tensor) -> None:
    """Move the teacher's weights and batch-norm statistics towards the model's; the other buffers are copied. Statistics of the
    current model under averaged weights would mislead the teacher just when a second view begins to change them."""
    averages: list[Tensor] = list(teacher.parameters())
    currents: list[Tensor] = list(model.parameters())
    for (name, average), current in zip(teacher.named_buffers(), model.buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            averages.append(average)
            currents.append(current)
        else:
            average.copy_(current)
    differences = torch._foreach_sub(currents, averages)
    torch._foreach_mul_(differences, rate)
    torch._foreach_add_(averages, differences)


def ema_rate(decay: float, steps: Tensor) -> Tensor:
    """The rate after this many steps: higher at first, so that the initial weights are forgotten in a short training too."""
    return (9 / (10 + steps)).clamp_min(1 - decay)

"""How weights move: the optimizer, its rate, and the moving average that plays teacher."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from headcount.training.config import TrainConfig


def build_optimizer(model: nn.Module, prefix: str, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The recipe's optimizer, over the parameters whose names begin so, the large first: torch's fused step takes some thirty
    at a time, and a card has work for all its parts only when the large ones are taken together."""
    chosen = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    chosen.sort(key=torch.numel, reverse=True)
    groups: list[Any] = chosen
    if config.decay == "weights":  # not biases, nor what batch-norm scales and shifts by
        parts = [p for p in chosen if p.ndim > 1], [p for p in chosen if p.ndim <= 1]
        groups = [{"params": part, **extra} for part, extra in zip(parts, ({}, {"weight_decay": 0.0}), strict=True)]
    on_gpu = device.type == "cuda"
    # a tensor for the rate: it can change under a captured graph
    rate = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, rate, 0.9, weight_decay=config.weight_decay, nesterov=True, fused=True)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(groups, rate, (0.9, 0.999), 1e-8, config.weight_decay, capturable=on_gpu, fused=True)


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What an optimizer remembers, by number of the parameter and name."""
    state = optimizer.state_dict()["state"]
    return {f"{i}.{k}": v for i, slots in state.items() for k, v in slots.items() if isinstance(v, Tensor)}


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """Let an optimizer remember again what :func:`slots_of` said."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.items():
        i, _, slot = name.partition(".")
        state.setdefault(int(i), {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight, slots in optimizer.state.items():
        for name, value in slots.items():
            if value.shape == weight.shape:  # laid out as the weight is: a fused step walks through both in one order
                slots[name] = torch.empty_like(weight).copy_(value)


def set_lr(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def lr_factor(kind: str, warmup: float, done: float) -> float:
    """The factor on the rate when this share of training is done. ``twice``: down to nothing by the middle, and once more
    from half the rate.

    >>> schedule("cosine", 0.1, 0.05), schedule("cosine", 0.0, 1.0), schedule("twice", 0.0, 0.5)
    (0.5, 0.0, 0.5)
    """
    if done < warmup:
        return done / warmup
    if kind == "constant":
        return 1.0
    begun, end, height = (
        (warmup, 1.0, 1.0) if kind == "cosine" else (warmup, 0.5, 1.0) if done < 0.5 else (0.5, 1.0, 0.5)
    )
    return height * 0.5 * (1 + math.cos(math.pi * (done - begun) / max(1e-12, end - begun)))


@torch.no_grad()
def update_ema(teacher: nn.Module, model: nn.Module, step: Tensor) -> None:
    """Weights and what batch-norm has seen move together: fresh statistics under old weights would mislead the teacher just
    when a second view begins to change them. What else a module remembers is the pupil's."""
    kept: list[Tensor] = list(teacher.parameters())
    now: list[Tensor] = list(model.parameters())
    for (name, old), new in zip(teacher.named_buffers(), model.buffers(), strict=True):
        if name.endswith(("running_mean", "running_var")):
            kept.append(old)
            now.append(new)
        else:
            old.copy_(new)
    way = torch._foreach_sub(now, kept)
    torch._foreach_mul_(way, step)
    torch._foreach_add_(kept, way)


def ema_rate(decay: float, steps: Tensor) -> Tensor:
    """How far the teacher moves towards its pupil after so many steps: further at first, so that what it knew before the
    training began is soon forgotten, however short the training."""
    return (9 / (10 + steps)).clamp_min(1 - decay)

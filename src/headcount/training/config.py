"""TrainConfig: how :func:`~headcount.training.loop.train` trains; whether model, bags and configuration fit together; and how weights
change: the optimizer, its learning rate, and the moving average of the teacher."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headcount.bags import Bags
from headcount.errors import HeadcountError, check_choice, check_number
from headcount.models.heads import HEADS, Head, Output
from headcount.models.network import Model
from headcount.training.augment import FEATURE_VIEWS, VIEWS, Policy
from headcount.training.loader import BagLoader

OptimizerFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
CHOICES = {
    "optimizer": ("adam", "adamw", "sgd"),
    "schedule": ("constant", "cosine", "twice"),
    "views": tuple(VIEWS),
    "decay": ("all", "weights"),
    "selection": ("official", "mean", "last"),
    "precision": ("tf32", "fp32", "bf16"),
}
RANGES: dict[str, tuple[float, float]] = {
    "epochs": (1, 1 << 24),
    "batch_bags": (1, 1 << 24),
    "batch_instances": (0, 1 << 24),
    "lr": (0.0, 1e6),
    "weight_decay": (0.0, 1e6),
    "warmup": (0.0, 1.0),
    "patience": (0, 1 << 24),
    "seed": (0, (1 << 63) - 1),
    "chunk_instances": (0, 1 << 40),
}


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained. The defaults are those of the paper.

    Parameters
    ----------
    epochs : int
        Epochs of training.
    batch_bags : int
        Bags per step.
    optimizer : {"adam", "adamw", "sgd"} or callable
        SGD has Nesterov momentum 0.9. Or a function of a list of parameters that makes an optimizer, with a learning rate of its
        own; a schedule or a warmup sets it to fractions of ``lr``.
    lr, weight_decay : float
        Learning rate and weight decay.
    schedule : {"constant", "cosine", "twice"}
        Of the learning rate. ``twice``: cosine to 0 by the middle, and once more from half the rate.
    warmup : float
        The fraction of the training over which the learning rate rises.
    views : str or callable
        Augmentation policy: none, noise, crop, flip_crop, image, digit, tissue or feature (training/augment.py). Or a function of
        normalised images (n, channels, H, W) or features (n, D), or a tuple of several, the weakest first.
    selection : {"official", "mean", "last"}
        The epoch that is kept: that of the lowest validation loss, averaged over batches (official) or over bags (mean), or the last.
    patience : int
        Epochs without improvement after which training stops; 0: never.
    seed : int
        Seed of the order of the bags, augmentation and dropout.
    precision : {"tf32", "fp32", "bf16"}
        ``tf32``: float32 with TF32 convolutions on a GPU; ``fp32``: float32 throughout; ``bf16``: autocast.
    batch_instances : int
        Instances per step of a pass over single instances; 0: as many as ``batch_bags`` bags hold.
    decay : {"all", "weights"}
        The parameters with weight decay: all, or weights only (no biases, no batch-norm).
    chunk_instances : int
        The most instances processed at once; larger batches and bags are split (docs/how-to/size.md). 0: batches are not split.

    Examples
    --------
    >>> TrainConfig(epochs=20, lr=1e-3).batch_bags
    64
    """

    epochs: int = 1500
    batch_bags: int = 64
    optimizer: str | OptimizerFactory = "adam"
    lr: float = 3e-4
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup: float = 0.0
    views: Policy = "none"
    selection: str = "official"
    patience: int = 0
    seed: int = 0
    precision: str = "tf32"
    batch_instances: int = 0
    decay: str = "all"
    chunk_instances: int = 0

    def __post_init__(self) -> None:
        for name, choices in CHOICES.items():
            value = getattr(self, name)  # a function is the user's own
            if not (name in ("optimizer", "views") and all(map(callable, value if isinstance(value, tuple) else (value,)))):
                check_choice(name, value, choices)
        for name, (low, high) in RANGES.items():
            integer = isinstance(getattr(TrainConfig, name), int)
            object.__setattr__(self, name, check_number(name, getattr(self, name), low, high, integer=integer))
        if self.patience and self.selection == "last":
            given = f"patience={self.patience} waits for a better epoch, selection=last keeps the last one"
            raise HeadcountError(f"{given}; give one of the two")


def check_compatible(model: Model, train: Bags, valid: Bags, config: TrainConfig) -> None:
    """Refuse bags that do not fit the model, and bags from which nothing can be learned or chosen."""
    for role, bags in (("training", train), ("validation", valid)):
        if not len(bags):
            raise HeadcountError(f"there are no {role} bags; give at least one")
        if bags.pool.shape != tuple(model.config.shape):
            given = f"an instance of the {role} bags has shape {bags.pool.shape}"
            raise HeadcountError(f"{given}, the model was built for {model.config.shape}")
        if bags.classes != model.config.classes:
            given, expected = (", ".join(classes[:8]) for classes in (bags.classes, model.config.classes))
            raise HeadcountError(f"the {role} bags have the classes {given}, the model {expected}; give the same, in order")
    if train.pool.kind == "features" and isinstance(config.views, str) and config.views not in FEATURE_VIEWS:
        choices = ", ".join(filter(None, FEATURE_VIEWS))
        raise HeadcountError(f"views={config.views} are for images, and the instances are features; give one of {choices}")
    if not train.target.any() and train.known is None:
        raise HeadcountError("no training bag has a label, so there is nothing to learn from; label some")
    if not valid.target.any() and config.selection != "last":
        advice = f"label some, or give selection=last (it is {config.selection})"
        raise HeadcountError(f"no validation bag has a label to choose an epoch by; {advice}")


@torch.no_grad()
def check_head_output(head: Head, loader: BagLoader) -> None:
    """Call a custom head once, with random features of two small bags: does it return a valid Output?"""
    if type(head) in HEADS.values():
        return
    ids = loader.bags.sizes.argsort()[:2]
    batch, position = loader.batch_info(ids)
    h = torch.randn(len(position), head.dim, generator=torch.Generator().manual_seed(0)).to(loader.device)
    output = copy.deepcopy(head).eval()(h, batch.segments)
    name = type(head).__name__
    if not isinstance(output, Output):
        raise HeadcountError(f"head {name} returns {type(output).__name__}; return Output(instance, bag, parts)")
    for part, rows in (("instance", len(position)), ("bag", len(ids))):
        expected, shape = (rows, head.classes), tuple(getattr(output, part).shape)
        if expected != shape:
            problem = f"{part} of its Output has shape {shape}, not {expected}"
            raise HeadcountError(f"head {name}: {problem}: one row each, one column per class")
    total = output.bag.float().logsumexp(1)
    if (total.abs() > 1e-2).any():  # NaN is reported by the training itself
        problem = f"bag of its Output holds no log-probabilities (they sum to {float(total.exp()[0]):.3g}, not 1)"
        raise HeadcountError(f"head {name}: {problem}; return self.masked_log_softmax(scores)")


def build_optimizer(model: nn.Module, prefix: str, config: TrainConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer of the parameters whose names begin with ``prefix``, largest first: a fused step takes about thirty of them
    at a time, and only large ones together keep a GPU busy."""
    parameters = [p for name, p in model.named_parameters() if name.startswith(prefix)]
    groups: list[Any] = sorted(parameters, key=torch.numel, reverse=True)
    if config.decay == "weights":  # neither biases nor batch-norm
        decayed, others = [p for p in groups if p.ndim > 1], [p for p in groups if p.ndim <= 1]
        groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    on_gpu = device.type == "cuda"
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr  # a tensor can change under a CUDA graph
    if not isinstance(config.optimizer, str):
        if not isinstance(optimizer := config.optimizer(parameters), torch.optim.Optimizer):
            raise HeadcountError(f"the optimizer's function returns {type(optimizer).__name__}, and no torch.optim.Optimizer")
        return optimizer
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr, 0.9, weight_decay=config.weight_decay, nesterov=True, fused=True)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[config.optimizer]
    return kind(groups, lr, (0.9, 0.999), 1e-8, config.weight_decay, capturable=on_gpu, fused=True)


def load_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Tensor]) -> None:
    """Load state tensors that were saved by "number of the parameter.name"."""
    state: dict[int, dict[str, Tensor]] = {}
    for name, value in saved.items():
        i, slot = name.split(".", 1)
        state.setdefault(int(i), {})[slot] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for weight, slots in optimizer.state.items():
        for name, value in slots.items():
            if value.shape == weight.shape:  # with the memory layout of the weight: a fused step needs both in one order
                slots[name] = torch.empty_like(weight).copy_(value)


def set_lr(optimizers: Iterable[torch.optim.Optimizer], config: TrainConfig, done: float) -> None:
    """Set the learning rate after this fraction of the training."""
    if config.schedule == "constant" and not config.warmup:
        return
    lr = config.lr * lr_factor(config.schedule, config.warmup, done)
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def lr_factor(schedule: str, warmup: float, done: float) -> float:
    """The factor on the learning rate after this fraction of the training.

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


class MovingAverage:
    """The teacher's weights and batch-norm statistics move towards the model's; its other buffers are copied. Statistics of the
    current model under averaged weights would mislead the teacher just when a second view begins to change them."""

    def __init__(self, teacher: nn.Module, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.averages, self.currents = list[Tensor](teacher.parameters()), list[Tensor](model.parameters())
        self.copies, self.originals = list[Tensor](), list[Tensor]()
        for (name, average), current in zip(teacher.named_buffers(), model.buffers(), strict=True):
            is_statistic = name.endswith(("running_mean", "running_var"))
            (self.averages if is_statistic else self.copies).append(average)
            (self.currents if is_statistic else self.originals).append(current)

    @torch.no_grad()
    def update(self, steps: Tensor) -> None:
        """After this many steps."""
        rate = (9 / (10 + steps)).clamp_min(1 - self.decay)  # more at first: a short training forgets its initial weights too
        differences = torch._foreach_sub(self.currents, self.averages)
        torch._foreach_mul_(differences, rate)
        torch._foreach_add_(self.averages, differences)
        if self.copies:
            torch._foreach_copy_(self.copies, self.originals)

"""train(): an epoch, its validation loss, and again; the best epoch is kept.

A training can be interrupted at any time and resumed from its last checkpoint, with the same numbers (bit for bit on the CPU):
every random number comes from (seed, purpose, epoch), and checkpoints are written between epochs: tensors and a little JSON in one
file, so that loading it runs no code.
"""

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from headcount.bags import Bags
from headcount.bags.bags import fingerprint
from headcount.bags.seeds import seed_for
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.io import atomic_path, atomic_write
from headcount.loading import check_schema, explain_read_errors, parse_json, read_safetensors
from headcount.models.backbones import backbone_name
from headcount.models.heads import head_code
from headcount.models.library_backbones import state_digest
from headcount.models.network import Model
from headcount.training import accel
from headcount.training.config import TrainConfig, check_compatible, check_head_output, load_optimizer_state
from headcount.training.trainer import Losses, Trainer, TrainProgress

CHECKPOINT = "checkpoint.safetensors"
_seconds = os.environ.get("HEADCOUNT_CHECKPOINT_SECONDS", "30")  # how much work may be lost: a setting of the machine
try:
    CHECKPOINT_SECONDS = float(_seconds)
except ValueError:
    raise HeadcountError(f"HEADCOUNT_CHECKPOINT_SECONDS is a number of seconds, got {_seconds!r}") from None


@dataclass(frozen=True)
class TrainResult:
    """A finished training."""

    model: Model  # with the weights of the epoch that was kept, in eval mode
    progress: TrainProgress  # the losses of all epochs, and the number of the epoch that was kept
    compiled: bool = False  # whether the network was compiled


def train(
    model: Model, train: Bags, valid: Bags, config: TrainConfig, *,
    work_dir: Path | str | None = None, on_progress: Callable[[TrainProgress], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS, compile: str = "auto",
) -> TrainResult:  # fmt: skip
    """Train a model on bags without truth; it gets the weights of the epoch that is kept.

    Parameters
    ----------
    model : Model
        See :func:`headcount.build_model`. Trained on the device where it is.
    train, valid : Bags
        Training bags, and the bags by whose labels the epoch is chosen.
    config : TrainConfig
        How to train.
    work_dir : path, optional
        A folder for checkpoints and ``metrics.jsonl``. A training that was interrupted is resumed from it.
    on_progress : callable, optional
        Called with the :class:`TrainProgress` after each epoch.
    checkpoint_seconds : float
        The least time between checkpoints.
    compile : {"auto", "on", "off"}
        Whether to compile the network: by default on a GPU.

    Returns
    -------
    TrainResult

    Examples
    --------
    >>> import headcount as hc
    >>> bags = hc.majority_bags(hc.load_source("digits"), fold=0, protocol=hc.Protocol(bag_size=8, train_bags=20))
    >>> train_bags, valid_bags = bags["train"].blind(), bags["valid"].blind()
    >>> model = hc.build_model(hc.ModelConfig.for_bags(train_bags, backbone="mlp"), train_bags)
    >>> result = hc.train(model, train_bags, valid_bags, hc.TrainConfig(epochs=2))
    >>> result.progress.epoch
    2
    """
    check_compatible(model, train, valid, config)
    work_dir = None if work_dir is None else Path(work_dir)
    trainer = Trainer(model, train, valid, config, compile)
    group = trainer.process_group  # only its main process writes and reports
    seed_noise = torch.manual_seed if model.device.type == "cuda" else torch.default_generator.manual_seed  # 2 ms faster
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        check_head_output(trainer.head, trainer.train_loader)
        key = training_key(trainer) if work_dir else ""
        progress = resume(trainer, work_dir, key) if work_dir else TrainProgress()
        group.check_equal("the epoch to resume from", progress.epoch)
        saved = time.monotonic()
        started = saved - progress.seconds
        try:
            while progress.epoch < config.epochs and not 0 < config.patience <= progress.epoch - progress.best_epoch:
                # augmentation and dropout, different in each process; in the main one as in a single process
                seed_noise(seed_for(config.seed, "noise", progress.epoch, *([group.rank] if group.rank else [])))
                train_loss = trainer.train_epoch(progress.epoch)
                valid_loss = trainer.valid_loss()
                trainer.record_epoch(progress, float(train_loss), float(valid_loss))
                progress.seconds = time.monotonic() - started
                if work_dir and group.is_main:
                    write_losses(work_dir, progress.curve, progress.epoch - 1)
                    if time.monotonic() - saved > checkpoint_seconds:
                        save(trainer, work_dir, progress, key)
                        saved = time.monotonic()
                if on_progress and group.is_main:
                    on_progress(progress)
        except KeyboardInterrupt:
            if work_dir and group.is_main and not trainer.mid_epoch:  # in the middle of an epoch nothing can be resumed
                save(trainer, work_dir, progress, key)
            raise
        except ValueError as e:
            if "more than 1 value per channel" not in str(e):
                raise
            problem = f"a step of {config.batch_bags} bags has a single instance, and batch-norm cannot learn from one"
            advice = "give larger or more bags (bag_size, train_bags), more per step (batch_bags), or another backbone or head"
            raise HeadcountError(f"{problem}; {advice}") from e
        finally:
            trainer.release()
    model.load_state_dict({k: trainer.best_state[k] for k in model.state_dict()})  # without the buffers of Head.setup
    compiled = isinstance(trainer.encode, accel.CompiledFunction) and not trainer.encode.failed
    return TrainResult(model.eval(), progress, compiled)


def training_key(trainer: Trainer) -> str:
    """Hash of the configuration, the model with its initial weights, and the bags; to be computed before the first step."""
    model = trainer.model
    content = {
        "config": vars(trainer.config),
        "model": vars(model.config),
        "head_code": hashlib.sha256(head_code(model.config.head)).hexdigest(),
        "bags": [fingerprint(loader.bags) for loader in (trainer.train_loader, trainer.valid_loader)],
        "weights": state_digest(model.state_dict()),
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=backbone_name).encode()).hexdigest()


def _state(trainer: Trainer) -> dict[str, Tensor]:
    """The tensors of a training except those of its optimizers."""
    parts = {"model": trainer.model.state_dict(), "best": trainer.best_state}
    parts |= {} if trainer.teacher is None else {"teacher": trainer.teacher.state_dict()}
    return {f"{part}.{name}": tensor for part, tensors in parts.items() for name, tensor in tensors.items()}


def save(trainer: Trainer, work_dir: Path, progress: TrainProgress, key: str) -> None:
    tensors = _state(trainer)
    for prefix, optimizer in trainer.optimizers.items():
        for i, slots in optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{prefix}.{i}.{k}": v for k, v in slots.items() if isinstance(v, Tensor)}
    save_checkpoint(work_dir / CHECKPOINT, tensors, {**vars(progress), "key": key})


def resume(trainer: Trainer, work_dir: Path, key: str) -> TrainProgress:
    """Load the checkpoint of this training if there is one; one with another key, or tensors of another version, is ignored."""
    tensors, metadata = load_checkpoint(work_dir / CHECKPOINT)
    state, progress = _state(trainer), TrainProgress()
    shapes = {name: tensor.shape for name, tensor in tensors.items() if not name.startswith("optimizer.")}
    if metadata.pop("key", None) == key and shapes == {name: tensor.shape for name, tensor in state.items()}:
        with explain_read_errors(work_dir / CHECKPOINT, "what this training wrote, or delete it"):
            check_schema(metadata, TrainProgress)
            for name, tensor in state.items():
                tensor.copy_(tensors[name])
            for prefix, optimizer in trainer.optimizers.items():
                start = f"optimizer.{prefix}."
                load_optimizer_state(optimizer, {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)})
            progress = TrainProgress(**metadata)
            progress.curve = [(train, valid) for train, valid in metadata["curve"]]
    if trainer.process_group.is_main:
        write_losses(work_dir, progress.curve)  # the epochs after the checkpoint are trained again
    return progress


def save_checkpoint(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    contiguous, facts = {k: v.detach().contiguous().cpu() for k, v in tensors.items()}, json.dumps(metadata)
    with atomic_path(path) as part:
        save_file(contiguous, part, metadata={"facts": facts, "sha256": _digest(contiguous, facts)})


def load_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata; empty if there is no file, or a damaged one: then the training starts from the beginning."""
    if not os.path.lexists(path):
        return {}, {}
    try:
        tensors, metadata = read_safetensors(path, "an undamaged one")
        with explain_read_errors(path, "an undamaged one"):
            check_schema(metadata, dict[str, str])
            if metadata["sha256"] != _digest(tensors, metadata["facts"]):
                raise HeadcountError("its content was changed")
            return tensors, parse_json(metadata["facts"].encode(), finite=False)
    except HeadcountError as e:
        warnings.warn(f"the training starts from the beginning: {e}", HeadcountWarning, stacklevel=2)
        return {}, {}


def _digest(tensors: dict[str, Tensor], facts: str) -> str:
    return hashlib.sha256((facts + state_digest(tensors)).encode()).hexdigest()


def write_losses(work_dir: Path, curve: Sequence[Losses], written: int = 0) -> None:
    """``metrics.jsonl``, a line per epoch: a new file, or the epochs after those that are ``written``. A pipe or a device of that
    name is an error, for to open it could block."""
    work_dir.mkdir(parents=True, exist_ok=True)
    path = work_dir / "metrics.jsonl"
    written = written if path.is_file() else 0
    epochs = enumerate(curve[written:], written + 1)
    lines = "".join(json.dumps({"epoch": e, "train_loss": train, "valid_loss": valid}) + "\n" for e, (train, valid) in epochs)
    if written:
        with open(path, "a") as f:
            f.write(lines)
    else:
        atomic_write(path, lambda f: f.write(lines.encode()))


def thin_curve(curve: Sequence[Losses], points: int) -> list[list[Any]]:
    """At most this many points (epoch, training loss, validation loss), the last among them; NaN is None, for JSON.

    >>> thin_curve([(2.0, 3.0), (1.0, 2.0), (0.5, math.nan)], 2)
    [[1, 2.0, 3.0], [3, 0.5, None]]
    """
    keep = sorted({round(i) for i in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
    return [[i + 1, *(round(v, 5) if math.isfinite(v) else None for v in curve[i])] for i in keep]

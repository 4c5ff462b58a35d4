"""train(): an epoch, its validation loss, and again; the best epoch is kept.

A training can be interrupted at any time and resumed from its last checkpoint, with the same numbers (bit for bit on the CPU):
every random number comes from (seed, purpose, epoch), and checkpoints are written between epochs.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.errors import HeadcountError
from headcount.models.network import Model
from headcount.training import accel
from headcount.training.checkpoints import Losses, write_losses
from headcount.training.config import TrainConfig, check_compatible, check_head_output
from headcount.training.trainer import Trainer, TrainProgress

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
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        check_head_output(trainer.head, trainer.train_loader)
        progress = trainer.resume(work_dir) if work_dir else TrainProgress()
        group.check_equal("the epoch to resume from", progress.epoch)
        saved = time.monotonic()
        started = saved - progress.seconds
        try:
            while progress.epoch < config.epochs and not 0 < config.patience <= progress.epoch - progress.best_epoch:
                # augmentation and dropout, different in each process; in the main one as in a single process
                torch.manual_seed(seed_for(config.seed, "noise", progress.epoch, *([group.rank] if group.rank else [])))
                train_loss = trainer.train_epoch(progress.epoch)
                valid_loss = trainer.valid_loss()
                trainer.record_epoch(progress, float(train_loss), float(valid_loss))
                progress.seconds = time.monotonic() - started
                if work_dir and group.is_main:
                    write_losses(work_dir, progress.curve, progress.epoch - 1)
                    if time.monotonic() - saved > checkpoint_seconds:
                        trainer.save(work_dir, progress)
                        saved = time.monotonic()
                if on_progress and group.is_main:
                    on_progress(progress)
        except KeyboardInterrupt:
            if work_dir and group.is_main and not trainer.mid_epoch:  # in the middle of an epoch nothing can be resumed
                trainer.save(work_dir, progress)
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


def thin_curve(curve: Sequence[Losses], points: int) -> list[list[Any]]:
    """At most this many points (epoch, training loss, validation loss), the last among them; NaN is None, for JSON.

    >>> thin_curve([(2.0, 3.0), (1.0, 2.0), (0.5, math.nan)], 2)
    [[1, 2.0, 3.0], [3, 0.5, None]]
    """
    keep = sorted({round(i) for i in np.linspace(0, len(curve) - 1, min(points, len(curve)))})
    return [[i + 1, *(round(v, 5) if math.isfinite(v) else None for v in curve[i])] for i in keep]

"""fit(): the loop. An epoch, its validation loss, and again; the epoch to keep is kept.

Whatever happens, a training can be taken up again where its last checkpoint stood and ends with the same numbers, bit for
bit on the CPU: every draw comes from (seed, purpose, epoch), and a checkpoint is written between epochs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.models.network import Model
from headcount.seeds import seed_for
from headcount.training import loss_curve
from headcount.training.accel import device
from headcount.training.compatibility import check_compatible, check_head_output
from headcount.training.config import TrainConfig
from headcount.training.trainer import Trainer, TrainProgress


def _checkpoint_seconds() -> float:
    """How much work a kill may cost: a setting of the machine, not of the recipe."""
    given = os.environ.get("HEADCOUNT_CHECKPOINT_SECONDS", "30")
    try:
        return float(given)
    except ValueError:
        raise HeadcountError(f"HEADCOUNT_CHECKPOINT_SECONDS is a number of seconds, got {given!r}") from None


CHECKPOINT_SECONDS = _checkpoint_seconds()


@dataclass(frozen=True)
class TrainResult:
    """A finished training: the model carries the weights of the epoch that was kept."""

    model: Model
    progress: TrainProgress
    compiled: bool = False


def train(
    model: Model,
    train: Bags,
    valid: Bags,
    config: TrainConfig,
    *,
    work_dir: Path | str | None = None,
    on_progress: Callable[[TrainProgress], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    compile: str = "auto",
) -> TrainResult:
    """Train on blind bags; the model gets the weights of the epoch that is kept (``selection`` of the recipe).

    ``work`` is a folder for the checkpoint and ``metrics.jsonl``; ``watch`` is told after each epoch.
    """
    check_compatible(model, train, valid, config)
    work_dir = None if work_dir is None else Path(work_dir)
    state = Trainer(model, train, valid, config, compile)
    first = state.process_group.is_main  # of several processes only one writes and shows
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        check_head_output(state.head, state.train_loader)
        progress = state.resume(work_dir) if work_dir else TrainProgress()
        state.process_group.check_equal("where it stands", progress.epoch)
        started = time.monotonic() - progress.seconds
        saved = time.monotonic()
        try:
            while progress.epoch < config.epochs and not _patience_over(progress, config.patience):
                # views and dropout; the first process (or the only one) draws as ever, the others differently
                torch.manual_seed(seed_for(config.seed, "noise", progress.epoch, *state.process_group.seed_suffix))
                losses = state.train_epoch(progress.epoch), state.valid_loss()
                state.record_epoch(progress, float(losses[0]), float(losses[1]))
                progress.seconds = time.monotonic() - started
                if work_dir and first:
                    loss_curve.append_losses(work_dir, progress.epoch, progress.curve[-1])
                    if time.monotonic() - saved > checkpoint_seconds:
                        state.save(work_dir, progress)
                        saved = time.monotonic()
                if on_progress and first:
                    on_progress(progress)
        except KeyboardInterrupt:
            if work_dir and first and not state.mid_epoch:  # in the middle of an epoch there is nothing to go on from
                state.save(work_dir, progress)
            raise
        except ValueError as e:
            if "more than 1 value per channel" not in str(e):
                raise
            raise HeadcountError(
                f"a step of {config.batch_bags} bags is down to one instance, and batch-norm cannot learn from one alone; "
                "give larger or more bags (bag_size, train_bags), more of them a step (batch_bags), or another backbone or head"
            ) from e
    model.load_state_dict({k: state.best_state[k] for k in model.state_dict()})  # all but what was only memory
    return TrainResult(
        model.eval(), progress, isinstance(state.encode, device.CompiledFunction) and not state.encode.failed
    )


def _patience_over(progress: TrainProgress, patience: int) -> bool:
    return patience > 0 and progress.epoch - progress.best_epoch >= patience

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
from headcount.models.model import Model
from headcount.training import log, speed
from headcount.training.beforehand import agree, listen
from headcount.training.recipe import Recipe
from headcount.training.seeds import seed_for
from headcount.training.steps import Progress, Training


def _checkpoint_seconds() -> float:
    """How much work a kill may cost: a setting of the machine, not of the recipe."""
    given = os.environ.get("HEADCOUNT_CHECKPOINT_SECONDS", "30")
    try:
        return float(given)
    except ValueError:
        raise HeadcountError(f"HEADCOUNT_CHECKPOINT_SECONDS is a number of seconds, got {given!r}") from None


CHECKPOINT_SECONDS = _checkpoint_seconds()


@dataclass(frozen=True)
class Fit:
    """A finished training: the model carries the weights of the epoch that was kept."""

    model: Model
    progress: Progress
    compiled: bool = False


def fit(
    model: Model,
    train: Bags,
    valid: Bags,
    recipe: Recipe,
    *,
    work: Path | str | None = None,
    watch: Callable[[Progress], None] | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    compile: str = "auto",
) -> Fit:
    """Train on blind bags; the model gets the weights of the epoch that is kept (``selection`` of the recipe).

    ``work`` is a folder for the checkpoint and ``metrics.jsonl``; ``watch`` is told after each epoch.
    """
    agree(model, train, valid, recipe)
    work = None if work is None else Path(work)
    state = Training(model, train, valid, recipe, compile)
    first = state.team.first  # of several processes only one writes and shows
    with torch.random.fork_rng(devices=[model.device] if model.device.type == "cuda" else []):
        listen(state.head, state.train)
        progress = state.resume(work) if work else Progress()
        state.team.agree("where it stands", progress.epoch)
        started = time.monotonic() - progress.seconds
        saved = time.monotonic()
        try:
            while progress.epoch < recipe.epochs and not _patience_over(progress, recipe.patience):
                # views and dropout; the first process (or the only one) draws as ever, the others differently
                torch.manual_seed(seed_for(recipe.seed, "noise", progress.epoch, *state.team.apart))
                losses = state.train_epoch(progress.epoch), state.valid_loss()
                state.note(progress, float(losses[0]), float(losses[1]))
                progress.seconds = time.monotonic() - started
                if work and first:
                    log.append(work, progress.epoch, progress.curve[-1])
                    if time.monotonic() - saved > checkpoint_seconds:
                        state.save(work, progress)
                        saved = time.monotonic()
                if watch and first:
                    watch(progress)
        except KeyboardInterrupt:
            if work and first and not state.midway:  # in the middle of an epoch there is nothing to go on from
                state.save(work, progress)
            raise
        except ValueError as e:
            if "more than 1 value per channel" not in str(e):
                raise
            raise HeadcountError(
                f"a step of {recipe.batch_bags} bags is down to one instance, and batch-norm cannot learn from one alone; "
                "give larger or more bags (bag_size, train_bags), more of them a step (batch_bags), or another backbone or head"
            ) from e
    model.load_state_dict({k: state.best[k] for k in model.state_dict()})  # all but what was only memory
    return Fit(model.eval(), progress, isinstance(state.encode, speed.Compiled) and not state.encode.failed)


def _patience_over(progress: Progress, patience: int) -> bool:
    return patience > 0 and progress.epoch - progress.best_epoch >= patience

"""run(): one recipe becomes one record.

The walk: source, fold, bags, device; fit on blind bags (for MPEM without the dissenters its Counting Network named); ask the
best epoch about the test bags; score. Truth is looked at only after training, for the scores.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, Pool
from headcount.datasets import registry
from headcount.datasets.corruption import corrupt
from headcount.datasets.protocol import Protocol, majority_bags
from headcount.datasets.registry import Source
from headcount.errors import HeadcountError
from headcount.experiments import records, scores
from headcount.experiments.provenance import provenance
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.io import file_lock
from headcount.models.heads import find_head
from headcount.models.network import Model, build_model, predict
from headcount.training import distributed, loop, loss_curve, mpem
from headcount.training.accel import device as speed
from headcount.training.loop import CHECKPOINT_SECONDS, TrainResult
from headcount.training.trainer import TrainProgress

ProgressCallback = Callable[[TrainProgress], None]
CURVE_POINTS = 60  # points of the learning curve: a record stays small


def run(
    recipe: Recipe,
    out: Path | str,
    *,
    device: str = "auto",
    compile: str = "auto",
    on_progress: ProgressCallback | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
) -> Record:
    """The record of this recipe in ``out``: read if it is there, otherwise trained. What it needs must be there."""
    # once: a file that is written anew meanwhile does not rename this run
    out, key, own = Path(out), recipe.key, _own_head(recipe)
    path = out / f"{key}.json"
    work = out / "running" / key
    where = speed.resolve_device(device)
    team = distributed.process_group(where)
    with file_lock(work.with_suffix(".lock")) if team.is_main else nullcontext():
        team.check_equal("which run this is", int(key, 16) >> 2)
        if not team.broadcast(path.exists()):
            started, clock = datetime.now(UTC), time.monotonic()
            how = {"on_progress": on_progress, "checkpoint_seconds": checkpoint_seconds, "compile": compile}
            with _swept(work) if team.is_main else nullcontext():
                bags, removed, fitted = _train(recipe, out, work, where, how)
                if team.is_main:
                    body, arrays = _score(recipe, bags, removed, fitted)
                    made = provenance(where, started, time.monotonic() - clock, fitted.compiled)
                    records.write_record(out, {"key": key, **body, **own, "provenance": made}, arrays)
        if team.is_main:
            shutil.rmtree(work, ignore_errors=True)
        team.barrier()  # for the record
    return Record.read(path)


def _train(
    recipe: Recipe, out: Path, work: Path, device: torch.device, how: dict[str, Any]
) -> tuple[dict[str, Bags], Tensor | None, TrainResult]:
    bags = make_bags(recipe, device)
    removed = find_dissenters(recipe, out, bags["train"]) if recipe.removal else None
    train, valid = (hide_truth(bags[split], recipe) for split in ("train", "valid"))
    if removed is not None:
        train = train.without(removed)
        train = train.drop_removed() if recipe.drop_before_forward else train
    model = initial_model(recipe, bags["train"].blind()).to(device)
    fitted = loop.train(model, train, valid, recipe.train_config, work_dir=work, **how)
    if not fitted.progress.best_epoch:
        raise HeadcountError(f"{recipe}: the validation loss was never a number; try a smaller lr than {recipe.lr:g}")
    return bags, removed, fitted


def _score(
    recipe: Recipe, bags: dict[str, Bags], removed: Tensor | None, fitted: TrainResult
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    body = _heading(recipe, bags, fitted)
    said = predict(fitted.model, bags["test"])
    found, arrays = scores.score_test(said, bags["test"])
    body |= found
    if (estimate := fitted.model.head.estimate) is not None:
        valid = hide_truth(bags["valid"], recipe)
        heard = predict(fitted.model, valid)
        body["tilt"] = scores.score_transition(estimate, said, bags["train"], valid, bags["test"], heard)
    if removed is not None:
        body["mpem"] = scores.score_removal(removed, bags["train"])
    else:
        votes = predict_votes(fitted.model, bags["train"])
        arrays |= {name: value.cpu().numpy() for name, value in votes.items()}
        swept, before_after = scores.score_removal_sweep(votes, bags["train"])
        body |= swept
        arrays |= before_after
    return body, arrays


# -- what goes in -----------------------------------------------------------------------------------------------------


# kept by the source itself, not by its name: a file that was written anew, or another folder's, is another source


@lru_cache(maxsize=4)
def _pool_on(source: Source, device: torch.device) -> Pool:
    return source.pool().to(device)


@lru_cache(maxsize=8)
def _bags(source: Source, fold: int, protocol: Protocol) -> dict[str, Bags]:
    return majority_bags(source, fold, protocol)


def make_bags(recipe: Recipe, device: torch.device | str = "cpu") -> dict[str, Bags]:
    """The recipe's training, validation and test bags, with truth, over one pool on the device."""
    source = registry.load_source(recipe.source)
    pool = _pool_on(source, torch.device(device))
    made = _bags(source, recipe.fold, protocol_of(recipe))
    if recipe.trouble:
        made = corrupt(made, dict(recipe.trouble), recipe.data_seed + recipe.fold)
    return {split: replace(bags, pool=pool).to(device) for split, bags in made.items()}


def hide_truth(bags: Bags, recipe: Recipe) -> Bags:
    """What training may see: no truth. The supervised twin alone is told the instances' classes, as labels given."""
    return replace(bags, known=bags.truth, truth=None) if find_head(recipe.head).uses_instance_labels else bags.blind()


def protocol_of(recipe: Recipe) -> Protocol:
    return Protocol(
        scenario=recipe.scenario,
        bag_size=recipe.bag_size,
        train_bags=recipe.train_bags,
        valid_bags=recipe.valid_bags,
        test_bags=recipe.test_bags,
        seed=recipe.data_seed,
        sampler=recipe.sampler,
        tie=recipe.tie,
        rounding=recipe.rounding,
        overlap=recipe.overlap,
    )


def initial_model(recipe: Recipe, train: Bags) -> Model:
    """Fresh weights: the same for every fold and every removal of one seed."""
    source = registry.load_source(recipe.source)
    config = recipe.model_config(train)
    return build_model(config, train, seed=recipe.seed, mean=source.mean, std=source.std)


# -- MPEM -------------------------------------------------------------------------------------------------------------


def predict_votes(model: Model, train: Bags) -> dict[str, Tensor]:
    """What MPEM must know of a trained network: each training instance's vote, and its distances. No truth needed."""
    said = predict(model, train, keep=("features",))
    device = train.index.device
    h, vote, bag_said = (
        said.parts["features"].to(device),
        said.instance.argmax(1).to(device),
        said.bag.argmax(1).to(device),
    )
    kept = {"train_said": vote.to(torch.int16), "train_bag_said": bag_said.to(torch.int16)}
    for bags in mpem.PROTOTYPE_BAGS:
        for distance in mpem.DISTANCES:
            to = mpem.prototypes(h, vote, train.bag, train.label, bag_said, len(train.classes), bags, distance)
            kept[f"train_{distance}_{bags}"] = mpem.distances(h, train.bag, train.label, to).float()
    return kept


def find_dissenters(recipe: Recipe, out: Path, train: Bags) -> Tensor:
    """(N,) the dissenters that the needed run's votes name."""
    (needed,) = recipe.needs
    path = out / f"{needed.key}.json"
    if not path.exists():
        raise HeadcountError(f"MPEM needs the run {needed.key} ({needed}) in {out}; run it first")
    arrays = Record.read(path).arrays()
    if "train_said" not in arrays:
        raise HeadcountError(
            f"{path.with_suffix('.npz')} is missing, and MPEM needs its votes; delete {path} and run it again"
        )
    device = train.index.device
    said = torch.from_numpy(arrays["train_said"].astype(np.int64)).to(device)
    distance = torch.from_numpy(arrays[f"train_{recipe.distance}_{recipe.prototype_bags}"]).to(device)
    return mpem.dissenters(distance, said, train.bag, train.label, recipe.removal)


# -- what comes out ---------------------------------------------------------------------------------------------------


def _heading(recipe: Recipe, bags: dict[str, Bags], fitted: TrainResult) -> dict[str, Any]:
    source, progress = registry.load_source(recipe.source), fitted.progress
    curve = loss_curve.thin_curve(progress.curve, CURVE_POINTS)
    return {
        "format": 1,
        "recipe": recipe.values,
        "label": recipe.label,
        "text": str(recipe),
        "needs": [needed.key for needed in recipe.needs],
        "data": {
            "source": source.name,
            "checksum": source.checksum,
            "note": source.note,
            "classes": list(source.classes),
            "shape": list(bags["train"].pool.shape),
            "bag_size": recipe.bag_size,
            **{f"{split}_bags": len(b) for split, b in bags.items()},
        },
        "fit": {
            "best_epoch": progress.best_epoch,
            "valid_loss": progress.best,
            "epochs": recipe.epochs,
            "stopped": progress.epoch,
            "curve": {name: [point[i] for point in curve] for i, name in enumerate(("epoch", "train", "valid"))},
        },
    }


def _own_head(recipe: Recipe) -> dict[str, Any]:
    """What a reader of the record must know of a head of one's own without running its file."""
    return (
        {"own_head": {"code": code, "told": find_head(recipe.head).uses_instance_labels}}
        if (code := recipe.code_hash)
        else {}
    )


@contextmanager
def _swept(work: Path) -> Iterator[None]:
    """A run that failed before its first checkpoint has nothing to go on from, so it leaves nothing."""
    try:
        yield
    except Exception:
        if not (work / "checkpoint.safetensors").exists():
            shutil.rmtree(work, ignore_errors=True)
        raise

"""run(): one recipe becomes one record.

source → protocol → bags → train → predict → scores → record. Training sees blind bags; instance labels are used for the scores only.
"""

import shutil
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags import Bags, Pool
from headcount.datasets.protocol import corrupt, majority_bags
from headcount.datasets.registry import Source, load_source
from headcount.errors import HeadcountError
from headcount.experiments import scores
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record, provenance, write_record
from headcount.io import file_lock
from headcount.models.heads import find_head
from headcount.models.network import Model, build_model
from headcount.models.predictions import predict
from headcount.training import distributed, loop, mpem
from headcount.training.accel import resolve_device
from headcount.training.trainer import TrainProgress

EpochCallback = Callable[[TrainProgress], None]
CURVE_POINTS = 60  # of the learning curve: a record stays small


def run(
    recipe: Recipe,
    out: Path | str,
    *,
    device: str = "auto",
    compile: str = "auto",
    on_progress: EpochCallback | None = None,
    checkpoint_seconds: float = loop.CHECKPOINT_SECONDS,
) -> Record:
    """Train and score one recipe, unless its record exists.

    Parameters
    ----------
    recipe : Recipe
        The experiment. The runs it needs (``recipe.needs``) must have records in ``out``.
    out : path
        Folder of the records. An interrupted run resumes from its checkpoint there.
    device : str
        auto, cpu, cuda or cuda:1.
    compile, on_progress, checkpoint_seconds
        See :func:`headcount.train`; none of them affects the result.
    """
    out, key, code = Path(out), recipe.key, recipe.code_hash  # once: a file may change during the run
    # what a reader of the record must know of a custom head without executing its file
    custom_head = {"own_head": {"code": code, "told": find_head(recipe.head).uses_instance_labels}} if code else {}
    path, work_dir = out / f"{key}.json", out / "running" / key
    torch_device = resolve_device(device)
    group = distributed.process_group(torch_device)
    with file_lock(work_dir.with_suffix(".lock")) if group.is_main else nullcontext():
        group.check_equal("which run this is", int(key, 16) >> 2)
        if not group.broadcast(path.exists()):
            started, clock = datetime.now(UTC), time.monotonic()
            try:
                bags = make_bags(recipe, torch_device)
                removed = find_dissenters(recipe, out, bags["train"]) if recipe.removal else None
                train, valid = (hide_truth(bags[split], recipe.head) for split in ("train", "valid"))
                if removed is not None:
                    train = train.without(removed)
                    train = train.drop_removed() if recipe.drop_before_forward else train
                model = initial_model(recipe, bags["train"]).to(torch_device)
                options: dict[str, Any] = {"work_dir": work_dir, "on_progress": on_progress, "compile": compile}
                options["checkpoint_seconds"] = checkpoint_seconds
                result = loop.train(model, train, valid, recipe.train_config, **options)
                if not result.progress.best_epoch:
                    advice = f"try a smaller lr than {recipe.lr:g}"
                    raise HeadcountError(f"{recipe}: the validation loss was never a number; {advice}")
                if group.is_main:
                    data, arrays = _score(recipe, result.model, bags, removed)
                    data = {"key": key, **_describe(recipe, bags, result), **data, **custom_head}
                    data["provenance"] = provenance(torch_device, started, time.monotonic() - clock, result.compiled)
                    write_record(out, data, arrays)
            except Exception:
                if group.is_main and not (work_dir / "checkpoint.safetensors").exists():
                    shutil.rmtree(work_dir, ignore_errors=True)
                raise
        if group.is_main:
            shutil.rmtree(work_dir, ignore_errors=True)
        group.barrier()  # the other processes wait for the record
    return Record.read(path)


@lru_cache(maxsize=4)  # by the source itself, not by its name: a file that has changed is another source
def _pool_on(source: Source, device: torch.device) -> Pool:
    return source.pool().to(device)


_protocol_bags = lru_cache(maxsize=8)(majority_bags)


def make_bags(recipe: Recipe, device: torch.device | str = "cpu") -> dict[str, Bags]:
    """The recipe's training, validation and test bags, with truth, over one pool on the device."""
    source = load_source(recipe.source)
    pool, bags = _pool_on(source, torch.device(device)), _protocol_bags(source, recipe.fold, recipe.protocol)
    if recipe.trouble:
        bags = corrupt(bags, dict(recipe.trouble), recipe.data_seed + recipe.fold)
    return {split: replace(part, pool=pool).to(device) for split, part in bags.items()}


def hide_truth(bags: Bags, head: str) -> Bags:
    """The bags as training sees them: without truth, which only the supervised twin gets, as known labels."""
    return replace(bags, known=bags.truth, truth=None) if find_head(head).uses_instance_labels else bags.blind()


def initial_model(recipe: Recipe, train: Bags) -> Model:
    """The untrained model; its weights depend on the seed only, not on the fold or on MPEM's removal."""
    source, bags = load_source(recipe.source), train.blind()
    return build_model(recipe.model_config(bags), bags, seed=recipe.seed, mean=source.mean, std=source.std)


def predict_votes(model: Model, train: Bags) -> dict[str, Tensor]:
    """What MPEM needs from a trained Counting Network: each training instance's vote, and its distances. Uses no truth."""
    output, device = predict(model, train, keep=("features",)), train.index.device
    parts = (output.parts["features"], output.instance.argmax(1), output.bag.argmax(1))
    features, vote, bag_prediction = (part.to(device) for part in parts)
    votes = {"train_said": vote.to(torch.int16), "train_bag_said": bag_prediction.to(torch.int16)}
    for which, distance in product(mpem.PROTOTYPE_BAGS, mpem.DISTANCES):
        known = features, vote, train.bag, train.label, bag_prediction, len(train.classes)
        prototypes = mpem.prototypes(*known, which, distance)
        votes[f"train_{distance}_{which}"] = mpem.distances(features, train.bag, train.label, prototypes).float()
    return votes


def find_dissenters(recipe: Recipe, out: Path, train: Bags) -> Tensor:
    """(N,) the instances to remove, by the votes of the run this recipe needs."""
    needed = recipe.needs[0]
    path = out / f"{needed.key}.json"
    if not path.exists():
        raise HeadcountError(f"MPEM needs the run {needed.key} ({needed}) in {out}; run it first")
    arrays = Record.read(path).arrays()
    distance_name = f"train_{recipe.distance}_{recipe.prototype_bags}"
    if not {"train_said", distance_name} <= arrays.keys():
        raise HeadcountError(
            f"{path.with_suffix('.npz')} is missing or incomplete, and MPEM needs its votes; delete {path} and run it again"
        )
    device = train.index.device
    vote = torch.from_numpy(arrays["train_said"].astype(np.int64)).to(device)
    distance = torch.from_numpy(arrays[distance_name]).to(device)
    return mpem.dissenters(distance, vote, train.bag, train.label, recipe.removal)


def _score(recipe: Recipe, model: Model, bags: dict[str, Bags], removed: Tensor | None) -> tuple[dict[str, Any], scores.Arrays]:
    """Scores on the test bags, and what MPEM did or would do to the training bags; as JSON and as arrays."""
    predictions = predict(model, bags["test"])
    data, arrays = scores.score_test(predictions, bags["test"])
    if (estimate := getattr(model.head, "transition", None)) is not None:
        valid = hide_truth(bags["valid"], recipe.head)
        data["tilt"] = scores.score_transition(estimate, predictions, bags["train"], valid, bags["test"], predict(model, valid))
    if removed is not None:
        return data | {"mpem": scores.score_removal(removed, bags["train"])}, arrays
    votes = predict_votes(model, bags["train"])
    arrays |= {name: value.cpu().numpy() for name, value in votes.items()}
    sweep, share_arrays = scores.score_removal_sweep(votes, bags["train"])
    return data | sweep, arrays | share_arrays


def _describe(recipe: Recipe, bags: dict[str, Bags], result: loop.TrainResult) -> dict[str, Any]:
    source, progress = load_source(recipe.source), result.progress
    curve, needs = loop.thin_curve(progress.curve, CURVE_POINTS), [needed.key for needed in recipe.needs]
    about = {"format": 1, "recipe": recipe.values, "label": recipe.label, "text": str(recipe), "needs": needs}
    data = {"source": source.name, "checksum": source.checksum, "note": source.note}
    shape = {"classes": list(source.classes), "shape": list(bags["train"].pool.shape), "bag_size": recipe.bag_size}
    sizes = {f"{split}_bags": len(part) for split, part in bags.items()}
    fit = {"best_epoch": progress.best_epoch, "valid_loss": progress.best, "epochs": recipe.epochs, "stopped": progress.epoch}
    curves = {"curve": {name: [point[i] for point in curve] for i, name in enumerate(("epoch", "train", "valid"))}}
    return about | {"data": data | shape | sizes, "fit": fit | curves}

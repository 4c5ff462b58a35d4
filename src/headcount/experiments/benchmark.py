"""The benchmark: every method on tasks with natural bags, scored on the true classes of instances of held-out bags.

A run is one fit of one method to one task with one seed, which draws the bags, the test bags among them (whole groups) and the
training. Its record is ``OUT/TASK/METHOD-SEED.json``; a run that has one is not repeated. The methods are those of ``fit``
with the networks of all heads, ``auto`` (the choice of ``fit`` by cross-validation), the commonest label, and the *twins*: the
network and the forest that are trained with the class of every instance, as an upper bound.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.bags.splits import Split, assign_folds, train_valid_split
from headcount.datasets.tasks import find_task
from headcount.errors import HeadcountError, check_choice
from headcount.experiments.records import provenance
from headcount.inference.evaluate import evaluate_bags, evaluate_instances, evaluate_shares
from headcount.io import atomic_write
from headcount.loading import read_json
from headcount.majority.metrics import count_votes
from headcount.models.fitted import FittedModel
from headcount.models.heads import HEADS
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset, read
from headcount.readers.columns import ColumnRoles
from headcount.selection.classifiers import CLASSIFIERS
from headcount.selection.cross_validation import calibrate_on_validation, prepare_split
from headcount.selection.fit import fit
from headcount.selection.methods import build_methods

TWINS = {"supervised": "supervised", "supervised_forest": "forest"}  # and the method that gets the classes of instances
BENCHMARK_METHODS = ("auto", "tilt", *CLASSIFIERS, *(h for h in HEADS if h not in ("tilt", *TWINS)), "commonest", *TWINS)
MAX_BAGS, TEST_FOLDS, AUTO_FOLDS = 240, 4, 3  # a quarter of the bags drawn are test bags
SCORES = {
    "instance_accuracy": "instance accuracy",
    "balanced_accuracy": "balanced accuracy",
    "bag_accuracy": "bag accuracy",
    "share_error": "share error",
    "coverage": "coverage of 90 % intervals",
    "width": "their width",
}
_RECORD = {
    "task": str, "title": str, "note": str, "method": str, "name": str, "seed": int,
    "data": {**dict.fromkeys(("train", "valid", "test", "instances"), int), "checksum": str},
    "scores": dict.fromkeys(SCORES, float | None), "provenance": dict[str, Any],
}  # fmt: skip


@lru_cache(maxsize=1)
def read_task(name: str, folder: Path | None = None, encoder: str | None = None) -> BagDataset:
    """The bags of a task, labelled with the most frequent class of their instances; of two such classes, with both. Of texts, an
    encoder makes embeddings."""
    task = find_task(name)
    data = task.load_data(folder)
    names, bag = np.unique(np.asarray(data.bag).astype(str), return_inverse=True)
    order = np.argsort(bag, kind="stable")
    bag, truth = bag[order], np.asarray(data.truth)[order]
    votes = count_votes(np.array([task.classes.index(c) for c in truth]), bag, len(names), len(task.classes))
    labels = np.array(["|".join(np.array(task.classes)[row == row.max()]) for row in votes])
    values = {"truth": truth} if data.group is None else {"truth": truth, "group": np.asarray(data.group)[order].astype(str)}
    if isinstance(data.instances, dict):
        columns = {name: np.asarray(column)[order] for name, column in data.instances.items()}
        group = None if data.group is None else "group"
        roles = ColumnRoles(bag="bag", label="label", text=task.text, truth="truth", group=group)
        return read(
            {**columns, **values, "bag": names[bag], "label": labels[bag]}, roles, classes=task.classes, encoder=encoder
        )
    kind, first = "images" if np.ndim(data.instances) == 4 else "features", np.unique(bag, return_index=True)[1]
    values = {role: value if role == "truth" else value[first] for role, value in values.items()}
    return read(
        {kind: np.asarray(data.instances)[order], "bag": bag, "names": names, "labels": labels, **values}, classes=task.classes
    )


def split_task(bags: Bags, seed: int, max_bags: int = MAX_BAGS) -> Split:
    """Training, validation and test bags, whole groups, of at most ``max_bags`` that are drawn."""
    rng = np.random.default_rng(seed_for(seed, "benchmark bags"))
    drawn = np.sort(rng.permutation(len(bags))[:max_bags])
    fold = assign_folds(bags.take(drawn), TEST_FOLDS, seed)
    return train_valid_split(bags, drawn[fold > 0], drawn[fold == 0], seed)


def run_method(dataset: BagDataset, split: Split, method: str, seed: int) -> tuple[str, FittedModel | None]:
    """The name of what was fitted to the training bags, and the model; None for the commonest label."""
    if method == "commonest":
        return "Commonest label", None
    if method == "auto":
        chosen = np.union1d(split.train, split.valid)
        bags, rows = dataset.bags.blind(), dataset.bags.instances_of(torch.from_numpy(chosen))
        model = fit(
            replace(dataset, bags=bags.take(chosen), rows=dataset.rows[rows]), seed=seed, folds=AUTO_FOLDS, device="cpu"
        )
        return model.metadata["method"]["title"], model
    train, valid, _, preprocessor = prepare_split(dataset, split)
    if method in TWINS:  # the one place where classes of instances are given to training
        train, valid = (replace(b, known=dataset.bags.take(n).truth) for b, n in ((train, split.train), (valid, split.valid)))
    fitted = build_methods(TWINS.get(method, method), train)[0]
    result = fitted.fit(train, valid, seed=seed)
    bags = dataset.to_bags(preprocessor).blind()
    calibration = calibrate_on_validation(result, bags, split, torch.device("cpu"))
    model = FittedModel(result.estimator, bags.classes, preprocessor, **calibration._asdict())
    return {"supervised": "Twin: network", "supervised_forest": "Twin: random forest"}.get(method, fitted.title), model


def score_model(dataset: BagDataset, split: Split, model: FittedModel | None) -> dict[str, float | None]:
    """The scores on test bags."""
    test = (dataset.bags if model is None else dataset.to_bags(model.preprocessor)).take(split.test)
    if model is None:
        prior = dataset.bags.target[np.union1d(split.train, split.valid)].mean(0).numpy()
        rows, shares = (np.tile(prior, (n, 1)) for n in (len(test.index), len(test)))
        predictions = Predictions(
            test.classes, rows, shares, shares, shares * math.nan, shares * math.nan, np.zeros(len(test), bool)
        )
    else:
        predictions = model.predict(test.blind())
    assert test.truth is not None
    counts = count_votes(test.truth.numpy(), test.bag.numpy(), len(test), len(test.classes))
    true_shares = torch.from_numpy(counts / np.maximum(1, counts.sum(1, keepdims=True))).float()
    instances, bags = evaluate_instances(test, predictions), evaluate_bags(test, predictions)
    shares = evaluate_shares(replace(test, target=true_shares), predictions)
    width = float((predictions.shares_high - predictions.shares_low).mean())
    return {
        "instance_accuracy": instances["accuracy"]["value"], "balanced_accuracy": instances["balanced_accuracy"],
        "bag_accuracy": bags["accuracy"]["value"], "share_error": shares["mean_error"],
        "coverage": None if math.isnan(width) else shares["inside_90_interval"], "width": None if math.isnan(width) else round(width, 6),
    }  # fmt: skip


def run_benchmark(
    tasks: Sequence[str], methods: Sequence[str], seeds: Sequence[int], out: Path,
    *, folder: Path | None = None, encoder: str | None = None, on_progress: Callable[[str], None] = lambda line: None,
) -> None:  # fmt: skip
    """Make the records that are missing. Forests and linear models read features, so for images they are left out. With an encoder,
    only tasks with texts are run, as tasks of their own with their embeddings. A run that fails stops no other."""
    errors = list[HeadcountError]()
    for method in methods:
        check_choice("method", method, BENCHMARK_METHODS)
    for name in tasks:
        task, stem = find_task(name), Path(name).stem
        if encoder is not None:
            if task.text is None:
                continue
            stem, note = f"{stem}-embeddings", f"{task.note}; texts as embeddings of {Path(encoder).name}"
            task = replace(task, title=f"{task.title}, embeddings", note=note)
        place = out / stem
        todo = [(s, m, path) for s in seeds for m in methods if not (path := place / f"{m}-{s}.json").exists()]
        for seed, method, path in todo:
            dataset = read_task(name, folder, encoder)
            if dataset.kind == "images" and (method in CLASSIFIERS or method == "supervised_forest"):
                continue
            started, processor = datetime.now(UTC), time.process_time()
            split = split_task(dataset.bags, seed)
            try:
                title, model = run_method(dataset, split, method, seed)
            except HeadcountError as e:
                errors.append(e)
                on_progress(f"{stem}, seed {seed}: {method} failed: {e}")
                continue
            scores = score_model(dataset, split, model)
            origin = provenance(torch.device("cpu"), started, time.process_time() - processor, False)
            bags = {part: len(getattr(split, part)) for part in ("train", "valid", "test")}
            record = {
                "task": stem, "title": task.title, "note": task.note, "method": method, "name": title, "seed": seed,
                "data": {**bags, "instances": int(dataset.bags.sizes[split.train].sum()), "checksum": dataset.fingerprint[:16]},
                "scores": scores, "provenance": {k: origin[k] for k in ("commit", "versions", "seconds")},
            }  # fmt: skip
            atomic_write(path, lambda f, record=record: f.write(json.dumps(record, indent=1).encode() + b"\n"))
            on_progress(f"{record['task']}, seed {seed}: {title}, instance accuracy {scores['instance_accuracy']:.3f}")
    if errors:
        raise errors[0]


def load_benchmark(out: Path) -> list[dict[str, Any]]:
    """All records in a folder: tasks in the order of their names, methods in that of BENCHMARK_METHODS, then seeds."""
    records = [read_json(path, _RECORD, "a record of headcount benchmark") for path in sorted(out.glob("*/*.json"))]
    if not records:
        raise HeadcountError(f"no records in {out}; give the --out of headcount benchmark")
    for record in records:
        check_choice("method of a record", record["method"], BENCHMARK_METHODS)
    return sorted(records, key=lambda r: (r["task"], BENCHMARK_METHODS.index(r["method"]), r["seed"]))


def mean_and_error(records: Sequence[dict[str, Any]], score: str) -> tuple[float, float]:
    """The mean over seeds and its standard error; NaN where there is none."""
    values = np.array([r["scores"][score] for r in records if r["scores"][score] is not None])
    error = float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan
    return float(values.mean()) if len(values) else math.nan, error

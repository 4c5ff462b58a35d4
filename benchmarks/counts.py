"""What vote counts add to majority labels: the same bags with their winners, with their shares as soft labels, and with their counts.

    python benchmarks/counts.py --out benchmarks/results/counts.json                     # digits; finished runs are kept
    python benchmarks/counts.py --out benchmarks/results/counts.json --task landcover --bags 120 --seeds 3

*Digits* are the ragged bags of benchmarks/defaults.py (scikit-learn's digits; 70 bags of 1 to 60, class shares that vary), scored on
instances that are in no bag. The other tasks are those of ``headcount benchmark``: whole groups are drawn at random, of ``--bags``
bags a fifth is the test. Only the scores and the twin see the class of instances. The twin is the better of a network and a random forest
that were trained with it.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import make_bags
from scipy import stats
from sklearn.datasets import load_digits
from sklearn.ensemble import RandomForestClassifier

from headcount import read
from headcount.bags import Bags
from headcount.bags.pool import to_feature_array
from headcount.bags.splits import train_valid_split
from headcount.errors import HeadcountWarning
from headcount.experiments.benchmark import read_task, split_task
from headcount.io import atomic_write
from headcount.models.predictions import estimator_probabilities
from headcount.readers.columns import ColumnRoles
from headcount.readers.dataset import BagDataset
from headcount.selection.methods import build_methods

METHODS = ("tilt", "em_forest", "proportion")
LABELS = ("winner", "shares", "counts")


def digits(seed: int) -> tuple[Bags, Bags]:
    """Training bags and test bags, with truth."""
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng([seed, 1])
    test, rest = np.split(rng.permutation(len(y)), [int(0.3 * len(y))])
    sizes = np.clip(rng.lognormal(2.6, 0.9, 70), 1, 60).astype(int)
    bags = [rest[rows] for rows in make_bags(y[rest], 70, sizes, 5, rng)[0]]
    rows = np.concatenate([*bags, test])
    ids = np.repeat(np.arange(len(bags) + 1), [*map(len, bags), len(test)])
    table = {"bag": ids, "truth": y[rows], **{f"pixel {k}": x[rows, k] for k in range(64)}}
    dataset = read(table, ColumnRoles(bag="bag", truth="truth"), classes=list(map(str, range(10))), need_labels=False)
    return prepare(dataset, np.arange(len(bags)), np.array([len(bags)]))


def natural(task: str, seed: int, folder: Path | None, max_bags: int) -> tuple[Bags, Bags]:
    dataset = read_task(task, folder)
    split = split_task(dataset.bags, seed, max_bags)
    return prepare(dataset, np.union1d(split.train, split.valid), split.test)


def prepare(dataset: BagDataset, available: np.ndarray, test: np.ndarray) -> tuple[Bags, Bags]:
    bags = dataset.to_bags(dataset.fit_preprocessor(available))
    return bags.take(available), bags.take(test)


def label(bags: Bags, kind: str) -> Bags:
    """The bags, blind, with what is known of their classes: the winner (ties shared), the shares, or the counts."""
    assert bags.truth is not None
    votes = bags.segments().sum(torch.nn.functional.one_hot(bags.truth, len(bags.classes)).double())
    won = (votes == votes.amax(1, keepdim=True)).float()
    target = won if kind == "winner" else votes.float()
    target = target / target.sum(1, keepdim=True)
    return replace(bags.blind(), target=target, votes=votes if kind == "counts" else None)


def run(task: str, seed: int, folder: Path | None, max_bags: int) -> dict[str, Any]:
    available, test = digits(seed) if task == "digits" else natural(task, seed, folder, max_bags)
    truth = test.truth.numpy()
    score = lambda p: float((np.asarray(p).argmax(1) == truth).mean())  # noqa: E731
    accuracy, seconds = dict[str, float](), dict[str, float]()

    def fit(name: str, bags: Bags, key: str) -> None:
        part = train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
        method, started = build_methods(name, bags)[0], time.process_time()
        fitted = method.fit(bags.take(part.train), bags.take(part.valid), seed=seed)
        seconds[key] = round(time.process_time() - started, 1)
        accuracy[key] = score(estimator_probabilities(fitted.estimator, test.blind())[0])

    for kind in LABELS:
        for name in METHODS:
            fit(name, label(available, kind), f"{name}, {kind}")
    fit("supervised", replace(label(available, "winner"), known=available.truth), "twin network")
    x, y = (to_feature_array(bags.pool.take(bags.index)) for bags in (available, test))
    forest = RandomForestClassifier(200, min_samples_leaf=3, random_state=seed).fit(x, available.truth.numpy())
    accuracy["twin forest"] = float((forest.predict(y) == truth).mean())
    commonest = np.bincount(available.truth.numpy()).argmax()
    accuracy["commonest class"] = float((truth == commonest).mean())
    return {"task": task, "seed": seed, "bags": len(available), "accuracy": accuracy, "processor seconds": seconds}


def markdown(runs: list[dict[str, Any]]) -> str:
    """Mean accuracy and its standard error over seeds; counts less winners, paired."""
    lines = [
        "| task (seeds) | method | winners | shares as soft labels | counts | counts − winners | twin |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(r["task"] for r in runs):
        scores = [r["accuracy"] for r in runs if r["task"] == task]
        column = lambda key, scores=scores: np.array([s[key] for s in scores])  # noqa: E731
        cell = lambda x: f"{x.mean():.3f} ± {stats.sem(x) if len(x) > 1 else 0:.3f}"  # noqa: E731
        twin = max(column("twin network"), column("twin forest"), key=np.mean)
        for name in METHODS:
            values = [column(f"{name}, {kind}") for kind in LABELS]
            cells = [*map(cell, values), cell(values[2] - values[0]), cell(twin)]
            lines.append(f"| {task} ({len(scores)}) | {name} | " + " | ".join(cells).replace("-", "−") + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("counts.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--task", default="digits", help="digits, or a task of headcount benchmark")
    parser.add_argument("--data", type=Path, help="the folder with the files of the task; by default they are downloaded")
    parser.add_argument("--bags", type=int, default=120, help="bags drawn from a natural task")
    args = parser.parse_args()
    warnings.simplefilter("ignore", HeadcountWarning)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    for seed in range(args.seeds):
        if any((r["task"], r["seed"]) == (args.task, seed) for r in runs):
            continue
        runs.append(run(args.task, seed, args.data, args.bags))
        body = {"command": "python benchmarks/counts.py", "threads": torch.get_num_threads(), "runs": runs}
        atomic_write(args.out, lambda f, body=body: f.write(json.dumps(body, indent=1).encode()))
        print(json.dumps(runs[-1]), flush=True)
    print(markdown(runs))


if __name__ == "__main__":
    main()

"""What a user gets without options, beside simple rivals, on eight data sets that are generated or ship with packages.

    python benchmarks/defaults.py --out benchmarks/results/defaults.json      # about 100 CPU-minutes; finished runs are kept

``fit`` is ``headcount.fit(dataset)`` and ``estimator`` is ``MajorityClassifier()``. The rivals take the bag's label for the label
of each instance: a random forest, histogram gradient boosting, and the commonest label. ``supervised`` is the better of the two
classifiers trained with the class of every instance of the bags. All are scored on instances that are in no bag; only
``supervised`` and the scores see instance classes.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from sklearn.datasets import load_breast_cancer, load_digits, make_classification
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.metrics import balanced_accuracy_score

from headcount import MajorityClassifier, fit, read
from headcount.errors import HeadcountWarning
from headcount.io import atomic_write

PACKAGES = ("numpy", "scipy.stats", "sklearn.linear_model", "torch", "matplotlib.pyplot", "pyarrow")
RIVALS = ("forest", "boosting", "commonest")


def generate(n: int, **options: Any) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """A function of the seed that makes ``n`` instances."""
    return lambda seed: make_classification(n, random_state=seed, **options)


def sentences(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Sentences of docstrings as 50 columns of latent semantics; their class is the package."""
    texts, y = list[str](), list[int]()
    for k, name in enumerate(PACKAGES):
        package = importlib.import_module(name)
        docs = (inspect.getdoc(getattr(package, attribute, None)) or "" for attribute in dir(package))
        found = {" ".join(s.split()) for doc in docs for s in re.split(r"(?<=\.)\s+", doc)}
        kept = sorted(s for s in found if 40 <= len(s) <= 200 and ">>>" not in s)[:600]
        texts, y = texts + kept, y + [k] * len(kept)
    features = TfidfVectorizer(sublinear_tf=True, min_df=2).fit_transform(texts)
    return TruncatedSVD(50, random_state=seed).fit_transform(features), np.array(y)


def digit_images(seed: int) -> tuple[np.ndarray, np.ndarray]:
    digits = load_digits()
    return (digits.images[..., None] * 15.9).astype(np.uint8), digits.target


# name: instances, number of bags, their size (0: from 1 to 60), concentration of their class shares around the overall ones
TASKS: dict[str, tuple[Callable[[int], tuple[np.ndarray, np.ndarray]], int, int, float]] = {
    "unequal classes": (generate(4500, n_features=20, n_informative=10, n_classes=5, weights=[0.55, 0.25, 0.1, 0.06, 0.04], class_sep=1.2), 150, 20, 4),
    "26 classes": (generate(4000, n_features=16, n_informative=12, n_redundant=0, n_classes=26, n_clusters_per_class=1, class_sep=1.5), 250, 10, 4),
    "overlapping classes": (generate(4000, n_features=36, n_informative=6, n_classes=4, class_sep=0.7), 150, 17, 4),
    "many features": (generate(2500, n_features=200, n_informative=20, n_redundant=20, n_classes=3), 120, 12, 4),
    "few bags": (lambda seed: load_breast_cancer(return_X_y=True), 25, 14, 2),
    "ragged bags": (lambda seed: load_digits(return_X_y=True), 70, 0, 5),
    "text": (sentences, 150, 12, 4),
    "images": (digit_images, 70, 16, 5),
}  # fmt: skip


def make_bags(
    y: np.ndarray, n_bags: int, sizes: np.ndarray, concentration: float, rng: np.random.Generator
) -> tuple[list[np.ndarray], list[int]]:
    """Bags whose class shares vary around those of ``y``, no instance twice; the label is the most frequent class."""
    classes = int(y.max()) + 1
    prior = np.bincount(y, minlength=classes) / len(y)
    left = [list(rng.permutation(np.flatnonzero(y == k))) for k in range(classes)]
    bags, labels = [], []
    for size in sizes[:n_bags]:
        share = rng.dirichlet(np.maximum(concentration * prior, 1e-3))
        count = np.minimum(rng.multinomial(size, share), [len(rows) for rows in left])
        if count.sum():
            labels.append(int(rng.choice(np.flatnonzero(count == count.max()))))
            bags.append(rng.permutation([left[k].pop() for k in range(classes) for _ in range(count[k])]))
    return bags, labels


def seconds_of(line: str) -> float:
    """Of a plan's line, such as "about 1.7 minutes: ..."."""
    number, unit = line.split()[1:3]
    return float(number) * {"s": 1, "m": 60, "h": 3600}[unit[0]]


def run(task: str, seed: int) -> dict[str, Any]:
    load, n_bags, size, concentration = TASKS[task]
    x, y = load(seed)
    x = x if x.dtype == np.uint8 else x.astype(np.float32)
    rng = np.random.default_rng([seed, *task.encode()])
    order = rng.permutation(len(y))
    test, rest = np.split(order, [int(0.3 * len(y))])
    sizes = np.full(n_bags, size) if size else np.clip(rng.lognormal(2.6, 0.9, n_bags), 1, 60).astype(int)
    bags, labels = make_bags(y[rest], n_bags, sizes, concentration, rng)
    rows = rest[np.concatenate(bags)]
    naive = np.repeat(labels, [len(b) for b in bags])
    flat, predictions, seconds = x.reshape(len(x), -1), {}, {}
    for name, classifier in {
        "forest": RandomForestClassifier(random_state=seed, n_jobs=torch.get_num_threads()),
        "boosting": HistGradientBoostingClassifier(random_state=seed),
    }.items():
        for target, prefix in ((naive, ""), (y[rows], "supervised ")):
            started = time.perf_counter()
            predictions[prefix + name] = classifier.fit(flat[rows], target).predict(flat[test])
            seconds[prefix + name] = time.perf_counter() - started
    predictions["commonest"] = np.full(len(test), np.bincount(labels).argmax())
    started = time.perf_counter()
    estimator = MajorityClassifier(random_state=seed).fit(
        x[rows], naive, bags=np.repeat(np.arange(len(bags)), [len(b) for b in bags])
    )
    seconds["estimator"] = time.perf_counter() - started
    predictions["estimator"] = estimator.predict(x[test])
    kind = "images" if x.ndim == 4 else "features"
    dataset = read({kind: x[rows], "sizes": np.array([len(b) for b in bags]), "labels": np.array([str(k) for k in labels])})
    started, processor, lines = time.perf_counter(), time.process_time(), list[str]()
    model = fit(dataset, seed=seed, log=lines.append)
    seconds |= {"fit": time.perf_counter() - started, "fit (processor)": time.process_time() - processor}
    new = read({kind: x[test], "sizes": np.ones(len(test), int)}, classes=model.classes, need_labels=False)
    p = model.predict(new.to_bags(model.preprocessor)).instance_probabilities
    predictions["fit"] = np.array(model.classes, int)[p.argmax(1)]
    accuracy = {name: float((predicted == y[test]).mean()) for name, predicted in predictions.items()}
    accuracy["supervised"] = max(accuracy.pop("supervised forest"), accuracy.pop("supervised boosting"))
    with warnings.catch_warnings(action="ignore"):  # classes that are never predicted
        balanced = {name: float(balanced_accuracy_score(y[test], predictions[name])) for name in ("fit", "estimator", *RIVALS)}
    return {
        "task": task, "seed": seed, "bags": len(bags), "instances": len(rows), "classes": int(y.max()) + 1,
        "share": float((y[rows] == naive).mean()), "accuracy": accuracy, "balanced_accuracy": balanced,
        "kept": {"fit": model.metadata["method"]["name"], "estimator": estimator.method_},
        "seconds": {name: round(value, 2) for name, value in seconds.items()}, "estimated seconds": seconds_of(lines[0]),
    }  # fmt: skip


def markdown(runs: list[dict[str, Any]]) -> str:
    """Mean accuracies (balanced accuracies), how far the defaults are from the better rival, with the standard error of the paired
    difference, and where they lose."""
    names = ("fit", "estimator", *RIVALS, "supervised")
    header = ["task (seeds)", *names, "fit − rival", "estimator − rival", "kept by fit", "CPU seconds of fit"]
    lines, losses = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"], list[str]()
    for task in [task for task in TASKS if any(r["task"] == task for r in runs)]:
        group = [r for r in runs if r["task"] == task]
        values = {name: np.array([r["accuracy"][name] for r in group]) for name in names}
        rival = max(RIVALS, key=lambda name: values[name].mean())
        balanced = {name: np.mean([r["balanced_accuracy"].get(name, np.nan) for r in group]) for name in names}
        cells = [f"{values[n].mean():.3f}" + ("" if np.isnan(balanced[n]) else f" ({balanced[n]:.2f})") for n in names]
        for name in ("fit", "estimator"):
            difference = values[name] - values[rival]
            error = f" ± {stats.sem(difference):.3f}" if len(group) > 1 else ""
            cells.append(f"{difference.mean():+.3f}{error}".replace("-", "−"))
            if difference.mean() < 0:
                certain = len(group) > 1 and stats.ttest_rel(values[name], values[rival], alternative="less").pvalue < 0.05
                losses.append(f"{task}, {name} against {rival} ({'significantly' if certain else 'not significantly'})")
        kept = [r["kept"]["fit"] for r in group]
        cells.append(", ".join(f"{name} {kept.count(name)}" for name in dict.fromkeys(kept)))
        cells.append(f"{np.mean([r['seconds']['fit (processor)'] for r in group]):.0f}")
        lines.append(f"| {task} ({len(group)}) | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", f"Where the defaults lose: {'; '.join(losses) or 'nowhere'}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("defaults.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default=",".join(TASKS))
    args = parser.parse_args()
    warnings.simplefilter("ignore", HeadcountWarning)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    for seed in range(args.seeds):
        for task in args.tasks.split(","):
            if any((r["task"], r["seed"]) == (task, seed) for r in runs):
                continue
            runs.append(run(task, seed))
            body = {"command": "python benchmarks/defaults.py", "threads": torch.get_num_threads(), "runs": runs}
            atomic_write(args.out, lambda f, body=body: f.write(json.dumps(body, indent=1).encode()))
            print(
                json.dumps({k: runs[-1][k] for k in ("task", "seed", "accuracy", "kept", "seconds", "estimated seconds")}),
                flush=True,
            )
    print(markdown(runs))


if __name__ == "__main__":
    main()

"""How far ``headcount check`` can be believed: the range it gives before training beside what training then reaches.

    OMP_NUM_THREADS=1 python benchmarks/check.py        # about half an hour of one core; trained models' scores are kept

Digits, wine, breast cancer and iris (they ship with scikit-learn), six overlapping Gaussians ("blobs"), four noisy rings;
digits two by two as five classes ("pairs") and scikit-learn's made-up clusters, two for each of four classes.
Of each table 30 % are held out; the others are put into bags, none twice, with the paper's shares (Various, Small, Large).
Three more cases: a class that never wins, a fifth of the labels wrong, and random labels. ``check`` sees bags and labels.
A network under the tilt, the first that ``headcount fit`` tries, is then trained on the same bags and evaluated on the held-out
instances; their truth, and that of the bags' shares, is used here and nowhere else. The constants of selection/learnability.py were
chosen on all tables but HELD, which were made and run once when everything was chosen.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
import torch

from headcount.bags import Bags, Pool, splits
from headcount.datasets import share_sampler as laws
from headcount.io import atomic_write
from headcount.readers import BagDataset, read
from headcount.selection import cross_validation
from headcount.selection.advice import signal_from_share
from headcount.selection.check import check
from headcount.selection.methods import build_methods

HELD = ("pairs", "clusters")
# the size of a bag, and how many bags
DATA: dict[str, tuple[int, tuple[int, ...]]] = {
    "digits": (12, (20, 40, 70)), "wine": (5, (8, 16)), "cancer": (8, (10, 30)), "iris": (5, (8, 14)),
    "blobs": (24, (15, 60, 200)), "rings": (16, (15, 60, 200)), "pairs": (12, (15, 40, 70)), "clusters": (16, (15, 60, 200)),
}  # fmt: skip
WORTH = (0, 1, 2, 4, 8, 1000)
SCENARIOS = ("various", "small", "large")
_ALSO = ("digits", "blobs", "rings", "pairs", "clusters")
MORE = {"never": _ALSO, "noisy": _ALSO, "lot": tuple(DATA)}


def table(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([seed, 6])
    if name == "blobs":
        y = rng.integers(0, 6, 12_000)
        return (rng.normal(size=(6, 8))[y] + rng.normal(size=(len(y), 8))).astype(np.float32), y
    if name == "rings":
        y = rng.integers(0, 4, 12_000)
        far, angle = 1 + y + rng.normal(scale=0.3, size=len(y)), rng.uniform(0, 2 * np.pi, len(y))
        noise = rng.normal(size=(len(y), 2))
        return np.column_stack([far * np.cos(angle), far * np.sin(angle), noise]).astype(np.float32), y
    if name == "clusters":
        return _clusters(seed)
    load = {
        "digits": sklearn.datasets.load_digits, "pairs": sklearn.datasets.load_digits, "wine": sklearn.datasets.load_wine,
        "cancer": sklearn.datasets.load_breast_cancer, "iris": sklearn.datasets.load_iris,
    }[name]  # fmt: skip
    x, y = load(return_X_y=True)
    return x.astype(np.float32), y // 2 if name == "pairs" else y


def _clusters(seed: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = sklearn.datasets.make_classification(
        12_000, 12, n_informative=6, n_redundant=2, n_classes=4, n_clusters_per_class=2, class_sep=1.5, random_state=seed
    )
    return x.astype(np.float32), y


def draw_bags(y: np.ndarray, scenario: str, bags: int, size: int, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Instances of this number of bags, none used twice, and their labels."""
    classes = int(y.max()) + 1
    law = scenario if scenario in SCENARIOS else "various"
    left = [list(rng.permutation(np.flatnonzero(y == k))) for k in range(classes)]
    rows, labels = [], []
    for share in laws.sample_shares(law, classes, 20 * bags, rng):
        count = rng.multinomial(size, rng.permutation(share))
        won = int(count.argmax())
        if any(n > len(k) for n, k in zip(count, left, strict=True)) or (scenario == "never" and won == 0):
            continue
        rows.append([left[k].pop() for k, n in enumerate(count) for _ in range(n)])
        labels.append(won)
        if len(rows) == bags:
            break
    label = np.array(labels)
    if scenario == "noisy":
        wrong = rng.random(len(label)) < 0.2
        label = np.where(wrong, (label + rng.integers(1, classes, len(label))) % classes, label)
    return np.array(rows), rng.permutation(label) if scenario == "lot" else label


def case(name: str, scenario: str, bags: int, seed: int) -> tuple[BagDataset, np.ndarray, np.ndarray, np.ndarray]:
    """A dataset of bags, the truth of their instances, and held-out instances with theirs."""
    x, y = table(name, seed)
    rng = np.random.default_rng([seed, bags, *f"{name} {scenario}".encode()])
    order = rng.permutation(len(y))
    test, rest = order[: int(0.3 * len(y))], order[int(0.3 * len(y)) :]
    rows, labels = draw_bags(y[rest], scenario, bags, DATA[name][0], rng)
    rows = rest[rows.ravel()]
    dataset = read(
        {"features": x[rows], "sizes": np.full(len(labels), DATA[name][0]), "labels": labels.astype(str),
         "classes": np.arange(int(y.max()) + 1).astype(str)}
    )  # fmt: skip
    return dataset, y[rows], x[test], y[test]


def trained_accuracy(dataset: BagDataset, x: np.ndarray, y: np.ndarray, seed: int) -> float:
    """The instance accuracy that a network under the tilt reaches."""
    bags = dataset.bags
    split = splits.train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
    train, valid, _, _ = cross_validation.prepare_split(dataset, split)
    estimator = build_methods("tilt", train)[0].fit(train, valid, seed=seed).estimator
    test = Bags.of(Pool(x), sizes=[len(x)], labels=[0], classes=bags.classes)
    return float((cross_validation.predict_estimator(estimator, test, "cpu")[0].argmax(1).numpy() == y).mean())


def checked(dataset: BagDataset, truth: np.ndarray, seed: int) -> dict[str, Any]:
    """The result of the check, beside the true shares."""
    started = time.process_time()
    result = check(dataset, seed).to_json()
    seconds = time.process_time() - started
    bags = dataset.bags
    label = bags.label[bags.bag].numpy()
    true = {c: float((truth[label == k] == k).mean()) for k, c in enumerate(bags.classes) if (label == k).any()}
    estimated = result["shares"]["classes"] if result["shares"] else {}
    ends = {c: [estimated[c][k] for k in ("share", "low", "high")] if estimated else [] for c in true}
    return {
        "verdict": result["verdict"], "low": result["accuracy"]["low"], "high": result["accuracy"]["high"],
        "gain": result["gain"], "baseline": result["baseline"], "more": sum(result["more_bags"].values()),
        "shares": {c: [round(t, 4), *ends[c]] for c, t in true.items()}, "seconds": round(seconds, 2),
    }  # fmt: skip


def summary(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Coverage and width, over the tables that chose the constants and over the others."""
    parts: dict[str, Any] = {}
    for part, held in (("tuned on", False), ("held out", True)):
        rows = [r for k, r in runs.items() if (k.split("/")[0] in HELD) is held and r["scenario"] != "lot"]
        inside = [r["low"] <= r["trained"] <= r["high"] for r in rows]
        shares = [s[2] <= s[0] <= s[3] for r in rows for s in r["shares"].values() if len(s) > 1]
        parts[part] = {
            "cases": len(rows),
            "accuracy_inside": round(float(np.mean(inside)), 3),
            "below": round(float(np.mean([r["trained"] < r["low"] for r in rows])), 3),
            "above": round(float(np.mean([r["trained"] > r["high"] for r in rows])), 3),
            "width": round(float(np.mean([r["high"] - r["low"] for r in rows])), 3),
            "share_inside": round(float(np.mean(shares)), 3),
            "verdicts": {
                v: [len(own), round(float(np.mean(own)), 3), round(float(np.min(own)), 3), round(float(np.max(own)), 3)]
                for v in ("yes", "perhaps", "no")
                if (own := [r["trained"] for r in rows if r["verdict"] == v])
            },
        }
    parts["by worth"] = worths(runs)
    lot = [r for r in runs.values() if r["scenario"] == "lot"]
    words = ("yes", "perhaps", "no")
    parts["labels by lot"] = {v: sum(r["verdict"] == v for r in lot) for v in words}
    took = [r["seconds"] for r in runs.values()]
    parts["processor seconds"] = {"median": round(float(np.median(took)), 1), "most": round(float(np.max(took)), 1)}
    return parts


def worths(runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """How far trained models stay behind the best reached on their table, by what a class's bags are worth (bags times the
    squared signal strength of their true shares): the source of SUFFICIENT_BAGS in selection/learnability.py."""
    usual = {k: r for k, r in runs.items() if r["scenario"] in SCENARIOS}
    best: dict[str, float] = {}
    for key, row in usual.items():
        table = key.split("/")[0]
        best[table] = max(best.get(table, 0.0), row["trained"])
    gaps: dict[str, list[float]] = {}
    for key, row in usual.items():
        classes = len(row["shares"])
        signals = [signal_from_share(s[0], classes) for s in row["shares"].values()]
        worth = row["bags"] / classes * float(np.mean(signals)) ** 2
        interval = next(f"{low} to {high}" for low, high in pairwise(WORTH) if worth < high)
        gaps.setdefault(interval, []).append(best[key.split("/")[0]] - row["trained"])
    return {k: {"cases": len(v), "behind": round(float(np.mean(v)), 3)} for k, v in sorted(gaps.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "check.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = json.loads(args.out.read_text())["runs"] if args.out.exists() else {}
    runs: dict[str, dict[str, Any]] = {}
    for seed in range(args.seeds):
        for name, (_, numbers) in DATA.items():
            scenarios = [s for s in SCENARIOS if (name, s) != ("cancer", "small")]
            for scenario in [*scenarios, *(s for s, names in MORE.items() if name in names)]:
                for bags in numbers if scenario in SCENARIOS else numbers[1:2]:
                    key = f"{name}/{scenario}/{bags}/{seed}"
                    dataset, truth, x, y = case(name, scenario, bags, seed)
                    row = {"scenario": scenario, "bags": len(dataset.bags), **checked(dataset, truth, seed)}
                    if scenario != "lot":
                        row["trained"] = kept.get(key, {}).get("trained") or trained_accuracy(dataset, x, y, seed)
                    runs[key] = row
                    print(key, {k: row.get(k) for k in ("low", "trained", "high", "verdict")}, flush=True)
                    whole = {"seeds": args.seeds, "summary": {}, "runs": kept | runs}
                    atomic_write(args.out, lambda f, whole=whole: f.write((json.dumps(whole) + "\n").encode()))
    whole = {"seeds": args.seeds, "torch": torch.__version__, "summary": summary(runs), "runs": runs}
    atomic_write(args.out, lambda f: f.write((json.dumps(whole, indent=1) + "\n").encode()))
    print(json.dumps(whole["summary"], indent=1))


if __name__ == "__main__":
    main()

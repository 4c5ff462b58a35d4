"""Real tables as bags: the model that ``headcount fit`` selects and every method it tried, scored on held-out instances.

    python benchmarks/tables.py --out benchmarks/results/tables.json      # about 40 CPU-minutes; finished runs are kept

Digits, wine and breast cancer (they ship with scikit-learn), five seeds. Of each table 30 % of the instances are held out; the
others are distributed over bags, none twice, whose majority class is strictly the largest. The methods see bags and their labels.
``wide``: the majority has a third to nine tenths of a bag. ``close``: it is barely the largest. Instance labels are used only for
the final scores; a forest trained with every class serves as the upper bound.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import RandomForestClassifier

from headcount.bags import splits
from headcount.io import atomic_write
from headcount.readers import BagDataset, read
from headcount.selection import cross_validation
from headcount.selection.fit import fit
from headcount.selection.methods import BASELINES, build_methods

TABLES = {"digits": (load_digits, 12), "wine": (load_wine, 5), "breast cancer": (load_breast_cancer, 7)}
MAJORITIES = {"wide": (0.35, 0.9), "close": (0.2, 0.5)}
FOLDS = 4


def make_bags(y: np.ndarray, size: int, low: float, high: float, rng: np.random.Generator) -> tuple[list[Any], list[int]]:
    """Bags of ``size`` instances, none used twice, until a class is used up; the label's class is strictly the largest."""
    classes = int(y.max()) + 1
    left = [list(rng.permutation(np.flatnonzero(y == k))) for k in range(classes)]
    bags, labels, failed = [], [], 0
    while sum(map(len, left)) >= size and failed < 500:
        available = np.array([len(k) for k in left], dtype=float)
        c = int(rng.choice(classes, p=available / available.sum()))
        n_majority = max(round(size * rng.uniform(max(low, 1 / classes), high)), size // classes + 1)
        others = np.where(np.arange(classes) == c, 0, available)
        count = rng.multinomial(size - n_majority, others / others.sum()) if others.sum() else np.full(classes, size)
        count[c] = n_majority
        failed += 1
        if (count == count.max()).sum() > 1 or count.argmax() != c or (count > available).any():
            continue
        failed = 0
        bags.append(rng.permutation([left[k].pop() for k in range(classes) for _ in range(count[k])]))
        labels.append(c)
    return bags, labels


def make_dataset(table: str, majority: str, seed: int) -> tuple[BagDataset, np.ndarray, np.ndarray, float]:
    """The bags, the held-out instances and their classes, and the true mean share of the majority."""
    load, size = TABLES[table]
    x, y = load(return_X_y=True)
    rng = np.random.default_rng([seed, *table.encode(), *majority.encode()])
    order = rng.permutation(len(y))
    test, rest = order[: int(0.3 * len(y))], order[int(0.3 * len(y)) :]
    bags, labels = make_bags(y[rest], size, *MAJORITIES[majority], rng)
    rows = rest[np.concatenate(bags)]
    share = float(np.mean(y[rows] == np.repeat(labels, size)))
    dataset = read(
        {"features": x[rows].astype(np.float32), "sizes": np.array([size] * len(bags)),
         "labels": np.array([str(c) for c in labels]), "classes": np.array([str(c) for c in range(int(y.max()) + 1)])}
    )  # fmt: skip
    return dataset, x[test].astype(np.float32), y[test], share


def run_table(table: str, majority: str, seed: int) -> dict[str, Any]:
    """One fit, the other methods trained on the same bags, and all of them scored on held-out instances."""
    dataset, x, y, share = make_dataset(table, majority, seed)
    start = time.perf_counter()
    fitted = fit(dataset, folds=FOLDS, seed=seed, device="cpu")
    seconds = time.perf_counter() - start
    losses = {c["name"]: c["loss"] for c in fitted.metadata["methods"]}
    selected = fitted.metadata["method"]["name"]
    new = read({"features": x, "sizes": np.ones(len(x), int)}, classes=fitted.classes, need_labels=False)
    bags = dataset.bags.blind()
    split = splits.train_valid_split(bags, np.arange(len(bags)), np.zeros(0, int), seed)
    train, valid, _, preprocessor = cross_validation.prepare_split(dataset, split)
    accuracy = {}
    for c in build_methods("auto", train):
        estimator = fitted.estimator if c.name == selected else c.fit(train, valid, seed=seed).estimator
        logits = cross_validation.predict_estimator(estimator, new.to_bags(preprocessor), "cpu")[0]
        accuracy[c.name] = float((logits.argmax(1).numpy() == y).mean())
    bound = RandomForestClassifier(100, min_samples_leaf=3, random_state=seed)
    load, _ = TABLES[table]
    all_x, all_y = load(return_X_y=True)
    held_out = {tuple(row) for row in x.tolist()}
    rest = np.array([tuple(row) not in held_out for row in all_x.astype(np.float32).tolist()])
    bound.fit(all_x[rest].astype(np.float32), all_y[rest])
    return {
        "table": table, "majority": majority, "seed": seed, "bags": len(bags), "share": share,
        "estimated_share": float(fitted.transition.share.mean()), "kept": selected, "loss": losses, "accuracy": accuracy,
        "bag_accuracy": fitted.metadata["scores"]["bag_accuracy"], "told": float((bound.predict(x) == y).mean()),
        "seconds": round(seconds, 1),
    }  # fmt: skip


def markdown(runs: list[dict[str, Any]]) -> str:
    """Mean and standard deviation over seeds, and a comment where ours is not the best."""
    names = list(runs[0]["accuracy"])
    lines = ["| table | majority (share) | fit's choice | " + " | ".join(names) + " | trained with every class |"]
    lines.append("|---" * (len(names) + 4) + "|")
    comments = []
    for table, majority in dict.fromkeys((r["table"], r["majority"]) for r in runs):
        group = [r for r in runs if (r["table"], r["majority"]) == (table, majority)]
        chosen = np.array([r["accuracy"][r["kept"]] for r in group])
        columns = [chosen, *(np.array([r["accuracy"][n] for r in group]) for n in names), np.array([r["told"] for r in group])]
        cells = [f"{v.mean():.3f} ± {v.std():.3f}" for v in columns]
        share = np.mean([r["share"] for r in group])
        lines.append(f"| {table} | {majority} ({share:.2f}) | " + " | ".join(cells) + " |")
        comments += comment(table, majority, chosen, dict(zip(names, columns[1:-1], strict=True)), group)
    return "\n".join([*lines, "", *comments])


def comment(
    table: str, majority: str, chosen: np.ndarray, each: dict[str, np.ndarray], group: list[dict[str, Any]]
) -> list[str]:
    title = f"{table}, {majority}"
    best = max(each, key=lambda n: each[n].mean())
    base = max((n for n in each if n in BASELINES), key=lambda n: each[n].mean())
    kept = ", ".join(f"{n} {sum(r['kept'] == n for r in group)}x" for n in dict.fromkeys(r["kept"] for r in group))
    lines = [f"* {title}: kept {kept}; {chosen.mean() - each[base].mean():+.3f} against the better baseline ({base})."]
    if (lost := int((chosen < each[base]).sum())) > 0:
        lines.append(f"  It loses to {base} in {lost} of {len(group)} seeds.")
    if each[best].mean() - chosen.mean() > 0.005:
        lines.append(f"  Always taking {best} would have been {each[best].mean() - chosen.mean():.3f} better.")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("tables.json"))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tables", default=",".join(TABLES))
    parser.add_argument("--majorities", default=",".join(MAJORITIES))
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = json.loads(args.out.read_text())["runs"] if args.out.exists() else []
    done = {(r["table"], r["majority"], r["seed"]) for r in runs}
    for majority in args.majorities.split(","):
        for table in args.tables.split(","):
            for seed in range(args.seeds):
                if (table, majority, seed) in done:
                    continue
                runs.append(run_table(table, majority, seed))
                body = {"command": "python benchmarks/tables.py", "folds": FOLDS, "runs": runs}
                atomic_write(args.out, lambda f, body=body: f.write(json.dumps(body, indent=1).encode()))
                print({k: v for k, v in runs[-1].items() if k != "loss"}, flush=True)
    print(markdown(runs))


if __name__ == "__main__":
    main()

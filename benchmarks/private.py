"""Labels noised by randomised response: the instance accuracy when the likelihood knows the noise, and when it does not.

    python benchmarks/private.py --out benchmarks/results/private.json      # about 8 CPU-minutes; finished runs are kept

150 bags of twenty of scikit-learn's digits: eight of one class and twelve of any, from the first 1,200. Each label is replaced with
probability P by one of the ten classes at random. The last 597 digits, which are in no bag, are the test.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from headcount import read
from headcount.bags.splits import train_valid_split
from headcount.io import atomic_write
from headcount.majority.label_noise import randomize_labels
from headcount.models.predictions import estimator_probabilities
from headcount.selection.cross_validation import prepare_split
from headcount.selection.methods import build_methods

METHODS, NOISE, SEEDS = ("tilt", "em_forest", "count"), (0.0, 0.4), 5


def run(method: str, noise: float, known: bool, seed: int) -> dict[str, Any]:
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(seed)
    members = [np.flatnonzero(y[:1200] == k) for k in range(10)]
    rows = np.array([[*rng.choice(members[b % 10], 8), *rng.integers(0, 1200, 12)] for b in range(150)])
    winners = np.array([np.bincount(y[r]).argmax() for r in rows])
    labels = randomize_labels(winners, noise, 10, seed)
    columns = {"features": x[rows.ravel()].astype(np.float32), "sizes": np.full(150, 20), "labels": labels}
    dataset = read(columns, classes=[str(k) for k in range(10)], label_noise=noise if known else 0.0)
    split = train_valid_split(dataset.bags, np.arange(150), np.zeros(0, int), seed)
    train, valid, _, preprocessor = prepare_split(dataset, split)
    fitted = build_methods(method, train)[0].fit(train, valid, seed=seed, device=torch.device("cpu"))
    test = read({"features": x[1200:].astype(np.float32), "sizes": np.ones(597, int)}, classes=train.classes, need_labels=False)
    p, _ = estimator_probabilities(fitted.estimator, test.to_bags(preprocessor))
    return {
        "method": method, "noise": noise, "known": known, "seed": seed, "wrong labels": float((labels != winners).mean()),
        "accuracy": float((p.argmax(1).numpy() == y[1200:]).mean()), "share": float((y[rows] == winners[:, None]).mean()),
        "estimated share": None if fitted.transition is None else float(fitted.transition.share.mean()),
    }  # fmt: skip


def markdown(runs: list[dict[str, Any]]) -> str:
    """Means and standard deviations over the seeds."""
    lines = ["| P | wrong labels | " + " | ".join(f"{m}, P known | {m}, P not known" for m in METHODS) + " |", "|---" * 8 + "|"]
    for noise in NOISE:
        cells = [f"{noise:g}", f"{np.mean([r['wrong labels'] for r in runs if r['noise'] == noise]):.2f}"]
        for method in METHODS:
            for known in (True, False):
                group = [r for r in runs if (r["method"], r["noise"], r["known"]) == (method, noise, known)]
                values = [r["accuracy"] for r in group]
                cells.append(f"{np.mean(values):.3f} ± {np.std(values):.3f}" if values else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    given = parser.parse_args()
    runs = json.loads(given.out.read_text()) if given.out.exists() else []
    for seed in range(given.seeds):
        for noise in NOISE:
            for method in METHODS:
                for known in (True, False) if noise else (True,):
                    key = {"method": method, "noise": noise, "known": known, "seed": seed}
                    if not any(key.items() <= r.items() for r in runs):
                        runs.append(run(**key))
                        atomic_write(given.out, lambda f: f.write(json.dumps(runs, indent=1).encode()))
                        print(runs[-1], flush=True)
    print(markdown(runs))


if __name__ == "__main__":
    main()

"""How often the intervals of bags' shares hold, how wide they are, and the size and power of the test of the assumption.

    python benchmarks/coverage.py shares --data FOLDER --out benchmarks/results/coverage.json
    python benchmarks/coverage.py test

``shares``: each method is fitted once to three quarters of at most 240 bags by their labels alone; every score is that of the other
quarter. *Labels* are the intervals of a model as fitted, *context* those of the shares in context without doubt (what models had
before), *known shares* those after ``headcount calibrate`` with half of the test bags, scored on the other half (20 random halves).
FOLDER holds the files of the tasks of ``headcount benchmark``; without it only the generated ones are run. The rule of the intervals
was chosen on simulations with other generators before this was run.
``test``: how often the test rejects at 5 %, in simulations where the assumption holds, and where features of a bag are shifted.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from headcount.bags.segments import Segments
from headcount.datasets.tasks import TASKS
from headcount.experiments.benchmark import read_task, run_method, split_task
from headcount.io import atomic_write
from headcount.majority.homogeneity import assess_homogeneity, prediction_scores
from headcount.majority.proportions import Proportions
from headcount.majority.share_intervals import calibrate_shares
from headcount.readers import BagDataset, read
from headcount.readers.columns import ColumnRoles

METHODS = ("logistic", "em_forest", "tilt")
LEVEL, HALVES = 0.9, 20


def voters(seed: int) -> BagDataset:
    """Those of docs/how-to/precincts.md, for seed 1: P(vote | columns) is the same everywhere, the columns differ by precinct."""
    rng = np.random.default_rng(seed)
    table: dict[str, list] = {name: [] for name in ("precinct", "county", "age", "income", "tenure", "vote", "winner")}
    parties = np.array(["Greens", "Union", "Labour"])
    for p in range(120):
        n = int(rng.integers(30, 80))
        age = rng.normal(rng.uniform(30, 65), 12, n).clip(18, 95)
        income = rng.lognormal(rng.uniform(10, 11), 0.4, n)
        renting = rng.random(n) < rng.uniform(0.2, 0.8)
        lean = np.stack([(50 - age) / 9, (age - 55) / 12 + (income - 40000) / 15000, 2.5 * renting - 0.5], 1)
        vote = (lean + rng.gumbel(size=(n, 3))).argmax(1)
        columns = {"precinct": [f"P{p:03}"] * n, "county": [f"county {p // 10}"] * n, "age": age.round().tolist()}
        columns |= {"income": income.round(-2).tolist(), "tenure": np.where(renting, "rents", "owns").tolist()}
        columns |= {"vote": parties[vote].tolist(), "winner": [str(parties[np.bincount(vote, minlength=3).argmax()])] * n}
        for name, values in columns.items():
            table[name] += values
    return read(table, ColumnRoles(bag="precinct", label="winner", group="county", truth="vote"))


def digits(seed: int, effect: float = 0.5) -> BagDataset:
    """Handwritten digits as 12 principal components, every bag shifted by a random vector: as different scanners would."""
    rng, (x, y) = np.random.default_rng(seed), load_digits(return_X_y=True)
    x = (x - x.mean(0)) / 16
    x = x @ np.linalg.svd(x, full_matrices=False)[2][:12].T
    features, truth, bag, labels = [], [], [], []
    for b in range(160):
        drawn = rng.choice(10, 15, p=rng.dirichlet(np.full(10, 0.2)))
        rows = [rng.choice(np.flatnonzero(y == k)) for k in drawn]
        features.append(x[rows] + effect * rng.normal(size=12))
        truth.append(drawn)
        bag += [b] * 15
        labels.append(str(np.bincount(drawn).argmax()))
    arrays = {"features": np.concatenate(features).astype(np.float32), "truth": np.concatenate(truth).astype(str)}
    return read({**arrays, "bag": np.array(bag), "labels": np.array(labels)}, classes=tuple(map(str, range(10))))


def score(estimate: Proportions, true: torch.Tensor) -> list[float]:
    """The fraction of true shares inside, the mean width, the mean error, and by how much the majority's share is too large."""
    inside = (estimate.low - 1e-6 <= true) & (true <= estimate.high + 1e-6)
    lean = (estimate.share - true).gather(1, true.argmax(1, keepdim=True))
    values = inside.double(), estimate.high - estimate.low, (estimate.share - true).abs(), lean
    return [float(v.mean()) for v in values]


def measure(dataset: BagDataset, method: str, seed: int) -> dict[str, list[float]]:
    split = split_task(dataset.bags, seed)
    _, model = run_method(dataset, split, method, seed)
    assert model is not None
    test = dataset.to_bags(model.preprocessor).take(split.test)
    assert test.truth is not None
    true = test.segments().mean(torch.nn.functional.one_hot(test.truth, len(test.classes)).double()).float()

    def estimate(changed: object) -> Proportions:
        predictions = changed.predict(test.blind())  # ty: ignore[unresolved-attribute]
        return Proportions(*map(torch.from_numpy, (predictions.shares, predictions.shares_low, predictions.shares_high)))

    labels, halves = estimate(model), []
    for half in range(HALVES):
        order = torch.from_numpy(np.random.default_rng([seed, half]).permutation(len(true)))
        known, rest = order[: len(order) // 2], order[len(order) // 2 :]
        calibration = calibrate_shares(Proportions(*(a[known] for a in labels)), true[known], seed=half)
        halves.append(score(calibration.apply(Proportions(*(a[rest] for a in labels)), LEVEL), true[rest]))
    context = estimate(replace(model, share_model=None))
    return {"context": score(context, true), "labels": score(labels, true), "known shares": np.mean(halves, 0).tolist()}


def measure_all(data: Path | None, out: Path, seeds: int, methods: list[str], names: list[str]) -> None:
    results = json.loads(out.read_text()) if out.exists() else {}
    generated: dict[str, Callable[[int], BagDataset]] = {"voters": voters, "digits with bag effects": digits}
    for name in [*generated, *(TASKS if data else ())]:
        for method in methods if not names or name in names else ():
            for seed in range(1, seeds + 1):
                key = f"{name}/{method}/{seed}"
                if key not in results:
                    dataset = generated[name](seed) if name in generated else read_task(name, data)
                    results[key] = measure(dataset, method, seed)
                    atomic_write(out, lambda f: f.write(json.dumps(results, indent=1).encode()))
    print("| task | method | context: inside | width | labels: inside | width | bias | known shares: inside | width | bias |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name, method in dict.fromkeys(tuple(key.split("/")[:2]) for key in results):
        runs = [v for key, v in results.items() if key.startswith(f"{name}/{method}/")]
        context, labels, known = (np.mean([run[kind] for run in runs], 0) for kind in ("context", "labels", "known shares"))
        cells = [f"{v:.2f}" for v in (context[0], context[1], labels[0], labels[1])]
        cells += [f"{labels[3]:+.2f}", f"{known[0]:.2f}", f"{known[1]:.2f}", f"{known[3]:+.2f}"]
        print(f"| {name} | {method} | {' | '.join(cells)} |")


def simulate(
    seed: int, effect: float, bags: int, classes: int, apart: float
) -> tuple[torch.Tensor, torch.Tensor, Segments, torch.Tensor]:
    """Features (N, 6), P(y | x) up to a temperature, the bags, and their labels."""
    rng = np.random.default_rng(seed)
    sizes, centres = rng.integers(8, 40, bags), apart * rng.normal(size=(classes, 6)) / np.sqrt(6)
    y = np.concatenate([rng.choice(classes, n, p=rng.dirichlet([1.5] * classes)) for n in sizes])
    x = centres[y] + rng.normal(size=(len(y), 6)) + effect * rng.normal(size=(bags, 6)).repeat(sizes, 0)
    p = torch.tensor(-0.35 * ((x[:, None] - centres) ** 2).sum(2)).softmax(1)
    won = [np.bincount(part, minlength=classes).argmax() for part in np.split(y, sizes.cumsum()[:-1])]
    return (
        torch.tensor(x),
        p,
        Segments.from_sizes(sizes),
        torch.nn.functional.one_hot(torch.tensor(np.array(won)), classes).double(),
    )


def measure_test(simulations: int) -> None:
    print("| bags | classes | distance of classes | shift of a bag | rejected at 5 %, predictions | features |")
    print("|---|---|---|---|---|---|")
    for bags, classes, apart in ((30, 3, 1.5), (100, 3, 1.5), (100, 2, 1.5), (100, 5, 3.0), (100, 3, 4.0)):
        for effect in (0.0, 0.2, 0.4):
            rejected = np.zeros(2)
            for seed in range(simulations if not effect else simulations // 4):
                x, p, segments, target = simulate(seed, effect, bags, classes, apart)
                for i, numbers in enumerate((prediction_scores(p), x)):
                    generator = torch.Generator().manual_seed(seed)
                    rejected[i] += assess_homogeneity(numbers, segments, target, generator=generator, draws=99).p_value <= 0.05
            rates = rejected / (simulations if not effect else simulations // 4)
            print(f"| {bags} | {classes} | {apart} | {effect} | {rates[0]:.3f} | {rates[1]:.3f} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("shares", "test"))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/coverage.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--tasks", default="")
    parser.add_argument("--simulations", type=int, default=400)
    given = parser.parse_args()
    if given.what == "test":
        measure_test(given.simulations)
    else:
        measure_all(given.data, given.out, given.seeds, given.methods.split(","), [t for t in given.tasks.split(",") if t])

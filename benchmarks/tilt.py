"""Tilt beside the other methods on data that ships with scikit-learn: the tables of docs/explanation/tilt.md.

    OMP_NUM_THREADS=1 python benchmarks/tilt.py [--seeds 5] [--epochs 40] [--only digits/various,wine/various]

Every method gets the same network (two layers of 128), views (a little noise), optimizer and epochs, and chooses its epoch by
its own validation loss on majority labels; only the supervised baseline uses the instances' classes. 200 / 50 / 50 bags of 24.
Seconds are processor time of one training, validation included. About a quarter of an hour of one quiet core.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import sklearn.datasets
import torch

from headcount.bags import Bags, Pool
from headcount.datasets import share_sampler as laws
from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_write
from headcount.majority import calibration as contexts
from headcount.models.network import build_model
from headcount.models.predictions import predict
from headcount.training import accel

SIZE, BAGS = 24, {"train": 200, "valid": 50, "test": 50}
METHODS: dict[str, dict[str, Any]] = {
    "noisy_label": {"head": "noisy_label"},
    "output_mean (nll)": {"head": "output_mean", "options": {"form": "nll"}},
    "count": {"head": "count"},
    "election": {"head": "election"},
    "tilt, instance term alone": {"head": "tilt", "options": {"bag": 0, "teach": 0}},
    "tilt, no teaching": {"head": "tilt", "options": {"teach": 0}},
    "tilt": {"head": "tilt"},
    "supervised twin": {"head": "supervised"},
}
DATA = ("digits/various", "digits/small", "digits/large", "wine/various", "cancer/various")
DATA += ("overlapping/various", "overlapping/small", "overlapping/large")


def table(name: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    if name == "overlapping":  # six Gaussians in eight dimensions: a network trained on all classes reaches about 0.87
        rng = np.random.default_rng([seed, 6])
        y = rng.integers(0, 6, 12_000)
        return (rng.normal(size=(6, 8))[y] + rng.normal(size=(len(y), 8))).astype(np.float32), y
    load = {"wine": sklearn.datasets.load_wine, "cancer": sklearn.datasets.load_breast_cancer}[name]
    x, y = load(return_X_y=True)
    return x.astype(np.float32), y


def bags_of(data: str, seed: int) -> dict[str, Bags]:
    """Training, validation and test bags over disjoint instances."""
    name, scenario = data.split("/")
    if name == "digits":
        return runs.make_bags(recipe_for(data, seed, 1))
    x, y = table(name, seed)
    rng = np.random.default_rng([seed, 7])
    order, classes, made, pool = rng.permutation(len(y)), int(y.max()) + 1, {}, Pool(x)
    for split, part in zip(BAGS, np.split(order, [int(0.6 * len(y)), int(0.8 * len(y))]), strict=True):
        of_class = [part[y[part] == k] for k in range(classes)]
        index, labels = [], []
        for share in laws.sample_shares(scenario, classes, BAGS[split], rng):
            counts = rng.multinomial(SIZE, rng.permutation(share))
            index += [rng.choice(of_class[k], n) for k, n in enumerate(counts)]
            labels.append(counts.argmax())
        chosen = np.concatenate(index)
        sizes = [SIZE] * BAGS[split]
        made[split] = Bags.of(pool, index=chosen, sizes=sizes, labels=labels, classes=classes, truth=y[chosen])
    return made


def recipe_for(data: str, seed: int, epochs: int, **method: Any) -> Recipe:
    base = Recipe(source="digits", bag_size=SIZE, train_bags=200, valid_bags=50, test_bags=50, epochs=epochs, lr=2e-3)
    base = base.replace(backbone="mlp", backbone_options={"hidden": 128}, batch_bags=32, views="noise", selection="mean")
    name, scenario = data.split("/")
    return base.replace(seed=seed, fold=seed % 5 if name == "digits" else 0, scenario=scenario, **method)


def train_and_score(recipe: Recipe, bags: dict[str, Bags]) -> dict[str, float]:
    train, valid = (runs.hide_truth(bags[split], recipe.head) for split in ("train", "valid"))
    started = time.process_time()
    model = train(build_model(recipe.model_config(train), train, seed=recipe.seed), train, valid, recipe.train_config).model
    seconds = time.process_time() - started
    test = bags["test"]
    output, truth = predict(model, test), test.truth
    assert truth is not None
    found = {
        "instance": float((output.instance.argmax(1) == truth).float().mean()),
        "bag": float((output.bag.argmax(1) == test.label).float().mean()),
        "seconds": seconds,
    }
    if recipe.head == "tilt":
        known = bags["train"].truth
        assert known is not None
        found["share"] = float(model.head.estimate.share.mean())
        found["true share"] = float((known == bags["train"].label[bags["train"].bag]).float().mean())
        context = contexts.fit_context(predict(model, valid).instance, valid)
        answers = contexts.calibrated_probabilities(context, output.instance, test.blind())
        found["in context"] = float((answers.argmax(1) == truth).float().mean())
        found["context used"] = float(context.assessment.helps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--only", default=",".join(DATA))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "tilt.json")
    args = parser.parse_args()
    torch.set_num_threads(1)
    where = {"device": accel.device_name(torch.device("cpu")), "torch": torch.__version__}
    results: dict[str, Any] = {"seeds": args.seeds, "epochs": args.epochs, **where, "data": {}}
    for data in args.only.split(","):
        rows = results["data"].setdefault(data, {})
        for method, given in METHODS.items():
            runs_of = []
            for seed in range(args.seeds):
                recipe = recipe_for(data, seed, args.epochs, **given)
                runs_of.append(train_and_score(recipe, bags_of(data, seed)))
            rows[method] = {k: [round(r[k], 4) for r in runs_of] for k in runs_of[0]}
            means = {k: np.mean(v) for k, v in rows[method].items()}
            spread = np.std(rows[method]["instance"])
            extra = "".join(f"  {k} {v:.3f}" for k, v in means.items() if k not in ("instance", "bag", "seconds"))
            text = f"{means['instance']:.3f} ± {spread:.3f} ({means['bag']:.2f})  {means['seconds']:5.1f} s{extra}"
            print(f"{data:22} {method:26} {text}", flush=True)
            atomic_write(args.out, lambda f: f.write((json.dumps(results, indent=1) + "\n").encode()))


if __name__ == "__main__":
    main()

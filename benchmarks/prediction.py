"""Measurements for docs/how-to/predict.md: coverage of the audit's interval, finding flipped labels, predicting large files.

    python benchmarks/prediction.py coverage     # 2,000 audits of each of six populations
    python benchmarks/prediction.py issues       # 10 % of labels flipped on bags of digits, ten seeds
    python benchmarks/prediction.py shares       # shares of bags and their 90 % intervals, against simulated truth
    python benchmarks/prediction.py predict 1000000 128

``predict`` makes a mapped .npy with this many instances, predicts all of them with a small network, and prints instances per second and
the largest memory of the process (without mapped pages of the file, which the system may drop).
"""

from __future__ import annotations

import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import average_precision_score

from headcount.bags import Bags, Pool
from headcount.cli.main import app
from headcount.inference import evaluate, label_issues
from headcount.majority import proportions, transition
from headcount.majority.calibration import calibrated_proportions, fit_context
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig
from headcount.readers import read


def coverage(draws: int = 2000, n: int = 20_000) -> None:
    print("classes  accuracy  strata  covered  bias     deviation  plain sample")
    for classes, accuracy in ((2, 0.98), (3, 0.93), (4, 0.8), (5, 0.5), (20, 0.7), (60, 0.6)):
        g = np.random.default_rng(classes)
        confidence = np.clip(g.beta(8, 2, n), 1 / classes, 1)
        predicted = g.choice(classes, n, p=g.dirichlet(np.full(classes, 2.0)))
        correct = g.random(n) < np.clip(confidence + accuracy - confidence.mean(), 0.02, 0.995)
        true, estimates = correct.mean(), []
        for _ in range(draws):
            sample = evaluate.draw_sample(predicted, confidence, 100, g)
            estimates.append(evaluate.stratified_accuracy(correct[sample.instance], sample.stratum, sample.stratum_sizes))
        covered = np.mean([e.low <= true <= e.high for e in estimates])
        values = np.array([e.value for e in estimates])
        plain = np.sqrt(true * (1 - true) / 100)
        print(f"{classes:7d}  {true:8.3f}  {len(sample.stratum_sizes):6d}  {covered:7.3f}  {values.mean() - true:+.4f}  "
              f"{values.std():9.4f}  {plain:12.4f}")  # fmt: skip


def issues(bags: int = 100, size: int = 10, majority: int = 6) -> None:
    digits, precision = load_digits(), []
    for seed in range(10):
        g = np.random.default_rng(seed)
        label = np.arange(bags) % 10
        picked = [
            np.concatenate(
                [g.choice(np.flatnonzero(digits.target == c), majority), g.choice(len(digits.target), size - majority)]
            )
            for c in label
        ]
        wrong = np.zeros(bags, bool)
        wrong[g.choice(bags, bags // 10, replace=False)] = True
        given = np.where(wrong, (label + g.integers(1, 10, bags)) % 10, label)
        dataset = read([digits.data[i].astype(np.float32) for i in picked], labels=[str(v) for v in given])
        p = label_issues.cross_val_bag_probabilities(dataset, seed=seed)
        ranked = label_issues.find_label_issues(dataset.bags, p)
        order = [int(v) for v in ranked.column("bag").to_pylist()]
        precision.append(average_precision_score(wrong[order], -ranked.column("p_label").to_numpy()))
        print(f"seed {seed}: average precision {precision[-1]:.3f}")
    print(f"mean {np.mean(precision):.3f}, least {min(precision):.3f}; at random {0.1:.3f}")


def shares(bags: int = 200, classes: int = 4) -> None:
    """The instances' probabilities are correct; the concentration is fitted on 60 other bags.

    Laplace intervals, sampled ones, and those around the mean of the probabilities.
    """
    print(
        "spread  size  distance  concentration | Laplace: error  covered  seconds | sampled: error  covered  seconds | "
        "mean: error  covered"
    )
    for spread in (0.3, 0.7, 4.0):
        for size in (8, 30, 200):
            for distance in (1.0, 1.8):
                z, other, _ = _simulate(0, 60, size, classes, distance, spread)
                context = fit_context(z, other.blind())
                z, simulated, true = _simulate(1, bags, size, classes, distance, spread)
                log_p, segments = (z / context.temperature).log_softmax(1), simulated.segments()
                row = f"{spread:6}  {size:4d}  {distance:8}  {context.assessment.concentration:13g} |"
                start = time.perf_counter()
                estimated = proportions.laplace_proportions(
                    log_p, segments, context.transition.prior, context.assessment.concentration
                )
                row += f" {_summary(*estimated, true)}  {time.perf_counter() - start:7.2f} |"
                start = time.perf_counter()
                sampled = calibrated_proportions(context, z, simulated.blind(), use_labels=False)
                row += f" {_summary(sampled.share, sampled.low, sampled.high, true):>20}  {time.perf_counter() - start:7.2f} |"
                print(row, f"{_summary(*proportions.mean_proportions(log_p.exp(), segments), true):>21}")


def _simulate(seed: int, bags: int, size: int, classes: int, distance: float, spread: float):
    g = np.random.default_rng(seed)
    y = np.stack([g.choice(classes, size, p=t) for t in g.dirichlet(np.full(classes, spread), bags)])
    votes = np.stack([np.bincount(row, minlength=classes) for row in y])
    x = g.normal(size=(bags * size, classes))
    x[np.arange(len(x)), y.ravel()] += distance
    simulated = Bags.of(Pool(x.astype(np.float32)), sizes=[size] * bags, labels=votes.argmax(1), classes=classes)
    return torch.tensor(distance * x), simulated, torch.from_numpy(votes / size)


def _summary(share: torch.Tensor, low: torch.Tensor, high: torch.Tensor, true: torch.Tensor) -> str:
    inside = ((true >= low - 1e-6) & (true <= high + 1e-6)).float().mean()
    return f"{(share - true).abs().mean():.3f}  {inside:7.3f}"


def predict(instances: int, width: int, size: int = 1000) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shape = (instances // size, size, width)
        data = np.lib.format.open_memmap(root / "x.npy", "w+", np.float32, shape)
        g = np.random.default_rng(0)
        for b in range(shape[0]):
            data[b] = g.normal(size=shape[1:])
        data.flush()
        del data
        preprocessor = read(np.zeros((2, 1, width), np.float32), labels=[0, 1], classes=["a", "b"]).fit_preprocessor()
        network = Model(ModelConfig((width,), ("a", "b"), "mlp", (("hidden", 64),), "tilt")).eval()
        even = transition.Transition(transition.mix_from_shares(0.6, 2), torch.full((2,), 0.5))
        FittedModel(network, ("a", "b"), preprocessor, even).save(root / "m")
        peak, stop = [0.0], threading.Event()
        threading.Thread(target=_watch_memory, args=(peak, stop), daemon=True).start()
        before, start = _own_memory(), time.perf_counter()
        command = ["predict", str(root / "m"), str(root / "x.npy"), "--out", str(root / "p.parquet"), "--device", "cpu"]
        app(command, standalone_mode=False)
        seconds = time.perf_counter() - start
        stop.set()
        file = (root / "x.npy").stat().st_size / 1e6
        print(f"{instances:,} x {width} ({file:,.0f} MB): {seconds:.1f} s, {instances / seconds:,.0f} instances per second, "
              f"{peak[0] - before:.0f} MB of own memory at most")  # fmt: skip


def _own_memory() -> float:
    """MB of memory without mapped files."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["RssAnon"].split()[0]) / 1e3


def _watch_memory(peak: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.05):
        peak[0] = max(peak[0], _own_memory())


if __name__ == "__main__":
    what, *numbers = sys.argv[1:] or ["coverage"]
    {"coverage": coverage, "issues": issues, "shares": shares, "predict": predict}[what](*map(int, numbers))

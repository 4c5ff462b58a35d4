"""What the asking half claims, measured: coverage of the audit's interval, finding flipped labels, predicting large files.

    python benchmarks/asking.py coverage     # 2,000 audits of each of six populations
    python benchmarks/asking.py issues       # 10 % of labels flipped on bags of digits, ten seeds
    python benchmarks/asking.py shares       # shares of bags and their 90 % intervals, against simulated truth
    python benchmarks/asking.py predict 1000000 128

``predict`` makes a mapped .npy of so many instances, asks a small network about all of them through the service, and prints
instances per second and the largest memory of our own (mapped pages of the file, which the system may drop, not counted).
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
from headcount.inference import audit, label_issues
from headcount.majority import proportions, transition
from headcount.majority.calibration import calibrated_proportions, fit_context
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig
from headcount.readers import read


def coverage(draws: int = 2000, n: int = 20_000) -> None:
    print("classes  accuracy  strata  covered  bias     deviation  plain sample")
    for classes, accuracy in ((2, 0.98), (3, 0.93), (4, 0.8), (5, 0.5), (20, 0.7), (60, 0.6)):
        g = np.random.default_rng(classes)
        sure = np.clip(g.beta(8, 2, n), 1 / classes, 1)
        said = g.choice(classes, n, p=g.dirichlet(np.full(classes, 2.0)))
        right = g.random(n) < np.clip(sure + accuracy - sure.mean(), 0.02, 0.995)
        true, found = right.mean(), []
        for _ in range(draws):
            drawn = audit.draw_sample(said, sure, 100, g)
            found.append(audit.stratified_accuracy(right[drawn.instance], drawn.stratum, drawn.stratum_sizes))
        covered = np.mean([e.low <= true <= e.high for e in found])
        values = np.array([e.value for e in found])
        plain = np.sqrt(true * (1 - true) / 100)
        print(f"{classes:7d}  {true:8.3f}  {len(drawn.stratum_sizes):6d}  {covered:7.3f}  {values.mean() - true:+.4f}  "
              f"{values.std():9.4f}  {plain:12.4f}")  # fmt: skip


def issues(bags: int = 100, size: int = 10, own: int = 6) -> None:
    d, found = load_digits(), []
    for seed in range(10):
        g = np.random.default_rng(seed)
        label = np.arange(bags) % 10
        picked = [
            np.concatenate([g.choice(np.flatnonzero(d.target == c), own), g.choice(len(d.target), size - own)])
            for c in label
        ]
        wrong = np.zeros(bags, bool)
        wrong[g.choice(bags, bags // 10, replace=False)] = True
        given = np.where(wrong, (label + g.integers(1, 10, bags)) % 10, label)
        reading = read([d.data[i].astype(np.float32) for i in picked], labels=[str(v) for v in given])
        ranked = label_issues.find_label_issues(
            reading.bags, label_issues.cross_val_bag_probabilities(reading, seed=seed)
        )
        order = [int(v) for v in ranked.column("bag").to_pylist()]
        found.append(average_precision_score(wrong[order], -ranked.column("p_label").to_numpy()))
        print(f"seed {seed}: average precision {found[-1]:.3f}")
    print(f"mean {np.mean(found):.3f}, least {min(found):.3f}; by lot {0.1:.3f}")


def shares(bags: int = 200, classes: int = 4) -> None:
    """Instances' probabilities are exactly right; how bags differ is learned from 60 others. ``plain``: the mean of p."""
    print(
        "spread  size  apart  alike | error  covered  seconds | lots: error  covered  seconds | plain: error  covered"
    )
    for spread in (0.3, 0.7, 4.0):
        for size in (8, 30, 200):
            for apart in (1.0, 1.8):
                z, held, _ = _world(0, 60, size, classes, apart, spread)
                context = fit_context(z, held.blind())
                z, held, true = _world(1, bags, size, classes, apart, spread)
                log_p, segments = (z / context.temperature).log_softmax(1), held.segments()
                row = f"{spread:6}  {size:4d}  {apart:5}  {context.concentration:5g} |"
                start = time.perf_counter()
                found = proportions.laplace_proportions(
                    log_p, segments, context.transition.prior, context.concentration
                )
                row += f" {_judged(*found, true)}  {time.perf_counter() - start:7.2f} |"
                start = time.perf_counter()
                lots = calibrated_proportions(context, z, held.blind(), use_labels=False)
                row += f" {_judged(lots.share, lots.low, lots.high, true):>20}  {time.perf_counter() - start:7.2f} |"
                print(row, f"{_judged(*proportions.mean_proportions(log_p.exp(), segments), true):>21}")


def _world(seed: int, bags: int, size: int, classes: int, apart: float, spread: float):
    g = np.random.default_rng(seed)
    y = np.stack([g.choice(classes, size, p=t) for t in g.dirichlet(np.full(classes, spread), bags)])
    votes = np.stack([np.bincount(row, minlength=classes) for row in y])
    x = g.normal(size=(bags * size, classes))
    x[np.arange(len(x)), y.ravel()] += apart
    held = Bags.of(Pool(x.astype(np.float32)), sizes=[size] * bags, labels=votes.argmax(1), classes=classes)
    return torch.tensor(apart * x), held, torch.from_numpy(votes / size)


def _judged(share: torch.Tensor, low: torch.Tensor, high: torch.Tensor, true: torch.Tensor) -> str:
    inside = ((true >= low - 1e-6) & (true <= high + 1e-6)).float().mean()
    return f"{(share - true).abs().mean():.3f}  {inside:7.3f}"


def predict(instances: int, width: int, size: int = 1000) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        shape = (instances // size, size, width)
        held = np.lib.format.open_memmap(root / "x.npy", "w+", np.float32, shape)
        g = np.random.default_rng(0)
        for b in range(shape[0]):
            held[b] = g.normal(size=shape[1:])
        held.flush()
        del held
        learned = read(np.zeros((2, 1, width), np.float32), labels=[0, 1], classes=["a", "b"]).fit_preprocessor()
        body = Model(ModelConfig((width,), ("a", "b"), "mlp", (("hidden", 64),), "tilt")).eval()
        even = transition.Transition(transition.mix_from_shares(0.6, 2), torch.full((2,), 0.5))
        FittedModel(body, ("a", "b"), learned, even).save(root / "m")
        most, stop = [0], threading.Event()
        threading.Thread(target=_watch, args=(most, stop), daemon=True).start()
        before, start = _own(), time.perf_counter()
        command = ["predict", str(root / "m"), str(root / "x.npy"), "--out", str(root / "p.parquet"), "--device", "cpu"]
        app(command, standalone_mode=False)
        seconds = time.perf_counter() - start
        stop.set()
        file = (root / "x.npy").stat().st_size / 1e6
        print(f"{instances:,} x {width} ({file:,.0f} MB): {seconds:.1f} s, {instances / seconds:,.0f} instances per second, "
              f"{most[0] - before:.0f} MB of our own at most")  # fmt: skip


def _own() -> float:
    """MB of memory that is ours and no file's."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    return int(lines["RssAnon"].split()[0]) / 1e3


def _watch(most: list[float], stop: threading.Event) -> None:
    while not stop.wait(0.05):
        most[0] = max(most[0], _own())


if __name__ == "__main__":
    what, *numbers = sys.argv[1:] or ["coverage"]
    {"coverage": coverage, "issues": issues, "shares": shares, "predict": predict}[what](*map(int, numbers))

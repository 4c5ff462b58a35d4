"""What fits take: time beside the estimate, time budgets, CPU time and memory of a wide table; and what the repair of tilt brings.

    python benchmarks/fit_times.py --out benchmarks/results/fit_times.json       # about 20 minutes; names of measures for some

    table     headcount.fit, without options, to 5,000 instances with 36 features in bags of 20
    minutes   the same with time budgets of 0.5, 1 and 3 minutes
    wide      MajorityClassifier with a linear Counting Network, 5 epochs, on 255,000 x 512
    tilt      tilt alone on unequal classes, five seeds, with and without the second training (selection/methods.py)

Each measurement runs in a process of its own; the peak is its largest resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from defaults import TASKS, make_bags, seconds_of
from sklearn.datasets import make_classification

from headcount import BagDataset, MajorityClassifier, fit, read
from headcount.errors import HeadcountWarning
from headcount.io import atomic_write
from headcount.selection import methods

CASES = {
    "table": ["table"],
    "minutes": ["minutes 0.5", "minutes 1", "minutes 3"],
    "wide": ["wide"],
    "tilt": [f"tilt {seed} {repair}" for seed in range(5) for repair in ("with", "without")],
}


def as_dataset(x: np.ndarray, bags: list[np.ndarray], labels: list[int]) -> BagDataset:
    sizes = np.array([len(b) for b in bags])
    return read({"features": x[np.concatenate(bags)], "sizes": sizes, "labels": np.array(list(map(str, labels)))})


def table() -> BagDataset:
    x, y = make_classification(6000, n_features=36, n_informative=15, n_classes=6, random_state=0)
    return as_dataset(x.astype(np.float32), *make_bags(y, 250, np.full(250, 20), 4, np.random.default_rng(0)))


def timed_fit(minutes: float | None) -> dict[str, Any]:
    dataset, lines, started, processor = table(), list[str](), time.perf_counter(), time.process_time()
    model = fit(dataset, minutes=minutes, log=lines.append)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - processor
    kept, notes = model.metadata["method"]["name"], model.metadata["notes"]
    rows = len(dataset.bags.index)
    return {
        "instances": rows,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "estimated": seconds_of(lines[0]),
        "kept": kept,
        "notes": notes,
    }


def wide() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    bag = np.repeat(np.arange(5100), 50)
    label = np.arange(5100) % 2
    x = rng.standard_normal((len(bag), 512), dtype=np.float32)
    x[:, 0] += label[bag]
    started = time.process_time()
    MajorityClassifier("count", epochs=5, backbone="linear").fit(x, label[bag], bags=bag)
    return {"cpu_seconds": time.process_time() - started, "data_GB": x.nbytes / 1e9}


def tilt(seed: int, repair: str) -> dict[str, Any]:
    if repair == "without":
        methods.MIN_EPOCHS_TO_REPEAT = 1 << 30
    load, n_bags, size, concentration = TASKS["unequal classes"]
    x, y = load(seed)
    rng = np.random.default_rng(seed)
    test, rest = np.split(rng.permutation(len(y)), [int(0.3 * len(y))])
    bags, labels = make_bags(y[rest], n_bags, np.full(n_bags, size), concentration, rng)
    rows, sizes = rest[np.concatenate(bags)], [len(b) for b in bags]
    ids = np.repeat(np.arange(len(bags)), sizes)
    model = MajorityClassifier("tilt", random_state=seed).fit(x[rows], np.repeat(labels, sizes), bags=ids)
    return {"accuracy": float((model.predict(x[test]) == y[test]).mean())}


def measure(case: str) -> dict[str, Any]:
    name, *rest = case.split()
    calls = {"table": lambda: timed_fit(None), "minutes": lambda: timed_fit(float(rest[0])), "wide": wide}
    result = calls.get(name, lambda: tilt(int(rest[0]), rest[1]))()
    return {"case": case, **result, "peak_GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measures", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        warnings.simplefilter("ignore", HeadcountWarning)
        return print(json.dumps(measure(args.case)))
    results = []
    for case in (case for name in args.measures for case in CASES[name]):
        output = subprocess.run(
            [sys.executable, __file__, "--case", case], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        results.append({k: round(v, 3) if isinstance(v, float) else v for k, v in json.loads(output).items()})
        print(json.dumps(results[-1]), flush=True)
    if args.out:
        about = {
            "machine": platform.machine(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        }
        atomic_write(args.out, lambda f: f.write(json.dumps(about | {"results": results}, indent=1).encode()))


if __name__ == "__main__":
    main()

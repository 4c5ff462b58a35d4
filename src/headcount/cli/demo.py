"""The demo: real digits, majority labels alone, the Counting Network beside its ablations and tilt, in about a minute.

digits is small and easy; it demonstrates the procedure, not the ranking of the methods (for that: CIFAR-10 and SVHN).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from headcount.cli.running import console, print_results
from headcount.experiments import select
from headcount.experiments.launch import in_process, processes
from headcount.experiments.recipe import Recipe
from headcount.experiments.study import study
from headcount.io import atomic_write
from headcount.reporting.console import runs_bar
from headcount.reporting.report import write_report
from headcount.training.accel.device import n_cores

REMOVALS = (0.2, 0.4, 0.6, 0.8, 1.0)


def recipes(folds: int) -> list[Recipe]:
    """Six methods on each fold: bags of 24, a small network, otherwise the paper's training; tilt needs a quarter of the epochs."""
    base = Recipe(
        source="digits",
        bag_size=24,
        train_bags=200,
        valid_bags=50,
        test_bags=50,
        backbone="mlp",
        backbone_options=(("hidden", 128),),
        epochs=80,
        batch_bags=32,
        lr=1e-3,
    )
    all_recipes = []
    for fold in range(folds):
        count = base.replace(fold=fold)
        all_recipes += [
            count.replace(head="output_mean"),
            count.replace(head="output_mean", options={"form": "nll"}),
            count.replace(options={"t1": 1.0}),
            count,
            *(count.replace(removal=r) for r in REMOVALS),
            count.replace(head="tilt", epochs=18, lr=3e-3, views="noise"),
        ]
    return all_recipes


def run_demo(out: Path, folds: int = 3, n_processes: int | None = None) -> dict[str, Any]:
    """Train, print the table, write ``report.html`` and ``summary.json``."""
    started = time.monotonic()
    n_processes = n_processes or n_cores()
    console.print(f"digits, Various, bags of 24, {folds} folds: training from majority labels alone ...")
    with runs_bar() as on_progress:
        launch = in_process if n_processes == 1 else processes(n_processes)
        result = study(recipes(folds), out / "records", launch=launch, device="cpu", on_progress=on_progress)
    for error in result.failed.values():
        raise error
    rows = select.rows(result.records)
    print_results(rows)
    page = write_report(result.records, out / "report.html", title="headcount demo: digits from majority labels")
    seconds = time.monotonic() - started
    summary = {
        "seconds": round(seconds, 1),
        "folds": folds,
        "methods": {
            row.label: {m: _mean_and_deviation(row, m) for m in ("instance_accuracy", "bag_accuracy")} for row in rows
        },
        "report": str(page),
    }
    atomic_write(out / "summary.json", lambda f: f.write(json.dumps(summary, indent=1).encode()))
    console.print(f"{len(result.records)} runs in {seconds:.0f} s. Open {page}")
    return summary


def _mean_and_deviation(row: select.Row, metric: str) -> dict[str, float]:
    mean, deviation, runs = row.score(metric)
    return {"mean": round(mean, 4), "std": round(deviation, 4), "runs": runs}

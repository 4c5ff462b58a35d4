"""Thousands of tiny runs in one study: what a run costs beside its training, the size of the folder, the time of the report.

    OMP_NUM_THREADS=1 python benchmarks/many_runs.py --out benchmarks/results/many-runs.json

A run is one epoch of 20 bags of eight digits, so that nearly all of its time is the overhead: bags, model, scores, files. All
runs are of one study in one process; seconds are of the processor. The folder of records is removed afterwards, unless it is given.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import tempfile
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import load_records
from headcount.experiments.study import StudyProgress, grid, study
from headcount.reporting.report import write_report

TINY = Recipe(source="digits", bag_size=8, train_bags=20, valid_bags=10, test_bags=10, backbone="mlp", epochs=1, batch_bags=8)
FOLDS, RATES, BLOCKS = 5, 50, 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000, help="a multiple of 250: folds and learning rates, times seeds")
    parser.add_argument("--records", type=Path, help="keep the records here; a second call resumes")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    options = parser.parse_args()
    with nullcontext(options.records) if options.records else tempfile.TemporaryDirectory() as folder:
        found = measure(options.runs, Path(folder))
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def measure(runs: int, folder: Path) -> dict[str, Any]:
    rates = [n * 1e-4 for n in range(1, RATES + 1)]
    recipes = grid(TINY, seed=range(runs // (FOLDS * RATES)), lr=rates, fold=range(FOLDS))
    blocks, clock = [], [time.process_time()]

    def on_progress(progress: StudyProgress) -> None:
        if progress.done == (len(blocks) + 1) * runs // BLOCKS:
            clock.append(time.process_time())
            blocks.append({"runs": progress.done, "ms_per_run": 1000 * (clock[-1] - clock[-2]) * BLOCKS / runs, **resources()})
            print(json.dumps(blocks[-1]), flush=True)

    started = time.monotonic()
    result = study(recipes, folder, device="cpu", on_progress=on_progress)
    found: dict[str, Any] = {
        "runs": len(result.records), "failed": len(result.failed), "machine": platform.machine(), "blocks": blocks,
        "study_minutes": (time.monotonic() - started) / 60, "study_cpu_minutes": (time.process_time() - clock[0]) / 60,
    }  # fmt: skip
    files = [path.stat() for path in folder.rglob("*")]
    found |= {
        "files": len(files),
        "MB": sum(f.st_size for f in files) / 1e6,
        "MB_on_disk": sum(512 * f.st_blocks for f in files) / 1e6,
    }
    found["second_call_seconds"] = seconds(lambda: study(recipes, folder, device="cpu"))
    found["read_seconds"] = seconds(lambda: load_records(folder))
    with tempfile.TemporaryDirectory() as pages:
        page = Path(pages) / "report.html"
        found["report_seconds"] = seconds(lambda: write_report(load_records(folder), page))
        found["report_MB"] = page.stat().st_size / 1e6
    return found


def seconds(work: Any) -> float:
    clock = time.process_time()
    work()
    return time.process_time() - clock


def resources() -> dict[str, float]:
    """Open files, threads and resident memory, which should stay as they are."""
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return {"open_files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "MB": memory}


if __name__ == "__main__":
    main()

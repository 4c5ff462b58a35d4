"""What reading costs: a table of ten million rows from CSV and Parquet, grouped, learned and turned into features.

    python benchmarks/read.py                    10,000,000 rows, 8 numbers and 2 categories, 100,000 bags
    python benchmarks/read.py --rows 1000000     smaller
    python benchmarks/read.py --shuffled         the rows of a bag do not lie together

Each step runs in a process of its own; the peak is the largest resident memory of that process.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

NUMBERS = 8


def write(folder: Path, rows: int, bags: int, shuffled: bool) -> None:
    """The same table twice, written a million rows at a time."""
    g = np.random.default_rng(0)
    schema = None
    out: list = []
    for start in range(0, rows, 1_000_000):
        n = min(1_000_000, rows - start)
        bag = g.integers(0, bags, n) if shuffled else (np.arange(start, start + n) * bags // rows)
        colour = np.array(["red", "green", "blue", "grey"])
        table = pa.table({
            "id": np.arange(start, start + n), "bag": np.char.add("b", bag.astype(str)),
            "label": np.array(["no", "yes", "perhaps"])[bag % 3], "colour": colour[g.integers(0, 4, n)],
            "town": np.char.add("t", g.integers(0, 500, n).astype(str)),
            **{f"f{k}": g.normal(size=n).round(6) for k in range(NUMBERS)},
        })  # fmt: skip
        if schema is None:
            schema = table.schema
            out = [pacsv.CSVWriter(folder / "t.csv", schema), pq.ParquetWriter(folder / "t.parquet", schema)]
        for writer in out:
            writer.write_table(table)
    for writer in out:
        writer.close()


def measure(path: Path) -> dict[str, float]:
    from headcount.readers import read

    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    clock = [time.perf_counter()]
    reading = read(path)
    clock.append(time.perf_counter())
    learned = reading.fit_preprocessor(np.arange(len(reading.bags) // 2))
    clock.append(time.perf_counter())
    bags = reading.to_bags(learned)
    clock.append(time.perf_counter())
    steps = dict(zip(("read", "learn", "features"), np.diff(clock).round(2).tolist(), strict=True))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    gb = {"peak_gb": round(peak, 2), "before_gb": round(base, 2), "file_gb": round(path.stat().st_size / 1e9, 2)}
    return {**steps, **gb, "bags": len(bags), "instances": len(bags.index), "width": bags.pool.shape[0]}


def main() -> None:
    ask = argparse.ArgumentParser()
    ask.add_argument("--rows", type=int, default=10_000_000)
    ask.add_argument("--bags", type=int, default=100_000)
    ask.add_argument("--shuffled", action="store_true")
    ask.add_argument("--measure", type=Path)
    asked = ask.parse_args()
    if asked.measure:
        print(json.dumps(measure(asked.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), asked.rows, asked.bags, asked.shuffled)
        for name in ("t.csv", "t.parquet"):
            run = [sys.executable, __file__, "--measure", str(Path(folder) / name)]
            said = subprocess.run(run, capture_output=True, text=True, env={**os.environ})
            print(name, said.stdout.strip() or said.stderr, flush=True)


if __name__ == "__main__":
    main()

"""A year of use: many runs in one process, many records in one folder, many commands in one folder at once."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from study_helpers import TINY, assert_same_record

import model_factory
import read_factory
from headcount.experiments import records, study
from headcount.experiments.run import run
from headcount.reporting.report import write_report

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc"),
]
RUNS, RECORDS = 200, 5000


def resources() -> tuple[int, int, float]:
    """Open files, threads, and MB in memory."""
    gc.collect()
    memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return len(os.listdir("/proc/self/fd")), threading.active_count(), memory


def test_many_runs_in_one_process(tmp_path):
    """Files and threads stay as they are, and memory grows by less than 50 kB per run."""
    recipe, early = TINY.replace(epochs=1), None
    for seed in range(RUNS):
        run(recipe.replace(seed=seed), tmp_path, device="cpu")
        if seed == RUNS // 4:
            early = resources()
    late = resources()
    print(f"\nafter {RUNS // 4} runs {early}, after {RUNS} {late}")
    assert early is not None
    assert late[:2] == early[:2]
    assert late[2] - early[2] < 0.05 * RUNS
    assert len(list(tmp_path.iterdir())) == 2 * RUNS


def test_many_records(tmp_path):
    """Seconds of the processor for a study of 5,000 runs that are finished, and for its report."""
    first = run(TINY, tmp_path, device="cpu")
    recipes = [
        TINY.replace(fold=f, lr=lr * 1e-4, seed=s) for f in range(5) for lr in range(1, 51) for s in range(RECORDS // 250)
    ]
    for recipe in recipes:
        data = {**first.data, "key": recipe.key, "recipe": recipe.values, "text": str(recipe)}
        (tmp_path / f"{recipe.key}.json").write_text(json.dumps(data))
    clock = time.process_time()
    found = study.study(recipes, tmp_path, device="cpu").records
    study_seconds, clock = time.process_time() - clock, time.process_time()
    write_report(found, tmp_path / "report.html")
    report_seconds = time.process_time() - clock
    print(f"\n{len(found)} records: study {study_seconds:.1f} s, report {report_seconds:.1f} s")
    assert len(found) == RECORDS
    assert study_seconds < 20
    assert report_seconds < 20


def test_many_commands_in_one_folder(tmp_path):
    """Two equal studies, a third that shares runs with them, two fits of one model and reports: no error, and equal records."""
    people = read_factory.write_csv(tmp_path / "people.csv", model_factory.people())
    tiny = (
        "study --source digits --bag-size 8 --device cpu --set backbone=mlp --set train_bags=20 --set valid_bags=10 "
        "--set test_bags=10 --set batch_bags=8 --epochs 4 --out records"
    )
    lines = [f"{tiny} --fold 0,1", f"{tiny} --fold 0,1", f"{tiny} --fold 1,2 --removal 0,0.5",
             *[f"fit {people} --out model --method forest --folds 2"] * 2]  # fmt: skip

    def start(line: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "headcount", *line.split()]
        return subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    started = [start(line) for line in lines]
    ended = [(p.communicate(timeout=600)[1], p.returncode) for p in started]
    assert [code for _, code in ended[:3]] == [0, 0, 0], ended
    assert sorted(code for _, code in ended[3:]) == [0, 2], ended  # the second fit finds the model of the first
    assert any("holds a model already" in err for err, _ in ended[3:])
    report = start("report records")
    assert report.communicate(timeout=600)[1] == ""
    alone = study.study(study.grid(TINY, fold=(0, 1, 2)), tmp_path / "alone", device="cpu").records
    together = {r.key: r for r in records.load_records(tmp_path / "records")}
    for record in alone:
        assert_same_record(record, together[record.key])
    assert {p.name for p in tmp_path.iterdir()} == {"people.csv", "records", "model", "alone"}
    assert {p.suffix for p in (tmp_path / "records").iterdir()} == {".json", ".npz", ".html"}

"""docs/reference/determinism.md: the same bytes under another hash seed, time zone, locale and working folder, and from several processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import model_factory
import read_factory

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

COMMANDS = """
import shlex, sys
from headcount.cli.main import main

for line in sys.argv[1:]:
    sys.argv = ["headcount", *shlex.split(line)]
    try:
        main()
    except SystemExit as e:
        assert not e.code, line
"""
STUDY = (
    "study --source digits --bag-size 8 --device cpu --set backbone=mlp --set train_bags=12 --set valid_bags=6 --set test_bags=6 "
    "--set batch_bags=8 --fold 0 --removal 0,0.5 --epochs 2 --out records"
)
CLOCK = {"created", "seconds", "provenance", "n_jobs"}  # what may differ: time, and the machine


def without_clock(value):
    if isinstance(value, dict):
        return {k: without_clock(v) for k, v in value.items() if k not in CLOCK}
    return [without_clock(v) for v in value] if isinstance(value, list) else value


def content(path: Path) -> object:
    if path.suffix == ".json":
        return without_clock(json.loads(path.read_text()))
    if path.name == "MODEL_CARD.md":
        return re.sub(r"Created \S+", "", path.read_text())
    if path.parent.name == "model" and path.name == "report.html":  # seconds of each method and in all, and the moment
        return re.sub(r'<td class="number">[\d.,]+</td>|[\d,]+ s on |on \d{4}-\S+;', "", path.read_text())
    return path.read_bytes()


def outputs(folder: Path, commands: list[str], **environment: str) -> dict[str, object]:
    folder.mkdir(parents=True)
    program = [sys.executable, "-c", COMMANDS, *commands]
    subprocess.run(program, cwd=folder, env={**os.environ, **environment}, check=True, capture_output=True)
    return {str(p.relative_to(folder)): content(p) for p in sorted(folder.rglob("*")) if p.is_file()}


def test_equal_bytes(tmp_path):
    people = read_factory.write_csv(tmp_path / "people.csv", model_factory.people())
    records = tmp_path / "finished"
    commands = [
        f"fit {people} --out model --method forest,count --epochs 2 --folds 2",
        *(f"predict model {people} --out p.{ending} --bags b.{ending}.csv" for ending in ("csv", "parquet", "h5")),
        f"audit model {people} --out sheet.csv --count 6",
        f"issues {people} --out issues.csv --folds 2",
        f"explain model {people} --out page.html",
        "export model --onnx model.onnx",
        "bags --train-bags 20 --valid-bags 5 --test-bags 5 --export bags.npz --picture bags.svg",
        f"report {records} --out report.html",
    ]
    outputs(tmp_path / "first", [STUDY.replace("--out records", f"--out {records}")])
    settings = {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C", "OMP_NUM_THREADS": "1"}
    one = outputs(tmp_path / "one", [*commands, STUDY], **settings)
    settings |= {"PYTHONHASHSEED": "4711", "TZ": "Asia/Tokyo", "LC_ALL": "C.UTF-8"}
    other = outputs(tmp_path / "other" / "folder", [*commands, f"{STUDY} --processes 2"], **settings)
    assert one.keys() == other.keys()
    assert [name for name in one if one[name] != other[name]] == []
    assert {"model/model.json", "report.html", "model.onnx", "p.parquet", "p.h5", "bags.svg"} <= one.keys()

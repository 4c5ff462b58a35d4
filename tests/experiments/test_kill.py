"""A small study is killed repeatedly (SIGKILL, the whole process group) during training, during writes and while it starts.
All files are complete at any time, and the final records equal those of an uninterrupted study, bit for bit. `make soak` runs
it; under five minutes on two cores.
"""

from __future__ import annotations

import os
import random
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from study_helpers import assert_same_record, live_processes

from headcount.experiments import records
from headcount.experiments.records import Record

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

STUDY = shlex.split(
    "study --source digits --fold 0,1,2,3,4 --removal 0,0.5 --device cpu --processes 2 --epochs 200 --bag-size 8 "
    "--set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 --set lr=0.001"
)
RUNS, EPOCHS = 10, 200
MOMENTS = Counter(training=11, checkpoint=3, half=1, arrays=2, json=2, start=2)
TIMEOUT = 120  # seconds

# Loaded by every interpreter of the killed studies, and by nothing else. It logs each checkpoint that is loaded, and on
# request holds a process inside a write, between the first byte of the temporary file and its renaming, until it is killed.
SHIM = """
import json, os, time, zipfile
import safetensors

marks, pause = os.environ["KILL_MARKS"], os.environ.get("KILL_PAUSE")
replace, finish, safe_open = os.replace, zipfile.ZipFile._write_end_record, safetensors.safe_open

def hold(name):
    with open(os.path.join(marks, "inside"), "w") as f:
        f.write(name)
    time.sleep(600)

def slow_replace(part, path, **how):
    if pause and str(path).endswith(pause):
        hold(str(part))
    return replace(part, path, **how)

def slow_finish(archive):
    if pause == "half":
        archive.fp.flush()
        hold(archive.fp.name)
    return finish(archive)

def logging_open(path, framework):
    checkpoint = safe_open(path, framework)
    with open(os.path.join(marks, "resumed"), "a") as f:
        f.write(str(json.loads(checkpoint.metadata()["facts"])["epoch"]) + "\\n")
    return checkpoint

os.replace, zipfile.ZipFile._write_end_record, safetensors.safe_open = slow_replace, slow_finish, logging_open
"""
WRITES = {"checkpoint": "checkpoint.safetensors", "half": "half", "arrays": ".npz", "json": ".json"}


class Target:
    """Starts studies in separate processes, and keeps their errors and marks."""

    def __init__(self, folder: Path) -> None:
        self.shim, self.marks, self.errors = (folder / name for name in ("shim", "marks", "errors"))
        for path in (self.shim, self.marks):
            path.mkdir(parents=True)
        (self.shim / "sitecustomize.py").write_text(SHIM)
        self.started: list[subprocess.Popen] = []

    def start(self, out: Path, pause: str | None = None) -> subprocess.Popen:
        (self.marks / "inside").unlink(missing_ok=True)
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.shim), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "HEADCOUNT_CHECKPOINT_SECONDS": "0.1",
            "KILL_MARKS": str(self.marks),
            **({"KILL_PAUSE": WRITES[pause]} if pause else {}),
        }
        with open(self.errors, "w") as errors:
            study = subprocess.Popen(
                [sys.executable, "-m", "headcount", *STUDY, "--out", str(out)],
                env={**os.environ, **settings},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self.started.append(study)
        return study

    def run_to_the_end(self, out: Path) -> None:
        assert self.start(out).wait(TIMEOUT) == 0, self.errors.read_text()
        lines = self.errors.read_text().splitlines()
        assert not [line for line in lines if not line.endswith(", left by a command that was interrupted, is removed")]

    def stop(self) -> None:
        for study in self.started:
            if study.poll() is None:
                send_signal(study, signal.SIGKILL)

    def resumed(self) -> list[int]:
        """The epochs at which trainings resumed."""
        path = self.marks / "resumed"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def send_signal(study: subprocess.Popen, number: signal.Signals) -> int:
    """Signal the whole process group and wait until it has ended; the exit code."""
    os.killpg(study.pid, number)
    code = study.wait(TIMEOUT)
    deadline = time.monotonic() + TIMEOUT
    while live_processes("pgrp", study.pid):
        assert time.monotonic() < deadline, "a worker still runs"
        time.sleep(0.01)
    return code


def wait_for(study: subprocess.Popen, condition: Callable[[], bool]) -> bool:
    """Wait until the condition holds: true. False if the study ended before."""
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if study.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.01)
    return True


def growing_logs(out: Path) -> Iterator[list[Path]]:
    """At each step: the logs of trainings that have grown since the last one."""
    before: dict[Path, int] = {}
    while True:
        now = {}
        for log in out.glob("running/*/metrics.jsonl"):
            try:
                now[log] = log.stat().st_size
            except FileNotFoundError:
                continue
        yield [log for log, size in now.items() if 0 < before.get(log, size) < size]
        before = now


def epochs_in(log: Path) -> int:
    """The number of finished epochs of a training; all, if its log is gone."""
    try:
        return len(log.read_text().splitlines())
    except FileNotFoundError:
        return EPOCHS


def is_early(log: Path) -> bool:
    """Whether a training is far enough from its end to be killed before it."""
    return epochs_in(log) < EPOCHS // 2


def kill_once(target: Target, out: Path, kind: str, rng: random.Random) -> bool:
    """Start a study and kill it at such a moment; false if it ended before."""
    study = target.start(out, kind if kind in WRITES else None)
    if kind == "start":
        time.sleep(rng.uniform(0.1, 4.0))
        send_signal(study, signal.SIGKILL)
        return True
    if kind == "training":
        trainings, logs = [], growing_logs(out)
        if not wait_for(study, lambda: trainings.extend(filter(is_early, next(logs))) or bool(trainings)):
            return False
        time.sleep(rng.uniform(0.0, 0.3))
        send_signal(study, signal.SIGKILL)
        return any(epochs_in(log) < EPOCHS for log in trainings)
    if not wait_for(study, (target.marks / "inside").exists):
        return False
    time.sleep(rng.uniform(0.0, 0.1))
    send_signal(study, signal.SIGKILL)
    part = Path((target.marks / "inside").read_text())
    assert part.name.endswith(".part")
    assert part.stat().st_size > 0
    assert kind == "checkpoint" or not (out / part.name).with_suffix("").with_suffix(".json").exists()
    return True


def complete_records(out: Path) -> dict[str, tuple[bytes, bytes]]:
    """Every JSON file is a record with readable arrays; their bytes."""
    contents = {}
    for path in out.glob("*.json"):
        record = Record.read(path)
        assert record.path.stem == record.key
        assert "test_said" in record.arrays()
        contents[record.key] = path.read_bytes(), path.with_suffix(".npz").read_bytes()
    return contents


def compare(out: Path, reference: Path) -> None:
    """The study is complete and equals the uninterrupted one, and there are no other files."""
    actual, expected = records.load_records(out), records.load_records(reference)
    assert [r.key for r in actual] == [r.key for r in expected]
    for one, other in zip(actual, expected, strict=True):
        assert_same_record(one, other)
    assert {p.name for p in out.rglob("*")} == {f"{r.key}{end}" for r in expected for end in (".json", ".npz")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The uninterrupted study."""
    folder = tmp_path_factory.mktemp("reference")
    target = Target(folder)
    try:
        target.run_to_the_end(folder / "out")
    finally:
        target.stop()
    assert len(records.load_records(folder / "out")) == RUNS
    assert target.resumed() == []
    return folder / "out"


@pytest.fixture
def target(tmp_path) -> Iterator[Target]:
    target = Target(tmp_path)
    yield target
    target.stop()


def test_kills(reference, target, tmp_path):
    rng = random.Random(3)
    counts: Counter[str] = Counter()
    kept: dict[str, tuple[bytes, bytes]] = {}
    todo = rng.sample(list(MOMENTS.elements()), MOMENTS.total())
    rounds, out = 1, tmp_path / "out1"
    while todo:
        kind = todo.pop()
        killed = kill_once(target, out, kind, rng)
        counts[kind if killed else "missed"] += 1
        if not killed:
            assert counts["missed"] < 20, counts
            todo.insert(0, kind)  # again later
        current = complete_records(out)
        assert kept.items() <= current.items()  # an existing record is never changed
        kept = current
        if len(kept) == RUNS:  # complete, and kills are left: the next study
            target.run_to_the_end(out)
            compare(out, reference)
            rounds, kept = rounds + 1, {}
            out = tmp_path / f"out{rounds}"
    target.run_to_the_end(out)
    compare(out, reference)
    resumed = target.resumed()
    print(f"\nkills {dict(counts)}, {rounds} studies, {len(resumed)} trainings resumed, at epochs {sorted(resumed)}")
    assert counts.total() - counts["missed"] >= 20
    assert counts["training"] >= 10
    assert sum(counts[kind] for kind in WRITES) >= 3
    assert max(resumed) > 0


def test_interrupts(reference, target, tmp_path):
    """Ctrl-C for the whole group: while it starts, when its workers start, and during a training."""
    rng = random.Random(4)
    out = tmp_path / "out"
    moments: list[Callable[[subprocess.Popen], object]] = [
        lambda study: (
            wait_for(study, lambda: "/torch/" in Path(f"/proc/{study.pid}/maps").read_text())
            and time.sleep(rng.uniform(0.0, 0.6))
        ),  # while torch is loaded
        lambda study: wait_for(study, lambda: len(live_processes("ppid", study.pid)) >= 2),
        lambda study: wait_for(study, lambda: any(out.glob("running/*/checkpoint.safetensors"))),
    ]
    for moment in moments:
        study = target.start(out)
        moment(study)
        assert study.poll() is None, target.errors.read_text()
        assert send_signal(study, signal.SIGINT) == 130, target.errors.read_text()
        assert target.errors.read_text() == "headcount: interrupted; the same command resumes the work\n"
        complete_records(out)
    target.run_to_the_end(out)
    compare(out, reference)
    assert max(target.resumed()) > 0

"""A campaign of kills: a small study is killed (SIGKILL, the whole process group) inside trainings, inside writes and while
it starts, again and again. What lies there is always whole, and what comes out in the end is what an undisturbed study
gives, bit for bit. `make soak` runs it; under five minutes on two cores.
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
from test_study import living, same

from headcount.experiments import records
from headcount.experiments.records import Record

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

STUDY = shlex.split(
    "study --source digits --fold 0,1,2,3,4 --removal 0,0.5 --device cpu --processes 2 --epochs 200 --bag-size 8 "
    "--set backbone=mlp --set train_bags=20 --set valid_bags=10 --set test_bags=10 --set lr=0.001"
)
RUNS, EPOCHS = 10, 200
MOMENTS = Counter(training=11, checkpoint=3, half=1, arrays=2, json=2, start=2)
PATIENCE = 120  # seconds that a study may take to come to the moment that is waited for

# Loaded by every interpreter of the killed studies, and by nothing else. It notes each checkpoint that is taken up, and if
# asked to, holds a process inside a write, between the first byte of the part and its renaming, until it is killed.
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

def noting_open(path, framework):
    found = safe_open(path, framework)
    with open(os.path.join(marks, "resumed"), "a") as f:
        f.write(str(json.loads(found.metadata()["facts"])["epoch"]) + "\\n")
    return found

os.replace, zipfile.ZipFile._write_end_record, safetensors.safe_open = slow_replace, slow_finish, noting_open
"""
WRITES = {"checkpoint": "checkpoint.safetensors", "half": "half", "arrays": ".npz", "json": ".json"}


class Target:
    """Studies in a folder of their own, begun and broken off."""

    def __init__(self, folder: Path) -> None:
        self.shim, self.marks, self.said = (folder / name for name in ("shim", "marks", "said"))
        for made in (self.shim, self.marks):
            made.mkdir(parents=True)
        (self.shim / "sitecustomize.py").write_text(SHIM)
        self.begun: list[subprocess.Popen] = []

    def begin(self, out: Path, pause: str | None = None) -> subprocess.Popen:
        (self.marks / "inside").unlink(missing_ok=True)
        settings = {
            "PYTHONPATH": os.pathsep.join(filter(None, [str(self.shim), os.environ.get("PYTHONPATH")])),
            "OMP_NUM_THREADS": "1",
            "HEADCOUNT_CHECKPOINT_SECONDS": "0.1",
            "KILL_MARKS": str(self.marks),
            **({"KILL_PAUSE": WRITES[pause]} if pause else {}),
        }
        with open(self.said, "w") as said:
            study = subprocess.Popen(
                [sys.executable, "-m", "headcount", *STUDY, "--out", str(out)],
                env={**os.environ, **settings},
                stdout=subprocess.DEVNULL,
                stderr=said,
                start_new_session=True,
            )
        self.begun.append(study)
        return study

    def undisturbed(self, out: Path) -> None:
        assert self.begin(out).wait(PATIENCE) == 0, self.said.read_text()
        assert self.said.read_text() == ""

    def end(self) -> None:
        for study in self.begun:
            if study.poll() is None:
                hit(study, signal.SIGKILL)

    def resumed(self) -> list[int]:
        """The epochs at which trainings were taken up again."""
        path = self.marks / "resumed"
        return [int(line) for line in path.read_text().split()] if path.exists() else []


def hit(study: subprocess.Popen, how: signal.Signals) -> int:
    """Signal the whole group and wait for the last of it; the exit code."""
    os.killpg(study.pid, how)
    code = study.wait(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while living("pgrp", study.pid):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.01)
    return code


def waiting(study: subprocess.Popen, here: Callable[[], bool]) -> bool:
    """Until the moment is here: true. False if the study ended before."""
    deadline = time.monotonic() + PATIENCE
    while not here():
        if study.poll() is not None:
            return False
        assert time.monotonic() < deadline, "the moment never came"
        time.sleep(0.01)
    return True


def grown(out: Path) -> Iterator[list[Path]]:
    """Each time asked: the logs of trainings that have grown since the last time."""
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
    """How many epochs a training has behind it; all, if its log is gone."""
    try:
        return len(log.read_text().splitlines())
    except FileNotFoundError:
        return EPOCHS


def early(log: Path) -> bool:
    """Whether a training has so much before it that it will not be over before the blow falls."""
    return epochs_in(log) < EPOCHS // 2


def strike(target: Target, out: Path, kind: str, rng: random.Random) -> bool:
    """One study, killed at such a moment; false if it came to its end before."""
    study = target.begin(out, kind if kind in WRITES else None)
    if kind == "start":
        time.sleep(rng.uniform(0.1, 4.0))
        hit(study, signal.SIGKILL)
        return True
    if kind == "training":
        seen, logs = [], grown(out)
        if not waiting(study, lambda: seen.extend(filter(early, next(logs))) or bool(seen)):
            return False
        time.sleep(rng.uniform(0.0, 0.3))
        hit(study, signal.SIGKILL)
        return any(epochs_in(log) < EPOCHS for log in seen)
    if not waiting(study, (target.marks / "inside").exists):
        return False
    time.sleep(rng.uniform(0.0, 0.1))
    hit(study, signal.SIGKILL)
    part = Path((target.marks / "inside").read_text())
    assert part.name.endswith(".part")
    assert part.stat().st_size > 0
    assert kind == "checkpoint" or not (out / part.name).with_suffix("").with_suffix(".json").exists()
    return True


def whole_records(out: Path) -> dict[str, tuple[bytes, bytes]]:
    """Every JSON that lies there is a record with readable arrays; their bytes."""
    found = {}
    for path in out.glob("*.json"):
        record = Record.read(path)
        assert record.path.stem == record.key
        assert "test_said" in record.arrays()
        found[record.key] = path.read_bytes(), path.with_suffix(".npz").read_bytes()
    return found


def compare(out: Path, reference: Path) -> None:
    """The study is complete, equal to the undisturbed one, and nothing else lies there."""
    found, wanted = records.load_records(out), records.load_records(reference)
    assert [r.key for r in found] == [r.key for r in wanted]
    for one, other in zip(found, wanted, strict=True):
        same(one, other)
    assert {p.name for p in out.rglob("*")} == {f"{r.key}{end}" for r in wanted for end in (".json", ".npz")}


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The undisturbed study."""
    folder = tmp_path_factory.mktemp("reference")
    target = Target(folder)
    try:
        target.undisturbed(folder / "out")
    finally:
        target.end()
    assert len(records.load_records(folder / "out")) == RUNS
    assert target.resumed() == []
    return folder / "out"


@pytest.fixture
def target(tmp_path) -> Iterator[Target]:
    target = Target(tmp_path)
    yield target
    target.end()


def test_kills(reference, target, tmp_path):
    rng = random.Random(3)
    counts: Counter[str] = Counter()
    kept: dict[str, tuple[bytes, bytes]] = {}
    todo = rng.sample(list(MOMENTS.elements()), MOMENTS.total())
    rounds, out = 1, tmp_path / "out1"
    while todo:
        kind = todo.pop()
        landed = strike(target, out, kind, rng)
        counts[kind if landed else "missed"] += 1
        if not landed:
            assert counts["missed"] < 20, counts
            todo.insert(0, kind)  # another time
        now = whole_records(out)
        assert kept.items() <= now.items()  # a record that is there is never touched again
        kept = now
        if len(kept) == RUNS:  # all done, and kills left: the next study
            target.undisturbed(out)
            compare(out, reference)
            rounds, kept = rounds + 1, {}
            out = tmp_path / f"out{rounds}"
    target.undisturbed(out)
    compare(out, reference)
    resumed = target.resumed()
    print(
        f"\nkills {dict(counts)}, {rounds} studies, {len(resumed)} trainings taken up again, at epochs {sorted(resumed)}"
    )
    assert counts.total() - counts["missed"] >= 20
    assert counts["training"] >= 10
    assert sum(counts[kind] for kind in WRITES) >= 3
    assert max(resumed) > 0


def test_interrupts(reference, target, tmp_path):
    """Ctrl-C reaches the whole group too: while it starts, when its workers are born, and inside a training."""
    rng = random.Random(4)
    out = tmp_path / "out"
    moments: list[Callable[[subprocess.Popen], object]] = [
        lambda study: (
            waiting(study, lambda: "/torch/" in Path(f"/proc/{study.pid}/maps").read_text())
            and time.sleep(rng.uniform(0.0, 0.6))
        ),  # torch itself is loading
        lambda study: waiting(study, lambda: len(living("ppid", study.pid)) >= 2),
        lambda study: waiting(study, lambda: any(out.glob("running/*/checkpoint.safetensors"))),
    ]
    for moment in moments:
        study = target.begin(out)
        moment(study)
        assert study.poll() is None, target.said.read_text()
        assert hit(study, signal.SIGINT) == 130, target.said.read_text()
        assert target.said.read_text() == "headcount: interrupted; the same command resumes the work\n"
        whole_records(out)
    target.undisturbed(out)
    compare(out, reference)
    assert max(target.resumed()) > 0

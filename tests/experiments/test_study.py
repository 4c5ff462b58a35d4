"""Studies: needs first and once, whole records, nothing run twice, the same numbers however they are launched."""

from __future__ import annotations

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import oracles
from headcount.cli import printing
from headcount.errors import HeadcountError
from headcount.experiments import records, select, study
from headcount.experiments import run as runs
from headcount.experiments.launch import Submit, in_process, processes
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.experiments.run import find_dissenters, make_bags
from headcount.experiments.run import run as run_one
from headcount.io import file_lock
from headcount.majority import metrics
from headcount.reporting.report import write_report

BASE = Recipe(
    source="digits",
    bag_size=8,
    train_bags=20,
    valid_bags=10,
    test_bags=10,
    backbone="mlp",
    epochs=4,
    batch_bags=8,
)
RECIPES = [
    BASE.replace(removal=0.5),  # its Counting Network is not asked for, and needed
    BASE.replace(removal=1.0),
    BASE.replace(head="output_mean"),
    BASE.replace(fold=1),
    BASE.replace(fold=1, removal=0.5),
]
OWN_HEADS = """
import os, signal
from headcount.models.heads.count import Count

class Stumbles(Count):
    title = "Stumbles"

    def forward(self, h, segments):
        raise ArithmeticError("on purpose")

class Dies(Count):
    title = "Dies"

    def forward(self, h, segments):
        os.kill(os.getpid(), signal.SIGKILL)

class Drifts(Count):
    title = "Drifts"

    def loss(self, output, batch, teacher=None):
        gone = float("nan") if int(batch.epoch) >= 2 else 1.0
        return super().loss(output, batch, teacher) * gone
"""


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "own.py"
    path.write_text(OWN_HEADS)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, study.StudyResult]:
    """One study, run here."""
    out = tmp_path_factory.mktemp("here")
    return out, study.study(RECIPES, out, device="cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[Submit]:
    """Two workers for the whole file: to be born takes them longer than to train."""
    with processes(2)() as submit:
        yield submit


def borrowed(submit: Submit):
    """A launcher over workers that live on."""

    @contextmanager
    def launch() -> Iterator[Submit]:
        yield submit

    return launch


def listening(heard: list[Recipe]):
    """The launcher ``here``, noting what is submitted."""

    @contextmanager
    def launch() -> Iterator[Submit]:
        with in_process() as submit:

            def note(task, recipe, *args, **kwargs):
                heard.append(recipe)
                return submit(task, recipe, *args, **kwargs)

            yield note

    return launch


def times(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}


def same(a: Record, b: Record) -> None:
    """Equal in all but clock, host and versions; the arrays bit for bit."""
    assert a.result() == b.result()
    mine, theirs = a.arrays(), b.arrays()
    assert mine.keys() == theirs.keys()
    for name in mine:
        assert mine[name].dtype == theirs[name].dtype
        assert mine[name].tobytes() == theirs[name].tobytes(), name


def until(true, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def living(relation: str, pid: int) -> list[int]:
    """Processes whose parent ("ppid") or whose group ("pgrp") this is; those that only wait to be buried do not count."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # gone while we looked
            continue
        if state not in "ZX" and int({"ppid": ppid, "pgrp": pgrp}[relation]) == pid:
            found.append(int(stat.parent.name))
    return found


# -- what is run ----------------------------------------------------------------------------------------------------------


def test_needs_come_first_and_once(tmp_path):
    heard: list[Recipe] = []
    asked = [BASE.replace(removal=0.5), BASE.replace(removal=1.0), BASE, BASE.replace(removal=0.5)]
    ended = study.study(asked, tmp_path, launch=listening(heard), device="cpu")
    assert heard == [BASE, BASE.replace(removal=0.5), BASE.replace(removal=1.0)]
    assert [r.recipe for r in ended.records] == [BASE.replace(removal=0.5), BASE.replace(removal=1.0), BASE]
    assert not ended.failed
    assert len(records.load_records(tmp_path)) == 3


def test_what_was_only_needed_is_a_record_too(done):
    out, ended = done
    assert [r.recipe for r in ended.records] == RECIPES
    assert {r.recipe for r in records.load_records(out)} == {*RECIPES, BASE}
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_a_second_call_runs_nothing(done):
    out, ended = done
    before, heard, tallies = times(out), [], []
    again = study.study(RECIPES, out, launch=listening(heard), device="cpu", on_progress=tallies.append)
    assert heard == []
    assert times(out) == before
    assert [r.data for r in again.records] == [r.data for r in ended.records]


def test_more_recipes_run_only_what_is_new(done, tmp_path):
    out, _ = done
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before, heard = times(tmp_path), []
    study.study([*RECIPES, BASE.replace(seed=1)], tmp_path, launch=listening(heard), device="cpu")
    assert heard == [BASE.replace(seed=1)]
    assert times(tmp_path).items() >= before.items()


def test_the_tally_counts(tmp_path):
    seen = []
    watch = lambda t: seen.append((t.total, t.done, t.reused, len(t.failed)))  # noqa: E731
    study.study([BASE], tmp_path, device="cpu", on_progress=watch)
    assert seen[-1] == (1, 1, 0, 0)
    study.study([BASE, BASE.replace(seed=1)], tmp_path, device="cpu", on_progress=watch)
    assert seen[-1] == (2, 2, 1, 0)


def test_grid():
    made = study.grid(BASE, fold=(0, 1), removal=(0, 0.5))
    assert [(r.fold, r.removal) for r in made] == [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5)]
    with pytest.raises(HeadcountError, match=r"no recipe field 'flod'.*did you mean 'fold'"):
        study.grid(BASE, flod=(0, 1))


def test_a_source_that_was_written_anew_is_read_anew(tmp_path, monkeypatch):
    """In one process: the same name, other data; by another time of writing, or in another folder."""
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        x = np.random.default_rng(seed).normal(size=(300, 4)).astype(np.float32)
        np.savez(tmp_path / name / "own.npz", features=x, labels=np.arange(300) % 3)
    base, seen = BASE.replace(source="own.npz", epochs=1), []
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        seen.append((run_one(base, tmp_path / "out", device="cpu"), make_bags(base)["train"].pool.data))
    monkeypatch.chdir(tmp_path / "a")
    os.replace(tmp_path / "b" / "own.npz", tmp_path / "a" / "own.npz")
    seen.append((run_one(base, tmp_path / "again", device="cpu"), make_bags(base)["train"].pool.data))
    first, second, third = seen
    assert first[0].fingerprint != second[0].fingerprint == third[0].fingerprint
    assert not first[1].equal(second[1])
    assert second[1].equal(third[1])
    assert second[0].scores == third[0].scores


def test_the_table_tells_its_rows_apart(tmp_path, capsys):
    done = study.study(study.grid(BASE, lr=(1e-2, 1e-4)), tmp_path, device="cpu")
    printing.print_results(select.rows(done.records))
    said = capsys.readouterr().out
    assert "Counting Network, lr 0.01 " in said
    assert "Counting Network, lr 0.0001 " in said


# -- what is kept -----------------------------------------------------------------------------------------------------------


def test_records_are_small_and_strict(done):
    """Under 8 KB, no NaN, and every record has its arrays."""

    def refuse(word: str) -> None:
        raise AssertionError(f"JSON has no {word}")

    for record in records.load_records(done[0]):
        assert record.path.stat().st_size < 8192
        assert record.path.stem == record.key == record.recipe.key
        body = json.loads(record.path.read_text(), parse_constant=refuse)
        assert body == record.data
        assert all(v is None or 0 <= v <= 1 for k, v in record.scores.items() if k != "share_difference")
        assert body["fit"]["best_epoch"] >= 1
        assert len(body["fit"]["curve"]["epoch"]) == BASE.epochs
        assert ("sweep" in body, "mpem" in body) == (not record.recipe.removal, bool(record.recipe.removal))


def test_a_record_scores_as_the_loops_do(done):
    """Every number of a record against the slow loops, from its arrays and the bags it was asked about."""
    for record in records.load_records(done[0]):
        arrays, bags = record.arrays(), make_bags(record.recipe)
        bag, label, true, bag_said, said = (
            v.tolist()
            for v in (
                bags["test"].bag,
                bags["test"].label,
                bags["test"].truth,
                arrays["test_bag_said"],
                arrays["test_said"],
            )
        )
        sits, counts = oracles.seats(bag, len(label)), oracles.confusion(true, said, 10)
        gaps, kept = oracles.share_difference(true, said, label, sits), record.scores
        wanted = {
            "instance_accuracy": oracles.accuracy(true, said),
            "bag_accuracy": oracles.accuracy(label, bag_said),
            "consistency_rate": oracles.consistency_rate(label, bag_said, said, sits, 10),
            "miou": oracles.miou(counts),
            "miou_usual": oracles.miou(counts, balanced=False),
            "share_difference": np.mean(gaps),
        }
        for name, want in wanted.items():
            assert kept[name] == (None if math.isnan(want) else pytest.approx(want)), name
        assert kept.keys() == wanted.keys()
        assert record.data["share_difference"] == pytest.approx(gaps, abs=1e-4)
        assert record.data["confusion"] == counts


def test_what_a_removal_would_do_as_the_loops_say_it(done):
    """The sweep of a run without removal; and that of a run with one, whose votes are those of the run it needed."""
    found = {r.recipe: r for r in records.load_records(done[0])}
    for recipe, record in found.items():
        arrays, train = found[(recipe.needs or (recipe,))[0]].arrays(), make_bags(recipe)["train"]
        bag, label, true = train.bag.tolist(), train.label.tolist(), train.truth.tolist()
        said, far = arrays["train_said"].tolist(), arrays["train_euclidean_correct"].tolist()
        far, sits = [None if math.isnan(d) else d for d in far], oracles.seats(bag, len(label))
        assert arrays["train_share_said"].tolist() == pytest.approx(oracles.share(said, label, sits))
        sweep = record.data.get("sweep") or {
            "removal": [recipe.removal],
            **{k: [v] for k, v in record.data["mpem"].items()},
        }
        assert sweep["removal"] == [recipe.removal] or sweep["removal"] == [i / 10 for i in range(1, 11)]
        for i, r in enumerate(sweep["removal"]):
            gone = oracles.mpem_removed(far, said, bag, label, r)
            left = oracles.seats(bag, len(label), gone)
            control = [
                metrics.random_removal(np.array(bag), np.array(gone), np.random.default_rng(k)) for k in range(10)
            ]
            by_lot = [oracles.agreement_rate(true, label, oracles.seats(bag, len(label), c), 10) for c in control]
            wanted = {
                "removed": sum(gone),
                "purity": oracles.purity(true, label, bag, gone) if any(gone) else None,
                "agreement": oracles.agreement_rate(true, label, left, 10),
                "agreement_random": np.mean(by_lot),
                "share_before": np.mean(oracles.share(true, label, sits)),
                "share_after": np.mean(oracles.share(true, label, left)),
            }
            for name, want in wanted.items():
                assert sweep[name][i] == (want if want is None else pytest.approx(want, abs=1e-5)), (name, r)


def test_whom_mpem_removes_is_the_recipes_to_say(done):
    """Distance, prototypes and r each decide: every variant against the loops, and no two of them alike."""
    recipe, seen = BASE.replace(removal=0.5), set()
    train = make_bags(recipe)["train"]
    bag, label = train.bag.tolist(), train.label.tolist()
    (record,) = (r for r in records.load_records(done[0]) if r.recipe == BASE)
    arrays = record.arrays()
    for distance, bags in itertools.product(("euclidean", "mahalanobis"), ("correct", "all")):
        far = [None if math.isnan(d) else d for d in arrays[f"train_{distance}_{bags}"].tolist()]
        wanted = oracles.mpem_removed(far, arrays["train_said"].tolist(), bag, label, 0.5)
        got = find_dissenters(recipe.replace(distance=distance, prototype_bags=bags), done[0], train).tolist()
        assert got == wanted, (distance, bags)
        seen.add(tuple(got))
    assert len(seen) == 4


@pytest.mark.parametrize("drop", [False, True])
def test_the_removed_leave_the_network_only_if_asked(done, tmp_path, monkeypatch, drop):
    recipe, learned = BASE.replace(removal=1.0, drop_before_forward=drop, seed=0), []
    for path in done[0].glob(f"{BASE.key}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    inner = runs.loop.train
    monkeypatch.setattr(
        runs.loop, "train", lambda model, train, *a, **k: (learned.append(train), inner(model, train, *a, **k))[1]
    )
    record = run_one(recipe, tmp_path, device="cpu")
    gone, held = record.data["mpem"]["removed"], BASE.train_bags * BASE.bag_size
    assert gone > 0
    assert len(learned[0].index) == held - gone * drop
    assert (0 if learned[0].removed is None else int(learned[0].removed.sum())) == gone * (not drop)


def test_a_long_training_is_still_a_small_record(tmp_path):
    (record,) = study.study([BASE.replace(epochs=90)], tmp_path, device="cpu").records
    curve = record.data["fit"]["curve"]
    assert record.path.stat().st_size < 8192
    assert len(curve["epoch"]) == len(curve["train"]) == len(curve["valid"]) == 60
    assert (curve["epoch"][0], curve["epoch"][-1]) == (1, 90)


def test_arrays_are_there(done):
    for record in records.load_records(done[0]):
        kept = record.arrays()
        test, train = BASE.test_bags * BASE.bag_size, BASE.train_bags * BASE.bag_size
        assert kept["test_index"].shape == kept["test_said"].shape == kept["test_truth"].shape == (test,)
        assert kept["test_offsets"].tolist() == list(range(0, test + 1, BASE.bag_size))
        right = np.mean(kept["test_said"] == kept["test_truth"])
        assert record.scores["instance_accuracy"] == pytest.approx(right)
        if not record.recipe.removal:
            assert kept["train_said"].shape == kept["train_euclidean_correct"].shape == (train,)


def test_a_record_leads_back_to_its_run(done, tmp_path):
    """The JSON alone is enough to make it again."""
    record = next(r for r in done[1].records if not r.recipe.removal)
    same(record, run_one(Recipe.from_dict(json.loads(record.path.read_text())["recipe"]), tmp_path, device="cpu"))


def test_mpem_without_its_counting_network(tmp_path):
    with pytest.raises(HeadcountError, match=f"needs the run {BASE.key} .* run it first"):
        run_one(BASE.replace(removal=0.5), tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())
    run_one(BASE, tmp_path, device="cpu")
    (tmp_path / f"{BASE.key}.npz").unlink()
    with pytest.raises(HeadcountError, match="npz is missing, and MPEM needs its votes; delete"):
        run_one(BASE.replace(removal=0.5), tmp_path, device="cpu")


def test_what_killed_runs_left_is_swept(done):
    out, _ = done
    key, running = BASE.key, out / "running"
    (running / key).mkdir(parents=True)
    for left in (running / key / "metrics.jsonl", running / f"{key}.lock", out / f"{key}.json.part"):
        left.write_text("x")
    study.study([BASE], out, device="cpu")
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


# -- side by side -----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_here_and_in_processes_are_equal(done, pool, own, tmp_path):
    """The same records; and one run that fails in its process stops nothing but the run that needs it."""
    fails = BASE.replace(head=f"{own}:Stumbles")
    ended = study.study(
        [fails.replace(removal=0.5), *RECIPES, fails],
        tmp_path,
        launch=borrowed(pool),
        device="cpu",
        checkpoint_seconds=0,
    )
    assert len(ended.records) == len(RECIPES)
    for one, other in zip(done[1].records, ended.records, strict=True):
        same(one, other)
    assert {r: type(e) for r, e in ended.failed.items()} == {
        fails: ArithmeticError,
        fails.replace(removal=0.5): RuntimeError,
    }
    assert str(ended.failed[fails.replace(removal=0.5)]).startswith("not run, because Stumbles")
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".npz"}


def test_a_failure_stops_only_what_needs_it(own, tmp_path):
    fails = BASE.replace(head=f"{own}:Stumbles")
    ended = study.study([fails, fails.replace(removal=0.5), BASE, BASE.replace(removal=0.5)], tmp_path, device="cpu")
    assert [r.recipe for r in ended.records] == [BASE, BASE.replace(removal=0.5)]
    assert [study.error_line(e) for e in ended.failed.values()] == [
        "ArithmeticError: on purpose",
        f"RuntimeError: not run, because {fails} failed",
    ]
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".npz"}
    assert [p.name for p in tmp_path.glob("*.failed.json")] == [f"{fails.key}.failed.json"]
    assert len(records.load_records(tmp_path)) == 2


@pytest.mark.soak
def test_a_process_that_is_killed(own, tmp_path):
    """Say, for want of memory: one line instead of a traceback out of the pool."""
    with pytest.raises(HeadcountError, match=r"a run's process was killed.*resumes where it stopped"):
        study.study([BASE.replace(head=f"{own}:Dies"), BASE], tmp_path, launch=processes(1), device="cpu")
    study.study([BASE], tmp_path, device="cpu")


def meet_and_run(folder: Path, me: int, recipe: Recipe, out: Path) -> tuple[dict, int]:
    """Begin when both are here. Returns the record and how many epochs this process trained for it."""
    (folder / str(me)).touch()
    until(lambda: len(list(folder.iterdir())) == 2)
    epochs = []
    record = run_one(recipe, out, device="cpu", on_progress=lambda p: epochs.append(p.epoch))
    return record.data, len(epochs)


def test_two_processes_at_the_same_run(pool, tmp_path):
    """One trains, the other waits, both get the record."""
    recipe, out, meeting = BASE.replace(epochs=60), tmp_path / "out", tmp_path / "meeting"
    meeting.mkdir()
    both = [pool(meet_and_run, meeting, me, recipe, out) for me in range(2)]
    (one, trained), (other, waited) = sorted((f.result(120) for f in both), key=lambda pair: -pair[1])
    assert (trained, waited) == (60, 0)
    assert one == other == json.loads((out / f"{recipe.key}.json").read_text())
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_alone_means_alone(tmp_path):
    """Even though everyone takes the lock's file, and its folder, away on leaving."""
    inside, most, rounds = [0], [0], [0]

    def visit() -> None:
        for _ in range(40):
            with file_lock(tmp_path / "running" / "x.lock"):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0.0005)
                rounds[0] += 1
                inside[0] -= 1

    visitors = [threading.Thread(target=visit) for _ in range(6)]
    for visitor in visitors:
        visitor.start()
    for visitor in visitors:
        visitor.join()
    assert (most[0], rounds[0]) == (1, 240)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_goes_between_two_looks_is_no_file(tmp_path, monkeypatch):
    """Others take the folder away and make it again: whoever looks may find it gone each time, and is not told of a file."""
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    with file_lock(tmp_path / "running" / "x.lock") as mine:
        assert mine
    (tmp_path / "running").touch()
    with pytest.raises(FileExistsError, match="is a file"), file_lock(tmp_path / "running" / "x.lock"):
        pass


# -- broken off ---------------------------------------------------------------------------------------------------------------


def test_interrupted_goes_on_where_it_stopped(tmp_path):
    """Ctrl-C keeps the epochs that are done, and the record is the one an undisturbed run makes."""
    recipe, seen = BASE.replace(epochs=12), []

    def stop(progress) -> None:
        if progress.epoch == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.study([recipe], tmp_path / "torn", device="cpu", on_run_progress=stop)
    assert not records.load_records(tmp_path / "torn")
    (torn,) = study.study(
        [recipe], tmp_path / "torn", device="cpu", on_run_progress=lambda p: seen.append(p.epoch)
    ).records
    assert seen == list(range(8, 13))
    (whole,) = study.study([recipe], tmp_path / "whole", device="cpu").records
    same(torn, whole)
    assert {p.suffix for p in (tmp_path / "torn").iterdir()} == {".json", ".npz"}


def test_a_training_that_drifts_off(own, tmp_path):
    """The best epoch is kept, the curve says null from then on, and the report can be had."""
    (record,) = study.study([BASE.replace(head=f"{own}:Drifts")], tmp_path, device="cpu").records
    assert record.data["fit"]["best_epoch"] in (1, 2)
    assert record.data["fit"]["curve"]["valid"][2:] == [None, None]
    assert "NaN" not in record.path.read_text()
    write_report([record], tmp_path / "report.html")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to look for processes in")
@pytest.mark.soak
def test_a_killed_parent_leaves_no_workers(tmp_path):
    words = "--source digits --bag-size 8 --epochs 1000000 --fold 0,1 --device cpu --processes 2 --set backbone=mlp"
    small = "--set train_bags=20 --set valid_bags=10 --set test_bags=10"
    command = [
        sys.executable,
        "-m",
        "headcount",
        "study",
        "--out",
        str(tmp_path),
        *words.split(),
        *small.split(),
    ]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        until(lambda: len(list(tmp_path.glob("running/*/metrics.jsonl"))) == 2 or parent.poll() is not None)
        assert len(living("ppid", parent.pid)) >= 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    until(lambda: not living("pgrp", parent.pid), 10)
    assert not records.load_records(tmp_path)

"""Studies: required runs first and once, complete records, nothing run twice, the same numbers with every launcher."""

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
from study_helpers import TINY, assert_same_record, live_processes, wait_until

import oracles
from headcount.cli import printing
from headcount.errors import FileError, HeadcountError
from headcount.experiments import records, run as runs, scores, study
from headcount.experiments.launch import Submit, in_process, processes
from headcount.experiments.recipe import Recipe
from headcount.experiments.run import find_dissenters, make_bags, run as run_one
from headcount.io import file_lock
from headcount.majority import metrics
from headcount.reporting.report import write_report

RECIPES = [
    TINY.replace(removal=0.5),  # its Counting Network is not in the list, but needed
    TINY.replace(removal=1.0),
    TINY.replace(head="output_mean"),
    TINY.replace(fold=1),
    TINY.replace(fold=1, removal=0.5),
]
CUSTOM_HEADS = """
import os, signal
from headcount.models.heads.count import Count

class Fails(Count):
    title = "Fails"

    def forward(self, h, segments):
        raise ArithmeticError("on purpose")

class IsKilled(Count):
    title = "IsKilled"

    def forward(self, h, segments):
        os.kill(os.getpid(), signal.SIGKILL)

class Diverges(Count):
    title = "Diverges"

    def loss(self, output, batch, teacher=None):
        factor = float("nan") if int(batch.epoch) >= 2 else 1.0
        return super().loss(output, batch, teacher) * factor
"""


@pytest.fixture(scope="module")
def custom_heads(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("heads") / "own.py"
    path.write_text(CUSTOM_HEADS)
    return path


@pytest.fixture(scope="module")
def done(tmp_path_factory) -> tuple[Path, study.StudyResult]:
    """One study, run in this process."""
    out = tmp_path_factory.mktemp("here")
    return out, study.study(RECIPES, out, device="cpu")


@pytest.fixture(scope="module")
def pool() -> Iterator[Submit]:
    """Two workers for the whole file: starting them takes longer than training."""
    with processes(2)() as submit:
        yield submit


def keep_running(submit: Submit):
    """A launcher over workers that are not stopped."""

    @contextmanager
    def launch() -> Iterator[Submit]:
        yield submit

    return launch


def logged(submitted: list[Recipe]):
    """The launcher ``in_process``, which logs what is submitted."""

    @contextmanager
    def launch() -> Iterator[Submit]:
        with in_process() as submit:

            def log(task, recipe, *args, **kwargs):
                submitted.append(recipe)
                return submit(task, recipe, *args, **kwargs)

            yield log

    return launch


def modification_times(folder: Path) -> dict[str, int]:
    return {p.name: p.stat().st_mtime_ns for p in folder.iterdir()}


# -- running ----------------------------------------------------------------------------------------------------------


def test_needs_come_first_and_once(tmp_path):
    submitted: list[Recipe] = []
    recipes = [TINY.replace(removal=0.5), TINY.replace(removal=1.0), TINY, TINY.replace(removal=0.5)]
    ended = study.study(recipes, tmp_path, launch=logged(submitted), device="cpu")
    assert submitted == [TINY, TINY.replace(removal=0.5), TINY.replace(removal=1.0)]
    assert [r.recipe for r in ended.records] == [TINY.replace(removal=0.5), TINY.replace(removal=1.0), TINY]
    assert not ended.failed
    assert len(records.load_records(tmp_path)) == 3


def test_what_a_recipe_needs_comes_before_it():
    mpem = TINY.replace(removal=0.5)
    assert study.with_needs([mpem, TINY]) == [*mpem.needs, mpem] == [TINY, mpem]


def test_a_required_run_is_a_record_too(done):
    out, ended = done
    assert [r.recipe for r in ended.records] == RECIPES
    assert {r.recipe for r in records.load_records(out)} == {*RECIPES, TINY}
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_a_second_call_runs_nothing(done):
    out, ended = done
    before, submitted, progress = modification_times(out), [], []
    again = study.study(RECIPES, out, launch=logged(submitted), device="cpu", on_progress=progress.append)
    assert submitted == []
    assert modification_times(out) == before
    assert [r.data for r in again.records] == [r.data for r in ended.records]


def test_more_recipes_run_only_what_is_new(done, tmp_path):
    out, _ = done
    for path in out.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before, submitted = modification_times(tmp_path), []
    study.study([*RECIPES, TINY.replace(seed=1)], tmp_path, launch=logged(submitted), device="cpu")
    assert submitted == [TINY.replace(seed=1)]
    assert modification_times(tmp_path).items() >= before.items()


def test_progress_counts(tmp_path):
    counts = []
    on_progress = lambda t: counts.append((t.total, t.done, t.reused, len(t.failed)))  # noqa: E731
    study.study([TINY], tmp_path, device="cpu", on_progress=on_progress)
    assert counts[-1] == (1, 1, 0, 0)
    study.study([TINY, TINY.replace(seed=1)], tmp_path, device="cpu", on_progress=on_progress)
    assert counts[-1] == (2, 2, 1, 0)


def test_grid():
    recipes = study.grid(TINY, fold=(0, 1), removal=(0, 0.5))
    assert [(r.fold, r.removal) for r in recipes] == [(0, 0.0), (0, 0.5), (1, 0.0), (1, 0.5)]
    with pytest.raises(HeadcountError, match=r"no recipe field 'flod'.*did you mean 'fold'"):
        study.grid(TINY, flod=(0, 1))


def test_a_source_file_that_changed_is_read_again(tmp_path, monkeypatch):
    """In one process: the same name, other data; by another time of writing, or in another folder."""
    for name, seed in (("a", 0), ("b", 1)):
        (tmp_path / name).mkdir()
        x = np.random.default_rng(seed).normal(size=(300, 4)).astype(np.float32)
        np.savez(tmp_path / name / "own.npz", features=x, labels=np.arange(300) % 3)
    base, results = TINY.replace(source="own.npz", epochs=1), []
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        results.append((run_one(base, tmp_path / "out", device="cpu"), make_bags(base)["train"].pool.data))
    monkeypatch.chdir(tmp_path / "a")
    os.replace(tmp_path / "b" / "own.npz", tmp_path / "a" / "own.npz")
    results.append((run_one(base, tmp_path / "again", device="cpu"), make_bags(base)["train"].pool.data))
    first, second, third = results
    assert first[0].fingerprint != second[0].fingerprint == third[0].fingerprint
    assert not first[1].equal(second[1])
    assert second[1].equal(third[1])
    assert second[0].scores == third[0].scores


def test_table_rows_have_distinct_names(tmp_path, capsys):
    done = study.study(study.grid(TINY, lr=(1e-2, 1e-4)), tmp_path, device="cpu")
    printing.print_results(scores.rows(done.records))
    output = capsys.readouterr().out
    assert "Counting Network, lr 0.01 " in output
    assert "Counting Network, lr 0.0001 " in output


# -- records -----------------------------------------------------------------------------------------------------------


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
        assert len(body["fit"]["curve"]["epoch"]) == TINY.epochs
        assert ("sweep" in body, "mpem" in body) == (not record.recipe.removal, bool(record.recipe.removal))


def test_scores_equal_those_of_slow_loops(done):
    """Every number of a record against slow loops, from its arrays and its bags."""
    for record in records.load_records(done[0]):
        arrays, bags = record.arrays(), make_bags(record.recipe)
        bag, label, truth, bag_prediction, predicted = (
            v.tolist()
            for v in (bags["test"].bag, bags["test"].label, bags["test"].truth, arrays["test_bag_said"], arrays["test_said"])
        )
        members, counts = oracles.seats(bag, len(label)), oracles.confusion(truth, predicted, 10)
        gaps, scores = oracles.share_difference(truth, predicted, label, members), record.scores
        expected = {
            "instance_accuracy": oracles.accuracy(truth, predicted),
            "bag_accuracy": oracles.accuracy(label, bag_prediction),
            "consistency_rate": oracles.consistency_rate(label, bag_prediction, predicted, members, 10),
            "miou": oracles.miou(counts),
            "miou_usual": oracles.miou(counts, balanced=False),
            "share_difference": np.mean(gaps),
        }
        for name, value in expected.items():
            assert scores[name] == (None if math.isnan(value) else pytest.approx(value)), name
        assert scores.keys() == expected.keys()
        assert record.data["share_difference"] == pytest.approx(gaps, abs=1e-4)
        assert record.data["confusion"] == counts


def test_the_removal_sweep_equals_slow_loops(done):
    """The sweep of a run without removal; and that of a run with one, whose votes are those of the run it needed."""
    by_recipe = {r.recipe: r for r in records.load_records(done[0])}
    for recipe, record in by_recipe.items():
        arrays, train = by_recipe[(recipe.needs or (recipe,))[0]].arrays(), make_bags(recipe)["train"]
        bag, label, truth = train.bag.tolist(), train.label.tolist(), train.truth.tolist()
        vote, distance = arrays["train_said"].tolist(), arrays["train_euclidean_correct"].tolist()
        distance, members = [None if math.isnan(d) else d for d in distance], oracles.seats(bag, len(label))
        assert arrays["train_share_said"].tolist() == pytest.approx(oracles.share(vote, label, members))
        sweep = record.data.get("sweep") or {"removal": [recipe.removal], **{k: [v] for k, v in record.data["mpem"].items()}}
        assert sweep["removal"] == [recipe.removal] or sweep["removal"] == [i / 10 for i in range(1, 11)]
        for i, r in enumerate(sweep["removal"]):
            removed = oracles.mpem_removed(distance, vote, bag, label, r)
            remaining = oracles.seats(bag, len(label), removed)
            control = [metrics.random_removal(np.array(bag), np.array(removed), np.random.default_rng(k)) for k in range(10)]
            control_rates = [oracles.agreement_rate(truth, label, oracles.seats(bag, len(label), c), 10) for c in control]
            expected = {
                "removed": sum(removed),
                "purity": oracles.purity(truth, label, bag, removed) if any(removed) else None,
                "agreement": oracles.agreement_rate(truth, label, remaining, 10),
                "agreement_random": np.mean(control_rates),
                "share_before": np.mean(oracles.share(truth, label, members)),
                "share_after": np.mean(oracles.share(truth, label, remaining)),
            }
            for name, value in expected.items():
                assert sweep[name][i] == (value if value is None else pytest.approx(value, abs=1e-5)), (name, r)


def test_the_recipe_decides_what_mpem_removes(done):
    """Distance, prototypes and r matter: every variant against slow loops, and no two are equal."""
    recipe, variants = TINY.replace(removal=0.5), set()
    train = make_bags(recipe)["train"]
    bag, label = train.bag.tolist(), train.label.tolist()
    (record,) = (r for r in records.load_records(done[0]) if r.recipe == TINY)
    arrays = record.arrays()
    for distance, bags in itertools.product(("euclidean", "mahalanobis"), ("correct", "all")):
        distances = [None if math.isnan(d) else d for d in arrays[f"train_{distance}_{bags}"].tolist()]
        expected = oracles.mpem_removed(distances, arrays["train_said"].tolist(), bag, label, 0.5)
        removed = find_dissenters(recipe.replace(distance=distance, prototype_bags=bags), done[0], train).tolist()
        assert removed == expected, (distance, bags)
        variants.add(tuple(removed))
    assert len(variants) == 4


@pytest.mark.parametrize("drop", [False, True])
def test_removed_instances_skip_the_network_only_if_asked(done, tmp_path, monkeypatch, drop):
    recipe, train_bags = TINY.replace(removal=1.0, drop_before_forward=drop, seed=0), []
    for path in done[0].glob(f"{TINY.key}.*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    train_function = runs.loop.train
    monkeypatch.setattr(
        runs.loop, "train", lambda model, train, *a, **k: (train_bags.append(train), train_function(model, train, *a, **k))[1]
    )
    record = run_one(recipe, tmp_path, device="cpu")
    n_removed, n_instances = record.data["mpem"]["removed"], TINY.train_bags * TINY.bag_size
    assert n_removed > 0
    assert len(train_bags[0].index) == n_instances - n_removed * drop
    assert (0 if train_bags[0].removed is None else int(train_bags[0].removed.sum())) == n_removed * (not drop)


def test_the_record_of_a_long_training_is_small(tmp_path):
    (record,) = study.study([TINY.replace(epochs=90)], tmp_path, device="cpu").records
    curve = record.data["fit"]["curve"]
    assert record.path.stat().st_size < 8192
    assert len(curve["epoch"]) == len(curve["train"]) == len(curve["valid"]) == 60
    assert (curve["epoch"][0], curve["epoch"][-1]) == (1, 90)


def test_arrays_beside_the_record(done):
    for record in records.load_records(done[0]):
        arrays = record.arrays()
        test, train = TINY.test_bags * TINY.bag_size, TINY.train_bags * TINY.bag_size
        assert arrays["test_index"].shape == arrays["test_said"].shape == arrays["test_truth"].shape == (test,)
        assert arrays["test_offsets"].tolist() == list(range(0, test + 1, TINY.bag_size))
        accuracy = np.mean(arrays["test_said"] == arrays["test_truth"])
        assert record.scores["instance_accuracy"] == pytest.approx(accuracy)
        if not record.recipe.removal:
            assert arrays["train_said"].shape == arrays["train_euclidean_correct"].shape == (train,)


def test_a_record_reproduces_its_run(done, tmp_path):
    """The JSON alone is enough to repeat it."""
    record = next(r for r in done[1].records if not r.recipe.removal)
    assert_same_record(record, run_one(Recipe.from_dict(json.loads(record.path.read_text())["recipe"]), tmp_path, device="cpu"))


def test_mpem_without_its_counting_network(tmp_path):
    with pytest.raises(HeadcountError, match=f"needs the run {TINY.key} .* run it first"):
        run_one(TINY.replace(removal=0.5), tmp_path, device="cpu")
    assert not list(tmp_path.iterdir())
    votes = run_one(TINY, tmp_path, device="cpu").arrays()
    arrays = tmp_path / f"{TINY.key}.npz"
    for damage in (lambda: np.savez(arrays, train_said=votes["train_said"]), arrays.unlink):
        damage()
        with pytest.raises(HeadcountError, match="npz is missing or incomplete, and MPEM needs its votes; delete"):
            run_one(TINY.replace(removal=0.5), tmp_path, device="cpu")


def test_leftovers_of_killed_runs_are_removed(done):
    out, _ = done
    key, running = TINY.key, out / "running"
    (running / key).mkdir(parents=True)
    for left in (running / key / "metrics.jsonl", running / f"{key}.lock", out / f"{key}.json.part"):
        left.write_text("x")
    study.study([TINY], out, device="cpu")
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


# -- several processes -----------------------------------------------------------------------------------------------------------


@pytest.mark.soak
def test_launchers_give_equal_records(done, pool, custom_heads, tmp_path):
    """The same records; and a run that fails in its process stops only the run that needs it."""
    fails = TINY.replace(head=f"{custom_heads}:Fails")
    ended = study.study(
        [fails.replace(removal=0.5), *RECIPES, fails], tmp_path, launch=keep_running(pool), device="cpu", checkpoint_seconds=0
    )
    assert len(ended.records) == len(RECIPES)
    for one, other in zip(done[1].records, ended.records, strict=True):
        assert_same_record(one, other)
    assert {r: type(e) for r, e in ended.failed.items()} == {fails: ArithmeticError, fails.replace(removal=0.5): RuntimeError}
    assert str(ended.failed[fails.replace(removal=0.5)]).startswith("not run, because Fails")
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".npz"}


def test_a_failure_stops_only_what_needs_it(custom_heads, tmp_path):
    fails = TINY.replace(head=f"{custom_heads}:Fails")
    ended = study.study([fails, fails.replace(removal=0.5), TINY, TINY.replace(removal=0.5)], tmp_path, device="cpu")
    assert [r.recipe for r in ended.records] == [TINY, TINY.replace(removal=0.5)]
    assert [records.error_line(e) for e in ended.failed.values()] == [
        "ArithmeticError: on purpose",
        f"RuntimeError: not run, because {fails} failed",
    ]
    assert {p.suffix for p in tmp_path.iterdir()} == {".json", ".npz"}
    assert [p.name for p in tmp_path.glob("*.failed.json")] == [f"{fails.key}.failed.json"]
    assert len(records.load_records(tmp_path)) == 2


@pytest.mark.soak
def test_a_process_that_is_killed(custom_heads, tmp_path):
    """For example for lack of memory: one line instead of the pool's traceback."""
    with pytest.raises(HeadcountError, match=r"a run's process was killed.*resumes where it stopped"):
        study.study([TINY.replace(head=f"{custom_heads}:IsKilled"), TINY], tmp_path, launch=processes(1), device="cpu")
    study.study([TINY], tmp_path, device="cpu")


def meet_and_run(folder: Path, number: int, recipe: Recipe, out: Path) -> tuple[dict, int]:
    """Start when both processes are ready. Returns the record and the number of epochs this process trained."""
    (folder / str(number)).touch()
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    epochs = []
    record = run_one(recipe, out, device="cpu", on_progress=lambda p: epochs.append(p.epoch))
    return record.data, len(epochs)


def test_two_processes_at_the_same_run(pool, tmp_path):
    """One trains, the other waits, both get the record."""
    recipe, out, meeting = TINY.replace(epochs=60), tmp_path / "out", tmp_path / "meeting"
    meeting.mkdir()
    both = [pool(meet_and_run, meeting, number, recipe, out) for number in range(2)]
    (one, trained), (other, waited) = sorted((f.result(120) for f in both), key=lambda pair: -pair[1])
    assert (trained, waited) == (60, 0)
    assert one == other == json.loads((out / f"{recipe.key}.json").read_text())
    assert {p.suffix for p in out.iterdir()} == {".json", ".npz"}


def test_a_lock_excludes_others(tmp_path):
    """Even though each removes the lock's file and its folder afterwards."""
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


def test_a_lock_folder_removed_meanwhile_is_no_error(tmp_path, monkeypatch):
    """Others remove and recreate the folder: it may be missing at every check, which is not reported as a file."""
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    with file_lock(tmp_path / "running" / "x.lock") as mine:
        assert mine
    (tmp_path / "running").touch()
    with (
        pytest.raises(FileError, match=r"File exists: .*running; there is a file where a folder is needed"),
        file_lock(tmp_path / "running" / "x.lock"),
    ):
        pass


# -- interruptions ---------------------------------------------------------------------------------------------------------------


def test_an_interrupted_run_resumes(tmp_path):
    """Ctrl-C keeps the finished epochs, and the record equals that of an uninterrupted run."""
    recipe, epochs = TINY.replace(epochs=12), []

    def stop(progress) -> None:
        if progress.epoch == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        study.study([recipe], tmp_path / "interrupted", device="cpu", on_run_progress=stop)
    assert not records.load_records(tmp_path / "interrupted")
    (interrupted,) = study.study(
        [recipe], tmp_path / "interrupted", device="cpu", on_run_progress=lambda p: epochs.append(p.epoch)
    ).records
    assert epochs == list(range(8, 13))
    (whole,) = study.study([recipe], tmp_path / "whole", device="cpu").records
    assert_same_record(interrupted, whole)
    assert {p.suffix for p in (tmp_path / "interrupted").iterdir()} == {".json", ".npz"}


def test_a_training_that_diverges(custom_heads, tmp_path):
    """The best epoch is selected, the curve is null from then on, and the report can be made."""
    (record,) = study.study([TINY.replace(head=f"{custom_heads}:Diverges")], tmp_path, device="cpu").records
    assert record.data["fit"]["best_epoch"] in (1, 2)
    assert record.data["fit"]["curve"]["valid"][2:] == [None, None]
    assert "NaN" not in record.path.read_text()
    write_report([record], tmp_path / "report.html")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
@pytest.mark.soak
def test_a_killed_parent_leaves_no_workers(tmp_path):
    words = "--source digits --bag-size 8 --epochs 1000000 --fold 0,1 --device cpu --processes 2 --set backbone=mlp"
    small = "--set train_bags=20 --set valid_bags=10 --set test_bags=10"
    command = [sys.executable, "-m", "headcount", "study", "--out", str(tmp_path), *words.split(), *small.split()]
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: len(list(tmp_path.glob("running/*/metrics.jsonl"))) == 2 or parent.poll() is not None)
        assert len(live_processes("ppid", parent.pid)) >= 2
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not live_processes("pgrp", parent.pid), 10)
    assert not records.load_records(tmp_path)

"""The queue that fills the paper's tables: which runs, in which order, in time, resumed, and with the votes that MPEM needs."""

from __future__ import annotations

import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headcount.datasets import registry
from headcount.experiments.launch import in_process
from headcount.experiments.paper import COARSE, SCALES, required_recipes
from headcount.experiments.records import Record, load_records
from headcount.io import file_lock

ROOT = Path(__file__).parents[2]
SCALE = replace(SCALES["smoke"], folds=(0,), base=SCALES["smoke"].base.replace(epochs=3))
COUNT = SCALE.recipes("Counting Network", "OCT", "Various")[0]
MPEM = COUNT.replace(removal=0.5)
HOUR = 3600.0


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("fill_tables", ROOT / "benchmarks" / "fill_tables.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fill_tables"] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def work_off(tables, tmp_path):
    """work_off(recipe, ...): what a call does with these recipes in the folders out and work."""

    def run(*recipes, seconds=HOUR, estimates=None):
        jobs = [tables.Job(r, tmp_path / "out", tmp_path / "work", keep_arrays=not r.removal) for r in recipes]
        queue = tables.Queue(jobs, estimates or tables.Estimates([], 1), time.time() + seconds)
        assert queue.work_off(in_process, 1, "cpu") == 0
        return queue

    return run


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_the_groups_contain_every_committed_record_under_its_key(tables, monkeypatch):
    for folder in dict.fromkeys(group.folder for group in tables.GROUPS.values()):
        wanted = {r for g in tables.GROUPS.values() if g.folder == folder for r in g.recipes(SCALES["full"])}
        for record in load_records(path) if (path := ROOT / "results" / folder).exists() else []:
            assert record.recipe in wanted, record.recipe
            monkeypatch.setattr(registry, "source_checksum", lambda _, record=record: record.data["data"]["checksum"])
            assert record.recipe.key == record.key


def test_the_rest_is_the_whole_paper(tables):
    rest = set(tables.GROUPS["rest"].recipes(SCALES["full"]))
    assert rest.issuperset(r for item in ("table4", "table6", "figure6") for r in required_recipes(item, SCALES["full"]))
    assert len(rest) == 1380, "as many as tables and figures need"


def test_groups_come_in_the_order_of_their_priority_and_folds_before_methods(tables):
    recipes = list(tables.GROUPS["baselines-cifar10"].recipes(SCALES["full"]))
    assert len(set(recipes)) == len(recipes) == 50
    assert [r.fold for r in recipes] == sorted(r.fold for r in recipes)
    assert {(r.source, r.scenario, r.precision, r.sampler) for r in recipes} == {("cifar10", "various", "bf16", "conditional")}
    sweep = [r for r in tables.GROUPS["mpem"].recipes(SCALES["full"]) if r.removal]
    assert {r.removal for r in sweep} == set(COARSE)
    columns = list(dict.fromkeys((r.source, r.scenario) for r in sweep))
    assert columns == [("cifar10", "small"), ("cifar10", "large"), ("svhn", "various"), ("svhn", "small"), ("svhn", "large")]
    sampler = list(tables.GROUPS["sampler"].recipes(SCALES["full"]))
    assert len(set(sampler)) == 22
    assert {(r.sampler, r.precision) for r in sampler} == {("official", "tf32"), ("official", "bf16"), ("conditional", "tf32")}


def test_a_run_of_mpem_brings_its_counting_network_which_is_trained_once(work_off, tmp_path):
    queue = work_off(MPEM)
    assert not queue.waiting
    assert names(tmp_path / "out") == {f"{COUNT.key}.json", f"{MPEM.key}.json"}
    assert names(tmp_path / "work") == {f"{COUNT.key}.json", f"{COUNT.key}.npz"}, "only what MPEM needs is kept"
    before = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*/*")}
    work_off(COUNT.replace(removal=1.0))
    assert {p: p.stat().st_mtime_ns for p in before} == before


def test_votes_that_were_not_kept_are_made_again_and_the_record_stays(work_off, tmp_path):
    work_off(COUNT)
    record = tmp_path / "out" / f"{COUNT.key}.json"
    record.write_text(record.read_text().replace('"host":"', '"host":"first-'))
    before = record.read_bytes()
    for path in (tmp_path / "work").iterdir():
        path.unlink()
    work_off(MPEM)
    assert record.read_bytes() == before
    assert (tmp_path / "work" / f"{COUNT.key}.npz").exists()


def test_votes_beside_a_record_are_taken_over(work_off, tmp_path):
    work_off(COUNT)
    (tmp_path / "work" / f"{COUNT.key}.npz").rename(tmp_path / "out" / f"{COUNT.key}.npz")
    marked = (tmp_path / "work" / f"{COUNT.key}.json").stat().st_mtime_ns
    (tmp_path / "work" / f"{COUNT.key}.json").unlink()
    work_off(MPEM)
    with np.load(tmp_path / "work" / f"{COUNT.key}.npz") as kept, np.load(tmp_path / "out" / f"{COUNT.key}.npz") as first:
        assert np.array_equal(kept["train_said"], first["train_said"])
    assert (tmp_path / "work" / f"{COUNT.key}.json").stat().st_mtime_ns > marked


def test_a_run_overtaken_by_the_limit_is_resumed(tables, work_off, tmp_path):
    job = tables.Job(COUNT, tmp_path / "out", tmp_path / "work", keep_arrays=True)
    assert tables.execute(job, time.time() - 1, True, "cpu").record is None
    assert not (tmp_path / "out").exists()
    assert tables.epochs_done(job) == 1
    work_off(COUNT)
    stopped = Record.read(tmp_path / "out" / f"{COUNT.key}.json")
    whole = tables.execute(replace(job, out=tmp_path / "out2", work=tmp_path / "work2"), time.time() + HOUR, True, "cpu").record
    assert stopped.data["fit"] == whole.data["fit"]
    assert stopped.scores == whole.scores


def test_nothing_is_started_that_would_end_too_late(tables, work_off, tmp_path):
    estimates = tables.Estimates([], 1)
    estimates.rates = {"count": [0.1], "weno": [100.0]}
    slow = SCALE.recipes("WENO", "OCT", "Various")[0]
    queue = work_off(slow, COUNT, seconds=60, estimates=estimates)
    assert names(tmp_path / "out") == {f"{COUNT.key}.json"}, "what fits is run, though it comes later"
    assert [job.recipe for job in queue.waiting] == [slow]
    assert queue.n_too_long == 1


def test_estimates_are_of_the_head_and_without_the_start(tables):
    records = load_records(ROOT / "results" / "paper")
    estimates = tables.Estimates(records, 2)
    count, slow = (SCALES["full"].recipes(m, "SVHN", "Small")[0] for m in ("Counting Network", "MCTformer+"))
    assert estimates.seconds(slow) > 2 * estimates.seconds(count)
    record = next(r for r in records if r.recipe.head == "count")
    estimates.update(count, tables.Outcome(record, seconds_per_epoch=0.05, overhead=90.0, first=True))
    estimates.n_started = 2
    assert estimates.seconds(count) == pytest.approx(0.05 * 1500 + 15)
    estimates.update(count, tables.Outcome(record, seconds_per_epoch=0.05, overhead=4.0))
    assert estimates.seconds(count.replace(removal=0.5), epochs_done=500) == pytest.approx(0.05 * 1000 + 4)


def test_what_another_process_has_claimed_is_skipped(work_off, tmp_path):
    other = COUNT.replace(seed=1)
    with file_lock(tmp_path / "work" / "running" / f"{COUNT.key}.claim", wait=False):
        queue = work_off(COUNT, other)
    assert names(tmp_path / "out") == {f"{other.key}.json"}
    assert [job.recipe for job in queue.waiting] == [COUNT]


def test_the_list_needs_no_data(tables, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["fill_tables.py", "--list", "--results", str(tmp_path)])
    tables.main()
    out = capsys.readouterr().out
    assert "baselines-cifar10     0 missing, about    0 minutes, 50 more without data" in out
    monkeypatch.setattr(
        sys, "argv", ["fill_tables.py", "--list", "--scale", "smoke", "--only", "oct", "--results", str(tmp_path)]
    )
    tables.main()
    assert "oct                  18 missing" in capsys.readouterr().out

"""The benchmarks that run recipes: rows of tables are different runs, missing ones are run, and the summary is that of the records."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.experiments.records import load_records
from headcount.io import file_lock

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "photographs.py"


@pytest.fixture(scope="module")
def photographs():
    sys.path.insert(0, str(FILE.parent))  # as when it is run
    spec = importlib.util.spec_from_file_location("photographs", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_row_is_a_different_run(photographs):
    recipes = [photographs.recipe_for(name, "cifar10", "small", 1) for name in photographs.RECIPES]
    assert len(set(recipes)) == len(recipes)
    for name in photographs.RECIPES:
        digits = photographs.recipe_for(name, "svhn", "various", 0)
        assert digits.views not in ("image", "flip_crop")
        assert not digits.mirror, "digits are not mirrored"


@pytest.mark.soak
def test_missing_runs_are_run_once_and_summarised(photographs, tmp_path, monkeypatch):
    small = ["epochs=2", "train_bags=8", "valid_bags=4", "test_bags=4", "bag_size=6", 'backbone_options={"width":4}']
    command = [sys.executable, str(FILE), "--out", str(tmp_path), "--source", "digits", "--scenario", "various"]
    command += ["--fold", "0,1", "--lines", "best,twin", "--minutes", "2", *(w for s in small for w in ("--set", s))]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert first.stdout.count("instance 0.") == 4, first.stdout + first.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert not again.stdout, "nothing is run twice"
    import scoreboard

    recipe_for = scoreboard.recipe_for
    monkeypatch.setattr(
        scoreboard, "recipe_for",
        lambda name, source, scenario, fold: photographs.change(recipe_for(name, "digits", scenario, fold), small),
    )  # fmt: skip
    summary = photographs.summary(tmp_path)
    assert set(summary) == {"digits", "lines"}
    row = summary["digits"]["various"]
    assert row["folds"] == 2
    assert row["mean"] == pytest.approx(sum(row["each"].values()) / 2, abs=1e-4)
    assert len(row["tilt"]["share"]) == 10
    assert summary["lines"]["supervised twin"]["digits"]["various"]["folds"] == 2


def test_rows_are_found_by_name(photographs):
    stem = "paper's stem, not augmented: tilt"
    assert photographs.parse_names("best, 200 epochs") == ["best", "200 epochs"]
    assert photographs.parse_names(stem) == [stem]
    assert photographs.parse_names(f"{stem}; twin") == [stem, "supervised twin"]
    with pytest.raises(HeadcountError, match="line"):
        photographs.parse_names("best, 300 epochs")


def test_a_run_claimed_by_another_process_is_skipped(tmp_path):
    claim = tmp_path / "running" / "a.claim"
    with file_lock(claim, wait=False) as first, file_lock(claim, wait=False) as second:
        assert first
        assert not second
    with file_lock(claim, wait=False) as again:
        assert again
    assert not (tmp_path / "running").exists()


def test_the_next_run_is_expected_to_take_as_long_as_the_last_one(photographs, tmp_path, monkeypatch):
    import run_missing

    clock, took = [0.0], iter([300.0, *7 * [50.0]])
    body = {"fit": {"valid_loss": 1.0, "best_epoch": 1}}
    record = SimpleNamespace(data=body, scores={"instance_accuracy": 0.5, "bag_accuracy": 0.5})

    def run(recipe, out, **_):
        clock[0] += next(took)
        return record

    monkeypatch.setattr(run_missing.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(run_missing.runs, "run", run)
    recipes = [Recipe(source="digits", fold=f, seed=s, epochs=10) for s in (0, 1) for f in range(4)]
    run_missing.run_missing(((str(r), r) for r in recipes), tmp_path, minutes=10)
    assert clock[0] == 600.0, "a slow first run stops no later ones; the eighth would end too late"


def test_tuning_keeps_changes_that_lower_the_criterion(photographs, tmp_path, monkeypatch):
    """Scores are planted: 'a' and 'c' help, 'b' does not; each is tried on top of what was kept, in both scenarios."""
    worth = {"a": -1.0, "b": 0.5, "c": -0.25}

    monkeypatch.setattr(photographs, "criterion_of", lambda recipe, out: 3 + sum(worth[w] for w in recipe[1]))
    seen = []
    for name, recipe in photographs.tune(
        [["a"], ["b"], ["c"]], lambda words: [(s, (s, tuple(words))) for s in ("various", "small")], tmp_path
    ):
        seen.append(recipe)
        assert name == recipe[0]
    assert [words for _, words in seen[::2]] == [(), ("a",), ("a", "b"), ("a", "c")]
    assert (tmp_path / "chosen.txt").read_text() == "a c"


def test_the_summary_in_the_repository_is_that_of_its_records(photographs):
    folder = ROOT / "results" / "tilt"
    if not folder.exists():
        pytest.skip("no records yet")
    summary = photographs.summary(folder)
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert len(load_records(folder)) == len(list(folder.glob("*.json"))) - 1, "reading the folder skips the summary"
    text = (ROOT / "docs" / "explanation" / "tilt.md").read_text()
    for row in photographs.table(summary).splitlines():
        assert row in text, "docs/explanation/tilt.md has another table than the records make"
    readme = (ROOT / "README.md").read_text()
    for scenario in summary["cifar10"].values():
        assert f"**{scenario['mean']:.3f}** ± {scenario['std']:.3f}" in readme

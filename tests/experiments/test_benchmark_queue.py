"""The campaign on photographs can be run and summed up: its lines are different runs, and the summary is made of records."""

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


def test_every_line_is_a_run_of_its_own(photographs):
    made = [photographs.line(name, "cifar10", "small", 1) for name in photographs.LINES]
    assert len(set(made)) == len(made)
    for name in photographs.LINES:
        digits = photographs.line(name, "svhn", "various", 0)
        assert digits.views not in ("image", "flip_crop")
        assert not digits.mirror, "no digit survives the mirror"


@pytest.mark.soak
def test_a_campaign_goes_on_and_is_summed_up(photographs, tmp_path, monkeypatch):
    small = ["epochs=2", "train_bags=8", "valid_bags=4", "test_bags=4", "bag_size=6", 'backbone_options={"width":4}']
    command = [sys.executable, str(FILE), "--out", str(tmp_path), "--source", "digits", "--scenario", "various"]
    command += ["--fold", "0,1", "--lines", "best,twin", "--minutes", "2", *(w for s in small for w in ("--set", s))]
    first = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert first.stdout.count("instance 0.") == 4, first.stdout + first.stderr
    again = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert not again.stdout, "nothing is run twice"
    import scoreboard

    plain = scoreboard.line
    monkeypatch.setattr(
        scoreboard, "line",
        lambda name, source, scenario, fold: photographs.changed(plain(name, "digits", scenario, fold), small),
    )  # fmt: skip
    said = photographs.summary(tmp_path)
    assert set(said) == {"digits", "lines"}
    row = said["digits"]["various"]
    assert row["folds"] == 2
    assert row["mean"] == pytest.approx(sum(row["each"].values()) / 2, abs=1e-4)
    assert len(row["tilt"]["share"]) == 10
    assert said["lines"]["supervised twin"]["digits"]["various"]["folds"] == 2


def test_lines_are_found_by_name(photographs):
    stem = "paper's stem, nothing else: tilt"
    assert photographs.names_of("best, 200 epochs") == ["best", "200 epochs"]
    assert photographs.names_of(stem) == [stem]
    assert photographs.names_of(f"{stem}; twin") == [stem, "supervised twin"]
    with pytest.raises(HeadcountError, match="line"):
        photographs.names_of("best, 300 epochs")


def test_errands_are_lines_of_scripts_and_know_what_is_missing(photographs, tmp_path, monkeypatch):
    import errands

    for words in errands.lines_of(FILE.parent / "errands.txt"):
        assert (FILE.parent / f"{words[0]}.py").exists()
    words = ["photographs", "--out", str(tmp_path), "--source", "digits", "--scenario", "small", "--fold", "0,1"]
    short, other = errands.missing(words)
    assert {short.fold, other.fold} == {0, 1}
    (tmp_path / f"{other.key}.json").touch()
    assert errands.missing(words) == [short]
    called = []
    monkeypatch.setattr(errands, "call", called.append)
    (tmp_path / "list.txt").write_text("# a remark\nrecords --only count\nphotographs --lines 'a, b'\n")
    monkeypatch.setattr(sys, "argv", ["errands.py", str(tmp_path / "list.txt"), "--minutes", "2"])
    errands.main()
    assert [c[:3] for c in called] == [["records", "--only", "count"], ["photographs", "--lines", "a, b"]]
    assert all(c[-2] == "--minutes" and float(c[-1]) <= 2 for c in called)


def test_what_another_process_has_begun_is_passed_over(tmp_path):
    claim = tmp_path / "running" / "a.claim"
    with file_lock(claim, wait=False) as mine, file_lock(claim, wait=False) as theirs:
        assert mine
        assert not theirs
    with file_lock(claim, wait=False) as again:
        assert again
    assert not (tmp_path / "running").exists()


def test_a_campaign_expects_of_the_next_run_what_the_last_one_took(photographs, tmp_path, monkeypatch):
    import campaign

    clock, took = [0.0], iter([300.0, *7 * [50.0]])
    body = {"fit": {"valid_loss": 1.0, "best_epoch": 1}}
    record = SimpleNamespace(data=body, scores={"instance_accuracy": 0.5, "bag_accuracy": 0.5})

    def run(recipe, out, **_):
        clock[0] += next(took)
        return record

    monkeypatch.setattr(campaign.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(campaign.runs, "run", run)
    recipes = [Recipe(source="digits", fold=f, seed=s, epochs=10) for s in (0, 1) for f in range(4)]
    campaign.campaign(((str(r), r) for r in recipes), tmp_path, minutes=10)
    assert clock[0] == 600.0, "a slow beginning stops nothing that is quick now; the eighth would end too late"


def test_tuning_keeps_what_helps_by_the_criterion_alone(photographs, tmp_path, monkeypatch):
    """Scores are planted: 'a' and 'c' help, 'b' does not; each is tried on top of what was kept, in both scenarios."""
    worth = {"a": -1.0, "b": 0.5, "c": -0.25}

    monkeypatch.setattr(photographs, "criterion_of", lambda recipe, out: 3 + sum(worth[w] for w in recipe[1]))
    seen = []
    for name, recipe in photographs.tuned(
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
    said = photographs.summary(folder)
    assert json.loads((folder / "summary.json").read_text()) == json.loads(json.dumps(said))
    assert len(load_records(folder)) == len(list(folder.glob("*.json"))) - 1, (
        "a report of the folder passes over the summary"
    )
    told = (ROOT / "docs" / "explanation" / "tilt.md").read_text()
    for row in photographs.table(said).splitlines():
        assert row in told, "docs/explanation/tilt.md has another table than the records make"
    readme = (ROOT / "README.md").read_text()
    for scenario in said["cifar10"].values():
        assert f"**{scenario['mean']:.3f}** ± {scenario['std']:.3f}" in readme

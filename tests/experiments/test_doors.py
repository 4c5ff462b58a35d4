"""What a researcher asks of the command line: scenarios and options of their own, presets, a summary with tests, tables for a paper."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import ttest_rel

from headcount import Protocol, Recipe, load_source, majority_bags
from headcount.cli import printing
from headcount.errors import HeadcountError
from headcount.experiments import recipe as recipes, records, scores
from headcount.majority import metrics
from paper_factory import pretend

ROOT = Path(__file__).parents[2]
SMALL = (
    "--source digits --set backbone=linear --set train_bags=20 --set valid_bags=10 --set test_bags=10 --bag-size 10 --epochs 2"
)


# -- a scenario of one's own -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("scenario", "source"), [("0.3-0.5", "digits"), ("0.7-0.95", "standin4"), ("0.25-1", "standin4")])
def test_a_range_of_shares_is_filled_evenly(scenario, source):
    bags = majority_bags(load_source(source), 0, Protocol(scenario, bag_size=50, train_bags=200, valid_bags=10, test_bags=10))
    train = bags["train"]
    share = metrics.label_share(train.truth.numpy(), train.label.numpy(), train.bag.numpy())
    low, high = map(float, scenario.split("-"))
    assert low - 0.03 <= share.min() < low + 0.06
    assert high - 0.06 < share.max() <= min(1, high + 0.03)
    in_bins = np.histogram(share, np.linspace(low - 0.03, high + 0.03, 6))[0]
    assert in_bins.min() > 20, "a fifth of 200 in each fifth of the range, but for rounding"


def test_a_range_is_a_recipe_like_any_other(run_cli, tmp_path):
    """Its spelling does not matter, its bags are its own, and the record leads back to it."""
    code, _, err = run_cli(f"run {SMALL} --scenario 0.30-.5 --out {tmp_path}")
    assert (code, err) == (0, "")
    (record,) = records.load_records(tmp_path)
    assert record.recipe.scenario == "0.3-0.5"
    assert record.key == record.recipe.key == record.recipe.replace(scenario="0.300-0.50").key
    code, out, _ = run_cli(f"study {SMALL} --scenario 0.3-0.5,0.5-0.9,small --fold 0 --out {tmp_path}")
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("digits")] != []
    assert {r.recipe.scenario for r in records.load_records(tmp_path)} == {"0.3-0.5", "0.5-0.9", "small"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--scenario 0.5-0.3", "0.5-0.3 is no range of the majority's share"),
        ("--scenario 0.5-1.2", "0.5-1.2 is no range"),
        ("--scenario nan-0.5", "nan-0.5 is no range"),
        ("--scenario middling", "there are various, small, large, LOW-HIGH such as 0.3-0.5"),
        ("--scenario 0.05-0.3", "the largest of 10 shares is at least 0.1"),
        (
            "--scenario 0.3-0.5 --set sampler=official",
            "the official sampler knows various, small, large, not the range 0.3-0.5",
        ),
    ],
)
def test_what_is_no_scenario(run_cli, tmp_path, words, says):
    code, _, err = run_cli(f"run {SMALL} {words} --out {tmp_path}")
    assert (code, err.count("\n")) == (2, 1)
    assert says in err


# -- options of a head, and presets ------------------------------------------------------------------------------------------


def test_a_sweep_over_options(run_cli, tmp_path):
    code, out, err = run_cli(f"study {SMALL} --option t1=0.1,1 --option t2=0.1,0.5 --fold 0 --out {tmp_path}")
    assert (code, err) == (0, "")
    swept = {tuple(dict(r.recipe.options).values()) for r in records.load_records(tmp_path)}
    assert swept == {(0.1, 0.1), (0.1, 0.5), (1, 0.1), (1, 0.5)}
    assert "t1=0.1" in out
    code, _, err = run_cli(f"run {SMALL} --option t1=0.1,1 --out {tmp_path}")
    assert (code, err) == (2, "headcount: run takes one recipe, these options make 2; use `headcount study`\n")


@pytest.mark.parametrize(("preset", "source"), [("tilt-photographs", "cifar10"), ("tilt-house-numbers", "svhn")])
def test_a_preset_is_the_published_recipe(run_cli, monkeypatch, preset, source):
    """Every published run of it is found again by its key."""
    published = [r for r in records.load_records(ROOT / "results" / "tilt") if r.recipe.source == source]
    checksum = published[0].fingerprint["data"]
    monkeypatch.setattr(recipes.registry, "source_checksum", lambda name: checksum)
    code, out, err = run_cli(f"study --preset {preset} --scenario various,small,large --out {ROOT}/results/tilt --dry-run")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert len(lines) == 15
    assert [line for line in lines if not line.startswith("done")] == []


def test_other_options_change_a_preset(run_cli, tmp_path):
    """Options of the head are changed one by one; another head starts from its own."""
    code, _, err = run_cli(f"run --preset digits --epochs 1 --set lr=0.01 --set backbone.layers=1 --fold 2 --out {tmp_path}")
    assert (code, err) == (0, "")
    (record,) = records.load_records(tmp_path)
    assert record.recipe == Recipe.preset("digits").replace(
        epochs=1, lr=0.01, fold=2, backbone_options={"hidden": 128, "layers": 1}
    )
    tilt, dry = "study --preset tilt-photographs --source digits --fold 0", f"--out {tmp_path} --dry-run"
    base = Recipe.preset("tilt-photographs").replace(source="digits")
    _, out, _ = run_cli(f"{tilt} --option threshold=0.8 {dry}")
    assert base.replace(options={**dict(base.options), "threshold": 0.8}).key in out
    _, out, _ = run_cli(f"{tilt} --head count,output_mean {dry}")
    assert base.replace(head="count", options={}).key in out
    code, _, err = run_cli(f"{tilt} --preset tilt-photograph {dry}")
    assert (code, err.count("\n")) == (2, 1)
    assert "no preset 'tilt-photograph'; there are paper, tilt-photographs" in err
    with pytest.raises(HeadcountError, match="no preset"):
        Recipe.preset("")
    assert json.loads((ROOT / "src" / "headcount" / "experiments" / "presets.json").read_text()).keys() >= {"paper", "digits"}


# -- the summary of a study -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compared(tmp_path_factory) -> tuple[Path, list]:
    """Three methods with invented accuracies on five folds: the second close to the first, the third far below."""
    out = tmp_path_factory.mktemp("compared")
    gaps = {
        "count": (0, 0, 0, 0, 0),
        "output_mean": (0.01, -0.02, 0.02, 0.01, -0.01),
        "feature_mean": (0.2, 0.19, 0.22, 0.2, 0.21),
    }
    made = [
        pretend(
            Recipe(source="digits", head=head, fold=fold), out,
            scores={"instance_accuracy": 0.8 + 0.01 * fold - gap, "bag_accuracy": 0.9, "consistency_rate": None},
        )
        for head, of_folds in gaps.items() for fold, gap in enumerate(of_folds)
    ]  # fmt: skip
    return out, made


def expected_p(a: list[float], b: list[float], times: int) -> float:
    return min(1.0, times * ttest_rel(a, b).pvalue)


def test_a_study_ends_with_tests_against_its_best(compared, capsys):
    _, made = compared
    printing.print_results(scores.rows(made))
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    values = {
        h: [r.scores["instance_accuracy"] for r in made if r.recipe.head == h] for h in ("count", "output_mean", "feature_mean")
    }
    (near,), (far,) = (
        [line for line in lines if line[0] == name and "–" not in line] for name in ("Output+Mean", "Feature+Mean")
    )
    p = expected_p(values["count"], values["output_mean"], 1)
    error = np.std(np.subtract(values["count"], values["output_mean"]), ddof=1) / np.sqrt(5)
    assert near == ["Output+Mean", "-0.002", "±", f"{error:.3f}", f"{p:.3f}", "5"]
    assert far[-3:] == ["<", "0.001", "5"]
    assert expected_p(values["count"], values["feature_mean"], 2) < 0.0005


def test_a_study_as_csv_and_latex(compared, run_cli):
    out, made = compared
    code, text, err = run_cli(f"report {out} --csv")
    assert (code, err) == (0, "")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(text))}
    assert set(rows) == {"Counting Network", "Output+Mean", "Feature+Mean"}
    values = np.array([r.scores["instance_accuracy"] for r in made if r.recipe.head == "feature_mean"])
    far = rows["Feature+Mean"]
    assert float(far["instance_accuracy"]) == pytest.approx(values.mean(), abs=1e-5)
    assert float(far["instance_accuracy_std"]) == pytest.approx(values.std(), abs=1e-5)
    assert float(far["instance_accuracy_se"]) == pytest.approx(values.std(ddof=1) / np.sqrt(5), abs=1e-5)
    assert float(far["difference"]) == pytest.approx(-0.204, abs=1e-4)
    assert 0 < float(far["p_holm"]) < 1e-4
    assert (far["consistency_rate"], far["runs"], far["runs_compared"]) == ("", "5", "5")
    assert rows["Counting Network"]["p_holm"] == rows["Counting Network"]["difference"] == ""
    code, text, err = run_cli(f"report {out} --latex")
    assert (code, err) == (0, "")
    lines = text.splitlines()
    assert lines[0] == r"\begin{tabular}{lllcccccc}"
    (line,) = [line for line in lines if "Feature+Mean" in line]
    assert line.startswith(rf"digits & various & Feature+Mean & $5$ & ${values.mean():.3f} \pm {values.std():.3f}$ & $0.900")
    assert line.endswith(r"$-0.204 \pm 0.005$ & $< 0.001$ \\")
    assert not (out / "report.html").exists()
    code, _, err = run_cli(f"report {out} --latex --csv")
    assert (code, err.count("\n")) == (2, 1)


def test_the_twin_is_never_the_best_and_holm_counts_the_tests():
    assert scores.holm([0.02, math.nan, 0.5, 0.01]) == pytest.approx([0.04, math.nan, 0.5, 0.03], nan_ok=True)
    made = [
        pretend(
            Recipe(source="digits", head=head, fold=fold), scores={"instance_accuracy": value + 0.01 * fold * (value - 0.5)}
        )
        for head, value in (("supervised", 0.9), ("count", 0.8), ("attention", 0.6))
        for fold in range(3)
    ]
    rows = scores.rows(made)
    twin, best, other = scores.compare_with_best(rows)
    assert best is None
    assert twin.difference > 0 > other.difference
    assert twin.n == other.n == 3
    assert scores.compare_with_best(rows[:1]) == [None]

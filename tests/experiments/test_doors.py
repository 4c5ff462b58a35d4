"""What a researcher asks of the command line: scenarios and options of their own, presets, a summary with tests, tables for a paper."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headcount import Protocol, Recipe, load_source, majority_bags
from headcount.errors import HeadcountError
from headcount.experiments import recipe as recipes
from headcount.experiments import records
from headcount.majority import metrics

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
        ("--scenario 0.05-0.3", "the largest of 10 shares is never below 0.1"),
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

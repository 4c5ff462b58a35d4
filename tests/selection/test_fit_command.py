"""headcount fit: every kind of data, complete folders or none, one-line errors, and resuming after kills."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest
from PIL import Image

from headcount.cli import main, own_data
from headcount.models.fitted import FittedModel

CLASSES = ("cat", "dog")
FILES = ["MODEL_CARD.md", "model.json", "model.safetensors", "report.html"]


pytestmark = pytest.mark.usefixtures("fast_methods")


def rows(bags=16, size=4, seed=0):
    g = np.random.default_rng(seed)
    for b in range(bags):
        label = b % 2
        truth = [label] * 3 + [int(g.integers(2))] * (size - 3)
        for y in truth:
            yield f"bag {b}", CLASSES[label], CLASSES[y], g.normal(3 * y, 1.0), g.normal()


def table(**more):
    bag, label, truth, a, b = zip(*rows(), strict=True)
    return pa.table({"bag": bag, "label": label, "truth": truth, "a": a, "b": b, **more})


def picture_folder(folder: Path):
    """One sub-folder per bag and labels.csv."""
    g = np.random.default_rng(0)
    lines = ["bag,label"]
    for b in range(8):
        (folder / f"b{b}").mkdir(parents=True)
        lines.append(f"b{b},{CLASSES[b % 2]}")
        for i in range(3):
            pixels = (g.random((8, 8, 3)) * 80 + 150 * (b % 2)).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"b{b}" / f"{i}.png")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


def data(kind: str, folder: Path) -> tuple[Path, list[str]]:
    if kind == "csv":
        pa.csv.write_csv(table(), folder / "d.csv")
        return folder / "d.csv", []
    if kind == "parquet":
        names = ["street", "who", "really", "a", "b"]
        pa.parquet.write_table(table().rename_columns(names), folder / "d.parquet")
        return folder / "d.parquet", ["--bag", "street", "--label", "who", "--truth", "really", "--features", "a, b"]
    if kind == "labels apart":
        pa.csv.write_csv(table().drop_columns(["label", "truth"]), folder / "d.csv")
        (folder / "l.csv").write_text("bag,label\n" + "\n".join(f"bag {b},{CLASSES[b % 2]}" for b in range(16)))
        return folder / "d.csv", ["--labels", str(folder / "l.csv")]
    if kind == "npz":
        _, _, _, a, b = zip(*rows(), strict=True)
        labels = np.array([CLASSES[k % 2] for k in range(16)])
        np.savez(folder / "d.npz", features=np.stack([a, b], 1), sizes=np.array([4] * 16), labels=labels)
        return folder / "d.npz", []
    if kind == "text":
        words = {"cat": "meow purr fur", "dog": "bark wag bone"}
        reviews = [f"{words[t]} {i}" for i, t in enumerate(table()["truth"].to_pylist())]
        pa.csv.write_csv(table(review=reviews).drop_columns(["a", "b", "truth"]), folder / "d.csv")
        return folder / "d.csv", ["--text", "review"]
    return picture_folder(folder / "pictures"), ["--epochs", "1"]


KINDS = ["csv", "parquet", "labels apart", "npz", "text", "pictures"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data(kind, tmp_path, run_cli):
    path, more = data(kind, tmp_path)
    method = ["--method", "tilt"] if kind == "pictures" else ["--method", "em_forest"]
    code, out, err = run_cli("fit", path, "--out", tmp_path / "m", "--folds", 2, *method, *more)
    assert (code, err) == (0, "")
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == FILES
    assert "2 classes" in out.split("about ")[0]  # what was understood comes before anything runs
    assert "selected" in out
    assert "cannot be known from bag labels" in out
    assert not list(tmp_path.glob("m.*"))
    fitted = FittedModel.load(tmp_path / "m")
    assert fitted.classes == CLASSES
    new = fitted.read(path)
    assert fitted.predict(new.to_bags(fitted.preprocessor)).instance_probabilities.shape == (len(new.rows), 2)
    assert (fitted.metadata["scores"]["instance_accuracy"] is not None) == (kind in ("csv", "parquet"))
    card = (tmp_path / "m" / "MODEL_CARD.md").read_text()
    assert "Performance" in card


def test_a_model_is_replaced_only_with_overwrite(tmp_path, run_cli):
    path, _ = data("csv", tmp_path)
    words = ["fit", path, "--out", tmp_path / "m", "--method", "logistic", "--folds", 2]
    assert run_cli(*words)[0] == 0
    before = (tmp_path / "m" / "model.json").read_bytes()
    code, out, err = run_cli(*words)
    assert code == 2
    assert "--overwrite" in err
    assert out == ""  # before anything was read
    assert (tmp_path / "m" / "model.json").read_bytes() == before
    assert run_cli(*words, "--overwrite", "--seed", 1)[0] == 0
    assert json.loads((tmp_path / "m" / "model.json").read_text())["metadata"]["seed"] == 1


MISTAKES = {
    "no data": (["nowhere.csv"], "no file or folder"),
    "no such column": (["d.csv", "--bag", "street"], "no column 'street'"),
    "method": (["d.csv", "--method", "tlit"], "did you mean 'tilt'"),
    "head": (["d.csv", "--head", "cuont"], "no head"),
    "ties": (["d.csv", "--ties", "both"], "rule for ties"),
    "folds": (["d.csv", "--folds", "1"], "folds"),
    "minutes": (["d.csv", "--minutes", "-1"], "minutes"),
    "device": (["d.csv", "--device", "tpu"], "device"),
    "option": (["d.csv", "--head", "tilt", "--option", "share"], "NAME=VALUE"),
    "unknown option": (["d.csv", "--head", "tilt", "--option", "shar=1"], "did you mean 'share'"),
    "one class": (["same.csv"], "two classes"),
    "one label": (["same.csv", "--classes", "cat,dog"], "have the same label"),
    "not a number": (["d.csv", "--minutes", "soon"], "minutes"),
    "out is a file": (["d.csv", "--out", "d.csv"], "is a file"),
    "out is full": (["d.csv", "--out", "full"], "not empty"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_an_error_is_one_line_and_leaves_no_files(what, tmp_path, monkeypatch, run_cli):
    monkeypatch.chdir(tmp_path)
    data("csv", tmp_path)
    one = table().filter(pa.compute.equal(table()["label"], "cat"))
    pa.csv.write_csv(one.drop_columns(["truth"]), tmp_path / "same.csv")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("x")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    words, why = MISTAKES[what]
    words = words if "--out" in words else [*words, "--out", "m"]
    code, _, err = run_cli("fit", *words)
    assert code == 2
    assert why in err
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.rglob("*")) == before


@pytest.mark.parametrize("what", ["method", "head", "folds", "minutes", "device"])
def test_arguments_are_checked_before_the_data_are_read(what, run_cli):
    (_, *words), why = MISTAKES[what]
    code, _, err = run_cli("fit", "nowhere.csv", *words, "--out", "m")
    assert code == 2
    assert why in err


def test_an_error_while_writing_leaves_no_model(tmp_path, monkeypatch):
    path, _ = data("csv", tmp_path)
    monkeypatch.setattr("headcount.reporting.model_pages.model_card", lambda fitted: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main.app(
            ["fit", str(path), "--out", str(tmp_path / "m"), "--method", "logistic", "--folds", "2"], standalone_mode=False
        )
    assert not (tmp_path / "m").exists()
    assert not (tmp_path / "m.part").exists()


def test_notes_name_options_as_typed(tmp_path):
    notes: list[str] = []
    pa.csv.write_csv(table(note=[f"words of row {i}" for i in range(64)]), tmp_path / "d.csv")
    own_data.read_data(str(tmp_path / "d.csv"), {}, labels=True, log=notes.append)
    assert any(line.endswith("name it with --text)") for line in notes)


def test_skip_bad_lists_what_was_skipped(tmp_path, run_cli):
    folder = picture_folder(tmp_path / "p")
    (folder / "b0" / "0.png").write_bytes(b"no picture")
    words = ["fit", folder, "--out", tmp_path / "m", "--method", "tilt", "--epochs", 1, "--folds", 2]
    code, _, err = run_cli(*words)
    assert code == 2
    assert "0.png" in err
    code, out, _ = run_cli(*words, "--skip-bad")
    assert code == 0
    assert "skipped: " in out
    assert any("0.png" in line for line in FittedModel.load(tmp_path / "m").metadata["data"]["skipped"])


@pytest.mark.soak
def test_a_fit_that_is_killed_many_times_gives_the_same_model(tmp_path):
    path, _ = data("csv", tmp_path)
    words = [sys.executable, "-m", "headcount", "fit", str(path), "--folds", "3", "--epochs", "4"]
    env = {**os.environ, "HEADCOUNT_CHECKPOINT_SECONDS": "0"}
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True, env=env, capture_output=True)
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    for k in range(30):
        at = subprocess.Popen([*words, "--out", str(tmp_path / "m")], env=env, stdout=subprocess.DEVNULL)
        try:
            at.wait(timeout=6 + 2 * k)
        except subprocess.TimeoutExpired:
            at.send_signal(signal.SIGKILL if k % 2 else signal.SIGINT)
            at.wait()
            if (tmp_path / "m").exists():  # the blow fell when the model was in place: once more
                assert (tmp_path / "m" / "model.safetensors").read_bytes() == whole
                shutil.rmtree(tmp_path / "m")
            time.sleep(0.1)
        else:
            assert at.returncode == 0
            break
    assert (tmp_path / "m" / "model.safetensors").read_bytes() == whole
    assert not list(tmp_path.glob("m.*"))


def test_a_private_model_writes_about_bags_alone(tmp_path, run_cli):
    """Small bags are refused or left out, and so is every output of single instances."""
    source, model, shares = tmp_path / "data.csv", tmp_path / "model", tmp_path / "shares.csv"
    small = pa.table({"bag": ["tiny"], "label": ["cat"], "truth": ["cat"], "a": [0.0], "b": [0.0]})
    pyarrow.csv.write_csv(pa.concat_tables([table(), small]), source)
    fit = ["fit", source, "--out", model, "--method", "forest", "--private", 4]
    code, _, err = run_cli(*fit)
    assert code == 2
    assert "1 bag has fewer than 4 instances" in err
    assert "--skip-bad" in err
    assert run_cli(*fit, "--skip-bad")[0] == 0
    saved = json.loads((model / "model.json").read_text())["metadata"]
    assert saved["min_bag_size"] == 4
    assert saved["data"]["bag_hashes"] == ""
    assert saved["data"]["bags"] == 16
    assert "tiny" not in (model / "model.json").read_text() + (model / "report.html").read_text()
    assert "not differentially private" in (model / "MODEL_CARD.md").read_text()
    for command, *options in (
        ["predict", "--out", "p.csv"],
        ["predict", "--bags", shares, "--geojson", "folder"],
        ["predict", "--bags", shares, "--heatmap", "folder"],
        ["explain", "--out", "e.html"],
        ["audit", "--out", "a.csv"],
    ):
        code, _, err = run_cli(command, model, source, *options, "--skip-bad")
        assert (code, "writes about single instances" in err) == (2, True), err
    code, _, err = run_cli("export", model, "--onnx", "m.onnx")
    assert code == 2
    assert "writes about single instances" in err
    code, _, err = run_cli("predict", model, source, "--bags", shares)
    assert code == 2
    assert "fewer than 4 instances" in err
    code, _, err = run_cli("predict", model, source)
    assert code == 2
    assert "nothing to write" in err
    code, _, err = run_cli("predict", model, source, "--bags", shares, "--skip-bad")
    assert code == 0
    assert pyarrow.csv.read_csv(shares).num_rows == 16
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data.csv", "model", "shares.csv"]


def test_label_noise_is_read_and_recorded(tmp_path, run_cli):
    source, model, plain = tmp_path / "data.csv", tmp_path / "model", tmp_path / "plain"
    pyarrow.csv.write_csv(table(), source)
    assert run_cli("fit", source, "--out", model, "--method", "em_forest", "--label-noise", 0.3)[0] == 0
    assert "replaced by one at random with probability 0.3" in (model / "MODEL_CARD.md").read_text()
    assert run_cli("fit", source, "--out", plain, "--method", "em_forest")[0] == 0
    with_noise, without = (FittedModel.load(folder) for folder in (model, plain))
    assert with_noise.transition.share.mean() > without.transition.share.mean()
    assert with_noise.metadata["data"]["fingerprint"] != without.metadata["data"]["fingerprint"]
    code, _, err = run_cli("check", source, "--label-noise", 2)
    assert code == 2
    assert "label_noise" in err
    votes = pa.table({"bag": ["x", "y"], "cat": [1, 2], "dog": [2, 1], "a": [0.1, 0.2]})
    pyarrow.csv.write_csv(votes, tmp_path / "votes.csv")
    code, _, err = run_cli("check", "votes.csv", "--votes", "cat,dog", "--label-noise", 0.2)
    assert code == 2
    assert "is for labels" in err

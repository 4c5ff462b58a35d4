"""Backbones of timm and torchvision: features are computed once, every method is fitted to them, and the model is self-contained."""

from __future__ import annotations

import csv
import json
import logging
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file as save_torch
from sklearn.base import clone

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.experiments.recipe import Recipe
from headcount.models import library_backbones
from headcount.models.fitted import FittedModel
from headcount.selection import methods, time_budget
from headcount.selection.fit import fit
from headcount.selection.methods import build_methods
from library_factory import CLASSES, Net, dark_and_bright, image_bags, published


@pytest.fixture
def cached(fast_methods, monkeypatch, tmp_path):
    """Features are kept in the test's own cache."""
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path / "cache"))


@pytest.fixture
def run_fast(cached, run_cli):
    """run_cli with small forests, no timing and a cache."""
    return run_cli


def picture_folder(folder: Path) -> Path:
    lines = ["bag,label"]
    for b, images in enumerate(image_bags()):
        (folder / f"b{b}").mkdir(parents=True)
        lines.append(f"b{b},{CLASSES[b % 2]}")
        for i, pixels in enumerate(images):
            Image.fromarray(pixels).save(folder / f"b{b}" / f"{i}.png")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


# -- headcount fit --------------------------------------------------------------------------------------------------------


NO_NETWORK = ("em_forest", "logistic")


@pytest.mark.parametrize("method", ["auto", "tilt", "em_forest", "logistic", "count"])
def test_every_method_for_features_is_fitted_to_images(method, downloads, cached, tmp_path):
    lines = []
    made = fit(
        dark_and_bright(),
        method,
        backbone="timm:small",
        epochs=None if method in NO_NETWORK else 3,
        folds=2,
        work=tmp_path / "work",
        log=lines.append,
    )
    facts = made.metadata
    tried = {c["name"] for c in facts["methods"]}
    assert tried == (set(methods.TABLE_METHODS) if method == "auto" else {method, *methods.FIXED_COST_METHODS})
    assert facts["frozen_backbone"]["backbone"] == "timm:small"
    assert (facts["frozen_backbone"]["features"], facts["data"]["kind"]) == (6, "images")
    assert any("download" in line for line in lines)
    assert any("timm:small (frozen, weights pretrained) computes 6 features" in line for line in facts["data"]["description"])
    assert made.frozen_backbone is not None
    assert made.preprocessor.shape == (8, 8, 3)
    bags = dark_and_bright().to_bags()
    made.save(tmp_path / "m")
    downloads.clear()
    again = FittedModel.load(tmp_path / "m")
    assert downloads == [], "nothing is fetched when a model is loaded"
    assert np.array_equal(made.predict(bags).instance_probabilities, again.predict(bags).instance_probabilities)


@pytest.mark.soak
def test_every_command_on_a_model_with_a_frozen_backbone(downloads, run_fast, tmp_path):
    """Each command works from the model's folder alone."""
    pytest.importorskip("onnxruntime")
    data, model, weights = picture_folder(tmp_path / "data"), tmp_path / "m", tmp_path / "w.safetensors"
    save_torch(published(Net(3, 10)).state_dict(), weights)
    words = ["--backbone", "timm:small", "--weights", weights, "--size", 12, "--folds", 2, "--epochs", 20]
    code, out, err = run_fast("fit", data, "--out", model, *words, "--method", "tilt,em_forest")
    assert code == 0, err
    assert "computing features of 48 images once with timm:small" in out
    assert downloads == []
    assert len(list((tmp_path / "cache" / "features").glob("*.npy"))) == 1
    saved = json.loads((model / "model.json").read_text())
    assert saved["frozen_backbone"] == {"backbone": "timm:small", "size": 12}
    assert saved["metadata"]["frozen_backbone"]["weights"] == "w.safetensors"
    weights.unlink()
    for path in (tmp_path / "cache").rglob("*.npy"):
        path.unlink()
    assert run_fast("predict", model, data, "--out", tmp_path / "p.csv")[0] == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    bright = [np.asarray(Image.open(data / r["file"])).mean() > 110 for r in rows]
    right = [(r["prediction"] == "b") == b for r, b in zip(rows, bright, strict=True)]
    assert len(rows) == 48
    assert np.mean(right) > 0.8, "it tells dark from bright"
    code, out, _ = run_fast("evaluate", model, data, "--json")
    assert (code, json.loads(out)["trained_on_these"]) == (0, True)
    assert run_fast("explain", model, data, "--out", tmp_path / "e.html")[0] == 0
    assert "data:image" in (tmp_path / "e.html").read_text()
    assert run_fast("issues", data, "--model", model)[0] == 0
    assert run_fast("audit", model, data, "--count", 8, "--out", tmp_path / "sheet.csv")[0] == 0
    code, _, err = run_fast("export", model, "--onnx", tmp_path / "m.onnx")
    assert (code, "onnxruntime gives the model's predictions" in err) == (0, True), err


def test_a_trained_backbone_starts_from_the_weights(downloads, cached, monkeypatch):
    started = []
    into = library_backbones.PretrainedBackbone.load_into
    monkeypatch.setattr(
        library_backbones.PretrainedBackbone,
        "load_into",
        lambda self, b: (into(self, b), started.append(b.net.conv.weight.clone()))[0],
    )
    made = fit(dark_and_bright(), "tilt", backbone="timm:small", frozen=False, size=12, epochs=2, folds=2)
    assert made.frozen_backbone is None
    assert {c["name"] for c in made.metadata["methods"]} == {"tilt", "noisy_label"}
    assert (made.estimator.config.backbone, dict(made.estimator.config.backbone_options)) == ("timm:small", {"size": 12})
    want = published(Net(3, 0)).conv.weight
    assert started
    assert all(torch.equal(w, want) for w in started), "each fold begins there"
    assert not torch.equal(made.estimator.backbone.net.conv.weight, want), "and goes on"
    assert made.estimator.normalize.mean.tolist() == [0.5] * 3, "pictures as the weights know them"
    assert made.metadata["method"]["parameters"]["pretrained"]["weights"] == "pretrained"


def test_without_weights_it_is_trained_and_fetches_nothing(downloads, cached, tmp_path):
    made = fit(dark_and_bright(), "tilt", backbone="torchvision:small", weights="none", epochs=2, folds=2)
    assert made.frozen_backbone is None
    assert downloads == []
    assert made.estimator.normalize.mean.tolist() != [0.5] * 3
    made.save(tmp_path / "m")
    assert FittedModel.load(tmp_path / "m").estimator.config.backbone == "torchvision:small"


def test_other_weights_have_another_resume_folder(downloads, cached, tmp_path, monkeypatch):
    """Folds that were finished with one set of weights are not used with another."""
    monkeypatch.setattr(
        "headcount.selection.search.ModelSearch.train_final", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    state = published(Net(3, 10)).state_dict()
    for k, scale in enumerate((1.0, 2.0, 2.0)):
        save_torch({**state, "conv.bias": state["conv.bias"] * scale}, tmp_path / "w.safetensors")
        with pytest.raises(KeyboardInterrupt):
            fit(
                dark_and_bright(), "logistic", backbone="timm:small", weights=str(tmp_path / "w.safetensors"), folds=2,
                work=tmp_path / "work",
            )  # fmt: skip
        assert len(list((tmp_path / "work").iterdir())) == min(k, 1) + 1


@pytest.mark.parametrize(("words", "why"), [
    ("--backbone timm:unheard_of", "has no model"), ("--backbone timm:../x", "plain name"),
    ("--backbone mlp --frozen", "frozen is for"), ("--backbone timm:small --weights w.pt", "FILE.safetensors"),
    ("--backbone timm:small --weights missing.safetensors", "cannot read missing.safetensors"),
    ("--backbone timm:small --weights none --frozen", "is useless"), ("--backbone timm:small --size 3", "8 to 2048"),
    ("--backbone timm:picky", "give the size it was made for"), ("--backbone timm:offline", "could not be loaded"),
    ("--backbone timm:small --views tissue", "computed once"),
    ("--backbone timm:small --trained --method forest", "reads features"), ("--size 12", "size is for"),
])  # fmt: skip
def test_mistakes_are_one_line(words, why, downloads, run_fast, tmp_path):
    code, _, err = run_fast("fit", picture_folder(tmp_path / "data"), "--out", tmp_path / "m", *words.split())
    assert code == 2
    assert why in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "m").exists()


def test_image_backbones_are_refused_for_tables(downloads, run_fast, tmp_path):
    (tmp_path / "d.csv").write_text("bag,label,a\n" + "\n".join(f"{b},{b % 2},{b}" for b in range(8)))
    code, _, err = run_fast("fit", tmp_path / "d.csv", "--out", tmp_path / "m", "--backbone", "timm:small")
    assert (code, "reads images" in err) == (2, True), err


def test_a_missing_library_is_reported_before_the_data_are_read(run_fast, tmp_path, monkeypatch):
    real = library_backbones.importlib.import_module

    def broken(name, *package):
        if name == "timm":
            raise ImportError("none")
        return real(name, *package)

    monkeypatch.setattr(library_backbones.importlib, "import_module", broken)
    code, _, err = run_fast("fit", tmp_path / "nothing", "--out", tmp_path / "m", "--backbone", "timm:resnet18")
    assert code == 2
    assert "headcount[vision]" in err


def test_a_recipe_takes_plain_names_only():
    assert Recipe(backbone="timm:resnet18").backbone == "timm:resnet18"
    for wrong in ("timm:hf-hub:evil/model", "keras:x", "vgg", 3, None):
        with pytest.raises(HeadcountError):
            Recipe(backbone=wrong)


# -- MajorityClassifier and ONNX --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["em_forest", "tilt"])
def test_the_estimator_is_fitted_to_images(estimator, downloads, caplog):
    bags, labels = image_bags(), [CLASSES[b % 2] for b in range(12)]
    model = MajorityClassifier(estimator, backbone="timm:small", size=12, epochs=3 if estimator == "tilt" else None)
    assert clone(model).get_params()["backbone"] == "timm:small"
    with caplog.at_level(logging.WARNING):
        model.fit(bags, labels)
    assert "download" in caplog.text
    assert model.fitted_.frozen_backbone.size == 12
    assert [p.shape for p in model.predict_proba(bags)] == [(4, 2)] * 12
    want = model.fitted_.predict(Bags.of(Pool(np.concatenate(bags)), sizes=[4] * 12, labels=[-1] * 12, classes=2))
    assert np.allclose(np.concatenate(model.predict_proba(bags)), want.instance_probabilities, atol=1e-6)


def test_the_estimator_trains_a_backbone(downloads):
    bags, labels = image_bags(), [CLASSES[b % 2] for b in range(12)]
    model = MajorityClassifier(backbone="timm:small", weights="none", epochs=2).fit(bags, labels)
    assert model.fitted_.frozen_backbone is None
    assert model.fitted_.estimator.config.backbone == "timm:small"
    with pytest.raises(HeadcountError, match="weights is for"):
        MajorityClassifier(weights="none").fit(bags, labels)


@pytest.mark.parametrize("method", ["em_forest", "logistic", "tilt"])
def test_the_onnx_file_contains_the_frozen_backbone(method, downloads, cached, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    from headcount.models import onnx

    made = fit(dark_and_bright(), method, backbone="timm:small", epochs=None if method in NO_NETWORK else 2, folds=2)
    onnx.export_onnx(made, tmp_path / "m.onnx")
    session = runtime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    x = dark_and_bright().to_bags().pool.data
    got = session.run(["probabilities"], {"instances": x.numpy()})[0]
    singles = Bags.of(Pool(x), sizes=[1] * len(x), labels=[-1] * len(x), classes=CLASSES)
    want = made.predict(singles, use_context=False).instance_probabilities
    assert np.abs(got - want).max() < 1e-5


def test_the_time_of_computing_features_counts(monkeypatch):
    """A minute and a half allows five folds of methods of two seconds; ten seconds allow fewer."""
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 2.0)
    bags = dark_and_bright().bags
    made = build_methods("auto", bags)
    full, late = (
        time_budget.make_plan(made, 5, bags, bags, torch.device("cpu"), minutes=1.5, started=time.monotonic() - s)
        for s in (0, 80)
    )
    assert (full.folds, full.epoch_fraction) == (5, 1.0)
    assert late.total_seconds <= 10 * time_budget.TIME_MARGIN < full.total_seconds

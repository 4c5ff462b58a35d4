"""Backbones of timm and torchvision: features are computed once, every method is fitted to them, and the model is self-contained."""

from __future__ import annotations

import csv
import json
import logging
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch
from sklearn.base import clone

from headcount.bags import Bags, Pool
from headcount.cli import main
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.experiments.recipe import Recipe
from headcount.models import library_backbones
from headcount.models.fitted import FittedModel
from headcount.models.frozen_backbone import FrozenBackbone, extract_features
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import estimator_probabilities, predict
from headcount.readers import read
from headcount.selection import methods, time_budget
from headcount.selection.fit import fit
from headcount.selection.methods import build_methods
from library_factory import CLASSES, Net, published, stand_in
from model_factory import even


@pytest.fixture
def downloads(monkeypatch):
    return stand_in(monkeypatch)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """Small forests, no timing, a cache of its own."""
    monkeypatch.setattr(methods, "N_TREES", 5)
    monkeypatch.setattr(methods, "EM_ROUNDS", 1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 0.1)
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path / "cache"))


@pytest.fixture
def typed(monkeypatch, capsys, small):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headcount", *map(str, words)])
        with pytest.raises(SystemExit) as e:
            main.main()
        said = capsys.readouterr()
        return int(e.value.code or 0), said.out, said.err

    return run


def shots(bags: int = 12, size: int = 4, side: int = 8, channels: int = 3) -> list[np.ndarray]:
    """Class a is dark, class b is bright; one of each bag is of the other class."""
    g = np.random.default_rng(0)
    held = []
    for b in range(bags):
        bright = np.array([b % 2] * (size - 1) + [1 - b % 2])
        pixels = g.integers(0, 128, (size, side, side, channels)) + 100 * bright[:, None, None, None]
        held.append(pixels.astype(np.uint8))
    return held


def reading(**more):
    held = shots(**more)
    return read(held, labels=[CLASSES[b % 2] for b in range(len(held))])


def picture_folder(folder: Path) -> Path:
    lines = ["bag,label"]
    for b, held in enumerate(shots()):
        (folder / f"b{b}").mkdir(parents=True)
        lines.append(f"b{b},{CLASSES[b % 2]}")
        for i, pixels in enumerate(held):
            Image.fromarray(pixels).save(folder / f"b{b}" / f"{i}.png")
    (folder / "labels.csv").write_text("\n".join(lines))
    return folder


def an_eye(shape=(8, 8, 3), **more) -> FrozenBackbone:
    return FrozenBackbone.from_pretrained(library_backbones.load_pretrained("timm:small", shape, **more), shape)


# -- the frozen backbone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_those_of_the_network_in_half_precision(channels, downloads):
    bags = reading(channels=channels).to_bags()
    eye = an_eye((8, 8, channels))
    net = published(Net(3, 0)).eval()
    x = bags.pool.data.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
    with torch.no_grad():
        want = net((x.float() / 255 - 0.5) / 0.25)
    got = eye(bags.pool.data)
    assert got.dtype == torch.float16
    assert torch.allclose(got.float(), want, rtol=1e-3, atol=1e-3)
    seen = eye.lazy_features(bags.pool)
    assert (len(seen), seen.shape, seen.kind) == (len(bags.pool), (6,), "features")
    some = torch.tensor([5, 2, 2])
    assert torch.allclose(seen.take(some).float(), want[some], rtol=1e-3, atol=1e-3)
    assert seen.take(some[:0]).shape == (0, 6)


def test_features_are_computed_once(downloads, tmp_path):
    bags, calls, told = reading().to_bags(), [], []
    eye = an_eye()
    eye.backbone.net.register_forward_hook(lambda *_: calls.append(1))
    first = extract_features(eye, bags, tmp_path, on_progress=lambda done, of: told.append((done, of)))
    assert (len(calls), told) == (1, [(48, 48)])
    again = extract_features(eye, bags, tmp_path)
    assert len(calls) == 1
    assert first.pool.data.dtype == torch.float16
    assert torch.equal(first.pool.data, again.pool.data)
    assert torch.equal(first.pool.data, eye(bags.pool.data))
    assert len(list((tmp_path / "features").iterdir())) == 1
    one = bags.pool.data.clone()
    one[7, 3, 3, 1] ^= 1  # another picture, by one bit
    extract_features(eye, Bags.of(Pool(one), sizes=[48], labels=[0], classes=2), tmp_path)
    with torch.no_grad():
        eye.backbone.net.conv.weight.add_(0.1)
    other = extract_features(eye, bags, tmp_path)
    assert not torch.equal(first.pool.data, other.pool.data)
    extract_features(an_eye(size=12), bags, tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 4


def test_a_failure_leaves_no_incomplete_cache(downloads, tmp_path):
    eye, count = an_eye(), []

    def fail(*_):
        count.append(1)
        if len(count) == 3:
            raise OSError(28, "full")

    eye.backbone.net.register_forward_hook(fail)
    with pytest.raises(OSError, match="full"):
        extract_features(eye, reading().to_bags(), tmp_path, batch_images=10)
    assert list(tmp_path.rglob("*.npy*")) == []


@pytest.mark.parametrize("head", ["tilt", "attention"])
def test_a_model_on_a_frozen_backbone_predicts_as_on_its_features(head, downloads, tmp_path):
    r = reading()
    bags, eye = r.to_bags(), an_eye()
    features = extract_features(eye, bags, tmp_path)
    torch.manual_seed(0)
    body = Model(ModelConfig((6,), CLASSES, "mlp", (("hidden", 8),), head)).eval()
    whole = FittedModel(body, CLASSES, r.fit_preprocessor(), even(2), frozen_backbone=eye)
    want = predict(body, features)
    for batch in (8192, 5):
        got = whole.predict(bags, batch_instances=batch)
        assert np.allclose(got.instance_probabilities, want.instance.softmax(1), atol=1e-5)
    whole.save(tmp_path / "m")
    assert np.array_equal(
        FittedModel.load(tmp_path / "m").predict(bags).instance_probabilities,
        whole.predict(bags).instance_probabilities,
    )
    with pytest.raises(HeadcountError, match="shape"):
        whole.predict(features)


# -- headcount fit -----------------------------------------------------------------------------------------------------


NO_NETWORK = ("em_forest", "logistic")


@pytest.mark.parametrize("method", ["auto", "tilt", "em_forest", "logistic", "count"])
def test_every_method_for_features_is_fitted_to_images(method, downloads, small, tmp_path):
    lines = []
    made = fit(
        reading(),
        method,
        backbone="timm:small",
        epochs=None if method in NO_NETWORK else 3,
        folds=2,
        work=tmp_path / "work",
        log=lines.append,
    )
    facts = made.metadata
    tried = {c["name"] for c in facts["methods"]}
    assert tried == (set(methods.TABLE_METHODS) if method == "auto" else {method, "forest", "logistic"})
    assert facts["frozen_backbone"]["backbone"] == "timm:small"
    assert (facts["frozen_backbone"]["features"], facts["data"]["kind"]) == (6, "images")
    assert any("download" in line for line in lines)
    assert any(
        "timm:small (frozen, weights pretrained) computes 6 features" in line for line in facts["data"]["description"]
    )
    assert made.frozen_backbone is not None
    assert made.preprocessor.shape == (8, 8, 3)
    bags = reading().to_bags()
    made.save(tmp_path / "m")
    downloads.clear()
    again = FittedModel.load(tmp_path / "m")
    assert downloads == [], "nothing is fetched when a model is loaded"
    assert np.array_equal(made.predict(bags).instance_probabilities, again.predict(bags).instance_probabilities)


@pytest.mark.soak
def test_every_command_on_a_model_with_a_frozen_backbone(downloads, typed, tmp_path):
    """Each command works from the model's folder alone."""
    pytest.importorskip("onnxruntime")
    data, model, weights = picture_folder(tmp_path / "data"), tmp_path / "m", tmp_path / "w.safetensors"
    save_torch(published(Net(3, 10)).state_dict(), weights)
    words = ["--backbone", "timm:small", "--weights", weights, "--size", 12, "--folds", 2, "--epochs", 20]
    code, out, err = typed("fit", data, "--out", model, *words, "--method", "tilt,em_forest")
    assert code == 0, err
    assert "computing features of 48 images once with timm:small" in out
    assert downloads == []
    assert len(list((tmp_path / "cache" / "features").iterdir())) == 1
    said = json.loads((model / "model.json").read_text())
    assert said["frozen_backbone"] == {"backbone": "timm:small", "size": 12}
    assert said["metadata"]["frozen_backbone"]["weights"] == "w.safetensors"
    weights.unlink()
    for path in (tmp_path / "cache").rglob("*.npy"):
        path.unlink()
    assert typed("predict", model, data, "--out", tmp_path / "p.csv")[0] == 0
    rows = list(csv.DictReader((tmp_path / "p.csv").read_text().splitlines()))
    bright = [np.asarray(Image.open(data / r["file"])).mean() > 110 for r in rows]
    right = [(r["prediction"] == "b") == b for r, b in zip(rows, bright, strict=True)]
    assert len(rows) == 48
    assert np.mean(right) > 0.8, "it tells dark from bright"
    code, out, _ = typed("evaluate", model, data, "--json")
    assert (code, json.loads(out)["trained_on_these"]) == (0, True)
    assert typed("explain", model, data, "--out", tmp_path / "e.html")[0] == 0
    assert "data:image" in (tmp_path / "e.html").read_text()
    assert typed("issues", data, "--model", model)[0] == 0
    assert typed("audit", model, data, "--count", 8, "--out", tmp_path / "sheet.csv")[0] == 0
    code, _, err = typed("export", model, "--onnx", tmp_path / "m.onnx")
    assert (code, "onnxruntime gives the model's predictions" in err) == (0, True), err


def test_a_trained_backbone_starts_from_the_weights(downloads, small, monkeypatch):
    started = []
    into = library_backbones.PretrainedBackbone.load_into
    monkeypatch.setattr(
        library_backbones.PretrainedBackbone,
        "load_into",
        lambda self, b: (into(self, b), started.append(b.net.conv.weight.clone()))[0],
    )
    made = fit(reading(), "tilt", backbone="timm:small", frozen=False, size=12, epochs=2, folds=2)
    assert made.frozen_backbone is None
    assert {c["name"] for c in made.metadata["methods"]} == {"tilt", "noisy_label"}
    assert (made.estimator.config.backbone, dict(made.estimator.config.backbone_options)) == (
        "timm:small",
        {"size": 12},
    )
    want = published(Net(3, 0)).conv.weight
    assert started
    assert all(torch.equal(w, want) for w in started), "each fold begins there"
    assert not torch.equal(made.estimator.backbone.net.conv.weight, want), "and goes on"
    assert made.estimator.normalize.mean.tolist() == [0.5] * 3, "pictures as the weights know them"
    assert made.metadata["method"]["parameters"]["pretrained"]["weights"] == "pretrained"


def test_without_weights_it_is_trained_and_fetches_nothing(downloads, small, tmp_path):
    made = fit(reading(), "tilt", backbone="torchvision:small", weights="none", epochs=2, folds=2)
    assert made.frozen_backbone is None
    assert downloads == []
    assert made.estimator.normalize.mean.tolist() != [0.5] * 3
    made.save(tmp_path / "m")
    assert FittedModel.load(tmp_path / "m").estimator.config.backbone == "torchvision:small"


def test_other_weights_have_another_resume_folder(downloads, small, tmp_path, monkeypatch):
    """Folds that were finished with one set of weights are not used with another."""
    monkeypatch.setattr(
        "headcount.selection.search.ModelSearch.train_final", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    state = published(Net(3, 10)).state_dict()
    for k, scale in enumerate((1.0, 2.0, 2.0)):
        save_torch({**state, "conv.bias": state["conv.bias"] * scale}, tmp_path / "w.safetensors")
        with pytest.raises(KeyboardInterrupt):
            fit(
                reading(), "logistic", backbone="timm:small", weights=str(tmp_path / "w.safetensors"), folds=2,
                work=tmp_path / "work",
            )  # fmt: skip
        assert len(list((tmp_path / "work").iterdir())) == min(k, 1) + 1


@pytest.mark.parametrize(("words", "why"), [
    ("--backbone timm:unheard_of", "has no model"), ("--backbone timm:../x", "plain name"),
    ("--backbone mlp --frozen", "frozen is for"), ("--backbone timm:small --weights w.pt", "FILE.safetensors"),
    ("--backbone timm:small --weights missing.safetensors", "cannot read the weights"),
    ("--backbone timm:small --weights none --frozen", "random weights is useless"), ("--backbone timm:small --size 3", "8 to 2048"),
    ("--backbone timm:picky", "give the size it was made for"), ("--backbone timm:offline", "could not be loaded"),
    ("--backbone timm:small --views tissue", "computed once"),
    ("--backbone timm:small --trained --method forest", "reads features"), ("--size 12", "size is for"),
])  # fmt: skip
def test_mistakes_are_one_line(words, why, downloads, typed, tmp_path):
    code, _, err = typed("fit", picture_folder(tmp_path / "data"), "--out", tmp_path / "m", *words.split())
    assert code == 2
    assert why in err
    assert len(err.strip().splitlines()) == 1
    assert not (tmp_path / "m").exists()


def test_image_backbones_are_refused_for_tables(downloads, typed, tmp_path):
    (tmp_path / "d.csv").write_text("bag,label,a\n" + "\n".join(f"{b},{b % 2},{b}" for b in range(8)))
    code, _, err = typed("fit", tmp_path / "d.csv", "--out", tmp_path / "m", "--backbone", "timm:small")
    assert (code, "reads images" in err) == (2, True), err


def test_a_missing_library_is_reported_before_the_data_are_read(typed, tmp_path, monkeypatch):
    def broken(name):
        raise ImportError("none")

    monkeypatch.setattr(library_backbones.importlib, "import_module", broken)
    code, _, err = typed("fit", tmp_path / "nothing", "--out", tmp_path / "m", "--backbone", "timm:resnet18")
    assert code == 2
    assert "headcount[vision]" in err


def test_a_recipe_takes_plain_names_only():
    assert Recipe(backbone="timm:resnet18").backbone == "timm:resnet18"
    for wrong in ("timm:hf-hub:evil/model", "keras:x", "vgg", 3, None):
        with pytest.raises(HeadcountError):
            Recipe(backbone=wrong)


# -- forged models -----------------------------------------------------------------------------------------------------


def forged(folder: Path, change=None, arrays=None) -> Path:
    network = an_eye(size=12)
    estimator = Model(ModelConfig((6,), CLASSES, "linear", (), "tilt")).eval()
    FittedModel(estimator, CLASSES, reading().fit_preprocessor(), even(2), frozen_backbone=network).save(folder / "m")
    if change is not None:
        data = json.loads((folder / "m" / "model.json").read_text())
        (folder / "m" / "model.json").write_text(json.dumps(change(data)))
    if arrays is not None:
        tensors = load_file(folder / "m" / "model.safetensors")
        save_file(arrays(tensors), folder / "m" / "model.safetensors")
    return folder / "m"


@pytest.mark.parametrize(("change", "message"), [
    (lambda s: {**s, "frozen_backbone": None}, "the frozen backbone"), (lambda s: {**s, "frozen_backbone": {"backbone": "timm:small"}}, "the frozen backbone lacks"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "more": 1}}, "the frozen backbone lacks"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "size": 1 << 30}}, "8 to 2048"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "size": True}}, "8 to 2048"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "size": "12"}}, "8 to 2048"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "backbone": ["timm:small"]}}, "none of a library"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "backbone": "resnet18"}}, "none of a library"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "backbone": "timm:hf-hub:evil/model"}}, "plain name"),
    (lambda s: {**s, "frozen_backbone": {**s["frozen_backbone"], "backbone": "os:system"}}, "library"),
    (lambda s: {k: v for k, v in s.items() if k != "frozen_backbone"}, "belongs to nothing"),
])  # fmt: skip
def test_forged_metadata_of_a_backbone_are_refused(change, message, downloads, tmp_path):
    path = forged(tmp_path, change)
    downloads.clear()
    with pytest.raises(HeadcountError, match=message) as e:
        FittedModel.load(path)
    assert "\n" not in str(e.value)
    assert downloads == []


@pytest.mark.parametrize("arrays", [
    lambda a: {k: v for k, v in a.items() if k != "frozen_backbone.backbone.net.conv.bias"},
    lambda a: {**a, "frozen_backbone.more": np.ones(3, np.float32)},
    lambda a: {**a, "frozen_backbone.backbone.net.conv.bias": np.ones(7, np.float32)},
    lambda a: {**a, "frozen_backbone.backbone.net.conv.bias": np.full(6, np.nan, np.float32)},
], ids=["lacking", "more", "shape", "nan"])  # fmt: skip
def test_forged_weights_of_a_backbone_are_refused(arrays, downloads, tmp_path):
    with pytest.raises(HeadcountError, match=r"frozen_backbone\.|conv\.bias|'more'"):
        FittedModel.load(forged(tmp_path, arrays=arrays))


# -- MajorityClassifier and ONNX ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["em_forest", "tilt"])
def test_the_estimator_is_fitted_to_images(estimator, downloads, caplog):
    bags, labels = shots(), [CLASSES[b % 2] for b in range(12)]
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
    bags, labels = shots(), [CLASSES[b % 2] for b in range(12)]
    model = MajorityClassifier(backbone="timm:small", weights="none", epochs=2).fit(bags, labels)
    assert model.fitted_.frozen_backbone is None
    assert model.fitted_.estimator.config.backbone == "timm:small"
    with pytest.raises(HeadcountError, match="weights is for"):
        MajorityClassifier(weights="none").fit(bags, labels)


@pytest.mark.parametrize("method", ["em_forest", "logistic", "tilt"])
def test_the_onnx_file_contains_the_frozen_backbone(method, downloads, small, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    from headcount.models import onnx

    made = fit(reading(), method, backbone="timm:small", epochs=None if method in NO_NETWORK else 2, folds=2)
    onnx.export_onnx(made, tmp_path / "m.onnx")
    session = runtime.InferenceSession((tmp_path / "m.onnx").read_bytes(), providers=["CPUExecutionProvider"])
    bags = reading().to_bags()
    got = session.run(["probabilities"], {"instances": bags.pool.data.numpy()})[0]
    want, _ = estimator_probabilities(made.estimator, bags, frozen_backbone=made.frozen_backbone)
    assert np.abs(got - want.numpy()).max() < 1e-4


def test_the_time_of_computing_features_counts(monkeypatch):
    """A minute allows five folds of two methods of two seconds; ten seconds allow fewer."""
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 2.0)
    bags = reading().bags
    made = build_methods("auto", bags)
    full, late = (
        time_budget.make_plan(made, 5, bags, bags, torch.device("cpu"), minutes=1.0, spent_seconds=s) for s in (0, 50)
    )
    assert (full.folds, full.epoch_fraction) == (5, 1.0)
    assert late.total_seconds <= 10 * time_budget.TIME_MARGIN < full.total_seconds

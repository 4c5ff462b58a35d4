"""ONNX: another runtime predicts as the model does, or no file is written."""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
import torch
from sklearn.naive_bayes import GaussianNB

import read_factory as make
from headcount.bags import Bags
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.models import onnx as export
from headcount.models.fitted import FittedModel
from headcount.models.heads import HEADS
from headcount.models.network import Model, ModelConfig
from headcount.models.trees import round_down
from headcount.readers import read
from model_factory import case, even, file_names_in, fitted, people, read_rows

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


def run_onnx(path, x: np.ndarray) -> np.ndarray:
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"instances": x})[0]


@pytest.mark.parametrize("body", ["forest", "boosting", "linear"])
@pytest.mark.parametrize("three", [False, True])
def test_forests_and_linear_models(body, three, tmp_path):
    g = np.random.default_rng(0)
    bags = [g.normal(size=(6, 5)).astype(np.float32) + b % (3 if three else 2) for b in range(12)]
    dataset = read(bags, labels=[f"c{b % (3 if three else 2)}" for b in range(12)])
    model = fitted(dataset, body)
    assert export.export_onnx(model, tmp_path / "m.onnx") < 1e-5
    x = (g.normal(size=(4000, 5)) * 3).astype(np.float32)
    want = model.estimator.predict_proba(x)
    assert np.abs(run_onnx(tmp_path / "m.onnx", x) - want).max() < 1e-5


def agrees(model: FittedModel, bags: Bags, path) -> None:
    """The exported model gives what ``predict`` does without context, and the temperature matters in both."""
    export.export_onnx(model, path)
    x = bags.pool.take(bags.index).numpy()
    want = model.predict(bags, use_context=False).instance_probabilities
    assert np.abs(run_onnx(path, x) - want).max() < 1e-5
    assert np.abs(run_onnx(path, x[:1]) - want[:1]).max() < 1e-5
    plain = model.replace(instance_temperature=1.0).predict(bags, use_context=False).instance_probabilities
    assert np.abs(plain - want).max() > 1e-3


SHARPER = {"temperature": 0.7, "instance_temperature": 0.4, "concentration": 2.0, "use_context": True}


ESTIMATORS = (
    "forest",
    "boosting",
    "linear",
    "network",
)  # forests take images as the features of a frozen backbone (test_backbone_setup.py)


@pytest.mark.parametrize(("data", "estimator"), [*product(("table", "text", "features"), ESTIMATORS), ("images", "network")])
def test_every_kind_of_model_with_a_temperature(data, estimator, tmp_path):
    g = np.random.default_rng(0)
    if data == "table":
        dataset = read(make.write_csv(tmp_path / "t.csv", people(share=0.9)))
    elif data == "text":
        dataset = read(make.write_csv(tmp_path / "t.csv", make.texts()))
    elif data == "features":
        dataset = read([g.normal(b % 2, size=(5, 3)).astype(np.float32) for b in range(8)], labels=["a", "b"] * 4)
    else:
        dataset = read([g.integers(0, 256, (4, 9, 8, 3), dtype=np.uint8) for _ in range(4)], labels=["a", "b"] * 2)
    model = fitted(dataset, estimator, **SHARPER)
    if estimator == "network":  # as it is born it hardly decides
        with torch.no_grad():
            model.estimator.head.classifier.weight.mul_(8)
    agrees(model, dataset.to_bags(model.preprocessor), tmp_path / "m.onnx")


@pytest.mark.parametrize("head", HEADS)
def test_every_head_with_a_temperature_or_a_refusal(head, tmp_path):
    dataset = read(make.write_csv(tmp_path / "t.csv", people()))
    model = fitted(dataset, "network", head, instance_temperature=0.3)
    bags = dataset.to_bags(model.preprocessor)
    if model.estimator.instance_depends_on_bag:
        with pytest.raises(HeadcountError, match="judges an instance by its bag") as e:
            export.export_onnx(model, tmp_path / "m.onnx")
        assert "\n" not in str(e.value)
        assert not (tmp_path / "m.onnx").exists()
    else:
        agrees(model, bags, tmp_path / "m.onnx")


@pytest.mark.parametrize("estimator", ["tilt", "count", "logistic", "forest", "em_forest"])
def test_the_estimator_as_onnx(estimator, tmp_path):
    g = np.random.default_rng(1)
    bag = np.repeat(np.arange(40), 6)
    x = (g.normal(size=(240, 4)) * [1, 10, 100, 0.1] + (bag % 2)[:, None] * [2, 5, 0, 0]).astype(np.float32)
    model = MajorityClassifier(estimator, epochs=5 if estimator in HEADS else None).fit(x, bag % 2, bags=bag)
    export.export_onnx(model.fitted_, tmp_path / "m.onnx")
    assert np.abs(run_onnx(tmp_path / "m.onnx", x) - model.predict_proba(x)).max() < 1e-5


def test_a_classifier_of_scikit_learn_is_refused(tmp_path):
    bag = np.repeat(np.arange(12), 5)
    x = np.random.default_rng(0).normal(bag[:, None] % 2, 0.5)
    model = MajorityClassifier(GaussianNB()).fit(x, bag % 2, bags=bag)
    with pytest.raises(HeadcountError, match="can become ONNX"):
        export.export_onnx(model.fitted_, tmp_path / "m.onnx")


def test_a_threshold_between_two_floats():
    t = np.array([0.1, 1 / 3, -0.1, 5.0, np.nextafter(np.float64(2), 3)])
    for threshold, cut in zip(t, round_down(t), strict=True):
        for x in (cut, np.nextafter(cut, np.float32(np.inf)), np.nextafter(cut, np.float32(-np.inf))):
            assert (np.float64(x) <= threshold) == (x <= cut)


def test_a_table_through_the_command(run_cli, tmp_path):
    import onnx

    model, data = case(tmp_path / "in", "table")
    FittedModel.load(model).replace(**SHARPER).save(model, overwrite=True)
    code, _, err = run_cli("export", model, "--onnx", "m.onnx")
    assert (code, "as `predict --context off` makes them" in err) == (0, True), err
    about = json.loads({p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}["headcount"])
    again = FittedModel.load(model)
    assert about["classes"] == ["no", "yes"]
    assert about["preprocessor"]["fields"][0]["name"] == "height"
    bags = again.read(data).to_bags(again.preprocessor)
    x = bags.pool.take(bags.index).numpy()
    got = run_onnx(tmp_path / "m.onnx", x)
    assert run_cli("predict", model, data, "--out", "p.csv", "--context", "off")[0] == 0
    written = {row["id"]: row for row in read_rows(tmp_path / "p.csv")}
    ids = [row["id"] for row in read_rows(data)]
    assert len(ids) == len(got) > 40
    for row, instance in zip(again.read(data).rows, got, strict=True):
        printed = [float(written[ids[row]][f"p_{name}"]) for name in about["classes"]]
        assert np.abs(instance - printed).max() < 1e-5


@pytest.mark.parametrize("backbone", ["mlp", "linear", "quick"])
def test_networks_with_their_normalisation(backbone, tmp_path):
    images = backbone != "mlp"  # and mirrored
    g = np.random.default_rng(0)
    shape = (9, 8, 3) if images else (7,)
    bags = [g.integers(0, 256, (4, *shape)).astype(np.uint8 if images else np.float32) for _ in range(4)]
    dataset = read(bags, labels=["a", "b"] * 2)
    torch.manual_seed(0)
    body = Model(ModelConfig(shape, ("a", "b"), backbone, (), "tilt", mirror=images)).eval()
    body.normalize.mean.copy_(torch.tensor([0.3, 0.4, 0.5]) if images else torch.full((7,), 120.0))
    body.normalize.std.copy_(torch.tensor([0.2, 0.2, 0.1]) if images else torch.full((7,), 70.0))
    model = FittedModel(body, ("a", "b"), dataset.fit_preprocessor(), even(2), instance_temperature=0.6)
    assert export.export_onnx(model, tmp_path / "m.onnx") < 1e-5
    x = np.concatenate(bags)
    want = model.predict(dataset.to_bags()).instance_probabilities
    assert want.std() > 0.01
    for part in (x, x[:1]):
        assert np.abs(run_onnx(tmp_path / "m.onnx", part) - want[: len(part)]).max() < 1e-5


def test_a_head_that_needs_the_bag_is_refused(tmp_path):
    dataset = read(make.write_csv(tmp_path / "t.csv", people()))
    with pytest.raises(HeadcountError, match="judges an instance by its bag"):
        export.export_onnx(fitted(dataset, "network", head="additive"), tmp_path / "m.onnx")
    assert not (tmp_path / "m.onnx").exists()


def test_other_predictions_are_not_written(tmp_path, monkeypatch):
    model = fitted(read(make.write_csv(tmp_path / "t.csv", people())), "linear")
    line = export._linear_module
    monkeypatch.setattr(export, "_linear_module", lambda body: line(type(body)(body.weight * 1.01, body.bias)))
    with pytest.raises(HeadcountError, match="predicts otherwise"):
        export.export_onnx(model, tmp_path / "m.onnx")
    assert file_names_in(tmp_path) == {"t.csv"}


@pytest.mark.parametrize("library", ["onnx", "onnxruntime", "onnxscript"])
def test_what_is_missing_is_named(library, run_cli, tmp_path, monkeypatch):
    model, _ = case(tmp_path / "in", "table")
    monkeypatch.setitem(__import__("sys").modules, library, None)
    code, _, err = run_cli("export", model, "--onnx", "m.onnx")
    assert code == 2
    assert "headcount[onnx]" in err
    assert err.count("\n") == 1

"""ONNX: another runtime predicts as the model does, or no file is written."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import read_factory as make
from headcount.errors import HeadcountError
from headcount.models import onnx as export
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig
from headcount.models.trees import round_down
from headcount.readers import read
from model_factory import case, even, file_names_in, fitted, people

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
runtime = pytest.importorskip("onnxruntime")


def run_onnx(path, x: np.ndarray) -> np.ndarray:
    return runtime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, {"instances": x})[0]


@pytest.mark.parametrize("body", ["forest", "linear"])
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


def test_a_threshold_between_two_floats():
    t = np.array([0.1, 1 / 3, -0.1, 5.0, np.nextafter(np.float64(2), 3)])
    for threshold, cut in zip(t, round_down(t), strict=True):
        for x in (cut, np.nextafter(cut, np.float32(np.inf)), np.nextafter(cut, np.float32(-np.inf))):
            assert (np.float64(x) <= threshold) == (x <= cut)


def test_a_table_through_the_command(run_cli, tmp_path):
    import onnx

    model, data = case(tmp_path / "in", "table")
    code, _, err = run_cli("export", model, "--onnx", "m.onnx")
    assert code == 0, err
    about = json.loads({p.key: p.value for p in onnx.load(tmp_path / "m.onnx").metadata_props}["headcount"])
    again = FittedModel.load(model)
    assert about["classes"] == ["no", "yes"]
    assert about["preprocessor"]["fields"][0]["name"] == "height"
    bags = again.read(data).to_bags(again.preprocessor)
    x = bags.pool.take(bags.index).numpy()
    assert np.abs(run_onnx(tmp_path / "m.onnx", x) - again.predict(bags).instance_probabilities).max() < 1e-5


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
    model = FittedModel(body, ("a", "b"), dataset.fit_preprocessor(), even(2))
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
    line = export._linear_nodes
    monkeypatch.setattr(export, "_linear_nodes", lambda body, onnx: line(type(body)(body.weight * 1.01, body.bias), onnx))
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

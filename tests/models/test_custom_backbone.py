"""A torch.nn.Module of one's own as backbone: trained, saved with its weights and import path, loaded by passing the class."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.base import clone
from torch import Tensor, nn

import headcount as hc
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig, build_model
from headcount.models.predictions import predict
from headcount.models.trees import LinearModel


class Gated(nn.Module):
    """Features of a gate, with a buffer, and without an attribute ``dim``."""

    def __init__(self, inputs: int = 4, width: int = 6) -> None:
        super().__init__()
        self.values, self.gate = nn.Linear(inputs, width), nn.Linear(inputs, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.values(x) * self.gate(x).sigmoid())


class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu().mean((2, 3))


def rows(seed: int = 0, bags: int = 30) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(x, label of the bag, bag)."""
    g = np.random.default_rng(seed)
    bag = np.repeat(np.arange(bags), 6)
    return g.normal(size=(len(bag), 4)).astype(np.float32) + 2 * (bag % 2)[:, None], bag % 2, bag


def small_bags() -> hc.Bags:
    x, label, _ = rows()
    return hc.Bags.of(hc.Pool(x), sizes=[6] * 30, labels=label[::6].tolist(), classes=["no", "yes"])


@pytest.mark.parametrize("given", [Gated, Gated(), partial(Gated, width=9)], ids=["class", "module", "function"])
def test_trained_saved_and_loaded(given, tmp_path):
    bags = small_bags()
    model = build_model(ModelConfig.for_bags(bags, backbone=given, head="count"), bags)
    before = model.backbone.values.weight.clone()
    hc.train(model, bags, bags, hc.TrainConfig(epochs=2))
    assert not torch.equal(model.backbone.values.weight, before)
    model.save(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "model.json").read_text())["config"]["backbone"].endswith("test_custom_backbone.Gated")
    again = Model.load(tmp_path / "m", backbone=given)
    assert torch.equal(predict(again, bags).instance, predict(model, bags).instance)
    with pytest.raises(HeadcountError, match=r"runs no code.*load\(folder, backbone=Gated\)") as e:
        Model.load(tmp_path / "m")
    assert "\n" not in str(e.value)
    with pytest.raises(HeadcountError, match="the network needs None"):
        Model.load(tmp_path / "m", backbone=nn.Flatten)


def test_one_that_was_put_in_afterwards(tmp_path):
    """What once was saved and then refused when it was loaded, after the training."""
    bags = small_bags()
    for make in (partial(Gated, width=256), lambda: nn.Sequential(nn.Linear(4, 256), nn.Tanh())):
        model = build_model(ModelConfig.for_bags(bags, backbone="mlp", head="count"), bags)
        model.backbone = make()
        hc.train(model, bags, bags, hc.TrainConfig(epochs=1))
        model.save(tmp_path / "m", overwrite=True)
        again = Model.load(tmp_path / "m", backbone=make)
        assert torch.equal(predict(again, bags).instance, predict(model, bags).instance)


def test_one_without_parameters_is_not_taken_for_headcounts_own(tmp_path):
    bags = small_bags()
    model = build_model(ModelConfig.for_bags(bags, backbone="linear", head="count"), bags)
    model.backbone = nn.Hardtanh()
    model.save(tmp_path / "m")
    with pytest.raises(HeadcountError, match=r"backbone=Hardtanh"):
        Model.load(tmp_path / "m")
    assert torch.equal(predict(Model.load(tmp_path / "m", nn.Hardtanh), bags).instance, predict(model, bags).instance)


def test_the_estimator_with_a_network_of_ones_own(tmp_path):
    x, y, bag = rows()
    model = clone(MajorityClassifier("tilt", backbone=Gated, epochs=30)).fit(x, y, bags=bag)
    assert isinstance(model.fitted_.estimator.backbone, Gated)
    assert model.score(x, y, bags=bag) > 0.9
    model.fitted_.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m", backbone=Gated)
    bags = small_bags()
    got = again.predict(bags, use_context=False).instance_probabilities
    assert np.allclose(got, model.fitted_.predict(bags, use_context=False).instance_probabilities, atol=1e-6)
    with pytest.raises(HeadcountError, match="loading runs no code"):
        FittedModel.load(tmp_path / "m")


def test_fit_with_a_network_of_ones_own(tmp_path):
    g = np.random.default_rng(0)
    images = [g.integers(100 * (b % 2), 156 + 100 * (b % 2), (4, 8, 8, 3)).astype(np.uint8) for b in range(12)]
    dataset = hc.read(images, labels=["dark", "bright"] * 6)
    model = hc.fit(dataset, head="count", backbone=Pixels, epochs=3, folds=2)
    assert model.metadata["method"]["parameters"]["backbone"].endswith("test_custom_backbone.Pixels")
    model.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m", backbone=Pixels)
    assert np.array_equal(again.predict(dataset).bag_probabilities, model.predict(dataset).bag_probabilities)


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        (partial(Gated, 5), "does not take instances of shape"),
        (nn.Identity, None),
        (lambda: nn.Unflatten(1, (2, 2)), "it has to make"),
        (lambda: "mlp", "has no options; got"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused_before_training(backbone, message):
    config = ModelConfig.for_bags(small_bags(), backbone=backbone, head="count")
    if message is None:
        assert build_model(config, small_bags()).head.classifier.in_features == 4
        return
    with pytest.raises(HeadcountError, match=message) as e:
        build_model(config, small_bags())
    assert "\n" not in str(e.value)


def test_headcounts_own_backbone_needs_no_class(tmp_path):
    bags = small_bags()
    build_model(ModelConfig.for_bags(bags, backbone="mlp", head="count"), bags).save(tmp_path / "m")
    with pytest.raises(HeadcountError, match="leave backbone= out"):
        Model.load(tmp_path / "m", backbone=Gated)


def test_nothing_is_saved_that_could_not_be_loaded(tmp_path):
    bags = small_bags()
    model = build_model(ModelConfig.for_bags(bags, backbone=Gated, head="count"), bags)
    model.backbone.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    with pytest.raises(
        HeadcountError, match=r"cannot be saved, because it could not be loaded: 'backbone\.mask' holds numbers"
    ):
        model.save(tmp_path / "m")
    wrong = LinearModel(np.ones((2, 3)), np.ones(2))
    fitted = MajorityClassifier("logistic").fit(*rows()[:2], bags=rows()[2]).fitted_.replace(estimator=wrong)
    with pytest.raises(HeadcountError, match="cannot be saved, because it could not be loaded: the arrays of the model"):
        fitted.save(tmp_path / "m")
    assert not list(tmp_path.iterdir())

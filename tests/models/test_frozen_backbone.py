"""Frozen backbones: features are computed once, a model keeps the backbone in its folder, and an invalid one is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError
from headcount.models import library_backbones
from headcount.models.fitted import FittedModel
from headcount.models.network import FrozenBackbone, Model, ModelConfig
from headcount.models.predictions import LazyFeaturePool, extract_features, predict
from library_factory import CLASSES, Net, dark_and_bright, published
from model_factory import even


def pretrained(shape=(8, 8, 3), **options) -> FrozenBackbone:
    return FrozenBackbone.from_pretrained(library_backbones.load_pretrained("timm:small", shape, **options), shape)


@pytest.mark.parametrize("channels", [1, 3])
def test_features_are_those_of_the_network_in_half_precision(channels, downloads):
    bags = dark_and_bright(channels=channels).to_bags()
    backbone = pretrained((8, 8, channels))
    net = published(Net(3, 0)).eval()
    x = bags.pool.data.permute(0, 3, 1, 2).expand(-1, 3, -1, -1)
    with torch.no_grad():
        want = net((x.float() / 255 - 0.5) / 0.25)
    got = backbone(bags.pool.data)
    assert got.dtype == torch.float16
    assert torch.allclose(got.float(), want, rtol=1e-3, atol=1e-3)
    lazy = LazyFeaturePool(bags.pool, backbone)
    assert (len(lazy), lazy.shape, lazy.kind) == (len(bags.pool), (6,), "features")
    some = torch.tensor([5, 2, 2])
    assert torch.allclose(lazy.take(some).float(), want[some], rtol=1e-3, atol=1e-3)
    assert lazy.take(some[:0]).shape == (0, 6)


def test_features_are_computed_once(downloads, tmp_path):
    bags, calls, progress = dark_and_bright().to_bags(), [], []
    backbone = pretrained()
    backbone.backbone.net.register_forward_hook(lambda *_: calls.append(1))
    first = extract_features(backbone, bags, tmp_path, on_progress=lambda done, of: progress.append((done, of)))
    assert (len(calls), progress) == (1, [(48, 48)])
    again = extract_features(backbone, bags, tmp_path)
    assert len(calls) == 1
    assert first.pool.data.dtype == torch.float16
    assert torch.equal(first.pool.data, again.pool.data)
    assert torch.equal(first.pool.data, backbone(bags.pool.data))
    assert len(list((tmp_path / "features").glob("*.npy"))) == 1
    one = bags.pool.data.clone()
    one[7, 3, 3, 1] ^= 1  # another image, by one bit
    extract_features(backbone, Bags.of(Pool(one), sizes=[48], labels=[0], classes=2), tmp_path)
    with torch.no_grad():
        backbone.backbone.net.conv.weight.add_(0.1)
    other = extract_features(backbone, bags, tmp_path)
    assert not torch.equal(first.pool.data, other.pool.data)
    extract_features(pretrained(size=12), bags, tmp_path)
    assert len(list((tmp_path / "features").glob("*.npy"))) == 4


def test_features_resume_after_a_failure(downloads, tmp_path):
    backbone, count, bags = pretrained(), [], dark_and_bright().to_bags()

    def fail(*_):
        count.append(1)
        if len(count) == 3:
            raise OSError(28, "full")

    backbone.backbone.net.register_forward_hook(fail)
    with pytest.raises(HeadcountError, match="full"):
        extract_features(backbone, bags, tmp_path, batch_images=10)
    assert list(tmp_path.rglob("*.npy")) == []
    features = extract_features(backbone, bags, tmp_path, batch_images=10).pool.data
    assert len(count) == 3 + 3, "two of five batches were there"
    assert torch.equal(features, backbone(bags.pool.data))


@pytest.mark.parametrize("head", ["tilt", "attention"])
def test_a_model_on_a_frozen_backbone_predicts_as_on_its_features(head, downloads, tmp_path):
    dataset, backbone = dark_and_bright(), pretrained()
    bags = dataset.to_bags()
    features = extract_features(backbone, bags, tmp_path)
    torch.manual_seed(0)
    network = Model(ModelConfig((6,), CLASSES, "mlp", (("hidden", 8),), head)).eval()
    model = FittedModel(network, CLASSES, dataset.fit_preprocessor(), even(2), frozen_backbone=backbone)
    want = predict(network, features)
    for batch in (8192, 5):
        got = model.predict(bags, batch_instances=batch)
        assert np.allclose(got.instance_probabilities, want.instance.softmax(1), atol=1e-5)
    model.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m").predict(bags)
    assert np.array_equal(again.instance_probabilities, model.predict(bags).instance_probabilities)
    with pytest.raises(HeadcountError, match="shape"):
        model.predict(features)


def edited(folder: Path, edit_json=None, edit_arrays=None) -> Path:
    """A saved model with other JSON or arrays."""
    network = Model(ModelConfig((6,), CLASSES, "linear", (), "tilt")).eval()
    preprocessor = dark_and_bright().fit_preprocessor()
    path = FittedModel(network, CLASSES, preprocessor, even(2), frozen_backbone=pretrained(size=12)).save(folder / "m")
    if edit_json is not None:
        data = json.loads((path / "model.json").read_text())
        (path / "model.json").write_text(json.dumps(edit_json(data)))
    if edit_arrays is not None:
        save_file(edit_arrays(load_file(path / "model.safetensors")), path / "model.safetensors")
    return path


def changed(**changes):
    """model.json with another frozen backbone."""
    return lambda data: {**data, "frozen_backbone": {**data["frozen_backbone"], **changes}}


@pytest.mark.parametrize(("edit", "why"), [
    (lambda data: {**data, "frozen_backbone": None}, "belong to nothing"),
    (lambda data: {**data, "frozen_backbone": {"backbone": "timm:small"}}, "the frozen backbone lacks"),
    (lambda data: {k: v for k, v in data.items() if k != "frozen_backbone"}, "lacks or adds frozen_backbone"),
    (changed(more=1), "the frozen backbone lacks"),
    (changed(size=1 << 30), "8 to 2048"), (changed(size=True), "8 to 2048"), (changed(size="12"), "8 to 2048"),
    (changed(backbone=["timm:small"]), "is none of a library"), (changed(backbone="resnet18"), "is none of a library"),
    (changed(backbone="timm:hf-hub:evil/model"), "plain name"), (changed(backbone="os:system"), "library"),
])  # fmt: skip
def test_an_invalid_backbone_is_refused(edit, why, downloads, tmp_path):
    path = edited(tmp_path, edit)
    downloads.clear()
    with pytest.raises(HeadcountError, match=why) as e:
        FittedModel.load(path)
    assert "\n" not in str(e.value)
    assert downloads == []


BIAS = "frozen_backbone.backbone.net.conv.bias"


@pytest.mark.parametrize("edit", [
    lambda arrays: {k: v for k, v in arrays.items() if k != BIAS},
    lambda arrays: {**arrays, "frozen_backbone.more": np.ones(3, np.float32)},
    lambda arrays: {**arrays, BIAS: np.ones(7, np.float32)},
    lambda arrays: {**arrays, BIAS: np.full(6, np.nan, np.float32)},
], ids=["lacking", "more", "shape", "nan"])  # fmt: skip
def test_invalid_weights_of_a_backbone_are_refused(edit, downloads, tmp_path):
    with pytest.raises(HeadcountError, match=r"conv\.bias|'more'"):
        FittedModel.load(edited(tmp_path, edit_arrays=edit))

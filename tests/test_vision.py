"""Backbones of other libraries, with stand-ins for the libraries: built without a download, frozen, cached, saved, loaded."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from ask_factory import even
from headcount.data.prepare import Prepare
from headcount.data.read import read
from headcount.errors import HeadcountError
from headcount.models import vision
from headcount.models.backbones import build_backbone
from headcount.models.fitted import Fitted
from headcount.models.model import Design, Model, say
from headcount.training.recipe import Recipe
from headcount.training.train import fit

CLASSES = ("a", "b")


class Net(nn.Module):
    """A small convolution network with batch-norm and a classifier called fc."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.fc = nn.Linear(6, classes) if classes else nn.Identity()

    def forward(self, x):
        return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3)))


def published(net: Net) -> Net:
    """The weights the library would download."""
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    return net


@pytest.fixture
def downloads(monkeypatch):
    """Stand-ins for timm and torchvision; each download is written down."""
    asked: list[str] = []

    def create_model(name, pretrained, num_classes, in_chans):
        asked.extend([name] if pretrained else [])
        net = Net(in_chans, num_classes)
        return published(net) if pretrained else net

    def get_model(name, weights):
        asked.extend([name] if weights else [])
        return published(Net(3, 10)) if weights else Net(3, 10)

    timm = types.ModuleType("timm")
    timm.__dict__.update(create_model=create_model, is_model=lambda name: name == "small")
    models = types.ModuleType("torchvision.models")
    models.__dict__.update(get_model=get_model, list_models=lambda: ["small"])
    torchvision = types.ModuleType("torchvision")
    torchvision.__dict__["models"] = models
    for name, module in (("timm", timm), ("torchvision", torchvision), ("torchvision.models", models)):
        monkeypatch.setitem(sys.modules, name, module)
    return asked


def pictures(bags: int = 8, size: int = 6, channels: int = 3):
    """Class a is dark, class b is bright."""
    g = np.random.default_rng(0)
    held = [g.integers(0, 128, (size, 8, 8, channels)).astype(np.uint8) + np.uint8(100 * (b % 2)) for b in range(bags)]
    return read(held, labels=[CLASSES[b % 2] for b in range(bags)])


def model_of(name="timm:small", channels=3, **options) -> Model:
    torch.manual_seed(0)
    return Model(Design((8, 8, channels), CLASSES, name, tuple(options.items()), "tilt"))


@pytest.mark.parametrize("name", ["timm:small", "torchvision:small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_name_is_a_backbone(name, channels, downloads):
    backbone = build_backbone(name, (8, 8, channels), {})
    assert backbone.dim == 6
    assert backbone(torch.rand(5, channels, 8, 8)).shape == (5, 6)
    assert downloads == []
    small = build_backbone(name, (8, 8, channels), {"size": 16})
    assert small(torch.rand(2, channels, 8, 8)).shape == (2, 6)


@pytest.mark.parametrize("name", ["timm:small", "torchvision:small"])
def test_published_weights_come_only_when_asked_for(name, downloads):
    model = model_of(name)
    before = model.backbone.net.conv.weight.clone()
    vision.load_pretrained(model.backbone, name)
    assert downloads == ["small"]
    assert not torch.equal(before, model.backbone.net.conv.weight)
    assert model.backbone.net.conv.weight.flatten()[0] == -1


def test_a_saved_model_needs_no_download_and_comes_back(downloads, tmp_path):
    reading = pictures()
    model = model_of(frozen=True, size=12)
    vision.load_pretrained(model.backbone, "timm:small")
    saved = Fitted(model.eval(), CLASSES, reading.learn(), even(2))
    saved.save(tmp_path / "m")
    downloads.clear()
    again = Fitted.load(tmp_path / "m")
    assert downloads == []
    assert torch.equal(saved.say(reading.bags()).instance, again.say(reading.bags()).instance)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("timm:hf-hub:evil/model", "plain name"),
        ("timm:local-dir:/tmp/x", "plain name"),
        ("timm:../x", "plain name"),
        ("timm:", "plain name"),
        ("timm:unheard_of", "has no model"),
        ("torchvision:unheard_of", "has no model"),
        ("keras:small", "library"),
    ],
)
def test_names_are_names_and_not_addresses(name, why, downloads, tmp_path):
    with pytest.raises(HeadcountError, match=why):
        build_backbone(name, (8, 8, 3), {})
    Fitted(model_of().eval(), CLASSES, pictures().learn(), even(2)).save(tmp_path / "m")
    said = json.loads((tmp_path / "m" / "model.json").read_text())
    said["design"]["backbone"] = name
    (tmp_path / "m" / "model.json").write_text(json.dumps(said))
    with pytest.raises(HeadcountError, match=why):
        Fitted.load(tmp_path / "m")
    assert downloads == []


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("error", [ImportError("none"), RuntimeError("operator torchvision::nms does not exist")])
def test_a_missing_or_broken_library_names_the_extra(library, error, monkeypatch):
    def broken(name):
        raise error

    monkeypatch.setattr(vision.importlib, "import_module", broken)
    with pytest.raises(HeadcountError, match=r"headcount\[vision\]") as e:
        build_backbone(f"{library}:small", (8, 8, 3), {})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "why"), [({"frozen": 1}, "frozen"), ({"size": 3}, "size"), ({"layers": 2}, "cannot be built")]
)
def test_wrong_options(options, why, downloads):
    with pytest.raises(HeadcountError, match=why):
        build_backbone("timm:small", (8, 8, 3), options)
    with pytest.raises(HeadcountError, match="reads pictures"):
        build_backbone("timm:small", (12,), {})


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_and_running_means_stay(frozen, downloads):
    bags = pictures().bags()
    model = model_of(frozen=frozen)
    model.train()
    assert model.backbone.net.training != frozen
    before = {k: v.clone() for k, v in model.state_dict().items()}
    recipe = Recipe(source="digits", head="tilt", epochs=2, batch_bags=4, lr=0.05, optimizer="adamw", precision="fp32")
    fit(model, bags, bags, recipe)
    after = model.state_dict()
    own = [k for k in before if k.startswith("backbone.net.")]
    assert all(torch.equal(before[k], after[k]) for k in own) == frozen
    assert not torch.equal(before["head.classifier.weight"], after["head.classifier.weight"])


def test_features_are_computed_once(downloads, tmp_path):
    bags = pictures().bags()
    model = model_of(frozen=True).eval()
    model.prepare = Prepare.learn(bags)
    calls = []
    net = model.backbone.net
    net.register_forward_hook(lambda *_: calls.append(1))
    first = vision.featured(model, bags, tmp_path, batch=7)
    assert len(calls) == 7
    again = vision.featured(model, bags, tmp_path)
    assert len(calls) == 7
    assert torch.equal(first.pool.data, again.pool.data)
    want = model.features(bags.pool.data)
    assert torch.allclose(first.pool.data.float(), want, atol=2e-3)
    assert len(list((tmp_path / "features").iterdir())) == 1
    with torch.no_grad():
        net.conv.weight.add_(0.1)
    other = vision.featured(model, bags, tmp_path)
    assert len(list((tmp_path / "features").iterdir())) == 2
    assert not torch.equal(first.pool.data, other.pool.data)
    with pytest.raises(HeadcountError, match="frozen backbone only"):
        vision.featured(model_of(), bags, tmp_path)


def test_a_failure_leaves_no_half_cache(downloads, tmp_path):
    bags = pictures().bags()
    model = model_of(frozen=True).eval()
    count = []

    def fail(*_):
        count.append(1)
        if len(count) == 3:
            raise OSError(28, "full")

    hook = model.backbone.net.register_forward_hook(fail)
    with pytest.raises(OSError, match="full"):
        vision.featured(model, bags, tmp_path, batch=10)
    hook.remove()
    assert list(tmp_path.rglob("*.npy*")) == []


def test_a_head_trained_on_features_goes_behind_its_backbone(downloads, tmp_path):
    bags = pictures().bags()
    model = model_of(frozen=True).eval()
    model.prepare = Prepare.learn(bags)
    features = vision.featured(model, bags, tmp_path)
    torch.manual_seed(1)
    small = Model(Design(features.pool.shape, CLASSES, "linear", (), "tilt"), Prepare.learn(features))
    recipe = Recipe(source="digits", head="tilt", epochs=3, batch_bags=4, lr=0.1, optimizer="adamw", precision="fp32")
    fit(small, features, features, recipe)
    whole = vision.joined(model, small).eval()
    one, two = say(small, features), say(whole, bags)
    assert torch.allclose(one.instance, two.instance, atol=0.02)
    assert one.instance.std() > 0.1
    with pytest.raises(HeadcountError, match="same head"):
        vision.joined(model, Model(Design(features.pool.shape, CLASSES, "linear", (), "count")))

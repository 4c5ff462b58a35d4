"""Backbones of other libraries, with stand-ins for the libraries: built without a download, given weights, saved, loaded."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.models import library_backbones
from headcount.models.backbones import build_backbone
from headcount.models.fitted import FittedModel
from headcount.models.network import Model, ModelConfig
from headcount.readers import read
from headcount.training.loop import train
from library_factory import CLASSES, Net, published
from model_factory import even


def images(bags: int = 8, size: int = 6, channels: int = 3):
    """Class a is dark, class b is bright."""
    g = np.random.default_rng(0)
    held = [g.integers(0, 128, (size, 8, 8, channels)).astype(np.uint8) + np.uint8(100 * (b % 2)) for b in range(bags)]
    return read(held, labels=[CLASSES[b % 2] for b in range(bags)])


def model_of(name="timm:small", channels=3, **options) -> Model:
    torch.manual_seed(0)
    return Model(ModelConfig((8, 8, channels), CLASSES, name, tuple(options.items()), "tilt"))


@pytest.mark.parametrize("name", ["timm:small", "torchvision:small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_any_name_is_a_backbone(name, channels, downloads):
    backbone = build_backbone(name, (8, 8, channels), {})
    assert backbone.dim == 6
    assert backbone(torch.rand(5, channels, 8, 8)).shape == (5, 6)
    assert downloads == []
    small = build_backbone(name, (8, 8, channels), {"size": 16})
    assert small(torch.rand(2, channels, 8, 8)).shape == (2, 6)


@pytest.mark.parametrize(("name", "mean"), [("timm:small", 0.5), ("torchvision:small", 0.485)])
def test_published_weights_are_downloaded_on_request(name, mean, downloads):
    model, logged = model_of(name), []
    before = model.backbone.net.conv.weight.clone()
    start = library_backbones.load_pretrained(name, (8, 8, 3), log=lambda line: logged.append((line, list(downloads))))
    assert downloads == ["small"]
    assert [(name in line and "download" in line, downloaded) for line, downloaded in logged] == [(True, [])], "logged before"
    assert (start.frozen, start.weights, start.mean[0]) == (True, "pretrained", mean)
    start.load_into(model.backbone)
    assert not torch.equal(before, model.backbone.net.conv.weight)
    assert model.backbone.net.conv.weight.flatten()[0] == -1
    assert library_backbones.load_pretrained(name, (8, 8, 1)).mean == pytest.approx((mean if mean == 0.5 else 0.449,), abs=1e-3)


def test_weights_that_cannot_be_loaded(downloads):
    with pytest.raises(HeadcountError, match=r"offline: its published weights could not be loaded .*name resolution") as e:
        library_backbones.load_pretrained("timm:offline", (8, 8, 3))
    assert "\n" not in str(e.value)
    assert library_backbones.load_pretrained("timm:offline", (8, 8, 3), weights="none").state is None


def test_a_size_that_a_network_does_not_take(downloads):
    with pytest.raises(HeadcountError, match=r"does not take instances of shape .8, 8, 3. .*doesn't match.* give the size"):
        library_backbones.load_pretrained("timm:picky", (8, 8, 3))
    assert downloads == [], "refused before any download"
    assert library_backbones.load_pretrained("timm:picky", (8, 8, 3), size=16).size == 16


# -- weights from a file --------------------------------------------------------------------------------------------------


def weights_file(folder, change=None, classifier=True):
    state = published(Net(3, 10)).state_dict()
    state = {k: v for k, v in state.items() if classifier or not k.startswith("fc.")}
    save_file(state if change is None else change(dict(state)), folder / "w.safetensors")
    return str(folder / "w.safetensors")


@pytest.mark.parametrize("name", ["timm:small", "torchvision:small"])
@pytest.mark.parametrize("change", [
    None, lambda s: {k: v.half() if v.is_floating_point() else v for k, v in s.items()},
    lambda s: {k: v.bfloat16() if v.is_floating_point() else v for k, v in s.items()},
    lambda s: {k: v for k, v in s.items() if "tracked" not in k},
], ids=["whole", "half", "bfloat16", "no count"])  # fmt: skip
@pytest.mark.parametrize("classifier", [True, False])
def test_a_file_of_weights(name, change, classifier, downloads, tmp_path):
    start = library_backbones.load_pretrained(name, (8, 8, 3), weights=weights_file(tmp_path, change, classifier))
    assert downloads == []
    assert (start.weights, start.frozen) == ("w.safetensors", True)
    model = model_of(name)
    start.load_into(model.backbone)
    assert model.backbone.net.conv.weight.flatten()[0] == -1
    assert model.backbone.net.conv.weight.dtype == torch.float32


@pytest.mark.parametrize(("change", "why"), [
    (lambda s: {**s, "evil": torch.ones(2)}, "hold 'evil', which timm:small does not have"),
    (lambda s: {k: v for k, v in s.items() if k != "bn.bias"}, "lack 'bn.bias', which timm:small needs"),
    (lambda s: {**s, "conv.weight": torch.ones(6, 1, 3, 3)}, r"'conv.weight' is \(6, 1, 3, 3\).* needs \(6, 3, 3, 3\)"),
    (lambda s: {**s, "bn.bias": torch.ones(6, dtype=torch.int64)}, r"'bn.bias' is .*int64.* needs .*float32"),
    (lambda s: {**s, "bn.bias": torch.full((6,), float("nan"))}, "'bn.bias' holds numbers that are not finite"),
])  # fmt: skip
def test_wrong_weights_are_refused_in_one_line(change, why, downloads, tmp_path):
    path = weights_file(tmp_path, change)
    with pytest.raises(HeadcountError, match=why) as e:
        library_backbones.load_pretrained("timm:small", (8, 8, 3), weights=path)
    assert path in str(e.value)
    assert "\n" not in str(e.value)


class Bomb:
    def __reduce__(self):
        return (open, ("bomb.txt", "w"))


@pytest.mark.parametrize("content", [
    pickle.dumps(Bomb()), b"", b"PK\x03\x04" + b"x" * 100, (1 << 60).to_bytes(8, "little") + b"{" + b" " * 20,
    (20).to_bytes(8, "little") + b"{" + b"x" * 40, "folder", None,
], ids=["pickle", "empty", "zip", "huge header", "no json", "folder", "missing"])  # fmt: skip
def test_what_is_no_safetensors_file_is_refused(content, downloads, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "w.safetensors"
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(HeadcountError, match=r"cannot read .*w\.safetensors") as e:
        library_backbones.load_pretrained("timm:small", (8, 8, 3), weights=str(path))
    assert "\n" not in str(e.value)
    assert not (tmp_path / "bomb.txt").exists()


@pytest.mark.parametrize(("choice", "why"), [
    (("mlp", True, None, None), "frozen is for a backbone of timm"),
    (("mlp", None, "none", None), "weights is for a backbone of timm"),
    ((None, None, None, 32), "size is for a backbone of timm"),
    (("timm:small", None, "weights.pt", None), "pretrained, none or FILE.safetensors"),
    (("timm:small", True, "none", None), "is useless"),
    (("timm:small", None, None, 4), "from 8 to 2048"),
    (("timm:small", 1, None, None), "true or false"),
    (("timm:unheard_of", None, None, None), "has no model"),
])  # fmt: skip
def test_contradictory_options(choice, why, downloads):
    with pytest.raises(HeadcountError, match=why):
        library_backbones.check_backbone_options(*choice)


# -- a model's file -------------------------------------------------------------------------------------------------------


def test_a_saved_model_needs_no_download_and_comes_back(downloads, tmp_path):
    dataset = images()
    model = model_of(frozen=True, size=12)
    library_backbones.load_pretrained("timm:small", (8, 8, 3)).load_into(model.backbone)
    saved = FittedModel(model.eval(), CLASSES, dataset.fit_preprocessor(), even(2))
    saved.save(tmp_path / "m")
    downloads.clear()
    again = FittedModel.load(tmp_path / "m")
    assert downloads == []
    one, two = saved.predict(dataset).instance_probabilities, again.predict(dataset).instance_probabilities
    assert np.array_equal(one, two)


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
        ("timm:" + "x" * 500, "has no model"),
    ],
)
def test_names_are_names_and_not_addresses(name, why, downloads, tmp_path):
    with pytest.raises(HeadcountError, match=why):
        build_backbone(name, (8, 8, 3), {})
    FittedModel(model_of().eval(), CLASSES, images().fit_preprocessor(), even(2)).save(tmp_path / "m")
    data = json.loads((tmp_path / "m" / "model.json").read_text())
    data["config"]["backbone"] = name
    (tmp_path / "m" / "model.json").write_text(json.dumps(data))
    with pytest.raises(HeadcountError, match=why):
        FittedModel.load(tmp_path / "m")
    assert downloads == []


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("error", [ImportError("none"), RuntimeError("operator torchvision::nms does not exist")])
def test_a_missing_or_broken_library_names_the_extra(library, error, monkeypatch):
    def broken(name):
        raise error

    monkeypatch.setattr(library_backbones.importlib, "import_module", broken)
    with pytest.raises(HeadcountError, match=r"headcount\[vision\]") as e:
        build_backbone(f"{library}:small", (8, 8, 3), {})
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("options", "why"), [({"frozen": 1}, "frozen"), ({"size": 3}, "size"), ({"layers": 2}, "cannot be built")]
)
def test_wrong_options(options, why, downloads):
    with pytest.raises(HeadcountError, match=why):
        build_backbone("timm:small", (8, 8, 3), options)
    with pytest.raises(HeadcountError, match="reads images"):
        build_backbone("timm:small", (12,), {})


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_weights_and_running_means_stay(frozen, downloads):
    bags = images().to_bags()
    model = model_of(frozen=frozen)
    model.train()
    assert model.backbone.net.training != frozen
    before = {k: v.clone() for k, v in model.state_dict().items()}
    recipe = Recipe(backbone="timm:small", head="tilt", epochs=2, batch_bags=4, lr=0.05, optimizer="adamw", precision="fp32")
    train(model, bags, bags, recipe.train_config)
    after = model.state_dict()
    own = [k for k in before if k.startswith("backbone.net.")]
    assert all(torch.equal(before[k], after[k]) for k in own) == frozen
    assert not torch.equal(before["head.classifier.weight"], after["head.classifier.weight"])

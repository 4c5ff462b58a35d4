"""A saved network is the same network; anything else in the files is refused in one line, and no code is run."""

from __future__ import annotations

import errno
import json
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from head_cases import expect_error, network_and_bags
from headcount.io import atomic_write
from headcount.models import serialization
from headcount.models.network import Model
from headcount.models.predictions import predict


def spoil_json(**changes):
    def spoil(folder):
        data = json.loads((folder / "model.json").read_text())
        for name, value in changes.items():
            (data["config"] if name in data["config"] else data)[name] = value
        (folder / "model.json").write_text(json.dumps(data))

    return spoil


def spoil_bytes(change, file="model.safetensors"):
    return lambda folder: (folder / file).write_bytes(change((folder / file).read_bytes()))


def spoil_weights(change):
    def spoil(folder):
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors")

    return spoil


REFUSED_FILES = {
    "no folder": (lambda f: [p.unlink() for p in f.iterdir()], "model.json is missing"),
    "no description": (lambda f: (f / "model.json").unlink(), "model.json is missing"),
    "truncated": (spoil_bytes(lambda b: b[:-5]), "cannot read"),
    "truncated in the header": (spoil_bytes(lambda b: b[:40]), "cannot read"),
    "empty weights": (spoil_bytes(lambda b: b""), "cannot read"),
    "a pickle": (spoil_bytes(lambda b: pickle.dumps({"weight": [1.0]})), "cannot read"),
    "a tensor too few": (spoil_weights(lambda w: w.pop("head.classifier.bias")), "cannot read"),
    "a tensor too many": (spoil_weights(lambda w: w.update(more=torch.ones(1))), "cannot read"),
    "a tensor too long": (spoil_weights(lambda w: w.update({"head.classifier.bias": torch.ones(5)})), "cannot read"),
    "another format": (spoil_json(format=2), "format 2"),
    "no format": (lambda f: (f / "model.json").write_text("{}"), "format"),
    "not a table": (lambda f: (f / "model.json").write_text("[1]"), "cannot read"),
    "not JSON": (spoil_bytes(lambda b: b[:-9], "model.json"), "cannot read"),
    "not text": (spoil_bytes(lambda b: b"\xff\xfe\x00", "model.json"), "cannot read"),
    "another shape": (spoil_json(shape=[9]), "cannot read"),
    "more classes": (spoil_json(classes=list("abcde")), "cannot read"),
    "another width": (spoil_json(backbone_options={"hidden": 7, "dropout": 0.5}), "cannot read"),
    "another backbone": (spoil_json(backbone="linear", backbone_options={}), "cannot read"),
    "unknown backbone": (spoil_json(backbone="resnet81"), "resnet18"),
    "unknown head": (spoil_json(head="cuont"), "count"),
    "unknown option": (spoil_json(options={"t3": 1}), "t1"),
    "wrong option": (spoil_json(options={"t1": -1}), "t1"),
    "a custom head": (spoil_json(head="evil.py:Head"), "runs no code"),
    "a network larger than memory": (spoil_json(backbone_options={"layers": 10_000_000}), "option 'layers'"),
    "a layer larger than memory": (spoil_json(shape=[1 << 40]), "the network needs"),
    "classes in one word": (spoil_json(classes="abc"), "two or more different names"),
    "one class thrice": (spoil_json(classes=["a"] * 3), "two or more different names"),
    "half a character": (spoil_json(classes=["a", "b\ud800", "c"]), "two or more different names"),
    "odd counted": (spoil_json(counted="abc"), "counted"),
    "odd mirror": (spoil_json(mirror="no"), "mirror is 'no', not true or false"),
}


@pytest.mark.parametrize("what", REFUSED_FILES)
def test_load_refuses(what, tmp_path):
    model, _ = network_and_bags()
    model.save(tmp_path)
    spoil, words = REFUSED_FILES[what]
    spoil(tmp_path)
    expect_error(lambda: Model.load(tmp_path), words)


def test_a_pickle_is_not_run(tmp_path):
    class Trap:
        def __reduce__(self):
            return (open, (str(tmp_path / "sprung"), "w"))

    network_and_bags()[0].save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(pickle.dumps(Trap()))
    expect_error(lambda: Model.load(tmp_path), "cannot read")
    assert not (tmp_path / "sprung").exists()


def test_a_custom_head_is_not_saved(tmp_path):
    (tmp_path / "own.py").write_text("from headcount.models.heads.count import Count\nclass Own(Count):\n    pass\n")
    model, bags = network_and_bags(f"{tmp_path / 'own.py'}:Own")
    plain, _ = network_and_bags()
    assert torch.equal(predict(model, bags).bag, predict(plain, bags).bag)
    expect_error(lambda: model.save(tmp_path / "m"), "own.py:Own", "runs no code")


def test_a_save_that_fails_leaves_the_old_model(tmp_path, monkeypatch):
    old, bags = network_and_bags()
    old.save(tmp_path / "m")
    new, _ = network_and_bags(options={"t1": 1.0})
    with torch.no_grad():
        new.head.classifier.weight += 1
    for successes in (0, 1):  # the weights are written first, then model.json
        written = []

        def fail(path, write, written=written, successes=successes):
            if len(written) == successes:
                raise OSError(errno.ENOSPC, "no space left")
            written.append(path)
            atomic_write(path, write)

        monkeypatch.setattr(serialization, "atomic_write", fail)
        with pytest.raises(OSError, match="no space"):
            new.save(tmp_path / "m", overwrite=True)
        assert len(written) == successes
        assert [p.name for p in tmp_path.iterdir()] == ["m"]
        assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["model.json", "model.safetensors"]
        assert torch.equal(predict(Model.load(tmp_path / "m"), bags).bag, predict(old, bags).bag)


HELPFUL_ERRORS = {
    "missing weights are named": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors is missing"),
    "an empty shape": (spoil_json(shape=[]), "shape"),
    "a folder in place of a file": (lambda f: [(f / "model.json").unlink(), (f / "model.json").mkdir()], "model.json"),
    "the weights that do not fit are named": (spoil_json(shape=[9]), "backbone.layers.1.weight"),
    "counted of another length": (spoil_json(counted=[True]), "counted"),
    "no counted class": (spoil_json(counted=[False] * 4), "two classes must count"),
}


@pytest.mark.parametrize("what", HELPFUL_ERRORS)
def test_load_names_the_problem(what, tmp_path):
    network_and_bags()[0].save(tmp_path)
    spoil, words = HELPFUL_ERRORS[what]
    spoil(tmp_path)
    expect_error(lambda: Model.load(tmp_path), words)

"""A fitted model and its folder: loading gives back what was saved, and refuses anything else in one line, with nothing run."""

from __future__ import annotations

import json
import os
import pickle
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from sklearn.ensemble import ExtraTreesClassifier, HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.tree import DecisionTreeClassifier

from headcount.errors import HeadcountError
from headcount.majority import transition
from headcount.majority.calibration import log_mean_shares
from headcount.majority.proportions import posterior_in_context
from headcount.models.fitted import FittedModel, load_model
from headcount.models.heads import HEADS
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import predict
from headcount.models.trees import LinearModel, Trees, from_sklearn
from headcount.readers import read

CLASSES = ("a", "b", "c")


def dataset_of(seed=0, bags=12, dim=4, **more):
    g = np.random.default_rng(seed)
    bags_of_x = [g.normal(size=(int(n), dim)).astype(np.float32) for n in g.integers(1, 9, bags)]
    return read(bags_of_x, labels=[CLASSES[i % 3] for i in range(bags)], **more)


def some_transition(classes=3):
    return transition.Transition(transition.mix_from_shares(0.6, classes), torch.full((classes,), 1 / classes))


def fitted_of(kind="forest", r=None, **more):
    r = r or dataset_of()
    learned = r.fit_preprocessor()
    x, g = r.to_bags(learned).pool.data.numpy(), np.random.default_rng(1)
    y = g.integers(0, 3, len(x))
    if kind == "forest":
        body = from_sklearn(RandomForestClassifier(7, random_state=0).fit(x, y), 3)
    elif kind == "boosting":
        body = from_sklearn(HistGradientBoostingClassifier(max_iter=4).fit(x, y), 3)
    elif kind == "linear":
        body = from_sklearn(LogisticRegression().fit(x, y), 3)
    else:
        torch.manual_seed(0)
        body = Model(ModelConfig(learned.shape, CLASSES, "mlp", (("hidden", 8),), more.pop("head", "tilt"))).eval()
    return FittedModel(body, CLASSES, learned, some_transition(), metadata={"method": kind, "scores": {"x": 0.5}}, **more), r


# -- arrays of scikit-learn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "classifier",
    [
        DecisionTreeClassifier(random_state=0),
        DecisionTreeClassifier(max_depth=1, random_state=0),
        RandomForestClassifier(30, random_state=0),
        RandomForestClassifier(5, criterion="entropy", class_weight="balanced", max_depth=3, random_state=0),
        ExtraTreesClassifier(10, random_state=0),
        HistGradientBoostingClassifier(max_iter=10, random_state=0),
        LogisticRegression(),
        LogisticRegression(C=100.0, fit_intercept=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("present", [(0, 1), (1, 3), (0, 1, 2, 3)], ids=str)
def test_arrays_predict_as_scikit_learn_does(classifier, present):
    g = np.random.default_rng(0)
    x = g.normal(size=(300, 6)).astype(np.float32)
    y = np.array(present)[np.clip((x[:, 0] + 0.5 * g.normal(size=300)) * 2, 0, len(present) - 1).astype(int)]
    classifier.fit(x, y, sample_weight=g.random(300))
    made = from_sklearn(classifier, 4)
    new = g.normal(size=(500, 6)).astype(np.float32)
    new[:100] = np.float32(made.threshold[:100, None] if isinstance(made, Trees) and len(made.threshold) > 99 else 0)
    data = made.predict_proba(new)
    want = np.zeros((500, 4))
    want[:, classifier.classes_] = classifier.predict_proba(new)
    assert np.abs(data - want).max() < 1e-6
    again = type(made).from_arrays(made.arrays(), 6, 4)
    assert np.array_equal(again.predict_proba(new), data)


def test_a_tree_of_one_leaf():
    made = from_sklearn(DecisionTreeClassifier().fit(np.ones((4, 2)), [0, 0, 0, 1]), 2)
    assert made.predict_proba(np.zeros((2, 2))).tolist() == [[0.75, 0.25]] * 2


def same(one, two):
    """The same predictions, bit for bit."""
    for name in ("instance_probabilities", "bag_probabilities", "shares", "shares_low", "shares_high"):
        assert np.array_equal(getattr(one, name), getattr(two, name)), name


def test_batches_do_not_change_predictions():
    model, dataset = fitted_of()
    bags = dataset.to_bags()
    same(model.predict(bags), model.predict(bags, batch_instances=3))
    x = bags.pool.data.numpy()
    assert np.array_equal(model.estimator.predict_proba(x), model.estimator.predict_proba(x, chunk=10))


@pytest.mark.parametrize("classifier", [HistGradientBoostingClassifier(categorical_features=[0]), object()])
def test_what_cannot_be_saved_is_refused(classifier):
    with pytest.raises(HeadcountError, match="without pickle"):
        from_sklearn(classifier, 2)


def test_an_unusual_logistic_regression_is_not_passed_off():
    g = np.random.default_rng(0)
    model = LogisticRegression().fit(g.normal(size=(60, 2)), np.arange(60) % 3)
    model.predict_proba = lambda x: np.full((len(x), 3), 1 / 3)
    with pytest.raises(HeadcountError, match="predicts otherwise"):
        from_sklearn(model, 3)


# -- saved and loaded -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forest", "boosting", "linear", "network"])
def test_saved_and_loaded(kind, tmp_path):
    model, dataset = fitted_of(kind, temperature=0.5, instance_temperature=0.7, counted=(True, True, False))
    model.save(tmp_path / "m", {"report.html": "<p>"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["model.json", "model.safetensors", "report.html"]
    again = FittedModel.load(tmp_path / "m")
    one, two = model.predict(dataset), again.predict(dataset.to_bags(model.preprocessor))
    same(one, two)
    assert (again.classes, again.kind, again.metadata, again.counted) == (CLASSES, kind, model.metadata, model.counted)
    assert torch.equal(again.transition.mix, model.transition.mix)
    assert np.allclose(one.instance_probabilities.sum(1), 1, atol=1e-5)
    assert np.allclose(one.bag_probabilities.sum(1), 1, atol=1e-5)
    assert (one.bag_probabilities[:, 2] == 0).all()
    assert one.classes == CLASSES
    assert np.array_equal(one.confidence, one.instance_probabilities[range(len(one.confidence)), one.instance_prediction])
    assert np.array_equal(one.bag_prediction, one.bag_probabilities.argmax(1))


@pytest.mark.parametrize("head", [h for h in HEADS if h != "mctformer"])
def test_every_head_saved_and_loaded(head, tmp_path):
    model, dataset = fitted_of("network", head=head)
    model.save(tmp_path / "m")
    bags = dataset.to_bags()
    predictions = model.predict(bags)
    same(predictions, FittedModel.load(tmp_path / "m").predict(bags))
    output = predict(model.estimator, bags)
    assert np.allclose(predictions.instance_probabilities, output.instance.softmax(1), atol=1e-6)
    assert np.allclose(predictions.bag_probabilities, output.bag.exp(), atol=1e-5)


def test_images_saved_and_loaded(tmp_path):
    g = np.random.default_rng(0)
    images = [g.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8) for _ in range(3)]
    dataset = read(images, labels=["a", "b", "c"])
    options = (("stem", "small"), ("width", 8))
    network = Model(ModelConfig((8, 8, 3), CLASSES, "resnet18", options, "tilt", mirror=True)).eval()
    model = FittedModel(network, CLASSES, dataset.fit_preprocessor(), some_transition())
    model.save(tmp_path / "m")
    same(model.predict(dataset), FittedModel.load(tmp_path / "m").predict(dataset))


def test_text_comes_back_with_its_words(tmp_path):
    table = {"bag": list("aabbcc"), "label": list("xxyyxx"), "text": ["good day", "day", "bad", "so bad", "good", "fine"]}
    dataset = read(table)
    preprocessor = dataset.fit_preprocessor()
    x = dataset.to_bags(preprocessor).pool.data.numpy()
    estimator = from_sklearn(LogisticRegression().fit(x, [0, 0, 1, 1, 0, 0]), 2)
    FittedModel(estimator, ("x", "y"), preprocessor, some_transition(2)).save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    new = again.read({"bag": ["q", "q"], "text": ["so good", "bad"]})
    assert again.predict(new).instance_prediction.tolist() == [0, 1]


def test_either_kind_of_folder_is_loaded(tmp_path):
    model, dataset = fitted_of("network")
    model.save(tmp_path / "fitted")
    model.estimator.save(tmp_path / "network")
    network = load_model(tmp_path / "network")
    assert isinstance(network, Model)
    assert torch.equal(predict(network, dataset.to_bags()).bag, predict(model.estimator, dataset.to_bags()).bag)
    same(load_model(tmp_path / "fitted").predict(dataset), model.predict(dataset))
    with pytest.raises(HeadcountError, match=r"use FittedModel\.load"):
        Model.load(tmp_path / "fitted")
    with pytest.raises(HeadcountError, match=r"use Model\.load"):
        FittedModel.load(tmp_path / "network")


def test_weights_and_removal_count_in_the_share():
    model, dataset = fitted_of(r=dataset_of(bags=3))
    bags = dataset.to_bags()
    p = torch.from_numpy(model.predict(bags).instance_probabilities)
    removed = torch.zeros(len(bags.index), dtype=torch.bool)
    removed[int(bags.offsets[1])] = int(bags.sizes[1]) > 1
    slow = torch.stack([p[(bags.bag == b) & ~removed].mean(0) for b in range(3)])
    assert np.allclose(model.predict(bags.without(removed)).bag_probabilities, slow, atol=1e-5)
    assert np.allclose(model.predict(bags).bag_probabilities, log_mean_shares(p, bags.segments()).exp(), atol=1e-6)


def test_temperatures():
    model, dataset = fitted_of()
    one = model.predict(dataset)
    two = model.replace(temperature=0.5, instance_temperature=0.5).predict(dataset)
    for p, q in ((one.bag_probabilities, two.bag_probabilities), (one.instance_probabilities, two.instance_probabilities)):
        square = np.square(np.maximum(p, 1e-30))
        assert np.allclose(q, square / square.sum(1, keepdims=True), atol=1e-5)


def test_context(tmp_path):
    model, dataset = fitted_of(concentration=2.0, use_context=True)
    bags = dataset.to_bags(model.preprocessor)
    predictions = model.predict(bags)
    single = torch.from_numpy(model.predict(bags, use_context=False).instance_probabilities)
    log_p = single.clamp_min(1e-30).double().log()
    want = posterior_in_context(log_p, bags.segments(), model.prior, 2.0).exp()
    got = torch.from_numpy(predictions.instance_probabilities)
    torch.testing.assert_close(got, want.float())
    assert not torch.allclose(got, single)
    bags_of_one = bags.sizes == 1
    assert bool(bags_of_one.any())
    rows = bags.segments().broadcast(bags_of_one.float()).bool()
    torch.testing.assert_close(got[rows], single[rows])
    model.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    assert (again.concentration, again.use_context) == (2.0, True)
    same(again.predict(bags), predictions)
    assert (predictions.shares_low <= predictions.shares).all()
    assert (predictions.shares <= predictions.shares_high).all()
    wide = model.predict(bags, level=0.99)
    assert (wide.shares_low <= predictions.shares_low).all()
    assert np.isnan(model.predict(bags, level=None).shares).all()
    plain, _ = fitted_of()
    mean = bags.segments().mean(single)
    assert np.allclose(plain.predict(bags).shares, mean, atol=1e-6)
    with pytest.raises(HeadcountError, match="too few bags to use a bag as context"):
        plain.predict(bags, use_context=True)


def test_a_model_is_only_replaced_with_overwrite(tmp_path):
    fitted, _ = fitted_of()
    fitted.save(tmp_path / "m")
    with pytest.raises(HeadcountError, match="give overwrite=True"):
        fitted.save(tmp_path / "m")
    fitted.replace(temperature=2.0).save(tmp_path / "m", overwrite=True)
    assert FittedModel.load(tmp_path / "m").temperature == 2.0
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine.txt").write_text("x")
    with pytest.raises(HeadcountError, match="not empty"):
        fitted.save(tmp_path / "other", overwrite=True)
    assert (tmp_path / "other" / "mine.txt").exists()
    (tmp_path / "file").write_text("x")
    with pytest.raises(HeadcountError, match="is a file"):
        fitted.save(tmp_path / "file", overwrite=True)


@pytest.mark.parametrize("name", ["../evil", "a/b", "model.json", "/tmp/x"])
def test_documents_stay_in_the_folder(name, tmp_path):
    with pytest.raises(HeadcountError, match="not allowed as the name of a document"):
        fitted_of()[0].save(tmp_path / "in" / "m", {name: "x"})
    assert not list((tmp_path / "in").iterdir())


def test_documents_name_files_that_are_not_utf8(tmp_path):
    fitted_of()[0].save(tmp_path / "m", {"report.html": "A model from caf\udce9.csv"})
    assert (tmp_path / "m" / "report.html").read_text() == "A model from caf\\udce9.csv"


def test_a_failure_leaves_the_old_model(tmp_path, monkeypatch):
    fitted, _ = fitted_of()
    fitted.save(tmp_path / "m")
    monkeypatch.setattr(os, "replace", lambda a, b: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        fitted.save(tmp_path / "m", overwrite=True)
    monkeypatch.undo()
    assert FittedModel.load(tmp_path / "m").kind == "forest"
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_other_instances_are_refused():
    fitted, _ = fitted_of()
    with pytest.raises(HeadcountError, match="takes instances of shape"):
        fitted.predict(dataset_of(dim=5))


# -- invalid files----------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/headcount_was_here",))


def _json(**changes):
    def edit(folder: Path):
        data = json.loads((folder / "model.json").read_text())
        for path, value in changes.items():
            node = data
            *way, last = path.split("__")
            for step in way:
                node = node[int(step) if isinstance(node, list) else step]
            node[int(last) if isinstance(node, list) else last] = value
        (folder / "model.json").write_text(json.dumps(data))

    return edit


def _arrays(change):
    def edit(folder: Path):
        arrays = {k: v.copy() for k, v in load_file(folder / "model.safetensors").items()}
        change(arrays)
        save_file(arrays, folder / "model.safetensors")

    return edit


def _set(name, where, value):
    return _arrays(lambda arrays: arrays[name].__setitem__(where, value))


def _weights(data):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def _inner(arrays):  # a node that is no leaf, the first of the second tree
    roots = arrays["estimator.roots"]
    return int(roots[1])


def _backwards(arrays):
    at = _inner(arrays)
    arrays["estimator.left"][at] = 0


def _itself(arrays):
    at = _inner(arrays)
    arrays["estimator.left"][at] = at


def _outside(arrays):
    arrays["estimator.right"][_inner(arrays)] = 10**6


def _next_tree(arrays):
    arrays["estimator.right"][0] = _inner(arrays)


def _two_parents(arrays):
    arrays["estimator.right"][0] = arrays["estimator.left"][0]


FOREST = {
    "pickle": (_weights(pickle.dumps(Evil())), "safetensors"),
    "torch pickle": (lambda f: torch.save({"x": torch.ones(2)}, f / "model.safetensors"), "safetensors"),
    "empty": (_weights(b""), "safetensors"),
    "huge header": (_weights(struct.pack("<Q", 1 << 40) + b"{" + b" " * 100), "safetensors"),
    "long header": (_weights(struct.pack("<Q", 1 << 21) + b"{" + b" " * (1 << 21)), "safetensors"),
    "cut short": (lambda f: _weights((f / "model.safetensors").read_bytes()[:-9])(f), "cannot read"),
    "not json": (lambda f: (f / "model.json").write_bytes(b"\x80\x04K\x01."), "cannot read"),
    "deep json": (lambda f: (f / "model.json").write_text("[" * 200_000), "cannot read"),
    "list": (lambda f: (f / "model.json").write_text("[]"), "format"),
    "gone": (lambda f: (f / "model.safetensors").unlink(), "missing"),
    "a folder": (lambda f: ((f / "model.json").unlink(), (f / "model.json").mkdir()), "not a file"),
    "a pipe": (lambda f: ((f / "model.json").unlink(), os.mkfifo(f / "model.json")), "not a file"),
    "a device": (lambda f: ((f / "model.json").unlink(), (f / "model.json").symlink_to("/dev/zero")), "not a file"),
    "format": (_json(format=99), "format"),
    "kind": (_json(kind="os.system"), "kind"),
    "kind list": (_json(kind=["forest"]), "none of network"),
    "more keys": (_json(run="rm"), "adds run"),
    "classes": (_json(classes=["a", "a", "b"]), "classes"),
    "fewer classes": (_json(classes=["a", "b"]), "transition|value"),
    "counted": (_json(counted=[True, 1, False]), "counted"),
    "temperature": (_json(temperature=0), "temperature"),
    "concentration": (_json(concentration=0), "concentration"),
    "concentration word": (_json(concentration="much"), "concentration"),
    "context of nothing": (_json(use_context=True), "use_context"),
    "use_context word": (_json(use_context="yes"), "use_context"),
    "temperature word": (_json(temperature="1"), "temperature"),
    "tilt": (_json(transition__mix__0=[0.5, 0.5, 0.5]), "transition"),
    "tilt shape": (_json(transition__mix=[[1.0]]), "transition"),
    "metadata": (_json(metadata=[]), "metadata"),
    "config": (_json(config={}), "config"),
    "preprocessor": (_json(preprocessor__shape=[2]), "feature"),
    "path in preprocessor": (_json(preprocessor__kind="../../etc/passwd"), "preprocessor"),
    "extra": (_arrays(lambda arrays: arrays.update(extra=np.ones(3))), "belongs to nothing"),
    "extra in body": (_arrays(lambda arrays: arrays.update({"estimator.extra": np.ones(3)})), "extra"),
    "extra learned": (_arrays(lambda arrays: arrays.update({"preprocessor.extra": np.ones(3)})), "preprocessor"),
    "missing": (_arrays(lambda arrays: arrays.pop("estimator.left")), "left"),
    "shape": (_arrays(lambda arrays: arrays.update({"estimator.threshold": arrays["estimator.threshold"][1:]})), "threshold"),
    "dtype": (_arrays(lambda arrays: arrays.update({"estimator.left": arrays["estimator.left"].astype(np.int64)})), "left"),
    "scalar": (_arrays(lambda arrays: arrays.update({"estimator.feature": np.zeros((), np.int32)})), "damaged|cannot read"),
    "nan": (_set("estimator.threshold", 0, np.nan), "finite"),
    "infinite": (_set("estimator.threshold", 0, np.inf), "finite"),
    "nan in NaN json": (lambda f: (f / "model.json").write_text('{"format": NaN}'), "finite"),
    "feature": (_set("estimator.feature", 0, 4), "feature"),
    "negative feature": (_set("estimator.feature", 0, -2), "feature"),
    "backwards": (_arrays(_backwards), "left child"),
    "itself": (_arrays(_itself), "left child"),
    "outside": (_arrays(_outside), "right child"),
    "another tree": (_arrays(_next_tree), "right child"),
    "two parents": (_arrays(_two_parents), "parents"),
    "no probabilities": (_set("estimator.value", 0, 2.0), "add up"),
    "negative": (_set("estimator.value", (0, slice(None)), [2.0, -1.0, 0.0]), "add up"),
    "roots": (_set("estimator.roots", 1, 0), "follow"),
    "no roots": (_arrays(lambda arrays: arrays.update({"estimator.roots": np.zeros(0, np.int64)})), "trees"),
}
BOOSTING = {
    "backwards": (_arrays(_backwards), "left child"), "target": (_set("estimator.target", 1, 3), "class"),
    "negative target": (_set("estimator.target", 1, -1), "class"), "no number": (_set("estimator.bias", 0, np.nan), "finite"),
    "as a forest": (_json(kind="forest"), "differs in"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "how"), [*(("forest", how) for how in FOREST), *(("boosting", how) for how in BOOSTING)])
def test_invalid_trees_are_refused(kind, how, tmp_path):
    edit, why = (FOREST if kind == "forest" else BOOSTING)[how]
    _refused(fitted_of(kind)[0], edit, why, tmp_path)


NETWORK = {
    "head from a file": (_json(config__head="/tmp/evil.py:Head"), "runs no code"),
    "no such head": (_json(config__head="cuont"), "no head"),
    "another head": (_json(config__head="attention"), "weights"),
    "backbone": (_json(config__backbone="os"), "backbone"),
    "larger": (_json(config__backbone_options={"hidden": 16}), "weights"),
    "as large as the machine": (_json(config__backbone_options={"hidden": 10**9}), "option"),
    "a tower": (_json(config__backbone_options={"layers": 10**6}), "option"),
    "a crowd": (_json(config__backbone_options={"networks": 10**4}), "option 'networks'"),
    "unknown option": (_json(config__options={"run": "rm"}), "option"),
    "odd option": (_json(config__options={"share": {"a": 1}}), "option"),
    "mirror": (_json(config__mirror=1), "mirror"),
    "nan weight": (_set("estimator.head.classifier.weight", (0, 0), np.nan), "finite"),
    "missing weight": (_arrays(lambda arrays: arrays.pop("estimator.head.classifier.weight")), "weights"),
    "extra weight": (_arrays(lambda arrays: arrays.update({"estimator.head.more": np.ones(2)})), "weights"),
    "wrong shape": (
        _arrays(lambda arrays: arrays.update({"estimator.head.classifier.weight": np.ones((3, 9), np.float32)})),
        "9",
    ),
    "wrong dtype": (_arrays(lambda arrays: arrays.update({"estimator.head.classifier.bias": np.ones(3)})), "float64"),
}


@pytest.mark.parametrize("how", NETWORK)
def test_an_invalid_network_is_refused(how, tmp_path):
    edit, why = NETWORK[how]
    _refused(fitted_of("network")[0], edit, why, tmp_path)


LINEAR = {
    "transposed": (_arrays(lambda arrays: arrays.update({"estimator.weight": np.ones((4, 3))})), "weight"),
    "nan": (_set("estimator.bias", 0, np.nan), "finite"),
    "kind": (_json(kind="forest"), "it needs feature"),
}


@pytest.mark.parametrize("how", LINEAR)
def test_an_invalid_linear_model_is_refused(how, tmp_path):
    edit, why = LINEAR[how]
    _refused(fitted_of("linear")[0], edit, why, tmp_path)


def _refused(fitted, edit, why, tmp_path):
    fitted.save(tmp_path / "m")
    edit(tmp_path / "m")
    with pytest.raises(HeadcountError, match=why) as e:
        FittedModel.load(tmp_path / "m")
    assert str(tmp_path / "m") in str(e.value)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 700
    assert not Path("/tmp/headcount_was_here").exists()


def test_weights_of_another_model_are_refused(tmp_path):
    model, _ = fitted_of("linear")
    model.save(tmp_path / "one")
    model.replace(estimator=replace(model.estimator, bias=model.estimator.bias + 1)).save(tmp_path / "two")
    os.replace(tmp_path / "one" / "model.safetensors", tmp_path / "two" / "model.safetensors")
    with pytest.raises(HeadcountError, match="do not belong together"):
        FittedModel.load(tmp_path / "two")


def test_no_folder(tmp_path):
    with pytest.raises(HeadcountError, match=r"model\.json is missing"):
        FittedModel.load(tmp_path / "nowhere")


def test_linear_never_predicts_a_class_it_never_saw():
    made = from_sklearn(LogisticRegression().fit([[0.0], [1.0]], [0, 2]), 3)
    assert isinstance(made, LinearModel)
    assert made.predict_proba(np.zeros((1, 1)))[0, 1] == 0

"""A model's folder: it comes back as it went, and a stranger's is refused in one line, with nothing run."""

from __future__ import annotations

import json
import os
import pickle
import struct
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
from headcount.models.fitted import FittedModel
from headcount.models.heads import HEADS
from headcount.models.network import Model, ModelConfig
from headcount.models.predictions import predict
from headcount.models.trees import LinearModel, Trees, from_sklearn
from headcount.readers import read

CLASSES = ("a", "b", "c")


def reading(seed=0, bags=12, dim=4, **more):
    g = np.random.default_rng(seed)
    held = [g.normal(size=(int(n), dim)).astype(np.float32) for n in g.integers(1, 9, bags)]
    return read(held, labels=[CLASSES[i % 3] for i in range(bags)], **more)


def some_tilt(classes=3):
    return transition.Transition(transition.mix_from_shares(0.6, classes), torch.full((classes,), 1 / classes))


def fitted_of(kind="forest", r=None, **more):
    r = r or reading()
    learned = r.fit_preprocessor()
    x, g = r.to_bags(learned).pool.data.numpy(), np.random.default_rng(1)
    y = g.integers(0, 3, len(x))
    if kind == "forest":
        body = from_sklearn(RandomForestClassifier(7, random_state=0).fit(x, y), 3)
    elif kind == "linear":
        body = from_sklearn(LogisticRegression().fit(x, y), 3)
    else:
        torch.manual_seed(0)
        body = Model(ModelConfig(learned.shape, CLASSES, "mlp", (("hidden", 8),), more.pop("head", "tilt"))).eval()
    return FittedModel(body, CLASSES, learned, some_tilt(), metadata={"method": kind, "scores": {"x": 0.5}}, **more), r


# -- arrays of scikit-learn -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "classifier",
    [
        DecisionTreeClassifier(random_state=0),
        DecisionTreeClassifier(max_depth=1, random_state=0),
        RandomForestClassifier(30, random_state=0),
        RandomForestClassifier(5, criterion="entropy", class_weight="balanced", max_depth=3, random_state=0),
        ExtraTreesClassifier(10, random_state=0),
        LogisticRegression(),
        LogisticRegression(C=100.0, fit_intercept=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("seen", [(0, 1), (1, 3), (0, 1, 2, 3)], ids=str)
def test_arrays_answer_as_scikit_learn_does(classifier, seen):
    g = np.random.default_rng(0)
    x = g.normal(size=(300, 6)).astype(np.float32)
    y = np.array(seen)[np.clip((x[:, 0] + 0.5 * g.normal(size=300)) * 2, 0, len(seen) - 1).astype(int)]
    classifier.fit(x, y, sample_weight=g.random(300))
    made = from_sklearn(classifier, 4)
    new = g.normal(size=(500, 6)).astype(np.float32)
    new[:100] = np.float32(made.threshold[:100, None] if isinstance(made, Trees) and len(made.threshold) > 99 else 0)
    said = made.predict_proba(new)
    want = np.zeros((500, 4))
    want[:, classifier.classes_] = classifier.predict_proba(new)
    assert np.abs(said - want).max() < 1e-6
    again = type(made).from_arrays(made.arrays(), 6, 4)
    assert np.array_equal(again.predict_proba(new), said)


def test_a_tree_of_one_leaf():
    made = from_sklearn(DecisionTreeClassifier().fit(np.ones((4, 2)), [0, 0, 0, 1]), 2)
    assert made.predict_proba(np.zeros((2, 2))).tolist() == [[0.75, 0.25]] * 2


def test_parts_do_not_change_the_answer(monkeypatch):
    fitted, r = fitted_of()
    whole = fitted.predict(r.to_bags())
    monkeypatch.setattr("headcount.models.trees._CHUNK", 10)
    parts = fitted.predict(r.to_bags(), batch_instances=3)
    assert torch.equal(whole.instance_probabilities, parts.instance_probabilities)
    assert torch.equal(whole.bag_log_probabilities, parts.bag_log_probabilities)


@pytest.mark.parametrize("classifier", [HistGradientBoostingClassifier(), object()])
def test_what_cannot_be_saved_is_refused(classifier):
    with pytest.raises(HeadcountError, match="without pickle"):
        from_sklearn(classifier, 2)


def test_an_unusual_logistic_regression_is_not_passed_off():
    g = np.random.default_rng(0)
    model = LogisticRegression().fit(g.normal(size=(60, 2)), np.arange(60) % 3)
    model.predict_proba = lambda x: np.full((len(x), 3), 1 / 3)
    with pytest.raises(HeadcountError, match="answers otherwise"):
        from_sklearn(model, 3)


# -- there and back -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["forest", "linear", "network"])
def test_there_and_back(kind, tmp_path):
    fitted, r = fitted_of(kind, temperature=0.5, instance_temperature=0.7, counted=(True, True, False))
    fitted.save(tmp_path / "m", {"report.html": "<p>"})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m"]
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == ["model.json", "model.safetensors", "report.html"]
    again = FittedModel.load(tmp_path / "m")
    bags = r.to_bags(fitted.preprocessor)
    one, two = fitted.predict(bags), again.predict(bags)
    assert torch.equal(one.instance_probabilities, two.instance_probabilities)
    assert torch.equal(one.bag_log_probabilities, two.bag_log_probabilities)
    assert (again.classes, again.kind, again.metadata, again.counted) == (
        CLASSES,
        kind,
        fitted.metadata,
        fitted.counted,
    )
    assert torch.equal(again.transition.mix, fitted.transition.mix)
    assert one.instance_probabilities.sum(1).sub(1).abs().max() < 1e-5
    assert one.bag_log_probabilities.exp().sum(1).sub(1).abs().max() < 1e-5
    assert bool((one.bag_log_probabilities[:, 2] == -torch.inf).all())


@pytest.mark.parametrize("head", [h for h in HEADS if h != "mctformer"])
def test_every_head_there_and_back(head, tmp_path):
    fitted, r = fitted_of("network", head=head)
    fitted.save(tmp_path / "m")
    one, two = (f.predict(r.to_bags()) for f in (fitted, FittedModel.load(tmp_path / "m")))
    assert torch.equal(one.instance_probabilities, two.instance_probabilities)
    assert torch.equal(one.bag_log_probabilities, two.bag_log_probabilities)
    said = predict(fitted.estimator, r.to_bags())
    assert torch.allclose(one.instance_probabilities, said.instance.softmax(1), atol=1e-6)
    assert torch.allclose(one.bag_log_probabilities, said.bag, atol=1e-5)


def test_images_there_and_back(tmp_path):
    g = np.random.default_rng(0)
    r = read([g.integers(0, 256, (3, 8, 8, 3), dtype=np.uint8) for _ in range(3)], labels=["a", "b", "c"])
    body = Model(
        ModelConfig((8, 8, 3), CLASSES, "resnet18", (("stem", "small"), ("width", 8)), "tilt", mirror=True)
    ).eval()
    fitted = FittedModel(body, CLASSES, r.fit_preprocessor(), some_tilt())
    fitted.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    assert torch.equal(
        fitted.predict(r.to_bags()).instance_probabilities, again.predict(r.to_bags()).instance_probabilities
    )


def test_text_comes_back_with_its_words(tmp_path):
    table = {
        "bag": list("aabbcc"),
        "label": list("xxyyxx"),
        "text": ["good day", "day", "bad", "so bad", "good", "fine"],
    }
    r = read(table)
    learned = r.fit_preprocessor()
    x = r.to_bags(learned).pool.data.numpy()
    body = from_sklearn(LogisticRegression().fit(x, [0, 0, 1, 1, 0, 0]), 2)
    fitted = FittedModel(body, ("x", "y"), learned, some_tilt(2))
    fitted.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    new = again.read({"bag": ["q", "q"], "text": ["so good", "bad"]})
    assert again.predict(new.to_bags(again.preprocessor)).instance_probabilities.argmax(1).tolist() == [0, 1]


def test_weights_and_removal_count_in_the_share():
    fitted, r = fitted_of(r=reading(bags=3))
    bags = r.to_bags()
    p = fitted.predict(bags).instance_probabilities
    gone = torch.zeros(len(bags.index), dtype=torch.bool)
    gone[int(bags.offsets[1])] = int(bags.sizes[1]) > 1
    said = fitted.predict(bags.without(gone)).bag_log_probabilities
    slow = torch.stack([p[(bags.bag == b) & ~gone].mean(0) for b in range(3)]).log()
    assert torch.allclose(said, slow, atol=1e-5)
    assert torch.allclose(fitted.predict(bags).bag_log_probabilities, log_mean_shares(p, bags.segments()))


def test_temperatures():
    fitted, r = fitted_of()
    one, two = (
        fitted.predict(r.to_bags()),
        fitted.replace(temperature=0.5, instance_temperature=0.5).predict(r.to_bags()),
    )
    assert torch.allclose(two.bag_log_probabilities, (2 * one.bag_log_probabilities).log_softmax(1), atol=1e-5)
    square = one.instance_probabilities.clamp_min(1e-30).square()
    assert torch.allclose(two.instance_probabilities, square / square.sum(1, keepdim=True), atol=1e-5)


def test_a_bag_is_listened_to_where_it_helps(tmp_path):
    fitted, r = fitted_of(concentration=2.0, use_context=True)
    bags = r.to_bags(fitted.preprocessor)
    said = fitted.predict(bags)
    assert torch.equal(said.instance_without_context, fitted.predict(bags, use_context=False).instance_probabilities)
    want = posterior_in_context(
        said.instance_without_context.clamp_min(1e-30).double().log(), bags.segments(), fitted.prior, 2.0
    ).exp()
    torch.testing.assert_close(said.instance_probabilities, want.float())
    assert not torch.allclose(said.instance_probabilities, said.instance_without_context)
    single = bags.sizes == 1
    assert bool(single.any())
    alone = bags.segments().broadcast(single.float()).bool()
    torch.testing.assert_close(said.instance_probabilities[alone], said.instance_without_context[alone])
    fitted.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    assert (again.concentration, again.use_context) == (2.0, True)
    assert torch.equal(again.predict(bags).instance_probabilities, said.instance_probabilities)
    share, low, high = fitted.estimate_shares(said.instance_without_context, bags)
    assert ((low <= share) & (share <= high)).all()
    plain, _ = fitted_of()
    torch.testing.assert_close(
        plain.estimate_shares(said.instance_without_context, bags)[0],
        bags.segments().mean(said.instance_without_context),
    )
    with pytest.raises(HeadcountError, match="too few bags to know what a bag tells"):
        plain.predict(bags, use_context=True)


def test_a_model_is_only_replaced_when_asked(tmp_path):
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
def test_papers_stay_in_the_folder(name, tmp_path):
    with pytest.raises(HeadcountError, match="no name for a file"):
        fitted_of()[0].save(tmp_path / "in" / "m", {name: "x"})
    assert not list((tmp_path / "in").iterdir())


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
        fitted.predict(reading(dim=5).to_bags())


# -- strangers ------------------------------------------------------------------------------------------------------------


class Evil:
    def __reduce__(self):
        return (os.system, ("touch /tmp/headcount_was_here",))


def _json(**changes):
    def edit(folder: Path):
        said = json.loads((folder / "model.json").read_text())
        for path, value in changes.items():
            place = said
            *way, last = path.split("__")
            for step in way:
                place = place[int(step) if isinstance(place, list) else step]
            place[int(last) if isinstance(place, list) else last] = value
        (folder / "model.json").write_text(json.dumps(said))

    return edit


def _arrays(change):
    def edit(folder: Path):
        held = {k: v.copy() for k, v in load_file(folder / "model.safetensors").items()}
        change(held)
        save_file(held, folder / "model.safetensors")

    return edit


def _set(name, where, value):
    return _arrays(lambda held: held[name].__setitem__(where, value))


def _weights(data):
    return lambda folder: (folder / "model.safetensors").write_bytes(data)


def _inner(held):  # a node that is no leaf, the first of the second tree
    roots = held["body.roots"]
    return int(roots[1])


def _backwards(held):
    at = _inner(held)
    held["body.left"][at] = 0


def _itself(held):
    at = _inner(held)
    held["body.left"][at] = at


def _outside(held):
    held["body.right"][_inner(held)] = 10**6


def _next_tree(held):
    held["body.right"][0] = _inner(held)


def _two_parents(held):
    held["body.right"][0] = held["body.left"][0]


FOREST = {
    "pickle": (_weights(pickle.dumps(Evil())), "safetensors"),
    "torch pickle": (lambda f: torch.save({"x": torch.ones(2)}, f / "model.safetensors"), "safetensors"),
    "empty": (_weights(b""), "safetensors"),
    "huge header": (_weights(struct.pack("<Q", 1 << 40) + b"{" + b" " * 100), "safetensors"),
    "long header": (_weights(struct.pack("<Q", 1 << 21) + b"{" + b" " * (1 << 21)), "safetensors"),
    "cut short": (lambda f: _weights((f / "model.safetensors").read_bytes()[:-9])(f), "readable"),
    "not json": (lambda f: (f / "model.json").write_bytes(b"\x80\x04K\x01."), "readable"),
    "deep json": (lambda f: (f / "model.json").write_text("[" * 200_000), "readable"),
    "list": (lambda f: (f / "model.json").write_text("[]"), "format"),
    "gone": (lambda f: (f / "model.safetensors").unlink(), "missing"),
    "a folder": (lambda f: ((f / "model.json").unlink(), (f / "model.json").mkdir()), "not a file"),
    "a pipe": (lambda f: ((f / "model.json").unlink(), os.mkfifo(f / "model.json")), "not a file"),
    "a device": (lambda f: ((f / "model.json").unlink(), (f / "model.json").symlink_to("/dev/zero")), "not a file"),
    "format": (_json(format=99), "format"),
    "kind": (_json(kind="os.system"), "kind"),
    "kind list": (_json(kind=["forest"]), "readable"),
    "more keys": (_json(run="rm"), "adds run"),
    "classes": (_json(classes=["a", "a", "b"]), "classes"),
    "fewer classes": (_json(classes=["a", "b"]), "tilt|value"),
    "counted": (_json(counted=[True, 1, False]), "counted"),
    "temperature": (_json(temperature=0), "temperature"),
    "alike": (_json(alike=0), "alike"),
    "alike word": (_json(alike="much"), "alike"),
    "listens to nothing": (_json(listens=True), "listens"),
    "listens word": (_json(listens="yes"), "listens"),
    "temperature word": (_json(temperature="1"), "temperature"),
    "tilt": (_json(tilt__mix__0=[0.5, 0.5, 0.5]), "tilt"),
    "tilt shape": (_json(tilt__mix=[[1.0]]), "tilt"),
    "facts": (_json(facts=[]), "facts"),
    "design": (_json(design={}), "design"),
    "preparation": (_json(preparation__shape=[2]), "feature"),
    "path in preparation": (_json(preparation__kind="../../etc/passwd"), "preparation"),
    "extra": (_arrays(lambda held: held.update(extra=np.ones(3))), "belongs to nothing"),
    "extra in body": (_arrays(lambda held: held.update({"body.extra": np.ones(3)})), "extra"),
    "extra learned": (_arrays(lambda held: held.update({"learned.extra": np.ones(3)})), "preparation"),
    "missing": (_arrays(lambda held: held.pop("body.left")), "left"),
    "shape": (_arrays(lambda held: held.update({"body.threshold": held["body.threshold"][1:]})), "threshold"),
    "dtype": (_arrays(lambda held: held.update({"body.left": held["body.left"].astype(np.int64)})), "left"),
    "scalar": (_arrays(lambda held: held.update({"body.feature": np.zeros((), np.int32)})), "damaged|readable"),
    "nan": (_set("body.threshold", 0, np.nan), "finite"),
    "infinite": (_set("body.threshold", 0, np.inf), "finite"),
    "nan in NaN json": (lambda f: (f / "model.json").write_text('{"format": NaN}'), "finite"),
    "feature": (_set("body.feature", 0, 4), "feature"),
    "negative feature": (_set("body.feature", 0, -2), "feature"),
    "backwards": (_arrays(_backwards), "left child"),
    "itself": (_arrays(_itself), "left child"),
    "outside": (_arrays(_outside), "right child"),
    "another tree": (_arrays(_next_tree), "right child"),
    "two parents": (_arrays(_two_parents), "parents"),
    "no probabilities": (_set("body.value", 0, 2.0), "add up"),
    "negative": (_set("body.value", (0, slice(None)), [2.0, -1.0, 0.0]), "add up"),
    "roots": (_set("body.roots", 1, 0), "follow"),
    "no roots": (_arrays(lambda held: held.update({"body.roots": np.zeros(0, np.int64)})), "trees"),
}


@pytest.mark.parametrize("how", FOREST)
def test_a_strangers_forest_is_refused(how, tmp_path):
    edit, why = FOREST[how]
    _refused(fitted_of("forest")[0], edit, why, tmp_path)


NETWORK = {
    "head from a file": (_json(design__head="/tmp/evil.py:Head"), "runs no code"),
    "no such head": (_json(design__head="cuont"), "no head"),
    "another head": (_json(design__head="attention"), "weights"),
    "backbone": (_json(design__backbone="os"), "backbone"),
    "larger": (_json(design__backbone_options={"hidden": 16}), "weights"),
    "as large as the machine": (_json(design__backbone_options={"hidden": 10**9}), "option"),
    "a tower": (_json(design__backbone_options={"layers": 10**6}), "option"),
    "a crowd": (_json(design__backbone_options={"networks": 10**4}), "option 'networks'"),
    "unknown option": (_json(design__options={"run": "rm"}), "option"),
    "odd option": (_json(design__options={"share": {"a": 1}}), "option"),
    "mirror": (_json(design__mirror=1), "mirror"),
    "nan weight": (_set("body.head.classifier.weight", (0, 0), np.nan), "finite"),
    "missing weight": (_arrays(lambda held: held.pop("body.head.classifier.weight")), "weights"),
    "extra weight": (_arrays(lambda held: held.update({"body.head.more": np.ones(2)})), "weights"),
    "wrong shape": (
        _arrays(lambda held: held.update({"body.head.classifier.weight": np.ones((3, 9), np.float32)})),
        "9",
    ),
    "wrong dtype": (_arrays(lambda held: held.update({"body.head.classifier.bias": np.ones(3)})), "float64"),
}


@pytest.mark.parametrize("how", NETWORK)
def test_a_strangers_network_is_refused(how, tmp_path):
    edit, why = NETWORK[how]
    _refused(fitted_of("network")[0], edit, why, tmp_path)


LINEAR = {
    "transposed": (_arrays(lambda held: held.update({"body.weight": np.ones((4, 3))})), "weight"),
    "nan": (_set("body.bias", 0, np.nan), "finite"),
    "kind": (_json(kind="forest"), "forest"),
}


@pytest.mark.parametrize("how", LINEAR)
def test_a_strangers_line_is_refused(how, tmp_path):
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


def test_no_folder(tmp_path):
    with pytest.raises(HeadcountError, match=r"model\.json is missing"):
        FittedModel.load(tmp_path / "nowhere")


def test_linear_never_says_a_class_nobody_had():
    made = from_sklearn(LogisticRegression().fit([[0.0], [1.0]], [0, 2]), 3)
    assert isinstance(made, LinearModel)
    assert made.predict_proba(np.zeros((1, 1)))[0, 1] == 0

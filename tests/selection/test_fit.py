"""Fitting one's own bags: nothing leaks, truth is used for nothing, odd cases are handled or refused, it can be resumed."""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from test_em import blobs

from headcount.bags import Bags, Pool, folds
from headcount.bags import splits as fewer
from headcount.bags.splits import subsample_instances
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.majority import transition_em
from headcount.majority.criterion import evaluate_criterion
from headcount.models.fitted import FittedModel
from headcount.readers import read
from headcount.reporting.fit_page import context_sentence, model_card, summary_lines
from headcount.selection import cross_validation, fit_warnings, methods, network_defaults, resume, time_budget
from headcount.selection.check.check import check
from headcount.selection.fit import SearchProgress, fit
from headcount.selection.methods import Method
from headcount.selection.time_budget import TimePlan
from headcount.training.loader import BagLoader

TREES = "em_forest,forest,logistic"
measured = time_budget.estimate_seconds


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(methods, "N_TREES", 4)
    monkeypatch.setattr(methods, "EM_ROUNDS", 1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 0.1)


def reading_of(bags, names="abcdefgh", **more):
    """A table of these bags, truth and all."""
    words = np.array(list(names))
    x = bags.pool.data.numpy()[bags.index.numpy()]
    columns = {f"f{i}": x[:, i].astype(float).tolist() for i in range(x.shape[1])}
    label = [None if v < 0 else str(words[v]) for v in bags.label[bags.bag].tolist()]
    table = {"bag": [f"b{b}" for b in bags.bag.tolist()], "label": label, **columns}
    if bags.truth is not None:
        table["truth"] = words[bags.truth.numpy()].tolist()
    if bags.group is not None:
        table["group"] = [bags.group[b] for b in bags.bag.tolist()]
    if bags.weight is not None:
        table["weight"] = bags.weight.tolist()
    return read(table, **more)


# -- what comes out ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "N_TREES", 6)
        patch.setattr(methods, "EM_ROUNDS", 2)
        reading = reading_of(blobs(40, 5, share=0.4))
        lines: list[str] = []
        steps: list[SearchProgress] = []
        fitted = fit(reading, epochs=2, folds=3, log=lines.append, on_progress=steps.append)
    return reading, fitted, lines, steps


def test_auto_keeps_what_held_out_bags_prefer(one):
    _, fitted, lines, _ = one
    tried = fitted.metadata["methods"]
    assert {c["name"] for c in tried} == set(methods.TABLE_METHODS)
    losses = [c["loss"] for c in tried]
    assert losses == sorted(losses)
    assert tried[0]["chosen"]
    assert fitted.metadata["method"]["name"] == tried[0]["name"]
    assert [c["chosen"] for c in tried].count(True) == 1
    assert lines[0].startswith("about ")
    assert fitted.metadata["scores"]["loss"] == tried[0]["loss"]
    assert sum(map(sum, fitted.metadata["confusion"])) == 40


def test_the_facts_are_json_and_the_folder_comes_back(one, tmp_path):
    reading, fitted, _, _ = one
    json.dumps(fitted.metadata, allow_nan=False)
    fitted.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    bags = reading.to_bags(fitted.preprocessor)
    assert np.array_equal(fitted.predict(bags).instance_probabilities, again.predict(bags).instance_probabilities)
    assert again.metadata == json.loads(json.dumps(fitted.metadata))


def test_what_a_bag_tells_is_learned_from_held_out_bags(one):
    _, fitted, _, _ = one
    told = fitted.metadata["context"]
    assert (fitted.concentration, fitted.use_context) == (told["concentration"], told["use_context"])
    assert ("instance_accuracy" in told) == fitted.metadata["data"]["truth"]
    line = context_sentence(fitted)
    assert line is not None
    assert line.startswith("predictions use the rest of the bag") == fitted.use_context


def test_overlapping_classes_in_bags_that_differ_are_heard_together():
    """Bags of nearly one class each, features that tell little: the others in a bag tell more than the instance does."""
    rng = np.random.default_rng(0)
    held, labels, truth = [], [], []
    for b in range(60):
        y = (rng.random(20) < (0.9 if b % 2 else 0.1)).astype(int)
        held.append((rng.normal(size=(20, 3)) + y[:, None] * 0.6).astype(np.float32))
        labels.append("ab"[int(y.mean() > 0.5)])
        truth.extend("ab"[v] for v in y)
    reading = read({"features": np.concatenate(held), "sizes": [20] * 60, "labels": labels, "truth": truth})
    fitted = fit(reading, "logistic")
    told = fitted.metadata["context"]
    assert told["use_context"], told
    assert told["instance_accuracy"] > fitted.metadata["scores"]["instance_accuracy"] + 0.05


@pytest.mark.parametrize("views", ["digit", "image", "tissue", "crop"])
def test_views_of_pictures_are_not_for_tables(views, tmp_path):
    """Before anything is written."""
    with pytest.raises(HeadcountError, match=f"views '{views}' are for pictures"):
        fit(reading_of(blobs(8, 5)), "tilt", views=views, epochs=1, folds=2, work=tmp_path / "m.work")
    assert not list(tmp_path.iterdir())
    with pytest.raises(HeadcountError, match="feature"):  # a typo is told what there is
        fit(reading_of(blobs(8, 5)), "tilt", views="digits", epochs=1, folds=2)


def test_a_model_knows_its_bags_again(one):
    """Each of those whose labels it has learned, and no others."""
    reading, fitted, _, _ = one
    bags = reading.to_bags(fitted.preprocessor)
    assert fitted.seen_in_training(bags.take([3, 1])).tolist() == [True, True]
    assert bool(fitted.seen_in_training(bags).all())
    moved = replace(bags, pool=Pool(bags.pool.data + 1))
    assert not fitted.seen_in_training(moved).any()


def test_progress_goes_forward(one):
    steps = one[3]
    done = [s.done for s in steps]
    assert done == sorted(done)
    assert all(0 <= s.done <= s.total for s in steps)
    assert any("final" in s.message for s in steps)


def test_truth_is_used_for_nothing():
    """Another truth, or none: the same choice, the same model, bit for bit."""
    bags = blobs(24, 5, share=0.4)
    other = replace(bags, truth=(bags.truth + 1) % 3)
    made = [fit(reading_of(b), TREES, folds=3) for b in (bags, other, bags.blind())]
    x = bags.pool.data.numpy()
    said = [f.estimator.predict_proba(x) for f in made]
    assert np.array_equal(said[0], said[1])
    assert np.array_equal(said[0], said[2])
    rows = [[{k: c[k] for k in ("name", "loss", "bag_accuracy")} for c in f.metadata["methods"]] for f in made]
    assert rows[0] == rows[1] == rows[2]
    accuracies = [f.metadata["scores"]["instance_accuracy"] for f in made]
    assert accuracies[0] > 0.6 > accuracies[1]
    assert accuracies[2] is None


def test_intervals_know_how_few_bags_there_are():
    """All right in six bags is not surely all right, and fewer groups are worth less."""
    truth = np.arange(60) // 10 % 2
    make = lambda **more: Bags.of(  # noqa: E731
        Pool(np.zeros((60, 2), np.float32)), sizes=[10] * 6, labels=[0, 1] * 3, classes=2, truth=truth, **more
    )
    p = torch.eye(2)[torch.from_numpy(truth)] * 0.98 + 0.01
    unit = cross_validation.FoldResult(np.arange(6), p, p[::10].log(), 0.0)
    plain, grouped = (
        cross_validation.add_instance_accuracy(cross_validation.score_method([unit], bags.blind()), [unit], bags)
        for bags in (make(), make(group=[*"aabbcc"]))
    )
    assert plain.instance_high == grouped.instance_high == 1
    assert 0.1 < grouped.instance_low < plain.instance_low < 0.9
    assert grouped.bag_low < plain.bag_low


def test_either_winner_of_a_tie_is_right():
    tied = Bags.of(Pool(np.zeros((12, 2), np.float32)), sizes=[2] * 6, labels=np.full((6, 2), 0.5), classes=2)
    unit = cross_validation.FoldResult(
        np.arange(6), torch.full((12, 2), 0.5), torch.tensor([[0.1, 0.9]] * 6).log(), 0.0
    )
    assert cross_validation.score_method([unit], tied).bag_accuracy == 1


def test_scoring_refuses_bags_with_truth():
    bags = blobs(4, 3)
    unit = cross_validation.FoldResult(np.arange(4), torch.full((12, 3), 1 / 3), torch.zeros(4, 3), 0.0)
    with pytest.raises(HeadcountError, match="truth"):
        cross_validation.score_method([unit], bags)
    assert cross_validation.score_method([unit], bags.blind()).bag_accuracy == 0.5


def test_a_method_that_was_asked_for_is_kept():
    """Even where a baseline is better."""
    bags = blobs(24, 1)  # bags of one: the bag's label is the truth, and nothing beats the baselines
    made = fit(reading_of(bags), GaussianNB(), folds=3)
    assert made.metadata["method"]["name"] == "classifier"
    assert {c["name"] for c in made.metadata["methods"]} == {"classifier", "forest", "logistic"}
    assert made.kind == "held"
    with pytest.raises(HeadcountError, match="without pickle"):
        made.save("/nonexistent/m")


def test_who_named_a_baseline_gets_it_and_hears_what_is_better(monkeypatch):
    monkeypatch.setattr(methods, "N_TREES", 6)
    reading = reading_of(blobs(40, 5, share=0.4))
    for name in ("logistic", "forest"):
        made = fit(reading, name, folds=3)
        assert made.metadata["method"]["name"] == name
    made = fit(reading, "count", folds=3, epochs=1)
    better = [
        c["name"] for c in made.metadata["methods"] if c["behind"] and c["behind"]["loss"] < -2 * c["behind"]["error"]
    ]
    said = " ".join(made.metadata["warnings"])
    assert better
    assert f"Clearly worse on these bags than {', '.join(sorted(better, key=said.find))}" in said
    with pytest.raises(HeadcountError, match="both given"):
        fit(reading, "logistic", head="count")
    with pytest.raises(HeadcountError, match="views: for networks, and method logistic is none"):
        fit(reading, "logistic", views="noise")


def test_same_seed_same_model():
    reading = reading_of(blobs(20, 5))
    x = reading.to_bags(reading.fit_preprocessor()).pool.data.numpy()
    one, two, three = (fit(reading, "em_forest", folds=2, seed=s).estimator.predict_proba(x) for s in (3, 3, 4))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, three)


# -- splits -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_no_group_on_two_sides(seed):
    g = np.random.default_rng(seed)
    n = int(g.integers(12, 60))
    group = [f"p{k}" for k in g.integers(0, max(6, n // 3), n)]
    labels = g.integers(-1, 3, n)
    bags = Bags.of(Pool(np.zeros((n, 1))), sizes=[1] * n, labels=labels, classes=3, group=group)
    made = folds.make_splits(bags, 4, seed)
    assert sorted(np.concatenate([s.test for s in made]).tolist()) == np.flatnonzero(labels >= 0).tolist()
    for s in made:
        parts = [s.train, s.test] if s.valid_is_train else [s.train, s.valid, s.test]
        sides = [{group[b] for b in part} for part in parts]
        for i, a in enumerate(sides):
            for b in sides[:i]:
                assert not a & b
        assert set(labels[s.train]) - {-1} == set(labels[np.concatenate([s.train, s.valid])]) - {-1}


def test_validation_takes_no_label_away():
    """The only bag of a class is learned from."""
    bags = Bags.of(Pool(np.zeros((12, 1))), sizes=[1] * 12, labels=[0] * 11 + [1], classes=2)
    made = [folds.train_valid_split(bags, np.arange(12), np.zeros(0, int), seed) for seed in range(12)]
    assert all(11 in s.train for s in made)
    assert {s.valid_is_train for s in made} == {True, False}


def test_preparation_never_sees_held_out_bags(monkeypatch):
    seen = []
    reading = reading_of(blobs(20, 5))
    learn = type(reading).fit_preprocessor
    monkeypatch.setattr(
        type(reading), "fit_preprocessor", lambda self, bags=None: (seen.append(set(bags)), learn(self, bags))[1]
    )
    fit(reading, "logistic", folds=4)
    splits = folds.make_splits(reading.bags.blind(), 4, 0)
    assert all(any(s == set(split.train) for s in seen) for split in splits)
    assert all(len(s) < 20 for s in seen)


# -- odd bags ---------------------------------------------------------------------------------------------------------------


def test_three_bags():
    made = fit(reading_of(blobs(3, 6)), TREES)
    assert any("only 3 labelled bags" in c for c in made.metadata["warnings"])
    assert made.metadata["splits"]["valid_is_train"]


def test_two_bags_cannot_be_cross_validated():
    made = fit(reading_of(blobs(2, 6, classes=2)), TREES)
    assert made.metadata["scores"] is None
    assert made.metadata["splits"]["folds"] == 0
    assert any("too few to cross-validate" in c for c in made.metadata["warnings"])


def test_time_takes_no_fold_without_which_nothing_is_cross_validated(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda c, *_: 0.1 if c.baseline else 0.2)
    made = fit(reading_of(blobs(3, 6)), "forest,logistic", minutes=0.01)  # of two folds, one would teach alone
    assert made.metadata["splits"]["folds"] == 3
    assert not any("folds for lack of time" in n for n in made.metadata["notes"])


def test_a_baseline_is_cautioned_of_where_nothing_was_compared():
    made = fit(reading_of(blobs(2, 6, classes=2)), "forest")
    said = [c for c in made.metadata["warnings"] if "A baseline was kept" in c]
    assert said
    assert "temperature" not in said[0]


def test_em_that_keeps_its_first_round_is_cautioned_of_as_the_baseline_it_is():
    made = fit(reading_of(blobs(24, 1)), "em_forest,forest", folds=3)  # bags of one: EM has nothing to add
    loss = {c["name"]: c["loss"] for c in made.metadata["methods"]}
    assert made.metadata["method"]["name"] == "em_forest"
    assert loss["em_forest"] == loss["forest"]
    said = " ".join(made.metadata["warnings"])
    assert "A baseline was kept (EM, random forest, no round of which was better than the first)" in said
    assert re.search("Not clearly better on these bags than .*forest", said)
    assert made.metadata["method"]["baseline"] is True  # so that predict --bags says it too
    made = fit(reading_of(blobs(40, 5, share=0.4)), "em_forest", folds=3)
    assert made.metadata["best_epoch"] > 1
    assert made.metadata["method"]["baseline"] is False
    assert "A baseline was kept" not in " ".join(made.metadata["warnings"])
    for name in ("logistic", "count"):
        fitted = MajorityClassifier(name, epochs=1 if name == "count" else None).fit(np.eye(8), [0, 1] * 4).fitted_
        assert fitted.metadata["method"]["baseline"] == (name == "logistic")


@pytest.mark.parametrize("method", ["logistic", "em_forest"])
def test_a_model_that_foretells_no_more_than_chance_is_cautioned_of(method):
    bags = blobs(40, 5, share=0.9)
    by_lot = replace(bags, target=bags.target[torch.randperm(40, generator=torch.Generator().manual_seed(0))])
    for given, said in ((bags, False), (by_lot, True)):
        made = fit(reading_of(given), method, folds=3)
        assert any("not clearly foretold better than by chance" in c for c in made.metadata["warnings"]) == said


def test_the_card_does_not_blame_the_bags_where_time_was_short(monkeypatch):
    monkeypatch.setattr("headcount.selection.search.ModelSearch.cross_validate", lambda self: ({}, {}))
    made = fit(reading_of(blobs(20, 5)), TREES)
    said = model_card(made)
    assert "not cross-validated" in said
    assert "time was too short" in said
    assert "too few" not in said


def test_labels_that_are_never_foretold_are_cautioned_of():
    """An accuracy of 0.69 hid that none of nine bags was foretold, and 0.68 that the commonest label alone has 0.64."""
    score = SimpleNamespace(confusion=[[15, 0, 4], [5, 0, 4], [0, 0, 40]], bag_accuracy=0.81, bag_low=0.7)
    (said,) = fit_warnings._label_warnings(score, ("a", "b", "c"))
    assert said.startswith("No held-out bag with the label b (9 bags) was named so")
    score = SimpleNamespace(confusion=[[5, 0, 6], [0, 1, 6], [3, 0, 29]], bag_accuracy=0.7, bag_low=0.55)
    (said,) = fit_warnings._label_warnings(score, ("a", "b", "c"))
    assert said.startswith(
        "Always to name the commonest label, c, is right in 64% of the bags: 70% is not clearly more"
    )


def test_all_bags_one_class_is_refused():
    bags = blobs(9, 4)
    same = bags.take([0, 3, 6])
    with pytest.raises(HeadcountError, match="all 3 labelled bags say the same"):
        fit(reading_of(same, classes=["a", "b", "c"]))
    with pytest.raises(HeadcountError, match="1 bag has a label"):
        fit(reading_of(bags.take([0]), classes=["a", "b", "c"]))


def test_a_class_that_never_wins():
    made = fit(reading_of(blobs(18, 5, classes=2), classes=["a", "b", "c<i>"]), TREES, folds=2)
    assert any("No bag has the label c<i>" in c for c in made.metadata["warnings"])
    assert (
        made.predict(
            reading_of(blobs(18, 5, classes=2), classes=["a", "b", "c<i>"]).to_bags(made.preprocessor)
        ).instance_probabilities.shape[1]
        == 3
    )


def test_bags_of_one_are_ordinary_supervision():
    made = fit(reading_of(blobs(60, 1, share=1.0, spread=0.3)), TREES, folds=3)
    assert any("ordinary supervision" in c for c in made.metadata["warnings"])
    assert made.metadata["scores"]["instance_accuracy"] > 0.9


def test_one_huge_bag():
    bags = blobs(12, 4)
    sizes = bags.sizes.tolist()
    g = np.random.default_rng(0)
    more = np.concatenate([np.arange(4), g.choice(np.flatnonzero(bags.truth.numpy() == 0), 400)])
    index = np.concatenate([more, np.arange(4, 48)])
    huge = Bags.of(
        bags.pool, index=index, sizes=[len(more), *sizes[1:]], labels=bags.label.numpy(), classes=3,
        truth=bags.truth.numpy()[index],
    )  # fmt: skip
    made = fit(reading_of(huge), "em_forest,tilt", folds=2, epochs=1)
    assert any("more than half" in c for c in made.metadata["warnings"])


def test_unlabelled_bags_known_classes_and_weights():
    bags = blobs(20, 5)
    target = bags.target.clone()
    target[:5] = 0
    known = torch.full((100,), -1)
    known[::10] = bags.truth[::10]
    some = replace(bags, target=target, weight=torch.rand(100) + 0.5)
    reading = reading_of(some)
    reading = replace(reading, bags=replace(reading.bags, known=known))
    made = fit(reading, "em_forest,tilt", folds=3, epochs=1)
    assert made.metadata["data"]["labelled"] == 15
    assert sum(map(sum, made.metadata["confusion"])) == 15


def test_soft_labels():
    bags = blobs(20, 5)
    x = bags.pool.data.numpy()
    votes = bags.target.numpy() * 0.7 + 0.1
    reading = read({"features": x, "sizes": np.array([5] * 20), "votes": votes, "classes": np.array(["a", "b", "c"])})
    made = fit(reading, TREES, folds=3)
    assert made.metadata["scores"]["bag_accuracy"] > 0.5
    assert made.metadata["data"]["counted"]["share"] == pytest.approx([0.8] * 3), "votes tell how large majorities are"
    assert any("counted from the votes: a: 80%, b: 80%, c: 80%" in line for line in summary_lines(made))
    assert not any("Majorities are slight" in line for line in summary_lines(made))


def test_uncounted_classes_are_never_said_of_a_bag():
    reading = reading_of(blobs(20, 5, classes=2), uncounted=["zz"])
    made = fit(reading, "tilt", folds=2, epochs=1)
    said = made.predict(reading.to_bags(made.preprocessor))
    assert (said.bag_probabilities[:, 2] == 0).all()


# -- kinds of data ------------------------------------------------------------------------------------------------------------


def test_pictures():
    g = np.random.default_rng(0)
    label = np.arange(12) % 2
    held = [(g.random((3, 8, 8, 1)) * 60 + 120 * c).astype(np.uint8) for c in label]
    reading = read(held, labels=["dark", "light"] * 6)
    made = fit(reading, folds=2, epochs=1)
    assert {c["name"] for c in made.metadata["methods"]} == {"tilt", "noisy_label"}
    assert made.estimator.config.backbone == "quick"
    chosen = fit(reading, "tilt", folds=2, epochs=1, backbone="resnet18").estimator.config
    assert dict(chosen.backbone_options)["stem"] == "small"
    with pytest.raises(HeadcountError, match="pictures"):
        fit(reading, "em_forest")


def test_texts():
    g = np.random.default_rng(0)
    words = {"good": ["fine", "great", "lovely"], "bad": ["poor", "awful", "broken"]}
    table = {"bag": [], "label": [], "text": []}
    for b in range(16):
        label = ("good", "bad")[b % 2]
        for i in range(4):
            said = words[label if i else ("good", "bad")[int(g.integers(2))]]
            table["bag"].append(f"p{b}")
            table["label"].append(label)
            table["text"].append(" ".join(g.choice(said, 3)))
    made = fit(read(table), TREES, folds=2)
    new = made.read({"bag": ["q", "q"], "text": ["great lovely", "awful broken poor"]})
    assert made.predict(new.to_bags(made.preprocessor)).instance_probabilities.argmax(1).tolist() == [1, 0]  # bad, good


# -- time -------------------------------------------------------------------------------------------------------------------


def plan_of(minutes, **seconds):
    seconds = {"tilt": 10.0, "em_forest": 5.0, "forest": 1.0, "logistic": 0.1, "count": 8.0} | seconds
    plan = TimePlan(tuple(seconds), 5, 1.0, seconds)
    return next(p for p in time_budget._reduced_plans(plan) if p.total_seconds <= 60 * minutes)


def test_plans_shrink_with_the_minutes():
    assert plan_of(10) == TimePlan(("tilt", "em_forest", "forest", "logistic", "count"), 5, 1.0, plan_of(10).seconds)
    less = plan_of(1.6)
    assert "count" not in less.names
    assert less.folds == 5
    assert "left out for lack of time: count" in less.notes
    fewer = plan_of(0.9)
    assert (fewer.folds, fewer.epoch_fraction) == (3, 0.5)
    assert "3 folds for lack of time" in fewer.notes
    least = plan_of(0.05)
    assert len(least.names) < 4
    assert any("left out" in n for n in least.notes)


def test_a_network_that_is_a_baseline_is_shortened_like_any_other(monkeypatch):
    """Pictures: at all its epochs the baseline alone took what both take at a tenth, and tilt was left out for it."""
    plan = TimePlan(("tilt", "noisy_label"), 5, 1.0, {"tilt": 3000.0, "noisy_label": 1000.0})
    short = next(p for p in time_budget._reduced_plans(plan) if p.total_seconds <= 1200)
    assert (short.names, short.epoch_fraction) == (("tilt", "noisy_label"), 0.1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda candidate, *_: 100.0 if candidate.recipe else 0.01)
    made = fit(reading_of(blobs(20, 5)), "noisy_label", epochs=10, minutes=1)
    assert made.metadata["splits"]["folds"] == 2
    assert len(made.metadata["curve"]) == 1


def test_what_was_asked_for_is_never_left_out():
    made = fit(reading_of(blobs(20, 5)), "tilt", minutes=0.001)
    assert made.metadata["method"]["name"] == "tilt"
    plan = TimePlan(
        ("tilt", "count", "forest", "logistic"), 5, 1.0, {"tilt": 9.0, "count": 9.0, "forest": 1.0, "logistic": 0.1}
    )
    for lesser in time_budget._reduced_plans(plan, ["tilt", "count"]):
        assert {"tilt", "count"} <= set(lesser.names)


def test_minutes_bound_the_whole(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 1e-3)  # it believes in more than it can do
    monkeypatch.setattr("headcount.selection.fit.time.monotonic", iter(np.arange(0, 1e6, 5.0).tolist()).__next__)
    made = fit(reading_of(blobs(20, 5)), "em_forest,logistic", minutes=1, folds=5)
    tried = {c["name"]: c for c in made.metadata["methods"]}
    assert any(c["note"] == "not finished in the time given" for c in tried.values())
    assert made.metadata["method"]["name"] in tried


def test_a_full_fit_is_foretold_from_a_part():
    bags = blobs(20, 5).blind()
    for found in methods.methods("em_forest,tilt", bags, epochs=4):
        found.fit(bags, bags)  # whatever is done once in a process
        start = time.perf_counter()
        found.fit(bags, bags)
        took = time.perf_counter() - start
        assert 0.1 * took < measured(found, bags, bags, torch.device("cpu")) < 20 * took


def test_too_little_time_still_makes_a_model(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", measured)
    lines = []
    made = fit(reading_of(blobs(20, 5)), minutes=0.001, log=lines.append)
    assert made.metadata["notes"]
    assert any("may take longer" in line for line in lines)
    assert made.predict(reading_of(blobs(20, 5)).to_bags(made.preprocessor)).instance_probabilities.shape == (100, 3)


@pytest.mark.parametrize(("how", "why"), [
    ({"minutes": 0}, "minutes"), ({"minutes": math.nan}, "minutes"), ({"folds": 1}, "folds"), ({"folds": 2.5}, "folds"),
    ({"method": "tlit"}, "did you mean 'tilt'"), ({"head": "cuont"}, "no head"), ({"backbone": "vgg"}, "backbone"),
    ({"views": "mirror"}, "views"), ({"device": "tpu"}, "device"), ({"method": "tilt", "options": {"shar": 1}}, "option"),
    ({"method": "tilt,count", "options": {"share": 0.5}}, "count has no such"),
    ({"method": "supervised"}, "known"), ({"backbone": "resnet18", "method": "tilt"}, "reads images"),
    ({"method": object()}, "predict_proba"),
])  # fmt: skip
def test_what_is_refused(how, why):
    with pytest.raises(HeadcountError, match=why) as e:
        fit(reading_of(blobs(6, 3)), **how)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("ask", [fit, check])
def test_what_was_not_read_and_odd_seeds_are_refused(ask):
    with pytest.raises(HeadcountError, match=r"what headcount\.read gives, got list; read it first"):
        ask([np.ones((2, 1))])
    for seed in ("a", -1, 1.5, True):
        with pytest.raises(HeadcountError, match=f"seed is a whole number from 0 to .*, got {seed!r}"):
            ask(reading_of(blobs(12, 5)), seed=seed)


# -- taking up --------------------------------------------------------------------------------------------------------------


def test_an_interrupted_fit_is_taken_up(tmp_path, monkeypatch):
    reading = reading_of(blobs(20, 5))
    whole = fit(reading, TREES, folds=3)
    fits, usual = [], Method.fit

    def counting(self, *args, **how):
        if how.get("work") is not None:
            fits.append(self.name)
            if len(fits) == 5:
                raise KeyboardInterrupt
        return usual(self, *args, **how)

    monkeypatch.setattr(Method, "fit", counting)
    with pytest.raises(KeyboardInterrupt):
        fit(reading, TREES, folds=3, work=tmp_path / "w")
    assert len(list(tmp_path.rglob("*.npz"))) == 4
    again = fit(reading, TREES, folds=3, work=tmp_path / "w")
    assert len(fits) == 5 + 5 + 1  # nine folds, four of them done; then the final training
    x = reading.to_bags(reading.fit_preprocessor()).pool.data.numpy()
    assert np.array_equal(whole.estimator.predict_proba(x), again.estimator.predict_proba(x))
    assert [c["loss"] for c in whole.metadata["methods"]] == [c["loss"] for c in again.metadata["methods"]]
    assert not list(tmp_path.rglob("*.npz"))


def test_what_was_begun_with_other_data_or_options_is_not_taken_up(tmp_path, monkeypatch):
    reading, other = reading_of(blobs(12, 5)), reading_of(blobs(12, 5, seed=1))
    places = {
        str(fitting_place(tmp_path, r, seed, folds)) for r, seed, folds in
        [(reading, 0, 3), (other, 0, 3), (reading, 1, 3), (reading, 0, 2)]
    }  # fmt: skip
    assert len(places) == 4


def fitting_place(tmp_path, reading, seed, folds):
    found = methods.methods("logistic", reading.to_bags(reading.fit_preprocessor()))
    return resume.resume_folder(tmp_path, reading, found, seed, folds, None, torch.device("cpu"))


def test_what_was_begun_with_another_classifier_is_not_taken_up(tmp_path):
    reading, long = reading_of(blobs(12, 5)), np.zeros(5000)
    scaled = make_pipeline(StandardScaler(), LogisticRegression(C=2.0))
    made = [
        *(MLPClassifier((1,)), MLPClassifier((64,)), MLPClassifier((64,), random_state=1)),
        *(GaussianNB(priors=long), GaussianNB(priors=np.append(long[1:], 1.0))),
        *(scaled, clone(scaled).set_params(logisticregression__C=3.0)),
        *(clone(scaled).set_params(logisticregression__class_weight=w) for w in ({0: 1.0}, {0: 2.0})),
    ]

    def place(classifier):
        one = Method("classifier", "EM", classifier=classifier, rounds=1)
        return resume.resume_folder(tmp_path, reading, [one], 0, 3, None, torch.device("cpu"))

    assert len({place(c) for c in made}) == len(made)
    assert [place(c) for c in made] == [place(clone(c)) for c in made]


def test_a_damaged_unit_is_done_again(tmp_path):
    reading = reading_of(blobs(12, 5))
    place = fitting_place(tmp_path, reading, 0, 2)
    (place / "logistic-0.npz").write_bytes(b"PK\x03\x04 nonsense")
    (place / "plan.json").write_text("{")
    made = fit(reading, "logistic", folds=2, work=tmp_path)
    assert made.metadata["scores"] is not None


# -- pieces -----------------------------------------------------------------------------------------------------------------


def test_thinned_takes_from_every_bag_alike():
    bags = Bags.of(Pool(np.arange(1000.0)[:, None]), sizes=[1, 99, 900], labels=[0, 1, 0], classes=2)
    few = subsample_instances(bags, 100)
    assert few.sizes.tolist() == [1, 9, 90]
    assert torch.equal(few.index, few.index.unique())
    assert few.bag.tolist() == np.digitize(few.index.numpy(), [1, 100]).tolist()
    assert subsample_instances(bags, 1000) is bags


def test_logistic_standardises_and_answers_for_raw_columns():
    g = np.random.default_rng(0)
    x = (g.normal(size=(200, 3)) * [1e-3, 1, 1e4] + [5, 0, 1e5]).astype(np.float32)
    y = (x[:, 0] > 5).astype(int)
    made = methods.logistic_regression().fit(x, y)
    assert (made.predict(x) == y).mean() > 0.95


@pytest.mark.parametrize("table", [load_digits, load_wine, load_breast_cancer])
def test_the_criterion_tracks_instance_accuracy(table):
    """Forests told the truth to different degrees, asked about held-out bags: the better, the lower the loss."""
    x, y = table(return_X_y=True)
    g = np.random.default_rng(0)
    order = g.permutation(len(y))
    half = len(y) // 2
    classes = int(y.max()) + 1
    where, labels = [], []
    left = {c: list(order[half:][y[order[half:]] == c]) for c in range(classes)}
    while all(len(v) >= 3 for v in left.values()) and sum(map(len, left.values())) > 12:
        c = int(g.choice(classes, p=np.array([len(left[k]) for k in range(classes)]) / sum(map(len, left.values()))))
        others = g.choice([k for k in range(classes) if k != c], 2)
        where += [left[c].pop() for _ in range(3)] + [left[k].pop() for k in others]
        labels.append(c)
    bags = Bags.of(Pool(x[where]), sizes=[5] * len(labels), labels=labels, classes=classes)
    accuracy, losses = [], []
    for wrong in (0.0, 0.3, 0.5, 0.65, 0.8, 0.95):
        told = np.where(g.random(half) < wrong, g.integers(0, classes, half), y[order[:half]])
        p = RandomForestClassifier(20, random_state=0).fit(x[order[:half]], told).predict_proba(x[where])
        accuracy.append(float((p.argmax(1) == y[where]).mean()))
        losses.append(evaluate_criterion(torch.from_numpy(p), bags).loss)
    assert spearmanr(accuracy, losses)[0] < -0.8
    assert losses[0] == min(losses)


def test_a_classifier_that_cannot_be_saved_answers_in_memory():
    made = fit(reading_of(blobs(12, 5)), HistGradientBoostingClassifier(max_iter=3), folds=2)
    assert made.kind == "held"
    assert made.predict(reading_of(blobs(12, 5)).to_bags(made.preprocessor)).instance_probabilities.shape == (60, 3)


def test_the_expected_share_is_that_of_held_out_bags(monkeypatch):
    """And the probabilities are read under the temperature that goes with it."""
    monkeypatch.setattr(methods, "N_TREES", 20)
    bags = blobs(90, 9, share=0.4, spread=0.35)
    made = fit(reading_of(bags), "em_forest,forest", folds=3)
    true = float((bags.truth == bags.label[bags.bag]).float().mean())
    assert abs(float(made.transition.share.mean()) - true) < 0.05
    assert made.instance_temperature < 1  # a few trees are timid


def test_large_bags_are_cut_for_tilt_and_heard_in_chunks_by_others(monkeypatch):
    monkeypatch.setattr(fewer, "MAX_BAG_SIZE", 64)
    monkeypatch.setattr(network_defaults, "CHUNK_INSTANCES", 32)
    reading = reading_of(blobs(12, 200, share=0.7))
    bags = reading.to_bags(reading.fit_preprocessor()).blind()
    cut = methods.split_large_bags(bags, 64)
    assert cut.sizes.tolist() == [50] * 48
    assert torch.equal(cut.index, bags.index)
    assert torch.equal(cut.label, bags.label.repeat_interleave(4))
    assert methods.split_large_bags(bags, 200).sizes.tolist() == [200] * 12
    tilted, counted = methods.methods("tilt,count", bags, epochs=2)[:2]
    assert dict(tilted.recipe.options)["piece"] == pytest.approx(12 / 48)
    assert (tilted.recipe.chunk_instances, counted.recipe.chunk_instances) == (0, 32)
    most = []
    inner = BagLoader.read
    monkeypatch.setattr(BagLoader, "read", lambda self, place: (most.append(len(place)), inner(self, place))[1])
    for one in (tilted, counted):
        most.clear()
        one.fit(bags, bags)
        assert max(most) <= 1024 if one is tilted else max(most) <= 32


def test_thinned_bags_are_as_large_as_they_were(monkeypatch):
    """Majorities of large bags may be slight: the floor of the share is that of the whole bags, not of what is looked at."""
    monkeypatch.setattr(methods, "MAX_FIT_INSTANCES", 200)
    asked = []
    inner = transition_em.random_majority_share
    monkeypatch.setattr(
        transition_em, "random_majority_share", lambda size, classes: (asked.append(size), inner(size, classes))[1]
    )
    reading = reading_of(blobs(40, 50))
    bags = reading.to_bags(reading.fit_preprocessor()).blind()
    methods.methods(GaussianNB(), bags)[0].fit(bags, bags)
    assert set(asked) == {50}


def test_many_instances_are_foretold_from_some(monkeypatch):
    monkeypatch.setattr(time_budget, "TIMING_INSTANCES", 50)
    reading = reading_of(blobs(40, 5))
    bags = reading.to_bags(reading.fit_preprocessor()).blind()
    seen = []
    inner = Method.fit
    monkeypatch.setattr(Method, "fit", lambda self, train, valid, **how: (seen.append(len(train.index)), inner(self, train, valid, **how))[1])  # fmt: skip
    for name, epochs in (("tilt", 4), ("logistic", None)):
        one = methods.methods(name, bags, epochs=epochs)[0]
        assert measured(one, bags, bags, torch.device("cpu")) > 0
    assert seen == [40]
    big, small = methods.random_forest(1_000_000), methods.random_forest(500)
    assert big.max_samples == pytest.approx(methods.INSTANCES_PER_TREE / methods.MAX_FIT_INSTANCES)
    assert small.max_samples is None


def test_options_are_of_the_first_network_where_nobody_named_the_others():
    made = {c.name: c for c in methods.methods("auto", blobs(20, 5).blind(), options={"share": 0.5})}
    assert dict(made["tilt"].recipe.options)["share"] == 0.5
    assert "share" not in dict(made["count"].recipe.options)

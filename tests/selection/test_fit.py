"""Fitting a dataset: nothing leaks, truth is never used, unusual data are handled or refused, and a fit can be resumed."""

from __future__ import annotations

import json
import math
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_digits, load_wine
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from blob_factory import blob_dataset, blobs
from headcount.bags import Bags, Pool, splits as bag_splits
from headcount.bags.splits import split_large_bags, subsample_instances
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.majority import transition
from headcount.majority.calibration import evaluate_criterion
from headcount.models.fitted import FittedModel
from headcount.readers import read
from headcount.reporting.model_pages import context_sentence, model_card, summary_lines
from headcount.selection import classifiers, cross_validation, metadata, methods, search, time_budget
from headcount.selection.check import check
from headcount.selection.fit import SearchProgress, fit
from headcount.selection.methods import FitResult, Method, NetworkOptions, build_methods
from headcount.selection.search import load_or_make_plan, resume_folder
from headcount.selection.time_budget import TimePlan
from headcount.training.loader import BagLoader

TREES = "em_forest,forest,boosting,logistic"
estimate_seconds = time_budget.estimate_seconds


@pytest.fixture(autouse=True)
def four_trees(monkeypatch):
    monkeypatch.setattr(classifiers, "N_TREES", 4)
    monkeypatch.setattr(classifiers, "EM_ROUNDS", 1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 0.1)


# -- results -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted_blobs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classifiers, "N_TREES", 6)
        patch.setattr(classifiers, "EM_ROUNDS", 2)
        dataset = blob_dataset(blobs(40, 5, share=0.4))
        lines: list[str] = []
        steps: list[SearchProgress] = []
        fitted = fit(dataset, epochs=2, folds=3, log=lines.append, on_progress=steps.append)
    return dataset, fitted, lines, steps


def test_auto_keeps_what_held_out_bags_prefer(fitted_blobs):
    _, fitted, lines, _ = fitted_blobs
    tried = fitted.metadata["methods"]
    assert {c["name"] for c in tried} == set(methods.TABLE_METHODS)
    losses = [c["loss"] for c in tried if c["loss"] is not None]
    assert losses == sorted(losses)
    left_out = [c for c in tried if c["loss"] is None]
    reasons = ("behind after ", "no better than its baseline after ", "not tried: ")
    assert all(c["note"].startswith(reasons) for c in left_out)
    assert any(c["baseline"] and c["loss"] is not None for c in tried), "the best baseline stays"
    assert tried[0]["chosen"]
    assert fitted.metadata["method"]["name"] == tried[0]["name"]
    assert [c["chosen"] for c in tried].count(True) == 1
    assert lines[0].startswith("about ")
    assert fitted.metadata["scores"]["loss"] == tried[0]["loss"]
    assert sum(map(sum, fitted.metadata["confusion"])) == 40


def test_metadata_are_json_and_a_saved_model_loads(fitted_blobs, tmp_path):
    dataset, fitted, _, _ = fitted_blobs
    json.dumps(fitted.metadata, allow_nan=False)
    fitted.save(tmp_path / "m")
    again = FittedModel.load(tmp_path / "m")
    bags = dataset.to_bags(fitted.preprocessor)
    assert np.array_equal(fitted.predict(bags).instance_probabilities, again.predict(bags).instance_probabilities)
    assert again.metadata == json.loads(json.dumps(fitted.metadata))


def test_context_is_assessed_on_held_out_bags(fitted_blobs):
    _, fitted, _, _ = fitted_blobs
    context = fitted.metadata["context"]
    assert (fitted.concentration, fitted.use_context) == (context["concentration"], context["use_context"])
    assert ("instance_accuracy" in context) == fitted.metadata["data"]["truth"]
    line = context_sentence(fitted)
    assert line is not None
    assert line.startswith("predictions use the rest of the bag") == fitted.use_context


def test_context_helps_where_classes_overlap_and_bags_differ():
    """Bags of nearly one class each, features with little signal: the rest of a bag is more informative than the instance."""
    rng = np.random.default_rng(0)
    features, labels, truth = [], [], []
    for b in range(60):
        y = (rng.random(20) < (0.9 if b % 2 else 0.1)).astype(int)
        features.append((rng.normal(size=(20, 3)) + y[:, None] * 0.6).astype(np.float32))
        labels.append("ab"[int(y.mean() > 0.5)])
        truth.extend("ab"[v] for v in y)
    dataset = read({"features": np.concatenate(features), "sizes": [20] * 60, "labels": labels, "truth": truth})
    fitted = fit(dataset, "logistic")
    context = fitted.metadata["context"]
    assert context["use_context"], context
    assert context["instance_accuracy"] > fitted.metadata["scores"]["instance_accuracy"] + 0.05


@pytest.mark.parametrize("views", ["digit", "image", "tissue", "crop"])
def test_augmentation_of_images_is_refused_for_tables(views, tmp_path):
    """Before anything is written."""
    with pytest.raises(HeadcountError, match=f"views '{views}' are for images"):
        fit(blob_dataset(blobs(8, 5)), "tilt", views=views, epochs=1, folds=2, work=tmp_path / "m.work")
    assert not list(tmp_path.iterdir())
    with pytest.raises(HeadcountError, match="feature"):  # for a typo, the choices are listed
        fit(blob_dataset(blobs(8, 5)), "tilt", views="digits", epochs=1, folds=2)


def test_a_model_recognises_its_training_bags(fitted_blobs):
    """Those whose labels it has learned, and no others."""
    dataset, fitted, _, _ = fitted_blobs
    bags = dataset.to_bags(fitted.preprocessor)
    assert fitted.seen_in_training(bags.take([3, 1])).tolist() == [True, True]
    assert bool(fitted.seen_in_training(bags).all())
    moved = replace(bags, pool=Pool(bags.pool.data + 1))
    assert not fitted.seen_in_training(moved).any()


def test_progress_never_decreases(fitted_blobs):
    steps = fitted_blobs[3]
    done = [s.done for s in steps]
    assert done == sorted(done)
    assert all(0 <= s.done <= s.total for s in steps)
    assert any("final" in s.message for s in steps)


def test_truth_is_never_used():
    """With another truth, or none, the choice and the model are the same to the bit."""
    bags = blobs(24, 5, share=0.4)
    other = replace(bags, truth=(bags.truth + 1) % 3)
    made = [fit(blob_dataset(b), TREES, folds=3) for b in (bags, other, bags.blind())]
    x = bags.pool.data.numpy()
    predicted = [f.estimator.predict_proba(x) for f in made]
    assert np.array_equal(predicted[0], predicted[1])
    assert np.array_equal(predicted[0], predicted[2])
    rows = [[{k: c[k] for k in ("name", "loss", "bag_accuracy")} for c in f.metadata["methods"]] for f in made]
    assert rows[0] == rows[1] == rows[2]
    accuracies = [f.metadata["scores"]["instance_accuracy"] for f in made]
    assert accuracies[0] > 0.6 > accuracies[1]
    assert accuracies[2] is None


def test_intervals_widen_with_fewer_bags_and_groups():
    """Six correct bags do not prove that all are correct, and three groups prove less."""
    truth = np.arange(60) // 10 % 2
    make = lambda **more: Bags.of(  # noqa: E731
        Pool(np.zeros((60, 2), np.float32)), sizes=[10] * 6, labels=[0, 1] * 3, classes=2, truth=truth, **more
    )
    p = torch.eye(2)[torch.from_numpy(truth)] * 0.98 + 0.01
    fold = cross_validation.FoldResult(np.arange(6), p, p[::10].log(), 0.0)
    plain, grouped = (
        cross_validation.add_instance_accuracy(cross_validation.score_method([fold], bags.blind()), [fold], bags)
        for bags in (make(), make(group=[*"aabbcc"]))
    )
    assert plain.instance_high == grouped.instance_high == 1
    assert 0.1 < grouped.instance_low < plain.instance_low < 0.9
    assert grouped.bag_low < plain.bag_low


def test_either_winner_of_a_tie_is_correct():
    tied = Bags.of(Pool(np.zeros((12, 2), np.float32)), sizes=[2] * 6, labels=np.full((6, 2), 0.5), classes=2)
    fold = cross_validation.FoldResult(np.arange(6), torch.full((12, 2), 0.5), torch.tensor([[0.1, 0.9]] * 6).log(), 0.0)
    assert cross_validation.score_method([fold], tied).bag_accuracy == 1


def test_scoring_refuses_bags_with_truth():
    bags = blobs(4, 3)
    fold = cross_validation.FoldResult(np.arange(4), torch.full((12, 3), 1 / 3), torch.zeros(4, 3), 0.0)
    with pytest.raises(HeadcountError, match="truth"):
        cross_validation.score_method([fold], bags)
    assert cross_validation.score_method([fold], bags.blind()).bag_accuracy == 0.5


def test_a_requested_method_is_kept():
    """Even where a baseline is better."""
    bags = blobs(24, 1)  # bags of one: the bag's label is the truth, and no method is better than the baselines
    made = fit(blob_dataset(bags), GaussianNB(), folds=3)
    assert made.metadata["method"]["name"] == "classifier"
    assert {c["name"] for c in made.metadata["methods"]} == {"classifier", "forest", "logistic"}
    assert made.kind == "sklearn"
    with pytest.raises(HeadcountError, match="without pickle"):
        made.save("/nonexistent/m")


def test_a_requested_baseline_is_kept_with_a_warning_about_better_methods(monkeypatch):
    monkeypatch.setattr(classifiers, "N_TREES", 6)
    dataset = blob_dataset(blobs(40, 5, share=0.4))
    for name in ("logistic", "forest"):
        made = fit(dataset, name, folds=3)
        assert made.metadata["method"]["name"] == name
    made = fit(dataset, "count", folds=3, epochs=1)
    better = [c["name"] for c in made.metadata["methods"] if c["behind"] and c["behind"]["loss"] < -2 * c["behind"]["error"]]
    warnings = " ".join(made.metadata["warnings"])
    assert better
    assert f"Clearly worse on these bags than {', '.join(sorted(better, key=warnings.find))}" in warnings
    with pytest.raises(HeadcountError, match="both given"):
        fit(dataset, "logistic", head="count")
    with pytest.raises(HeadcountError, match="views: for networks, and method logistic is none"):
        fit(dataset, "logistic", views="noise")


def test_same_seed_same_model():
    dataset = blob_dataset(blobs(20, 5))
    x = dataset.to_bags(dataset.fit_preprocessor()).pool.data.numpy()
    one, two, three = (fit(dataset, "em_forest", folds=2, seed=s).estimator.predict_proba(x) for s in (3, 3, 4))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, three)


# -- splits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_no_group_is_in_two_parts_of_a_split(seed):
    g = np.random.default_rng(seed)
    n = int(g.integers(12, 60))
    group = [f"p{k}" for k in g.integers(0, max(6, n // 3), n)]
    labels = g.integers(-1, 3, n)
    bags = Bags.of(Pool(np.zeros((n, 1))), sizes=[1] * n, labels=labels, classes=3, group=group)
    made = bag_splits.make_splits(bags, 4, seed)
    assert sorted(np.concatenate([s.test for s in made]).tolist()) == np.flatnonzero(labels >= 0).tolist()
    for s in made:
        parts = [s.train, s.test] if s.valid_is_train else [s.train, s.valid, s.test]
        sides = [{group[b] for b in part} for part in parts]
        for i, a in enumerate(sides):
            for b in sides[:i]:
                assert not a & b
        assert set(labels[s.train]) - {-1} == set(labels[np.concatenate([s.train, s.valid])]) - {-1}


def test_the_only_bag_of_a_class_is_a_training_bag():
    """Validation bags leave every label in the training bags."""
    bags = Bags.of(Pool(np.zeros((12, 1))), sizes=[1] * 12, labels=[0] * 11 + [1], classes=2)
    made = [bag_splits.train_valid_split(bags, np.arange(12), np.zeros(0, int), seed) for seed in range(12)]
    assert all(11 in s.train for s in made)
    assert {s.valid_is_train for s in made} == {True, False}


def test_preprocessors_are_fitted_to_training_bags_only(monkeypatch):
    seen = []
    dataset = blob_dataset(blobs(20, 5))
    learn = type(dataset).fit_preprocessor
    monkeypatch.setattr(
        type(dataset), "fit_preprocessor", lambda self, bags=None: (seen.append(set(bags)), learn(self, bags))[1]
    )
    fit(dataset, "logistic", folds=4)
    splits = bag_splits.make_splits(dataset.bags.blind(), 4, 0)
    assert all(any(s == set(split.train) for s in seen) for split in splits)
    assert all(len(s) < 20 for s in seen)


# -- odd bags ----------------------------------------------------------------------------------------------------------


def test_three_bags():
    made = fit(blob_dataset(blobs(3, 6)), TREES)
    assert any("only 3 labelled bags" in c for c in made.metadata["warnings"])
    assert made.metadata["splits"]["valid_is_train"]


def test_two_bags_cannot_be_cross_validated():
    made = fit(blob_dataset(blobs(2, 6, classes=2)), TREES)
    assert made.metadata["scores"] is None
    assert made.metadata["splits"]["folds"] == 0
    assert any("too few to cross-validate" in c for c in made.metadata["warnings"])


def test_folds_are_not_reduced_below_what_cross_validation_needs(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda c, *_: 0.1 if c.baseline else 0.2)
    made = fit(
        blob_dataset(blobs(3, 6)), "forest,logistic", minutes=0.01
    )  # with two folds, one training part would have one label
    assert made.metadata["splits"]["folds"] == 3
    assert "2 folds for lack of time" not in made.metadata["notes"]


def test_the_warning_about_a_baseline_without_cross_validation():
    made = fit(blob_dataset(blobs(2, 6, classes=2)), "forest")
    warnings = [c for c in made.metadata["warnings"] if "A baseline was kept" in c]
    assert warnings
    assert "temperature" not in warnings[0]


def test_em_that_keeps_its_first_round_is_a_baseline(monkeypatch):
    made = fit(blob_dataset(blobs(24, 1)), "em_forest,forest", folds=3)  # bags of one: EM has nothing to add
    loss = {c["name"]: c["loss"] for c in made.metadata["methods"]}
    assert made.metadata["method"]["name"] == "em_forest"
    assert loss["em_forest"] == loss["forest"]
    warnings = " ".join(made.metadata["warnings"])
    assert "A baseline was kept (EM, random forest, whose first round was the best)" in warnings
    assert re.search("Not clearly better on these bags than .*forest", warnings)
    assert made.metadata["method"]["baseline"] is True  # so that predict --bags warns of it too
    monkeypatch.setattr(classifiers, "N_TREES", 30)
    monkeypatch.setattr(classifiers, "EM_ROUNDS", 4)
    made = fit(blob_dataset(blobs(60, 7, share=0.4)), "em_forest", folds=3)
    assert made.metadata["best_epoch"] > 1
    assert made.metadata["method"]["baseline"] is False
    assert "A baseline was kept" not in " ".join(made.metadata["warnings"])
    for name in ("logistic", "count"):
        fitted = MajorityClassifier(name, epochs=1 if name == "count" else None).fit(np.eye(8), [0, 1] * 4).fitted_
        assert fitted.metadata["method"]["baseline"] == (name == "logistic")


@pytest.mark.parametrize("method", ["logistic", "em_forest"])
def test_the_warning_about_predictions_at_chance_level(method):
    bags = blobs(40, 5, share=0.9)
    random_labels = replace(bags, target=bags.target[torch.randperm(40, generator=torch.Generator().manual_seed(0))])
    for given, warned in ((bags, False), (random_labels, True)):
        made = fit(blob_dataset(given), method, folds=3)
        assert any("not predicted clearly better than by chance" in c for c in made.metadata["warnings"]) == warned


def test_the_model_card_names_lack_of_time_as_the_reason(monkeypatch):
    monkeypatch.setattr("headcount.selection.search.ModelSearch.cross_validate", lambda self: ({}, {}))
    made = fit(blob_dataset(blobs(20, 5)), TREES)
    card = model_card(made)
    assert "not cross-validated" in card
    assert "time was too short" in card
    assert "too few" not in card


def test_the_warning_about_labels_that_are_never_predicted():
    """An accuracy of 0.69 hid that none of nine bags was correct, and 0.68 that the most frequent label alone has 0.64."""
    score = SimpleNamespace(confusion=[[15, 0, 4], [5, 0, 4], [0, 0, 40]], bag_accuracy=0.81, bag_low=0.7)
    found = metadata.FitWarnings([], [], [])
    metadata._label_warnings(found, score, ("a", "b", "c"))
    assert not found.serious
    (warning,) = found.cautions
    assert warning.startswith("No held-out bag with the label b (9 bags) was predicted correctly")
    score = SimpleNamespace(confusion=[[5, 0, 6], [0, 1, 6], [3, 0, 29]], bag_accuracy=0.7, bag_low=0.55)
    found = metadata.FitWarnings([], [], [])
    metadata._label_warnings(found, score, ("a", "b", "c"))
    assert not found.cautions
    (warning,) = found.serious
    assert warning.startswith(
        "Always predicting the most frequent label, c, is correct for 64% of the bags: 70% is not clearly more"
    )


def test_all_bags_one_class_is_refused():
    bags = blobs(9, 4)
    same = bags.take([0, 3, 6])
    with pytest.raises(HeadcountError, match="all 3 labelled bags have the same label"):
        fit(blob_dataset(same, classes=["a", "b", "c"]))
    with pytest.raises(HeadcountError, match="1 bag has a label"):
        fit(blob_dataset(bags.take([0]), classes=["a", "b", "c"]))


def test_a_class_that_never_wins():
    made = fit(blob_dataset(blobs(18, 5, classes=2), classes=["a", "b", "c<i>"]), TREES, folds=2)
    assert any("No bag has the label c<i>" in c for c in made.metadata["warnings"])
    assert (
        made.predict(
            blob_dataset(blobs(18, 5, classes=2), classes=["a", "b", "c<i>"]).to_bags(made.preprocessor)
        ).instance_probabilities.shape[1]
        == 3
    )


def test_bags_of_one_are_ordinary_supervision():
    made = fit(blob_dataset(blobs(60, 1, share=1.0, spread=0.3)), TREES, folds=3)
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
    made = fit(blob_dataset(huge), "em_forest,tilt", folds=2, epochs=1)
    assert any("more than half" in c for c in made.metadata["warnings"])


def test_unlabelled_bags_known_classes_and_weights():
    bags = blobs(20, 5)
    target = bags.target.clone()
    target[:5] = 0
    known = torch.full((100,), -1)
    known[::10] = bags.truth[::10]
    some = replace(bags, target=target, weight=torch.rand(100) + 0.5)
    dataset = blob_dataset(some)
    dataset = replace(dataset, bags=replace(dataset.bags, known=known))
    made = fit(dataset, "em_forest,tilt", folds=3, epochs=1)
    assert made.metadata["data"]["labelled"] == 15
    assert sum(map(sum, made.metadata["confusion"])) == 15


def test_soft_labels():
    bags = blobs(20, 5)
    x = bags.pool.data.numpy()
    votes = bags.target.numpy() * 0.7 + 0.1
    dataset = read({"features": x, "sizes": np.array([5] * 20), "votes": votes, "classes": np.array(["a", "b", "c"])})
    made = fit(dataset, TREES, folds=3)
    assert made.metadata["scores"]["bag_accuracy"] > 0.5
    assert made.metadata["data"]["counted"]["share"] == pytest.approx([0.8] * 3), "votes tell how large majorities are"
    assert any("counted from the votes: a: 80 %, b: 80 %, c: 80 %" in line for line in summary_lines(made))
    assert not any("Majorities are slight" in line for line in summary_lines(made))


def test_uncounted_classes_are_never_predicted_for_a_bag():
    dataset = blob_dataset(blobs(20, 5, classes=2), uncounted=["zz"])
    made = fit(dataset, "tilt", folds=2, epochs=1)
    predictions = made.predict(dataset.to_bags(made.preprocessor))
    assert (predictions.bag_probabilities[:, 2] == 0).all()


# -- kinds of data -----------------------------------------------------------------------------------------------------


def test_a_perceptron_is_tried_for_small_images_if_no_network_is_named():
    def tried(side, **options):
        pool = Pool(np.zeros((12, side, side, 1), np.uint8))
        bags = Bags.of(pool, sizes=[3] * 4, labels=[0, 1, 0, 1], classes=2)
        return [m.name for m in build_methods("auto", bags, network=NetworkOptions(**options))]

    assert tried(32) == ["tilt", "tilt_mlp", "noisy_label"]
    assert tried(33) == tried(8, backbone="quick") == tried(8, views="image") == ["tilt", "noisy_label"]


def test_images():
    g = np.random.default_rng(0)
    label = np.arange(12) % 2
    images = [(g.random((3, 8, 8, 1)) * 60 + 120 * c).astype(np.uint8) for c in label]
    dataset = read(images, labels=["dark", "light"] * 6)
    made = fit(dataset, folds=2, epochs=1)
    assert {c["name"] for c in made.metadata["methods"]} == {"tilt", "tilt_mlp", "noisy_label"}
    assert fit(dataset, "tilt", folds=2, epochs=1).estimator.config.backbone == "quick"
    assert fit(dataset, "tilt_mlp", folds=2, epochs=1).estimator.config.backbone == "mlp"
    chosen = fit(dataset, "tilt", folds=2, epochs=1, backbone="resnet18").estimator.config
    assert dict(chosen.backbone_options)["stem"] == "small"
    with pytest.raises(HeadcountError, match="images"):
        fit(dataset, "em_forest")


def test_texts():
    g = np.random.default_rng(0)
    words = {"good": ["fine", "great", "lovely"], "bad": ["poor", "awful", "broken"]}
    table = {"bag": [], "label": [], "text": []}
    for b in range(16):
        label = ("good", "bad")[b % 2]
        for i in range(4):
            vocabulary = words[label if i else ("good", "bad")[int(g.integers(2))]]
            table["bag"].append(f"p{b}")
            table["label"].append(label)
            table["text"].append(" ".join(g.choice(vocabulary, 3)))
    made = fit(read(table), TREES, folds=2)
    new = made.read({"bag": ["q", "q"], "text": ["great lovely", "awful broken poor"]})
    assert made.predict(new.to_bags(made.preprocessor)).instance_probabilities.argmax(1).tolist() == [1, 0]  # bad, good


# -- time --------------------------------------------------------------------------------------------------------------


def plan_of(minutes, **seconds):
    seconds = {"tilt": 10.0, "em_forest": 5.0, "forest": 1.0, "logistic": 0.1, "count": 8.0} | seconds
    plan = TimePlan(tuple(seconds), 5, 1.0, seconds)
    return next(p for p in time_budget.reduced_plans(plan) if p.total_seconds <= 60 * minutes)


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


def test_halving_counts_the_candidates_that_will_be_left():
    """Of four candidates two are left after the first fold, then between one and two, as of two baselines; each of them may be the
    one that is trained in the end."""
    seconds = {
        "tilt": 8.0,
        "em_forest": 4.0,
        "em_boosting": 50.0,
        "election": 5.0,
        "count": 3.0,
        "forest": 1.0,
        "logistic": 0.5,
    }
    plan = TimePlan(tuple(seconds), 4, 1.0, seconds, halving=True)
    assert plan.seconds_before(0) == 0
    assert plan.seconds_before(1) == 21.5
    expected = (2 + 1.4 + 1.4 + 1.4) * 0.75 + (4 + 2 + 1.4 + 1.4) * 5 + 5 * time_budget.FINAL_FACTOR
    assert plan.total_seconds == pytest.approx(expected)
    assert plan.final_seconds == 8 * time_budget.FINAL_FACTOR, "a budget leaves time for the slowest"
    assert replace(plan, halving=False).seconds_before(4) == 4 * 71.5


def test_the_worse_half_leaves_and_boosting_by_em_needs_a_good_baseline(monkeypatch):
    losses = {"tilt": 1.0, "em_forest": 1.05, "em_boosting": 0.5, "count": 1.3, "forest": 1.1, "boosting": 1.2, "logistic": 2.0}
    fits, usual = [], search.score_method
    monkeypatch.setattr(
        Method, "fit", lambda self, *_, **options: fits.append(self.name) or FitResult(self.name, None, [], 1, False)
    )
    monkeypatch.setattr(search, "predict_estimator", lambda name, bags, _: (torch.full((len(bags.index), 3), losses[name]), torch.zeros(len(bags), 3)))  # fmt: skip

    def score(folds, bags):  # the loss is what predict_estimator put into the probabilities
        real = usual([replace(f, instance_probabilities=torch.full_like(f.instance_probabilities, 1 / 3)) for f in folds], bags)
        loss = float(folds[0].instance_probabilities[0, 0])
        return replace(
            real, loss=loss, criterion=replace(real.criterion, loss_per_bag=loss + 0.5 * np.cos(9 * loss * np.arange(20)))
        )

    monkeypatch.setattr(search, "score_method", score)
    bags = blobs(60, 4).blind()
    tried = build_methods("auto", bags)
    best, kept = search.choose_method(bags, tried, folds=3, seed=0, device=torch.device("cpu"))
    assert best.name == "tilt"
    assert set(kept) == {"tilt", "em_forest", "forest", "boosting"}
    assert Counter(fits) == {"tilt": 3, "em_forest": 3, "count": 1, "forest": 3, "boosting": 3, "logistic": 1}
    losses["em_forest"] = 1.15  # the second best candidate, but no better than the forest on the bag's label
    fits.clear()
    assert "em_forest" not in search.choose_method(bags, tried, folds=3, seed=0, device=torch.device("cpu"))[1]
    assert Counter(fits)["em_forest"] == 1


def test_a_lead_in_the_votes_alone_is_not_enough():
    """A method whose instances explain the labels worse than a baseline's is kept only if it leads by two standard errors."""
    bags = blobs(60, 4).blind()
    found = search.ModelSearch(
        None, bags, {m.name: m for m in build_methods("auto", bags)}, None, [], seed=0, device=torch.device("cpu"),
        work=None, on_progress=None, end=np.inf,
    )  # fmt: skip
    uniform = cross_validation.FoldResult(np.arange(60), torch.full((len(bags.index), 3), 1 / 3), torch.zeros(60, 3), 0.0)
    usual = search.score_method([uniform], bags)

    def score(instance, vote):
        parts = np.full(60, instance), vote + 0.5 * np.cos((1 + vote) * np.arange(60))
        criterion = replace(usual.criterion, instance_loss_per_bag=parts[0], loss_per_bag=sum(parts))
        return replace(usual, loss=float(sum(parts).mean()), criterion=criterion)

    scores = {"forest": score(1.0, 1.0), "logistic": score(1.2, 0.95)}
    assert found.choose(scores | {"tilt": score(0.99, 0.95)}).name == "tilt"
    assert not found.rejected
    assert found.choose(scores | {"tilt": score(1.1, 0.85)}).name == "forest"
    assert list(found.rejected) == ["tilt"]
    assert found.choose(scores | {"tilt": score(1.1, 0.2)}).name == "tilt", "its lead is clear"


def test_a_teacher_that_never_helped_is_removed(monkeypatch):
    """The best epoch was before the teacher began: train without it, and keep what validation bags prefer."""
    bags, options, usual = blobs(24, 5).blind(), [], methods.loop.train
    better = True

    def train(model, *args, **rest):
        result = usual(model, *args, **rest)
        options.append(dict(model.config.options))
        result.progress.best_epoch = 2 if len(options) % 2 else 9
        result.progress.best = 1.0
        result.progress.curve = [(1.0, 0.9 if better else 1.1)] * 10
        return result

    monkeypatch.setattr(methods.loop, "train", train)
    network = NetworkOptions(epochs=10)
    method = build_methods("tilt", bags, network=network)[0]
    assert dict(method.fit(bags, bags).estimator.config.options) == {"teach": 0.0, "form": "one"}
    better = False
    assert method.fit(bags, bags).best_epoch == 2
    assert options == [{}, {"teach": 0.0, "form": "one"}] * 2
    asked = build_methods("tilt", bags, network=replace(network, options={"teach": 1.0}))[0]
    assert asked.fit(bags, bags).best_epoch == 2
    assert len(options) == 5


def test_epochs_of_a_baseline_network_are_reduced_too(monkeypatch):
    """For images, at all its epochs the baseline alone once took as long as both take at a tenth, and tilt was left out."""
    plan = TimePlan(("tilt", "noisy_label"), 5, 1.0, {"tilt": 3000.0, "noisy_label": 1000.0})
    short = next(p for p in time_budget.reduced_plans(plan) if p.total_seconds <= 1200)
    assert (short.names, short.epoch_fraction) == (("tilt", "noisy_label"), 0.1)
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda method, *_: 100.0 if method.train_config else 0.01)
    made = fit(blob_dataset(blobs(20, 5)), "noisy_label", epochs=10, minutes=1)
    assert made.metadata["splits"]["folds"] == 2
    assert len(made.metadata["curve"]) == 1


def test_requested_methods_are_never_left_out():
    made = fit(blob_dataset(blobs(20, 5)), "tilt", minutes=0.001)
    assert made.metadata["method"]["name"] == "tilt"
    plan = TimePlan(
        ("tilt", "count", "forest", "logistic"), 5, 1.0, {"tilt": 9.0, "count": 9.0, "forest": 1.0, "logistic": 0.1}
    )
    for lesser in time_budget.reduced_plans(plan, ["tilt", "count"]):
        assert {"tilt", "count"} <= set(lesser.names)


def test_minutes_limit_the_whole_fit(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", lambda *_: 1e-3)  # an estimate that is much too low
    monkeypatch.setattr("headcount.selection.fit.time.monotonic", iter(np.arange(0, 1e6, 5.0).tolist()).__next__)
    made = fit(blob_dataset(blobs(20, 5)), "em_forest,logistic", minutes=1, folds=5)
    tried = {c["name"]: c for c in made.metadata["methods"]}
    assert any(c["note"] == "not finished in the time given" for c in tried.values())
    assert made.metadata["method"]["name"] in tried


def test_the_estimated_time_of_a_fit_is_about_right():
    bags = blobs(20, 5).blind()
    for method in build_methods("em_forest,tilt", bags, network=NetworkOptions(epochs=4)):
        method.fit(bags, bags)  # what is done once per process
        start = time.perf_counter()
        method.fit(bags, bags)
        took = time.perf_counter() - start
        assert 0.1 * took < estimate_seconds(method, bags, bags, torch.device("cpu")) < 20 * took


def test_a_model_is_fitted_even_without_enough_time(monkeypatch):
    monkeypatch.setattr(time_budget, "estimate_seconds", estimate_seconds)
    lines = []
    made = fit(blob_dataset(blobs(20, 5)), minutes=1e-5, log=lines.append)
    assert made.metadata["notes"]
    assert any("may take longer" in line for line in lines)
    assert made.predict(blob_dataset(blobs(20, 5)).to_bags(made.preprocessor)).instance_probabilities.shape == (100, 3)


@pytest.mark.parametrize(("options", "message"), [
    ({"minutes": 0}, "minutes"), ({"minutes": math.nan}, "minutes"), ({"folds": 1}, "folds"), ({"folds": 2.5}, "folds"),
    ({"method": "tlit"}, "did you mean 'tilt'"), ({"head": "cuont"}, "no head"), ({"backbone": "vgg"}, "backbone"),
    ({"views": "mirror"}, "views"), ({"device": "tpu"}, "device"), ({"method": "tilt", "options": {"shar": 1}}, "option"),
    ({"method": "tilt,count", "options": {"share": 0.5}}, "count has none of these"),
    ({"method": "supervised"}, "known"), ({"backbone": "resnet18", "method": "tilt"}, "reads images"),
    ({"method": object()}, "predict_proba"),
])  # fmt: skip
def test_invalid_arguments_are_refused(options, message):
    with pytest.raises(HeadcountError, match=message) as e:
        fit(blob_dataset(blobs(6, 3)), **options)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("function", [fit, check])
def test_arguments_that_are_no_dataset_or_seed_are_refused(function):
    with pytest.raises(HeadcountError, match=r"what headcount\.read returns, got list; read it first"):
        function([np.ones((2, 1))])
    for seed in ("a", -1, 1.5, True):
        with pytest.raises(HeadcountError, match=f"seed is a whole number from 0 to .*, got {seed!r}"):
            function(blob_dataset(blobs(12, 5)), seed=seed)


# -- resuming ----------------------------------------------------------------------------------------------------------


def test_an_interrupted_fit_resumes(tmp_path, monkeypatch):
    dataset = blob_dataset(blobs(20, 5))
    whole = fit(dataset, TREES, folds=3)
    fits, usual = [], Method.fit

    def counting(self, *args, **options):
        if options.get("work") is not None:
            fits.append(self.name)
            if len(fits) == 5:
                raise KeyboardInterrupt
        return usual(self, *args, **options)

    monkeypatch.setattr(Method, "fit", counting)
    with pytest.raises(KeyboardInterrupt):
        fit(dataset, TREES, folds=3, work=tmp_path / "w")
    assert len(list(tmp_path.rglob("*.npz"))) == 4
    again = fit(dataset, TREES, folds=3, work=tmp_path / "w")
    assert len(fits) == 5 + 8 + 1  # twelve folds, four of them done; then the final training
    x = dataset.to_bags(dataset.fit_preprocessor()).pool.data.numpy()
    assert np.array_equal(whole.estimator.predict_proba(x), again.estimator.predict_proba(x))
    assert [c["loss"] for c in whole.metadata["methods"]] == [c["loss"] for c in again.metadata["methods"]]
    assert not list(tmp_path.rglob("*.npz"))


def test_other_data_or_options_have_another_resume_folder(tmp_path, monkeypatch):
    dataset, other = blob_dataset(blobs(12, 5)), blob_dataset(blobs(12, 5, seed=1))
    folders = {
        str(logistic_folder(tmp_path, r, seed, folds)) for r, seed, folds in
        [(dataset, 0, 3), (other, 0, 3), (dataset, 1, 3), (dataset, 0, 2)]
    }  # fmt: skip
    assert len(folders) == 4


def logistic_folder(work, dataset, seed, folds):
    tried = build_methods("logistic", dataset.to_bags(dataset.fit_preprocessor()))
    options = {"seed": seed, "folds": folds, "minutes": None, "device": torch.device("cpu")}
    return resume_folder(work, dataset, tried, **options)


def test_another_classifier_has_another_resume_folder(tmp_path):
    dataset, long = blob_dataset(blobs(12, 5)), np.zeros(5000)
    scaled = make_pipeline(StandardScaler(), LogisticRegression(C=2.0))
    made = [
        *(MLPClassifier((1,)), MLPClassifier((64,)), MLPClassifier((64,), random_state=1)),
        *(GaussianNB(priors=long), GaussianNB(priors=np.append(long[1:], 1.0))),
        *(scaled, clone(scaled).set_params(logisticregression__C=3.0)),
        *(clone(scaled).set_params(logisticregression__class_weight=w) for w in ({0: 1.0}, {0: 2.0})),
    ]

    def folder(classifier):
        method = Method("classifier", "EM", classifier=classifier, rounds=1)
        options = {"seed": 0, "folds": 3, "minutes": None, "device": torch.device("cpu")}
        return resume_folder(tmp_path, dataset, [method], **options)

    assert len({folder(c) for c in made}) == len(made)
    assert [folder(c) for c in made] == [folder(clone(c)) for c in made]


def test_a_damaged_fold_is_fitted_again(tmp_path):
    dataset = blob_dataset(blobs(12, 5))
    folder = logistic_folder(tmp_path, dataset, 0, 2)
    (folder / "logistic-0.npz").write_bytes(b"PK\x03\x04 nonsense")
    (folder / "plan.json").write_text("{")
    made = fit(dataset, "logistic", folds=2, work=tmp_path)
    assert made.metadata["scores"] is not None


# -- methods -----------------------------------------------------------------------------------------------------------


def test_subsampling_takes_the_same_fraction_of_every_bag():
    bags = Bags.of(Pool(np.arange(1000.0)[:, None]), sizes=[1, 99, 900], labels=[0, 1, 0], classes=2)
    few = subsample_instances(bags, 100)
    assert few.sizes.tolist() == [1, 9, 90]
    assert torch.equal(few.index, few.index.unique())
    assert few.bag.tolist() == np.digitize(few.index.numpy(), [1, 100]).tolist()
    assert subsample_instances(bags, 1000) is bags


def test_logistic_regression_standardises_its_columns():
    g = np.random.default_rng(0)
    x = (g.normal(size=(200, 3)) * [1e-3, 1, 1e4] + [5, 0, 1e5]).astype(np.float32)
    y = (x[:, 0] > 5).astype(int)
    made = classifiers.logistic_regression().fit(x, y)
    assert (made.predict(x) == y).mean() > 0.95


@pytest.mark.parametrize("table", [load_digits, load_wine, load_breast_cancer])
def test_the_criterion_tracks_instance_accuracy(table):
    """Forests fitted to labels with more and more errors, on held-out bags: the higher the accuracy, the lower the loss."""
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
        noisy = np.where(g.random(half) < wrong, g.integers(0, classes, half), y[order[:half]])
        p = RandomForestClassifier(20, random_state=0).fit(x[order[:half]], noisy).predict_proba(x[where])
        accuracy.append(float((p.argmax(1) == y[where]).mean()))
        losses.append(evaluate_criterion(torch.from_numpy(p), bags).loss)
    assert spearmanr(accuracy, losses)[0] < -0.8
    assert losses[0] == min(losses)


def test_a_classifier_that_cannot_be_saved_predicts_in_memory():
    made = fit(blob_dataset(blobs(12, 5)), GaussianNB(), folds=2)
    assert made.kind == "sklearn"
    assert made.predict(blob_dataset(blobs(12, 5)).to_bags(made.preprocessor)).instance_probabilities.shape == (60, 3)


def test_the_expected_share_is_that_of_held_out_bags(monkeypatch):
    """And a temperature sharpens the probabilities accordingly."""
    monkeypatch.setattr(classifiers, "N_TREES", 20)
    bags = blobs(90, 9, share=0.4, spread=0.35)
    made = fit(blob_dataset(bags), "em_forest,forest", folds=3)
    true = float((bags.truth == bags.label[bags.bag]).float().mean())
    assert abs(float(made.transition.share.mean()) - true) < 0.05
    assert made.instance_temperature < 1  # forests of few trees are underconfident


def test_large_bags_are_split_for_tilt_and_processed_in_chunks_for_count(monkeypatch):
    monkeypatch.setattr(bag_splits, "MAX_BAG_SIZE", 64)
    monkeypatch.setattr(methods, "CHUNK_INSTANCES", 32)
    dataset = blob_dataset(blobs(12, 200, share=0.7))
    bags = dataset.to_bags(dataset.fit_preprocessor()).blind()
    cut = split_large_bags(bags, 64)
    assert cut.sizes.tolist() == [50] * 48
    assert torch.equal(cut.index, bags.index)
    assert torch.equal(cut.label, bags.label.repeat_interleave(4))
    assert split_large_bags(bags, 200).sizes.tolist() == [200] * 12
    tilt, count = build_methods("tilt,count", bags, network=NetworkOptions(epochs=2))[:2]
    assert dict(tilt.model_config.options)["piece"] == pytest.approx(12 / 48)
    assert (tilt.train_config.chunk_instances, count.train_config.chunk_instances) == (0, 32)
    most = []
    inner = BagLoader.read
    monkeypatch.setattr(BagLoader, "read", lambda self, place: (most.append(len(place)), inner(self, place))[1])
    for method in (tilt, count):
        most.clear()
        method.fit(bags, bags)
        assert max(most) <= (1024 if method is tilt else 32)


def test_subsampled_bags_keep_their_effective_size(monkeypatch):
    """Majorities of large bags may be slight: the lowest possible share is that of the whole bags, not of the sample."""
    monkeypatch.setattr(methods, "MAX_FIT_INSTANCES", 200)
    asked = []
    inner = transition.random_majority_share
    monkeypatch.setattr(
        transition, "random_majority_share", lambda size, classes: (asked.append(size), inner(size, classes))[1]
    )
    dataset = blob_dataset(blobs(40, 50))
    bags = dataset.to_bags(dataset.fit_preprocessor()).blind()
    build_methods(GaussianNB(), bags)[0].fit(bags, bags)
    assert set(asked) == {50}


def test_the_time_of_many_instances_is_estimated_from_a_sample(monkeypatch):
    monkeypatch.setattr(time_budget, "TIMING_INSTANCES", 50)
    dataset = blob_dataset(blobs(40, 5))
    bags = dataset.to_bags(dataset.fit_preprocessor()).blind()
    seen = []
    inner = Method.fit
    monkeypatch.setattr(Method, "fit", lambda self, train, valid, **options: (seen.append(len(train.index)), inner(self, train, valid, **options))[1])  # fmt: skip
    for name, epochs in (("tilt", 4), ("logistic", None), ("em_forest", None)):
        method = build_methods(name, bags, network=NetworkOptions(epochs=epochs))[0]
        assert estimate_seconds(method, bags, bags, torch.device("cpu")) > 0
    assert seen == [40]
    big, small = classifiers.random_forest(1_000_000), classifiers.random_forest(500)
    assert big.max_samples == pytest.approx(classifiers.INSTANCES_PER_TREE / classifiers.MAX_FIT_INSTANCES)
    assert small.max_samples is None


def test_options_belong_to_the_first_network_of_auto():
    tried = build_methods("auto", blobs(20, 5).blind(), network=NetworkOptions(options={"share": 0.5}))
    made = {m.name: m for m in tried}
    assert dict(made["tilt"].model_config.options)["share"] == 0.5
    assert "share" not in dict(made["count"].model_config.options)


def test_an_interrupted_search_keeps_its_plan(tmp_path):
    """Timings measured a second time could change what is compared. A damaged plan is replaced."""
    plan = TimePlan(("em_forest", "tilt"), 3, 0.5, {"em_forest": 1.0, "tilt": 9.0}, ("epochs were halved",))
    names = plan.names
    assert load_or_make_plan(tmp_path, lambda: plan, names) == plan
    assert load_or_make_plan(tmp_path, lambda: pytest.fail("a second plan was made"), names) == plan
    (tmp_path / "plan.json").write_text('{"names": ')
    other = replace(plan, folds=5)
    assert load_or_make_plan(tmp_path, lambda: other, names) == load_or_make_plan(tmp_path, lambda: plan, names) == other

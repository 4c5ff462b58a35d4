"""What people hand to MajorityClassifier and BagKFold: large numbers, DataFrames, lists of them, ids with holes, weights; and
the one line that says what was wrong with it."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from sklearn.base import clone
from sklearn.ensemble import ExtraTreesClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

import headcount
from headcount import Bags, Pool
from headcount.cli import main
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.estimators.model_selection import BagKFold
from headcount.experiments.recipe import Recipe
from headcount.models.fitted import FittedModel
from headcount.readers.columns import ColumnRoles

G = np.random.default_rng(0)
BAG = np.repeat(np.arange(40), G.integers(3, 9, 40))
TRUTH = np.where(G.random(len(BAG)) < 0.6, BAG % 3, G.integers(0, 3, len(BAG)))
WIN = np.array([np.bincount(TRUTH[b == BAG], minlength=3).argmax() for b in range(40)])
X = G.normal(size=(len(BAG), 5)) + 2.5 * np.eye(3, 5)[TRUTH]
LISTED = [X[b == BAG] for b in range(40)]
FRAME = pd.DataFrame(X, columns=list("abcde")).assign(street=[f"s{b}" for b in BAG])
FRAMES = [FRAME[b == BAG] for b in range(40)]
Y = WIN[BAG]


def of(estimator=None, **arguments):
    return MajorityClassifier(LogisticRegression() if estimator is None else estimator, **arguments)


@pytest.mark.parametrize(
    "estimator", [make_pipeline(StandardScaler(), LogisticRegression()), "logistic", "noisy_label"], ids=str
)
def test_time_stamps_keep_their_digits(estimator):
    arguments = {"epochs": 15} if estimator == "noisy_label" else {}
    late = of(estimator, **arguments).fit(X * 10 + 1.7e9, Y, bags=BAG)
    assert (late.predict(X * 10 + 1.7e9) == TRUTH).mean() > 0.8


def test_a_scikit_learn_classifier_gets_unchanged_numbers():
    seen = []

    class Watching(LogisticRegression):
        def fit(self, X, y, sample_weight=None):
            seen.append(X)
            return super().fit(X, y, sample_weight)

    odd = X + 1e-12
    of(Watching()).fit(odd, Y, bags=BAG)
    assert seen[0].dtype == np.float64
    assert set(seen[0][:, 0]) <= set(odd[:, 0])


@pytest.mark.parametrize("estimator", [LogisticRegression(), "noisy_label", "forest"], ids=str)
def test_a_saved_model_predicts_the_same_from_plain_numbers(estimator, tmp_path, monkeypatch):
    """Whether or not columns were standardised for the fit."""
    monkeypatch.setattr("headcount.selection.classifiers.N_TREES", 5)
    made = of(estimator, **({"epochs": 5} if estimator == "noisy_label" else {})).fit(X * 2 + 3, Y, bags=BAG)
    made.fitted_.save(tmp_path / "m")
    alone = Bags.of(Pool(X * 2 + 3), sizes=[1] * len(X), labels=[-1] * len(X), classes=3)
    predicted = FittedModel.load(tmp_path / "m").predict(alone).instance_probabilities
    assert np.allclose(predicted, made.predict_proba(X * 2 + 3), atol=1e-4)


@pytest.mark.parametrize("estimator", [LogisticRegression(), DecisionTreeClassifier(max_depth=4), "noisy_label"], ids=str)
def test_a_model_of_a_dataframe_predicts_a_file(estimator, tmp_path):
    made = of(estimator, bags="street", epochs=5 if estimator == "noisy_label" else None).fit(FRAME, Y)
    made.fitted_.save(tmp_path / "model")
    FRAME.assign(other="z")[["e", "street", "b", "a", "other", "c", "d"]].to_csv(tmp_path / "d.csv", index=False)
    words = ["predict", str(tmp_path / "model"), str(tmp_path / "d.csv"), "--out", str(tmp_path / "predictions.csv")]
    assert main.app(words, standalone_mode=False) in (None, 0)
    table = pd.read_csv(tmp_path / "predictions.csv")
    predicted = table[[c for c in table.columns if c.endswith(("0", "1", "2"))]].to_numpy()
    assert np.allclose(predicted, made.predict_proba(FRAME), atol=1e-4)
    assert json.loads((tmp_path / "model" / "model.json").read_text())["preprocessor"]["roles"] == {"bag": "street"}


# -- lists of bags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ExtraTreesClassifier, RandomForestClassifier])
@pytest.mark.parametrize("width", [600, 100_000])
def test_a_saved_forest_rounds_time_stamps_as_in_memory(kind, width):
    """scikit-learn's trees compare float32, in which 1.7e9 is known to two minutes; a table is centred first."""
    late = pd.DataFrame({"at": 1_700_000_000 + (X[:, 0] * width).round(), "b": X[:, 1]})
    made = of(kind(20, random_state=0)).fit(late, Y, bags=BAG)
    read = made.fitted_.read(late.assign(bag=BAG), ColumnRoles(bag="bag")).to_bags(made.fitted_.preprocessor)
    assert np.allclose(made.fitted_.predict(read).instance_probabilities, made.predict_proba(late), atol=1e-5)


def test_columns_of_a_list_of_dataframes_go_by_name():
    made = of(bags="street").fit(FRAMES, WIN)
    assert made.n_features_in_ == 5
    assert made.feature_names_in_.tolist() == list("abcde")
    plain = of().fit(LISTED, WIN)
    assert np.allclose(np.concatenate(made.predict_proba(FRAMES)), np.concatenate(plain.predict_proba(LISTED)))
    turned = [f[["e", "street", "d", "c", "b", "a"]] for f in FRAMES]
    assert np.allclose(np.concatenate(made.predict_proba(turned)), np.concatenate(made.predict_proba(FRAMES)))
    mixed = [*FRAMES[:1], *turned[1:]]
    again = of(bags="street").fit(mixed, WIN)
    assert np.allclose(np.concatenate(again.predict_proba(FRAMES)), np.concatenate(made.predict_proba(FRAMES)))
    numbered = of(bags=0).fit([np.column_stack([np.full(len(b), i), b]) for i, b in enumerate(LISTED)], WIN)
    assert numbered.n_features_in_ == 5
    assert len(numbered.predict(LISTED)) == 40  # instances need no bag column


@pytest.mark.parametrize(
    ("x", "arguments", "message"),
    [
        (LISTED, {"bags": np.zeros(40)}, "leave the ids out"),
        ([FRAMES[0].rename(columns={"a": "q"}), *FRAMES[1:]], {"bags": "street"}, "bag 1 lacks column 'q'"),
        ([FRAMES[0], *LISTED[1:]], {"bags": "street"}, "bag 1 is a ndarray, bag 0 a DataFrame"),
        ([pd.concat(FRAMES[:2]), *FRAMES[1:]], {"bags": "street"}, "bag 0 of the list has 's0' and 's1'"),
        (LISTED, {"weight": [np.ones(len(b)) for b in LISTED[:-1]]}, "39 arrays for 40 bags"),
        (LISTED, {"weight": [np.ones(9), *(np.ones(len(b)) for b in LISTED[1:])]}, "rows of bag 0"),
    ],
)
def test_invalid_lists_are_refused(x, arguments, message):
    with pytest.raises(HeadcountError, match=message):
        of().fit(x, WIN, **arguments)


def test_weights_of_a_list():
    heavy = np.where(np.arange(len(X)) % 3 == 0, 4.0, 1.0)
    one = of().fit(LISTED, WIN, weight=[heavy[b == BAG] for b in range(40)])
    two = of().fit(X, Y, bags=BAG, weight=heavy)
    assert np.allclose(one.fitted_.estimator.weight, two.fitted_.estimator.weight)


# -- ids, columns, weights ------------------------------------------------------------------------------------------------


def with_hole(hole):
    ids = [f"s{b}" for b in BAG]
    ids[7] = hole
    return ids


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bags": np.where(np.arange(len(BAG)) == 7, np.nan, BAG)}, r"row 7 is in no bag \(its id is nan\)"),
        ({"bags": with_hole(None)}, "row 7 is in no bag"),
        ({"bags": pd.array(with_hole(None), dtype="string")}, "row 7 is in no bag"),
        ({"bags": np.array(with_hole(3), dtype=object)}, "several kinds"),
        ({"bags": True}, "name or number of a column, or one id per row, got True"),
        ({"bags": 2.5}, "got 2.5"),
        ({"bags": np.zeros((len(X), 2))}, "bag ids have shape"),
        ({"weight": np.ones(len(X) + 1)}, rf"shape \({len(X) + 1},\) for {len(X)} instances"),
        ({"weight": np.ones(3)}, r"shape \(3,\)"),
        ({"weight": [[1.0, 2.0]]}, "shape"),
        ({"weight": ["a"] * len(X)}, "weight must be numbers"),
        ({"weight": np.where(np.arange(len(X)) == 5, np.nan, 1)}, "instance 5 has weight nan"),
        ({"bags": np.where(np.arange(len(X)) == 9, BAG[0], BAG)}, r"bag 0 has two labels, \d and \d;"),
    ],
)
def test_invalid_ids_and_weights_are_refused(arguments, message):
    with pytest.raises(HeadcountError, match=message):
        of().fit(X, Y, **{"bags": BAG, **arguments})


def test_the_column_is_any_integer_and_given_once():
    table = np.column_stack([BAG, X])
    assert of().fit(table, Y, bags=np.int64(0)).n_features_in_ == 5
    with pytest.raises(HeadcountError, match=r"give ids to fit: fit\(X, y, bags=ids\)"):
        of(bags=BAG).fit(X, Y)
    with pytest.raises(HeadcountError, match="given twice"):
        of(bags=0).fit(table, Y, bags=BAG)


def test_instances_need_no_bag_column():
    made, bare = of(bags="street").fit(FRAME, Y), FRAME.drop(columns="street")
    assert np.array_equal(made.predict(bare), made.predict(FRAME))
    assert np.array_equal(made.predict(bare), made.predict(FRAME.assign(street=None)))
    with pytest.raises(HeadcountError, match="no column 'street', which holds the bag"):
        made.predict_bags(bare)
    assert made.score(bare, Y, bags=BAG) == made.score(FRAME, Y) == made.score(FRAME, Y, bags=BAG)
    numbered, table = of(bags=-1).fit(np.column_stack([X, BAG]), Y), np.column_stack([X, BAG])
    assert np.array_equal(numbered.predict(X), numbered.predict(table))
    with pytest.raises(HeadcountError, match="no column -1"):
        numbered.score(X, Y)


# -- parameters -----------------------------------------------------------------------------------------------------------


def test_parameters_of_training_reach_it(capsys):
    made = of("count", epochs=6, lr=0.01, weight_decay=0.0, batch_size=7, patience=2, verbose=1).fit(X, Y, bags=BAG)
    epochs = capsys.readouterr().out.splitlines()
    assert epochs[0].endswith("network: epoch 1 of 6")
    assert len(made.history_["train_loss"]) == len(made.history_["valid_loss"]) == len(epochs)
    assert made.best_epoch_ == 1 + made.history_["valid_loss"].argmin()
    usual = of("count", epochs=6).fit(X, Y, bags=BAG)
    assert capsys.readouterr().out == ""
    for change in ({"lr": 0.01}, {"weight_decay": 0.0}, {"batch_size": 7}):
        other = of("count", epochs=6, **change).fit(X, Y, bags=BAG)
        assert not np.array_equal(other.history_["train_loss"], usual.history_["train_loss"]), change
    early = of("count", epochs=60, lr=0.1, patience=1).fit(X, Y, bags=BAG)
    assert len(early.history_["train_loss"]) == early.best_epoch_ + 1 < 60


def test_single_options_are_parameters():
    made = of("count", options={"t1": 0.5, "t2": 0.2}).set_params(options__t1=0.25)
    assert made.options == {"t1": 0.25, "t2": 0.2}
    assert made.get_params()["options__t2"] == 0.2
    assert clone(made).options == made.options
    search = GridSearchCV(of("count", epochs=1), {"options__t1": [0.1, 1.0]}, cv=BagKFold(2), refit=False)
    assert search.fit(LISTED, WIN).cv_results_["param_options__t1"].tolist() == [0.1, 1.0]
    with pytest.raises(HeadcountError, match="no option of head count 't9'"):
        of("count").set_params(options__t9=3).fit(X, Y, bags=BAG)


def test_class_weights_are_costs_of_a_decision(tmp_path):
    """They move decisions and nothing else; "balanced" finds a rare class as often as the other."""
    g = np.random.default_rng(2)
    bag = np.repeat(np.arange(100), 10)
    truth = np.where(g.random(1000) < 0.8, bag % 10 == 0, g.random(1000) < 0.1).astype(int)
    y = np.array([np.bincount(truth[bag == b], minlength=2).argmax() for b in range(100)])[bag]
    x = g.normal(size=(1000, 1)) + 1.5 * truth[:, None]
    plain, balanced = (of("em_forest", class_weight=weight).fit(x, y, bags=bag) for weight in (None, "balanced"))
    p = plain.predict_proba(x)
    assert np.array_equal(p, balanced.predict_proba(x))
    assert np.array_equal(plain.predict_bags(x, bag), balanced.predict_bags(x, bag))
    recall = [[(m.predict(x) == k)[truth == k].mean() for k in (0, 1)] for m in (plain, balanced)]
    assert recall[1][1] > recall[0][1] + 0.1
    assert np.mean(recall[1]) > np.mean(recall[0]) + 0.02  # balanced accuracy
    heavy = of("em_forest", class_weight={1: 9}).fit(x, y, bags=bag)
    assert np.array_equal(heavy.predict(x), (p * [1, 9]).argmax(1))
    balanced.save(tmp_path / "m")
    assert np.array_equal(MajorityClassifier.load(tmp_path / "m").predict(x), plain.predict(x))
    for wrong in ({2: 1.0}, "even", [1, 2]):
        with pytest.raises(HeadcountError, match=r"class_weight is None, 'balanced', or a dict"):
            of("logistic", class_weight=wrong).fit(x, y, bags=bag)


@pytest.mark.parametrize("n_jobs", [1, 2, -1])
def test_n_jobs_are_the_threads_of_a_fit(n_jobs):
    seen = []

    class Watching(LogisticRegression):
        def fit(self, X, y, sample_weight=None):
            seen.append(torch.get_num_threads())
            return super().fit(X, y, sample_weight)

    before = torch.get_num_threads()
    of(Watching(), n_jobs=n_jobs).fit(X, Y, bags=BAG).predict(X)
    assert set(seen) == {os.cpu_count() if n_jobs == -1 else n_jobs}
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("estimator", "arguments", "message"),
    [
        ("logistic,tilt", {}, "fits one method, got 'logistic,tilt'"),
        ("auto", {"backbone": "linaer"}, "no backbone 'linaer'"),
        ("tlit", {}, "no estimator 'tlit'; there are auto, tilt.*did you mean 'tilt'"),
        ("vote.py:Vote", {}, "loading a model never runs code"),
        ("supervised", {}, "'supervised' learns from known instance classes, .*headcount.fit"),
        ("tilt", {"epochs": 0}, "epochs is a whole number from 1"),
        ("tilt", {"lr": -1.0}, "lr is a number from 0"),
        ("forest", {"lr": 0.1, "patience": 3}, "lr, patience: for networks"),
        (None, {"n_jobs": 1.5}, "n_jobs is a whole number"),
        (None, {"epochs": 3}, "epochs: for networks"),
        ("em_forest", {"options": {"t9": 3}}, "options: for networks, and method em_forest is none"),
        ("count", {"options": {"t9": 3}}, "no option of head count 't9'"),
        (None, {"random_state": "x"}, "random_state is .* got 'x'"),
        (None, {"random_state": -1}, "random_state is .* got -1"),
        (None, {"device": None}, "no device None"),
    ],
)
def test_invalid_parameters_are_refused(estimator, arguments, message):
    with pytest.raises(HeadcountError, match=message):
        of(estimator, **arguments).fit(X, Y, bags=BAG)


def test_images_are_refused_for_a_scikit_learn_classifier():
    with pytest.raises(HeadcountError, match="LogisticRegression reads features, and these are images"):
        of().fit([np.zeros((2, 8, 8, 3), np.uint8)] * 4, [0, 1, 0, 1])


def test_a_generator_is_a_random_state():
    one, two = (of(random_state=np.random.default_rng(3)).fit(X, Y, bags=BAG).predict_proba(X) for _ in range(2))
    assert np.array_equal(one, two)


def test_a_head_is_given_by_name():
    with pytest.raises(HeadcountError, match="a head is given by name, got <class"):
        Recipe(head=LogisticRegression)


@pytest.mark.filterwarnings("ignore:the ids of BagKFold")
def test_folds_refuse_incomplete_ids():
    with pytest.raises(HeadcountError, match=f"10 bag ids for {len(X)} rows"):
        next(BagKFold(bags=BAG[:10]).split(X))
    with pytest.raises(HeadcountError, match="row 7 is in no bag"):
        next(BagKFold(bags=with_hole(None)).split(X))
    assert repr(BagKFold(3, bags=BAG)) == f"BagKFold(n_splits=3, bags=<{len(X)} ids>, random_state=0)"


def test_the_repr_of_a_fitted_model():
    assert repr(of().fit(X, Y, bags=BAG).fitted_) == "FittedModel(linear: 3 classes, features of 5)"
    assert repr(of().fit(FRAMES, WIN, bags="street").fitted_) == "FittedModel(linear: 3 classes, table of 5)"


def test_tensors_with_gradients_and_in_half_precision():
    """For rows and lists of bags, labels, ids and weights."""
    x, y, ids = torch.tensor(X, requires_grad=True), torch.tensor(Y), torch.tensor(BAG)
    made = of().fit(x, y, bags=ids, weight=torch.ones(len(X), requires_grad=True))
    assert np.array_equal(made.predict(x), made.predict(X))
    listed = [x[b == ids] for b in range(40)]
    assert np.array_equal(made.predict_bags(listed), made.predict_bags(LISTED))
    assert np.array_equal(of().fit(listed, WIN).predict(X), of().fit(LISTED, WIN).predict(X))
    half = x.bfloat16()
    assert np.array_equal(made.predict(half), made.predict(half.detach().float().numpy()))
    assert len(made.predict([b.bfloat16() for b in listed])) == 40
    assert len(list(BagKFold(3).split([b.bfloat16() for b in listed], WIN))) == 3


@pytest.mark.parametrize("hole", [None, pd.NA, float("nan")])
def test_bags_may_lack_a_label(hole):
    """Trained on bags without a label, and scored on the others only; a row may lack the label that its bag has."""
    labels = np.array(["a", "b", "c"], object)[WIN]
    labels[:5] = hole
    made = of("tilt", epochs=3).fit(LISTED, labels)
    assert made.classes_.tolist() == ["a", "b", "c"]
    assert made.score(LISTED, labels) == made.score(LISTED[5:], labels[5:])
    rows = labels[BAG]
    rows[np.flatnonzero(BAG == 7)[0]] = hole
    by_row = of("tilt", epochs=3).fit(X, rows, bags=BAG)
    assert np.array_equal(by_row.predict_proba(X), np.concatenate(made.predict_proba(LISTED)))
    rest = of("tilt", epochs=3).fit(LISTED[5:], labels[5:])
    assert not np.allclose(rest.predict_proba(X), by_row.predict_proba(X))
    numbers = [hole] * 5 + list(WIN[5:])  # numbers beside None were refused
    assert np.array_equal(
        of("tilt", epochs=3).fit(LISTED, numbers).predict_proba(X), np.concatenate(made.predict_proba(LISTED))
    )
    with pytest.raises(HeadcountError, match="labels of several kinds"):
        of().fit(LISTED[:4], np.array(["a", 1, "b", "a"], dtype=object))
    with pytest.raises(HeadcountError, match="no bag has a label"):
        of().fit(LISTED[:4], np.array([hole] * 4, dtype=object))


def test_minus_one_beside_two_classes_is_no_label():
    """It once became a class, in silence; {-1, 1} are two classes."""
    labels = np.where(np.arange(40) < 5, -1, WIN)
    with pytest.warns(HeadcountWarning, match=r"label -1 is taken for no label \(5 of 40\)"):
        made = of().fit(LISTED, labels)
    assert made.classes_.tolist() == [0, 1, 2]
    assert made.score(LISTED, labels) == made.score(LISTED[5:], labels[5:])
    floats = of().fit(LISTED, np.where(labels < 0, np.nan, labels))
    assert np.array_equal(made.predict_proba(X), floats.predict_proba(X))
    assert of().fit(LISTED, np.where(WIN == 1, 1, -1)).classes_.tolist() == [-1, 1]


def test_arrays_in_arrays_out():
    bags = np.random.default_rng(1).normal(size=(6, 4, 5))
    made = of().fit(LISTED, WIN)
    assert made.predict(bags).shape == (6, 4)
    assert made.predict_proba(bags).shape == (6, 4, 3)
    assert isinstance(made.predict(list(bags)), list)
    images = np.random.default_rng(1).integers(0, 256, (24, 8, 8, 3), np.uint8)
    ids = np.repeat(np.arange(8), 3)
    by_id = MajorityClassifier("count", epochs=1).fit(images, ids % 2, bags=ids)
    by_list = MajorityClassifier("count", epochs=1).fit(images.reshape(8, 3, 8, 8, 3), np.arange(8) % 2)
    assert by_id.predict_proba(images).shape == (24, 2)
    assert np.array_equal(by_id.predict_proba(images), by_list.predict_proba(images))


def test_the_error_names_a_duplicate_column():
    twice = pd.DataFrame(X[:, :2], columns=["a", "a"]).assign(street=BAG)
    with pytest.raises(HeadcountError, match="X has the column 'a' twice"):
        of(bags="street").fit(twice, Y)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["S2A", "S2B"] * 4, "column 'more' of X has 'S2A', which is no finite number, in row 0"),
        (pd.date_range("2024-01-01", periods=8), "column 'more' of X has '2024-01-01 00:00:00'"),
        ([1.0] * 7 + [np.nan], "column 'more' of X has no value in row 7"),
        (pd.array([1] * 7 + [None], dtype="Int64"), "column 'more' of X has no value in row 7"),
    ],
)
def test_the_error_names_the_column_of_a_value_that_is_no_number(values, message):
    frame = pd.DataFrame({"a": np.arange(8.0), "bag": np.repeat([0, 1, 2, 3], 2), "more": values})
    label = np.repeat([0, 1, 0, 1], 2)
    with pytest.raises(HeadcountError, match=re.escape(message)):
        MajorityClassifier("logistic", bags="bag").fit(frame, label)
    listed = [frame[["a", "more"]].iloc[i : i + 2] for i in range(0, 8, 2)]
    with pytest.raises(HeadcountError, match=re.escape(message)):
        MajorityClassifier("logistic").fit(listed, [0, 1, 0, 1])


WHOLE, APART = "caf\u00e9", "cafe\u0301"  # the same word, its last letter encoded as one and as two code points


@pytest.mark.parametrize("kind", [str, object])
def test_accented_letters_compare_equal_however_they_are_encoded(kind, tmp_path):
    one = np.array([WHOLE, "cafz", "lait"], kind)
    both = np.where(np.arange(40) % 2, one[WIN], np.array([APART, "cafz", " lait "], kind)[WIN])  # as a table may have it
    plain, model = of().fit(X, one[Y], bags=BAG), of().fit(X, both[BAG], bags=BAG)
    assert model.classes_.tolist() == plain.classes_.tolist() == ["cafz", WHOLE, "lait"]
    assert np.array_equal(model.predict_proba(X), plain.predict_proba(X))
    ids = np.array([f"{WHOLE} {b}" for b in BAG], kind)
    mixed = np.where(np.arange(len(BAG)) % 2, ids, np.array([f"{APART} {b}" for b in BAG], kind))
    assert np.array_equal(of().fit(X, one[Y], bags=mixed).predict_proba(X), plain.predict_proba(X))
    assert model.predict_shares(X, bags=mixed).bags.tolist() == list(dict.fromkeys(ids))
    with pytest.warns(HeadcountWarning, match="do not reach the estimator"):
        folds = list(BagKFold(4, bags=mixed).split(X, one[Y]))
    assert all(not {*BAG[train]} & {*BAG[test]} for train, test in folds)
    of("logistic").fit(X, np.where(one[Y] == WHOLE, APART, one[Y]), bags=BAG).fitted_.save(tmp_path / "m")
    assert FittedModel.load(tmp_path / "m").classes == (WHOLE, "cafz", "lait")  # as files name them
    assert of("logistic").fit(X, Y.astype(float), bags=BAG).fitted_.classes == ("0", "1", "2")


def test_labels_with_one_spelling_are_kept_as_given():
    given = np.array([APART, "cafz", " lait"])
    model = of().fit(X, given[Y], bags=BAG)
    assert model.classes_.tolist() == np.unique(given).tolist()
    assert set(model.predict(X)) == set(given)
    here, there = (model.score(X, words[Y], bags=BAG) for words in (given, np.array([WHOLE, "cafz", "lait"])))
    assert here == there > 0.7


def test_labels_that_differ_in_capitals_raise_a_warning():
    words = np.array([WHOLE, "Lait", "lait"], object)[Y]
    words[np.flatnonzero(Y == 0)[0]] = APART
    message = "capitals or blanks: 'Lait' and 'lait'; if they are one, write them alike"
    with pytest.warns(HeadcountWarning, match=message):
        model = of().fit(X, words, bags=BAG)
    assert model.classes_.tolist() == ["Lait", WHOLE, "lait"]


# -- what engineers hand over ------------------------------------------------------------------------------------------------


class Items(torch.utils.data.Dataset):
    """A data set of (instance, index), as anybody writes one."""

    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return torch.from_numpy(self.x[i]), i


def test_datasets_and_sparse_matrices_are_rows_like_any_other():
    x = X.astype(np.float32)
    plain = of().fit(x, Y, bags=BAG)
    for given in (Items(x), scipy.sparse.csr_matrix(x), scipy.sparse.coo_array(x), torch.from_numpy(x)):
        made = of().fit(given, Y, bags=BAG)
        assert np.array_equal(made.predict_proba(given), plain.predict_proba(x))
        assert made.score(given, Y, bags=BAG) == plain.score(x, Y, bags=BAG)
    listed = [scipy.sparse.csr_matrix(bag) for bag in LISTED]
    assert np.array_equal(of().fit(listed, WIN).predict_proba(x), of().fit(LISTED, WIN).predict_proba(x))
    column = scipy.sparse.csr_matrix(np.column_stack([BAG + 1, x]))
    assert np.allclose(of(bags=0).fit(column, Y).predict_proba(x), plain.predict_proba(x), atol=1e-3)


def test_images_of_a_dataset():
    g = np.random.default_rng(0)
    images, bag = g.integers(0, 256, (24, 9, 8, 3), dtype=np.uint8), np.repeat(np.arange(6), 4)
    made = [MajorityClassifier("count", epochs=1, backbone="quick").fit(x, bag % 2, bags=bag) for x in (images, Items(images))]
    assert np.array_equal(made[0].predict_proba(images), made[1].predict_proba(Items(images)))


def test_probabilities_and_votes_in_place_of_labels():
    """Certain ones are labels; uncertain ones are not; rows and lists, arrays and tables agree."""
    certain = np.eye(3)[WIN]
    by_label = of().fit(LISTED, WIN)
    assert np.array_equal(of().fit(LISTED, certain).predict_proba(X), by_label.predict_proba(X))
    votes = np.array([[3, 1, 1], [1, 4, 0], [0, 1, 4]])[WIN]
    by_list, by_row = of().fit(LISTED, votes), of().fit(X, votes[BAG], bags=BAG)
    named = of().fit(LISTED, pd.DataFrame(votes, columns=["c", "a", "b"]))
    assert named.classes_.tolist() == ["c", "a", "b"]
    assert np.array_equal(by_list.predict_proba(X), named.predict_proba(X))
    assert np.allclose(by_list.predict_proba(X), by_row.predict_proba(X))
    assert not np.allclose(by_list.predict_proba(X), by_label.predict_proba(X))
    assert (by_list.predict_bags(LISTED) == WIN).mean() > 0.8
    with pytest.raises(HeadcountError, match=r"bag \d+ has rows with different votes"):
        of().fit(X, votes[BAG] + np.eye(3, dtype=int)[np.arange(len(X)) % 3], bags=BAG)
    with pytest.raises(HeadcountError, match="y has 7 rows of votes for"):
        of().fit(X, votes[:7], bags=BAG)


# -- saving and loading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", ["tilt", "additive", "em_forest", "logistic", LogisticRegression()], ids=str)
@pytest.mark.parametrize("kind", ["array", "frame"])
def test_an_estimator_is_saved_and_loaded(estimator, kind, tmp_path, monkeypatch):
    monkeypatch.setattr("headcount.selection.classifiers.N_TREES", 5)
    x, arguments = (X.astype(np.float32), {}) if kind == "array" else (FRAME, {"bags": "street"})
    bags = {"bags": BAG} if kind == "array" else {}
    made = of(estimator, **arguments, **({"epochs": 3} if estimator in ("tilt", "additive") else {})).fit(x, Y + 5, **bags)
    made.save(tmp_path / "m")
    again = MajorityClassifier.load(tmp_path / "m")
    assert again.classes_.tolist() == [5, 6, 7]
    assert again.classes_.dtype == made.classes_.dtype
    assert again.n_features_in_ == 5
    assert again.method_ == made.method_
    assert np.allclose(again.predict_proba(x), made.predict_proba(x), atol=1e-5)
    assert np.array_equal(again.predict(x), made.predict(x))
    assert np.array_equal(again.predict_bags(x, **bags), made.predict_bags(x, **bags))
    assert again.score(x, Y + 5, **bags) == made.score(x, Y + 5, **bags)
    assert np.allclose(again.predict_shares(x, **bags).low, made.predict_shares(x, **bags).low, atol=1e-4)
    with pytest.raises(HeadcountError, match="already"):
        made.save(tmp_path / "m")
    if kind == "frame":
        assert again.feature_names_in_.tolist() == list("abcde")
        with pytest.raises(ValueError, match="feature names"):
            again.predict(FRAME.rename(columns={"a": "z"}))


def test_images_saved_and_loaded_with_a_backbone_of_ones_own(tmp_path):
    class Colours(torch.nn.Module):
        def forward(self, x):
            return x.mean((2, 3))

    g = np.random.default_rng(0)
    images, bag = g.integers(0, 256, (24, 9, 8, 3), dtype=np.uint8), np.repeat(np.arange(6), 4)
    made = MajorityClassifier("count", epochs=1, backbone=Colours).fit(images, np.array(["no", "yes"])[bag % 2], bags=bag)
    made.save(tmp_path / "m")
    again = MajorityClassifier.load(tmp_path / "m", backbone=Colours)
    assert np.array_equal(again.predict(images), made.predict(images))
    assert again.score(images, np.array(["no", "yes"])[bag % 2], bags=bag) <= 1
    with pytest.raises(HeadcountError, match="loading runs no code"):
        MajorityClassifier.load(tmp_path / "m")


def test_a_model_of_the_command_as_an_estimator(tmp_path):
    g = np.random.default_rng(0)
    table = FRAME.assign(label=np.array(["left", "middle", "right"])[Y])
    model = headcount.fit(headcount.read(table, ColumnRoles(bag="street", label="label")), "logistic", folds=2)
    model.save(tmp_path / "numbers")
    again = MajorityClassifier.load(tmp_path / "numbers")
    assert np.allclose(again.predict_proba(FRAME), model.predict_proba(FRAME[list("abcde")]), atol=1e-5)
    assert again.score(FRAME, table.label) > 0.8
    words = table.assign(colour=g.choice(["red", "blue"], len(table)))
    headcount.fit(headcount.read(words, ColumnRoles(bag="street", label="label")), "logistic", folds=2).save(tmp_path / "words")
    with pytest.raises(HeadcountError, match="'colour' by itself") as e:
        MajorityClassifier.load(tmp_path / "words")
    assert "\n" not in str(e.value)


def test_an_optimizer_of_ones_own():
    made = []

    def optimizer(parameters):
        made.append(torch.optim.NAdam(parameters, 1e-2))
        return made[-1]

    model = clone(MajorityClassifier("count", epochs=30, optimizer=optimizer)).fit(X, Y, bags=BAG)
    assert len(made) == 1
    assert model.score(X, Y, bags=BAG) > 0.8
    with pytest.raises(HeadcountError, match="optimizer"):
        of(optimizer=optimizer).fit(X, Y, bags=BAG)

"""MajorityClassifier in scikit-learn: its checks, searches that see the bags, and folds that split no bag."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import sklearn
from sklearn import config_context
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks

import headcount
from headcount.bags import Bags, Pool
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.estimators.inputs import as_bag_list, read_rows
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.estimators.model_selection import BagKFold
from headcount.models.fitted import FittedModel


# Nothing is declared as failing (expected_failed_checks): plain fit(X, y), a bag of one per row, is ordinary classification.
@parametrize_with_checks([MajorityClassifier("tilt", epochs=10), MajorityClassifier(LogisticRegression())])
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


def data(bags=40, size=5, seed=0, share=0.5):
    """(X, label of each row's bag, bag, truth), rows shuffled."""
    g = np.random.default_rng(seed)
    bag = np.repeat(np.arange(bags), size)
    label = bag % 2
    truth = np.where(np.arange(len(bag)) % size < size // 2 + 1, label, g.integers(0, 2, len(bag)))
    x = np.column_stack([truth * 2.0, np.zeros(len(bag))]) + 0.7 * g.normal(size=(len(bag), 2))
    order = g.permutation(len(bag))
    return x[order], np.array(["no", "yes"])[label[order]], bag[order], np.array(["no", "yes"])[truth[order]]


class Frame:
    """The part of the interface of a DataFrame that scikit-learn and we use."""

    def __init__(self, columns):
        self.data = {k: np.asarray(v) for k, v in columns.items()}
        self.columns = list(columns)
        self.shape = (len(next(iter(self.data.values()))), len(self.data))

    def __getitem__(self, key):
        return Frame({k: self.data[k] for k in key}) if isinstance(key, list) else self.data[key]

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        return np.column_stack(list(self.data.values())).astype(dtype or float)


FOREST = RandomForestClassifier(10, min_samples_leaf=3)


@pytest.mark.parametrize("estimator", [FOREST, LogisticRegression(), GaussianNB(), "em_forest"], ids=str)
def test_three_ways_to_give_the_bags(estimator, monkeypatch):
    monkeypatch.setattr("headcount.selection.classifiers.N_TREES", 8)
    monkeypatch.setattr("headcount.selection.classifiers.EM_ROUNDS", 2)
    x, y, bag, truth = data()
    made = MajorityClassifier(estimator)
    one = made.fit(x, y, bags=bag)
    p = one.predict_proba(x)
    assert (one.predict(x) == truth).mean() > 0.85
    assert one.score(x, y, bags=bag) > 0.9
    assert one.classes_.tolist() == ["no", "yes"]
    frame = Frame({"a": x[:, 0], "street": bag, "b": x[:, 1]})
    two = clone(made).fit(frame, y, bags="street")
    assert np.allclose(two.predict_proba(frame), p)
    assert two.score(frame, y) == one.score(x, y, bags=bag)
    three = clone(made).set_params(bags=0).fit(np.column_stack([bag, x]), y)
    assert np.allclose(three.predict_proba(np.column_stack([bag, x])), p)
    order = np.argsort(bag, kind="stable")
    first = bag[np.sort(np.unique(bag, return_index=True)[1])]
    listed = [x[bag == b] for b in first]
    four = clone(made).fit(listed, [y[bag == b][0] for b in first])
    listed_p = four.predict_proba(listed)
    assert [len(s) for s in listed_p] == [5] * 40
    rank = np.argsort(np.concatenate([np.flatnonzero(bag == b) for b in first]))
    assert np.allclose(np.concatenate(listed_p)[rank], p)
    assert len(order) == 200


def test_a_network():
    x, y, bag, truth = data(60)
    made = MajorityClassifier("tilt", epochs=30).fit(x, y, bags=bag)
    assert (made.predict(x) == truth).mean() > 0.85
    again = MajorityClassifier("tilt", epochs=30).fit(x, y, bags=bag)
    assert np.array_equal(made.predict_proba(x), again.predict_proba(x))
    other = MajorityClassifier("count", epochs=10, random_state=1).fit(x, y, bags=bag)
    assert other.predict(x).shape == (300,)
    assert 0.5 < float(made.transition_.share.mean()) < 1


def test_a_search_fits_whole_bags_and_scores_bags(monkeypatch):
    """fit gets whole bags, score counts bags, and no bag is in both parts."""
    x, y, bag, _ = data(24)
    table = np.column_stack([bag, x])
    fits, scores = [], []
    usual_fit, usual_score = MajorityClassifier.fit, MajorityClassifier.score

    def fit(self, X, y, bags=None, weight=None):
        made = usual_fit(self, X, y, bags, weight)
        fits.append((set(X[:, 0]), read_rows(self, X, bags)[1].sizes))
        return made

    def score(self, X, y, bags=None, sample_weight=None):
        found = usual_score(self, X, y, bags)
        scores.append((set(X[:, 0]), found, len(X)))
        return found

    monkeypatch.setattr(MajorityClassifier, "fit", fit)
    monkeypatch.setattr(MajorityClassifier, "score", score)
    model = MajorityClassifier(LogisticRegression(), bags=0)
    search = GridSearchCV(model, {"estimator__C": [1e-4, 1.0]}, cv=BagKFold(3, bags=0)).fit(table, y)
    assert len(fits) == 7
    assert len(scores) == 6
    for (trained, sizes), (tested, found, rows) in zip(fits[:6], scores, strict=True):
        assert not trained & tested
        assert set(sizes) == {5}
        assert rows == 40
        assert round(found * 8, 6) == round(found * 8)  # of eight bags, not of forty rows
    assert search.best_score_ > 0.8


def test_ids_given_to_a_search_reach_fit_but_not_score():
    """So score refuses, rather than counting rows as bags."""
    x, y, bag, _ = data(24)
    search = GridSearchCV(
        MajorityClassifier(LogisticRegression()), {"estimator__C": [1.0]}, cv=BagKFold(3, bags=bag), error_score="raise"
    )
    with (
        pytest.raises(HeadcountError, match="nothing says which rows"),
        pytest.warns(HeadcountWarning, match="do not reach the estimator"),
    ):
        search.fit(x, y, bags=bag)
    made = MajorityClassifier(LogisticRegression()).fit(x, y, bags=bag)
    assert made.predict(x).shape == (120,)  # without bags
    for method in (made.predict_bags, made.predict_shares):
        with pytest.raises(HeadcountError, match="give bags="):
            method(x)


def test_the_warning_about_ids_of_the_splitter_without_metadata_routing():
    """Without routing every row would be a bag, silently; with metadata routing fit and score get the ids."""
    x, y, bag, _ = data(24)
    model = MajorityClassifier(LogisticRegression())
    with pytest.warns(HeadcountWarning, match="makes every row a bag.*metadata routing"):
        cross_val_score(model, x, y, cv=BagKFold(3, bags=bag))
    listed, labels = [x[bag == b] for b in range(24)], [y[bag == b][0] for b in range(24)]
    with config_context(enable_metadata_routing=True):
        asked = model.set_fit_request(bags=True).set_score_request(bags=True)
        routed = cross_val_score(asked, x, y, cv=BagKFold(3, bags=bag), params={"bags": bag})
    assert sorted(routed * 8) == sorted((routed * 8).round())  # of eight bags each
    assert abs(routed.mean() - cross_val_score(MajorityClassifier(LogisticRegression()), listed, labels, cv=3).mean()) < 0.1


def test_the_default_is_the_method_that_held_out_bags_prefer():
    """A step in one of 20 columns: a forest finds it, a network needs more bags."""
    g = np.random.default_rng(0)
    bag, x = np.repeat(np.arange(40), 9), g.normal(size=(360, 20))
    truth = (np.abs(x[:, 0]) > 0.7).astype(int)
    x = x[np.argsort(truth + 0.8 * g.random(360), kind="stable")]
    truth = (np.abs(x[:, 0]) > 0.7).astype(int)
    label = (np.bincount(bag, truth) > 4.5).astype(int)[bag]
    made = MajorityClassifier().fit(x, label, bags=bag)
    assert made.losses_[made.method_] == min(made.losses_.values())
    assert {"forest", "em_forest"} <= set(made.losses_), "the logistic regression left, clearly behind"
    assert "logistic" not in made.losses_
    assert made.method_ in ("forest", "em_forest", "boosting", "em_boosting")
    assert made.fitted_.metadata["method"]["name"] == made.method_
    assert np.mean(made.predict(x) == truth) > 0.9
    images = g.integers(0, 255, (40, 8, 8, 1), dtype=np.uint8)
    of_images = MajorityClassifier(epochs=1).fit(images, np.arange(40) // 4 % 2, bags=np.arange(40) // 4)
    assert of_images.losses_[of_images.method_] == min(of_images.losses_.values())
    assert of_images.losses_.keys() == {"tilt", "tilt_mlp"}
    large = MajorityClassifier(epochs=1).fit(images.repeat(5, 1).repeat(5, 2), np.arange(40) // 4 % 2, bags=np.arange(40) // 4)
    assert (large.method_, large.losses_) == ("tilt", {})


def test_groups_is_no_parameter():
    x, y, bag, _ = data(6)
    with pytest.raises(TypeError, match="groups"):
        MajorityClassifier().fit(x, y, groups=bag)


def test_a_search_over_a_list_of_bags():
    x, y, bag, _ = data(24)
    listed = [x[bag == b] for b in range(24)]
    labels = [y[bag == b][0] for b in range(24)]
    scores = cross_val_score(MajorityClassifier(LogisticRegression()), listed, labels, cv=BagKFold(4))
    assert len(scores) == 4
    assert scores.mean() > 0.8


def test_in_a_pipeline():
    x, y, bag, truth = data()
    made = make_pipeline(StandardScaler(), MajorityClassifier(LogisticRegression()))
    made.fit(x, y, majorityclassifier__bags=bag)
    assert (made.predict(x) == truth).mean() > 0.85
    copy = clone(made)
    assert copy.get_params()["majorityclassifier__estimator__C"] == 1.0


def test_bags_and_shares():
    x, y, bag, truth = data(60, 9)
    made = MajorityClassifier(FOREST).fit(x, y, bags=bag)
    found = made.predict_shares(x, bags=bag, level=0.9)
    first = bag[np.sort(np.unique(bag, return_index=True)[1])]
    assert found.bags.tolist() == first.tolist()
    assert found.share.shape == (60, 2)
    assert np.allclose(found.share.sum(1), 1, atol=1e-5)
    assert bool((found.low <= found.share).all() and (found.share <= found.high).all())
    wide = made.predict_shares(x, bags=bag, level=0.99)
    assert bool((wide.low <= found.low).all() and (wide.high >= found.high).all())
    true = np.array([(truth[bag == b] == "yes").mean() for b in first])
    assert np.abs(found.share[:, 1] - true).mean() < 0.12
    predicted = made.predict_bags(x, bags=bag)
    assert (
        predicted == made.classes_[found.share.argmax(1)]
    ).mean() > 0.9  # two estimates, which differ where both are uncertain
    with pytest.raises(HeadcountError, match="level"):
        made.predict_shares(x, bags=bag, level=2)


def test_shares_of_bags_of_one_are_the_probabilities_of_their_instance():
    """Every interval was from 0 to 1, however sure the model was."""
    x, y, bag, _ = data()
    made = MajorityClassifier(FOREST).fit(x, y, bags=bag)
    for concentration in (None, 4.0):
        made._model = made._model.replace(concentration=concentration, instance_temperature=0.3)
        p = made.predict_proba(x[:8])
        found = made.predict_shares(x[:8], bags=np.arange(8), level=0.9)
        assert np.allclose(found.share, p, atol=1e-6)
        assert 0 < (p.max(1) > 0.95).sum() < 8
        for k in range(2):
            assert np.allclose(found.low[:, k], np.where(p[:, k] > 0.95, p[:, k], 0), atol=1e-6)
            assert np.allclose(found.high[:, k], np.where(p[:, k] < 0.05, p[:, k], 1), atol=1e-6)


SMALL = {"mctformer": {"width": 8, "heads": 2, "layers": 1}, "additive_trans": {"width": 8, "heads": 2}}


@pytest.mark.parametrize("name", ["weno", "additive", "mctformer", "additive_trans", "count", "tilt", "em_forest"])
def test_bag_predictions_are_those_of_the_command_line(name, monkeypatch):
    """A head may predict bags itself, and instances from their bag: a search ranks the predictions that evaluate scores."""
    monkeypatch.setattr("headcount.selection.classifiers.N_TREES", 5)
    x, y, bag, _ = data(30)
    how = {} if name == "em_forest" else {"epochs": 3, "options": SMALL.get(name)}
    made = MajorityClassifier(name, **how).fit(x, y, bags=bag)
    order = np.argsort(bag, kind="stable")
    bags = Bags.of(Pool(x[order]), sizes=[5] * 30, labels=[-1] * 30, classes=2)
    asked = made.fitted_.predict(bags)  # what evaluate and predict ask
    labels, predicted = y[order][::5], made.classes_[asked.bag_prediction]
    listed = [x[bag == b] for b in range(30)]
    assert made.predict_bags(listed).tolist() == predicted.tolist()
    assert made.score(listed, labels) == made.score(x, y, bags=bag) == (predicted == labels).mean()
    p = made.predict_proba(listed)
    assert np.allclose(np.concatenate(p), asked.instance_probabilities, atol=1e-4)
    assert np.allclose(made.predict_proba(x, bags=bag)[order], np.concatenate(p), atol=1e-5)
    assert np.concatenate(made.predict(listed)).tolist() == made.predict(x, bags=bag)[order].tolist()
    alone = made.predict_proba(x)[order]
    by_bag = name in ("additive", "mctformer", "additive_trans")
    assert np.allclose(alone, np.concatenate(p), atol=1e-5) == (not by_bag)


def test_the_bag_column_is_used_by_heads_that_depend_on_the_bag():
    x, y, bag, _ = data(30)
    made = MajorityClassifier("additive", epochs=3, bags=0).fit(np.column_stack([bag, x]), y)
    inside = made.predict_proba(np.column_stack([bag, x]))
    assert np.allclose(inside, made.predict_proba(x, bags=bag), atol=1e-6)
    assert not np.allclose(inside, made.predict_proba(x))


def test_intervals_of_shares_cover_in_large_bags():
    """A classifier fitted to soft labels is underconfident; in large bags only a temperature corrects that."""
    g = np.random.default_rng(1)
    share = np.where(np.arange(60) % 2, 1, -1) * g.uniform(0.05, 0.45, 60) + 0.5
    truth = (g.random((60, 200)) < share[:, None]).astype(int)
    x = g.normal(size=(60, 200, 2)) + 4.0 * truth[..., None] * [1, 0]
    real = truth.mean(1)
    made = MajorityClassifier(LogisticRegression()).fit(x[:40], (real[:40] > 0.5).astype(int))
    found = made.predict_shares(x[40:])
    assert ((found.low[:, 1] <= real[40:]) & (real[40:] <= found.high[:, 1])).mean() > 0.7
    assert made.fitted_.instance_temperature < 1


def test_weights_change_the_model():
    x, y, bag, _ = data(20)
    heavy = np.where(np.arange(100) % 7 == 0, 3.0, 1.0)
    one = MajorityClassifier(LogisticRegression()).fit(x, y, bags=bag, weight=heavy)
    two = MajorityClassifier(LogisticRegression()).fit(x, y, bags=bag)
    assert not np.allclose(one.predict_proba(x), two.predict_proba(x))


def test_a_fitted_model_can_be_saved(tmp_path):
    x, y, bag, _ = data(20)
    made = MajorityClassifier(LogisticRegression()).fit(x, y, bags=bag)
    made.fitted_.save(tmp_path / "m")
    assert FittedModel.load(tmp_path / "m").classes == ("no", "yes")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bags": np.zeros(3)}, "3 bag ids for 20 rows"),
        ({"bags": "street"}, "no column 'street'"),
        ({"bags": 7}, "no column 7"),
        ({"bags": np.arange(20) // 7}, "two labels"),
        ({"weight": -np.ones(20)}, "weight"),
    ],
)
def test_invalid_input_is_refused(arguments, message):
    x, y, bag, _ = data(4)
    with pytest.raises(HeadcountError, match=message):
        MajorityClassifier(LogisticRegression()).fit(x, y, **{"bags": bag, **arguments})


def test_invalid_estimators_and_bags_are_refused():
    x, y, bag, _ = data(4)
    with pytest.raises(HeadcountError, match="no estimator"):
        MajorityClassifier("tlit").fit(x, y, bags=bag)
    with pytest.raises(HeadcountError, match="shape"):
        MajorityClassifier().fit([x[:3], x[:3, :1]], ["a", "b"])
    with pytest.raises(HeadcountError, match="at least two classes"):
        MajorityClassifier().fit(x, ["a"] * 20, bags=bag)
    with pytest.raises(HeadcountError, match="does not know the bags"):
        next(BagKFold().split(x, y))
    with pytest.raises(HeadcountError, match="n_splits"):
        BagKFold(1)
    assert as_bag_list([[1, 2], [3, 4]]) is None  # rows, not bags


@pytest.mark.parametrize("seed", range(5))
def test_folds_split_no_bag(seed):
    g = np.random.default_rng(seed)
    bag = g.integers(0, 12, 200)
    y = np.array(list("aab"))[bag % 3]
    cv = BagKFold(4, bags=bag, random_state=seed)
    assert cv.get_n_splits() == 4
    tests = []
    with pytest.warns(HeadcountWarning, match="in your own loop"):
        split = list(cv.split(np.zeros((200, 1)), y))
    for train, test in split:
        assert not set(bag[train]) & set(bag[test])
        assert sorted([*train, *test]) == list(range(200))
        assert {"a", "b"} <= set(y[test])
        tests += test.tolist()
    assert sorted(tests) == list(range(200))
    with pytest.raises(HeadcountError, match="groups reach the splitter only"):  # the estimator would see no bags
        list(BagKFold(4, random_state=seed).split(np.zeros((200, 1)), y, groups=bag))


def test_the_front_door():
    assert headcount.MajorityClassifier is MajorityClassifier
    assert headcount.BagKFold is BagKFold


def test_the_documentation_lists_the_checks_that_run():
    if f"scikit-learn=={sklearn.__version__}\n" not in (Path(__file__).parents[2] / "constraints.txt").read_text():
        pytest.skip("the page lists the checks of another version of scikit-learn")
    found = [getattr(c, "func", c).__name__ for _, c in estimator_checks_generator(MajorityClassifier(), legacy=True)]
    text = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "estimator.md").read_text()
    assert f"all {len(found)} checks" in text
    listed = set(re.findall(r"`(\w+)`", text.split("without their prefix")[1]))
    assert {f"check_{n}" for n in listed if n != "check_"} == set(found) - {"check_array_api_input"}

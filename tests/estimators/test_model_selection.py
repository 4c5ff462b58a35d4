"""MajorityClassifier in searches and pipelines: scores are of whole bags, and scikit-learn's scores of instances are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn import config_context
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import get_scorer
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score, cross_validate
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from headcount import BagKFold, Bags, BagScorer, MajorityClassifier, Pool
from headcount.errors import HeadcountError, HeadcountWarning
from headcount.majority.calibration import evaluate_criterion

G = np.random.default_rng(0)
BAG = np.repeat(np.arange(30), 6)
TRUTH = np.where(G.random(180) < 0.7, BAG % 2, G.integers(0, 2, 180))
LABELS = np.array([np.bincount(TRUTH[b == BAG], minlength=2).argmax() for b in range(30)])
Y = LABELS[BAG]
X = np.column_stack([TRUTH + 0.4 * G.normal(size=180), G.normal(size=180)])
TABLE = np.column_stack([BAG, X])
LISTED = [X[b == BAG] for b in range(30)]
MODEL = MajorityClassifier(LogisticRegression())
CV = BagKFold(3, bags=0)


@pytest.mark.parametrize("scoring", ["accuracy", "neg_log_loss", "f1", {"a": "balanced_accuracy"}])
def test_the_scorers_of_scikit_learn_are_refused_in_a_search(scoring):
    """They compared the classes of instances with the labels of their bags, in silence; lists of bags gave nan."""
    in_column = MajorityClassifier(LogisticRegression(), bags=0)
    for model, data, labels, cv in ((in_column, TABLE, Y, CV), (MODEL, LISTED, LABELS, 3)):
        for search in (
            lambda m, x, y, cv=cv: cross_validate(m, x, y, scoring=scoring, cv=cv, error_score="raise"),
            lambda m, x, y, cv=cv: GridSearchCV(m, {}, scoring=scoring, cv=cv, refit=False, error_score="raise").fit(x, y),
        ):
            with pytest.raises(HeadcountError, match=r"single instances with y, .*labels of bags; .*headcount\.BagScorer"):
                search(model, data, labels)


def test_the_scorers_of_scikit_learn_score_known_classes_of_instances():
    """That is right in one's own hands, and ordinary classification has no bags."""
    made = MajorityClassifier(LogisticRegression()).fit(X, Y, bags=BAG)
    with pytest.warns(HeadcountWarning, match="right if y holds the classes of the instances"):
        score = get_scorer("accuracy")(made, X, TRUTH)
    assert score == (made.predict(X) == TRUTH).mean()
    assert cross_val_score(MODEL, X, TRUTH, scoring="accuracy", cv=3).min() > 0.8
    assert cross_val_predict(MajorityClassifier(LogisticRegression(), bags=0), TABLE, Y, cv=CV).shape == (180,)


def test_scores_of_bags():
    made = MajorityClassifier(LogisticRegression()).fit(LISTED[:20], LABELS[:20])
    rest, labels = LISTED[20:], LABELS[20:]
    bags = Bags.of(Pool(np.concatenate(rest)), sizes=[6] * 10, labels=labels, classes=2)
    p = made.fitted_.predict(bags)
    assert BagScorer()(made, rest, labels) == made.score(rest, labels) == (p.bag_prediction == labels).mean()
    log_p = np.log(p.bag_probabilities[np.arange(10), labels])
    assert BagScorer("log_loss")(made, rest, labels) == pytest.approx(log_p.mean())
    raw = made.fitted_.replace(instance_temperature=1.0).predict(bags)
    criterion = evaluate_criterion(torch.from_numpy(raw.instance_probabilities), bags)
    assert BagScorer("criterion")(made, rest, labels) == pytest.approx(-criterion.loss, rel=1e-4)
    weight = np.arange(10.0)
    assert BagScorer("log_loss")(made, rest, labels, sample_weight=weight) == pytest.approx(np.average(log_p, weights=weight))
    rows, ids = np.concatenate(rest), np.repeat(np.arange(10), 6)
    by_row = BagScorer("log_loss")(made, rows, labels[ids], bags=ids, sample_weight=weight[ids])
    assert by_row == pytest.approx(np.average(log_p, weights=weight), rel=1e-5)
    assert made.score(rest, np.where(labels == 1, 7, labels)) == ((p.bag_prediction == 0) & (labels == 0)).mean()
    with pytest.raises(HeadcountError, match="no metric 'f1'; there are accuracy, log_loss"):
        BagScorer("f1")(made, rest, labels)
    with pytest.raises(HeadcountError, match="scores a MajorityClassifier, got LogisticRegression"):
        BagScorer()(LogisticRegression(), rest, labels)


@pytest.mark.parametrize("metric", ["accuracy", "log_loss", "criterion"])
def test_searches_with_bag_scorers(metric):
    """The same folds give the same scores for a list of bags, a column, and a Pipeline."""
    scorer, in_column = BagScorer(metric), MajorityClassifier(LogisticRegression(), bags=0)
    listed = cross_val_score(MODEL, LISTED, LABELS, scoring=scorer, cv=BagKFold(3))
    column = cross_val_score(in_column, TABLE, Y, scoring=scorer, cv=CV)
    both = cross_validate(in_column, TABLE, Y, scoring={"bags": scorer, "usual": BagScorer()}, cv=CV)
    assert column == pytest.approx(listed)
    assert both["test_bags"] == pytest.approx(column)
    search = GridSearchCV(MODEL, {"estimator__C": [1e-6, 1.0]}, scoring=scorer, cv=BagKFold(3)).fit(LISTED, LABELS)
    assert search.cv_results_["mean_test_score"][1] == pytest.approx(listed.mean())
    assert scorer(search, LISTED, LABELS) == scorer(search.best_estimator_, LISTED, LABELS)


def test_a_pipeline_that_ends_in_the_classifier_is_scored_and_searched():
    plain = cross_val_score(MajorityClassifier(LogisticRegression(C=1e3), bags=0), TABLE, Y, cv=CV)
    pipe = make_pipeline(StandardScaler(), MajorityClassifier(LogisticRegression(C=1e3), bags=0))
    assert cross_val_score(pipe, TABLE, Y, cv=CV, error_score="raise") == pytest.approx(plain, abs=0.11)  # one bag of ten
    search = GridSearchCV(pipe, {"majorityclassifier__estimator__C": [1e-6, 1.0]}, cv=CV, error_score="raise").fit(TABLE, Y)
    assert search.best_score_ > 0.7
    by_loss = GridSearchCV(pipe, {"majorityclassifier__estimator__C": [1e-6, 1.0]}, cv=CV, scoring=BagScorer("log_loss"))
    assert by_loss.fit(TABLE, Y).best_params_ == {"majorityclassifier__estimator__C": 1.0}


@pytest.mark.filterwarnings("error")
def test_metadata_routing_takes_the_bags_through_a_pipeline():
    """It once ended in "unexpected argument sample_weight"."""
    with config_context(enable_metadata_routing=True):
        model = MajorityClassifier(LogisticRegression(C=1e3)).set_fit_request(bags=True).set_score_request(bags=True)
        pipe = make_pipeline(StandardScaler(), model)
        arguments = {"cv": BagKFold(3, bags=BAG), "error_score": "raise"}
        scores = cross_val_score(pipe, X, Y, params={"bags": BAG}, **arguments)
        scorer = BagScorer("log_loss").set_score_request(bags=True)
        losses = cross_val_score(pipe, X, Y, params={"bags": BAG}, scoring=scorer, **arguments)
        grid = {"majorityclassifier__estimator__C": [1e-6, 1e3]}
        search = GridSearchCV(pipe, grid, **arguments).fit(X, Y, bags=BAG)
        by_loss = GridSearchCV(pipe, grid, scoring=scorer, **arguments).fit(X, Y, bags=BAG)
        weighted = model.set_score_request(bags=True, sample_weight=True)
        halves, weight = [(np.arange(30, 180), np.arange(30))], 1.0 * (BAG < 2)
        first = cross_val_score(weighted, X, Y, params={"bags": BAG, "sample_weight": weight}, cv=halves)
        assert pipe.fit(X, Y, bags=BAG).score(X, Y, bags=BAG) > 0.7
    assert sorted(scores * 10) == sorted((scores * 10).round())  # of ten bags each
    assert search.cv_results_["mean_test_score"][1] == pytest.approx(scores.mean())
    assert by_loss.cv_results_["mean_test_score"][1] == pytest.approx(losses.mean())
    assert by_loss.best_params_ == {"majorityclassifier__estimator__C": 1e3}
    assert first.item() in (0.0, 0.5, 1.0)  # of two bags


@pytest.mark.parametrize("hole", [None, float("nan")])
def test_unlabelled_bags_are_in_folds_and_not_in_scores(hole):
    labels = np.array(["no", "yes"], object)[LABELS]
    labels[:6] = hole
    tests = [test for _, test in BagKFold(3).split(LISTED, labels)]
    assert sorted(np.concatenate(tests)) == list(range(30))
    scores = cross_val_score(MODEL, LISTED, labels, cv=BagKFold(3), error_score="raise")
    for score, test in zip(scores, tests, strict=True):
        labelled = (test >= 6).sum()
        assert 7 <= labelled <= 9
        assert score * labelled == pytest.approx(round(score * labelled))

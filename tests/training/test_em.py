"""EM under the tilt, the measure methods are compared by, and folds of bags."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

from blob_factory import blobs
from headcount.bags import Bags, Pool
from headcount.bags.splits import assign_folds, assign_group_folds, subsample_instances
from headcount.errors import HeadcountError
from headcount.majority import transition
from headcount.majority.calibration import fit_transition_loss, instance_losses, prior_loss
from headcount.models.trees import SklearnModel
from headcount.training import em as module
from headcount.training.em import em, features


def accuracy(classifier, bags):
    return float((SklearnModel(classifier, 3).predict_proba(features(bags)).argmax(1) == bags.truth.numpy()).mean())


FOREST = RandomForestClassifier(10, min_samples_leaf=3)


# -- EM -------------------------------------------------------------------------------------------------------------------


def test_em_beats_the_bags_label_as_instance_label():
    gains = []
    for seed in range(3):
        train, valid, test = (blobs(60, 9, share=0.2, seed=10 * seed + k, spread=0.4) for k in range(3))
        made = em(FOREST, train.blind(), valid.blind(), rounds=6, seed=seed)
        plain = em(FOREST, train.blind(), valid.blind(), rounds=0, seed=seed)
        assert made.best_round > 0
        assert plain.best_round == 0
        gains.append(accuracy(made.classifier, test) - accuracy(plain.classifier, test))
    assert min(gains) > 0.03


def test_believing_the_labels_takes_one_fit(monkeypatch):
    fits, fit = [], type(FOREST).fit
    monkeypatch.setattr(type(FOREST), "fit", lambda self, *args, **how: fits.append(0) or fit(self, *args, **how))
    train, valid = blobs(), blobs(seed=1)
    done = em(FOREST, train.blind(), valid.blind(), rounds=0)
    assert (len(fits), done.best_round, len(done.curve)) == (1, 0, 1)
    assert accuracy(done.classifier, valid) > 0.5


def test_the_tilt_comes_out_near_the_truth():
    train = blobs(150, 9, share=0.4, spread=0.35)
    true = float((train.truth == train.label[train.bag]).float().mean())
    made = em(FOREST, train.blind(), blobs(90, 9, share=0.4, spread=0.35, seed=1).blind(), rounds=5)
    assert abs(float(made.transition.share.mean()) - true) < 0.1  # somewhat high: a forest doubts more than it need


def test_the_kept_round_is_the_best_on_validation_bags():
    several = []
    for seed in range(4):
        heard = []
        tell = lambda r, loss, heard=heard: heard.append(loss)  # noqa: E731
        made = em(FOREST, blobs(15).blind(), blobs(12, seed=1).blind(), rounds=3, patience=9, seed=seed, on_progress=tell)
        assert heard == made.curve
        assert made.curve[made.best_round] == min(made.curve)
        several.append(made.best_round < 3)
    assert any(several)  # not always the last


def test_same_seed_same_answer_other_seed_another():
    train, valid = blobs(24).blind(), blobs(12, seed=1).blind()
    one, two, three = (em(FOREST, train, valid, rounds=2, seed=s) for s in (0, 0, 1))
    x = features(train)
    assert np.array_equal(SklearnModel(one.classifier, 3).predict_proba(x), SklearnModel(two.classifier, 3).predict_proba(x))
    assert not np.array_equal(
        SklearnModel(one.classifier, 3).predict_proba(x), SklearnModel(three.classifier, 3).predict_proba(x)
    )


def test_nobody_is_asked_about_bags_he_was_fitted_on(monkeypatch):
    """Cross-fitting: the features say which bag an instance is of, and the probability never comes from its own fold."""
    bags = blobs(12, 5)
    marked = torch.cat([bags.pool.data, bags.bag[:, None].float()], 1)
    bags = replace(bags, pool=Pool(marked), group=tuple(str(b // 2) for b in range(12)))
    others = replace(bags, pool=Pool(marked + torch.tensor([0.0, 0.0, 12.0])))
    seen = {}

    class Spy(GaussianNB):
        def fit(self, x, y, sample_weight=None):
            seen[id(self)] = set(x[:, 2])
            return super().fit(x[:, :2], y, sample_weight)

        def predict_proba(self, x):
            groups = {b // 2 for b in seen[id(self)]}
            assert not groups & {b // 2 for b in x[:, 2]} or len(seen[id(self)]) == 12
            return super().predict_proba(x[:, :2])

    em(Spy(), bags.blind(), others.blind(), rounds=2)
    assert any(len(s) < 12 for s in seen.values())


def test_weights_are_multiplicities():
    """An instance of weight 3 is three instances, for a classifier that takes weights."""
    bags = blobs(12, 5)
    weight = torch.ones(60)
    weight[::5] = 3
    places = torch.arange(60).repeat_interleave(weight.long())
    heavy = replace(bags.blind(), weight=weight)
    thrice = Bags.of(bags.pool, index=places.numpy(), sizes=[7] * 12, labels=bags.label.numpy(), classes=3)
    one, two = (em(LogisticRegression(), b, b, rounds=3) for b in (heavy, thrice))
    assert np.allclose(one.classifier.coef_, two.classifier.coef_, atol=1e-3)
    assert torch.allclose(one.transition.mix, two.transition.mix, atol=1e-3)


def test_boosting_gets_no_weights_of_one(monkeypatch):
    """Its bins take most of the time with weights, and are the same ones."""
    given, fit = [], HistGradientBoostingClassifier.fit
    spy = lambda self, x, y, sample_weight=None: given.append(sample_weight) or fit(self, x, y, sample_weight)  # noqa: E731
    train, valid = blobs(40, 9).blind(), blobs(10, 9, seed=1).blind()
    with_ones = HistGradientBoostingClassifier(max_iter=5, max_bins=16)
    with_ones.fit(features(train), train.label[train.bag].numpy(), np.ones(len(train.index)))
    monkeypatch.setattr(HistGradientBoostingClassifier, "fit", spy)
    without = em(HistGradientBoostingClassifier(max_iter=5, max_bins=16), train, valid, rounds=0).classifier
    em(HistGradientBoostingClassifier(max_iter=5, max_bins=16), train, valid, rounds=1)
    assert [weight is None for weight in given] == [True, *[True] * 3, *[False] * 3, given[-1] is None]
    np.testing.assert_array_equal(without.predict_proba(features(valid)), with_ones.predict_proba(features(valid)))


def test_unlabelled_bags_change_nothing():
    bags, more = blobs(12, 5), blobs(6, 5, seed=5)
    target = torch.cat([bags.target, torch.zeros(6, 3)])
    both = Bags.of(
        Pool(torch.cat([bags.pool.data, more.pool.data])), sizes=[5] * 18, labels=target, classes=3,
        group=[f"g{b}" for b in range(18)],
    )  # fmt: skip
    valid = blobs(6, 5, seed=6).blind()
    one, two = (em(LogisticRegression(), b, valid, rounds=2, folds=1) for b in (bags.blind(), both))
    assert np.allclose(one.classifier.coef_, two.classifier.coef_, atol=1e-5)


@pytest.mark.parametrize("labelled", [["one"] * 8, ["one"] * 4 + ["two"] * 4])
def test_a_group_without_labels_is_no_fold(labelled):
    """Dealt with the others, it made up a training part with nothing to learn from."""
    bags = blobs(24, seed=3).blind()
    target = bags.target.clone()
    target[8:] = 0
    bags = replace(bags, target=target, group=(*labelled, *["new"] * 16))
    assert len(em(FOREST, bags, bags.take(range(8)), rounds=1).curve) == 2


def test_bags_that_tell_nothing_are_refused():
    bags = blobs(6).blind()
    with pytest.raises(HeadcountError, match="none of the 6 bags has a label or a known class"):
        em(FOREST, replace(bags, target=torch.zeros_like(bags.target)), bags)


def test_known_classes_are_used():
    bags = blobs(30, 9, share=0.1, spread=0.5)
    known = replace(bags.blind(), known=bags.truth)
    assert accuracy(em(FOREST, known, known, rounds=1).classifier, blobs(30, seed=9, spread=0.5)) > 0.9
    wrong = replace(bags.blind(), known=(bags.truth + 1) % 3)
    assert accuracy(em(FOREST, wrong, wrong, rounds=1).classifier, blobs(30, seed=9, spread=0.5)) < 0.2


def test_bags_of_one_need_no_rounds_unless_they_are_samples_of_larger_ones():
    one, bags = blobs(12, 1).blind(), blobs(12, 5).blind()
    assert len(em(FOREST, one, one, rounds=1).curve) == 1
    sample = subsample_instances(bags, 12)
    assert set(sample.sizes.tolist()) == {1}
    assert len(em(FOREST, sample, bags, rounds=1).curve) == 2


def test_removed_instances_are_not_learned_from():
    bags = blobs(12, 5)
    gone = torch.zeros(60, dtype=torch.bool)
    gone[::5] = True
    one, two = (
        em(LogisticRegression(), b, b, rounds=1)
        for b in (bags.blind().without(gone), bags.blind().without(gone).drop_removed())
    )
    assert np.allclose(one.classifier.coef_, two.classifier.coef_, atol=1e-5)


def test_soft_labels():
    bags = blobs(24, 9)
    soft = Bags.of(bags.pool, sizes=[9] * 24, labels=bags.target * 0.8 + 0.2 / 3, classes=3)
    assert accuracy(em(FOREST, soft, soft, rounds=3).classifier, blobs(30, seed=9)) > 0.7


@pytest.mark.parametrize(
    "classifier", [KNeighborsClassifier(60), make_pipeline(StandardScaler(), LogisticRegression())], ids=str
)
def test_classifiers_without_weights(classifier):
    made = em(classifier, blobs(45, share=0.3).blind(), blobs(9, share=0.3, seed=1).blind(), rounds=3)
    assert accuracy(made.classifier, blobs(30, seed=9)) > 0.75
    with pytest.raises(HeadcountError, match="takes no weights"):
        em(classifier, replace(blobs(6).blind(), weight=torch.rand(54) + 0.1), blobs(6).blind())


@pytest.mark.parametrize("bags", [2, 3, 4])
def test_very_few_bags(bags):
    few = blobs(bags, 5, classes=2).blind()
    made = em(LogisticRegression(), few, few, rounds=2)
    assert len(made.classifier.classes_) == 2


def test_what_em_refuses():
    with pytest.raises(HeadcountError, match="predict_proba"):
        em(LinearSVC(), blobs(6).blind(), blobs(6).blind())
    with pytest.raises(HeadcountError, match="truth"):
        em(FOREST, blobs(6), blobs(6).blind())
    with pytest.raises(HeadcountError, match="truth"):
        em(FOREST, blobs(6).blind(), blobs(6))
    pictures = Bags.of(Pool(np.zeros((4, 2, 2, 1), np.uint8)), sizes=[2, 2], labels=[0, 1], classes=2)
    with pytest.raises(HeadcountError, match="these are images"):
        em(FOREST, pictures, pictures)


def test_copies_in_proportion():
    q = np.array([[0.6, 0.4, 0.0], [0.0, 0.0, 1.0], [0.2, 0.2, 0.6]])
    row, label = module._copies(q, np.array([True, True, False]))
    assert Counter(zip(row.tolist(), label.tolist(), strict=True)) == {(0, 0): 3, (0, 1): 2, (1, 2): 5}


# -- the criterion --------------------------------------------------------------------------------------------------------


def test_the_criterion_prefers_who_knows_more():
    """From noise to the truth, the loss falls all the way, and it reads a class and a label alike."""
    bags = blobs(200, 9, share=0.4)
    truth = torch.eye(3)[bags.truth].double()
    g = torch.Generator().manual_seed(0)
    noise = torch.rand(truth.shape, generator=g, dtype=torch.float64)
    noise = noise / noise.sum(1, keepdim=True)
    losses = [float(fit_transition_loss((1 - a) * truth + a * noise, bags.blind())[0].mean()) for a in (1.0, 0.9, 0.6, 0.0)]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] == pytest.approx(float(prior_loss(bags.target).mean()) / 2, abs=0.02)
    assert losses[-1] < losses[0] - 0.05
    found = fit_transition_loss(truth, bags.blind())[1]
    labels = transition.forward_correct(truth.clamp_min(1e-30).log(), found.mix.double(), found.label_prior.double()).exp()
    assert float(fit_transition_loss(labels, bags.blind())[0].mean()) == pytest.approx(losses[-1], abs=0.02)


def test_the_criterion_is_a_mean_over_bags():
    bags = blobs(12, 5).blind()
    p = torch.full((60, 3), 1 / 3)
    losses, found = fit_transition_loss(p, bags)
    assert len(losses) == 12
    assert torch.equal(instance_losses(p, bags, found), losses)


# -- folds ----------------------------------------------------------------------------------------------------------------


def test_folds_keep_groups_together_and_labels_apart():
    bags = blobs(60, 3, group=[f"p{b // 4}" for b in range(60)])
    fold = assign_folds(bags, 5, seed=3)
    for g in range(15):
        assert len(set(fold[4 * g : 4 * g + 4])) == 1
    assert sorted(set(fold)) == [0, 1, 2, 3, 4]
    plain = assign_folds(blobs(60, 3), 5)
    for c in range(3):
        assert np.bincount(plain[np.arange(60) % 3 == c], minlength=5).tolist() == [4] * 5
    assert not np.array_equal(plain, assign_folds(blobs(60, 3), 5, seed=1))
    assert np.array_equal(plain, assign_folds(blobs(60, 3), 5))


def test_many_bags_are_dealt_at_once():
    """The labels were added up anew for every bag: 40,000 bags took half a minute, and a fit deals ten times."""
    start = time.perf_counter()
    fold = assign_group_folds(np.eye(3)[np.arange(40_000) % 3], np.arange(40_000), 5)
    assert time.perf_counter() - start < 5  # 0.3 s
    assert np.ptp(np.bincount(fold)) <= 3


def test_unlabelled_bags_are_dealt_too():
    bags = Bags.of(Pool(np.zeros((10, 1))), sizes=[1] * 10, labels=[-1] * 6 + [0, 1, 0, 1], classes=2)
    assert np.bincount(assign_folds(bags, 2)).tolist() == [5, 5]


@pytest.mark.parametrize("folds", [0, 4])
def test_more_folds_than_groups(folds):
    bags = blobs(12, 3, group=["a", "b", "c"] * 4)
    with pytest.raises(HeadcountError, match="groups"):
        assign_folds(bags, folds)
    assert len(set(assign_folds(bags, 3))) == 3

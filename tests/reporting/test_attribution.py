"""Which columns a prediction depends on: found where they are known, and shown on the page of `headcount explain`."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

import read_factory as make
from headcount.inference.predict import predict_dataset
from headcount.readers import read
from headcount.reporting.model_pages import attribute_columns, render_explanation
from headcount.selection.fit import fit
from model_factory import fitted, people


@pytest.mark.parametrize("body", ["forest", "boosting", "linear", "network"])
def test_the_column_that_decides_comes_first(body):
    """`height` tells the classes apart; `noise`, which the model also sees, and `colour` do not."""
    table = people(bags=40, size=10, seed=1)
    table["noise"] = np.random.default_rng(0).normal(size=400).round(3).tolist()
    dataset = read(table)
    model = fit(dataset, "tilt", folds=2, epochs=12) if body == "network" else fitted(dataset, body)
    predictions = predict_dataset(model, dataset)
    instances = np.arange(0, 400, 40)
    found = attribute_columns(model, dataset, predictions, instances)
    assert set(found.columns) == {"height", "colour", "noise"}
    assert found.columns[0] == "height"
    assert found.importance.shape == (3, 3)
    assert found.importance[0, 0] > 5 * np.abs(found.importance[1:, 0]).max()
    assert found.importance[0, 0] > 0.1
    assert list(found.contributions) == instances.tolist()
    for ranked in found.contributions.values():
        sizes = [abs(value) for _, value in ranked]
        assert sizes == sorted(sizes, reverse=True)
    first = [
        ranked[0] for i, ranked in found.contributions.items() if predictions.confidence[i] >= np.median(predictions.confidence)
    ]
    assert first
    assert all(name == "height" and value > 0 for name, value in first)


def test_a_contribution_is_what_the_probability_loses():
    """Against the definition, instance by instance: the mean over other instances' values."""
    dataset = read(people(bags=6, size=5))
    model = fitted(dataset)
    predictions = predict_dataset(model, dataset)
    found = attribute_columns(model, dataset, predictions, np.array([3]))
    k = int(predictions.instance_prediction[3])
    x = model.preprocessor.transform(dataset.content)[dataset.bags.index.numpy()]
    at = model.preprocessor.feature_names.index("height")
    changed = np.repeat(x[3:4], len(x), 0)
    changed[:, at] = x[:, at]
    expected = model.estimator.predict_proba(x[3:4])[0, k] - model.estimator.predict_proba(changed)[:, k].mean()
    assert dict(found.contributions[3])["height"] == pytest.approx(expected, abs=0.2)  # 16 of the 30 instances, at random


def test_data_without_columns_have_no_attribution():
    for data in (make.texts(), {"features": np.eye(4, dtype=np.float32), "sizes": [2, 2], "labels": [0, 1]}):
        dataset = read(data)
        model = fitted(dataset, "linear")
        assert attribute_columns(model, dataset, predict_dataset(model, dataset), np.array([0])) is None


def test_the_page_says_that_the_model_was_trained_on_the_bags():
    dataset = read(people())
    model = fitted(dataset)
    predictions = predict_dataset(model, dataset)
    for seen, words in ((0, None), (1, "1 of these bags"), (len(dataset.bags), "trained on these bags")):
        which = replace(predictions, seen_in_training=np.arange(len(dataset.bags)) < seen)
        page = render_explanation(model, dataset, which, [0], "t", "the model")
        assert ("The model was trained on" in page) == bool(seen)
        assert words is None or words in page


def test_the_page_shows_columns_and_reasons(run_cli, tmp_path):
    table = people(bags=20, size=8)
    table["height"] = [h + 1 / 3 for h in table["height"]]
    data = make.write_csv(tmp_path / "people.csv", table)
    model = fitted(read(data)).save(tmp_path / "model")
    code, _, err = run_cli("explain", model, data, "--out", "page.html")
    assert code == 0, err
    text = (tmp_path / "page.html").read_text()
    rows = re.findall(r'<th scope="row">(\w+)</th><td class="number best">([+−][\d.]+)</td>', text)
    assert [name for name, _ in rows] == ["height", "colour"]
    assert float(rows[0][1]) > 5
    assert re.search(r'<p class="why">height <b class="pro">\+\d', text)
    heights = re.findall(r"<dt>height</dt><dd>([^<]*)</dd>", text)
    assert heights
    assert max(map(len, heights)) <= 8  # not 17 digits

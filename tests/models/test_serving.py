"""Serving: a model predicts rows of arrays, DataFrames and files, with or without bags, and so does the command line."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import headcount as hc
from headcount.errors import HeadcountError
from headcount.models.fitted import FittedModel
from model_factory import case, fitted, people, read_rows

ROLES = ["precinct", "label", "truth"]


@pytest.fixture
def model() -> FittedModel:
    return fitted(hc.read(people()), instance_temperature=0.6, concentration=2.0, use_context=True)


def test_rows_of_a_table_without_bags(model):
    table = pd.DataFrame(people(seed=1))
    loose = table.drop(columns=ROLES)
    p = model.predict_proba(loose)
    assert p.shape == (48, 2)
    in_rows = model.read(table).broadcast(model.predict(table, use_context=False).instance_probabilities, np.nan)
    assert np.allclose(p, in_rows, atol=1e-6)
    assert not np.allclose(p, model.predict_proba(table))  # there the rest of the bag is used
    predictions = model.predict(loose)
    assert predictions.instance_classes.tolist() == [model.classes[k] for k in p.argmax(1)]
    assert set(predictions.instance_classes) == {"no", "yes"}
    shuffled = loose.sample(frac=1, random_state=0)
    assert np.array_equal(model.predict_proba(shuffled), p[shuffled.index])
    for one in (loose[17:18], {"height": [loose.height[17]], "colour": [loose.colour[17]]}):
        assert np.array_equal(model.predict_proba(one), p[17:18])


def test_rows_of_an_array_without_bags():
    g = np.random.default_rng(0)
    bags = [g.normal(size=(5, 3)).astype(np.float32) + b % 2 for b in range(8)]
    model = fitted(hc.read(bags, labels=["a", "b"] * 4), "linear")
    x = np.concatenate(bags)
    want = model.predict(hc.read(bags, need_labels=False, classes=["a", "b"])).instance_probabilities
    for given in (x, x.astype(float), scipy.sparse.csr_matrix(x), {"X": x}):
        assert np.allclose(model.predict_proba(given), want, atol=1e-6)
    with pytest.raises(HeadcountError, match="the model takes features of"):
        model.predict_proba(x[:, :2])
    with pytest.raises(HeadcountError, match="not finite"):
        model.predict_proba(np.where(x > 1, np.nan, x))


def test_images_without_bags(tmp_path, run_cli):
    folder, data = case(tmp_path / "in", "images")
    model = FittedModel.load(folder)
    dataset = model.read(data)
    images = dataset.bags.pool.data.numpy()
    want = model.predict(dataset).instance_probabilities
    assert np.allclose(model.predict_proba(images), want, atol=1e-6)
    flat = tmp_path / "flat"
    flat.mkdir()
    for k, file in enumerate(sorted(f for f in data.rglob("*.png"))):
        (flat / f"{k:03d}.png").write_bytes(file.read_bytes())
    code, _, err = run_cli("predict", folder, flat, "--out", "p.csv")
    assert (code, "each instance is predicted by itself" in err) == (0, True), err
    assert [row["file"] for row in read_rows(tmp_path / "p.csv")] == sorted(f.name for f in flat.iterdir())


def test_the_command_predicts_loose_rows_as_they_stand(tmp_path, run_cli):
    folder, data = case(tmp_path / "in", "table")
    loose = pd.read_csv(data, dtype=str).drop(columns=ROLES)
    loose.to_csv(tmp_path / "loose.csv", index=False)
    code, _, err = run_cli("predict", folder, "loose.csv", "--out", "p.csv")
    assert (code, "each instance is predicted by itself" in err) == (0, True), err
    rows = read_rows(tmp_path / "p.csv")
    assert [row["id"] for row in rows] == loose.id.tolist()
    p = FittedModel.load(folder).predict_proba(tmp_path / "loose.csv")
    assert np.allclose([[float(row["p_no"]), float(row["p_yes"])] for row in rows], p, atol=1e-5)
    assert run_cli("predict", folder, "loose.csv", "--out", "p.h5")[0] == 0
    loose.drop(columns="id").to_csv(tmp_path / "features.csv", index=False)  # no column of the user's own is left
    assert run_cli("predict", folder, "features.csv", "--out", "f.csv")[0] == 0
    assert [row["p_no"] for row in read_rows(tmp_path / "f.csv")] == [row["p_no"] for row in rows]
    for words in (("--bag", "street"), ("--labels", data)):  # a bag that was named must be there
        code, _, err = run_cli("predict", folder, "loose.csv", *words, "--out", "q.csv")
        assert (code, err.count("\n")) == (2, 1), err


@pytest.mark.parametrize("command", ["evaluate", "issues"])
def test_bags_are_needed_where_they_are_scored(command, tmp_path, run_cli):
    folder, data = case(tmp_path / "in", "table")
    pd.read_csv(data, dtype=str).drop(columns="precinct").to_csv(tmp_path / "loose.csv", index=False)
    words = ("issues", "loose.csv", "--model", folder) if command == "issues" else ("evaluate", folder, "loose.csv")
    code, _, err = run_cli(*words)
    assert (code, "which column is the bag?" in err) == (2, True)


def test_reading_for_a_fit_still_needs_bags():
    table = pd.DataFrame(people()).drop(columns="precinct")
    with pytest.raises(HeadcountError, match="which column is the bag"):
        hc.read(table, need_labels=False)
    with pytest.raises(HeadcountError, match="must define the bags"):
        hc.read({"X": np.ones((4, 2))}, need_labels=False)


def test_an_array_has_the_columns_of_the_table():
    """An array was refused by a model of a table, which its estimator takes."""
    g = np.random.default_rng(0)
    table = pd.DataFrame(g.normal(size=(40, 3)), columns=["a", "b", "c"])
    whole = table.assign(bag=np.repeat(np.arange(8), 5), label=np.repeat(["no", "yes"] * 4, 5))
    model = fitted(hc.read(whole), "linear")
    want = model.predict_proba(table)
    for x in (table.to_numpy(), scipy.sparse.csr_matrix(table.to_numpy()), table[["c", "a", "b"]]):
        assert np.allclose(model.predict_proba(x), want, atol=1e-6)
    assert model.predict(table.to_numpy()[:1]).instance_classes.tolist() == [model.classes[want[0].argmax()]]
    with pytest.raises(HeadcountError, match=r"the array has 2 columns, the model takes 3: 'a', 'b', 'c'"):
        model.predict_proba(table.to_numpy()[:, :2])
    mixed = fitted(hc.read(people()))  # a number and a category
    loose = pd.DataFrame(people(seed=1)).drop(columns=ROLES)[[f.name for f in mixed.preprocessor.fields]]
    assert np.allclose(mixed.predict_proba(loose.to_numpy(object)), mixed.predict_proba(loose))

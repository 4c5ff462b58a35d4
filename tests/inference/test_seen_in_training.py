"""Bags that a model was trained on are recognised, and every command predicts the same of them."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

import read_factory as make
from headcount.bags import Bags, Pool
from headcount.bags.bags import bag_hashes, hashes_to_hex
from headcount.models.fitted import FittedModel
from headcount.models.predictions import Predictions
from headcount.reporting import model_pages
from headcount.selection.metadata import contradicts_shares
from model_factory import KINDS, case, people, read_rows


def trained_with_context(root, kind="table"):
    """(model that uses context and knows the bags it was trained on, these bags)."""
    model, data = case(root, kind)
    loaded = FittedModel.load(model)
    bags = loaded.read(data).to_bags(loaded.preprocessor)
    metadata = {"data": {"bag_hashes": hashes_to_hex(bag_hashes(bags))}}
    return loaded.replace(concentration=2.0, use_context=True, metadata=metadata).save(model, overwrite=True), data


def predict_yes(run_cli, tmp_path, model, data, *more):
    """p_yes by id."""
    code, _, err = run_cli("predict", model, data, "--out", "predicted.csv", *more)
    assert code == 0, err
    return {r["id"]: r["p_yes"] for r in read_rows(tmp_path / "predicted.csv")}, err


def test_training_bags_are_recognised(run_cli, tmp_path):
    """In another format and another order; their context is not used unless asked for."""
    model, data = trained_with_context(tmp_path / "in")
    table = pacsv.read_csv(data, convert_options=pacsv.ConvertOptions(column_types={"id": pa.string()}))
    other = tmp_path / "again.parquet"
    pq.write_table(table.take(np.random.default_rng(1).permutation(len(table))), other)
    predicted, err = predict_yes(run_cli, tmp_path, model, other)
    assert err.count("trained on") == 1
    assert "predicted without context" in err
    off, _ = predict_yes(run_cli, tmp_path, model, other, "--context", "off")
    on, err = predict_yes(run_cli, tmp_path, model, other, "--context", "on")
    assert predicted == off != on
    assert "predicted without context" not in err
    found = json.loads(run_cli("evaluate", model, other, "--json")[1])
    assert (found["trained_on_these"], found["bags_trained_on"]) == (True, 8)


def test_predictions_do_not_depend_on_the_other_bags(run_cli, tmp_path):
    """Bags added and bags left out change nothing for the others: training bags are predicted without context, new ones with it."""
    model, data = trained_with_context(tmp_path / "in")
    whole, new = people(), people(bags=3, seed=9)
    new |= {"id": [f"n{i}" for i in new["id"]], "precinct": [f"n{p}" for p in new["precinct"]]}
    part = [i for i, p in enumerate(whole["precinct"]) if p != "p3"]
    files = {
        "more": {k: whole[k] + new[k] for k in whole},
        "less": {k: [v[i] for i in part] for k, v in whole.items()},
        "new": new,
    }
    predicted = {"all": predict_yes(run_cli, tmp_path, model, data)[0]}
    for name, table in files.items():
        predicted[name], err = predict_yes(run_cli, tmp_path, model, make.write_csv(tmp_path / f"{name}.csv", table))
        assert ("trained on 8 of the 11 bags" in err) == (name == "more")
        assert ("trained on" in err) == (name != "new")
    assert predicted["more"] == predicted["all"] | predicted["new"]
    assert predicted["less"] == {i: p for i, p in predicted["all"].items() if i in predicted["less"]}
    assert predicted["new"] != predict_yes(run_cli, tmp_path, model, tmp_path / "new.csv", "--context", "off")[0]


def test_every_command_predicts_the_same(run_cli, tmp_path, monkeypatch):
    model, data = trained_with_context(tmp_path / "in")
    want, _ = predict_yes(run_cli, tmp_path, model, data)
    code, _, err = run_cli("audit", model, data, "--out", "s.csv", "--count", 48)
    assert (code, err.count("trained on")) == (0, 1)
    ids = {int(r["item"]): r["id"] for r in read_rows(tmp_path / "s.csv")}
    for item in json.loads((tmp_path / "s.key.json").read_text())["items"]:
        yes = float(want[ids[item["item"]]])
        assert item["p"] == pytest.approx(max(yes, 1 - yes), abs=1e-5)
    explained = []
    render = model_pages.render_explanation
    monkeypatch.setattr(
        model_pages,
        "render_explanation",
        lambda model, dataset, predictions, *rest: explained.append(predictions) or render(model, dataset, predictions, *rest),
    )
    code, _, err = run_cli("explain", model, data, "--out", "e.html")
    assert (code, err.count("trained on")) == (0, 1)
    dataset = FittedModel.load(model).read(data)
    ids = dataset.ids.column("id").take(dataset.rows).to_pylist()
    assert explained[0].instance_probabilities[:, 1] == pytest.approx([float(want[f"{int(i):03d}"]) for i in ids], abs=1e-5)
    assert "trained on" in run_cli("issues", data, "--model", model)[2]


def test_a_model_without_hashes_uses_context(run_cli, tmp_path):
    model, data = trained_with_context(tmp_path / "in")
    loaded = FittedModel.load(model)
    for metadata in ({}, {"data": "?"}, {"data": {"bag_hashes": 7}}, {"data": {"bag_hashes": "no hex"}}):
        loaded.replace(metadata=metadata).save(model, overwrite=True)
        assert not FittedModel.load(model).seen_in_training(loaded.read(data).to_bags(loaded.preprocessor)).any()
    predicted, err = predict_yes(run_cli, tmp_path, model, data)
    assert "trained on" not in err
    assert predicted == predict_yes(run_cli, tmp_path, model, data, "--context", "on")[0]


def test_predictions_that_contradict_the_shares_are_a_warning(run_cli, tmp_path, monkeypatch):
    model, data = trained_with_context(tmp_path / "in")
    assert "warning:" not in run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv")[2]
    loaded = FittedModel.load(model)
    estimate_shares = FittedModel.estimate_shares
    flipped = lambda *args, **options: tuple(t.flip(1) for t in estimate_shares(*args, **options))  # noqa: E731
    monkeypatch.setattr(FittedModel, "estimate_shares", flipped)
    loaded.replace(metadata={"method": {"name": "logistic", "baseline": True}}).save(model, overwrite=True)
    err = run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv")[2]
    apart = sum((float(r["share_yes"]) > 0.5) != (r["prediction"] == "yes") for r in read_rows(tmp_path / "b.csv"))
    assert apart
    assert f"in {apart} of the 8 bags the predicted label is not the class with the largest share" in err
    assert "the model is a baseline" in err
    assert "warning:" not in run_cli("predict", model, data, "--out", "p.csv")[2]  # of shares, and there are none


def test_a_class_that_never_wins_may_have_the_largest_share():
    bag, share = np.array([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]]), np.array([[0.3, 0.2, 0.5], [0.6, 0.3, 0.1]])
    predicted = Predictions(("a", "b", "c"), bag, bag, share, share, share, np.zeros(2, bool))
    assert contradicts_shares(predicted).tolist() == [True, True]
    assert contradicts_shares(predicted, (True, True, False)).tolist() == [False, True]


@pytest.mark.parametrize("kind", KINDS)
def test_bags_of_every_kind_are_recognised(kind, tmp_path):
    """In parts, as predict does; a bag without one of its instances is another."""
    model, data = trained_with_context(tmp_path, kind)
    loaded = FittedModel.load(model)
    bags = loaded.read(data).to_bags(loaded.preprocessor)
    assert all(bool(loaded.seen_in_training(bags.take([b])).all()) for b in range(len(bags)))
    first = int(bags.sizes[0])
    less = Bags.of(bags.pool, index=bags.index[1:first], sizes=[first - 1], labels=[0], classes=bags.classes)
    assert not loaded.seen_in_training(less).any()


def test_hashes_do_not_depend_on_the_float_type():
    x = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float16)
    wide, narrow = (
        Bags.of(Pool(a), sizes=[10] * 4, labels=[0, 1, 0, 1], classes=["a", "b"]) for a in (x, x.astype(np.float32))
    )
    assert bag_hashes(wide).tolist() == bag_hashes(narrow).tolist()
    assert len(set(bag_hashes(wide).tolist())) == 4
    swapped = x.copy()
    swapped[[0, 10]] = swapped[[10, 0]]  # the same instances, two of them in each other's bag
    other = bag_hashes(replace(wide, pool=Pool(swapped)))
    assert (other == bag_hashes(wide)).tolist() == [False, False, True, True]


def test_hashes_do_not_depend_on_the_chunks():
    x = np.random.default_rng(0).integers(0, 256, (30, 5, 5, 3), np.uint8)
    bags = Bags.of(Pool(x), sizes=[12, 18], labels=[0, 1], classes=["a", "b"])
    whole = bag_hashes(bags).tolist()
    assert bag_hashes(bags, chunk_words=40).tolist() == whole

"""Somebody's own table, told in other words than the model's: the same answers, or one line; and nobody's files are lost."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

import numpy as np
import pyarrow as pa
import pytest

import read_factory as make
from headcount.errors import HeadcountError
from headcount.estimators.majority_classifier import MajorityClassifier
from headcount.inference import evaluate
from headcount.inference.predict import predict_dataset
from headcount.readers import read
from headcount.readers.columns import ColumnRoles
from headcount.readers.preprocessing import Preprocessor
from headcount.selection.check import check
from headcount.selection.fit import fit
from model_factory import case, fitted, people, read_rows

# -- dates -----------------------------------------------------------------------------------------------------------------


def dated(write) -> dict:
    """The day tells the class."""
    table = people()
    days = [datetime(2023, 1, 1) + timedelta(days=3 * i + 200 * (t == "yes")) for i, t in enumerate(table["truth"])]
    return {**{k: v for k, v in table.items() if k not in ("height", "colour")}, "when": [write(d) for d in days]}


WRITTEN = {
    "days": lambda d: d.strftime("%Y-%m-%d"),
    "seconds": lambda d: d.strftime("%Y-%m-%d %H:%M:%S"),
    "parts of seconds": lambda d: d.strftime("%Y-%m-%d %H:%M:%S.%f"),
}


@pytest.mark.parametrize("fitting", WRITTEN)
def test_a_date_is_the_same_day_however_it_is_written(fitting, tmp_path):
    model = fitted(read(make.write_csv(tmp_path / "fit.csv", dated(WRITTEN[fitting])))).save(tmp_path / "m")
    from headcount.models.fitted import FittedModel

    again = FittedModel.load(model)
    said = {
        name: predict_dataset(again, again.read(make.write_csv(tmp_path / "d.csv", dated(write)))).instance_probabilities
        for name, write in WRITTEN.items()
    }
    for unit in ("s", "ms", "us", "ns"):
        days = pa.array(dated(lambda d: d)["when"], pa.timestamp(unit))
        said[unit] = predict_dataset(again, again.read(pa.table({**dated(str), "when": days}))).instance_probabilities
    assert len({said[fitting].argmax(1).sum(), 0, len(said[fitting])}) == 3, "both classes are said"
    for p in said.values():
        np.testing.assert_array_equal(p, said[fitting])


def test_dates_are_no_numbers_and_no_times_of_day(tmp_path):
    dates, numbers = dated(WRITTEN["days"]), {**dated(str), "when": list(range(0, 480, 10))}
    for fitting, asking, says in (
        (dates, numbers, "holds numbers, the model was fitted on dates"),
        (numbers, dates, "holds dates, the model was fitted on numbers"),
        (dates, {**dates, "when": ["12:30:00"] * 48}, "holds times of day, the model was fitted on dates"),
    ):
        model = fitted(read(make.write_csv(tmp_path / "fit.csv", fitting)))
        with pytest.raises(HeadcountError, match=rf"column .when. of .*d\.csv {says}"):
            model.read(make.write_csv(tmp_path / "d.csv", asking))


def test_a_preparation_says_what_its_clock_is(tmp_path):
    learned = read(make.write_csv(tmp_path / "fit.csv", dated(WRITTEN["days"]))).fit_preprocessor()
    said = json.loads(json.dumps(learned.to_json()))
    assert Preprocessor.from_parts(said) == learned
    (when,) = (f for f in said["fields"] if f["name"] == "when")
    assert when["time_kind"] == "dates"
    when["time_kind"] = "fortnights"
    with pytest.raises(HeadcountError, match="'fortnights'"):
        Preprocessor.from_parts(said)


# -- nobody's file is written over ------------------------------------------------------------------------------------------


def test_no_output_over_labels_or_into_the_data(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "images")
    labels = data / "labels.csv"
    before = labels.read_bytes()
    for words in (
        ("predict", model, data, "--out", labels),
        ("predict", model, data, "--labels", labels, "--out", "p.csv", "--bags", labels),
        ("issues", data, "--model", model, "--out", labels),
        ("audit", model, data, "--out", labels),
    ):
        code, _, err = run_cli(*words)
        assert (code, err.count("\n")) == (2, 1), err
        assert labels.read_bytes() == before
        assert not (tmp_path / "p.csv").exists()
    far = make.write_csv(tmp_path / "far.csv", {"bag": [f"bag{b}" for b in range(4)], "label": ["cat", "dog"] * 2})
    code, _, err = run_cli("predict", model, data, "--labels", far, "--out", "p.csv", "--bags", far)
    assert (code, err) == (2, f"headcount: --bags {far} would overwrite the labels; choose another path\n")
    assert run_cli("predict", model, data, "--out", data / "new.csv")[0] == 0, "a new file is nobody's"


# -- columns --------------------------------------------------------------------------------------------------------------


def test_a_group_that_is_one_is_none(tmp_path):
    reading = read(people(site=["Basel"] * 48))
    assert reading.bags.group is None
    assert "column 'site' has one value for all bags: not taken as the group" in reading.description
    assert "site" not in [f.name for f in reading.schema.fields]
    named = read(make.write_csv(tmp_path / "t.csv", people(site=["Basel"] * 48)), roles=_named(group="site"))
    assert named.bags.group == ("Basel",) * 8, "who names it means it"
    said = " ".join(fit(named, "logistic", folds=2).metadata["warnings"])
    assert "All bags are in one group ('Basel'), so none could be held out" in said
    assert "in one group ('Basel'): the training bags also chose the epoch" in said
    assert "too few" not in said
    assert check(named).reason.startswith("all bags are in one group")


def _named(**roles):
    from headcount.readers.columns import ColumnRoles

    return ColumnRoles(**roles)


def test_what_never_varies_is_not_learned_from():
    reading = read(people(year=[2024] * 48, place=["Ulm"] * 48))
    assert {f.name for f in reading.schema.fields} == {"height", "colour"}
    assert "not used: column 'year', it is the same in every row" in reading.description
    asked = read(people(year=[2024] * 48), _named(features=("height", "year")))
    assert {f.name for f in asked.schema.fields} == {"height", "year"}


def test_many_categories_are_said():
    towns = [f"town {i % 70}" for i in range(700)]
    reading = read(people(bags=100, size=7, town=towns), _named(categories=("town",)))
    assert any("column 'town' has 70 values: the 64 most frequent" in line for line in reading.description)


def test_a_model_asks_for_no_roles_it_has_no_use_for(run_cli, tmp_path):
    model, _ = case(tmp_path / "in", "table")
    own = {"text": ["a"] * 48, "image": ["b.png"] * 48, "patient": ["p"] * 48, "site": ["s"] * 48, "winner": ["x"] * 48}
    data = make.write_csv(tmp_path / "more.csv", people(**own, weight=[1.0] * 48))
    code, _, err = run_cli("predict", model, data, "--out", "p.csv")
    assert code == 0, err
    rows = read_rows(tmp_path / "p.csv")
    assert {*own, "weight", "precinct", "id"} <= {*rows[0]}
    run_cli("predict", model, tmp_path / "in" / "people.csv", "--out", "q.csv")
    assert [r["p_yes"] for r in rows] == [r["p_yes"] for r in read_rows(tmp_path / "q.csv")]


# -- labels and votes -------------------------------------------------------------------------------------------------------


def test_a_number_names_the_class_of_that_name():
    x = np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32)
    arrays = {"features": x, "sizes": [2] * 6}
    named = lambda labels, classes: read({**arrays, "labels": np.array(labels)}, classes=classes).bags  # noqa: E731
    assert named([1, 2, 1, 2, 1, 2], ["1", "2"]).label.tolist() == [0, 1] * 3
    with pytest.raises(HeadcountError, match=r"'0'.* is none of the classes 1, 2"):
        named([0, 1] * 3, ["1", "2"])
    assert named([0, 1, -1, 1, 0, 1], ["cat", "dog"]).label.tolist() == [0, 1, -1, 1, 0, 1]
    said = read({**arrays, "labels": np.array([0, 1] * 3)}, classes=["cat", "dog"]).description
    assert "labels are numbers: 0 is cat, 1 is dog, and so on" in said


def test_votes_are_foretold_by_their_winner(tmp_path):
    model, _ = case(tmp_path / "in", "table")
    from headcount.models.fitted import FittedModel

    again = FittedModel.load(model)
    table = people()
    votes = {"no": [4 if v == "no" else 2 for v in table["label"]], "yes": [4 if v == "yes" else 2 for v in table["label"]]}
    by_label = again.read(table)
    by_votes = again.read({**table, **votes}, _named(votes=("no", "yes")))
    said = predict_dataset(again, by_label)
    one, other = (evaluate.evaluate_bags(r.bags, said) for r in (by_label, by_votes))
    assert one["log_loss"] == pytest.approx(other["log_loss"])
    assert evaluate.evaluate_shares(by_votes.bags, said)["bags"] == 8
    half = again.read({**table, "yes": votes["yes"]}, _named(votes=("yes",)))
    assert "no column of votes for 'no': taken as none" in half.description


def test_two_classes_must_count():
    with pytest.raises(HeadcountError, match="of the classes no, yes only 'yes' is left to win a bag; two must count"):
        read(people(), uncounted=["no"])


# -- options that would do nothing --------------------------------------------------------------------------------------------


def test_options_without_use_are_refused(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    for words, says in (
        (("check", data, "--side", 12), "--side 12 is for images"),
        (("check", data, "--tile", 12), "--tile 12 is for coordinates"),
        (("issues", data, "--model", model, "--features", "height"), "--features has no effect with --model"),
        (("issues", data, "--model", model, "--folds", 9), "--folds has no effect with --model"),
        (("issues", data, "--model", model, "--seed", 0), "--seed has no effect with --model"),
        (("fit", data, "--out", "m", "--method", "auto,tilt"), "auto chooses by itself"),
    ):
        code, _, err = run_cli(*words)
        assert code == 2
        assert says in err.splitlines()[-1]


def test_labels_of_listed_bags_are_counted_by_bags():
    bags = [np.random.default_rng(b).normal(size=(4, 3)) for b in range(6)]
    with pytest.raises(HeadcountError, match="5 labels for 6 bags; give one per bag"):
        MajorityClassifier().fit(bags, [0, 1, 0, 1, 0])


def test_the_next_command_can_be_pasted(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    there = (tmp_path / "my data.csv", tmp_path / "my sheet.csv")
    there[0].write_bytes(data.read_bytes())
    code, _, err = run_cli("audit", model, there[0], "--out", there[1], "--count", 4)
    assert code == 0, err
    assert f"headcount evaluate {model} '{there[0]}' --audit '{there[1]}'" in err


def test_names_with_commas_can_be_named(run_cli, tmp_path):
    table = people()
    won = dict(zip(table["precinct"], table.pop("label"), strict=True))
    votes = {"precinct": [*won], **{c: [1 + (w == k) for w in won.values()] for c, k in (("no", "no"), ("yes, but", "yes"))}}
    data, labels = make.write_csv(tmp_path / "d.csv", table), make.write_csv(tmp_path / "v.csv", votes)
    said = ("--labels", labels, "--votes", 'no, "yes, but"')
    code, out, err = run_cli("check", data, *said, "--truth", "truth", "--uncounted", "yes", "--json")
    assert code == 0, err
    assert set(json.loads(out)["shares"]["classes"]) == {"no", "yes, but", "yes"}
    model = fitted(read(data, ColumnRoles(votes=("no", "yes, but")), labels=labels, uncounted=["yes"])).save(tmp_path / "m")
    code, _, err = run_cli("audit", model, data, *said, "--out", "sheet.csv", "--count", 4)
    assert code == 0, err
    assert """--votes 'no, "yes, but"'""" in err

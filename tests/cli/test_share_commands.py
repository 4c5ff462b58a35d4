"""``headcount table`` and ``calibrate``: what they print, the files they write, and what they refuse."""

from __future__ import annotations

import json
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

import read_factory as make
from headcount.models.fitted import FittedModel
from headcount.readers import read
from model_factory import case, fitted, people, read_rows


def square(name, i):
    ring = [[i, 0], [i + 1, 0], [i + 1, 1], [i, 0]]
    return {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"PRECINCT": name, "county": "c"},
    }


@pytest.fixture
def data(tmp_path):
    """(model, data): eight precincts of six people, with an area that is no feature."""
    table = people(area=[("north", "south")[i % 2] for i in range(48)])
    (tmp_path / "in").mkdir()
    path = make.write_csv(tmp_path / "in" / "people.csv", table)
    return fitted(read({k: v for k, v in table.items() if k != "area"})).save(tmp_path / "in" / "model"), path


def test_the_table_is_printed_and_written(run_cli, data, tmp_path):
    squares = [square(f"p{b}", b) for b in range(8)] + [
        square("elsewhere", 9),
        {"type": "Feature", "geometry": None, "properties": None},
    ]
    (tmp_path / "squares.geojson").write_text(json.dumps({"type": "FeatureCollection", "crs": {"x": 1}, "features": squares}))
    files = "--out t.csv --bags b.parquet --page p.html --map m.geojson --polygons squares.geojson --polygon-id PRECINCT"
    code, out, err = run_cli("table", *data, "--by", "colour,area", *files.split())
    assert code == 0, err
    rows = read_rows(tmp_path / "t.csv")
    groups = list(dict.fromkeys(row["group"] for row in rows))
    assert groups == ["all", *(f"{c}, {a}" for c in ("green", "red") for a in ("north", "south"))]
    assert sum(int(row["instances"]) for row in rows if row["choice"] == "yes") == 96
    for row in rows:
        ends = [float(row[name]) for name in ("bound_low", "low", "share", "high", "bound_high")]
        assert ends == sorted(ends)
        assert f"{ends[2]:.3f}" in out
    bags = pq.read_table(tmp_path / "b.parquet").to_pylist()
    assert {row["bag"] for row in bags} == {f"p{b}" for b in range(8)}
    shapes = json.loads((tmp_path / "m.geojson").read_text())
    assert shapes["crs"] == {"x": 1}
    own = {row["bag"]: row["share"] for row in bags if row["group"] == "all" and row["choice"] == "yes"}
    for feature in shapes["features"][:8]:
        properties = feature["properties"]
        assert properties["county"] == "c"
        assert properties["label"] == ("no", "yes")[int(properties["bag"][1:]) % 2]
        assert properties["share_yes"] == pytest.approx(own[properties["bag"]], abs=1e-6)
    assert shapes["features"][8:] == squares[8:]
    assert "8 features of m.geojson have shares, of 8 bags" in err
    page = (tmp_path / "p.html").read_text()
    assert page.count('class="plot"') == 2  # a figure for each class
    assert page.count("<title>green, north: ") == 2
    assert "by colour and area" in page
    assert "merge it with another group" in err
    assert re.search(r"all +no +0\.\d{3}", out)


def test_a_map_of_points_and_shares_of_counted_classes(run_cli, tmp_path):
    table = people(lon=[float(i % 6) for i in range(48)], lat=[1.0] * 48)
    path = make.write_csv(tmp_path / "people.csv", table)
    options = {"classes": ("no", "yes", "neither"), "uncounted": ("neither",)}
    dataset = read({k: v for k, v in table.items() if k not in ("lon", "lat")}, **options)
    model = fitted(dataset, counted=(True, True, False)).save(tmp_path / "model")
    code, out, err = run_cli("table", model, path, "--x", "lon", "--y", "lat", "--map", "m.geojson", "--of", "counted")
    assert code == 0, err
    assert "neither" not in out
    features = json.loads((tmp_path / "m.geojson").read_text())["features"]
    assert len(features) == 8
    assert features[0]["geometry"]["type"] == "Point"
    assert features[0]["geometry"]["coordinates"][1] == 1.0
    assert "neither" in run_cli("table", model, path)[1]


@pytest.mark.parametrize(
    ("words", "what", "advice"),
    [
        ("--by race", "no column 'race' to group by", "there are"),
        ("--of voters", "no of 'voters'", "all, counted"),
        ("--level 2", "level of an interval", "0.95"),
        ("--out t.xlsx", "--out writes a table", ".csv"),
        ("--page p.pdf", "--page writes .html", "p.pdf"),
        ("--map m.png", "--map writes .geojson", "m.png"),
        ("--map m.geojson", "--map without --polygons needs coordinates", "--x"),
        ("--polygons p.geojson", "are for --map", "--map FILE.geojson"),
        ("--map m.geojson --polygons p.geojson", "cannot read p.geojson", "FeatureCollection"),
        ("--map m.geojson --polygons other.geojson", "'precinct' names 'x', and the bags are", "--polygon-id"),
        ("--map m.geojson --polygons wrong.geojson", "features[0].type", "FeatureCollection"),
        ("--map other.geojson --polygons other.geojson", "would overwrite", "choose another path"),
        ("--out in/people.csv", "would overwrite the data", "choose another path"),
    ],
)
def test_what_is_wrong_is_one_line(run_cli, data, tmp_path, words, what, advice):
    (tmp_path / "other.geojson").write_text(
        '{"type": "FeatureCollection", "features": [{"type": "Feature", "properties": {"precinct": "x"}}]}'
    )
    (tmp_path / "wrong.geojson").write_text('{"type": "FeatureCollection", "features": [{"type": 3}]}')
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run_cli("table", *data, *words.split())
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert what in last
    assert advice in last
    assert sorted(tmp_path.rglob("*")) == before


def test_a_private_model_tabulates_no_small_group(run_cli, tmp_path):
    table = people(area=["north"] * 20 + ["south"] * 20 + ["east"] * 5 + ["west"] * 3)
    path = make.write_csv(tmp_path / "people.csv", table)
    model = fitted(read({k: v for k, v in table.items() if k != "area"}))
    folder = model.replace(metadata={**model.metadata, "min_bag_size": 6}).save(tmp_path / "model")
    code, _, err = run_cli("table", folder, path, "--by", "area", "--out", "t.csv", "--bags", "b.csv")
    assert code == 0, err
    assert "2 of 4 groups are left out: fewer than 6 instances" in err
    assert [row["group"] for row in read_rows(tmp_path / "t.csv")[::2]] == ["all", "north", "south"]
    assert {row["group"] for row in read_rows(tmp_path / "b.csv")} == {"all"}


# -- calibrate --------------------------------------------------------------------------------------------------------------


def test_calibrated_intervals_from_votes_or_truth(run_cli, tmp_path):
    model, _ = case(tmp_path / "in", "table")
    data = make.write_csv(tmp_path / "new.csv", people(bags=40, seed=3))
    code, _, err = run_cli("calibrate", model, data, "--truth", "truth", "--out", "calibrated")
    assert code == 0, err
    assert "for bags drawn at random like the 40 whose shares are known" in err
    calibrated = FittedModel.load(tmp_path / "calibrated")
    assert calibrated.share_calibration is not None
    assert len(calibrated.share_calibration.scores) == 27  # 13 correct the estimate
    assert "## Intervals of shares" in (tmp_path / "calibrated" / "MODEL_CARD.md").read_text()
    plain, wider = (m.predict(m.read(data)) for m in (FittedModel.load(model), calibrated))
    np.testing.assert_array_equal(plain.instance_probabilities, wider.instance_probabilities)
    table = people(bags=40, seed=3)
    yes = {
        b: np.mean([t == "yes" for t, p in zip(table["truth"], table["precinct"], strict=True) if p == b])
        for b in set(table["precinct"])
    }
    names = calibrated.read(data).bags.names
    inside = [wider.shares_low[i, 1] - 1e-6 <= yes[b] <= wider.shares_high[i, 1] + 1e-6 for i, b in enumerate(names)]
    assert np.mean(inside) >= 0.85
    votes = {
        "precinct": list(yes),
        "no": [round(6 * (1 - s)) for s in yes.values()],
        "yes": [round(6 * s) for s in yes.values()],
    }
    words = ("--labels", make.write_csv(tmp_path / "votes.csv", votes), "--votes", "no,yes", "--bag", "precinct")
    blind = {k: v for k, v in table.items() if k not in ("label", "truth")}
    code, _, err = run_cli("calibrate", model, make.write_csv(tmp_path / "blind.csv", blind), *words, "--out", "again")
    assert code == 0, err
    again = FittedModel.load(tmp_path / "again").share_calibration
    np.testing.assert_allclose(sum(again.scores, ()), sum(calibrated.share_calibration.scores, ()), atol=1e-4)
    code, _, err = run_cli("calibrate", "calibrated", data, "--truth", "truth", "--out", "calibrated", "--overwrite")
    assert code == 0, err
    assert FittedModel.load(tmp_path / "calibrated").share_calibration == calibrated.share_calibration  # not one upon the other
    assert (tmp_path / "calibrated" / "MODEL_CARD.md").read_text().count("## Intervals of shares") == 1


def test_too_little_to_calibrate_by(run_cli, tmp_path):
    model, _ = case(tmp_path / "in", "table")
    few = make.write_csv(tmp_path / "few.csv", people(bags=8, seed=3))
    code, _, err = run_cli("calibrate", model, few, "--truth", "truth", "--out", "out")
    assert code == 2
    assert "the shares of 8 bags are known, and a 90% interval needs at least 9" in err
    unknown = make.write_csv(tmp_path / "unknown.csv", {k: v for k, v in people(bags=20).items() if k != "truth"})
    code, _, err = run_cli("calibrate", model, unknown, "--out", "out")
    assert code == 2
    assert "no bag's shares are known; give --votes with counts, or --truth" in err
    assert not (tmp_path / "out").exists()


def test_labels_that_were_noised_in_the_fit_prove_nothing(run_cli, data):
    model, path = data
    folder = FittedModel.load(model).replace(metadata={"data": {"label_noise": 0.3}}).save(model.with_name("noised"))
    code, out, err = run_cli("table", folder, path)
    assert code == 0, err
    assert out.count("0.000 to 1.000") == 2
    assert "0.000 to 1.000" not in run_cli("table", model, path)[1]

"""`headcount predict` as a user types it: every input row comes back once, in order, with its own ids, or nothing does."""

from __future__ import annotations

import decimal
import errno
import json
import os
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
from PIL import Image

import read_factory as make
from headcount.inference import predict
from headcount.models.fitted import FittedModel
from headcount.readers import read
from headcount.readers.columns import ColumnRoles
from headcount.reporting import export, geo
from model_factory import KINDS, case, file_names_in, fitted, people, read_rows

# -- rows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_comes_back_row_by_row(kind, run_cli, tmp_path):
    model, data = case(tmp_path / "in", kind)
    code, out, err = run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv")
    assert (code, out) == (0, ""), err
    loaded = FittedModel.load(model)
    dataset = loaded.read(data)
    want = loaded.predict(dataset.to_bags(loaded.preprocessor))
    rows = read_rows(tmp_path / "p.csv")
    assert len(rows) == dataset.n_rows == len(dataset.rows)
    for name in dataset.ids.column_names:
        assert [r[name] for r in rows] == [_shown(v) for v in dataset.ids.column(name).to_pylist()]
    p = np.array([[float(r[f"p_{c}"]) for c in loaded.classes] for r in rows])
    assert np.abs(p[dataset.rows] - want.instance_probabilities).max() < 1e-5
    assert [r["prediction"] for r in rows] == [loaded.classes[k] for k in p.argmax(1)]
    names = np.array(dataset.bags.names)
    assert np.array([r["bag"] for r in rows])[dataset.rows].tolist() == names[dataset.bags.bag].tolist()
    bags = read_rows(tmp_path / "b.csv")
    assert [b["bag"] for b in bags] == names.tolist()
    for b, row in enumerate(bags):
        here = dataset.bags.bag.numpy() == b
        for k, c in enumerate(loaded.classes):
            assert float(row[f"share_{c}"]) == pytest.approx(float(want.instance_probabilities[here, k].mean()), abs=1e-5)
            assert float(row[f"low_{c}"]) <= float(row[f"share_{c}"]) <= float(row[f"high_{c}"])
            assert float(row[f"p_majority_{c}"]) == pytest.approx(float(want.bag_probabilities[b, k]), abs=1e-5)
        assert row["prediction"] == loaded.classes[int(want.bag_prediction[b])]


def _shown(v: object) -> str:
    return f"{v:g}" if isinstance(v, float) else str(v)


def test_rows_keep_their_order(run_cli, tmp_path):
    """Ids that belong to the rows, a table in no order of bags: predictions join back to the right row."""
    model, data = case(tmp_path / "in", "table")
    assert run_cli("predict", model, data, "--out", "p.csv")[0] == 0
    predicted, table = read_rows(tmp_path / "p.csv"), read_rows(data)
    assert [r["id"] for r in predicted] == [r["id"] for r in table]
    assert [r["precinct"] for r in predicted] == [r["precinct"] for r in table] != sorted(r["precinct"] for r in table)
    tall = [float(r["height"]) > 170 for r in table]
    assert np.mean([t == (r["prediction"] == "yes") for t, r in zip(tall, predicted, strict=True)]) > 0.9


def test_the_context_of_a_bag(run_cli, tmp_path):
    """Context changes predictions; --context off predicts each instance by itself; shares are the same in both."""
    model, data = case(tmp_path / "in", "table")
    loaded = FittedModel.load(model)
    loaded.replace(concentration=2.0, use_context=True).save(model, overwrite=True)
    for how in ("auto", "on", "off"):
        more = ("--out", f"{how}.csv", "--bags", f"{how}-bags.csv", "--context", how)
        assert run_cli("predict", model, data, *more)[0] == 0
    p = {how: [float(r["p_yes"]) for r in read_rows(tmp_path / f"{how}.csv")] for how in ("auto", "on", "off")}
    assert p["auto"] == p["on"] != p["off"]
    bags = {how: (tmp_path / f"{how}-bags.csv").read_text() for how in ("on", "off")}
    assert bags["on"] == bags["off"]
    scores = [json.loads(run_cli("evaluate", model, data, "--json", "--context", how)[1]) for how in ("on", "off")]
    assert scores[0]["instances"] != scores[1]["instances"]
    assert scores[0]["bags"] == scores[1]["bags"]
    loaded.replace(concentration=2.0, use_context=False).save(model, overwrite=True)
    assert run_cli("predict", model, data, "--out", "again.csv")[0] == 0
    assert (tmp_path / "again.csv").read_text() == (tmp_path / "off.csv").read_text()


def test_a_tie_is_written_as_one(run_cli, tmp_path):
    model, _ = case(tmp_path / "in", "table")
    table = people()
    table["label"] = ["no|yes" if p == "p0" else v for p, v in zip(table["precinct"], table["label"], strict=True)]
    data = make.write_csv(tmp_path / "tie.csv", table)
    assert run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv")[0] == 0
    assert {r["bag"]: r["label"] for r in read_rows(tmp_path / "b.csv")}["p0"] == "no|yes"
    assert run_cli("issues", data, "--model", model, "--out", "i.csv")[0] == 0
    assert {r["bag"]: r["label"] for r in read_rows(tmp_path / "i.csv")}["p0"] == "no|yes"


@pytest.mark.parametrize("ending", ["csv", "tsv", "parquet"])
def test_all_formats_have_the_same_predictions(ending, run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    assert run_cli("predict", model, data, "--out", f"p.{ending}")[0] == 0
    assert run_cli("predict", model, data, "--out", "plain.csv")[0] == 0
    sign = "\t" if ending == "tsv" else ","
    path = tmp_path / f"p.{ending}"
    table = (
        pq.read_table(path) if ending == "parquet" else pacsv.read_csv(path, parse_options=pacsv.ParseOptions(delimiter=sign))
    )
    want = pacsv.read_csv(tmp_path / "plain.csv")
    assert table.column_names == want.column_names
    assert np.allclose(table["p_yes"].to_numpy(), want["p_yes"].to_numpy())
    assert table["prediction"].to_pylist() == want["prediction"].to_pylist()
    if ending == "parquet":
        assert table["id"].to_pylist()[:2] == ["000", "001"]


@pytest.mark.parametrize("how", ["p.h5", "folder"])
def test_hdf5_per_bag(how, run_cli, tmp_path):
    model, data = case(tmp_path / "in", "slides")
    code, _, err = run_cli("predict", model, data, "--out", how)
    assert code == 0, err
    dataset = read(data)
    loaded = FittedModel.load(model)
    p = loaded.predict(dataset.to_bags()).instance_probabilities
    for b, name in enumerate(dataset.bags.names):
        here = dataset.bags.bag.numpy() == b
        file = h5py.File(tmp_path / how / f"{name}.h5") if how == "folder" else h5py.File(tmp_path / how)[name]
        assert np.allclose(file["p"][()], p[here], atol=1e-6)
        assert file["prediction"][()].tolist() == p[here].argmax(1).tolist()
        assert np.array_equal(file["coords"][()], dataset.coords[here])
        assert file["coords"].attrs["patch_size_level0"] == dataset.tile_sizes[here][0]
        assert file["row"][()].tolist() == dataset.rows[here].tolist()
        assert (file.attrs["bag"], list(file.attrs["classes"])) == (name, list(loaded.classes))


def test_skipped_rows_are_there_and_listed(run_cli, tmp_path):
    table = people()
    table["precinct"][5] = ""
    table["height"][9] = "inf"
    good = make.write_csv(tmp_path / "good.csv", people())
    bad = make.write_csv(tmp_path / "bad.csv", table)
    model = fitted(read(good)).save(tmp_path / "model")
    code, _, err = run_cli("predict", model, bad, "--out", "p.csv")
    assert (code, err.count("\n")) == (2, 1)
    assert not (tmp_path / "p.csv").exists()
    code, _, err = run_cli("predict", model, bad, "--out", "p.csv", "--skip-bad")
    assert code == 0
    assert "skipped: " in err
    assert "row 6" in err
    rows = read_rows(tmp_path / "p.csv")
    assert len(rows) == 48
    blank = [i for i, r in enumerate(rows) if not r["prediction"]]
    assert 5 in blank
    assert len(blank) == err.count("skipped: ")
    assert all(rows[i]["p_yes"] == rows[i]["p_no"] == "" for i in blank)
    assert [r["id"] for r in rows] == table["id"]


def test_skipped_rows_have_no_prediction_in_hdf5(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "slides")
    with h5py.File(data / "TCGA.2.h5", "r+") as f:
        f["features"][1, 0] = np.nan
    code, _, err = run_cli("predict", model, data, "--out", "folder", "--skip-bad")
    assert code == 0, err
    with h5py.File(tmp_path / "folder" / "TCGA.2.h5") as f:
        assert f["prediction"][1] == -1
        assert np.isnan(f["p"][1]).all()
        assert (f["prediction"][()] >= 0).sum() == 5
        assert len(f["row"]) == 6


def test_shards_and_chunks_do_not_change_predictions(run_cli, tmp_path, monkeypatch):
    """Data larger than memory go through in parts: small ones here, and answers loaded on disk."""
    model, data = case(tmp_path / "in", "table")
    run_cli("predict", model, data, "--out", "whole.csv", "--bags", "whole_b.csv")
    monkeypatch.setattr(predict, "SHARD_INSTANCES", 7)
    monkeypatch.setattr(predict, "MEMORY_BYTES", 0)
    monkeypatch.setattr(export.prediction_chunks, "__defaults__", (5,))
    assert run_cli("predict", model, data, "--out", "parts.csv", "--bags", "parts_b.csv")[0] == 0
    for a, b in (("whole.csv", "parts.csv"), ("whole_b.csv", "parts_b.csv")):
        assert (tmp_path / a).read_text() == (tmp_path / b).read_text()
    assert file_names_in(tmp_path) == {"in", "whole.csv", "whole_b.csv", "parts.csv", "parts_b.csv"}


def test_columns_of_the_same_name_are_renamed_and_reported(run_cli, tmp_path):
    more = {"prediction": ["mine"] * 48, "p_yes": ["7"] * 48}
    model, _ = case(tmp_path / "in", "table")
    data = make.write_csv(tmp_path / "own.csv", people(**more))
    code, _, err = run_cli("predict", model, data, "--out", "p.csv")
    assert code == 0
    assert "column 'prediction'" in err
    rows = read_rows(tmp_path / "p.csv")
    assert {r["prediction"] for r in rows} == {"mine"}
    assert {r["headcount_prediction"] for r in rows} == {"yes", "no"}
    assert all(0 <= float(r["headcount_p_yes"]) <= 1 for r in rows)
    both = make.write_csv(tmp_path / "both.csv", people(**more, headcount_bag=["x"] * 48))
    code, _, err = run_cli("predict", model, both, "--out", "q.csv")
    assert (code, err.splitlines()[-1][:10]) == (2, "headcount:")
    assert not (tmp_path / "q.csv").exists()


@pytest.mark.parametrize("ending", ["csv", "parquet"])
@pytest.mark.parametrize("odd", ["list", "bytes", "decimal", "duration", "struct", "date", "null", "category"])
def test_columns_of_unusual_types_are_kept_or_refused(odd, ending, run_cli, tmp_path):
    """In Parquet all come back as they were; a CSV that cannot hold them is refused in one line."""
    value = {
        "list": pa.array([[1, 2]] * 48), "bytes": pa.array([b"x"] * 48),
        "decimal": pa.array([decimal.Decimal("1.50")] * 48), "duration": pa.array([7] * 48, pa.duration("s")),
        "struct": pa.array([{"a": 1}] * 48), "date": pa.array([3] * 48, pa.date32()), "null": pa.nulls(48),
        "category": pa.array(["u", "v"] * 24).dictionary_encode(),
    }[odd]  # fmt: skip
    model, _ = case(tmp_path / "in", "table")
    pq.write_table(pa.table({**people(), "odd": value}), tmp_path / "odd.parquet")
    code, _, err = run_cli("predict", model, "odd.parquet", "--out", f"p.{ending}")
    if code:
        assert (code, ending) == (2, "csv")
        assert "write .parquet instead" in err.splitlines()[-1]
        assert file_names_in(tmp_path) == {"in", "odd.parquet"}
    elif ending == "parquet":
        assert pq.read_table(tmp_path / "p.parquet")["odd"].to_pylist() == value.to_pylist()
    else:
        assert odd in ("decimal", "duration", "date", "null", "category")
        assert len(read_rows(tmp_path / "p.csv")) == 48


# -- places -----------------------------------------------------------------------------------------------------------------


def test_geojson_as_qupath_reads_it(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "slides")
    code, _, err = run_cli("predict", model, data, "--out", "p.csv", "--geojson", "geo", "--heatmap", "heat")
    assert code == 0, err
    dataset = read(data)
    rows = read_rows(tmp_path / "p.csv")
    assert file_names_in(tmp_path / "geo") == {f"{n}.geojson" for n in dataset.bags.names}
    for b, name in enumerate(dataset.bags.names):
        here = np.flatnonzero(dataset.bags.bag.numpy() == b)
        body = json.loads((tmp_path / "geo" / f"{name}.geojson").read_text())
        assert body["type"] == "FeatureCollection"
        assert len(body["features"]) == len(here)
        for i, feature in zip(here, body["features"], strict=True):
            (ring,) = feature["geometry"]["coordinates"]
            x, y, side = *dataset.coords[i], dataset.tile_sizes[i]
            assert ring == [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]
            own = feature["properties"]
            assert own["objectType"] == "tile"
            assert own["classification"]["name"] == rows[dataset.rows[i]]["prediction"]
            assert len(own["classification"]["color"]) == 3
            assert set(own["measurements"]) == {"p_normal", "p_tumour"}
    for name in dataset.bags.names:
        with Image.open(tmp_path / "heat" / f"{name}.png") as picture:
            assert picture.format == "PNG"
            assert min(picture.size) > 100


def test_tiles_in_degrees(run_cli, tmp_path):
    """A side was a whole number: pixels of a hundredth of a degree became squares of one degree, each over all others."""
    step = {"lon": [10 + 0.01 * (k % 6) for k in range(48)], "lat": [50 + 0.01 * (k // 6) for k in range(48)]}
    data = make.write_csv(tmp_path / "people.csv", {**people(shuffle=False), **step})
    model = fitted(read(data, ColumnRoles(x="lon", y="lat"))).save(tmp_path / "model")
    code, _, err = run_cli("predict", model, data, "--tile", 0.01, "--out", "p.csv", "--geojson", "geo", "--heatmap", "heat")
    assert code == 0, err
    assert "imshow" not in err
    body = json.loads(next((tmp_path / "geo").iterdir()).read_text())
    for feature in body["features"]:
        (ring,) = feature["geometry"]["coordinates"]
        assert ring[2][0] - ring[0][0] == pytest.approx(0.01)
        assert ring[2][1] - ring[0][1] == pytest.approx(0.01)


def test_a_heat_map_puts_colours_where_tiles_are():
    xy = np.array([[0, 0], [256, 0], [0, 512]], float)
    p = np.array([[0.9, 0.1], [0.2, 0.8], [1.0, 0.0]])
    paint = np.array([[1.0, 0, 0], [0, 0, 1.0]])
    for tile in (np.full(3, 256.0), np.full(3, np.nan)):
        image, extent = geo.rasterize(xy, tile, p, paint)
        assert image.shape == (3, 2, 4)
        assert extent == (0, 512, 768, 0)
        assert image[0, 0, :3].tolist() == image[2, 0, :3].tolist() == [1, 0, 0]
        assert image[0, 1, :3].tolist() == [0, 0, 1]
        assert image[1].sum() == image[2, 1].sum() == 0
        assert image[2, 0, 3] > image[0, 0, 3] > image[0, 1, 3] > 0
    over = np.array([[1.0000001, 0], [0, 1], [1, 0]], np.float32)  # as sums of float32 come out
    assert geo.rasterize(xy, np.full(3, 256.0), over, paint)[0].max() == 1
    huge = np.stack([np.arange(5000) * 256.0, np.zeros(5000)], 1)
    assert max(geo.rasterize(huge, np.full(5000, 256.0), np.tile(p[:1], (5000, 1)), paint)[0].shape) <= 1201


@pytest.mark.parametrize("name", ["../../evil", "a/b", "..", ".hidden", "x" * 400, "CON\x00", "ä/ö", " "])
def test_bag_names_never_leave_the_folder(name, tmp_path):
    (made,) = export.unique_file_names([name], ".png")
    assert Path(made).name == made
    assert not made.startswith(".")
    (tmp_path / made).write_text("x")
    assert file_names_in(tmp_path) == {made}


def test_bag_names_never_collide():
    made = export.unique_file_names(["a/b", "a:b", "A_B", "a_b"], ".h5")
    assert len({m.casefold() for m in made}) == 4


# -- what goes wrong --------------------------------------------------------------------------------------------------------

WRONG = [
    ("predict nowhere DATA --out p.csv", "nowhere", "model.json is missing"),
    ("predict MODEL nowhere.csv --out p.csv", "no file or folder nowhere.csv"),
    ("predict MODEL DATA", "nothing to write", "--out", "--bags"),
    ("predict MODEL DATA --out p.csv --baggs x.csv", "No such option", "--bags"),
    ("predict MODEL DATA --out p.xlsx", "p.xlsx ends in .xlsx", ".csv"),
    ("predict MODEL DATA --out p.csv --bags b.txt", "--bags writes a table", "b.txt"),
    ("predict MODEL DATA --out DATA", "overwrite the data"),
    ("predict MODEL DATA --out MODEL", "overwrite the model"),
    ("predict MODEL DATA --out MODEL/p.csv", "overwrite the model"),
    ("predict MODEL DATA --out p.csv --bags p.csv", "overwrite --out"),
    ("predict MODEL DATA --out p.csv --context often", "no context 'often'; there are auto, on, off"),
    ("predict MODEL DATA --out p.csv --context on", "too few bags to use a bag as context"),
    ("evaluate MODEL DATA --context of", "no context 'of'", "did you mean 'off'"),
    ("predict MODEL DATA --out p.csv --device gpu", "no device 'gpu'"),
    ("predict MODEL DATA --out folder.csv", "folder.csv is a folder"),
    # there is no model: places are looked at before anything else
    ("predict nowhere DATA --out file/p.csv", "--out file/p.csv: file is a file that stands where a folder is wanted"),
    ("predict nowhere DATA --out p.csv --bags file/b.csv", "--bags file/b.csv: file is a file"),
    ("predict nowhere DATA --out p.csv --bags file/new/b.csv", "--bags file/new/b.csv: file is a file"),
    ("predict nowhere DATA --out p.csv --geojson full", "--geojson full is there already"),
    ("predict nowhere DATA --out p.csv --heatmap file", "--heatmap file is a file that stands where a folder is wanted"),
    ("predict nowhere DATA --out file", "--out file is a file that stands where a folder is wanted"),
    ("predict nowhere DATA --out full", "--out full is there already"),
    ("explain nowhere DATA --out file/e.html", "--out file/e.html: file is a file"),
    ("issues nowhere.csv --out file/i.csv", "--out file/i.csv: file is a file"),
    ("audit nowhere DATA --out DATA", "is there already; choose another name"),
    ("audit nowhere DATA --out file/s.csv", "--out file/s.csv: file is a file"),
    ("fit nowhere.csv --out file/sub", "--out file/sub: file is a file"),
    ("predict MODEL DATA --out p.csv --bag street", "no column 'street'"),
    ("predict MODEL columns.csv --out p.csv", "columns.csv lacks 'height'"),
    ("predict MODEL empty.csv --out p.csv", "empty.csv has a header and no rows"),
    ("predict MODEL nan.csv --out p.csv", "nan.csv"),
    ("predict MODEL DATA --out p.csv --geojson g", "--geojson needs coordinates"),
    ("predict MODEL DATA --out p.csv --heatmap g", "--heatmap needs coordinates"),
    ("predict MODEL xy.csv --out p.csv --geojson g", "needs the side of the tiles", "--tile"),
    ("predict MODEL DATA --out p.csv --tile 0", "tile is a number from"),
    ("predict MODEL DATA --out p.csv --tile nan", "tile is a number from"),
    ("evaluate MODEL other.csv", "'perhaps'", "none of the classes no, yes"),
    ("evaluate MODEL DATA --level 1.5", "level of an interval"),
    ("evaluate MODEL DATA --key k.json", "--key belongs to a sheet"),
    ("evaluate MODEL DATA --audit nowhere.csv", "cannot read nowhere.key.json"),
    ("explain MODEL DATA --out page.txt", "the page is an .html file"),
    ("explain MODEL DATA --out page.html --bag p11", "no bag 'p11' among 8", "did you mean"),
    ("explain MODEL DATA", "Missing option '--out'"),
    ("issues DATA --out x.json", "--out writes a table"),
    ("issues DATA --known nowhere", "no column 'nowhere'"),
    ("fit DATA --out new --method logistic --head count", "both given"),
    ("fit DATA --out . --bag precinct --label label", "is not empty and holds no model"),
    ("issues DATA --folds 1", "Invalid value for '--folds'"),
    ("issues DATA --folds 20", "20 folds need as many groups"),
    ("issues unlabelled.csv", "no label column"),
    ("issues nowhere.csv", "no file or folder nowhere.csv"),
    ("audit MODEL DATA --out sheet.xlsx", "sheet.xlsx ends in .xlsx"),
    ("audit MODEL DATA --out s.csv --count 1", "Invalid value for '--count'"),
    ("audit MODEL DATA --out full", "full is there already"),
    ("export MODEL --onnx m.pt", "the file is an .onnx"),
    ("export nowhere --onnx m.onnx", "model.json is missing"),
    ("export MODEL", "Missing option '--onnx'"),
]


@pytest.fixture(scope="module")
def shelf(tmp_path_factory):
    root = tmp_path_factory.mktemp("shelf")
    model, data = case(root, "table")
    table = people()
    make.write_csv(root / "columns.csv", {k: v for k, v in table.items() if k != "height"})
    make.write_csv(root / "unlabelled.csv", {k: v for k, v in table.items() if k != "label"})
    make.write_csv(root / "other.csv", {**table, "label": ["perhaps" if v == "yes" else v for v in table["label"]]})
    make.write_csv(root / "empty.csv", {k: [] for k in table})
    make.write_csv(root / "nan.csv", {**table, "precinct": ["", *table["precinct"][1:]]})
    make.write_csv(root / "xy.csv", {**table, "x": [1] * 48, "y": [2] * 48})
    (root / "folder.csv").mkdir()
    (root / "full").mkdir()
    (root / "full" / "mine").write_text("x")
    (root / "file").write_text("x")
    return root, model, data


@pytest.mark.parametrize("case_", WRONG, ids=lambda c: c[0])
def test_wrong_input_is_one_line_and_leaves_nothing(case_, shelf, run_cli, monkeypatch):
    root, model, data = shelf
    line, *words = case_
    before = {p: p.stat().st_mtime_ns for p in root.rglob("*")}
    monkeypatch.chdir(root)
    filled = [w.replace("MODEL", str(model)).replace("DATA", str(data)) for w in line.split()]
    code, _, err = run_cli(*filled)
    last = err.splitlines()[-1]
    assert code == 2, err
    assert last.startswith("headcount: ")
    assert "Traceback" not in err
    for word in words:
        assert word in last
    assert {p: p.stat().st_mtime_ns for p in root.rglob("*")} == before


@pytest.mark.parametrize("out", ["p.csv", "p.tsv", "p.parquet"])
def test_a_full_disk_leaves_nothing(out, run_cli, tmp_path, full_disk):
    model, data = case(tmp_path / "in", "table")
    code, _, err = run_cli("predict", model, data, "--out", out)
    assert code == 2
    assert "No space left" in err.splitlines()[-1]
    assert out in err.splitlines()[-1]
    assert file_names_in(tmp_path) == {"in"}


@pytest.mark.parametrize(
    ("out", "more"),
    [
        ("p.csv", "--heatmap g"),
        *((out, more) for out in ("p.csv", "p.h5", "folder") for more in ("--geojson g", "--bags b.csv")),
    ],
)
def test_a_disk_that_fills_up_at_any_file(out, more, run_cli, tmp_path, monkeypatch):
    """The first write fits, the next does not, and so on: never a part of what was asked for."""
    model, data = case(tmp_path / "in", "slides")
    synced = os.fsync
    for room in (0, 1, 4):  # 4: the slides' files fit, the table does not
        count = [0]

        def full(fd, count=count, room=room):
            count[0] += 1
            if count[0] > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            synced(fd)

        monkeypatch.setattr(os, "fsync", full)
        code, _, err = run_cli("predict", model, data, "--out", out, *more.split())
        if count[0] <= room:  # this one had enough
            assert code == 0
            return
        assert code == 2
        assert "No space left" in err.splitlines()[-1]
        assert file_names_in(tmp_path) == {"in"}


def test_an_old_file_survives_a_full_disk(run_cli, tmp_path, full_disk):
    model, data = case(tmp_path / "in", "table")
    for name in ("p.csv", "b.csv"):
        (tmp_path / name).write_text("old")
    full_disk.add("p.csv")
    assert run_cli("predict", model, data, "--out", "p.csv", "--bags", "b.csv")[0] == 2
    assert {p.name: p.read_text() for p in tmp_path.glob("*.csv*")} == {"p.csv": "old", "b.csv": "old"}


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is read-only for root")
def test_a_folder_that_cannot_be_written_to(run_cli, tmp_path):
    model, data = case(tmp_path / "in", "table")
    (tmp_path / "shut").mkdir()
    (tmp_path / "shut").chmod(0o500)
    code, _, err = run_cli("predict", model, data, "--out", "shut/p.csv")
    assert (code, err.splitlines()[-1].count("permissions")) == (2, 1)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_read_only_disk(number, run_cli, tmp_path, monkeypatch):
    def shut(path):
        raise OSError(number, os.strerror(number), str(path))

    model, data = case(tmp_path / "in", "table")
    monkeypatch.setattr(export, "open_sink", shut)
    code, _, err = run_cli("predict", model, data, "--out", "p.csv")
    assert code == 2
    assert err.splitlines()[-1].startswith("headcount: ")
    assert "p.csv" in err.splitlines()[-1]
    assert ".part" not in err  # nobody run_cli that
    assert file_names_in(tmp_path) == {"in"}


def test_hdf5_without_its_library_names_the_extra(run_cli, tmp_path, monkeypatch):
    model, data = case(tmp_path / "in", "table")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    code, _, err = run_cli("predict", model, data, "--out", "p.h5")
    assert code == 2
    assert "headcount[slides]" in err

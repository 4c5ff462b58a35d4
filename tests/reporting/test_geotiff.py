"""``predict --geotiff``: a raster that rasterio reads back in the right place (where it is installed), and what is refused."""

from __future__ import annotations

import sys

import numpy as np
import pytest

import read_factory as make
from headcount.errors import HeadcountError
from headcount.readers import read
from headcount.reporting import geo
from model_factory import fitted, people, read_rows


@pytest.fixture
def pixels(tmp_path):
    """(model, data): 48 people on a grid of 8 x 6 pixels of 20 x 10 metres, the last of them one pixel further."""
    table = people(x=[500_000 + 20.0 * (i % 8 + (i == 47)) for i in range(48)], y=[10.0 * (i // 8) for i in range(48)])
    (tmp_path / "in").mkdir()
    path = make.write_csv(tmp_path / "in" / "people.csv", table)
    model = fitted(read({k: v for k, v in table.items() if k not in "xy"}))
    return model.save(tmp_path / "in" / "model"), path


@pytest.mark.filterwarnings("ignore:Use `@` matmul:PendingDeprecationWarning")  # between rasterio and affine
def test_a_raster_is_read_back_in_the_right_place(run_cli, pixels, tmp_path):
    rasterio = pytest.importorskip("rasterio")
    code, _, err = run_cli("predict", *pixels, "--out", "p.csv", "--geotiff", "map.tif", "--crs", "EPSG:32633")
    assert code == 0, err
    assert "0 no, 1 yes" in err
    predicted = [row["prediction"] for row in read_rows(tmp_path / "p.csv")]
    with rasterio.open(tmp_path / "map.tif") as raster:
        image = raster.read(1)
        assert (raster.crs.to_epsg(), raster.nodata, raster.shape) == (32633, 255, (6, 9))
        assert tuple(raster.bounds) == (499_990, -5, 500_170, 55)
        assert raster.tags(1)["class_1"] == "yes"
        for i in range(47):
            row, column = raster.index(500_000 + 20 * (i % 8), 10 * (i // 8))
            assert ("no", "yes")[image[row, column]] == predicted[i]
    assert image[0, 7] == 255
    assert (image == 255).sum() == 6
    code, _, err = run_cli("predict", *pixels, "--out", "q.csv", "--geotiff", "m.tif", "--crs", "nowhere")
    assert code == 2
    assert "no coordinate reference system" in err
    code, _, err = run_cli("predict", *pixels, "--out", "q.csv", "--geotiff", "m.tif")
    assert code == 2
    assert "--crs EPSG:32633" in err


def test_without_rasterio_the_extra_is_named(run_cli, pixels, monkeypatch):
    monkeypatch.setitem(sys.modules, "rasterio", None)
    code, _, err = run_cli("predict", *pixels, "--out", "p.csv", "--geotiff", "map.tif", "--crs", "EPSG:32633")
    assert code == 2
    assert "headcount[geo]" in err
    code, _, err = run_cli("predict", *pixels, "--out", "p.csv", "--crs", "EPSG:32633")
    assert code == 2
    assert "--geotiff FILE.tif" in err


def test_a_grid_may_have_gaps_and_rounded_coordinates_but_no_shifted_pixels():
    values = np.round(np.array([3, 0, 7, 0, 1]) * 0.000277778 + 13.4, 9)
    place, low, step = geo._grid(values, "x")
    assert place.tolist() == [3, 0, 7, 0, 1]
    assert low == pytest.approx(13.4)
    assert step == pytest.approx(0.000277778, rel=1e-5)
    assert geo._grid(np.array([5.0]), "x")[0].tolist() == [0]
    with pytest.raises(HeadcountError, match=r"x 2\.5 is not 0 plus a multiple of 1"):
        geo._grid(np.array([0.0, 1.0, 2.5]), "x")

"""Predictions with coordinates: GeoJSON that QuPath opens, and heat maps, one file per bag; and a GeoTIFF of all.

A tile is a square with its upper left corner at the instance's coordinates, in the same unit (pixels of the full slide,
metres, degrees). y grows downwards, as in an image.
"""

import colorsys
import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_write
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.reporting import render
from headcount.reporting.export import unique_file_names
from headcount.reporting.render import truncate

_MAX_CELLS = 1200  # of the longer side of a heat map
_NO_CLASS = 255  # in a GeoTIFF
_MAX_PIXELS = 1 << 30  # of a GeoTIFF
_PIXELS = 480.0  # of its longer side, before the resolution


def class_colours(classes: int) -> list[tuple[int, int, int]]:
    """A colour for each class: those of the reports, then hues as different as possible."""
    fixed = [tuple(bytes.fromhex(c[1:])) for c in render.PALETTE[:classes]]
    hues = [colorsys.hsv_to_rgb(0.618034 * k % 1, 0.75, 0.8) for k in range(len(fixed), classes)]
    return [(r, g, b) for r, g, b in [*fixed, *([round(255 * v) for v in rgb] for rgb in hues)]]


def require_coords(dataset: BagDataset, what: str, tiles: bool) -> None:
    """Refuse data without coordinates (and tile sizes) before anything is predicted or written."""
    if dataset.coords is None:
        raise HeadcountError(f"{what} needs coordinates, and the data have none; name the columns with --x and --y")
    located = np.isfinite(dataset.coords).all(1)
    if tiles and (dataset.tile_sizes is None or not np.isfinite(dataset.tile_sizes[located]).all()):
        raise HeadcountError(f"{what} needs the side of the tiles, which the data do not give; set it with --tile")


def load_rasterio(crs: str | None) -> tuple[Any, Any]:
    """The module, and the coordinate reference system of this name."""
    try:
        rasterio = importlib.import_module("rasterio")
    except ImportError:
        raise HeadcountError("GeoTIFF needs rasterio: pip install 'headcount[geo]'") from None
    if crs is None:
        raise HeadcountError("--geotiff needs the coordinate reference system of x and y; name it, such as --crs EPSG:32633")
    try:
        return rasterio, rasterio.crs.CRS.from_user_input(crs)
    except rasterio.errors.CRSError:
        raise HeadcountError(f"--crs {crs} is no coordinate reference system; give one such as EPSG:4326") from None


def write_geotiff(path: Path, dataset: BagDataset, predictions: Predictions, crs: str | None) -> None:
    """The class of each pixel, north up; 255 where there is none. The coordinates are the centres of pixels of a regular grid."""
    rasterio, system = load_rasterio(crs)
    assert dataset.coords is not None
    located = np.isfinite(dataset.coords).all(1)
    (column, left, width), (row, bottom, height) = (
        _grid(v, name) for v, name in zip(dataset.coords[located].T, "xy", strict=True)
    )
    shape = int(row.max()) + 1, int(column.max()) + 1
    if shape[0] * shape[1] > _MAX_PIXELS or len(predictions.classes) > _NO_CLASS:
        size = f"{shape[1]:,} x {shape[0]:,} pixels of {len(predictions.classes)} classes"
        raise HeadcountError(f"--geotiff writes at most {_MAX_PIXELS:,} pixels of {_NO_CLASS} classes, got {size}")
    image = np.full(shape, _NO_CLASS, np.uint8)
    image[shape[0] - 1 - row, column] = predictions.instance_prediction[located]
    corner = left - width / 2, bottom + (shape[0] - 0.5) * height
    profile = {"driver": "GTiff", "width": shape[1], "height": shape[0], "count": 1, "dtype": "uint8", "nodata": _NO_CLASS}
    with rasterio.MemoryFile() as memory:
        with memory.open(
            **profile, crs=system, transform=rasterio.transform.from_origin(*corner, width, height), compress="deflate"
        ) as raster:
            raster.write(image, 1)
            raster.write_colormap(1, dict(enumerate(class_colours(len(predictions.classes)))))
            raster.update_tags(1, **{f"class_{k}": name for k, name in enumerate(predictions.classes)})
        content = memory.read()
    atomic_write(path, lambda f: f.write(content))


def _grid(values: np.ndarray, name: str) -> tuple[np.ndarray, float, float]:
    """The place of each coordinate on a regular grid, the least coordinate, and the step."""
    low, gaps = float(values.min()), np.diff(np.unique(values))
    gaps = gaps[gaps > 1e-6 * max(float(values.max()) - low, 1e-300)]  # the others are rounding
    step = float(gaps.min()) if len(gaps) else 1.0
    place = (values - low) / step
    if (wrong := np.abs(place - np.rint(place)) > 0.05).any():
        value = values[wrong][0]
        raise HeadcountError(f"--geotiff needs a regular grid: {name} {value:g} is not {low:g} plus a multiple of {step:g}")
    return np.rint(place).astype(np.int64), low, step


def _located_bags(dataset: BagDataset, suffix: str) -> Iterator[tuple[str, int, np.ndarray, np.ndarray]]:
    """File name, number, instances with coordinates and these coordinates, of each bag that has any."""
    assert dataset.coords is not None
    located, ends = np.asarray(np.isfinite(dataset.coords).all(1)), dataset.bags.offsets.tolist()
    for b, name in enumerate(unique_file_names(dataset.bags.names or (), suffix)):
        rows = ends[b] + np.flatnonzero(located[ends[b] : ends[b + 1]])
        if len(rows):
            yield name, b, rows, dataset.coords[rows]


def write_geojson(folder: Path, dataset: BagDataset, predictions: Predictions) -> None:
    """A FeatureCollection of tiles for each bag."""
    assert dataset.tile_sizes is not None
    with atomic_folder(folder) as part:
        for name, _, rows, corners in _located_bags(dataset, ".geojson"):
            p, sides = predictions.instance_probabilities[rows], dataset.tile_sizes[rows]
            lines = _features(corners, sides, p, predictions.classes)
            atomic_write(part / name, lambda f, lines=lines: f.writelines(lines))


def _features(corners: np.ndarray, sides: np.ndarray, p: np.ndarray, classes: Sequence[str]) -> Iterator[bytes]:
    colours = class_colours(len(classes))
    yield b'{"type": "FeatureCollection", "features": ['
    for i, ((x, y), side, probabilities) in enumerate(zip(corners.tolist(), sides.tolist(), p.tolist(), strict=True)):
        k = int(np.argmax(probabilities))
        ring = [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]
        square = [[int(v) if v == int(v) else v for v in point] for point in ring]  # integers where coordinates are whole
        feature = {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [square]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": classes[k], "color": list(colours[k])},
                "measurements": {f"p_{c}": round(v, 6) for c, v in zip(classes, probabilities, strict=True)},
            },
        }
        text = json.dumps(feature, ensure_ascii=False, allow_nan=False)
        yield (b",\n" if i else b"\n") + text.encode("utf-8", "backslashreplace")
    yield b"\n]}\n"


def write_heatmaps(folder: Path, dataset: BagDataset, predictions: Predictions) -> None:
    """A PNG for each bag: the colour of a tile is its class, the opacity its confidence."""
    colours = np.array(class_colours(len(predictions.classes)), dtype=float) / 255
    names = dataset.bags.names or ()
    sides = np.full(len(dataset.rows), np.nan) if dataset.tile_sizes is None else dataset.tile_sizes
    with atomic_folder(folder) as part:
        for name, b, rows, corners in _located_bags(dataset, ".png"):
            image, extent = rasterize(corners, sides[rows], predictions.instance_probabilities[rows], colours)
            scale = _PIXELS / max(image.shape[:2])
            share = predictions.shares[b]
            shown = [k for k in np.argsort(-share) if share[k] >= 0.005][:12]
            width, height = max(320.0, image.shape[1] * scale) + 20, max(60.0, image.shape[0] * scale) + 60 + 18 * len(shown)
            with render.panel(width, height, margins=(10, 40, 10, 20 + 18 * len(shown))) as (figure, ax):
                ax.imshow(image, extent=extent, interpolation="nearest", aspect="equal")
                ax.set_axis_off()
                ax.set_title(f"{truncate(names[b], 60)}: {predictions.classes[int(predictions.bag_prediction[b])]}")
                for line, k in enumerate(shown):
                    y = (18 * (len(shown) - line) - 4) / height
                    figure.text(30 / width, y, f"{predictions.classes[k]}  {100 * share[k]:.0f} %", va="center")
                    figure.text(12 / width, y, "■", color=tuple(colours[k]), va="center")
                render.save(figure, part / name)


def rasterize(
    xy: np.ndarray, tile: np.ndarray, p: np.ndarray, colours: np.ndarray
) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """(height, width, 4) cells, transparent where there is no tile, and their extent (left, right, bottom, top)."""
    steps = [float(np.median(gaps)) for k in (0, 1) if len(gaps := np.diff(np.unique(xy[:, k])))]
    side = np.where(np.isfinite(tile), tile, min(steps, default=1.0))  # unknown: the step between neighbours
    low, high = xy.min(0), (xy + side[:, None]).max(0)
    cell = max(float(side.min()), float((high - low).max()) / _MAX_CELLS)
    shape = np.maximum(1, np.ceil((high - low) / cell - 1e-9).astype(int))
    image = np.zeros((shape[1], shape[0], 4))
    first = np.floor((xy - low) / cell + 1e-9).astype(int)
    last = np.maximum(first + 1, np.ceil((xy + side[:, None] - low) / cell - 1e-9).astype(int))
    confidence, predicted = p.max(1), p.argmax(1)
    chance = 1 / p.shape[1]
    opacity = np.minimum(0.15 + 0.85 * (confidence - chance) / (1 - chance), 1.0)  # 1 may be exceeded by rounding
    for i in np.argsort(confidence, kind="stable").tolist():  # the most confident on top
        image[first[i, 1] : last[i, 1], first[i, 0] : last[i, 0]] = [*colours[predicted[i]], opacity[i]]
    end = low + shape * cell
    return image, (float(low[0]), float(end[0]), float(end[1]), float(low[1]))

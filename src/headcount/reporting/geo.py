"""Instances that have a place: GeoJSON that QuPath opens, and a heat map, one file for each bag.

A tile is the square of side ``tile`` whose upper left corner is at the instance's coordinates, in their unit: pixels of the
full slide, metres, degrees. y grows downwards, as in a picture.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.inference.predict import Predictions
from headcount.io import atomic_folder, atomic_write
from headcount.readers import BagDataset
from headcount.reporting import svg
from headcount.reporting.export import unique_file_names

_CELLS = 1200  # of a heat map's longer side
_PIXELS = 480.0  # of its longer side, before the resolution


def class_colours(classes: int) -> list[tuple[int, int, int]]:
    """A colour for each class: those of the reports, then others as far apart as they get.

    >>> class_colours(1)
    [(0, 114, 178)]
    """
    fixed = [tuple(bytes.fromhex(c[1:])) for c in svg.PALETTE[:classes]]
    turns = [colorsys.hsv_to_rgb(0.618034 * k % 1, 0.75, 0.8) for k in range(len(fixed), classes)]
    return [(r, g, b) for r, g, b in [*fixed, *([round(255 * v) for v in rgb] for rgb in turns)]]


def require_coords(dataset: BagDataset, what: str, tiles: bool) -> None:
    """Refuse before anything is asked or written."""
    if dataset.coords is None:
        raise HeadcountError(f"{what} needs coordinates, and the data have none; name the columns with --x and --y")
    if tiles and (
        dataset.tile_sizes is None or not np.isfinite(dataset.tile_sizes[np.isfinite(dataset.coords).all(1)]).all()
    ):
        raise HeadcountError(f"{what} needs the side of the tiles, which the data do not say; give it with --tile")


def _places(reading: BagDataset, said: Predictions) -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
    """(bag, xy (n, 2), tile (n,), p (n, C)) of the instances that have a place."""
    assert reading.coords is not None
    ends = reading.bags.offsets.tolist()
    for b in range(len(reading.bags)):
        here = slice(ends[b], ends[b + 1])
        xy = reading.coords[here]
        there = np.isfinite(xy).all(1)
        tile = np.full(len(xy), np.nan) if reading.tile_sizes is None else reading.tile_sizes[here]
        yield b, xy[there], tile[there], said.instance_probabilities[here][there]


def _each(folder: Path, reading: BagDataset, said: Predictions, ending: str, write: Callable[..., None]) -> int:
    """One file for each bag that has places; how many."""
    names = unique_file_names(reading.bags.names or (), ending)
    made = 0
    with atomic_folder(folder) as part:
        for b, xy, tile, p in _places(reading, said):
            if len(xy):
                write(part / names[b], b, xy, tile, p)
                made += 1
    return made


# -- GeoJSON ----------------------------------------------------------------------------------------------------------------


def write_geojson(folder: Path, dataset: BagDataset, predictions: Predictions) -> int:
    paint = class_colours(len(predictions.classes))

    def write(path: Path, b: int, xy: np.ndarray, tile: np.ndarray, p: np.ndarray) -> None:
        atomic_write(path, lambda sink: _collection(sink, xy, tile, p, predictions.classes, paint))

    return _each(folder, dataset, predictions, ".geojson", write)


def _collection(sink: Any, xy: np.ndarray, tile: np.ndarray, p: np.ndarray, classes: Any, paint: Any) -> None:
    """A FeatureCollection, written feature by feature."""
    sink.write(b'{"type": "FeatureCollection", "features": [')
    for i, (corner, side, row) in enumerate(zip(xy.tolist(), tile.tolist(), p.tolist(), strict=True)):
        k = int(np.argmax(row))
        feature = {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [_square(*corner, side)]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": classes[k], "color": list(paint[k])},
                "measurements": {f"p_{c}": round(v, 6) for c, v in zip(classes, row, strict=True)},
            },
        }
        text = json.dumps(feature, ensure_ascii=False, allow_nan=False)
        sink.write((b",\n" if i else b"\n") + text.encode("utf-8", "backslashreplace"))
    sink.write(b"\n]}\n")


def _square(x: float, y: float, side: float) -> list[list[float]]:
    """A closed ring, whole numbers where they are whole.

    >>> _square(0, 512, 256.0)
    [[0, 512], [256, 512], [256, 768], [0, 768], [0, 512]]
    """
    ring = [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]
    return [[int(v) if v == int(v) else v for v in point] for point in ring]


# -- heat map ---------------------------------------------------------------------------------------------------------------


def write_heatmaps(folder: Path, dataset: BagDataset, predictions: Predictions) -> int:
    """PNG: the colour of a tile is its class, its strength how sure that is; y grows downwards, as in a picture."""
    paint = np.array(class_colours(len(predictions.classes)), dtype=float) / 255
    names = dataset.bags.names or ()

    def write(path: Path, b: int, xy: np.ndarray, tile: np.ndarray, p: np.ndarray) -> None:
        image, extent = rasterize(xy, tile, p, paint)
        _draw(path, image, extent, names[b], predictions, b, paint)

    return _each(folder, dataset, predictions, ".png", write)


def rasterize(
    xy: np.ndarray, tile: np.ndarray, p: np.ndarray, paint: np.ndarray
) -> tuple[np.ndarray, tuple[float, float, float, float]]:
    """(height, width, 4) cells, clear where no tile is, and (left, right, bottom, top) of the whole."""
    side = np.where(np.isfinite(tile), tile, _spacing(xy))
    low, high = xy.min(0), (xy + side[:, None]).max(0)
    cell = max(float(side.min()), float((high - low).max()) / _CELLS)
    shape = np.maximum(1, np.ceil((high - low) / cell - 1e-9).astype(int))
    image = np.zeros((shape[1], shape[0], 4))
    first = np.floor((xy - low) / cell + 1e-9).astype(int)
    last = np.maximum(first + 1, np.ceil((xy + side[:, None] - low) / cell - 1e-9).astype(int))
    sure, said = p.max(1), p.argmax(1)
    least = 1 / p.shape[1]
    strength = np.minimum(0.15 + 0.85 * (sure - least) / (1 - least), 1.0)  # a share of 1 may round to a little more
    for i in np.argsort(sure, kind="stable").tolist():  # the surest on top
        image[first[i, 1] : last[i, 1], first[i, 0] : last[i, 0]] = [*paint[said[i]], strength[i]]
    end = low + shape * cell
    return image, (float(low[0]), float(end[0]), float(end[1]), float(low[1]))


def _spacing(xy: np.ndarray) -> float:
    """The side of a tile nobody told: the usual step between neighbouring columns or rows."""
    steps = [float(np.median(gaps)) for k in (0, 1) if len(gaps := np.diff(np.unique(xy[:, k])))]
    return min(steps, default=1.0)


def _draw(
    path: Path, image: np.ndarray, extent: tuple[float, ...], name: str, said: Predictions, b: int, paint: np.ndarray
) -> None:
    tall, wide = image.shape[:2]
    scale = _PIXELS / max(tall, wide)
    seen = [k for k in np.argsort(-said.shares[b]) if said.shares[b, k] >= 0.005][:12]
    width, height = max(320.0, wide * scale) + 20, max(60.0, tall * scale) + 60 + 18 * len(seen)
    with svg.panel(width, height, margins=(10, 40, 10, 20 + 18 * len(seen))) as (figure, ax):
        ax.imshow(image, extent=extent, interpolation="nearest", aspect="equal")
        ax.set_axis_off()
        short = name if len(name) <= 60 else name[:57] + "..."
        ax.set_title(f"{short}: {said.classes[int(said.bag_probabilities[b].argmax())]}")
        for line, k in enumerate(seen):
            label = f"{said.classes[k]}  {100 * said.shares[b, k]:.0f} %"
            y = (18 * (len(seen) - line) - 4) / height
            figure.text(30 / width, y, label, va="center")
            figure.text(12 / width, y, "■", color=tuple(paint[k]), va="center")
        svg.save(figure, path)

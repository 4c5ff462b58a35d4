"""Predictions with coordinates: GeoJSON that QuPath opens, and heat maps, one file per bag.

A tile is a square with its upper left corner at the instance's coordinates, in the same unit (pixels of the full slide,
metres, degrees). y grows downwards, as in an image.
"""

from __future__ import annotations

import colorsys
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_write
from headcount.models.predictions import Predictions
from headcount.readers import BagDataset
from headcount.reporting import render
from headcount.reporting.export import unique_file_names
from headcount.reporting.render import truncate

_MAX_CELLS = 1200  # of the longer side of a heat map
_PIXELS = 480.0  # of its longer side, before the resolution
Colour = tuple[int, int, int]


def class_colours(classes: int) -> list[Colour]:
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


def _located_bags(
    dataset: BagDataset, predictions: Predictions, suffix: str
) -> Iterator[tuple[str, int, tuple[np.ndarray, np.ndarray, np.ndarray]]]:
    """Of each bag with coordinates the file name, its number, and of its n tiles: (n, 2), (n,) sides, (n, C) probabilities."""
    assert dataset.coords is not None
    ends = dataset.bags.offsets.tolist()
    sides = np.full(len(dataset.coords), np.nan) if dataset.tile_sizes is None else dataset.tile_sizes
    for b, name in enumerate(unique_file_names(dataset.bags.names or (), suffix)):
        here = slice(ends[b], ends[b + 1])
        located = np.isfinite(dataset.coords[here]).all(1)
        if located.any():
            yield (
                name,
                b,
                (dataset.coords[here][located], sides[here][located], predictions.instance_probabilities[here][located]),
            )


def write_geojson(folder: Path, dataset: BagDataset, predictions: Predictions) -> int:
    """A FeatureCollection of tiles for each bag; returns the number of files."""
    colours, count = class_colours(len(predictions.classes)), 0
    with atomic_folder(folder) as part:
        for name, _, tiles in _located_bags(dataset, predictions, ".geojson"):
            atomic_write(part / name, lambda f, tiles=tiles: _write_features(f, tiles, predictions.classes, colours))
            count += 1
    return count


def _write_features(sink: IO[bytes], tiles: tuple[np.ndarray, ...], classes: Sequence[str], colours: Sequence[Colour]) -> None:
    sink.write(b'{"type": "FeatureCollection", "features": [')
    for i, (corner, side, p) in enumerate(zip(*(a.tolist() for a in tiles), strict=True)):
        k = int(np.argmax(p))
        feature = {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": [_square(*corner, side)]},
            "properties": {
                "objectType": "tile",
                "classification": {"name": classes[k], "color": list(colours[k])},
                "measurements": {f"p_{c}": round(v, 6) for c, v in zip(classes, p, strict=True)},
            },
        }
        text = json.dumps(feature, ensure_ascii=False, allow_nan=False)
        sink.write((b",\n" if i else b"\n") + text.encode("utf-8", "backslashreplace"))
    sink.write(b"\n]}\n")


def _square(x: float, y: float, side: float) -> list[list[float]]:
    """A closed ring, with integers where coordinates are whole."""
    ring = [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]
    return [[int(v) if v == int(v) else v for v in point] for point in ring]


def write_heatmaps(folder: Path, dataset: BagDataset, predictions: Predictions) -> int:
    """A PNG for each bag: the colour of a tile is its class, the opacity its confidence. Returns the number of files."""
    colours = np.array(class_colours(len(predictions.classes)), dtype=float) / 255
    names, count = dataset.bags.names or (), 0
    with atomic_folder(folder) as part:
        for name, b, tiles in _located_bags(dataset, predictions, ".png"):
            image, extent = rasterize(*tiles, colours)
            rows, columns = image.shape[:2]
            scale = _PIXELS / max(rows, columns)
            share = predictions.shares[b]
            shown = [k for k in np.argsort(-share) if share[k] >= 0.005][:12]
            width, height = max(320.0, columns * scale) + 20, max(60.0, rows * scale) + 60 + 18 * len(shown)
            with render.panel(width, height, margins=(10, 40, 10, 20 + 18 * len(shown))) as (figure, ax):
                ax.imshow(image, extent=extent, interpolation="nearest", aspect="equal")
                ax.set_axis_off()
                ax.set_title(f"{truncate(names[b], 60)}: {predictions.classes[int(predictions.bag_prediction[b])]}")
                for line, k in enumerate(shown):
                    y = (18 * (len(shown) - line) - 4) / height
                    figure.text(30 / width, y, f"{predictions.classes[k]}  {100 * share[k]:.0f} %", va="center")
                    figure.text(12 / width, y, "■", color=tuple(colours[k]), va="center")
                render.save(figure, part / name)
            count += 1
    return count


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

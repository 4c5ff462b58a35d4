"""The page of ``headcount table``, with the figure in which groups are compared, and the same shares as a map."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.inference.share_table import NUMBERS, ShareTable
from headcount.io import atomic_write
from headcount.loading import read_json
from headcount.readers import BagDataset
from headcount.readers.columns import clean_name, preview
from headcount.reporting import plots, render
from headcount.reporting.render import PALETTE, truncate

_MAX_CHOICES = 30  # figures
_GEOJSON = {"type": str, "features": [{"type": str, "geometry?": dict, "properties?": dict}]}


def render_shares(table: ShareTable, title: str, by: Sequence[str], context: Mapping[str, Any]) -> str:
    """The page as a string: for each class a figure with the shares of all groups, and all numbers."""
    figures = {}
    for k, choice in enumerate(table.classes[:_MAX_CHOICES]):
        figure = share_intervals(table.group, *(getattr(table, name)[:, k] for name in NUMBERS[:5]))
        figures[choice] = render.inline_svg(figure, f"share{k}", f"Shares of {choice}")
    rows = [SimpleNamespace(**row) for row in table.to_arrow().to_pylist()]
    return render.render_template("shares.html", title=title, by=by, figures=figures, rows=rows, **context)


def share_intervals(
    groups: Sequence[str], share: np.ndarray, low: np.ndarray, high: np.ndarray, bound_low: np.ndarray, bound_high: np.ndarray
) -> Any:
    """The share of one class in each group: a dot with its interval, on the range that the labels allow."""
    with plots.method_rows([truncate(name, 44) for name in groups]) as (figure, ax):
        for y in np.flatnonzero(np.isfinite(share)).tolist():
            ax.barh(y, bound_high[y] - bound_low[y], 0.3, bound_low[y], color=PALETTE[7], alpha=0.22)
            ax.plot([low[y], high[y]], [y, y], color=PALETTE[0], lw=2.2, solid_capstyle="butt")
            (dot,) = ax.plot([share[y]], [y], "o", ms=7, color=PALETTE[0], mew=0, clip_on=False)
            ends = (f"{100 * v:.1f} %" for v in (share[y], low[y], high[y], bound_low[y], bound_high[y]))
            render.hover(dot, "{}: {} ({} to {}); labels prove {} to {}".format(groups[y], *ends))
        ax.set(xlim=(0, 1), xticks=np.arange(0, 1.01, 0.2))
    return figure


def read_polygons(path: Path, field: str, bags: Sequence[str]) -> dict[str, Any]:
    """A GeoJSON file whose features name a bag each, in a field of their properties."""
    data = read_json(path, _GEOJSON, "a GeoJSON FeatureCollection")
    names = [clean_name((feature.get("properties") or {}).get(field)) for feature in data["features"]]
    if not {*names} & {*bags}:
        found = [name for name in names if name is not None]
        problem = f"{field!r} names {preview(found)}" if found else f"no feature has a property {field!r}"
        raise HeadcountError(f"{path}: {problem}, and the bags are {preview(bags)}; name the property with --polygon-id")
    return data


def write_share_map(path: Path, table: ShareTable, dataset: BagDataset, polygons: dict[str, Any] | None, field: str) -> int:
    """Write the shares of whole bags as GeoJSON: the features of the polygons, or a point in the middle of each bag's
    coordinates, with the properties bag, label, instances, and share_, low_ and high_<class>. Returns the number of features
    with shares."""
    numbers = {name: getattr(table, name).round(6).tolist() for name in NUMBERS[:3]}
    properties, labels = {}, dict(zip(dataset.bags.names or (), dataset.bags.label_names, strict=True))
    for r in [r for r, group in enumerate(table.group) if group == table.group[0]]:
        values = {f"{name}_{c}": v for name, rows in numbers.items() for c, v in zip(table.classes, rows[r], strict=True)}
        bag = table.bag[r] or ""
        values = {name: None if math.isnan(v) else v for name, v in values.items()}
        properties[bag] = {"bag": bag, "label": labels[bag], "instances": int(table.instances[r]), **values}
    if polygons is None:
        assert dataset.coords is not None
        ends, features = dataset.bags.offsets.tolist(), []
        for b, name in enumerate(dataset.bags.names or ()):
            x, y = np.nanmean(dataset.coords[ends[b] : ends[b + 1]], 0).tolist()
            features.append(
                {"type": "Feature", "geometry": {"type": "Point", "coordinates": [x, y]}, "properties": {field: name}}
            )
        polygons = {"type": "FeatureCollection", "features": features}
    matched = 0
    for feature in polygons["features"]:
        own = feature.get("properties") or {}
        if (bag := clean_name(own.get(field))) in properties:
            feature["properties"], matched = {**own, **properties[bag]}, matched + 1
    text = json.dumps(polygons, ensure_ascii=False, allow_nan=False)
    atomic_write(path, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    return matched

"""Feature folders of whole-slide pipelines: one file per slide, and a table that labels slides or patients.

    TRIDENT   <slide>.h5 with features (n, D) and coords (n, 2); the tile's side is coords.attrs["patch_size_level0"]
    CLAM      h5_files/<slide>.h5 likewise (attributes, where kept: patch_size, downsample), pt_files/<slide>.pt a tensor
    others    <slide>.npy (n, D)

The label table has columns slide_id and label, and case_id if there are patients: the bag is the slide and the patient its
group, or with ``bag="case_id"`` the patient is the bag. What does not fit into memory becomes one flat float16 cache.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from headcount.data.cache import home
from headcount.data.columns import Columns
from headcount.data.read import flat, slide_files
from headcount.data.read.flat import Part
from headcount.data.read.folders import label_file
from headcount.data.read.found import Asked, Found, Said, firsts, some
from headcount.data.read.labels import beside, joined, label_table, usual
from headcount.data.read.slide_files import ENDINGS, Slide, files_of, glance
from headcount.data.read.tables import is_frame, suffix
from headcount.data.values import texts
from headcount.errors import HeadcountError

_SLIDES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".czi", ".dcm", *ENDINGS)
_HALF = 65504.0  # the largest float16


def is_slides(folder: Path) -> bool:
    """Whether a folder holds feature files."""
    return bool(files_of(folder))


def read_slides(folder: Path, asked: Asked) -> Found:
    files = files_of(folder)
    slides = {name: s for name, file in files.items() if (s := glance(file, asked)) is not None}
    if not slides:
        raise HeadcountError(f"none of the {len(files)} feature files in {folder} can be read: {asked.bad.said[0]}")
    widths = Counter(s.width for s in slides.values())
    width = asked.learned.shape[0] if asked.learned else widths.most_common(1)[0][0]
    for name, s in list(slides.items()):
        if s.width != width:
            asked.bad.say(
                f"{s.file} has features of {s.width} numbers, {'the model' if asked.learned else 'others'} {width}"
            )
            del slides[name]
    of_slide, names, said = _bags(folder, list(slides), asked)
    kept = [s for s, b in zip(slides.values(), of_slide, strict=True) if b >= 0]
    stems = [n for n, b in zip(slides, of_slide, strict=True) if b >= 0]
    if not kept:
        raise HeadcountError(f"{folder}: no slide is left to read; {asked.bad.said[0]}")
    sizes = [s.rows for s in kept]
    array, parts = _features(kept, width, asked)
    bag = np.repeat(of_slide[of_slide >= 0], sizes)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for k, part in enumerate(parts):
        for row, why in part.bad.items():
            asked.bad.say(f"{kept[k].file} row {row + 1}: {why}")
            bag[ends[k] + row] = -1
    coords, tiles = _places(kept, asked)
    return Found(
        kind="features", how=f"read {folder}: {len(kept):,} slides, {int(ends[-1]):,} tiles of {width} features",
        where=str(folder), columns=Columns("features", shape=(width,), named=asked.named), content=array, bag=bag, names=names,
        said=said, ids=_ids(stems, sizes, coords, names if names != stems else None, of_slide[of_slide >= 0]),
        digest=hashlib.sha256("".join(p.digest for p in parts).encode()).hexdigest(), coords=coords, tiles=tiles,
        notes=_notes(kept, coords, asked, str(array.dtype)), checked=True,
    )  # fmt: skip


# -- who is in which bag ------------------------------------------------------------------------------------------------------


def _bags(folder: Path, stems: list[str], asked: Asked) -> tuple[np.ndarray, list[str], Said]:
    """(slides,) bag of each slide (-1: left out), the bags' names, and what is said of them."""
    given = asked.labels if asked.labels is not None else label_file(folder)
    if given is None and (asked.need_labels or asked.named.bag not in (None, "slide_id")):
        given = label_file(folder.parent)  # not for new slides: it may well be that of others
    slide_by_slide = np.arange(len(stems))
    if given is None:
        if asked.need_labels:
            raise HeadcountError(
                f"{folder} has no labels.csv; add one with columns slide_id and label, or name a label file"
            )
        if asked.named.bag is not None and asked.named.bag != "slide_id":
            raise HeadcountError(
                f"bag={asked.named.bag!r} is a column of a label table, and there is none; give labels="
            )
        return slide_by_slide, stems, Said(code=np.full(len(stems), -1))
    if not (is_frame(given) or (isinstance(given, (str, Path)) and suffix(Path(given)) != ".npy")):
        return slide_by_slide, stems, beside(asked, stems, None, given)
    table, where, digest, roles, key = label_table(given, asked, "slide_id")
    column = usual("bag", [c for c in table.column_names if c != key], where) if asked.named.bag else key
    column = column or key
    table = table.set_column(table.column_names.index(column), column, _stems(table.column(column)))
    if column == key:
        return slide_by_slide, stems, joined(table, where, digest, roles, key, asked, stems)
    code, listed = texts(table.column(column))
    case, cases = texts(table.column(key))
    first, wrong = firsts(code, case, len(listed))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise HeadcountError(f"{where} row {row + 1}: slide {listed[code[row]]!r} belongs to two bags ({key})")
    of = {slide: cases[first[k]] for k, slide in enumerate(listed) if first[k] >= 0}
    lost = np.array([stem not in of for stem in stems])
    asked.bad.rows(lost, lambda i: f"slide {stems[i]!r} is not in {where}, so that its {key} is unknown")
    names = list(dict.fromkeys(of[stem] for stem in stems if stem in of))
    place = {name: b for b, name in enumerate(names)}
    bag = np.array([place[of[stem]] if stem in of else -1 for stem in stems])
    return bag, names, joined(table, where, digest, replace(roles, bag=key), key, asked, names)


def _stems(column: pa.ChunkedArray) -> pa.Array:
    """Slide ids without the ending of the slide's or the feature file."""
    code, values = texts(column)
    bare = [v[: -len(e)] if (e := Path(v).suffix) and e.lower() in _SLIDES else v for v in values]
    return pa.DictionaryArray.from_arrays(pa.array(code, mask=code < 0), pa.array(bare, pa.string()))


# -- the numbers --------------------------------------------------------------------------------------------------------------


def _features(slides: Sequence[Slide], width: int, asked: Asked) -> tuple[np.ndarray, list[Part]]:
    """(tiles, D): as float32 (float16 if all files are) in memory, or as float16 in a cache."""
    half = all(s.dtype == np.float16 for s in slides)
    need = sum(s.rows for s in slides) * width * (2 if half else 4)
    cache = asked.cache or (home() / "flat" if need > flat.room() else None)
    dtype = np.dtype(np.float16 if half or cache else np.float32)

    def fill(k: int) -> Part:
        x = slide_files.features(slides[k])
        digest = hashlib.sha256(f"{slides[k].file.stem}{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        most = _HALF if dtype == np.float16 else float(np.finfo(np.float32).max)
        wrong = np.flatnonzero(~(np.abs(x) <= np.float64(most)).all(1))  # compared as float64: 3e38 is beyond a float16
        bad = {int(r): f"a feature is not finite, or beyond {most:g} ({dtype})" for r in wrong}
        if bad and not asked.bad.skip:
            asked.bad.say(f"{slides[k].file} row {int(wrong[0]) + 1}: {bad[int(wrong[0])]}")
        x = x.astype(np.float32) if x.dtype.kind != "f" else x.copy() if len(wrong) else x
        x[wrong] = 0
        return Part(x.astype(dtype, copy=False), digest.hexdigest(), bad)

    files = [s.file for s in slides]
    return flat.flat([s.rows for s in slides], (width,), dtype, fill, cache, lambda: flat.key(files, ["slides", width]))


def _places(slides: Sequence[Slide], asked: Asked) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(tiles, 2) coordinates and (tiles,) sides, NaN where a slide has none; None where none has."""
    if all(s.coords is None for s in slides):
        return None, None
    coords = np.concatenate([np.full((s.rows, 2), np.nan) if s.coords is None else s.coords for s in slides])
    sides = [asked.tile or s.tile for s in slides]
    tiles = None if all(map(math.isnan, sides)) else np.repeat(np.array(sides, float), [s.rows for s in slides])
    return coords, tiles


def _ids(stems: list[str], sizes: list[int], coords: Any, names: list[str] | None, of_slide: np.ndarray) -> pa.Table:
    words = lambda codes, values: pa.DictionaryArray.from_arrays(np.repeat(codes, sizes), pa.array(values, pa.string()))  # noqa: E731
    ids: dict[str, Any] = {} if names is None else {"bag": words(of_slide, names)}
    ids |= {"slide": words(np.arange(len(stems)), stems), "tile": np.concatenate([np.arange(n) for n in sizes])}
    if coords is not None:
        ids |= {"x": coords[:, 0], "y": coords[:, 1]}
    return pa.table(ids)


def _notes(slides: Sequence[Slide], coords: Any, asked: Asked, dtype: str) -> list[str]:
    notes = [f"features kept as {dtype}"]
    without = [s.file.name for s in slides if s.coords is None]
    if without:
        notes.append("no coordinates" if coords is None else f"no coordinates in {some(without)}")
    sides = sorted({asked.tile or s.tile for s in slides if asked.tile or not math.isnan(s.tile)})
    unsaid = [s.file.name for s in slides if not asked.tile and math.isnan(s.tile) and s.coords is not None]
    if sides and coords is not None:
        notes.append(f"tiles of {', '.join(f'{side:g}' for side in sides[:6])} pixels of the full slide")
    if unsaid:
        notes.append(f"tile size not said in {some(unsaid)}; give it with tile=")
    return notes

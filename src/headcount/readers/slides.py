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

from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.readers import flat_array, slide_files
from headcount.readers.columns import FeatureSchema
from headcount.readers.flat_array import Part
from headcount.readers.folders import find_label_file
from headcount.readers.labels import find_common_name, join_labels, labels_from_table, open_label_table
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, first_per_bag, preview
from headcount.readers.slide_files import SLIDE_SUFFIXES, SlideFile, list_slide_files, peek_metadata
from headcount.readers.tables import file_suffix, is_dataframe
from headcount.readers.values import factorize

_SLIDE_IMAGE_SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".czi", ".dcm", *SLIDE_SUFFIXES)
_FLOAT16_MAX = 65504.0  # the largest float16


def is_slide_folder(folder: Path) -> bool:
    """Whether a folder holds feature files."""
    return bool(list_slide_files(folder))


def read_slides(folder: Path, options: ReadOptions) -> RawData:
    files = list_slide_files(folder)
    slides = {name: s for name, file in files.items() if (s := peek_metadata(file, options)) is not None}
    if not slides:
        raise HeadcountError(
            f"none of the {len(files)} feature files in {folder} can be read: {options.errors.messages[0]}"
        )
    widths = Counter(s.n_features for s in slides.values())
    width = options.preprocessor.shape[0] if options.preprocessor else widths.most_common(1)[0][0]
    for name, s in list(slides.items()):
        if s.n_features != width:
            options.errors.report(
                f"{s.file} has features of {s.n_features} numbers, {'the model' if options.preprocessor else 'others'} {width}"
            )
            del slides[name]
    of_slide, names, bag_labels = _assign_bags(folder, list(slides), options)
    kept = [s for s, b in zip(slides.values(), of_slide, strict=True) if b >= 0]
    stems = [n for n, b in zip(slides, of_slide, strict=True) if b >= 0]
    if not kept:
        raise HeadcountError(f"{folder}: no slide is left to read; {options.errors.messages[0]}")
    sizes = [s.n_tiles for s in kept]
    array, parts = _load_features(kept, width, options)
    bag = np.repeat(of_slide[of_slide >= 0], sizes)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    for k, part in enumerate(parts):
        for row, why in part.bad.items():
            options.errors.report(f"{kept[k].file} row {row + 1}: {why}")
            bag[ends[k] + row] = -1
    coords, tiles = _coordinates(kept, options)
    return RawData(
        kind="features", summary=f"read {folder}: {len(kept):,} slides, {int(ends[-1]):,} tiles of {width} features",
        origin=str(folder), schema=FeatureSchema("features", shape=(width,), roles=options.roles), content=array, bag=bag, names=names,
        labels=bag_labels, ids=_ids(stems, sizes, coords, names if names != stems else None, of_slide[of_slide >= 0]),
        digest=hashlib.sha256("".join(p.digest for p in parts).encode()).hexdigest(), coords=coords, tile_sizes=tiles,
        notes=_notes(kept, coords, options, str(array.dtype)), all_finite=True,
    )  # fmt: skip


# -- who is in which bag ------------------------------------------------------------------------------------------------------


def _assign_bags(folder: Path, stems: list[str], options: ReadOptions) -> tuple[np.ndarray, list[str], BagLabels]:
    """(slides,) bag of each slide (-1: left out), the bags' names, and what is said of them."""
    given = options.labels if options.labels is not None else find_label_file(folder)
    if given is None and (options.need_labels or options.roles.bag not in (None, "slide_id")):
        given = find_label_file(folder.parent)  # not for new slides: it may well be that of others
    slide_by_slide = np.arange(len(stems))
    if given is None:
        if options.need_labels:
            raise HeadcountError(
                f"{folder} has no labels.csv; add one with columns slide_id and label, or name a label file"
            )
        if options.roles.bag is not None and options.roles.bag != "slide_id":
            raise HeadcountError(
                f"bag={options.roles.bag!r} is a column of a label table, and there is none; give labels="
            )
        return slide_by_slide, stems, BagLabels(codes=np.full(len(stems), -1))
    if not (is_dataframe(given) or (isinstance(given, (str, Path)) and file_suffix(Path(given)) != ".npy")):
        return slide_by_slide, stems, join_labels(options, stems, None, given)
    table, origin, digest, roles, key = open_label_table(given, options, "slide_id")
    column = find_common_name("bag", [c for c in table.column_names if c != key], origin) if options.roles.bag else key
    column = column or key
    table = table.set_column(table.column_names.index(column), column, _strip_suffixes(table.column(column)))
    if column == key:
        return slide_by_slide, stems, labels_from_table(table, origin, digest, roles, key, options, stems)
    code, slide_ids = factorize(table.column(column))
    case, cases = factorize(table.column(key))
    first, wrong = first_per_bag(code, case, len(slide_ids))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise HeadcountError(f"{origin} row {row + 1}: slide {slide_ids[code[row]]!r} belongs to two bags ({key})")
    of = {slide: cases[first[k]] for k, slide in enumerate(slide_ids) if first[k] >= 0}
    missing = np.array([stem not in of for stem in stems])
    options.errors.report_rows(
        missing, lambda i: f"slide {stems[i]!r} is not in {origin}, so that its {key} is unknown"
    )
    names = list(dict.fromkeys(of[stem] for stem in stems if stem in of))
    place = {name: b for b, name in enumerate(names)}
    bag = np.array([place[of[stem]] if stem in of else -1 for stem in stems])
    return bag, names, labels_from_table(table, origin, digest, replace(roles, bag=key), key, options, names)


def _strip_suffixes(column: pa.ChunkedArray) -> pa.Array:
    """Slide ids without the ending of the slide's or the feature file."""
    code, values = factorize(column)
    bare = [v[: -len(e)] if (e := Path(v).suffix) and e.lower() in _SLIDE_IMAGE_SUFFIXES else v for v in values]
    return pa.DictionaryArray.from_arrays(pa.array(code, mask=code < 0), pa.array(bare, pa.string()))


# -- the numbers --------------------------------------------------------------------------------------------------------------


def _load_features(slides: Sequence[SlideFile], width: int, options: ReadOptions) -> tuple[np.ndarray, list[Part]]:
    """(tiles, D): as float32 (float16 if all files are) in memory, or as float16 in a cache."""
    half = all(s.dtype == np.float16 for s in slides)
    need = sum(s.n_tiles for s in slides) * width * (2 if half else 4)
    cache = options.cache or (cache_folder() / "flat" if need > flat_array.available_memory() else None)
    dtype = np.dtype(np.float16 if half or cache else np.float32)

    def fill(k: int) -> Part:
        x = slide_files.load_features(slides[k])
        digest = hashlib.sha256(f"{slides[k].file.stem}{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        most = _FLOAT16_MAX if dtype == np.float16 else float(np.finfo(np.float32).max)
        wrong = np.flatnonzero(~(np.abs(x) <= np.float64(most)).all(1))  # compared as float64: 3e38 is beyond a float16
        bad = {int(r): f"a feature is not finite, or beyond {most:g} ({dtype})" for r in wrong}
        if bad and not options.errors.skip:
            options.errors.report(f"{slides[k].file} row {int(wrong[0]) + 1}: {bad[int(wrong[0])]}")
        x = x.astype(np.float32) if x.dtype.kind != "f" else x.copy() if len(wrong) else x
        x[wrong] = 0
        return Part(x.astype(dtype, copy=False), digest.hexdigest(), bad)

    files = [s.file for s in slides]
    return flat_array.build_flat_array(
        [s.n_tiles for s in slides],
        (width,),
        dtype,
        fill,
        cache,
        lambda: flat_array.cache_key(files, ["slides", width]),
    )


def _coordinates(slides: Sequence[SlideFile], options: ReadOptions) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(tiles, 2) coordinates and (tiles,) sides, NaN where a slide has none; None where none has."""
    if all(s.coords is None for s in slides):
        return None, None
    coords = np.concatenate([np.full((s.n_tiles, 2), np.nan) if s.coords is None else s.coords for s in slides])
    sides = [options.tile or s.tile_size for s in slides]
    tiles = None if all(map(math.isnan, sides)) else np.repeat(np.array(sides, float), [s.n_tiles for s in slides])
    return coords, tiles


def _ids(stems: list[str], sizes: list[int], coords: Any, names: list[str] | None, of_slide: np.ndarray) -> pa.Table:
    words = lambda codes, values: pa.DictionaryArray.from_arrays(np.repeat(codes, sizes), pa.array(values, pa.string()))  # noqa: E731
    ids: dict[str, Any] = {} if names is None else {"bag": words(of_slide, names)}
    ids |= {"slide": words(np.arange(len(stems)), stems), "tile": np.concatenate([np.arange(n) for n in sizes])}
    if coords is not None:
        ids |= {"x": coords[:, 0], "y": coords[:, 1]}
    return pa.table(ids)


def _notes(slides: Sequence[SlideFile], coords: Any, options: ReadOptions, dtype: str) -> list[str]:
    notes = [f"features kept as {dtype}"]
    without = [s.file.name for s in slides if s.coords is None]
    if without:
        notes.append("no coordinates" if coords is None else f"no coordinates in {preview(without)}")
    sides = sorted({options.tile or s.tile_size for s in slides if options.tile or not math.isnan(s.tile_size)})
    unsaid = [s.file.name for s in slides if not options.tile and math.isnan(s.tile_size) and s.coords is not None]
    if sides and coords is not None:
        notes.append(f"tiles of {', '.join(f'{side:g}' for side in sides[:6])} pixels of the full slide")
    if unsaid:
        notes.append(f"tile size not said in {preview(unsaid)}; give it with tile=")
    return notes

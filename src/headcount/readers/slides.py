"""Feature folders of whole-slide pipelines: one file per slide, and a table that labels slides or patients.

    TRIDENT   <slide>.h5 with features (n, D) and coords (n, 2); the tile size is coords.attrs["patch_size_level0"]
    CLAM      h5_files/<slide>.h5 likewise (attributes, where present: patch_size, downsample), pt_files/<slide>.pt a tensor
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
from headcount.readers.columns import find_common_name
from headcount.readers.flat_array import Part
from headcount.readers.images import find_label_file
from headcount.readers.labels import join_labels, labels_from_table, open_label_table
from headcount.readers.preprocessing import FeatureSchema
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, first_per_bag
from headcount.readers.slide_files import SLIDE_SUFFIXES, SlideFile, list_slide_files, read_metadata
from headcount.readers.tables import file_suffix, is_dataframe
from headcount.readers.values import factorize, preview

_SLIDE_IMAGE_SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".czi", ".dcm", *SLIDE_SUFFIXES)
_FLOAT16_MAX = 65504.0


def is_slide_folder(folder: Path) -> bool:
    """Whether a folder holds feature files."""
    return bool(list_slide_files(folder))


def read_slides(folder: Path, options: ReadOptions) -> RawData:
    files = list_slide_files(folder)
    slides = {name: s for name, file in files.items() if (s := read_metadata(file, options.errors)) is not None}
    if not slides:
        first = options.errors.messages[0]
        raise HeadcountError(f"none of the {len(files)} feature files in {folder} can be read: {first}")
    model = options.preprocessor
    width = model.shape[0] if model else Counter(s.n_features for s in slides.values()).most_common(1)[0][0]
    for name, s in list(slides.items()):
        if s.n_features != width:
            expected = f"{'the model' if model else 'others'} {width}"
            options.errors.report(f"{s.file} has features of {s.n_features} numbers, {expected}")
            del slides[name]
    bag_of_slide, names, labels = _assign_bags(folder, list(slides), options)
    kept = np.flatnonzero(bag_of_slide >= 0).tolist()
    if not kept:
        raise HeadcountError(f"{folder}: no slide is left to read; {options.errors.messages[0]}")
    kept_slides, kept_names = [[*slides.values()][i] for i in kept], [[*slides][i] for i in kept]
    bag_of_slide, sizes = bag_of_slide[kept], [s.n_tiles for s in kept_slides]
    array, parts = _load_features(kept_slides, width, options)
    bag = np.repeat(bag_of_slide, sizes)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    for slide, start, part in zip(kept_slides, starts, parts, strict=False):
        for row, why in part.problems.items():
            options.errors.report(f"{slide.file} row {row + 1}: {why}")
            bag[start + row] = -1
    coords, tile_sizes = _coordinates(kept_slides, options)
    return RawData(
        kind="features", summary=f"read {folder}: {len(kept):,} slides, {len(bag):,} tiles of {width} features",
        origin=str(folder), schema=FeatureSchema("features", shape=(width,), roles=options.roles), content=array, bag=bag,
        names=names, labels=labels, ids=_ids(kept_names, sizes, coords, names if names != kept_names else None, bag_of_slide),
        digest=hashlib.sha256("".join(p.digest for p in parts).encode()).hexdigest(), coords=coords, tile_sizes=tile_sizes,
        notes=_notes(kept_slides, coords, options, str(array.dtype)), all_finite=True,
    )  # fmt: skip


def _assign_bags(folder: Path, slides: list[str], options: ReadOptions) -> tuple[np.ndarray, list[str], BagLabels]:
    """(slides,) bag of each slide (-1: left out), the names of the bags, and their labels."""
    labels, bag_column = options.labels if options.labels is not None else find_label_file(folder), options.roles.bag
    if labels is None and (options.need_labels or bag_column not in (None, "slide_id")):
        labels = find_label_file(folder.parent)  # not for new slides: it may well be that of others
    one_per_slide = np.arange(len(slides))
    if labels is None:
        if options.need_labels:
            advice = "add one with columns slide_id and label, or name a label file"
            raise HeadcountError(f"{folder} has no labels.csv; {advice}")
        if bag_column not in (None, "slide_id"):
            raise HeadcountError(f"bag={bag_column!r} is a column of a label table, and there is none; give labels=")
        return one_per_slide, slides, BagLabels(codes=np.full(len(slides), -1))
    if not (is_dataframe(labels) or (isinstance(labels, (str, Path)) and file_suffix(Path(labels)) != ".npy")):
        return one_per_slide, slides, join_labels(labels, options, slides)
    source = open_label_table(labels, options, "slide_id")
    table, key = source.table, source.roles.bag or ""
    others = [c for c in table.column_names if c != key]
    slide_column = (find_common_name("bag", others, source.origin) if bag_column else None) or key
    stems = _without_suffixes(table.column(slide_column))
    source = replace(source, table=table.set_column(table.column_names.index(slide_column), slide_column, stems))
    if slide_column == key:
        return one_per_slide, slides, labels_from_table(source, options, slides)
    codes, slide_ids = source.factorize(slide_column)
    case_codes, cases = source.factorize(key)
    first, differs = first_per_bag(codes, case_codes, len(slide_ids))
    if differs.any():
        row = int(np.flatnonzero(differs)[0])
        raise HeadcountError(f"{source.row(row)}: slide {slide_ids[codes[row]]!r} belongs to two bags ({key})")
    case_of = {slide: cases[first[k]] for k, slide in enumerate(slide_ids) if first[k] >= 0}
    missing = np.array([slide not in case_of for slide in slides])
    problem = f"is not in {source.origin}, so that its {key} is unknown"
    options.errors.report_rows(missing, lambda i: f"slide {slides[i]!r} {problem}")
    names = list(dict.fromkeys(case_of[slide] for slide in slides if slide in case_of))
    position = {name: b for b, name in enumerate(names)}
    bag = np.array([position[case_of[slide]] if slide in case_of else -1 for slide in slides])
    return bag, names, labels_from_table(source, options, names)


def _without_suffixes(column: pa.ChunkedArray) -> pa.Array:
    """Slide ids without the ending of an image or feature file."""
    codes, values = factorize(column)
    stems = [v[: -len(e)] if (e := Path(v).suffix) and e.lower() in _SLIDE_IMAGE_SUFFIXES else v for v in values]
    return pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(stems, pa.string()))


def _load_features(slides: Sequence[SlideFile], width: int, options: ReadOptions) -> tuple[np.ndarray, list[Part]]:
    """(tiles, D): as float32 (float16 if all files are) in memory, or as float16 in a cache."""
    all_half = all(s.dtype == np.float16 for s in slides)
    n_bytes = sum(s.n_tiles for s in slides) * width * (2 if all_half else 4)
    too_large = n_bytes > flat_array.available_memory()
    cache = options.cache or (cache_folder() / "flat" if too_large else None)
    dtype = np.dtype(np.float16 if all_half or cache else np.float32)
    most = _FLOAT16_MAX if dtype == np.float16 else float(np.finfo(np.float32).max)

    def read_slide(k: int) -> Part:
        x = slide_files.load_features(slides[k])
        digest = hashlib.sha256(f"{slides[k].file.stem}{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        wrong = np.flatnonzero(~(np.abs(x) <= np.float64(most)).all(1))  # compared as float64: 3e38 is beyond a float16
        problems = {int(r): f"a feature is not finite, or beyond {most:g} ({dtype})" for r in wrong}
        if problems and not options.errors.skip:
            row, why = next(iter(problems.items()))
            options.errors.report(f"{slides[k].file} row {row + 1}: {why}")
        x = x.astype(np.float32) if x.dtype.kind != "f" else x.copy() if len(wrong) else x
        x[wrong] = 0
        return Part(x.astype(dtype, copy=False), digest.hexdigest(), problems)

    return flat_array.build_flat_array(
        [s.n_tiles for s in slides], (width,), dtype, read_slide, cache,
        lambda: flat_array.cache_key([s.file for s in slides], ["slides", width]),
    )  # fmt: skip


def _coordinates(slides: Sequence[SlideFile], options: ReadOptions) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(tiles, 2) coordinates and (tiles,) sizes, NaN where a slide has none; None where no slide has any."""
    if all(s.coords is None for s in slides):
        return None, None
    coords = np.concatenate([np.full((s.n_tiles, 2), np.nan) if s.coords is None else s.coords for s in slides])
    sizes = [options.tile or s.tile_size for s in slides]
    known = not all(map(math.isnan, sizes))
    return coords, np.repeat(np.array(sizes, float), [s.n_tiles for s in slides]) if known else None


def _ids(
    slides: list[str], sizes: list[int], coords: np.ndarray | None, names: list[str] | None, bag_of_slide: np.ndarray
) -> pa.Table:
    """The slide of each tile and its number in the slide; the bag, where that is not the slide."""

    def repeated(codes: np.ndarray, values: list[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(np.repeat(codes, sizes), pa.array(values, pa.string()))

    ids: dict[str, Any] = {} if names is None else {"bag": repeated(bag_of_slide, names)}
    ids |= {"slide": repeated(np.arange(len(slides)), slides), "tile": np.concatenate([np.arange(n) for n in sizes])}
    if coords is not None:
        ids |= {"x": coords[:, 0], "y": coords[:, 1]}
    return pa.table(ids)


def _notes(slides: Sequence[SlideFile], coords: np.ndarray | None, options: ReadOptions, dtype: str) -> list[str]:
    notes = [f"features kept as {dtype}"]
    if coords is None:
        return [*notes, "no coordinates"]
    if without := [s.file.name for s in slides if s.coords is None]:
        notes.append(f"no coordinates in {preview(without)}")
    if sizes := sorted({size for s in slides if not math.isnan(size := options.tile or s.tile_size)}):
        notes.append(f"tiles of {', '.join(f'{size:g}' for size in sizes[:6])} pixels of the full slide")
    if unknown := [
        s.file.name for s in slides if not options.tile and math.isnan(s.tile_size) and s.coords is not None
    ]:
        notes.append(f"tile size unknown in {preview(unknown)}; give it with tile=")
    return notes

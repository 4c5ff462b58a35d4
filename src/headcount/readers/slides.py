"""Feature folders of whole-slide pipelines: one file per slide, and a table that labels slides or patients.

    TRIDENT   <slide>.h5 with features (n, D) and coords (n, 2); the tile size is coords.attrs["patch_size_level0"]
    CLAM      h5_files/<slide>.h5 likewise (attributes, where present: patch_size, downsample), pt_files/<slide>.pt a tensor
    others    <slide>.npy (n, D)

The label table has columns slide_id and label, and case_id if there are patients: the bag is the slide and the patient its
group, or with ``bag="case_id"`` the patient is the bag. What does not fit into memory becomes one flat float16 cache. No code
in a feature file is run.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import compress
from pathlib import Path
from typing import Any
from zipfile import ZipFile, is_zipfile

import numpy as np
import pyarrow as pa
import torch

from headcount.bags.pool import to_numpy
from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.loading import check_declared_size, load_npy, open_file
from headcount.readers import flat_array
from headcount.readers.columns import clean_name, factorize, find_common_name, preview
from headcount.readers.dataset import BagLabels, ErrorPolicy, RawData, ReadOptions
from headcount.readers.flat_array import Part
from headcount.readers.images import find_label_file, list_folder
from headcount.readers.labels import first_per_bag, join_labels, labels_from_table, open_label_table
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.tables import file_suffix, is_dataframe

_HDF5 = (".h5", ".hdf5")
SLIDE_SUFFIXES = (*_HDF5, ".pt", ".npy")
_SLIDE_IMAGE_SUFFIXES = (".svs", ".tif", ".tiff", ".ndpi", ".mrxs", ".scn", ".bif", ".czi", ".dcm", *SLIDE_SUFFIXES)
_FLOAT16_MAX = 65504.0


def read_slides(folder: Path, options: ReadOptions) -> RawData:
    files = list_slide_files(folder)
    if any(f.suffix.lower() in _HDF5 for f in files.values()) and find_spec("h5py") is None:
        raise HeadcountError("slides in HDF5 need h5py: pip install 'headcount[slides]'")
    slides = {name: s for name, file in files.items() if (s := read_metadata(file, options.errors)) is not None}
    if not slides:
        raise HeadcountError(f"none of the {len(files)} files in {folder} can be read: {options.errors.messages[0]}")
    model = options.preprocessor
    width = model.shape[0] if model else Counter(s.n_features for s in slides.values()).most_common(1)[0][0]
    expected = f"{'the model' if model else 'others'} {width}"
    for name, s in list(slides.items()):
        if s.n_features != width:
            options.errors.report(f"{s.file} has features of {s.n_features} numbers, {expected}")
            del slides[name]
    bag_of_slide, names, labels = _assign_bags(folder, list(slides), options)
    kept = bag_of_slide >= 0
    if not kept.any():
        raise HeadcountError(f"{folder}: no slide is left to read; {options.errors.messages[0]}")
    kept_names, kept_slides = list(compress(slides, kept)), list(compress(slides.values(), kept))
    bag_of_slide, sizes = bag_of_slide[kept], [s.n_tiles for s in kept_slides]
    array, problems, digest = _load_features(kept_slides, width, options)
    bag, slide_of, starts = np.repeat(bag_of_slide, sizes), np.repeat(np.arange(len(sizes)), sizes), np.cumsum(sizes) - sizes
    for row, why in problems.items():
        options.errors.report(f"{kept_slides[slide_of[row]].file} row {row - starts[slide_of[row]] + 1}: {why}")
        bag[row] = -1
    options.notes.append(f"features kept as {array.dtype}")
    coords, tile_sizes = _coordinates(kept_slides, options)

    def repeat(codes: np.ndarray, values: Sequence[str]) -> pa.DictionaryArray:
        return pa.DictionaryArray.from_arrays(np.repeat(codes, sizes), pa.array(values, pa.string()))

    ids: dict[str, Any] = {} if names == kept_names else {"bag": repeat(bag_of_slide, names)}
    ids |= {"slide": repeat(np.arange(len(sizes)), kept_names), "tile": np.concatenate([np.arange(n) for n in sizes])}
    ids |= {} if coords is None else {"x": coords[:, 0], "y": coords[:, 1]}
    return RawData(
        summary=f"read {folder}: {len(sizes):,} slides, {len(bag):,} tiles of {width} features",
        origin=str(folder), schema=Preprocessor("features", shape=(width,), roles=options.roles), content=array, bag=bag,
        names=names, labels=labels, ids=pa.table(ids),
        digest=digest, coords=coords, tile_sizes=tile_sizes,
        all_finite=True,
    )  # fmt: skip


def _assign_bags(folder: Path, slides: list[str], options: ReadOptions) -> tuple[np.ndarray, list[str], BagLabels]:
    """(slides,) bag of each slide (-1: left out), the names of the bags, and their labels."""
    labels, bag_column = options.labels if options.labels is not None else find_label_file(folder), options.roles.bag
    if labels is None and (options.need_labels or bag_column not in (None, "slide_id")):
        labels = find_label_file(folder.parent)  # not for new slides: it may well be that of others
    one_per_slide = np.arange(len(slides))
    if labels is None and options.need_labels:
        raise HeadcountError(f"{folder} has no labels.csv; add one with columns slide_id and label, or name a label file")
    if labels is None and bag_column not in (None, "slide_id"):
        raise HeadcountError(f"bag={bag_column!r} is a column of a label table, and there is none; give labels=")
    if not (is_dataframe(labels) or (isinstance(labels, (str, Path)) and file_suffix(Path(labels)) != ".npy")):
        return one_per_slide, slides, join_labels(labels, options, slides)
    source = open_label_table(labels, options, "slide_id")
    table, key = source.table, source.roles.bag or ""
    others = [c for c in table.column_names if c != key]
    slide_column = (find_common_name("bag", others, source.origin) if bag_column else None) or key
    codes, ids = factorize(table.column(slide_column))
    ids = [v[: -len(e)] if (e := Path(v).suffix) and e.lower() in _SLIDE_IMAGE_SUFFIXES else v for v in ids]
    stems = pa.DictionaryArray.from_arrays(pa.array(codes, mask=codes < 0), pa.array(ids, pa.string()))
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
    position: dict[str, int] = {}
    bag = np.array([position.setdefault(case_of[s], len(position)) if s in case_of else -1 for s in slides])
    return bag, list(position), labels_from_table(source, options, list(position))


def _load_features(slides: Sequence[SlideFile], width: int, options: ReadOptions) -> tuple[np.ndarray, dict[int, str], str]:
    """(tiles, D): as float32 (float16 if all files are) in memory, or as float16 in a cache."""
    all_half = all(s.dtype == np.float16 for s in slides)
    n_bytes = sum(s.n_tiles for s in slides) * width * (2 if all_half else 4)
    cache = options.cache or (cache_folder() / "flat" if n_bytes > flat_array.available_memory() else None)
    dtype = np.dtype(np.float16 if all_half or cache else np.float32)
    most = _FLOAT16_MAX if dtype == np.float16 else float(np.finfo(np.float32).max)

    def read_slide(k: int) -> Part:
        x = load_features(slides[k])
        digest = hashlib.sha256(f"{slides[k].file.stem}{x.dtype}{x.shape}".encode() + np.ascontiguousarray(x).tobytes())
        wrong = np.flatnonzero(~(np.abs(x) <= np.float64(most)).all(1))  # compared as float64: 3e38 is beyond a float16
        why = f"a feature is not finite, or beyond {most:g} ({dtype})"
        if len(wrong) and not options.errors.skip:
            options.errors.report(f"{slides[k].file} row {wrong[0] + 1}: {why}")
        x = x.astype(np.float32) if x.dtype.kind != "f" else x.copy() if len(wrong) else x
        x[wrong] = 0
        return Part(x.astype(dtype, copy=False), digest.hexdigest(), dict.fromkeys(wrong.tolist(), why))

    make_key = lambda: flat_array.cache_key([s.file for s in slides], ["slides", width])  # noqa: E731
    return flat_array.build_flat_array([s.n_tiles for s in slides], (width,), dtype, read_slide, cache, make_key)


def _coordinates(slides: Sequence[SlideFile], options: ReadOptions) -> tuple[np.ndarray | None, np.ndarray | None]:
    """(tiles, 2) coordinates and (tiles,) sizes, NaN where a slide has none, None where none has any."""
    if all(s.coords is None for s in slides):
        options.notes.append("no coordinates")
        return None, None
    n_tiles, sizes = [s.n_tiles for s in slides], [options.tile or s.tile_size for s in slides]
    coords = np.concatenate([np.full((s.n_tiles, 2), np.nan) if s.coords is None else s.coords for s in slides])
    known = sorted({size for size in sizes if not math.isnan(size)})
    missing = [s.file.name for s in slides if s.coords is None]
    unknown = [s.file.name for s, size in zip(slides, sizes, strict=True) if math.isnan(size) and s.coords is not None]
    options.notes.extend([f"no coordinates in {preview(missing)}"] if missing else [])
    options.notes.extend([f"tiles of {', '.join(f'{s:g}' for s in known[:6])} pixels of the full slide"] if known else [])
    options.notes.extend([f"tile size unknown in {preview(unknown)}; give it with tile="] if unknown else [])
    return coords, np.repeat(np.array(sizes, float), n_tiles) if known else None


@dataclass(frozen=True)
class SlideFile:
    """One feature file and its metadata."""

    file: Path
    n_tiles: int
    n_features: int
    dtype: np.dtype
    coords: np.ndarray | None  # (tiles, 2)
    tile_size: float  # NaN: unknown


def list_slide_files(folder: Path) -> dict[str, Path]:
    """Slide -> file, by name; an HDF5 file, which has coordinates, before a tensor of the same slide."""
    files: dict[str, Path] = {}
    features = [s for s in list_folder(folder) if s.name.startswith("features_") and s.is_dir()]
    for subfolder in (folder / "pt_files", folder / "h5_files", *(features if len(features) == 1 else ()), folder):
        candidates = list_folder(subfolder) if subfolder.is_dir() else []
        for file in sorted(candidates, key=lambda f: f.suffix.lower() in _HDF5):
            if file.suffix.lower() in SLIDE_SUFFIXES and not file.name.startswith("labels."):
                files[clean_name(file.stem) or file.stem] = file
    return dict(sorted(files.items()))


def read_metadata(file: Path, errors: ErrorPolicy) -> SlideFile | None:
    """Sizes, coordinates and tile size; None if the file is damaged and such files are skipped."""
    try:
        with _open_slide(file) as (x, coords, attrs):
            shape, dtype = x.shape, x.dtype
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(shape) != 2 or dtype.kind not in "fiu" or dtype.itemsize > 8:
            raise HeadcountError(f"features are {dtype} of shape {tuple(shape)}; they must be numbers (tiles, D)")
        if 0 in shape:
            raise HeadcountError("it has no tiles")
        check_declared_size(file, math.prod(shape) * dtype.itemsize)
        n_tiles, n_features = map(int, shape)
        if coords is not None:
            coords = coords[0] if coords.ndim == 3 and len(coords) == 1 else coords
            if coords.shape != (n_tiles, 2) or coords.dtype.kind not in "fiu":
                problem = f"coords are {coords.dtype} of shape {coords.shape} for {n_tiles} tiles"
                raise HeadcountError(f"{problem}; they must be (tiles, 2)")
            if len(rows := np.flatnonzero(~np.isfinite(coords).all(1))):
                raise HeadcountError(f"row {rows[0] + 1} of coords is not finite")
            coords = coords.astype(np.float64)
        return SlideFile(file, n_tiles, n_features, dtype, coords, _tile_size(attrs))
    except HeadcountError as e:
        errors.report(f"{file}: {str(e).removeprefix(f'{file} ')}")
    except Exception as e:  # a damaged file makes HDF5 and torch raise almost anything
        errors.report(f"{file} cannot be read: {str(e) or type(e).__name__}")
    return None


@contextmanager
def _open_slide(file: Path) -> Iterator[tuple[Any, np.ndarray | None, dict[str, Any]]]:
    """The features, not read yet where the file allows it, the coordinates and their attributes."""
    open_file(file).close()  # a pipe would block, and a device has no end
    if file.suffix.lower() not in _HDF5:
        yield *_load_tensor(file), {}
        return
    import h5py

    with h5py.File(file, "r") as f:
        features = _get_dataset(f, "features")
        coords = _get_dataset(f, "coords") if "coords" in f else None
        yield features, None if coords is None else np.asarray(coords[()]), {} if coords is None else dict(coords.attrs)


def _get_dataset(f: Any, name: str) -> Any:
    """A dataset in the file itself whose numbers are there."""
    import h5py

    if name not in f:
        raise HeadcountError(f"it has no dataset {name!r}; it has {preview(sorted(f), 6) or 'none'}")
    d = f[name] if isinstance(f.get(name, getlink=True), h5py.HardLink) else None
    if not isinstance(d, h5py.Dataset) or d.is_virtual:
        raise HeadcountError(f"{name!r} must be a dataset in the file itself, not a group or a link to another")
    if d.dtype.kind not in "fiub":
        raise HeadcountError(f"{name!r} holds {d.dtype}, not numbers")
    stored, claimed = d.id.get_storage_size(), d.size * d.dtype.itemsize
    if claimed > 1000 * stored and claimed > 1 << 16:  # a shape without the numbers
        raise HeadcountError(f"{name!r} claims {claimed:,} bytes of numbers and holds {stored:,}")
    check_declared_size(Path(f.filename), claimed, stored)
    return d


def _load_tensor(file: Path) -> tuple[np.ndarray, np.ndarray | None]:
    """Features and coordinates of a .pt tensor, or dict with features and coords, or of an .npy."""
    if file.suffix.lower() == ".npy":
        return load_npy(file, mapped=True), None
    if is_zipfile(file):
        with ZipFile(file) as members:
            check_declared_size(file, sum(member.file_size for member in members.infolist()))
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as e:
        why = " ".join(str(e).split())[:120]
        raise HeadcountError(f"it is no tensor file, or holds more than tensors, which is not loaded ({why})") from None
    coords = loaded.get("coords") if isinstance(loaded, dict) else None
    loaded = loaded.get("features", loaded.get("feats")) if isinstance(loaded, dict) else loaded
    if not isinstance(loaded, torch.Tensor) or loaded.is_sparse or loaded.is_quantized or loaded.is_complex():
        raise HeadcountError("it holds no tensor of features")
    for tensor in (loaded, coords):  # which may repeat one number
        check_declared_size(file, tensor.numel() * tensor.element_size() if isinstance(tensor, torch.Tensor) else 0)
    return to_numpy(loaded), to_numpy(coords) if isinstance(coords, torch.Tensor) else None


def _tile_size(attrs: dict[str, Any]) -> float:
    """The side of a tile in pixels of the full slide, NaN if the attributes do not have it."""
    for names in (["patch_size_level0"], ["patch_size", "downsample"]):
        with suppress(KeyError, ValueError, TypeError, IndexError):
            side = math.prod(float(np.asarray(attrs[name]).ravel()[0]) for name in names)
            if not math.isnan(side):
                return side if 0 < side < math.inf else math.nan
    return math.nan


def load_features(slide: SlideFile) -> np.ndarray:
    """(tiles, D) of a slide whose metadata were read before."""
    try:
        with _open_slide(slide.file) as (features, _, _):
            x = np.asarray(features[()])
        x = x.reshape(x.shape[-2:])
    except Exception as e:
        raise HeadcountError(f"{slide.file} cannot be read: {str(e) or type(e).__name__}") from None
    if x.shape != (slide.n_tiles, slide.n_features):
        raise HeadcountError(f"{slide.file} changed while it was read")
    return x

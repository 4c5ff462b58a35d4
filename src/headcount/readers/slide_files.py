"""The feature file of one slide: HDF5 as TRIDENT and CLAM write it, a tensor in .pt, an array in .npy; no code in it is run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.bags.pool import to_numpy
from headcount.errors import HeadcountError
from headcount.readers.raw_data import ErrorPolicy
from headcount.readers.values import clean_name, preview

_HDF5 = (".h5", ".hdf5")
SLIDE_SUFFIXES = (*_HDF5, ".pt", ".npy")


class MissingDependency(HeadcountError):
    """A package that is not installed: no reason to skip a file."""


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
    try:
        features = [s for s in folder.glob("features_*") if s.is_dir()]
        for place in (folder / "pt_files", folder / "h5_files", *(features if len(features) == 1 else ()), folder):
            here = sorted(place.iterdir()) if place.is_dir() else []
            here = [f for f in here if f.suffix.lower() in SLIDE_SUFFIXES and not f.name.startswith((".", "labels."))]
            for file in sorted(here, key=lambda f: f.suffix.lower() in _HDF5):
                files[clean_name(file.stem) or file.stem] = file
    except OSError as e:
        raise HeadcountError(f"cannot look into {folder}: {e.strerror or e}") from None
    return dict(sorted(files.items()))


def read_metadata(file: Path, errors: ErrorPolicy) -> SlideFile | None:
    """Sizes, coordinates and tile size; None if the file is damaged and such files are skipped."""
    try:
        if file.suffix.lower() in _HDF5:
            with _open_hdf5(file) as f:
                x, coords = _get_dataset(f, "features"), f.get("coords")
                shape, dtype = x.shape, x.dtype
                attrs = {} if coords is None else dict(coords.attrs)
                coords = None if coords is None else np.asarray(_get_dataset(f, "coords")[()])
        else:
            x, coords, attrs = _load_tensor(file)
            shape, dtype = x.shape, x.dtype
        shape = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
        if len(shape) != 2 or dtype.kind not in "fiu" or dtype.itemsize > 8:
            raise HeadcountError(f"features are {dtype} of shape {tuple(shape)}; they must be numbers (tiles, D)")
        if 0 in shape:
            raise HeadcountError("it has no tiles")
        n_tiles, n_features = map(int, shape)
        return SlideFile(file, n_tiles, n_features, dtype, _check_coords(coords, n_tiles), _tile_size(attrs))
    except MissingDependency:
        raise
    except HeadcountError as e:
        errors.report(f"{file}: {e}")
    except Exception as e:  # a damaged file makes HDF5 and torch raise almost anything
        errors.report(f"{file} cannot be read: {str(e) or type(e).__name__}")
    return None


def _open_hdf5(file: Path) -> Any:
    try:
        import h5py
    except ImportError:
        raise MissingDependency("slides in HDF5 need h5py: pip install 'headcount[slides]'") from None
    return h5py.File(file, "r")


def _get_dataset(f: Any, name: str) -> Any:
    """A dataset in the file itself whose numbers are really there."""
    import h5py

    if name not in f:
        raise HeadcountError(f"it has no dataset {name!r}; it has {preview(sorted(f), 6) or 'none'}")
    is_own = isinstance(f.get(name, getlink=True), h5py.HardLink) and isinstance(f[name], h5py.Dataset)
    if not is_own or f[name].is_virtual:
        raise HeadcountError(f"{name!r} must be a dataset in the file itself, not a group or a link to another")
    d = f[name]
    if d.dtype.kind not in "fiub":
        raise HeadcountError(f"{name!r} holds {d.dtype}, not numbers")
    stored, claimed = d.id.get_storage_size(), d.size * d.dtype.itemsize
    if claimed > 1000 * stored and claimed > 1 << 16:  # a shape without the numbers
        raise HeadcountError(f"{name!r} claims {claimed:,} bytes of numbers and holds {stored:,}")
    return d


def _load_tensor(file: Path) -> tuple[np.ndarray, np.ndarray | None, dict[str, Any]]:
    """Features, coordinates and attributes of a .pt tensor, or dict with features and coords, or of an .npy."""
    if file.suffix.lower() == ".npy":
        return np.load(file, mmap_mode="r", allow_pickle=False), None, {}
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as e:
        why = " ".join(str(e).split())[:120]
        raise HeadcountError(f"it is no tensor file, or holds more than tensors, which is not loaded ({why})") from None
    coords = None
    if isinstance(loaded, dict):
        coords = loaded.get("coords")
        loaded = loaded.get("features", loaded.get("feats"))
    if not isinstance(loaded, torch.Tensor) or loaded.is_sparse or loaded.is_quantized or loaded.is_complex():
        raise HeadcountError("it holds no tensor of features")
    return to_numpy(loaded), to_numpy(coords) if isinstance(coords, torch.Tensor) else None, {}


def _check_coords(coords: np.ndarray | None, n_tiles: int) -> np.ndarray | None:
    if coords is None:
        return None
    coords = coords[0] if coords.ndim == 3 and len(coords) == 1 else coords
    if coords.shape != (n_tiles, 2) or coords.dtype.kind not in "fiu":
        problem = f"coords are {coords.dtype} of shape {coords.shape} for {n_tiles} tiles"
        raise HeadcountError(f"{problem}; they must be (tiles, 2)")
    if not np.isfinite(coords).all():
        row = int(np.flatnonzero(~np.isfinite(coords).all(1))[0])
        raise HeadcountError(f"row {row + 1} of coords is not finite")
    return coords.astype(np.float64)


def _tile_size(attrs: dict[str, Any]) -> float:
    """The side of a tile in pixels of the full slide, NaN if the attributes do not have it."""

    def number(name: str) -> float:
        try:
            return float(np.asarray(attrs[name]).ravel()[0])
        except (KeyError, ValueError, TypeError, IndexError):
            return math.nan

    side = number("patch_size_level0")
    if math.isnan(side):
        side = number("patch_size") * number("downsample")
    return side if math.isfinite(side) and side > 0 else math.nan


def load_features(slide: SlideFile) -> np.ndarray:
    """(tiles, D) of a slide whose metadata were read before."""
    try:
        if slide.file.suffix.lower() in _HDF5:
            with _open_hdf5(slide.file) as f:
                x = f["features"][()]
        else:
            x = np.asarray(_load_tensor(slide.file)[0])
        x = x.reshape(x.shape[-2:])
    except Exception as e:
        raise HeadcountError(f"{slide.file} cannot be read: {str(e) or type(e).__name__}") from None
    if x.shape != (slide.n_tiles, slide.n_features):
        raise HeadcountError(f"{slide.file} changed while it was read")
    return x

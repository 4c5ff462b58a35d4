"""The cache: every named source once, in one format, so that loading it is memory-mapping a file.

<cache>/<name>/images.npy    (M, H, W, channels) uint8, mapped, never read as a whole
<cache>/<name>/labels.npy    (M,) int64
<cache>/<name>/source.json   name, classes, count, shape, checksum, note, format
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, file_lock

FORMAT = 1
_CHUNK = 1 << 12  # rows hashed at a time: no second copy of the images


def cache_folder(cache: str | Path | None = None) -> Path:
    """The cache folder: the one given, else $HEADCOUNT_DATA, else ~/.cache/headcount."""
    return Path(cache or os.environ.get("HEADCOUNT_DATA") or "~/.cache/headcount").expanduser().absolute()


def data_checksum(data: np.ndarray, truth: np.ndarray) -> str:
    """sha256 over the rows in order, then the class numbers as int64; little-endian on every machine."""
    digest = hashlib.sha256()
    dtype = data.dtype.newbyteorder("<")
    for start in range(0, len(data), _CHUNK):
        digest.update(np.ascontiguousarray(data[start : start + _CHUNK], dtype).data)
    digest.update(truth.astype("<i8").tobytes())
    return digest.hexdigest()


def write_source(folder: Path, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], note: str) -> None:
    """Put a source into the cache; an older version is replaced."""
    metadata = {
        "name": folder.name,
        "classes": list(classes),
        "count": len(images),
        "shape": list(images.shape[1:]),
        "checksum": data_checksum(images, labels),
        "note": note,
        "format": FORMAT,
    }
    try:
        with atomic_folder(folder, replace=True) as part:
            np.save(part / "images.npy", images, allow_pickle=False)
            np.save(part / "labels.npy", labels.astype("<i8"), allow_pickle=False)
            (part / "source.json").write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
    except OSError as e:
        size = f"{images.nbytes / 1e6:.0f} MB"
        raise HeadcountError(f"cannot write {folder}: {e}; it needs {size}, or set HEADCOUNT_DATA elsewhere") from None


def read_metadata(folder: Path) -> dict[str, Any]:
    """The source.json of a cached source."""
    path = folder / "source.json"
    try:
        metadata = json.loads(path.read_text(encoding="utf-8"))
        missing = {"classes", "count", "shape", "checksum", "note", "format"} - set(metadata)
    except (OSError, ValueError) as e:
        raise _damaged(path, str(e)) from None
    if missing:
        raise _damaged(path, f"it lacks {', '.join(sorted(missing))}")
    if metadata["format"] != FORMAT:
        raise _damaged(path, f"it has format {metadata['format']}, this version reads {FORMAT}")
    return metadata


def read_source(folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Images (M, H, W, channels) mapped copy-on-write, labels (M,), and the metadata; checked against each other."""
    metadata = read_metadata(folder)
    images = _load_array(folder / "images.npy", (metadata["count"], *metadata["shape"]), np.uint8, mmap_mode="c")
    labels = _load_array(folder / "labels.npy", (metadata["count"],), np.int64)
    return images, labels, metadata


def _load_array(path: Path, shape: tuple[int, ...], dtype: type, **options: Any) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False, **options)
    except (OSError, ValueError, EOFError) as e:
        raise _damaged(path, str(e)) from None
    if array.shape != shape or array.dtype != dtype:
        raise _damaged(path, f"it holds {array.dtype} {array.shape}, source.json has {np.dtype(dtype)} {shape}")
    return array


def _damaged(path: Path, reason: str) -> HeadcountError:
    return HeadcountError(f"{path} is missing or damaged ({reason}); delete {path.parent} and prepare the source again")


@contextmanager
def cache_lock(cache: Path) -> Generator[None]:
    """One process at a time converts sources; the others wait, and then find the result."""
    with ExitStack() as stack:
        try:
            stack.enter_context(file_lock(cache / ".lock", required=False))
        except OSError as e:
            raise HeadcountError(f"cannot write into {cache}: {e}; set HEADCOUNT_DATA to a folder you own") from None
        yield

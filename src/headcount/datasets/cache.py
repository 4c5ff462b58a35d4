"""Downloads of official files, and the cache: every named source once, in one format, so that loading it is mapping a file.

<cache>/downloads/           official files: resumed after an interruption, verified, renamed into place only if correct
<cache>/<name>/images.npy    (M, H, W, channels) uint8, mapped, never read as a whole
<cache>/<name>/labels.npy    (M,) int64
<cache>/<name>/source.json   name, classes, count, shape, checksum, note, format
"""

import hashlib
import http.client
import json
import os
import re
import shutil
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from headcount.errors import HeadcountError, check_choice
from headcount.io import atomic_folder, atomic_write, file_lock
from headcount.loading import load_npy, read_json

FORMAT = 1
_CHUNK = 1 << 12  # rows hashed at a time: no second copy of the images
_BLOCK = 1 << 20
_TIMEOUT = 30  # seconds without a byte


def cache_folder(cache: str | Path | None = None) -> Path:
    """The cache folder: the one given, else $HEADCOUNT_DATA, else ~/.cache/headcount."""
    return Path(cache or os.environ.get("HEADCOUNT_DATA") or "~/.cache/headcount").expanduser().absolute()


def data_checksum(data: np.ndarray, truth: np.ndarray) -> str:
    """sha256 over the rows in order, then the class numbers as int64; little-endian on every machine."""
    digest, dtype = hashlib.sha256(), data.dtype.newbyteorder("<")
    for start in range(0, len(data), _CHUNK):
        digest.update(np.ascontiguousarray(data[start : start + _CHUNK], dtype).data)
    digest.update(truth.astype("<i8").tobytes())
    return digest.hexdigest()


def write_source(folder: Path, images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...], note: str) -> None:
    """Put a source into the cache; an older version is replaced."""
    shape, checksum = list(images.shape[1:]), data_checksum(images, labels)
    metadata = {"name": folder.name, "classes": list(classes), "count": len(images), "shape": shape}
    metadata |= {"checksum": checksum, "note": note, "format": FORMAT}
    try:
        with atomic_folder(folder, replace=True) as part:
            np.save(part / "images.npy", images, allow_pickle=False)
            np.save(part / "labels.npy", labels.astype("<i8"), allow_pickle=False)
            text = json.dumps(metadata, indent=1) + "\n"
            atomic_write(part / "source.json", lambda f: f.write(text.encode()))
    except OSError as e:
        needs = f"it needs {images.nbytes / 1e6:.0f} MB, or set HEADCOUNT_DATA elsewhere"
        raise HeadcountError(f"cannot write {folder}: {e}; {needs}") from None


_METADATA = {"classes": [str], "count": int, "shape": [int], "checksum": str, "note": str, "format": int}


def _advice(folder: Path) -> str:
    return f"what headcount wrote: delete {folder} and prepare the source again"


def read_metadata(folder: Path) -> dict[str, Any]:
    """The source.json of a cached source."""
    path = folder / "source.json"
    metadata = read_json(path, _METADATA, _advice(folder))
    if metadata["format"] != FORMAT:
        raise HeadcountError(f"{path} has format {metadata['format']}, this version reads {FORMAT}; give {_advice(folder)}")
    return metadata


def read_source(folder: Path) -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Images (M, H, W, channels) mapped copy-on-write, labels (M,), and the metadata; checked against each other."""
    metadata, arrays = read_metadata(folder), []
    for name, shape, dtype in (("images.npy", metadata["shape"], "uint8"), ("labels.npy", [], "int64")):
        array = load_npy(folder / name, _advice(folder), mapped=True)
        if array.shape != (shape := (metadata["count"], *shape)) or array.dtype != dtype:
            what = f"{array.dtype} {array.shape}, source.json has {dtype} {shape}"
            raise HeadcountError(f"{folder / name} holds {what}; give {_advice(folder)}")
        arrays.append(array)
    if len(labels := arrays[1]) and not 0 <= labels.min() <= labels.max() < len(metadata["classes"]):
        raise HeadcountError(f"{folder / 'labels.npy'} holds numbers of no class; give {_advice(folder)}")
    return *arrays, metadata


@contextmanager
def cache_lock(cache: Path) -> Generator[None]:
    """One process at a time converts sources; the others wait and then find the result."""
    try:
        with file_lock(cache / ".lock", required=False):
            yield
    except OSError as e:
        raise HeadcountError(f"cannot write into {cache}: {e}; set HEADCOUNT_DATA to a folder you own") from None


class CacheEntry(NamedTuple):
    """A data set, a download, or an array of images, slides or features with its log."""

    name: str
    paths: list[Path]
    size: int  # bytes
    used: float  # when it was last read or written, in seconds since 1970


_ARRAY = re.compile(r"([0-9a-f]{32}|[0-9a-f]{40})\.(npy|npy\.part|jsonl|lock|sqlite)")


def cache_entries(folder: Path) -> list[CacheEntry]:
    """What headcount keeps in a cache folder, the longest unused first. Other files there are neither listed nor removed."""
    groups: dict[str, list[Path]] = {}
    for path in (p for pattern in ("*", "downloads/*", "flat/*", "features/*") for p in sorted(folder.glob(pattern))):
        name = path.relative_to(folder)
        if match := _ARRAY.fullmatch(path.name):
            groups.setdefault(str(name.with_name(match[1])), []).append(path)
        elif (name.parts[0] == "downloads" and path.is_file()) or (name.parent == Path() and (path / "source.json").is_file()):
            groups[str(name)] = [path]
    entries = []
    for name, paths in groups.items():
        files = [p.stat() for path in paths for p in ([path] if path.is_file() else path.iterdir())]
        entries.append(CacheEntry(name, paths, sum(f.st_size for f in files), max(max(f.st_atime, f.st_mtime) for f in files)))
    return sorted(entries, key=lambda entry: entry.used)


def clear_cache(folder: Path, names: Sequence[str], days: float | None, limit: float | None) -> list[CacheEntry]:
    """Remove the entries of these names, those unused for so many ``days``, and the longest unused ones until at most ``limit``
    gigabytes are left; returns what was removed. What another process is writing stays."""
    entries, removed = cache_entries(folder), []
    for name in names:
        check_choice("cache entry", name, [entry.name for entry in entries])
    left = sum(entry.size for entry in entries)
    for entry in entries:
        old = days is not None and entry.used < time.time() - 86400 * days
        if not (entry.name in names or old or (limit is not None and left > 1e9 * limit)):
            continue
        lock = entry.paths[0].with_name(f"{Path(entry.name).name}.lock")
        with file_lock(lock, wait=False, required=False) as free:
            if free:
                for path in entry.paths:
                    path.unlink(missing_ok=True) if path.is_symlink() or path.is_file() else shutil.rmtree(path)
                left -= entry.size
                removed.append(entry)
    return removed


class Remote(NamedTuple):
    """The official address of a file, and its published md5."""

    url: str
    md5: str

    @property
    def file(self) -> str:
        return self.url.partition("?")[0].rsplit("/", 1)[-1]


def fetch(url: str, path: str | Path, md5: str, source: str = "NAME") -> Path:
    """Download ``url`` to ``path`` and verify its md5; a file that exists already is only verified. ``source`` is the name for
    ``headcount data import`` in the advice given when this fails."""
    path = Path(path)
    part = path.with_name(path.name + ".part")
    bring = f"or bring the arrays you have with 'headcount data import {source} FILE.npz'"
    advice = f"get {path.name} from {url} and put it at {path}, {bring}"
    try:
        if path.exists():
            if (actual := _md5(path)) != md5:
                raise HeadcountError(f"{path} is not the official file: md5 {actual}, not {md5}; delete it, then {advice}")
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
        while True:
            before = part.stat().st_size
            total, size = _request(url, part, before), part.stat().st_size
            if total is None or size >= total:
                break
            if size <= before:  # an attempt that brings nothing new is the last
                raise OSError(f"the connection broke after {size} of {total} bytes")
        if (actual := _md5(part)) != md5:
            part.unlink()
            raise HeadcountError(f"{url} gave a wrong file: md5 {actual}, not {md5}; try again, or {advice}")
        os.replace(part, path)
    except (OSError, http.client.HTTPException) as e:
        if part.exists() and not part.stat().st_size:
            part.unlink()
        reason = getattr(e, "reason", None) or e
        raise HeadcountError(f"cannot download {path.name} ({reason}); {advice}") from None
    return path


def _request(url: str, part: Path, start: int) -> int | None:
    """One request, for the bytes from ``start`` on. Returns the size of the whole file, None if it is unknown."""
    headers = {"User-Agent": "headcount", **({"Range": f"bytes={start}-"} if start else {})}
    try:
        reply = urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT)
    except urllib.error.HTTPError as e:
        with e:  # closes the connection
            if e.code == 416:  # no bytes after these: the file is complete, or the md5 will differ
                return None
            raise OSError(f"the server answered {e.code} {e.reason}") from None
    with reply:
        start = start if reply.status == 206 else 0  # a server that ignores Range starts again from 0
        length = reply.headers.get("Content-Length")
        total = start + int(length) if length else None
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        bar = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty())
        with part.open("ab" if start else "wb") as f, bar:
            task = bar.add_task(part.name.removesuffix(".part"), total=total, completed=start)
            try:
                while block := reply.read(_BLOCK):
                    f.write(block)
                    bar.advance(task, len(block))
            except http.client.IncompleteRead as e:
                f.write(e.partial)
            except (ConnectionError, TimeoutError):
                pass  # the caller counts what came and sends another request
    return total


def _md5(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()

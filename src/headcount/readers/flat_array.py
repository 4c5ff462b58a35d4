"""Many files as one flat array: in memory, or in a cache on disk that is mapped and survives a kill.

    <cache>/<key>.npy          the array, (rows, ...), there only when it is whole
    <cache>/<key>.npy.part     the array while it is written
    <cache>/<key>.jsonl        one line per part that is written: its digest, and rows of it that are bad

A killed run goes on after the last line of the .jsonl; the key is made of the files' names, sizes and dates, so that changed
files make a new cache. The digests are of the content.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.io import file_lock


@dataclass(frozen=True)
class Part:
    """Rows that come together: a slide, or a few hundred pictures."""

    rows: np.ndarray
    digest: str
    bad: dict[int, str]  # row of this part -> what is wrong with it; its numbers are zeros


def available_memory() -> int:
    """Bytes that may be taken in memory: half of what is free."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def cache_key(files: Sequence[Path], settings: Any) -> str:
    """Of files and of what is made of them."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def build_flat_array(
    sizes: Sequence[int],
    shape: tuple[int, ...],
    dtype: Any,
    fill: Callable[[int], Part],
    cache: Path | None,
    make_key: Callable[[], str],
) -> tuple[np.ndarray, list[Part]]:
    """(sum of sizes, *shape) and the parts without their rows. ``cache`` None: in memory if there is room for it."""
    total = int(sum(sizes))
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    need = total * int(np.prod(shape)) * np.dtype(dtype).itemsize
    if cache is None and need <= available_memory():
        array, parts = np.empty((total, *shape), dtype), []
        for k in range(len(sizes)):
            part = fill(k)
            array[ends[k] : ends[k + 1]] = part.rows
            parts.append(Part(part.rows[:0], part.digest, part.bad))
        return array, parts
    folder = cache_folder() / "flat" if cache is None else Path(cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{make_key()}.npy"
        with file_lock(path.with_suffix(".lock")):
            return _write_cached(path, ends, (total, *shape), np.dtype(dtype), fill)
    except OSError as e:
        raise HeadcountError(f"cannot write the cache in {folder}: {e}; it needs {need / 1e9:.1f} GB") from None


def _write_cached(
    path: Path, ends: list[int], shape: tuple[int, ...], dtype: np.dtype, fill: Callable[[int], Part]
) -> tuple[np.ndarray, list[Part]]:
    log, part_path, parts = path.with_suffix(".jsonl"), path.with_name(path.name + ".part"), []
    whole = path.exists()
    if whole or part_path.exists():
        parts = _read_log(log, ends)
    if whole and len(parts) == len(ends) - 1:
        return _open_mapped(path, shape, dtype), parts
    parts, start = _resume_or_create(part_path, shape, dtype, parts, ends)
    with open(part_path, "r+b") as file, open(log, "w", encoding="utf-8") as lines:
        lines.writelines(_line(p) for p in parts)
        file.seek(start)
        for k in range(len(parts), len(ends) - 1):
            part = fill(k)
            file.write(
                np.ascontiguousarray(part.rows, dtype).tobytes()
            )  # not mapped: a full disk is an error, no signal
            file.flush()  # the rows before the line that says they are there
            parts.append(Part(part.rows[:0], part.digest, part.bad))
            lines.write(_line(parts[-1]))
            lines.flush()
        os.fsync(file.fileno())
    os.replace(part_path, path)
    return _open_mapped(path, shape, dtype), parts


def _resume_or_create(
    path: Path, shape: tuple[int, ...], dtype: np.dtype, parts: list[Part], ends: list[int]
) -> tuple[list[Part], int]:
    """The parts in the file a killed run left, if it is ours, and where its next rows go; else a new file."""
    header = io.BytesIO()
    header_fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(header, header_fields)
    start, row = header.tell(), int(np.prod(shape[1:])) * dtype.itemsize
    after = start + ends[len(parts)] * row
    try:
        with open(path, "rb") as old:
            if old.read(start) == header.getvalue() and os.fstat(old.fileno()).st_size >= after:
                return parts, after
    except OSError:
        pass
    path.write_bytes(header.getvalue())
    return [], start


def _line(part: Part) -> str:
    return json.dumps({"digest": part.digest, "bad": part.bad}) + "\n"


def _read_log(log: Path, ends: list[int]) -> list[Part]:
    """The parts that were finished; a line torn by the kill ends the list."""
    parts: list[Part] = []
    try:
        for line in log.read_text(encoding="utf-8").splitlines()[: len(ends) - 1]:
            record = json.loads(line)
            bad = {int(row): str(why) for row, why in record["bad"].items()}
            parts.append(Part(np.zeros(0), str(record["digest"]), bad))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    return parts


def _open_mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    try:
        array = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError) as e:
        raise HeadcountError(f"the cache {path} is damaged ({e}); delete it") from None
    if array.shape != shape or array.dtype != dtype:
        raise HeadcountError(f"the cache {path} holds {array.dtype} {array.shape}, not {dtype} {shape}; delete it")
    return array

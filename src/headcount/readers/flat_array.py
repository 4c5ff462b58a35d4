"""Many files as one flat array: in memory, or in a memory-mapped cache on disk that survives a kill.

    <cache>/<key>.npy          the array (rows, ...), present only when it is complete
    <cache>/<key>.npy.part     the array while it is written
    <cache>/<key>.jsonl        one line per written part: its digest, and the rows of it that have problems

A run that was killed resumes after the last line of the .jsonl. Changed files make a new cache: names, sizes and dates are hashed
into the key. The digests are of the content.
"""

import hashlib
import io
import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.io import file_lock
from headcount.loading import check_schema, explain_read_errors, load_npy, open_file, parse_json


@dataclass(frozen=True)
class Part:
    """Rows that are read together: a slide, or a few hundred images."""

    rows: np.ndarray
    digest: str
    problems: dict[int, str]  # row of this part -> what is wrong with it; its numbers are zeros


def available_memory() -> int:
    """Bytes that may be used: half of the free memory."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 << 30


def cache_key(files: Sequence[Path], settings: Any) -> str:
    """A hash of the files and of what is made of them."""
    digest = hashlib.sha256(json.dumps(settings).encode())
    for file in files:
        stat = file.stat()
        digest.update(f"{file.absolute()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def build_flat_array(
    sizes: Sequence[int],
    shape: tuple[int, ...],
    dtype: Any,
    read_part: Callable[[int], Part],
    cache: Path | None,
    make_key: Callable[[], str],
) -> tuple[np.ndarray, list[Part]]:
    """(sum of sizes, *shape), and the parts without their rows. Without a ``cache``, in memory if it fits."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    shape, dtype = (ends[-1], *shape), np.dtype(dtype)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    if cache is None and n_bytes <= available_memory():
        array, parts = np.empty(shape, dtype), []
        for k in range(len(sizes)):
            part = read_part(k)
            array[ends[k] : ends[k + 1]] = part.rows
            parts.append(replace(part, rows=part.rows[:0]))
        return array, parts
    folder = cache_folder() / "flat" if cache is None else Path(cache).expanduser()
    path = folder / f"{make_key()}.npy"  # an error of it is about the files
    try:
        with file_lock(path.with_suffix(".lock")):
            return _write_cache(path, ends, shape, dtype, read_part)
    except OSError as e:
        raise HeadcountError(f"cannot write the cache in {folder}: {e}; it needs {n_bytes / 1e9:.1f} GB") from None


def _write_cache(
    path: Path, ends: list[int], shape: tuple[int, ...], dtype: np.dtype, read_part: Callable[[int], Part]
) -> tuple[np.ndarray, list[Part]]:
    log, unfinished = path.with_suffix(".jsonl"), path.with_name(path.name + ".part")
    parts = _read_log(log, ends)
    if path.exists() and len(parts) == len(ends) - 1:
        return _open_mapped(path, shape, dtype), parts
    header = io.BytesIO()
    fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_2_0(header, fields)
    start = header.tell() + ends[len(parts)] * int(np.prod(shape[1:])) * dtype.itemsize
    if not parts or not unfinished.exists() or unfinished.stat().st_size < start:  # nothing to resume
        unfinished.write_bytes(header.getvalue())
        parts, start = [], header.tell()
    with open(unfinished, "r+b") as file, open(log, "w", encoding="utf-8") as lines:
        lines.writelines(map(_log_line, parts))
        file.seek(start)
        for k in range(len(parts), len(ends) - 1):
            part = read_part(k)
            file.write(np.ascontiguousarray(part.rows, dtype).tobytes())  # not mapped: a full disk is then no signal
            file.flush()  # the rows before the line that records them
            parts.append(replace(part, rows=part.rows[:0]))
            lines.write(_log_line(parts[-1]))
            lines.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
    return _open_mapped(path, shape, dtype), parts


def _log_line(part: Part) -> str:
    return json.dumps({"digest": part.digest, "problems": part.problems}) + "\n"


def _read_log(log: Path, ends: list[int]) -> list[Part]:
    """The finished parts; a line that the kill cut off ends the list."""
    parts: list[Part] = []
    if not os.path.lexists(log):
        return parts
    with explain_read_errors(log, "nothing: delete it"), open_file(log) as lines:
        for line, start, end in zip(lines, ends[:-1], ends[1:], strict=False):
            with suppress(HeadcountError, ValueError):
                check_schema(record := parse_json(line), {"digest": str, "problems": dict[str, str]})
                problems = {int(row): why for row, why in record["problems"].items()}
                if all(0 <= row < end - start for row in problems):
                    parts.append(Part(np.zeros(0), record["digest"], problems))
                    continue
            break
    return parts


def _open_mapped(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    array = load_npy(path, "what headcount wrote, or delete it", mapped=True)
    if array.shape != shape or array.dtype != dtype:
        raise HeadcountError(f"the cache {path} holds {array.dtype} {array.shape}, not {dtype} {shape}; delete it")
    return array

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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headcount.datasets.cache import cache_folder
from headcount.errors import HeadcountError
from headcount.io import file_lock
from headcount.loading import check_schema, explain_read_errors, load_npy, open_file, parse_json


class Part(NamedTuple):
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
) -> tuple[np.ndarray, dict[int, str], str]:
    """(sum of sizes, *shape), which of its rows have problems, and a digest. Without a ``cache``, in memory if it fits."""
    ends = np.concatenate([[0], np.cumsum(sizes)]).astype(int).tolist()
    shape, dtype = (ends[-1], *shape), np.dtype(dtype)
    n_bytes = int(np.prod(shape)) * dtype.itemsize
    if cache is None and n_bytes <= available_memory():
        array, records = np.empty(shape, dtype), []
        for k in range(len(sizes)):
            array[ends[k] : ends[k + 1]], digest, problems = read_part(k)
            records.append({"digest": digest, "problems": problems})
    else:
        folder = cache_folder() / "flat" if cache is None else Path(cache).expanduser()
        path = folder / f"{make_key()}.npy"  # an error of it is about the files
        try:
            with file_lock(path.with_suffix(".lock")):
                array, records = _write_cache(path, ends, shape, dtype, read_part)
        except OSError as e:
            raise HeadcountError(f"cannot write the cache in {folder}: {e}; it needs {n_bytes / 1e9:.1f} GB") from None
    parts = [(start, record["problems"]) for start, record in zip(ends, records, strict=False)]
    all_problems = {start + int(row): why for start, problems in parts for row, why in problems.items()}
    return array, all_problems, hashlib.sha256("".join(record["digest"] for record in records).encode()).hexdigest()


def _write_cache(
    path: Path, ends: list[int], shape: tuple[int, ...], dtype: np.dtype, read_part: Callable[[int], Part]
) -> tuple[np.ndarray, list[dict[str, Any]]]:
    log, unfinished = path.with_suffix(".jsonl"), path.with_name(path.name + ".part")
    records = _read_log(log, ends)
    if not path.exists() or len(records) < len(ends) - 1:
        header = io.BytesIO()
        fields = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_2_0(header, fields)
        start = header.tell() + ends[len(records)] * int(np.prod(shape[1:])) * dtype.itemsize
        if not records or not unfinished.exists() or unfinished.stat().st_size < start:  # nothing to resume
            unfinished.write_bytes(header.getvalue())
            records, start = [], header.tell()
        with open(unfinished, "r+b") as file, open(log, "w", encoding="utf-8") as lines:
            lines.writelines(json.dumps(record) + "\n" for record in records)
            file.seek(start)
            for k in range(len(records), len(ends) - 1):
                rows, digest, problems = read_part(k)
                file.write(np.ascontiguousarray(rows, dtype).tobytes())  # not mapped: a full disk is then no signal
                file.flush()  # the rows before the line that records them
                records.append({"digest": digest, "problems": problems})
                lines.write(json.dumps(records[-1]) + "\n")
                lines.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    array = load_npy(path, "what headcount wrote, or delete it", mapped=True)
    if array.shape != shape or array.dtype != dtype:
        raise HeadcountError(f"the cache {path} holds {array.dtype} {array.shape}, not {dtype} {shape}; delete it")
    return array, records


def _read_log(log: Path, ends: list[int]) -> list[dict[str, Any]]:
    """The digest and the problems of each finished part; a line that the kill cut off ends the list."""
    records: list[dict[str, Any]] = []
    if not os.path.lexists(log):
        return records
    with explain_read_errors(log, "nothing: delete it"), open_file(log) as lines:
        for line, start, end in zip(lines, ends[:-1], ends[1:], strict=False):
            with suppress(HeadcountError, ValueError):
                check_schema(record := parse_json(line), {"digest": str, "problems": dict[str, str]})
                if all(0 <= int(row) < end - start for row in record["problems"]):
                    records.append(record)
                    continue
            break
    return records

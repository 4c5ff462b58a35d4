"""Files read as if somebody else had written them: regular files of a bearable size, whose JSON is parsed strictly and compared
with a schema. Whatever is wrong is one line that names the file, and the field."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from headcount.errors import FileError, HeadcountError

if TYPE_CHECKING:
    import numpy as np
    from numpy.lib.npyio import NpzFile

MAX_JSON = 1 << 26  # bytes
_MAX_HEADER = 1 << 24  # bytes of a safetensors file that describe its tensors
MAX_VALUES = 4_000_000  # of one file: in memory each takes some sixty bytes
MAX_DEPTH = 50
_NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "text", bool: "true or false", type(None): "null"}
_NAMES |= {list: "a list", dict: "an object"}


@contextmanager
def explain_read_errors(path: Path, expected: str) -> Iterator[None]:
    """Turn an error of reading the file into one line: its path, and what was ``expected``."""
    try:
        yield
    except Exception as e:  # of zip, zlib, json, and numpy's header parser
        if isinstance(e, OSError) and e.errno in (errno.EIO, errno.ESTALE, errno.EMFILE, errno.ENFILE):  # not the file's fault
            raise FileError.from_os_error(e, path) from None
        if isinstance(e, HeadcountError) and str(path) in str(e):
            raise
        why = (e.strerror if isinstance(e, OSError) else None) or str(e) or type(e).__name__
        raise HeadcountError(f"cannot read {path}: {why[:300]}; give {expected}") from None


def open_file(path: Path) -> BufferedReader:
    """Open a regular file to read. Reading a pipe would block, and a device has no end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise HeadcountError("it is a folder, a pipe or a device, not a file")
    return open(path, "rb")


def read_json(path: Path, schema: Any, expected: str, *, finite: bool = True) -> Any:
    """JSON like the schema (:func:`check_schema`), or an error that names file and field."""
    with explain_read_errors(path, expected), open_file(path) as f:
        content = f.read(MAX_JSON + 1)
        if len(content) > MAX_JSON:
            raise HeadcountError(f"it is larger than {MAX_JSON >> 20} MB")
        data = parse_json(content, finite=finite)
        check_schema(data, schema)
        if b"\\ud" in content.lower():  # half a character, which nothing could print
            json.dumps(data, ensure_ascii=False).encode()
        return data


def read_safetensors(path: Path, expected: str, framework: str = "pt") -> tuple[dict[str, Any], dict[str, str]]:
    """The tensors (or arrays, by framework "np") and the metadata of a .safetensors file."""
    from safetensors import safe_open

    with explain_read_errors(path, expected), open_file(path) as f:
        size, header = path.stat().st_size, int.from_bytes(f.read(8), "little")
        if size < 10 or header > min(_MAX_HEADER, size - 8) or f.read(1) != b"{":
            raise HeadcountError("it does not begin like a safetensors file")
        with safe_open(path, framework) as tensors:
            return {name: tensors.get_tensor(name) for name in tensors.keys()}, tensors.metadata() or {}  # noqa: SIM118


def file_mode(path: Path) -> int:
    """The mode of a file or folder, 0 where there is none. Links in a circle and a failing disk are errors, unlike in is_file."""
    try:
        return path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a null character in the name
        return 0


def check_declared_size(path: Path, declared: float, stored: int | None = None) -> None:
    """Refuse a file that declares more bytes than $HEADCOUNT_MAX_GB (default 64), before they are read. Without that setting
    more than 128 MiB may also not be over 200 times what is ``stored`` (default: the size of the file)."""
    setting = os.environ.get("HEADCOUNT_MAX_GB", "")
    if setting and not re.fullmatch(r"\d+(\.\d+)?", setting):
        raise HeadcountError(f"HEADCOUNT_MAX_GB is a number of gigabytes, got {setting!r}")
    stored = path.stat().st_size if stored is None else stored
    if declared > (float(setting) * 1e9 if setting else min(64e9, max(1 << 27, 200 * stored))):
        advice = "if that is right and fits into memory, set HEADCOUNT_MAX_GB to more"
        raise HeadcountError(f"{path} declares {declared / 1e9:,.2f} GB in {stored:,} bytes; {advice}")


@contextmanager
def open_npz(path: Path, expected: str) -> Iterator[NpzFile]:
    """The arrays of an .npz file, read without pickle."""
    import numpy as np

    with explain_read_errors(path, expected), open_file(path) as f:  # np.load would leave a damaged zip file open
        if not f.read(6).startswith((b"PK", b"\x93NUMPY")):  # numpy would report it as a pickle
            raise HeadcountError(f"{path} is no .npz file; give {expected}")
        f.seek(0)
        arrays = np.load(f, allow_pickle=False)
        if isinstance(arrays, np.ndarray):
            raise HeadcountError(f"{path} is a single array; give {expected}")
        with arrays:
            check_declared_size(path, sum(member.file_size for member in arrays.zip.infolist()))
            yield arrays


def load_npy(path: Path, expected: str = "an .npy file written by numpy.save", *, mapped: bool = False) -> np.ndarray:
    """The array in an .npy file, read without pickle, in memory or memory-mapped, copy-on-write."""
    import numpy as np

    with explain_read_errors(path, expected), open_file(path) as f:
        if not f.read(6).startswith(b"\x93NUMPY"):
            raise HeadcountError(f"{path} is no .npy file; give {expected}")
        return np.load(path, mmap_mode="c" if mapped else None, allow_pickle=False)


def parse_json(content: bytes, *, finite: bool = True) -> Any:
    """JSON in UTF-8: numbers finite (unless not ``finite``) and of at most 64 bits, no key twice, neither vast nor nested deeply."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise HeadcountError(f"it holds more than {MAX_VALUES:,} values")
    try:
        data = json.loads(content.decode(), object_pairs_hook=_unique_keys)
    except RecursionError:
        raise HeadcountError("it is nested deeply") from None
    level = [data]
    for _ in range(MAX_DEPTH):
        if finite and not all(map(math.isfinite, [value for value in level if type(value) is float])):
            raise HeadcountError("it holds a number that is not finite")
        if max([value.bit_length() for value in level if type(value) is int], default=0) > 63:
            raise HeadcountError("it holds a number of more than 64 bits")
        inner = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, (dict, list))]
        if not (level := [value for values in inner for value in values]):
            return data
    raise HeadcountError(f"it is nested more than {MAX_DEPTH} deep")


def check_schema(data: Any, schema: Any, field: str = "it") -> None:
    """Refuse data that are not like the schema: a type, a union of types, ``[schema]`` for a list, ``dict[str, type]``, a dataclass,
    or a dictionary of fields, of which those that end in "?" may be absent or null. Other fields may be there too.

    >>> check_schema({"loss": [1, None]}, {"loss": [float | None], "note?": str})
    >>> check_schema({"loss": [1, "x"]}, {"loss": [float | None], "note?": str})
    Traceback (most recent call last):
    headcount.errors.HeadcountError: loss[1] is 'x', not a number or null
    """
    origin, inner = get_origin(schema), get_args(schema)
    if isinstance(schema, dict) or is_dataclass(schema) or origin is dict:
        _check_type(data, frozenset({dict}), field)
        named = dict.fromkeys(data, inner[1]) if inner else schema if isinstance(schema, dict) else _fields(schema)
        if lacking := [name for name in named if not name.endswith("?") and name not in data]:
            raise HeadcountError(f"{field} lacks {', '.join(lacking)}")
        for name, of_field in named.items():
            value = data.get(name.removesuffix("?"))
            if value is not None or not name.endswith("?"):
                check_schema(value, of_field, f"{field}.{name.removesuffix('?')}".removeprefix("it."))
    elif isinstance(schema, list) or origin in (list, tuple):
        _check_type(data, frozenset({list}), field)
        each = schema[0] if isinstance(schema, list) else inner[0]
        if isinstance(each, (dict, list)) or get_origin(each) or not set(map(type, data)) <= _types(each):
            for i, value in enumerate(data):
                check_schema(value, each, f"{field}[{i}]")
    else:
        _check_type(data, _types(schema), field)


def _check_type(data: Any, types: frozenset[Any], field: str) -> None:
    if type(data) not in types and Any not in types:
        names = sorted(_NAMES[t] for t in types if t is not int or float not in types)
        raise HeadcountError(f"{field} is {repr(data)[:40]}, not {' or '.join(names)}")


@cache
def _types(schema: Any) -> frozenset[Any]:
    types = get_args(schema) if isinstance(schema, UnionType) else (schema,)
    return frozenset((*types, int) if float in types else types)  # a number may be written without a point


@cache
def _fields(dataclass: Any) -> dict[str, Any]:
    optional = {f.name for f in fields(dataclass) if f.default is not MISSING or f.default_factory is not MISSING}
    return {f"{name}?" if name in optional else name: hint for name, hint in get_type_hints(dataclass).items()}


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(data := dict(pairs)) < len(pairs):
        raise HeadcountError(f"it holds one of the keys {', '.join(data)[:80]} twice")
    return data

"""A model's folder: ``model.safetensors`` and ``model.json``, written whole, and read as if someone else had written them.

Nothing in the files is run, and nothing is used before it is checked: a network is first built without memory and compared with the
arrays of the file. Any error is one line that names the folder.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from safetensors.numpy import save
from torch import Tensor, nn

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_write
from headcount.loading import check_schema, explain_read_errors, open_file, parse_json, read_safetensors

FORMAT = 4
JSON_FILE, WEIGHTS_FILE = "model.json", "model.safetensors"
_MAX_JSON = 1 << 27  # bytes
_EXPECTED = "the folder that headcount fit wrote"
_MAX_CLASSES = 1 << 16
_MAX_OPTION = 1 << 14
_MAX_OPTIONS = dict.fromkeys(("layers", "iterations", "heads", "networks"), 64)

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ModelT = TypeVar("ModelT")


def write_folder(
    path: Path, arrays: Mapping[str, np.ndarray], data: Mapping[str, Any],
    parse: Callable[[dict[str, Any], dict[str, np.ndarray]], Any], *, documents: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Path:  # fmt: skip
    """Write a whole folder or none: arrays, JSON, and ``documents`` (file name -> text). Only a model is ever replaced, and nothing
    is written that ``parse`` would refuse when it is loaded."""
    check_writable(path, overwrite)
    arrays = {k: np.asarray(v, order="C") for k, v in arrays.items()}
    data = {"format": FORMAT, **data}
    try:
        _check_finite(arrays)
        parse(json.loads(json.dumps(data, allow_nan=False)), arrays)
    except HeadcountError as e:
        raise HeadcountError(f"the model cannot be saved, because it could not be loaded: {e}") from None
    weights = save(arrays)
    data["sha256"] = hashlib.sha256(weights).hexdigest()
    text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
    with atomic_folder(path, replace=True) as part:
        for name, document in (documents or {}).items():
            if Path(name).name != name or name in (WEIGHTS_FILE, JSON_FILE):
                raise HeadcountError(f"{name!r} is not allowed as the name of a document in a model's folder")
            atomic_write(part / name, lambda f, document=document: f.write(document.encode("utf-8", "backslashreplace")))
        atomic_write(part / WEIGHTS_FILE, lambda f: f.write(weights))
        atomic_write(part / JSON_FILE, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    return path


def check_writable(path: Path, overwrite: bool = False) -> None:
    """Refuse a path that is taken; with ``overwrite`` a model (and an empty folder) may be replaced."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise HeadcountError(f"{path} is a file; choose another place for the model")
    if not (path / JSON_FILE).is_file():
        raise HeadcountError(f"{path} is not empty and holds no model; choose another place")
    if not overwrite:
        raise HeadcountError(f"{path} holds a model already; choose another place, or give overwrite=True")


def state_arrays(module: nn.Module) -> dict[str, np.ndarray]:
    return {k: v.detach().contiguous().cpu().numpy() for k, v in module.state_dict().items()}


def load_folder(path: Path, parse: Callable[[dict[str, Any], dict[str, np.ndarray]], ModelT]) -> ModelT:
    """What ``parse`` makes of a folder's JSON and arrays. Anything unexpected in either is an error of one line."""
    for name in (JSON_FILE, WEIGHTS_FILE):
        if not os.path.lexists(path / name):
            raise HeadcountError(f"no model in {path}: {name} is missing; give {_EXPECTED}")
    with explain_read_errors(path / JSON_FILE, _EXPECTED), open_file(path / JSON_FILE) as f:
        content = f.read(_MAX_JSON + 1)
        if len(content) > _MAX_JSON:
            raise HeadcountError(f"{JSON_FILE} is larger than {_MAX_JSON >> 20} MB")
        data = parse_json(content)
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            got = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise HeadcountError(f"{JSON_FILE} has format {str(got)[:40]}, this version reads {FORMAT}")
    arrays, _ = read_safetensors(path / WEIGHTS_FILE, _EXPECTED, "np")
    with explain_read_errors(path, _EXPECTED):
        _check_finite(arrays)
        digest = data.pop("sha256", None)
        model = parse(data, arrays)
        with open_file(path / WEIGHTS_FILE) as f:
            if hashlib.file_digest(f, "sha256").hexdigest() != digest:
                raise HeadcountError(f"{JSON_FILE} and {WEIGHTS_FILE} do not belong together; save the model again")
        return model


def _check_finite(arrays: Mapping[str, np.ndarray | Tensor]) -> None:
    for name, a in arrays.items():
        if (isinstance(a, np.ndarray) and a.dtype.kind not in "biuf") or not bool(torch.isfinite(torch.as_tensor(a)).all()):
            raise HeadcountError(f"{name[:80]!r} holds numbers that are not finite, or no numbers")


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of any .safetensors file, all numbers finite."""
    tensors, _ = read_safetensors(path, expected := "a .safetensors file")
    with explain_read_errors(path, expected):
        _check_finite(tensors)
    return tensors


def split_arrays(arrays: Mapping[str, np.ndarray], parts: Sequence[str]) -> dict[str, dict[str, np.ndarray]]:
    """The arrays ``part.name`` of each part, by name."""
    split: dict[str, dict[str, np.ndarray]] = {part: {} for part in parts}
    for key, a in arrays.items():
        part, _, name = key.partition(".")
        if part not in split:
            raise HeadcountError(f"{WEIGHTS_FILE} holds {key[:80]!r}, which belongs to nothing")
        split[part][name] = a
    return split


def build_with_weights(build: Callable[[], ModuleT], arrays: Mapping[str, np.ndarray], *, on_meta: bool = True) -> ModuleT:
    """A module with these weights, built only if its tensors are exactly those of the file, by name, shape and type. It is first
    built without memory, unless not ``on_meta``: custom networks and those of libraries compute while they are built."""
    weights = {k: torch.from_numpy(v) for k, v in arrays.items()}
    with torch.device("meta") if on_meta else nullcontext():
        module = build()
    expected = {k: (tuple(v.shape), v.dtype) for k, v in module.state_dict().items()}
    given = {k: (tuple(v.shape), v.dtype) for k, v in weights.items()}
    for name in sorted(expected.keys() | given.keys()):
        if expected.get(name) != given.get(name):
            raise HeadcountError(f"the weights {name[:80]!r} are {given.get(name)}, the network needs {expected.get(name)}")
    module = build() if on_meta else module
    module.load_state_dict(weights)
    return module.eval()


def check_fields(data: Any, schema: dict[str, Any], what: str = "it") -> None:
    """Refuse data that are not like the schema, or have other fields."""
    if isinstance(data, dict) and (names := data.keys() ^ {name.removesuffix("?") for name in schema}):
        raise HeadcountError(f"{what} lacks or adds {', '.join(name[:40] for name in sorted(names)[:4])}")
    check_schema(data, schema, what)


def check_options(given: Any) -> tuple[tuple[str, Any], ...]:
    """Names with plain values of moderate size: a file must not ask for a network as large as the machine's memory."""
    if not isinstance(given, dict) or len(given) > 64:
        raise HeadcountError("options are names with values")
    for name, value in given.items():
        for v in value if isinstance(value, list) and len(value) <= 16 else [value]:
            is_small_number = isinstance(v, (int, float)) and abs(v) <= _MAX_OPTIONS.get(name, _MAX_OPTION)
            if v is not None and not is_small_number and not (isinstance(v, str) and len(v) <= 64):
                raise HeadcountError(f"option {name[:40]!r} is {str(value)[:40]!r}")
    return tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in given.items())


def check_names(given: Any, what: str) -> tuple[str, ...]:
    valid = isinstance(given, list) and 2 <= len(given) <= _MAX_CLASSES and all(isinstance(v, str) for v in given)
    if not valid or len(set(given)) < len(given) or re.search("[\ud800-\udfff]", "".join(given)):  # no such text can be written
        raise HeadcountError(f"{what} must be two or more different names")
    return tuple(given)


def check_counted(given: Sequence[bool] | None, classes: int) -> tuple[bool, ...] | None:
    """Which classes count in the vote; null is all of them."""
    if given is not None and len(given) != classes:
        raise HeadcountError(f"counted is one true or false for each of {classes} classes")
    if given is not None and sum(given) < 2:
        raise HeadcountError("at least two classes must count")
    return None if given is None else tuple(given)

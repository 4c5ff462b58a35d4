"""A model's folder on disk: written beside and renamed into place, read as if a stranger had written it.

No pickle, no names of files or modules inside, no number believed before it is looked at: the header is bounded before it is
parsed, and a network is first built without memory (torch's meta device) and compared with the arrays the file really holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_write
from headcount.models import library_backbones
from headcount.models.file_checks import MAX_JSON, build_with_weights, check_keys
from headcount.models.frozen_backbone import FrozenBackbone
from headcount.models.network import Model, config_from_json
from headcount.models.weight_files import check_header

FORMAT = 2  # 1 is a bare network, models/network.py
WEIGHTS_FILE, JSON_FILE = "model.safetensors", "model.json"


# -- writing --------------------------------------------------------------------------------------------------------------


def write_folder(
    path: Path,
    arrays: Mapping[str, np.ndarray],
    data: Mapping[str, Any],
    documents: Mapping[str, str],
    overwrite: bool = False,
) -> Path:
    """A whole folder or none. ``over``: replace a model that is there; anything else that is there is always refused."""
    check_writable(path, overwrite)
    with atomic_folder(path, replace=True) as part:
        for name, text in documents.items():
            if Path(name).name != name or name in (WEIGHTS_FILE, JSON_FILE):
                raise HeadcountError(f"{name!r} is no name for a file beside a model")
            atomic_write(part / name, lambda f, text=text: f.write(text.encode()))
        weights = save({k: np.asarray(v, order="C") for k, v in arrays.items()})
        atomic_write(part / WEIGHTS_FILE, lambda f: f.write(weights))
        text = json.dumps(data, indent=1, allow_nan=False, ensure_ascii=False)
        atomic_write(part / JSON_FILE, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
    return path


def check_writable(path: Path, overwrite: bool = False) -> None:
    """Refuse a place where something stands; with ``over`` a model (and an empty folder) may be replaced."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise HeadcountError(f"{path} is a file; choose another place for the model")
    if not (path / JSON_FILE).is_file():
        raise HeadcountError(f"{path} is not empty and holds no model; choose another place")
    if not overwrite:
        raise HeadcountError(f"{path} holds a model already; choose another place, or give overwrite=True")


# -- reading --------------------------------------------------------------------------------------------------------------


def one_line_errors(path: Path, load: Callable[[], Any]) -> Any:
    """Whatever goes wrong is one line that names the folder."""
    try:
        return load()
    except HeadcountError as e:
        raise HeadcountError(f"{path} holds no usable model: {e}") from None
    except OSError as e:
        raise HeadcountError(f"no model in {path}: {Path(e.filename or path).name}: {e.strerror}") from None
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, MemoryError, SafetensorError) as e:
        why = " ".join(str(e).split())[:300]
        raise HeadcountError(f"{path} holds no readable model: {type(e).__name__}: {why}") from None


def read_folder(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the two files say, nothing of it understood yet but that it is JSON and finite arrays."""
    for name in (JSON_FILE, WEIGHTS_FILE):
        if not (path / name).exists():
            raise HeadcountError(f"{name} is missing; give the folder that headcount fit wrote")
        if not (path / name).is_file():  # a pipe would be waited for, a device read without end
            raise HeadcountError(f"{name} is not a file")
    if (path / JSON_FILE).stat().st_size > MAX_JSON:
        raise HeadcountError(f"{JSON_FILE} is larger than {MAX_JSON >> 20} MB")
    data = json.loads((path / JSON_FILE).read_bytes().decode("utf-8"), parse_constant=_refuse_constant)
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        got = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise HeadcountError(f"{JSON_FILE} has format {str(got)[:40]}, this version reads {FORMAT}")
    return data, _read_arrays(path / WEIGHTS_FILE)


def _refuse_constant(word: str) -> Any:
    raise HeadcountError(f"{JSON_FILE} holds {word}; every number must be finite")


def _read_arrays(path: Path) -> dict[str, np.ndarray]:
    check_header(path)
    arrays = load_file(path)
    for name, a in arrays.items():
        if a.dtype.kind not in "biuf" or (a.dtype.kind == "f" and not np.isfinite(a).all()):
            raise HeadcountError(f"{name[:80]!r} holds numbers that are not finite, or no numbers")
    return arrays


def network_from_json(
    data: Any,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    counted: tuple[bool, ...] | None,
    arrays: Mapping[str, np.ndarray],
) -> Model:
    """The network of a design, with these weights; built for real only when the file holds just what it needs."""
    check_keys(data, {"backbone", "backbone_options", "head", "options", "mirror"}, "the design")
    design = config_from_json(data, shape, classes, counted)
    return build_with_weights(lambda: Model(design), _as_tensors(arrays))


def frozen_backbone_from_json(data: Any, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> FrozenBackbone:
    """The frozen backbone in front of a model, from a file: a plain name of a library, a size, and its weights."""
    check_keys(data, {"backbone", "size"}, "the eye")
    name, size = data["backbone"], data["size"]
    if not isinstance(name, str) or len(name) > 200 or not library_backbones.is_library_backbone(name):
        raise HeadcountError(f"the eye is no backbone of a library: {str(name)[:40]!r}")
    return build_with_weights(lambda: FrozenBackbone(name, shape, size), _as_tensors(arrays))


def _as_tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v) for k, v in arrays.items()}


def strip_prefix(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

"""A model's folder on disk: written beside and renamed into place, read as if a stranger had written it.

No pickle, no names of files or modules inside, no number believed before it is looked at: the header is bounded before it is
parsed, and a network is first built without memory (torch's meta device) and compared with the arrays the file really holds.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file, save
from torch import Tensor

from headcount.errors import HeadcountError
from headcount.files import write_whole
from headcount.models import vision
from headcount.models.arrays import look
from headcount.models.distrust import MOST_JSON, built, keys
from headcount.models.eye import Eye
from headcount.models.model import Model, design_of

FORMAT = 2  # 1 is a bare network, models/model.py
WEIGHTS, SAID = "model.safetensors", "model.json"


# -- writing --------------------------------------------------------------------------------------------------------------


def put(
    path: Path, arrays: Mapping[str, np.ndarray], said: Mapping[str, Any], papers: Mapping[str, str], over: bool = False
) -> Path:
    """A whole folder or none. ``over``: replace a model that is there; anything else that is there is always refused."""
    free(path, over)
    part = path.with_name(path.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        for name, text in papers.items():
            if Path(name).name != name or name in (WEIGHTS, SAID):
                raise HeadcountError(f"{name!r} is no name for a file beside a model")
            write_whole(part / name, lambda f, text=text: f.write(text.encode()))
        weights = save({k: np.asarray(v, order="C") for k, v in arrays.items()})
        write_whole(part / WEIGHTS, lambda f: f.write(weights))
        text = json.dumps(said, indent=1, allow_nan=False, ensure_ascii=False)
        write_whole(part / SAID, lambda f: f.write(text.encode("utf-8", "backslashreplace")))
        _into_place(part, path)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return path


def free(path: Path, over: bool = False) -> None:
    """Refuse a place where something stands; with ``over`` a model (and an empty folder) may be replaced."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise HeadcountError(f"{path} is a file; choose another place for the model")
    if not (path / SAID).is_file():
        raise HeadcountError(f"{path} is not empty and holds no model; choose another place")
    if not over:
        raise HeadcountError(f"{path} holds a model already; choose another place, or give overwrite=True")


def _into_place(part: Path, path: Path) -> None:
    """A folder cannot be renamed over a full one: the old one steps aside first, and comes back if the rename fails."""
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        os.replace(path, old)
    try:
        os.replace(part, path)
    except BaseException:
        if old.exists():
            os.replace(old, path)
        raise
    shutil.rmtree(old, ignore_errors=True)


# -- reading --------------------------------------------------------------------------------------------------------------


def refusing(path: Path, load: Callable[[], Any]) -> Any:
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


def get(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """What the two files say, nothing of it understood yet but that it is JSON and finite arrays."""
    for name in (SAID, WEIGHTS):
        if not (path / name).exists():
            raise HeadcountError(f"{name} is missing; give the folder that headcount fit wrote")
        if not (path / name).is_file():  # a pipe would be waited for, a device read without end
            raise HeadcountError(f"{name} is not a file")
    if (path / SAID).stat().st_size > MOST_JSON:
        raise HeadcountError(f"{SAID} is larger than {MOST_JSON >> 20} MB")
    said = json.loads((path / SAID).read_bytes().decode("utf-8"), parse_constant=_no_constant)
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        got = said.get("format") if isinstance(said, dict) else type(said).__name__
        raise HeadcountError(f"{SAID} has format {str(got)[:40]}, this version reads {FORMAT}")
    return said, _arrays(path / WEIGHTS)


def _no_constant(word: str) -> Any:
    raise HeadcountError(f"{SAID} holds {word}; every number must be finite")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    look(path)
    held = load_file(path)
    for name, a in held.items():
        if a.dtype.kind not in "biuf" or (a.dtype.kind == "f" and not np.isfinite(a).all()):
            raise HeadcountError(f"{name[:80]!r} holds numbers that are not finite, or no numbers")
    return held


def network(
    said: Any,
    shape: tuple[int, ...],
    classes: tuple[str, ...],
    counted: tuple[bool, ...] | None,
    arrays: Mapping[str, np.ndarray],
) -> Model:
    """The network of a design, with these weights; built for real only when the file holds just what it needs."""
    keys(said, {"backbone", "backbone_options", "head", "options", "mirror"}, "the design")
    design = design_of(said, shape, classes, counted)
    return built(lambda: Model(design), _tensors(arrays))


def eye(said: Any, shape: tuple[int, ...], arrays: Mapping[str, np.ndarray]) -> Eye:
    """The frozen backbone in front of a model, from a file: a plain name of a library, a size, and its weights."""
    keys(said, {"backbone", "size"}, "the eye")
    name, size = said["backbone"], said["size"]
    if not isinstance(name, str) or len(name) > 200 or not vision.foreign(name):
        raise HeadcountError(f"the eye is no backbone of a library: {str(name)[:40]!r}")
    return built(lambda: Eye(name, shape, size), _tensors(arrays))


def _tensors(arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v) for k, v in arrays.items()}


def under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {k.removeprefix(prefix): v for k, v in arrays.items() if k.startswith(prefix)}

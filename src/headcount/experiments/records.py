"""A record: the result of one run, complete or absent.

``<key>.json`` (under 8 KB: recipe, scores, thinned curves, provenance) and, beside it, ``<key>.npz`` (arrays: the predictions for
the test instances; for a Counting Network each training instance's vote and distance). The JSON is put in place last: where it
exists the run has finished. A run that failed leaves ``<key>.failed.json`` (recipe, error, traceback) until it succeeds.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import traceback
import warnings
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from headcount import __version__
from headcount.errors import DamagedFileWarning, FileError, HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_write, commit_together
from headcount.loading import explain_read_errors, open_npz, read_json
from headcount.models.heads import find_head
from headcount.training import distributed
from headcount.training.accel import device_name


@dataclass(frozen=True, eq=False)
class Record:
    """One finished run; ``data`` is the JSON as written."""

    data: dict[str, Any]
    path: Path

    @property
    def key(self) -> str:
        return self.data["key"]

    @cached_property
    def recipe(self) -> Recipe:
        return Recipe.from_dict(self.data["recipe"])

    @property
    def label(self) -> str:
        """The method's name in tables. For a custom head it is the one recorded: reading a record executes no code."""
        return str(self.data.get("label", self.recipe.head)) if ":" in self.recipe.head else self.recipe.label

    @property
    def uses_instance_labels(self) -> bool:
        """Whether it was trained with every instance's label: an upper bound, never "the best"."""
        head = self.recipe.head
        return bool(self._custom_head.get("told")) if ":" in head else find_head(head).uses_instance_labels

    @property
    def fingerprint(self) -> dict[str, str]:
        """The checksum of the data and the hash of a custom head's code, which the recipe does not contain."""
        return {"data": str(self.data["data"].get("checksum", "")), "code": str(self._custom_head.get("code", ""))}

    @cached_property
    def method(self) -> tuple[Any, ...]:
        """What the records of one table row have in common."""
        return self.recipe.replace(fold=0, seed=0, removal=float(self.recipe.removal > 0)), *self.fingerprint.values()

    @property
    def _custom_head(self) -> dict[str, Any]:
        return self.data.get("own_head") or {}

    @property
    def scores(self) -> dict[str, float]:
        return self.data["scores"]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays beside the record, read into memory; empty if they were not kept."""
        path = self.path.with_suffix(".npz")
        try:
            path.lstat()
        except FileNotFoundError:
            return {}
        expected = f"the whole file, or move it away with {self.path.name} and run the study again"
        with open_npz(path, expected) as npz:
            arrays = {name: npz[name] for name in npz.files}
            _check_arrays(arrays, len(self.data["data"]["classes"]))
        return arrays

    def readable_arrays(self) -> dict[str, np.ndarray]:
        """The arrays; none, with a warning, if they are damaged."""
        try:
            return self.arrays()
        except FileError:
            raise
        except HeadcountError as e:
            warnings.warn(f"left out: {e}", DamagedFileWarning, stacklevel=2)
            return {}

    @classmethod
    def read(cls, path: Path) -> Record:
        expected = "a record as headcount wrote it, or move it away and run the study again"
        data = read_json(path, _RECORD, expected)
        with explain_read_errors(path, expected):
            n_classes, confusion = len(data["data"]["classes"]), data.get("confusion") or []
            if n_classes < 2 or (confusion and [*map(len, confusion)] != [n_classes] * n_classes):
                raise HeadcountError(f"confusion is not a row of numbers for each of {n_classes} classes")
            for name, lists in (("fit.curve", data["fit"].get("curve")), ("sweep", data.get("sweep"))):
                if len({len(v) for v in (lists or {}).values() if isinstance(v, list)}) > 1:
                    raise HeadcountError(f"the lists of {name} differ in length")
            record = cls(data, path)
            _ = record.recipe  # raises for one of another version, or edited
        return record


# what tables and pages read of a record
_DATA: dict[str, Any] = {"source": str, "checksum": str, "classes": [str], "note?": str, "shape?": [int]}
_DATA |= dict.fromkeys(("train_bags", "valid_bags", "test_bags", "bag_size"), int)
_CURVE = {"epoch": [int], "train": [float | None], "valid": [float | None]}
_SWEEP = {"removal": [float], "purity": [float | None], "agreement": [float | None], "agreement_random": [float | None]}
_PROVENANCE = {"commit?": str, "versions?": dict[str, str], "device?": str, "started?": str, "seconds?": float}
_RECORD = {
    "key": str, "recipe": dict[str, Any], "text": str, "label?": str, "own_head?": {"code?": str, "told?": bool}, "data": _DATA,
    "fit": {"best_epoch": int, "valid_loss": float, "epochs": int, "curve?": _CURVE}, "scores": dict[str, float | None],
    "confusion?": [[int]], "share_difference?": [float | None], "sweep?": _SWEEP, "provenance": _PROVENANCE,
}  # fmt: skip
_AXES = dict.fromkeys(("test_index", "test_truth", "test_said", "test_confidence"), "instances")
_AXES |= {"test_label": "bags", "test_bag_said": "bags", "train_bag_said": "train bags"}
_CLASSES = ("test_truth", "test_said", "test_label", "test_bag_said", "train_said", "train_bag_said")
_REAL = ("test_confidence", "train_euclidean", "train_mahalanobis", "train_share")


def _check_arrays(arrays: dict[str, np.ndarray], n_classes: int) -> None:
    """Arrays that are used together must have one length, and class numbers must be those of classes."""
    offsets = arrays.get("test_offsets", np.zeros(1, int))
    lengths: dict[str, set[int]] = {"instances": {int(offsets[-1])}, "bags": {len(offsets) - 1}}
    for name, a in arrays.items():
        if a.ndim != 1 or a.dtype.kind not in ("f" if name.startswith(_REAL) else "iu"):
            raise HeadcountError(f"{name} is {a.dtype} of shape {a.shape}")
        if name in _CLASSES and len(a) and not -(name == "test_truth") <= a.min() <= a.max() < n_classes:
            raise HeadcountError(f"{name} holds {a.min()} to {a.max()}, where there are {n_classes} classes")
        if name != "test_offsets":
            lengths.setdefault(_AXES.get(name) or ("train bags" if "share" in name else "train instances"), set()).add(len(a))
    if offsets[0] != 0 or (np.diff(offsets) <= 0).any() or any(len(different) > 1 for different in lengths.values()):
        raise HeadcountError("its arrays differ in length, or test_offsets do not rise from 0")


_NOT_RECORDS = (".failed.json", "summary.json")


def write_record(folder: Path, data: dict[str, Any], arrays: dict[str, Any]) -> Record:
    """Put a record in place: arrays first, then the JSON, whose existence means that both are complete."""
    path = folder / f"{data['key']}.json"
    with commit_together():
        atomic_write(path.with_suffix(".npz"), lambda f: np.savez_compressed(f, **cast(Any, arrays)))
        atomic_write(path, lambda f: f.write(_one_field_per_line(data)))
    return Record(data, path)


def load_records(folder: Path | str) -> list[Record]:
    """Every record in a folder, by key; without failures and summaries."""
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadcountError(f"no folder {folder}; give the --out of a study")
    return read_records(p for p in sorted(folder.glob("*.json")) if not p.name.endswith(_NOT_RECORDS))


def read_records(paths: Iterable[Path]) -> list[Record]:
    """Those records that can be read; a warning names each other file and why, and the last one counts them. If none can, the
    first error is raised."""
    records, errors = [], []
    for path in paths:
        try:
            records.append(Record.read(path))
        except FileError:
            raise
        except HeadcountError as e:
            errors.append(e)
    if errors and not records:
        raise errors[0]
    for error in errors:
        warnings.warn(f"left out: {error}", DamagedFileWarning, stacklevel=3)
    if errors:
        text = f"{len(errors)} of {len(errors) + len(records)} records cannot be read and are left out (--strict stops instead)"
        warnings.warn(text, DamagedFileWarning, stacklevel=3)
    return records


def failure_path(folder: Path, key: str) -> Path:
    """Where the traceback of a failed run is kept."""
    return folder / f"{key}.failed.json"


def write_failure(path: Path, recipe: Recipe, error: BaseException) -> None:
    """Keep the reason why a run failed. The file is for people only, so failing to write it stops nothing."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return  # a full disk's last kilobytes are not for this
    versions = {"headcount": __version__, "python": platform.python_version()}
    data = {
        "key": path.name.partition(".")[0],
        "format": 1,
        "recipe": recipe.values,
        "text": str(recipe),
        "error": error_line(error),
        "traceback": "".join(traceback.format_exception(error)),
        "provenance": {"versions": versions, "host": platform.node(), "ended": datetime.now(UTC).isoformat(timespec="seconds")},
    }
    with suppress(OSError):
        atomic_write(path, lambda f: f.write(_one_field_per_line(data)))


def error_line(error: BaseException) -> str:
    """The last line of a traceback; the rest is in the run's ``.failed.json``."""
    return traceback.format_exception_only(error)[-1].strip()


def _one_field_per_line(data: dict[str, Any]) -> bytes:
    lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False, separators=(',', ':'))}" for k, v in data.items())
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def provenance(device: torch.device, started: datetime, seconds: float, compiled: bool) -> dict[str, Any]:
    """Where a record comes from: commit, versions, machine, time."""
    return {
        "commit": _commit(),
        "versions": {"headcount": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": device_name(device),
        "compiled": compiled,
        **({"processes": distributed.world_size()} if distributed.world_size() > 1 else {}),
        "host": platform.node(),
        "started": started.isoformat(timespec="seconds"),
        "seconds": round(seconds, 3),
    }


@cache
def _commit() -> str | None:
    """The commit of the checkout this code runs from; for a copy without history, the environment's HEADCOUNT_COMMIT."""
    if commit := os.environ.get("HEADCOUNT_COMMIT"):
        return commit
    options: dict[str, Any] = {"cwd": Path(__file__).parent, "capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        subprocess.run(["git", "ls-files", "--error-unmatch", __file__], **options)
        return subprocess.run(["git", "rev-parse", "HEAD"], **options).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

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
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount import __version__
from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_write, open_npz
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
        if not path.exists():
            return {}
        expected = f"the whole file, or move it away with {self.path.name} and run the study again"
        with open_npz(path, expected) as npz:
            return {name: npz[name] for name in npz.files}

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            data = json.loads(path.read_bytes())
            problem = _what_is_missing(data)
        except ValueError as e:
            problem = str(e)
        if problem:
            raise HeadcountError(f"{path} is not a record ({problem}); move it away and run the study again")
        return cls(data, path)


_NOT_RECORDS = (".failed.json", "summary.json")
_PARTS = {"key": str, "recipe": dict, "data": dict, "fit": dict, "scores": dict, "provenance": dict}
# what tables and pages read from the parts
_FIELDS: dict[tuple[str, ...], Any] = {("data", "classes"): list, ("fit", "valid_loss"): (int, float)}
_FIELDS |= {("recipe", name): object for name in ("source", "scenario", "fold", "head", "removal", "seed")}
_FIELDS |= {("data", name): str for name in ("source", "checksum")} | {("fit", name): int for name in ("best_epoch", "epochs")}
_FIELDS |= {("data", name): int for name in ("train_bags", "valid_bags", "test_bags", "bag_size")}


def _what_is_missing(data: Any) -> str:
    """What every record has and this one lacks, or has with a wrong type; empty if nothing."""
    if not isinstance(data, dict):
        return "it lacks everything"
    if parts := [name for name, kind in _PARTS.items() if not isinstance(data.get(name), kind)]:
        return f"it lacks {', '.join(parts)}"
    Recipe.from_dict(data["recipe"])  # raises for one of another version, or edited
    fields = [f"{p}.{n}" for (p, n), kind in _FIELDS.items() if n not in data[p] or not isinstance(data[p][n], kind)]
    fields += [f"scores.{k} as a number" for k, v in data["scores"].items() if not isinstance(v, int | float | None)]
    return f"it lacks {', '.join(fields)}" if fields else ""


def write_record(folder: Path, data: dict[str, Any], arrays: dict[str, np.ndarray]) -> Record:
    """Put a record in place: arrays first, then the JSON, whose existence means that both are complete."""
    path = folder / f"{data['key']}.json"
    atomic_write(path.with_suffix(".npz"), lambda f: np.savez_compressed(f, allow_pickle=False, **arrays))
    try:
        atomic_write(path, lambda f: f.write(_one_field_per_line(data)))
    except Exception:
        path.with_suffix(".npz").unlink()
        raise
    return Record(data, path)


def load_records(folder: Path | str) -> list[Record]:
    """Every record in a folder, by key; without failures and summaries."""
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadcountError(f"no folder {folder}; give the --out of a study")
    return [Record.read(p) for p in sorted(folder.glob("*.json")) if not p.name.endswith(_NOT_RECORDS)]


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

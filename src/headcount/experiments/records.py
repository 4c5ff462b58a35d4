"""A record: what one run found, whole or absent.

``<key>.json`` (under 8 KB: recipe, scores, thinned curves, provenance) and, beside it, ``<key>.npz`` (arrays: what was said of
each test instance; for a Counting Network each training instance's vote and distance). The arrays are put in place first
and the JSON last, each written beside and renamed, so a JSON that exists is a run that finished. A run that failed leaves
``<key>.failed.json`` (recipe, error, traceback) until it succeeds.
"""

from __future__ import annotations

import errno
import json
import platform
import traceback
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from headcount import __version__
from headcount.datasets.parsers import explain_read_errors
from headcount.errors import HeadcountError
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_write
from headcount.models.heads import find_head


@dataclass(frozen=True, eq=False)
class Record:
    """One finished run. ``body`` is the JSON as written."""

    data: dict[str, Any]
    path: Path

    @property
    def key(self) -> str:
        return self.data["key"]

    @property
    def recipe(self) -> Recipe:
        return Recipe.from_dict(self.data["recipe"])

    @property
    def label(self) -> str:
        """What tables call its method. A head of one's own is called as it was when it ran: reading a record runs no code."""
        recipe = self.recipe
        return str(self.data.get("label", recipe.head)) if ":" in recipe.head else recipe.label

    @property
    def uses_instance_labels(self) -> bool:
        """Whether it was told every instance's label: an upper bound, never "the best"."""
        head = self.recipe.head
        return bool(self._custom_head.get("told")) if ":" in head else find_head(head).uses_instance_labels

    @property
    def fingerprint(self) -> dict[str, str]:
        """What a run saw beyond its recipe: the data, by checksum, and the code of a head of one's own, where it is known."""
        return {"data": str(self.data["data"].get("checksum", "")), "code": str(self._custom_head.get("code", ""))}

    @property
    def method(self) -> tuple[Any, ...]:
        """What the records of one table row have in common."""
        recipe = self.recipe
        return recipe.replace(fold=0, seed=0, removal=float(recipe.removal > 0)), *self.fingerprint.values()

    @property
    def _custom_head(self) -> dict[str, Any]:
        own = self.data.get("own_head")
        return own if isinstance(own, dict) else {}

    @property
    def scores(self) -> dict[str, float]:
        return self.data["scores"]

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays beside the record, read into memory; empty if they were not kept."""
        path = self.path.with_suffix(".npz")
        if not path.exists():
            return {}
        want = f"the whole file, or move it away with {self.path.name} and run the study again"
        with explain_read_errors(path, want), path.open("rb") as f, np.load(f, allow_pickle=False) as npz:
            return {name: npz[name] for name in npz.files}

    def result(self) -> dict[str, Any]:
        """All that must be equal when the run is repeated: everything but clock, host and versions."""
        return {k: v for k, v in self.data.items() if k != "provenance"}

    @classmethod
    def read(cls, path: Path) -> Record:
        try:
            body = json.loads(path.read_bytes())
        except ValueError as e:
            raise _not_a_record(path, str(e)) from None
        if why := _unlike_a_record(body):
            raise _not_a_record(path, why)
        return cls(body, path)


_NO_RECORDS = (".failed.json", "summary.json")
_PARTS = {"key": str, "recipe": dict, "data": dict, "fit": dict, "scores": dict, "provenance": dict}
# what tables and pages read of the parts
_FIELDS: dict[str, dict[str, Any]] = {
    "recipe": dict.fromkeys(("source", "scenario", "fold", "head", "removal", "seed"), object),
    "data": {
        **{"source": str, "checksum": str, "classes": list},
        **dict.fromkeys(("train_bags", "valid_bags", "test_bags", "bag_size"), int),
    },
    "fit": {"best_epoch": int, "epochs": int, "valid_loss": (int, float)},
}


def _unlike_a_record(body: Any) -> str:
    """What every record has and this has not, or not as what it should be; else nothing."""
    if not isinstance(body, dict):
        return "it lacks everything"
    if parts := [name for name, kind in _PARTS.items() if not isinstance(body.get(name), kind)]:
        return f"it lacks {', '.join(parts)}"
    try:
        Recipe.from_dict(body["recipe"])
    except HeadcountError as e:  # another version's, or written by hand
        return str(e)
    fields = [
        f"{part}.{name}"
        for part, kinds in _FIELDS.items()
        for name, kind in kinds.items()
        if name not in body[part] or not isinstance(body[part][name], kind)
    ]
    fields += [f"scores.{k} as a number" for k, v in body["scores"].items() if not isinstance(v, int | float | None)]
    return f"it lacks {', '.join(fields)}" if fields else ""


def _not_a_record(path: Path, why: str) -> HeadcountError:
    return HeadcountError(f"{path} is not a record ({why}); move it away and run the study again")


def write_record(folder: Path, body: dict[str, Any], arrays: dict[str, np.ndarray]) -> Record:
    """Put a record in place: arrays first, then the JSON that vouches for them."""
    path = folder / f"{body['key']}.json"
    atomic_write(path.with_suffix(".npz"), lambda f: np.savez_compressed(f, allow_pickle=False, **arrays))
    try:
        atomic_write(path, lambda f: f.write(_one_field_a_line(body).encode()))
    except Exception:
        path.with_suffix(".npz").unlink()
        raise
    return Record(body, path)


def failure_path(folder: Path, key: str) -> Path:
    """Where the traceback of a failed run is kept."""
    return folder / f"{key}.failed.json"


def write_failure(path: Path, recipe: Recipe, error: BaseException) -> None:
    """Keep why a run failed. Nothing rests on this file, so a disk that cannot take it stops nothing."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return  # a full disk's last kilobytes are not for this
    body = {
        "key": path.name.partition(".")[0],
        "format": 1,
        "recipe": recipe.values,
        "text": str(recipe),
        "error": traceback.format_exception_only(error)[-1].strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "provenance": {
            "versions": {"headcount": __version__, "python": platform.python_version()},
            "host": platform.node(),
            "ended": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    with suppress(OSError):
        atomic_write(path, lambda f: f.write(_one_field_a_line(body).encode()))


def _one_field_a_line(body: dict[str, Any]) -> str:
    lines = (f"{json.dumps(k)}: {json.dumps(v, allow_nan=False, separators=(',', ':'))}" for k, v in body.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def load_records(folder: Path | str) -> list[Record]:
    """Every record in a folder, by key; what failed, and a summary that somebody made of them, are none."""
    folder = Path(folder)
    if not folder.is_dir():
        raise HeadcountError(f"no folder {folder}; give the --out of a study")
    return [Record.read(p) for p in sorted(folder.glob("*.json")) if not p.name.endswith(_NO_RECORDS)]

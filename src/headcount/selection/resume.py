"""What a fit has finished, kept in a folder that belongs to its data and its options: the next call takes it up.

A unit is one candidate's answers on one fold, written whole; a file that exists is a unit that is finished.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount import __version__
from headcount.io import atomic_write
from headcount.readers import BagDataset
from headcount.selection.cross_validation import FoldResult
from headcount.selection.methods import Method
from headcount.selection.time_budget import TimePlan


def resume_folder(
    work: Path | str | None, dataset: BagDataset, methods: Sequence[Method], seed: int, folds: int, minutes: float | None,
    device: torch.device, frozen_backbone: dict[str, Any] | None = None,
) -> Path | None:  # fmt: skip
    """A folder that belongs to these data and these options, and no others."""
    if work is None:
        return None
    tried = [[c.name, c.metadata(), fingerprint(c.classifier)] for c in methods]
    said = [dataset.fingerprint, tried, seed, folds, minutes, device.type, __version__, frozen_backbone]
    key = hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()[:16]
    place = Path(work) / key
    place.mkdir(parents=True, exist_ok=True)
    return place


def fingerprint(value: Any) -> Any:
    """All that makes a classifier what it is, as plain values: its parameters and those inside them, arrays by their content.
    What shows itself by its address only is never taken up by another process."""
    if hasattr(value, "get_params") and not isinstance(value, type):
        kind = type(value)
        return [kind.__module__, kind.__qualname__, fingerprint(value.get_params(deep=False))]
    if isinstance(value, Mapping):
        return {repr(k): fingerprint(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(fingerprint, value)]
    if hasattr(value, "__array__") and not isinstance(value, type):
        a = np.asarray(value)
        held = fingerprint(a.ravel().tolist()) if a.dtype == object else hashlib.sha256(a.tobytes()).hexdigest()
        return [str(a.dtype), a.shape, held]
    return repr(value)


def load_or_make_plan(folder: Path | None, make: Callable[[], TimePlan]) -> TimePlan:
    """The plan of the call that was stopped, or a new one."""
    file = None if folder is None else folder / "plan.json"
    if file is not None and file.is_file():
        try:
            return TimePlan.from_json(json.loads(file.read_text()))
        except (ValueError, TypeError, KeyError):
            pass  # damaged: made anew
    made = make()
    if file is not None:
        atomic_write(file, lambda f: f.write(json.dumps(asdict(made)).encode()))
    return made


def save_fold(file: Path, result: FoldResult) -> None:
    bags, instance, bag = result.bags, result.instance.numpy(), result.bag.numpy()
    atomic_write(file, lambda f: np.savez(f, bags=bags, instance=instance, bag=bag, seconds=np.array(result.seconds)))


def load_fold(file: Path) -> FoldResult | None:
    """A finished unit; a damaged one is done again."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as z:
            instance, bag = (torch.from_numpy(z[k]) for k in ("instance", "bag"))
            return FoldResult(z["bags"], instance, bag, float(z["seconds"]))
    except Exception:  # absent, or zip, zlib and header errors of many kinds
        return None

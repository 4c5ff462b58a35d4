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
from headcount.data.read import Reading
from headcount.files import write_whole
from headcount.judging.candidates import Candidate
from headcount.judging.crossval import Unit
from headcount.judging.plans import Plan


def place_of(
    work: Path | str | None, reading: Reading, found: Sequence[Candidate], seed: int, folds: int, minutes: float | None,
    device: torch.device, eye: dict[str, Any] | None = None,
) -> Path | None:  # fmt: skip
    """A folder that belongs to these data and these options, and no others."""
    if work is None:
        return None
    tried = [[c.name, c.facts(), whole(c.classifier)] for c in found]
    said = [reading.fingerprint, tried, seed, folds, minutes, device.type, __version__, eye]
    key = hashlib.sha256(json.dumps(said, default=str, sort_keys=True).encode()).hexdigest()[:16]
    place = Path(work) / key
    place.mkdir(parents=True, exist_ok=True)
    return place


def whole(thing: Any) -> Any:
    """All that makes a classifier what it is, as plain values: its parameters and those inside them, arrays by their content.
    What shows itself by its address only is never taken up by another process."""
    if hasattr(thing, "get_params") and not isinstance(thing, type):
        kind = type(thing)
        return [kind.__module__, kind.__qualname__, whole(thing.get_params(deep=False))]
    if isinstance(thing, Mapping):
        return {repr(k): whole(v) for k, v in thing.items()}
    if isinstance(thing, (list, tuple)):
        return [type(thing).__name__, *map(whole, thing)]
    if hasattr(thing, "__array__") and not isinstance(thing, type):
        a = np.asarray(thing)
        held = whole(a.ravel().tolist()) if a.dtype == object else hashlib.sha256(a.tobytes()).hexdigest()
        return [str(a.dtype), a.shape, held]
    return repr(thing)


def planned(place: Path | None, plan: Callable[[], Plan]) -> Plan:
    """The plan of the call that was stopped, or a new one."""
    file = None if place is None else place / "plan.json"
    if file is not None and file.is_file():
        try:
            return Plan.of(json.loads(file.read_text()))
        except (ValueError, TypeError, KeyError):
            pass  # damaged: made anew
    made = plan()
    if file is not None:
        write_whole(file, lambda f: f.write(json.dumps(asdict(made)).encode()))
    return made


def write_unit(file: Path, unit: Unit) -> None:
    bags, instance, bag = unit.bags, unit.instance.numpy(), unit.bag.numpy()
    write_whole(file, lambda f: np.savez(f, bags=bags, instance=instance, bag=bag, seconds=np.array(unit.seconds)))


def read_unit(file: Path) -> Unit | None:
    """A finished unit; a damaged one is done again."""
    try:
        with open(file, "rb") as f, np.load(f, allow_pickle=False) as z:
            instance, bag = (torch.from_numpy(z[k]) for k in ("instance", "bag"))
            return Unit(z["bags"], instance, bag, float(z["seconds"]))
    except Exception:  # absent, or zip, zlib and header errors of many kinds
        return None

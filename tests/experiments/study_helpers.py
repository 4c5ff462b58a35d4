"""Shared by the tests of studies: a tiny recipe, comparison of records, waiting, and looking for processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

T = TypeVar("T")

TINY = Recipe(source="digits", bag_size=8, train_bags=20, valid_bags=10, test_bags=10, backbone="mlp", epochs=4, batch_bags=8)


def assert_same_record(a: Record, b: Record) -> None:
    """Equal in all but time, host and versions; the arrays bit for bit."""
    assert a.data | {"provenance": {}} == b.data | {"provenance": {}}
    first, second = a.arrays(), b.arrays()
    assert first.keys() == second.keys()
    for name in first:
        assert first[name].dtype == second[name].dtype
        assert first[name].tobytes() == second[name].tobytes(), name


def wait_until(condition: Callable[[], T], seconds: float = 100.0) -> T:
    """The first result of ``condition`` that is true."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "the condition was never met"
        time.sleep(0.02)
    return result


def live_processes(relation: str, pid: int) -> list[int]:
    """Processes with this parent ("ppid") or process group ("pgrp"), without zombies."""
    pids = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, ppid, pgrp = stat.read_text().rpartition(")")[2].split()[:3]
        except (OSError, ValueError):  # it ended meanwhile
            continue
        if state not in "ZX" and int({"ppid": ppid, "pgrp": pgrp}[relation]) == pid:
            pids.append(int(stat.parent.name))
    return pids

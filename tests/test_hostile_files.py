"""Files that a disk, an editor or an attacker spoilt are refused in one line, left out with a warning, or made anew: a sample of
the cases of tests/hostile_files.py, of which ``make soak`` tries more and ``python tests/hostile_files.py --all`` every one."""

from __future__ import annotations

import contextlib
import io
from collections import Counter
from pathlib import Path

import pytest

import hostile_files

pytestmark = [
    pytest.mark.filterwarnings("ignore::headcount.errors.HeadcountWarning"),
    pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="measures memory as Linux tells it"),
]


@pytest.fixture(scope="module")
def specimens(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("specimens")
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        hostile_files.make_specimens(folder)
    return folder


def failures(specimens: Path, each: int, seed: int) -> tuple[list[str], Counter[str]]:
    failed, outcomes = [], Counter[str]()
    for case in hostile_files.sample_cases(hostile_files.all_cases(specimens), each, seed):
        outcome, message = hostile_files.attempt(case, specimens)
        outcomes[outcome] += 1
        if outcome in hostile_files.FAILURES:
            failed.append(f"{outcome}: {case}: {message}")
    return failed, outcomes


def test_a_sample_of_spoilt_files(specimens):
    failed, outcomes = failures(specimens, each=2, seed=0)
    assert not failed, "\n".join(failed)
    assert outcomes["refused"] > 10
    assert outcomes["left out"] > 2


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_spoilt_files(specimens):
    """A dozen for every kind of file and reader."""
    failed, _ = failures(specimens, each=24, seed=1)
    assert not failed, "\n".join(failed)


def test_every_reader_has_many_cases(specimens):
    """All that the table makes of one field or array, for every reader."""
    cases = Counter(case.reader for case in hostile_files.all_cases(specimens))
    assert cases.keys() == hostile_files.READERS.keys()
    assert min(cases.values()) > 20
    assert cases.total() > 10_000

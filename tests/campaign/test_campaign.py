"""A sample of the campaign of faults and hostile inputs; ``make campaign`` runs all of it (see __main__.py)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parent
NO_COMPILER = 77


def campaign(*options: str) -> None:
    """Run the campaign in a process of its own, since its children are forks of one that imported everything."""
    process = subprocess.run([sys.executable, CAMPAIGN, *options], capture_output=True, text=True)
    if process.returncode == NO_COMPILER:
        pytest.skip(process.stdout)
    assert process.returncode == 0, process.stdout[-5000:] + process.stderr[-3000:]


def test_a_few_kills_and_faults():
    campaign("faults", "--only", "predict,import,evaluate", "--cases", "12", "--processes", "1")


@pytest.mark.soak
def test_faults():
    campaign("faults", "--cases", "100", "--processes", "2", "--minutes", "1.5")


@pytest.mark.soak
def test_hostile_inputs():
    campaign("inputs", "--cases", "150", "--processes", "2", "--minutes", "1")

"""The whole paper at the small scale, from one command: every cell and figure filled, in minutes on two cores."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from headcount.experiments.paper import ITEMS, SCALES, TABLES, records_by_recipe, required_recipes, table_cells
from report_factory import Page

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]
LIMIT = 600  # seconds


def test_one_command_fills_the_paper(tmp_path: Path) -> None:
    out, page = tmp_path / "records", tmp_path / "paper.html"
    command = ["paper", "--scale", "smoke", "--run", "--processes", "2", "--device", "cpu"]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "headcount", *command, "--out", str(out), "--page", str(page)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT + 200,
    )
    seconds = time.monotonic() - began
    assert (done.returncode, done.stderr) == (0, "")
    print(f"\nthe paper at scale smoke: {seconds:.0f} s, a page of {page.stat().st_size / 1024:.0f} KB")
    records, scale = records_by_recipe(out), SCALES["smoke"]
    assert {r for item in ITEMS for r in required_recipes(item, scale)} <= records.keys()
    assert all(cell.value(records)[2] > 0 for table in TABLES for cell in table_cells(table, scale))
    html = page.read_text("utf-8")
    assert "missing" not in html.lower()
    shown = Page(html)
    assert "undefined" not in shown.text
    assert f"{len(records)} of {len(records)}" in shown.text
    assert [i for i in ITEMS if i not in shown.all("id")] == []
    assert len([attrs for tag, attrs in shown.tags if tag == "svg" and attrs.get("role") == "img"]) == 28
    assert len(html.encode()) < 3_000_000
    assert seconds < LIMIT

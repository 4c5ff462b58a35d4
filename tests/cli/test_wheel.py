"""A built wheel, installed into an empty environment outside the checkout, runs the demo; so does `make demo`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.soak


def test_wheel_runs_the_demo(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*build, str(ROOT)], check=True)
    (wheel,) = tmp_path.glob("headcount-*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel], check=True)
    # the dependencies come from here, without the network; headcount itself must come from the wheel
    site = next((tmp_path / "env" / "lib").glob("python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = [python, "-I", "-c", "import headcount; print(headcount.__file__)"]
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    assert str(site) in subprocess.run(where, capture_output=True, text=True, env=env, check=True).stdout
    demo = [tmp_path / "env" / "bin" / "headcount", "demo", "--folds", "1", "--out", tmp_path / "demo"]
    subprocess.run(demo, cwd=tmp_path, env=env, check=True)
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert len(summary["methods"]) == 6
    assert (tmp_path / "demo" / "report.html").stat().st_size > 50_000


def test_make_demo(tmp_path):
    """What the README asks a newcomer to type, in a copy of the checkout (its .venv is this one)."""
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in files.stdout.splitlines():
        if name.startswith(("src/", "Makefile", "pyproject.toml", "constraints.txt", "README.md")):
            target = tmp_path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    done = subprocess.run(["make", "demo", "-o", ".venv/ready"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert summary["folds"] == 3
    assert "Counting Network + MPEM" in summary["methods"]
    assert all(m["instance_accuracy"]["mean"] > 0.5 for m in summary["methods"].values())

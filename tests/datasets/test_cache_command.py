"""headcount cache: what is there, and what is removed by name, age or size; nothing that is not headcount's."""

from __future__ import annotations

import fcntl
import os
import time

import pytest

KEY, FEATURES = "0" * 31 + "a", "0" * 39 + "b"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A data set, a download, slides and features, one day apart; and files of somebody else."""
    folder = tmp_path / "kept"
    files = ["path/source.json", "path/images.npy", "downloads/x.gz", f"flat/{KEY}.npy", f"flat/{KEY}.jsonl", f"features/{FEATURES}.npy",
             "mine.npy", "other/notes.txt"]  # fmt: skip
    for age, name in enumerate(reversed(files)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(1_000_000))
        os.utime(path, (time.time() - 86400 * age,) * 2)
    monkeypatch.setenv("HEADCOUNT_DATA", str(folder))
    return folder


def names(out: str) -> list[str]:
    return [line.split()[-1] for line in out.splitlines()[:-1]]


def test_list(cache, run_cli):
    code, out, _ = run_cli("cache list")
    assert code == 0
    assert names(out) == ["path", "downloads/x.gz", f"flat/{KEY}", f"features/{FEATURES}"]
    assert out.splitlines()[0].split()[:4] == ["2.0", "MB", "6", "days"]
    assert out.splitlines()[-1].split()[:5] == ["6.0", "MB", "in", "4", "entries"]


def test_an_absent_cache_is_empty(run_cli, tmp_path):
    assert run_cli("cache", "list", "--cache", tmp_path / "none")[1].split()[:5] == ["0.0", "MB", "in", "0", "entries"]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ("path", ["downloads/x.gz", f"flat/{KEY}", f"features/{FEATURES}"]),
        ("--older-than 4.5", [f"flat/{KEY}", f"features/{FEATURES}"]),
        ("--limit 0.003", [f"flat/{KEY}", f"features/{FEATURES}"]),
        ("--limit 0", []),
    ],
)
def test_clear(cache, run_cli, options, left):
    code, out, _ = run_cli(f"cache clear {options}")
    assert code == 0
    assert "MB are free again" in out
    assert names(run_cli("cache list")[1]) == left
    assert (cache / "mine.npy").exists()
    assert (cache / "other/notes.txt").exists()


def test_what_is_being_written_stays(cache, run_cli):
    with open(cache / f"flat/{KEY}.lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        run_cli("cache clear --limit 0")
    assert (cache / f"flat/{KEY}.npy").exists()


def test_wrong_use(cache, run_cli):
    assert run_cli("cache clear")[0] == 2
    code, _, err = run_cli("cache clear mine.npy")
    assert (code, len(err.splitlines())) == (2, 1)
    assert (cache / "mine.npy").exists()

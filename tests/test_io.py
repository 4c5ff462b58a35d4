"""Files and folders are written whole or not at all; locks hold one process at a time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headcount.errors import HeadcountError
from headcount.io import atomic_folder, atomic_path, atomic_write, file_lock


class Interrupted(Exception):
    pass


def write_and_interrupt(part: Path, text: str) -> None:
    part.write_text(text)
    raise Interrupted


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_file_is_whole_or_unchanged(tmp_path):
    path = tmp_path / "new" / "x.txt"
    atomic_write(path, lambda f: f.write(b"first"))
    with pytest.raises(Interrupted), atomic_path(path) as part:
        write_and_interrupt(part, "second")
    assert path.read_text() == "first"
    assert names(path.parent) == ["x.txt"]
    with pytest.raises(HeadcountError, match="is a folder or a device"), atomic_path(tmp_path):
        pass


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    with pytest.raises(OSError, match=r"x\.txt") as error, atomic_path(tmp_path / "x.txt") as part:
        raise OSError(28, os.strerror(28), str(part))
    assert error.value.filename == str(tmp_path / "x.txt")
    with pytest.raises(OSError, match="No space left"), atomic_path(tmp_path / "x.txt"):
        raise RuntimeError("Error while serializing: I/O error: full (os error 28)")


def test_a_folder_is_whole_or_absent(tmp_path):
    path = tmp_path / "out"
    with pytest.raises(Interrupted), atomic_folder(path) as part:
        write_and_interrupt(part / "a", "1")
    assert names(tmp_path) == []
    path.mkdir()
    with atomic_folder(path) as part:
        (part / "a").write_text("1")
        assert names(path) == []
    assert names(tmp_path) == ["out"]
    assert (path / "a").read_text() == "1"
    with pytest.raises(HeadcountError, match=r"out is there already"), atomic_folder(path):
        pass


def test_a_folder_is_replaced_only_at_the_end(tmp_path, monkeypatch):
    path = tmp_path / "out"
    path.mkdir()
    (path / "a").write_text("old")
    with pytest.raises(Interrupted), atomic_folder(path, replace=True) as part:
        write_and_interrupt(part / "a", "new")
    assert (path / "a").read_text() == "old"
    rename = os.replace

    def fail_for_the_new_folder(source, target):
        if str(source).endswith(".part"):
            raise OSError(28, "full")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_for_the_new_folder)
        with pytest.raises(OSError, match="full"), atomic_folder(path, replace=True) as part:
            (part / "a").write_text("new")
    assert names(tmp_path) == ["out"]
    assert (path / "a").read_text() == "old"
    with atomic_folder(path, replace=True) as part:
        (part / "b").write_text("new")
    assert names(tmp_path) == ["out"]
    assert names(path) == ["b"]


def test_a_lock_is_held_once_and_leaves_nothing(tmp_path):
    lock = tmp_path / "locks" / "x.lock"
    with file_lock(lock, wait=False) as first, file_lock(lock, wait=False) as second:
        assert (first, second) == (True, False)
    assert names(tmp_path) == []


def test_a_system_without_locks_is_an_error_only_where_one_is_required(tmp_path, monkeypatch):
    def unsupported(file, operation):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", unsupported)
    with pytest.raises(OSError, match="not supported"), file_lock(tmp_path / "x.lock"):
        pass
    with file_lock(tmp_path / "x.lock", required=False) as acquired:
        assert acquired

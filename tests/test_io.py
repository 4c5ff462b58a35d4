"""Files and folders are written whole or not at all; locks hold one process at a time."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headcount.errors import FileError, HeadcountError, HeadcountWarning
from headcount.io import atomic_folder, atomic_path, atomic_write, commit_together, file_lock, is_free
from headcount.loading import parse_json, read_json


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


# -- several outputs ---------------------------------------------------------------------------------------------------------


def write_three(folder: Path) -> None:
    with commit_together():
        with atomic_folder(folder / "maps", replace=True) as part:
            atomic_write(part / "a.png", lambda f: f.write(b"new"))
        atomic_write(folder / "bags.csv", lambda f: f.write(b"new"))
        assert not (folder / "new.csv").exists()
        atomic_write(folder / "new.csv", lambda f: f.write(b"new"))
        assert (folder / "maps" / "a.png").read_bytes() == (folder / "bags.csv").read_bytes() == b"old"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def old(tmp_path) -> Path:
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "a.png").write_bytes(b"old")
    (tmp_path / "bags.csv").write_bytes(b"old")
    return tmp_path


def test_outputs_appear_together(old):
    write_three(old)
    assert contents(old) == {"bags.csv": b"new", "maps/a.png": b"new", "new.csv": b"new"}


@pytest.mark.parametrize("interrupted", [False, True])
@pytest.mark.parametrize("failing", range(4))
def test_outputs_appear_together_or_not_at_all(old, monkeypatch, failing, interrupted):
    """Whichever of the four renames fails (the folder aside, and the three into place), or Ctrl-C comes just after it."""
    rename, calls = os.replace, []

    def fail_once(source, target):
        calls.append(target)
        now = len(calls) == failing + 2  # the first is of the file in the folder
        if now and not interrupted:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(source))
        rename(source, target)
        if now:
            raise KeyboardInterrupt

    before = contents(old)
    monkeypatch.setattr(os, "replace", fail_once)
    with pytest.raises((OSError, KeyboardInterrupt), match=None if interrupted else "Input/output error"):
        write_three(old)
    assert contents(old) == before


@pytest.mark.parametrize("left", [["first"], ["first", "last.part"]])
def test_a_disk_that_refuses_to_undo_is_reported(tmp_path, monkeypatch, left):
    """Also if it answers nothing any more, so that what was begun cannot be removed."""
    replace = os.replace

    def write_two():
        with commit_together():
            for name in ("first", "last"):
                atomic_write(tmp_path / name, lambda f: f.write(b"new"))

    def broken(source, target):
        if Path(target).name != "first":
            if len(left) > 1:
                monkeypatch.setattr(Path, "is_dir", lambda path: broken(path, path))
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        replace(source, target)

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(FileError) as e:
        write_two()
    assert e.value.__notes__ == [f"{tmp_path / 'first'} could not be put back"]
    assert names(tmp_path) == left


def test_an_earlier_folder_that_cannot_be_put_back_is_named_and_later_removed(old, monkeypatch):
    replace = os.replace

    def broken(source, target):
        if Path(source).name == "maps.part" or Path(target).name == "maps":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    def write_maps():
        with atomic_folder(old / "maps", replace=True) as part:
            (part / "a.png").write_bytes(b"new")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", broken)
        with pytest.raises(FileError) as e:
            write_maps()
    assert e.value.__notes__ == [f"{old / 'maps.part.old'} could not be put back"]
    assert contents(old) == {"bags.csv": b"old", "maps.part.old/a.png": b"old"}
    (old / "maps.old").mkdir()  # somebody else's
    write_maps()
    assert names(old) == ["bags.csv", "maps", "maps.old"]


def write_folders(folder: Path, content: bytes = b"new") -> None:
    with commit_together():
        for name in ("geo", "heat"):
            with atomic_folder(folder / name) as part:
                (part / "a").write_bytes(content)
        atomic_write(folder / "out.csv", lambda f: f.write(content))


@pytest.mark.filterwarnings("ignore:.*left by a command")
@pytest.mark.parametrize("moment", range(5))
def test_folders_of_a_killed_command_are_replaced(tmp_path, monkeypatch, moment):
    """Killed before each of the three renames, before the mark of the unfinished is removed, and not at all."""
    replace, unlink, done = os.replace, Path.unlink, []

    def exit_at_the_moment() -> None:
        if len(done) == moment:
            os._exit(9)
        done.append(True)

    def replace_or_exit(source, target):
        exit_at_the_moment()
        replace(source, target)

    def unlink_or_exit(path, missing_ok=False):
        if path.name == ".unfinished":
            exit_at_the_moment()
        unlink(path, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", replace_or_exit)
        patch.setattr(Path, "unlink", unlink_or_exit)
        if not (child := os.fork()):
            write_folders(tmp_path, b"old")
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (9 if moment < 4 else 0)
    if moment == 4:  # it was complete: what is finished is never replaced
        with pytest.raises(HeadcountError, match="geo is there already"):
            write_folders(tmp_path)
    else:
        write_folders(tmp_path)
    content = b"old" if moment == 4 else b"new"
    assert contents(tmp_path) == {"geo/a": content, "heat/a": content, "out.csv": content}


def test_only_unfinished_folders_are_replaced(tmp_path):
    for name in ("geo", "heat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    assert is_free(tmp_path / "none")
    (tmp_path / "file").touch()
    assert not is_free(tmp_path / "file")
    (tmp_path / "geo" / ".unfinished").write_bytes(os.fsencode(tmp_path / "geo"))
    assert is_free(tmp_path / "geo")
    assert not is_free(tmp_path / "heat", [tmp_path / "geo"])
    (tmp_path / "geo").rename(tmp_path / "kept")  # it is its owner's by now
    assert not is_free(tmp_path / "kept")


def test_an_error_in_the_last_output_leaves_nothing_of_the_others(old):
    before = contents(old)

    def write_two() -> None:
        with commit_together():
            atomic_write(old / "key.json", lambda f: f.write(b"{}"))
            with atomic_path(old / "bags.csv") as part:
                write_and_interrupt(part, "half")

    with pytest.raises(Interrupted):
        write_two()
    assert contents(old) == before


def test_what_an_interrupted_command_left_is_replaced_and_named(old):
    (old / "bags.csv.part").write_bytes(b"half")
    with pytest.warns(HeadcountWarning, match=r"bags\.csv\.part, left by a command that was interrupted, is removed"):
        atomic_write(old / "bags.csv", lambda f: f.write(b"new"))
    (old / "maps.part").mkdir()
    (old / "maps.part" / "b.png").write_bytes(b"half")
    with pytest.warns(HeadcountWarning, match=r"maps\.part, left by"), atomic_folder(old / "maps", replace=True) as part:
        atomic_write(part / "a.png", lambda f: f.write(b"new"))
    os.symlink(old / "maps" / "a.png", old / "bags.csv.part")  # nothing is written through a link
    with pytest.warns(HeadcountWarning, match="left by"):
        atomic_write(old / "bags.csv", lambda f: f.write(b"newer"))
    assert contents(old) == {"bags.csv": b"newer", "maps/a.png": b"new"}


def test_two_that_write_one_file_wait_for_each_other(tmp_path):
    path, order = tmp_path / "page.html", []

    def second() -> None:
        atomic_write(path, lambda f: order.append("second") or f.write(b"second"))

    other = threading.Thread(target=second)
    with atomic_path(path) as part:
        part.write_bytes(b"fir")
        other.start()
        other.join(0.2)
        assert other.is_alive()
        part.write_bytes(b"first")
        order.append("first")
    other.join()
    assert order == ["first", "second"]
    assert contents(tmp_path) == {"page.html": b"second"}


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")
def test_a_killed_writer_blocks_nobody(tmp_path):
    code = "import os, sys, pathlib, headcount.io as io\nwith io.atomic_path(pathlib.Path(sys.argv[1])) as p: os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", code, tmp_path / "x"]).returncode == -9
    assert names(tmp_path) == ["x.part"]
    with pytest.warns(HeadcountWarning, match="left by"):
        atomic_write(tmp_path / "x", lambda f: f.write(b"1"))
    assert names(tmp_path) == ["x"]


# -- errors ----------------------------------------------------------------------------------------------------------------


def test_a_file_error_is_one_line_of_both_kinds():
    error = FileError(errno.EDQUOT, os.strerror(errno.EDQUOT), "out/x.npz")
    assert isinstance(error, HeadcountError)
    assert isinstance(error, OSError)
    assert (
        str(error)
        == f"{os.strerror(errno.EDQUOT)}: out/x.npz; free some space and run the same command again, nothing half-written is left"
    )
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.errno, copy.filename) == (FileError, str(error), errno.EDQUOT, "out/x.npz")
    assert "too many files are open" in str(FileError.from_os_error(OSError(errno.EMFILE, "m"), "x"))
    assert str(FileError.from_os_error(OSError("odd words"), "x")).startswith("odd words: x; ")


CODES = ("EIO", "ESTALE", "EROFS", "EDQUOT", "ENOSPC", "ELOOP", "ENAMETOOLONG", "EMFILE", "EACCES", "ENOENT", "ENOLCK")


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("call", ["open", "fsync", "replace"])
def test_any_error_of_the_system_names_the_file(old, monkeypatch, call, code):
    """Wherever it strikes, it names the file that was to be written, and nothing changes."""

    def fail(*arguments, **options):
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    before = contents(old)
    why = os.strerror(getattr(errno, code))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        with pytest.raises(FileError, match=rf"^{why}: {old}/bags\.csv; "):
            atomic_write(old / "bags.csv", lambda f: f.write(b"new"))
    assert contents(old) == before


def test_a_lock_that_the_file_system_refuses(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", refuse)
    with (
        pytest.raises(FileError, match=r"No locks available: .*x\.lock; the file system has no locks"),
        file_lock(tmp_path / "a" / "x.lock"),
    ):
        pass
    atomic_write(tmp_path / "b", lambda f: f.write(b"1"))  # without locks files are still written whole
    assert (tmp_path / "b").read_bytes() == b"1"


# -- JSON ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": NaN}', "not finite"), ('{"a": [1e999]}', "not finite"), ('{"a": 99999999999999999999}', "64 bits"),
        ('{"a": 1, "a": 2}', "one of the keys a twice"), ("[" * 60 + "]" * 60, "nested"), ("[" * 10**6, "nested deeply"),
        ('"\xff"', "utf-8"), ("[" + "[]," * 4_000_000 + "[]]", "more than 4,000,000 values"), ('{"n": "x"}', "n is 'x', not a whole number"),
        ('{"n": true}', "n is True, not a whole number"), ("{}", "it lacks n"), ("[]", "it is [], not an object"), ('{"n": 1, "o": "x"}', "o is 'x', not a list"),
        ('{"n": 1, "o": [{"p": 1}]}', "o[0].p is 1, not text"), ('{"n": 1, "q": "\\ud800"}', "surrogates not allowed"),
    ],
)  # fmt: skip
def test_json_is_read_strictly(tmp_path, text, why):
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(HeadcountError, match=r"^cannot read .*x\.json: .*; give a better one$") as e:
        read_json(tmp_path / "x.json", {"n": int, "o?": [{"p": str}]}, "a better one")
    assert why in str(e.value)


def test_valid_json_is_taken_as_it_is(tmp_path):
    (tmp_path / "x.json").write_text('{"n": -9223372036854775807, "o": null, "more": [1e308, "\\ud83c\\udf88", {}]}')
    assert read_json(tmp_path / "x.json", {"n": int, "o?": [str]}, "") == {
        "n": 1 - 2**63,
        "o": None,
        "more": [1e308, "\U0001f388", {}],
    }
    assert parse_json(b"[Infinity]", finite=False) == [float("inf")]

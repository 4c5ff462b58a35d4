"""Shared by all tests: one thread per process (they run side by side) and no data cache but the test's own."""

from __future__ import annotations

import errno
import io
import os
import shlex
from collections.abc import Callable

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels are tested without a card, slowly

# The same code gets the same verdict twice: examples are drawn from a fixed seed. `make fuzz` draws new ones every time.
settings.register_profile("repeat", derandomize=True)
settings.register_profile("search", print_blob=True)
settings.load_profile(os.environ.get("HEADCOUNT_FUZZ", "repeat"))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory, monkeypatch):
    """Tests never read a developer's data: the cache is an empty folder."""
    monkeypatch.setenv("HEADCOUNT_DATA", str(tmp_path_factory.getbasetemp() / "no-data"))


def pytest_collection_modifyitems(items):
    """A campaign may take longer than a test, above all on a busy machine."""
    for item in items:
        if item.get_closest_marker("soak") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture
def run_cli(monkeypatch, capsys, tmp_path) -> Callable[..., tuple[int, str, str]]:
    """Run a command line in this process and in the test's own folder. Takes its words, or one line; returns exit code, stdout and stderr."""
    from headcount.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[int, str, str]:
        arguments = shlex.split(str(words[0])) if len(words) == 1 else [str(w) for w in words]
        monkeypatch.setattr("sys.argv", ["headcount", *arguments])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main()
        return (int(exit_.value.code or 0), *capsys.readouterr())

    return run


@pytest.fixture
def downloads(monkeypatch) -> list[str]:
    """timm and torchvision replaced by test doubles; the names whose weights were downloaded."""
    from library_factory import replace_libraries

    return replace_libraries(monkeypatch)


class _SmallDisk(io.FileIO):
    """A file on a disk with room for 100 bytes."""

    def write(self, data):
        if self.tell() + len(data) > 100:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


@pytest.fixture
def full_disk(monkeypatch) -> set[str]:
    """Tables are written to a disk that is full after 100 bytes; if names are added to the set, only the files named there."""
    from headcount.reporting import export

    names: set[str] = set()

    def open_sink(path):
        return (_SmallDisk if not names or any(n in path.name for n in names) else io.FileIO)(path, "wb")

    monkeypatch.setattr(export, "open_sink", open_sink)
    return names

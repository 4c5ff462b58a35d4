"""Where answers are to be written: every place is looked at before any work begins, and complaints name it as it was typed."""

from __future__ import annotations

import os
from pathlib import Path

from headcount.errors import HeadcountError
from headcount.reporting.export import HDF5_SUFFIXES, TABLE_SUFFIXES

FILE_SUFFIXES = (*TABLE_SUFFIXES, *HDF5_SUFFIXES, ".html", ".htm", ".onnx")
FOLDER_OPTIONS = ("geojson", "heatmap")  # whatever their name ends in


def check_outputs(
    data: str | None, model: Path | None, labels: str | Path | None = None, /, **paths: Path | None
) -> None:
    """No two outputs in one place, none over the data, a file in its folder, its labels or the model, and each where it can be
    written."""
    given = {"the data": data, "the labels": labels, "the model": model}
    taken = {Path(path).expanduser().resolve(): what for what, path in given.items() if path is not None}
    for name, path in paths.items():
        if path is None:
            continue
        whole = path.expanduser().resolve()
        for other, what in taken.items():
            inside = other in whole.parents and (what == "the model" or (what == "the data" and whole.is_file()))
            if whole == other or inside:
                where = f"a file of {what}" if inside and what == "the data" else what
                raise HeadcountError(f"--{name} {path} would be written over {where}; choose another place")
        taken[whole] = f"--{name}"
        check_writable(name, path)
        if name in FOLDER_OPTIONS or path.suffix.lower() not in FILE_SUFFIXES:
            _folder(name, path)
        elif path.exists() and not path.is_file():
            kind = "folder" if path.is_dir() else "device"
            raise HeadcountError(f"--{name} {path} is a {kind}, not a file to write over; choose another path")


def check_writable(name: str, path: Path) -> None:
    """The folders above are there or can be made, and written to."""
    above = next((p for p in path.parents if os.path.lexists(p)), Path())
    if not above.is_dir():
        raise HeadcountError(
            f"--{name} {path}: {above} is a file that stands where a folder is wanted; choose another path"
        )
    if not os.access(above, os.W_OK | os.X_OK):
        raise HeadcountError(
            f"--{name} {path}: {above} cannot be written to; choose another folder or change its permissions"
        )


def _folder(name: str, path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise HeadcountError(f"--{name} {path} is a file that stands where a folder is wanted; choose another path")
    if path.is_dir() and any(path.iterdir()):
        raise HeadcountError(f"--{name} {path} is there already; choose another place, or empty the folder first")

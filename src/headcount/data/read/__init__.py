"""A person's own data as bags: folders, tables, texts, arrays and slides, read by one function.

    >>> import numpy as np
    >>> from headcount.data.read import Named, read
    >>> bags = [np.random.rand(4, 3), np.random.rand(2, 3), np.random.rand(5, 3)]
    >>> reading = read(bags, labels=["cat", "dog", "cat"])
    >>> reading
    Reading(features: 3 bags, 11 instances, 2 classes)
    >>> reading.bags()
    Bags(3 bags, 11 instances, 2 classes)

A table (a file, or a DataFrame of any make) has one row per instance. Its preparation is learned on training bags only:

    >>> table = {"bag": ["a", "a", "b", "b"], "label": ["yes", "yes", "no", "no"], "age": [3, None, 5, 9]}
    >>> reading = read(table)
    >>> print(*reading.described, sep="\\n")
    read the table: a table of 4 rows and 3 columns
    2 bags of 2 to 2 instances (median 2), 4 instances in all
    2 classes from column 'label': no (1 bag), yes (1 bag)
    columns: bag 'bag', label 'label'
    features, numbers: 'age'
    >>> learned = reading.learn([0])
    >>> learned.feature_names
    ('age', 'age is missing')
    >>> reading.bags(learned).pool.shape
    (2,)

and comes back from a model file for new data, which need no labels:

    >>> from headcount.data.learned import Learned
    >>> again = Learned.from_parts(learned.to_json(), learned.arrays())
    >>> new = read({"bag": ["c"], "age": [4]}, learned=again, classes=["no", "yes"], need_labels=False)
    >>> new.bags(again).pool.data.shape
    torch.Size([1, 2])

``rows`` says which input row each instance was, and ``ids`` holds the user's own columns in input order, so that
``reading.spread(predictions, blank)`` stands beside ``ids``, one output row per input row.

What each input looks like is said in folders.py, rows.py, arrays.py and slides.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.data.columns import Columns, Named
from headcount.data.learned import Learned
from headcount.data.read import arrays, folders, rows, slide_files, slides
from headcount.data.read.found import Asked, Bad, Found
from headcount.data.read.lay import Reading, lay
from headcount.data.read.tables import SUFFIXES, is_frame, suffix
from headcount.data.read.targets import TIES
from headcount.data.values import plain
from headcount.errors import HeadcountError, choose

__all__ = ["Columns", "Learned", "Named", "Reading", "read"]


def read(
    data: Any,
    named: Named | None = None,
    *,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    ties: str = "split",
    uncounted: Sequence[str] = (),
    skip_bad: bool = False,
    need_labels: bool = True,
    or_truth: bool = False,
    side: int | None = None,
    cache: str | Path | None = None,
    tile: float | None = None,
    learned: Learned | None = None,
) -> Reading:
    """Read ``data``: a folder, a file, a DataFrame, a dict of columns or arrays, a list of arrays, an array.

    ::

        labels       a second file (bag and label columns), a dict {bag: label}, or an array in the order of the bags
        classes      their names and order; those of the labels, sorted, if None
        ties         a bag with two winners: "split" its target, "drop" the bag, or take the "lowest" class
        uncounted    classes that never win, such as background
        skip_bad     leave out what cannot be read and list it in ``skipped``, instead of stopping at the first
        need_labels  False: data to be predicted; labels and truth are taken where they are there and known
        or_truth     data without labels will do, if the class of instances is known
        side         resize pictures to a square of this side
        cache        a folder for pictures and slides that are larger than memory (used without being asked for if they are)
        tile         side of the tiles at the coordinates, in their unit, where the files do not say it
        learned      a model's preparation: the data are read as the model's were
    """
    asked = Asked(
        named=named or Named(), labels=labels, classes=_names(classes), ties=choose("rule for ties", ties, TIES),
        uncounted=_list("uncounted", uncounted), need_labels=need_labels, or_truth=or_truth,
        side=_count("side", side), cache=None if cache is None else Path(cache), tile=_side("tile", tile), learned=learned,
        bad=Bad(skip_bad),
    )  # fmt: skip
    found = _found(data, asked)
    return lay(found, asked)


def _found(data: Any, asked: Asked) -> Found:
    if isinstance(data, (str, Path)):
        return _on_disk(Path(data).expanduser(), asked)
    if is_frame(data):
        return rows.read_table(data, asked)
    if isinstance(data, Mapping):
        if arrays.keyed(data):
            return arrays.read_dict(data, asked)
        if all(getattr(v, "ndim", 1) >= 2 for v in data.values()):
            return arrays.read_list(data, asked)
        return rows.read_table(data, asked)
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return arrays.read_array(data, asked)
    if isinstance(data, (list, tuple)):
        return arrays.read_list(data, asked)
    raise HeadcountError(f"cannot read {type(data).__name__}; give a path, a DataFrame, a dict, or a list of arrays")


def _on_disk(path: Path, asked: Asked) -> Found:
    try:
        folder, file = path.is_dir(), path.is_file()
    except OSError as e:
        raise HeadcountError(f"cannot open {path}: {e.strerror}") from None
    if folder:
        return slides.read_slides(path, asked) if slides.is_slides(path) else folders.read_folder(path, asked)
    if not file:
        raise HeadcountError(
            f"no file or folder {path}; give a table, an .npz, or a folder of pictures or of slides' features"
        )
    if path.suffix.lower() in (".npy", ".npz"):
        return arrays.read_file(path, asked)
    if suffix(path) in SUFFIXES:
        return rows.read_table(path, asked)
    if path.suffix.lower() in slide_files.ENDINGS:
        raise HeadcountError(f"{path} is one slide; give the folder that holds the slides' files, here {path.parent}")
    raise HeadcountError(f"{path}: give a folder, or a file ending in {', '.join([*SUFFIXES, '.npz', '.npy'])}")


def _names(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    names = None if classes is None else _list("classes", classes)
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise HeadcountError(f"classes must be a list of two or more different names, got {', '.join(names)}")
    return names


def _list(what: str, given: Any) -> tuple[str, ...]:
    """Names in a list; a word is one name, whatever its letters."""
    try:
        return tuple(plain(v) or "" for v in ([given] if isinstance(given, str) else given))
    except TypeError:
        raise HeadcountError(f"{what} must be a list of names, got {given!r}") from None


def _side(what: str, given: Any) -> float | None:
    if given is not None and (
        not isinstance(given, (int, float)) or isinstance(given, bool) or not 0 < given < math.inf
    ):
        raise HeadcountError(f"{what} must be a number above zero, got {given!r}")
    return given


def _count(what: str, given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool) or not 0 < given <= 1 << 20):
        raise HeadcountError(f"{what} must be a whole number above zero, got {given!r}")
    return given

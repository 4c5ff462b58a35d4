"""A person's own data as bags: folders, tables, texts, arrays and slides, read by one function.

    >>> import numpy as np
    >>> from headcount.readers import read
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

    >>> from headcount.readers.preprocessing import Learned
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

from headcount.errors import HeadcountError, check_choice
from headcount.readers import arrays, folders, rows, slide_files, slides
from headcount.readers.columns import ColumnRoles, FeatureSchema
from headcount.readers.dataset import BagDataset, assemble
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.raw_data import ErrorPolicy, RawData, ReadOptions
from headcount.readers.tables import TABLE_SUFFIXES, file_suffix, is_dataframe
from headcount.readers.targets import TIES
from headcount.readers.values import clean_name

__all__ = ["BagDataset", "ColumnRoles", "FeatureSchema", "Preprocessor", "read"]


def read(
    data: Any,
    roles: ColumnRoles | None = None,
    *,
    labels: Any = None,
    classes: Sequence[str] | None = None,
    ties: str = "split",
    uncounted: Sequence[str] = (),
    skip_bad: bool = False,
    need_labels: bool = True,
    truth_suffices: bool = False,
    side: int | None = None,
    cache: str | Path | None = None,
    tile: float | None = None,
    preprocessor: Preprocessor | None = None,
) -> BagDataset:
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
    options = ReadOptions(
        roles=roles or ColumnRoles(), labels=labels, classes=_names(classes), ties=check_choice("rule for ties", ties, TIES),
        uncounted=_list("uncounted", uncounted), need_labels=need_labels, truth_suffices=truth_suffices,
        side=_count("side", side), cache=None if cache is None else Path(cache), tile=_side("tile", tile), preprocessor=preprocessor,
        errors=ErrorPolicy(skip_bad),
    )  # fmt: skip
    raw = load_raw(data, options)
    return assemble(raw, options)


def load_raw(data: Any, options: ReadOptions) -> RawData:
    if isinstance(data, (str, Path)):
        return load_path(Path(data).expanduser(), options)
    if is_dataframe(data):
        return rows.read_table(data, options)
    if isinstance(data, Mapping):
        if arrays.is_array_dict(data):
            return arrays.read_dict(data, options)
        if all(getattr(v, "ndim", 1) >= 2 for v in data.values()):
            return arrays.read_list(data, options)
        return rows.read_table(data, options)
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return arrays.read_array(data, options)
    if isinstance(data, (list, tuple)):
        return arrays.read_list(data, options)
    raise HeadcountError(f"cannot read {type(data).__name__}; give a path, a DataFrame, a dict, or a list of arrays")


def load_path(path: Path, options: ReadOptions) -> RawData:
    try:
        folder, file = path.is_dir(), path.is_file()
    except OSError as e:
        raise HeadcountError(f"cannot open {path}: {e.strerror}") from None
    if folder:
        return slides.read_slides(path, options) if slides.is_slide_folder(path) else folders.read_folder(path, options)
    if not file:
        raise HeadcountError(
            f"no file or folder {path}; give a table, an .npz, or a folder of pictures or of slides' features"
        )
    if path.suffix.lower() in (".npy", ".npz"):
        return arrays.read_array_file(path, options)
    if file_suffix(path) in TABLE_SUFFIXES:
        return rows.read_table(path, options)
    if path.suffix.lower() in slide_files.SLIDE_SUFFIXES:
        raise HeadcountError(f"{path} is one slide; give the folder that holds the slides' files, here {path.parent}")
    raise HeadcountError(f"{path}: give a folder, or a file ending in {', '.join([*TABLE_SUFFIXES, '.npz', '.npy'])}")


def _names(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    names = None if classes is None else _list("classes", classes)
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise HeadcountError(f"classes must be a list of two or more different names, got {', '.join(names)}")
    return names


def _list(what: str, given: Any) -> tuple[str, ...]:
    """Names in a list; a word is one name, whatever its letters."""
    try:
        return tuple(clean_name(v) or "" for v in ([given] if isinstance(given, str) else given))
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

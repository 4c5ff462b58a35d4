"""Read a person's own data as bags: folders, tables, texts, arrays and slides.

A table (a file, or a DataFrame of any library) has one row per instance. Its preprocessing is fitted to training bags only:

    >>> table = {"bag": ["a", "a", "b", "b"], "label": ["yes", "yes", "no", "no"], "age": [3, None, 5, 9]}
    >>> dataset = read(table)
    >>> print(*dataset.description, sep="\\n")
    read the table: a table of 4 rows and 3 columns
    2 bags of 2 to 2 instances (median 2), 4 instances in all
    2 classes from column 'label': no (1 bag), yes (1 bag)
    columns: bag 'bag', label 'label'
    features, numbers: 'age'
    >>> preprocessor = dataset.fit_preprocessor([0])
    >>> preprocessor.feature_names
    ('age', 'age is missing')
    >>> dataset.to_bags(preprocessor).pool.shape
    (2,)

and is restored from a model file for new data, which need no labels:

    >>> from headcount.readers.preprocessing import Preprocessor
    >>> restored = Preprocessor.from_parts(preprocessor.to_json(), preprocessor.arrays())
    >>> new = read({"bag": ["c"], "age": [4]}, preprocessor=restored, classes=["no", "yes"], need_labels=False)
    >>> new.to_bags(restored).pool.data.shape
    torch.Size([1, 2])

The formats are described in images.py, rows.py, arrays.py and slides.py.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headcount.errors import HeadcountError, check_choice
from headcount.readers import arrays, images, rows, slides
from headcount.readers.columns import ColumnRoles
from headcount.readers.dataset import BagDataset, assemble
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.raw_data import ErrorPolicy, RawData, ReadOptions
from headcount.readers.tables import TABLE_SUFFIXES, file_suffix, is_dataframe
from headcount.readers.targets import TIES
from headcount.readers.values import clean_name


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
    """Read a folder, a file, a DataFrame, a dict of columns or arrays, a list of arrays, or an array.

    Parameters
    ----------
    data
        What to read; see :doc:`/how-to/fit` for the formats.
    roles
        The columns of a table, by role; those with common names are recognised.
    labels
        A second file (bag and label columns), a dict {bag: label}, or an array in the order of the bags.
    classes
        Their names and order; None: those of the labels, sorted.
    ties
        A bag with two winners: "split" its target, "drop" the bag, or take the "lowest" class.
    uncounted
        Classes that never win, such as background.
    skip_bad
        Leave out what cannot be read and list it in ``skipped``, instead of stopping at the first error.
    need_labels
        False for data to be predicted: labels and truth are used where they are present and known.
    truth_suffices
        Accept data without labels if the class of instances is known.
    side
        Resize images to a square of this side.
    cache
        A folder for images and slides larger than memory (a default one is used if they are).
    tile
        Side of the tiles at the coordinates, in their unit, where the files do not contain it.
    preprocessor
        That of a fitted model: the data are read as the model's were.

    Returns
    -------
    BagDataset
        The bags, with the raw instances, the user's own columns and a description of what was understood.

    Examples
    --------
    >>> read([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], labels=["a", "b"])
    BagDataset(features: 2 bags, 3 instances, 2 classes)
    """
    options = ReadOptions(
        roles=roles or ColumnRoles(), labels=labels, classes=_check_classes(classes),
        ties=check_choice("rule for ties", ties, TIES), uncounted=_check_names("uncounted", uncounted), need_labels=need_labels,
        truth_suffices=truth_suffices, side=_check_positive("side", side, int, "whole number", 1 << 20), cache=None if cache is None else Path(cache),
        tile=_check_positive("tile", tile, (int, float), "number", sys.float_info.max), preprocessor=preprocessor, errors=ErrorPolicy(skip_bad),
    )  # fmt: skip
    return assemble(_load(data, options), options)


def _load(data: Any, options: ReadOptions) -> RawData:
    if isinstance(data, (str, Path)):
        return _load_path(Path(data).expanduser(), options)
    if is_dataframe(data):
        return rows.read_table(data, options)
    if isinstance(data, Mapping):
        if arrays.is_array_dict(data):
            return arrays.read_named_arrays(data, options)
        if all(getattr(v, "ndim", 1) >= 2 for v in data.values()):
            return arrays.read_list(data, options)
        return rows.read_table(data, options)
    if isinstance(data, (np.ndarray, torch.Tensor)):
        return arrays.read_array(data, options)
    if isinstance(data, (list, tuple)):
        return arrays.read_list(data, options)
    raise HeadcountError(f"cannot read {type(data).__name__}; give a path, a DataFrame, a dict, or a list of arrays")


def _load_path(path: Path, options: ReadOptions) -> RawData:
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as e:
        raise HeadcountError(f"cannot open {path}: {e.strerror}") from None
    if is_folder:
        return slides.read_slides(path, options) if slides.list_slide_files(path) else images.read_folder(path, options)
    if not is_file:
        advice = "give a table, an .npz, or a folder of images or of features of slides"
        raise HeadcountError(f"no file or folder {path}; {advice}")
    if path.suffix.lower() in (".npy", ".npz"):
        return arrays.read_array_file(path, options)
    if file_suffix(path) in TABLE_SUFFIXES:
        return rows.read_table(path, options)
    if path.suffix.lower() in slides.SLIDE_SUFFIXES:
        raise HeadcountError(f"{path} is one slide; give the folder that holds the files of the slides, {path.parent}")
    raise HeadcountError(f"{path}: give a folder, or a file ending in {', '.join([*TABLE_SUFFIXES, '.npz', '.npy'])}")


def _check_classes(classes: Sequence[str] | None) -> tuple[str, ...] | None:
    names = None if classes is None else _check_names("classes", classes)
    if names is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise HeadcountError(f"classes must be a list of two or more different names, got {', '.join(names)}")
    return names


def _check_names(option: str, names: Any) -> tuple[str, ...]:
    """A list of names; a text is one name."""
    try:
        return tuple(clean_name(v) or "" for v in ([names] if isinstance(names, str) else names))
    except TypeError:
        raise HeadcountError(f"{option} must be a list of names, got {names!r}") from None


def _check_positive(option: str, value: Any, kind: type | tuple[type, ...], what: str, most: float) -> Any:
    if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or not 0 < value <= most):
        raise HeadcountError(f"{option} must be a {what} above zero, got {value!r}")
    return value

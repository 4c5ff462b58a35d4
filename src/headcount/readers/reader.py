"""Read a person's own data as bags: folders, tables, texts, arrays and slides.

The formats are described in images.py, rows.py, arrays.py and slides.py.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.bags import Bags, Pool
from headcount.bags.validation import check_noise, find_counts
from headcount.errors import HeadcountError, check_bool, check_choice, check_number
from headcount.loading import file_mode
from headcount.readers import arrays, images, rows, slides
from headcount.readers.columns import ColumnRoles, clean_name, first_duplicate, note_similar_classes, preview
from headcount.readers.dataset import TIES, BagDataset, ErrorPolicy, RawData, ReadOptions, build_targets, class_advice
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.tables import TABLE_SUFFIXES, file_suffix, from_memory, is_dataframe


def read(
    data: Any,
    roles: ColumnRoles | None = None,
    *,
    bags: Any = None,
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
    encoder: str | Path | None = None,
    download: bool = False,
    preprocessor: Preprocessor | None = None,
    label_noise: float = 0.0,
    min_size: int = 1,
) -> BagDataset:
    r"""Read a folder, a file, a DataFrame, a dict of columns or arrays, a list of arrays, an array or a sparse matrix.

    Parameters
    ----------
    data
        What to read; see :doc:`/how-to/fit` for the formats.
    roles
        The columns of a table, by role; those with common names are recognised.
    bags
        The bag of each row of an array (N, D) or (N, H, W, channels), a sparse matrix, a Series of texts, or a table without it;
        or the name of the column that holds it.
    labels
        A second file or DataFrame (bag and label, or a probability per class), a dict or Series by bag, or an array: of one label
        per bag in the order of the bags, one per row, or (B, C) votes or probabilities. None, NaN and -1: unlabelled.
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
        A folder for embeddings, and for images and slides larger than memory; default ``$HEADCOUNT_DATA``.
    tile
        Side of the tiles at the coordinates, in their unit, where the files do not contain it.
    encoder, download
        What makes features of texts, instead of TF-IDF: a folder, an installed package or a name on the Hugging Face hub, as
        :func:`headcount.encode_texts` takes it (default: that of the model, if there is one); and whether it may be downloaded.
    preprocessor
        That of a fitted model: the data are read as the model's were.
    label_noise
        The probability with which each label was replaced by one at random before it was given (:doc:`/how-to/privacy`).
    min_size
        The fewest instances a bag may have; smaller ones are errors, which ``skip_bad`` leaves out.

    Returns
    -------
    BagDataset
        The bags, with the raw instances, the user's own columns and a description of what was understood.

    Examples
    --------
    >>> read([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], labels=["a", "b"])
    BagDataset(features: 2 bags, 3 instances, 2 classes)

    The preprocessing of a table is fitted to training bags only:

    >>> dataset = read({"bag": ["a", "a", "b", "b"], "label": ["yes", "yes", "no", "no"], "age": [3, None, 5, 9]})
    >>> print(*dataset.description[1:], sep="\n")
    2 bags of 2 instances, 4 in all
    2 classes from column 'label': no (1 bag), yes (1 bag)
    columns: bag 'bag', label 'label'
    features, numbers: 'age'
    >>> dataset.fit_preprocessor([0]).feature_names
    ('age', 'age is missing')
    """
    roles = roles or ColumnRoles()
    if bags is not None and roles.bag is not None:
        raise HeadcountError(f"the bags are given twice, by roles (column {roles.bag!r}) and by bags=; give one")
    if bags is not None:
        data = data if isinstance(bags, str) else _with_bags(data, bags)
        roles = replace(roles, bag=bags if isinstance(bags, str) else "bag")
    options = ReadOptions(
        roles=roles, labels=labels, classes=None if classes is None else _check_names("classes", classes),
        ties=check_choice("rule for ties", ties, TIES), uncounted=_check_names("uncounted", uncounted), need_labels=need_labels,
        truth_suffices=truth_suffices, side=None if side is None else check_number("side", side, 1, 1 << 20, integer=True),
        cache=None if cache is None else Path(cache), tile=None if tile is None else check_number("tile", tile, 1e-9, 1e9, integer=False),
        preprocessor=preprocessor, errors=ErrorPolicy(skip_bad), encoder=encoder, download=check_bool("download", download),
        label_noise=check_noise(label_noise), min_size=check_number("min_size", min_size, 1, 1 << 30, integer=True),
    )  # fmt: skip
    try:
        return _assemble(_load(data, options), options)
    except OSError as e:  # a disk or a network that fails, links in a circle, too many open files
        file = e.filename or (data if isinstance(data, (str, Path)) else "the data")
        raise HeadcountError(f"cannot read {file}: {e.strerror or e}") from None


def _with_bags(data: Any, bags: Any) -> Any:
    """Rows in memory and the bag of each, as the readers expect them: a dict of arrays, or a table with a column."""
    ids = arrays.as_array(bags, "bags", texts=True)
    if hasattr(data, "to_frame") and not is_dataframe(data):  # a Series
        data = data.to_frame("value" if getattr(data.dtype, "kind", "O") in "biuf" else "text")
    if is_dataframe(data) or (isinstance(data, Mapping) and not arrays.is_array_dict(data)):
        table = from_memory(data)
        if len(ids) != len(table):
            raise HeadcountError(f"bags= has {len(ids):,} for {len(table):,} rows; give one per row")
        return table.append_column("bag", pa.array(ids))
    if isinstance(data, Mapping):
        return {**data, "bag": ids}
    if isinstance(data, (str, Path)):
        raise HeadcountError(f"bags= is for data in memory, and {data} is a file; name its column of the bags")
    x = arrays.as_array(data, "the array")
    return {"images" if x.ndim == 4 else "features": x, "bag": ids}


def _load(data: Any, options: ReadOptions) -> RawData:
    if isinstance(data, (str, Path)):
        return _load_path(Path(data).expanduser(), options)
    is_dict = isinstance(data, Mapping) and not is_dataframe(data)
    if is_dict and arrays.is_array_dict(data):
        return arrays.read_named_arrays(data, options)
    if isinstance(data, (list, tuple)) or (is_dict and all(getattr(v, "ndim", 1) >= 2 for v in data.values())):
        return arrays.read_list(data, options)
    if is_dict or is_dataframe(data):
        return rows.read_table(data, options)
    if isinstance(data, (np.ndarray, torch.Tensor)) or (options.bags_optional and hasattr(data, "toarray")):
        return arrays.read_array(data, options)
    if hasattr(data, "toarray") or hasattr(data, "to_frame"):  # a sparse matrix, a Series
        raise HeadcountError(f"which bag is each row of the {type(data).__name__} in? Give them with bags=")
    raise HeadcountError(f"cannot read {type(data).__name__}; give a path, a DataFrame, a dict, or a list of arrays")


def _load_path(path: Path, options: ReadOptions) -> RawData:
    mode = file_mode(path)
    if S_ISDIR(mode):
        return slides.read_slides(path, options) if slides.list_slide_files(path) else images.read_folder(path, options)
    if not S_ISREG(mode):
        raise HeadcountError(f"no file or folder {path}; give a table, an .npz, or a folder of images or of features of slides")
    if path.suffix.lower() in (".npy", ".npz"):
        return arrays.read_array_file(path, options)
    if file_suffix(path) in TABLE_SUFFIXES:
        return rows.read_table(path, options)
    if path.suffix.lower() in slides.SLIDE_SUFFIXES:
        raise HeadcountError(f"{path} is one slide; give the folder that holds the files of the slides, {path.parent}")
    raise HeadcountError(f"{path}: give a folder, or a file ending in {', '.join([*TABLE_SUFFIXES, '.npz', '.npy'])}")


def _check_names(option: str, given: Any) -> tuple[str, ...]:
    try:
        names = tuple(clean_name(v) or "" for v in ([given] if isinstance(given, str) else given))
    except TypeError:
        raise HeadcountError(f"{option} must be a list of names, got {given!r}") from None
    if option == "classes" and (len(names) < 2 or len(set(names)) < len(names)):
        raise HeadcountError(f"classes must be a list of two or more different names, got {', '.join(names)}")
    return names


def _assemble(raw: RawData, options: ReadOptions) -> BagDataset:
    """From n input rows to bags in order of first appearance, with their rows in their order, without a loop over them."""
    classes_given, options = options.classes is not None, replace(options, classes=options.classes or raw.classes)
    _check_usable(raw, options)
    target, votes, classes, tied = build_targets(raw.labels, options, raw.names, raw.origin)
    content, address, kept_rows = raw.content, raw.address, raw.bag >= 0
    if not raw.all_finite and not kept_rows.all():  # excluded rows may hold anything; a mapped cache has zeros there
        content = content.filter(pa.array(kept_rows)) if isinstance(content, pa.Table) else content[kept_rows]
        address = np.cumsum(kept_rows) - 1
    small = _small_bags(raw, options)
    included = np.flatnonzero((raw.bag >= 0) & ~np.append(tied | small, True)[raw.bag])
    if not len(included):
        why = f": {options.errors.messages[0]}" if options.errors.messages else ""
        raise HeadcountError(f"{raw.origin} leaves no instance to read{why}")
    rows = included[np.argsort(raw.bag[included], kind="stable")]
    kept, sizes = np.unique(raw.bag[rows], return_counts=True)  # bags that have any row left
    without_votes = [c for c in options.classes or () if c not in (*raw.labels.values, *options.uncounted)]
    is_vote_missing = raw.labels.votes is not None and bool(without_votes)
    options.notes.extend([f"no column of votes for {preview(without_votes)}: taken as none"] if is_vote_missing else [])
    options.notes.extend(_note_dropped_bags(raw, target, tied, tied | small, kept))
    options.notes.extend([] if classes_given else note_similar_classes(classes))  # a user who lists them knows
    target, votes = target[kept], None if votes is None else find_counts(votes[kept], sizes)
    has_truth = raw.truth is not None and bool((raw.truth[0] >= 0).any())
    if options.requires_labels(has_truth) and not target.any():
        raise HeadcountError(f"{raw.origin}: no bag has a label ({raw.labels.source}); at least one is needed")
    group = raw.group or raw.labels.group
    codes = {key: _class_codes(raw, key, options, classes)[rows] for key in ("truth", "known") if getattr(raw, key) is not None}
    try:
        if isinstance(content, pa.Table):  # blank until there are features
            pool = Pool(np.broadcast_to(np.zeros((1, 1), np.float32), (content.num_rows, 1)))
        else:
            pool = Pool(content, trusted=raw.all_finite)
        bags = Bags.of(
            pool, index=rows if address is None else address[rows], sizes=sizes, labels=target, classes=classes, names=[raw.names[b] for b in kept],
            group=None if group is None else [group[b] for b in kept],
            weight=None if raw.weight is None else raw.weight[rows].astype(np.float32), votes=votes,
            counted=[c not in options.uncounted for c in classes] if options.uncounted else None,
            label_noise=options.label_noise, **codes,
        )  # fmt: skip
    except HeadcountError as e:
        raise HeadcountError(f"{raw.origin}: {e}") from None
    return BagDataset(
        kind=raw.schema.kind, schema=raw.schema, content=content, bags=bags, rows=rows, n_rows=len(raw.bag), ids=raw.ids,
        coords=None if raw.coords is None else raw.coords[rows],
        tile_sizes=None if raw.tile_sizes is None else raw.tile_sizes[rows],
        description=[raw.summary, *raw.describe(bags, options.uncounted), *options.notes],
        skipped=options.errors.messages, fingerprint=raw.fingerprint(bags),
        instances_hash=hashlib.sha256(f"{raw.schema.kind} {raw.digest}".encode()).hexdigest(),
    )  # fmt: skip


def _check_usable(raw: RawData, options: ReadOptions) -> None:
    model, kind, shape = options.preprocessor, raw.schema.kind, raw.schema.shape
    if model is not None and (kind != model.kind or (not model.fields and model.shape != shape)):
        raise HeadcountError(f"{raw.origin} holds {kind} of shape {shape}, the model takes {model.kind} of {model.shape}")
    if (duplicate := first_duplicate(raw.names)) is not None:
        raise HeadcountError(f"{raw.origin} has two bags called {duplicate!r}; give each its own name")
    if options.side is not None and kind != "images":
        raise HeadcountError(f"side={options.side} is for images, and {raw.origin} holds none; leave it out")
    if options.encoder is not None and not any(f.kind == "embedding" for f in raw.schema.fields):
        advice = "the model was fitted without one" if model is not None else "name the column with text="
        raise HeadcountError(
            f"encoder={options.encoder} is for a text, and {raw.origin} has none to encode; {advice}, or leave it out"
        )
    if options.tile is not None and raw.coords is None:
        raise HeadcountError(f"tile={options.tile:g} is for coordinates, and {raw.origin} has none; leave it out")
    if options.label_noise and raw.labels.votes is not None:
        raise HeadcountError(f"label_noise={options.label_noise:g} is for labels, and {raw.origin} has votes; leave it out")


def _small_bags(raw: RawData, options: ReadOptions) -> np.ndarray:
    """(B,) which bags have fewer instances than allowed. Their names are not part of the message, which a model may keep."""
    sizes = np.bincount(raw.bag[raw.bag >= 0], minlength=len(raw.names))
    small = (sizes > 0) & (sizes < options.min_size)
    if small.any():
        problem = f"{int(small.sum()):,} {'bags have' if small.sum() > 1 else 'bag has'} fewer than {options.min_size} instances, the least {sizes[small].min()}"
        options.errors.report(f"{raw.origin}: {problem}; merge them with others, or leave them out with skip_bad=")
    return small


def _class_codes(raw: RawData, key: str, options: ReadOptions, classes: Sequence[str]) -> np.ndarray:
    """(n,) class numbers of instances, -1 where unknown; ``key`` is truth or known."""
    codes, values = getattr(raw, key)
    numbers = np.array([classes.index(v) if v in classes else -2 for v in values] + [-1])[codes]
    invalid = np.flatnonzero((numbers == -2) & (raw.bag >= 0))
    if len(invalid) and options.need_labels:
        problem = f"{key} {values[codes[invalid[0]]]!r} is none of the classes {', '.join(classes)}; {class_advice(options)}"
        uncounted = "" if options.preprocessor else " or uncounted="
        raise HeadcountError(f"{raw.origin} row {invalid[0] + 1}: {problem}{uncounted}")
    if len(invalid):
        options.notes.append(f"{len(invalid):,} instances have a {key} that is no class")
    return np.maximum(numbers, -1)


def _note_dropped_bags(raw: RawData, target: np.ndarray, tied: np.ndarray, dropped: np.ndarray, kept: np.ndarray) -> list[str]:
    """Lines on bags that lost their label, or all their instances."""
    unreadable = ~dropped
    unreadable[kept] = False
    unknown = np.zeros(len(tied), bool) if raw.labels.codes is None else (raw.labels.codes >= 0) & ~target.any(1)
    reasons = {
        "have a label that is no class": unknown,  # possible only where labels are not needed
        "left out for a tie": tied,
        "left out, nothing in them could be read": unreadable,
    }
    bags = {reason: [raw.names[b] for b in np.flatnonzero(mask)] for reason, mask in reasons.items()}
    return [f"{len(names):,} bags {reason}: {preview(names)}" for reason, names in bags.items() if names]

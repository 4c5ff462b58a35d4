"""Folders of pictures: one sub-folder per bag with a labels.csv beside them, or bags/<label>/<bag>/*."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from headcount.errors import HeadcountError
from headcount.readers.columns import FeatureSchema
from headcount.readers.images import IMAGE_SUFFIXES, read_images
from headcount.readers.labels import join_labels
from headcount.readers.raw_data import BagLabels, RawData, ReadOptions, preview
from headcount.readers.values import as_text, clean_name

LABEL_FILES = ("labels.csv", "labels.tsv", "labels.parquet")


def find_label_file(folder: Path) -> Path | None:
    return next((folder / name for name in LABEL_FILES if (folder / name).is_file()), None)


def read_folder(folder: Path, options: ReadOptions) -> RawData:
    """Bags in the order of their names, pictures too."""
    root, notes = folder, list[str]()
    labels = options.labels if options.labels is not None else find_label_file(folder)
    subs = _subfolders(root, folder, notes)
    if not subs[1:] and (root / "bags").is_dir():
        root = root / "bags"
        labels, subs = labels if labels is not None else find_label_file(root), _subfolders(root, folder, notes)
    inside = {sub: _image_files(sub, notes) for sub in subs}
    flat = {sub: files for sub, files in inside.items() if files}
    below = {s: {b: _image_files(b, notes) for b in _subfolders(s, folder, notes)} for s in inside}
    deep = {s: {b: files for b, files in bags.items() if files} for s, bags in below.items() if any(bags.values())}
    if flat and deep:
        both = f"{next(iter(flat))} holds pictures and {next(iter(next(iter(deep.values()))))} too"
        raise HeadcountError(f"is a bag one folder down or two? {both}; use folder/<bag>/* or folder/<label>/<bag>/*")
    if not flat and not deep:
        raise HeadcountError(
            f"no pictures in the sub-folders of {root}; they end in {' '.join(IMAGE_SUFFIXES)}, one folder per bag"
        )
    bare = [_folder_name(s) for s in inside if s not in flat and s not in deep]
    bare += [
        f"{_folder_name(s)}/{_folder_name(b)}" for s in (*flat, *deep) for b, files in below[s].items() if not files
    ]
    if bare:
        notes.append(f"left aside: {preview(bare)}, no pictures in {'it' if len(bare) == 1 else 'them'}")
    if loose := [e.name for e in _list_folder(root) if e.suffix.lower() in IMAGE_SUFFIXES and not e.is_dir()]:
        notes.append(f"left aside in {root}: {preview(loose)}, beside the bags' folders and in none of them")
    if flat:
        names, files = [_folder_name(b) for b in flat], list(flat.values())
        bag_labels = _read_labels(labels, options, names, folder, bare)
    else:
        pairs = [(_folder_name(s), _folder_name(b), f) for s, bags in deep.items() for b, f in bags.items()]
        names, files = [f"{label}/{bag}" for label, bag, _ in pairs], [f for _, _, f in pairs]
        bag_labels = _labels_from_folders([label for label, _, _ in pairs], root)
        if options.labels is not None:
            bag_labels = _read_labels(options.labels, options, names, folder, bare)
        elif labels is not None:
            notes.append(f"left aside: {labels}, the folders name the labels; to go by it, give it as labels=")
    return _load_images(folder, names, files, bag_labels, options, notes)


def _read_labels(
    labels: object, options: ReadOptions, names: Sequence[str], folder: Path, bare: Sequence[str] = ()
) -> BagLabels:
    if labels is None and options.need_labels:
        raise HeadcountError(f"{folder} has no labels.csv; add one with columns bag and label, or name a label file")
    if labels is None:
        return BagLabels(codes=np.full(len(names), -1))
    return join_labels(options, names, None, labels, empty=bare)


def _labels_from_folders(labels: Sequence[str], root: Path) -> BagLabels:
    values = tuple(dict.fromkeys(labels))
    return BagLabels(values, codes=np.array([values.index(v) for v in labels]), source=f"the folders in {root}")


def _load_images(
    folder: Path,
    names: Sequence[str],
    files: Sequence[Sequence[Path]],
    bag_labels: BagLabels,
    options: ReadOptions,
    notes: list[str],
) -> RawData:
    every = [f for fs in files for f in fs]
    bag = np.repeat(np.arange(len(names)), [len(fs) for fs in files])
    array, address, wrong, digest = read_images(every, options, lambda i: str(every[i]), notes)
    bag[wrong] = -1
    height, width, channels = array.shape[1:]
    ids = pa.table({
        "bag": pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(names)), [len(fs) for fs in files]), list(names)),
        "file": [as_text(str(f.relative_to(folder))) for f in every],
    })  # fmt: skip
    look = f"{width}x{height} {'grey' if channels == 1 else 'RGB'}"
    return RawData(
        kind="images", summary=f"read {folder}: {len(every):,} pictures of {look} in folders", origin=str(folder),
        schema=FeatureSchema("images", shape=(height, width, channels)), content=array, bag=bag, names=names, labels=bag_labels,
        ids=ids, digest=digest, notes=notes, all_finite=True, address=address,
    )  # fmt: skip


def _subfolders(folder: Path, top: Path, notes: list[str]) -> list[Path]:
    """Sub-folders by name; a link back to a folder we came through is left aside, it would go on for ever."""
    above = {top.resolve(), *top.resolve().parents, folder.resolve()}
    subs = []
    for entry in _list_folder(folder):
        if entry.is_dir():
            if entry.is_symlink() and entry.resolve() in above:
                notes.append(f"left aside: {entry} is a link back to {entry.resolve()}")
            else:
                subs.append(entry)
    return subs


def _image_files(folder: Path, notes: list[str]) -> list[Path]:
    there = [e for e in _list_folder(folder) if not e.is_dir()]
    pictures = [e for e in there if e.suffix.lower() in IMAGE_SUFFIXES]
    other = [e.name for e in there if e.suffix.lower() not in IMAGE_SUFFIXES]
    if other:
        notes.append(f"left aside in {folder}: {preview(other)} (no pictures by their names)")
    return pictures


def _list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(e for e in folder.iterdir() if not e.name.startswith("."))
    except OSError as e:
        raise HeadcountError(f"cannot look into {folder}: {e.strerror or e}") from None


def _folder_name(folder: Path) -> str:
    return clean_name(folder.name) or folder.name

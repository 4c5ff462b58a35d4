"""Folders of pictures: one sub-folder per bag with a labels.csv beside them, or bags/<label>/<bag>/*."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from headcount.data.columns import Columns
from headcount.data.read.found import Asked, Found, Said, some
from headcount.data.read.images import ENDINGS, read_images
from headcount.data.read.labels import beside
from headcount.data.values import plain, written
from headcount.errors import HeadcountError

LABELS = ("labels.csv", "labels.tsv", "labels.parquet")


def label_file(folder: Path) -> Path | None:
    return next((folder / name for name in LABELS if (folder / name).is_file()), None)


def read_folder(folder: Path, asked: Asked) -> Found:
    """Bags in the order of their names, pictures too."""
    root, notes = folder, list[str]()
    labels = asked.labels if asked.labels is not None else label_file(folder)
    subs = _folders(root, folder, notes)
    if not subs[1:] and (root / "bags").is_dir():
        root = root / "bags"
        labels, subs = labels if labels is not None else label_file(root), _folders(root, folder, notes)
    inside = {sub: _pictures(sub, notes) for sub in subs}
    flat = {sub: files for sub, files in inside.items() if files}
    below = {s: {b: _pictures(b, notes) for b in _folders(s, folder, notes)} for s in inside}
    deep = {s: {b: files for b, files in bags.items() if files} for s, bags in below.items() if any(bags.values())}
    if flat and deep:
        both = f"{next(iter(flat))} holds pictures and {next(iter(next(iter(deep.values()))))} too"
        raise HeadcountError(f"is a bag one folder down or two? {both}; use folder/<bag>/* or folder/<label>/<bag>/*")
    if not flat and not deep:
        raise HeadcountError(
            f"no pictures in the sub-folders of {root}; they end in {' '.join(ENDINGS)}, one folder per bag"
        )
    bare = [_name(s) for s in inside if s not in flat and s not in deep]
    bare += [f"{_name(s)}/{_name(b)}" for s in (*flat, *deep) for b, files in below[s].items() if not files]
    if bare:
        notes.append(f"left aside: {some(bare)}, no pictures in {'it' if len(bare) == 1 else 'them'}")
    if loose := [e.name for e in _sorted(root) if e.suffix.lower() in ENDINGS and not e.is_dir()]:
        notes.append(f"left aside in {root}: {some(loose)}, beside the bags' folders and in none of them")
    if flat:
        names, files = [_name(b) for b in flat], list(flat.values())
        said = _said(labels, asked, names, folder, bare)
    else:
        pairs = [(_name(s), _name(b), f) for s, bags in deep.items() for b, f in bags.items()]
        names, files = [f"{label}/{bag}" for label, bag, _ in pairs], [f for _, _, f in pairs]
        said = _by_folder([label for label, _, _ in pairs], root)
        if asked.labels is not None:
            said = _said(asked.labels, asked, names, folder, bare)
        elif labels is not None:
            notes.append(f"left aside: {labels}, the folders name the labels; to go by it, give it as labels=")
    return _found(folder, names, files, said, asked, notes)


def _said(labels: object, asked: Asked, names: Sequence[str], folder: Path, bare: Sequence[str] = ()) -> Said:
    if labels is None and asked.need_labels:
        raise HeadcountError(f"{folder} has no labels.csv; add one with columns bag and label, or name a label file")
    if labels is None:
        return Said(code=np.full(len(names), -1))
    return beside(asked, names, None, labels, empty=bare)


def _by_folder(labels: Sequence[str], root: Path) -> Said:
    values = tuple(dict.fromkeys(labels))
    return Said(values, code=np.array([values.index(v) for v in labels]), source=f"the folders in {root}")


def _found(
    folder: Path, names: Sequence[str], files: Sequence[Sequence[Path]], said: Said, asked: Asked, notes: list[str]
) -> Found:
    every = [f for fs in files for f in fs]
    bag = np.repeat(np.arange(len(names)), [len(fs) for fs in files])
    array, address, wrong, digest = read_images(every, asked, lambda i: str(every[i]), notes)
    bag[wrong] = -1
    height, width, channels = array.shape[1:]
    ids = pa.table({
        "bag": pa.DictionaryArray.from_arrays(np.repeat(np.arange(len(names)), [len(fs) for fs in files]), list(names)),
        "file": [written(str(f.relative_to(folder))) for f in every],
    })  # fmt: skip
    look = f"{width}x{height} {'grey' if channels == 1 else 'RGB'}"
    return Found(
        kind="images", how=f"read {folder}: {len(every):,} pictures of {look} in folders", where=str(folder),
        columns=Columns("images", shape=(height, width, channels)), content=array, bag=bag, names=names, said=said,
        ids=ids, digest=digest, notes=notes, checked=True, address=address,
    )  # fmt: skip


def _folders(folder: Path, top: Path, notes: list[str]) -> list[Path]:
    """Sub-folders by name; a link back to a folder we came through is left aside, it would go on for ever."""
    above = {top.resolve(), *top.resolve().parents, folder.resolve()}
    subs = []
    for entry in _sorted(folder):
        if entry.is_dir():
            if entry.is_symlink() and entry.resolve() in above:
                notes.append(f"left aside: {entry} is a link back to {entry.resolve()}")
            else:
                subs.append(entry)
    return subs


def _pictures(folder: Path, notes: list[str]) -> list[Path]:
    there = [e for e in _sorted(folder) if not e.is_dir()]
    pictures = [e for e in there if e.suffix.lower() in ENDINGS]
    other = [e.name for e in there if e.suffix.lower() not in ENDINGS]
    if other:
        notes.append(f"left aside in {folder}: {some(other)} (no pictures by their names)")
    return pictures


def _sorted(folder: Path) -> list[Path]:
    try:
        return sorted(e for e in folder.iterdir() if not e.name.startswith("."))
    except OSError as e:
        raise HeadcountError(f"cannot look into {folder}: {e.strerror or e}") from None


def _name(folder: Path) -> str:
    return plain(folder.name) or folder.name

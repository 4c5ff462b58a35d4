"""Folders of images: one sub-folder per bag with a labels.csv beside them, or bags/<label>/<bag>/*; and their decoding.

Images become one array (n, H, W, channels) uint8: grey if all are grey, else RGB. Without ``side`` they must have one size; with
it each is resized to a square. They are decoded once, in a few threads, into memory or a memory-mapped cache (flat_array.py).
"""

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
from PIL import Image

from headcount.errors import HeadcountError
from headcount.loading import check_declared_size, open_file
from headcount.readers.columns import as_text, clean_name, preview
from headcount.readers.dataset import NO_BAGS, BagLabels, RawData, ReadOptions
from headcount.readers.flat_array import Part, build_flat_array, cache_key
from headcount.readers.labels import join_labels
from headcount.readers.preprocessing import Preprocessor

LABEL_FILES = ("labels.csv", "labels.tsv", "labels.parquet")
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp", ".ppm", ".pgm")
_MODES_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")  # of which the upper eight bits are kept
_GREY_MODES = ("1", "L", "LA", "La", *_MODES_16_BIT)
_BLOCK = 512
_MAX_PIXELS = 1 << 26


def find_label_file(folder: Path) -> Path | None:
    return next((folder / name for name in LABEL_FILES if (folder / name).is_file()), None)


def read_folder(folder: Path, options: ReadOptions) -> RawData:
    """Bags in the order of their names, and so are their images."""
    root, notes = folder, options.notes
    label_file = find_label_file(folder)
    subfolders = _subfolders(root, folder, notes)
    if not subfolders[1:] and (root / "bags").is_dir():
        root = root / "bags"
        label_file, subfolders = label_file or find_label_file(root), _subfolders(root, folder, notes)
    level1 = {(s,): _image_files(s, notes) for s in subfolders}
    level2 = {(s, b): _image_files(b, notes) for s in subfolders for b in _subfolders(s, folder, notes)}
    flat = {key: files for key, files in level1.items() if files}  # bags one level down
    deep = {key: files for key, files in level2.items() if files}
    if flat and deep:
        both = f"{next(iter(flat))[-1]} holds images and {next(iter(deep))[-1]} too"
        raise HeadcountError(f"is a bag one folder down or two? {both}; use folder/<bag>/* or folder/<label>/<bag>/*")
    if is_loose := options.bags_optional and not flat and not deep and label_file is None:
        flat = {(f,): [f] for f in _image_files(folder, notes)}
        notes.extend([NO_BAGS] if flat else [])
    if not flat and not deep:
        endings = " ".join(IMAGE_SUFFIXES)
        raise HeadcountError(f"no images in the sub-folders of {root}; they end in {endings}, one folder per bag")
    bags = flat or deep
    used = {key[0] for key in bags}
    empty = [_name(s) for s in subfolders if s not in used]
    empty += [_name(*key) for key, images in level2.items() if key[0] in used and not images]
    if empty:
        notes.append(f"ignored: {preview(empty)}, no images in {'it' if len(empty) == 1 else 'them'}")
    if not is_loose and (loose := [e.name for e in list_folder(root) if e.suffix.lower() in IMAGE_SUFFIXES and not e.is_dir()]):
        notes.append(f"ignored in {root}: {preview(loose)}, beside the folders of the bags and in none of them")
    names, files = [_name(*key) for key in bags], [file for images in bags.values() for file in images]
    if deep and options.labels is None:
        parents = [_name(s) for s, _ in deep]
        values = tuple(dict.fromkeys(parents))
        labels = BagLabels(values, np.array([values.index(p) for p in parents]), source=f"the folders in {root}")
        if label_file:
            notes.append(f"ignored: {label_file}, the folders name the labels; to use it, give it as labels=")
    elif options.labels is None and label_file is None and options.need_labels:
        raise HeadcountError(f"{folder} has no labels.csv; add one with columns bag and label, or name a label file")
    else:
        labels = join_labels(label_file if options.labels is None else options.labels, options, names, empty=empty)
    bag = np.repeat(np.arange(len(names)), list(map(len, bags.values())))
    ids = pa.table({
        "bag": pa.DictionaryArray.from_arrays(bag, names),
        "file": [as_text(str(f.relative_to(folder))) for f in files],
    })  # fmt: skip
    array, address, excluded, digest = read_images(files, options, lambda i: str(files[i]))
    height, width, channels = array.shape[1:]
    what = f"images of {width}x{height} {'grey' if channels == 1 else 'RGB'}"
    return RawData(
        summary=f"read {folder}: {len(files):,} {what} in folders", origin=str(folder),
        schema=Preprocessor("images", shape=(height, width, channels)), content=array, bag=np.where(excluded, -1, bag),
        names=names, labels=labels, ids=ids, digest=digest, all_finite=True, address=address,
    )  # fmt: skip


def _subfolders(folder: Path, top: Path, notes: list[str]) -> list[Path]:
    """Sub-folders by name, without links to a folder above, which would never end."""
    above = {top.resolve(), *top.resolve().parents, folder.resolve()}
    subfolders = [e for e in list_folder(folder) if e.is_dir()]
    loops = [e for e in subfolders if e.is_symlink() and e.resolve() in above]
    notes += [f"ignored: {e} is a link back to {e.resolve()}" for e in loops]
    return [e for e in subfolders if e not in loops]


def _image_files(folder: Path, notes: list[str]) -> list[Path]:
    files = [e for e in list_folder(folder) if not e.is_dir()]
    if other := [f.name for f in files if f.suffix.lower() not in IMAGE_SUFFIXES]:
        notes.append(f"ignored in {folder}: {preview(other)} (not named like images)")
    return [f for f in files if f.suffix.lower() in IMAGE_SUFFIXES]


def list_folder(folder: Path) -> list[Path]:
    try:
        return sorted(e for e in folder.iterdir() if not e.name.startswith("."))
    except OSError as e:
        raise HeadcountError(f"cannot look into {folder}: {e.strerror or e}") from None


def _name(*folders: Path) -> str:
    return "/".join(clean_name(folder.name) or folder.name for folder in folders)


def read_images(
    files: Sequence[Path], options: ReadOptions, describe: Callable[[int], str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Images (M, H, W, channels) uint8, (n,) the position of each file's, (n,) whether it is unreadable, and a digest.
    ``describe(i)`` names file and row in messages."""

    def report(i: int, why: str) -> None:
        options.errors.report(f"{describe(i)} cannot be read as an image: {why}")

    headers: dict[int, tuple[int, int, str]] = {}
    for i, file in enumerate(files):
        try:
            headers[i] = _read_header(file)
        except HeadcountError as e:
            report(i, str(e).removeprefix(f"{file} "))
    good = np.array(list(headers), np.int64)
    if not headers:
        raise HeadcountError(f"none of the {len(files)} images can be read; the first: {describe(0)}")
    first, channels = next(iter(headers)), 1 if all(mode in _GREY_MODES for _, _, mode in headers.values()) else 3
    shape = (*headers[first][:2], channels) if options.side is None else (options.side, options.side, channels)
    if is_fitted := options.preprocessor is not None and options.preprocessor.kind == "images":
        shape = options.preprocessor.shape
    height, width, _ = shape
    resized = [i for i, header in headers.items() if header[:2] != (height, width)]
    if resized and options.side is None:  # not requested: it may be a mistake
        other, (h, w, _) = describe(resized[0]), headers[resized[0]]
        if not is_fitted:
            sizes = f"{describe(first)} is {width}x{height}, {other} is {w}x{h}"
            raise HeadcountError(f"images of several sizes: {sizes}; give a side to resize them to, such as side=64")
        count = f"{len(resized):,} of {len(headers):,} images are resized to the model's {width}x{height}"
        options.notes.append(f"{count}; the first, {other}, is {w}x{h}")
    blocks = [good[i : i + _BLOCK].tolist() for i in range(0, len(good), _BLOCK)]
    largest = max(h * w for h, w, _ in headers.values())  # decoded at once: no more pixels than one image may have
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1, max(1, _MAX_PIXELS // largest))) as threads:

        def decode_block(k: int) -> Part:
            decoded = list(threads.map(lambda i: _decode(files[i], shape), blocks[k]))
            problems = {row: why for row, (_, _, why) in enumerate(decoded) if why}
            if problems and not options.errors.skip:  # no need to decode the rest
                row, why = next(iter(problems.items()))
                report(blocks[k][row], why)
            digest = hashlib.sha256("".join(d for _, d, _ in decoded).encode()).hexdigest()
            return Part(np.stack([image for image, _, _ in decoded]), digest, problems)

        array, problems, digest = build_flat_array(
            [len(b) for b in blocks], shape, np.uint8, decode_block, options.cache,
            lambda: cache_key([files[i] for i in headers], ["images", shape]),
        )  # fmt: skip
    address, unreadable = np.zeros(len(files), np.int64), np.ones(len(files), bool)
    address[good], unreadable[good] = np.arange(len(good)), False
    for row, why in problems.items():
        report(int(good[row]), why)
        unreadable[good[row]] = True
    return array, address, unreadable, digest


def _read_header(file: Path) -> tuple[int, int, str]:
    """Height, width and mode."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with open_file(file) as f, Image.open(f) as image:
                (width, height), mode = image.size, image.mode
        check_declared_size(file, width * height * len(mode))
    except HeadcountError:
        raise
    except OSError as e:
        raise HeadcountError(e.strerror or "not an image, or damaged") from None
    except Exception as e:  # a damaged file makes Pillow raise almost anything
        raise HeadcountError(f"{type(e).__name__}: {e}") from None
    if mode in ("I", "F"):
        raise HeadcountError(f"it has 32 bits per pixel ({mode}); convert it to 8 or 16 bits")
    if width * height > _MAX_PIXELS:
        raise HeadcountError(f"it has {width}x{height} pixels; cut it into tiles first")
    return height, width, mode


def _decode(file: Path, shape: tuple[int, ...]) -> tuple[np.ndarray, str, str]:
    """(H, W, channels) uint8, the digest of the file, and what is wrong, if anything is."""
    height, width, channels = shape
    try:
        raw = file.read_bytes()
        with Image.open(io.BytesIO(raw)) as image:
            if image.mode in _MODES_16_BIT:
                image = Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
            image = image.convert("L" if channels == 1 else "RGB")
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(image, dtype=np.uint8).reshape(shape), hashlib.sha256(raw).hexdigest(), ""
    except Exception as e:  # a damaged file makes Pillow raise almost anything
        return np.zeros(shape, np.uint8), "", f"{e}"

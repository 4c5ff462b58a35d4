"""Picture files as one array (n, H, W, channels) uint8: grey if all are grey, else RGB.

Without ``side`` the pictures must have one size; with it each is resized to a square of that side. They are decoded once, on
a few threads, into memory or into a mapped cache (see flat.py), and the file's bytes make the digest.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image

from headcount.errors import HeadcountError
from headcount.readers.flat_array import Part, build_flat_array, cache_key
from headcount.readers.raw_data import ReadOptions

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp", ".ppm", ".pgm")
_MODES_16_BIT = ("I;16", "I;16B", "I;16L", "I;16N")  # bits: the upper eight are kept
_GREY_MODES = ("1", "L", "LA", "La", *_MODES_16_BIT)
_MODES_32_BIT = ("I", "F")
_BLOCK = 512
_MAX_PIXELS = 1 << 26


def read_images(
    files: Sequence[Path], options: ReadOptions, describe: Callable[[int], str], notes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Pictures (M, H, W, channels) uint8, (n,) where each file's lies, (n,) true where it is bad, and a digest.

    ``called(i)`` names file and row in complaints; what the user should know goes to ``notes``.
    """
    headers = [_peek_header(file) for file in files]
    bad = np.array([isinstance(s, str) for s in headers], bool)
    for i in np.flatnonzero(bad).tolist():
        options.errors.report(f"{describe(i)} cannot be read as a picture: {headers[i]}")
    good = [i for i, s in enumerate(headers) if not isinstance(s, str)]
    if not good:
        raise HeadcountError(f"none of the {len(files)} pictures can be read; the first: {describe(0)}")
    shape = _common_shape({i: s for i, s in enumerate(headers) if not isinstance(s, str)}, options, describe)
    if options.side is None:  # nobody asked for another size, so that it may be a mistake
        notes += _note_resized([(describe(i), s) for i, s in enumerate(headers) if not isinstance(s, str)], shape)
    readable = [files[i] for i in good]
    blocks = [readable[i : i + _BLOCK] for i in range(0, len(readable), _BLOCK)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:

        def fill(k: int) -> Part:
            done = list(threads.map(lambda file: _decode(file, shape), blocks[k]))
            wrong = {i: why for i, (_, _, why) in enumerate(done) if why}
            if wrong and not options.errors.skip:  # no need to decode the rest
                first = next(iter(wrong))
                options.errors.report(
                    f"{describe(good[k * _BLOCK + first])} cannot be read as a picture: {wrong[first]}"
                )
            return Part(np.stack([a for a, _, _ in done]), _digest(d for _, d, _ in done), wrong)

        array, parts = build_flat_array(
            [len(b) for b in blocks],
            shape,
            np.uint8,
            fill,
            options.cache,
            lambda: cache_key(readable, ["images", shape]),
        )
    for k, part in enumerate(parts):
        for row, why in part.bad.items():
            i = good[k * _BLOCK + row]
            options.errors.report(f"{describe(i)} cannot be read as a picture: {why}")
            bad[i] = True
    place = np.zeros(len(files), np.int64)
    place[good] = np.arange(len(good))
    return array, place, bad, _digest(p.digest for p in parts)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _peek_header(file: Path) -> tuple[int, int, bool] | str:
    """(height, width, grey) from the header alone, or what is wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file) as picture:
                width, height, mode = *picture.size, picture.mode
    except Exception as e:  # Pillow's readers raise whatever they stumble over
        return f"{type(e).__name__}: {e}" if not isinstance(e, OSError) else e.strerror or "not a picture, or damaged"
    if mode in _MODES_32_BIT:
        return f"it has 32 bits per pixel ({mode}); convert it to 8 or 16 bits"
    if width * height > _MAX_PIXELS:
        return f"it has {width}x{height} pixels; cut it into tiles first"
    return height, width, mode in _GREY_MODES


def _common_shape(
    headers: dict[int, tuple[int, int, bool]], options: ReadOptions, describe: Callable[[int], str]
) -> tuple[int, int, int]:
    if options.preprocessor is not None and options.preprocessor.kind == "images":
        height, width, channels = options.preprocessor.shape
        return height, width, channels
    channels = 1 if all(grey for _, _, grey in headers.values()) else 3
    if options.side is not None:
        return options.side, options.side, channels
    first = next(iter(headers))
    height, width, _ = headers[first]
    for i, (h, w, _) in headers.items():
        if (h, w) != (height, width):
            sizes = f"{describe(first)} is {width}x{height}, {describe(i)} is {w}x{h}"
            raise HeadcountError(f"pictures of several sizes: {sizes}; give a side to resize them to, such as side=64")
    return height, width, channels


def _note_resized(headers: list[tuple[str, tuple[int, int, bool]]], shape: tuple[int, int, int]) -> list[str]:
    """What to say of new pictures that are not of the model's size."""
    height, width, _ = shape
    other = [(name, w, h) for name, (h, w, _) in headers if (h, w) != (height, width)]
    if not other:
        return []
    name, w, h = other[0]
    many = f"{len(other):,} of {len(headers):,} pictures are resized to the model's {width}x{height}"
    return [f"{many}; the first, {name}, is {w}x{h}"]


def _decode(file: Path, shape: tuple[int, int, int]) -> tuple[np.ndarray, str, str]:
    """(H, W, channels), the digest of the file, and what is wrong if anything is."""
    height, width, channels = shape
    try:
        raw = file.read_bytes()
        with Image.open(io.BytesIO(raw)) as picture:
            if picture.mode in _MODES_16_BIT:
                picture = Image.fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8))
            made = picture.convert("L" if channels == 1 else "RGB")
            if made.size != (width, height):
                made = made.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(made, dtype=np.uint8).reshape(shape), hashlib.sha256(raw).hexdigest(), ""
    except Exception as e:  # as above
        return np.zeros(shape, np.uint8), "", f"{e}"

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

from headcount.data.read.flat import Part, flat, key
from headcount.data.read.found import Asked
from headcount.errors import HeadcountError

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".gif", ".webp", ".ppm", ".pgm")
_SIXTEEN = ("I;16", "I;16B", "I;16L", "I;16N")  # bits: the upper eight are kept
_GREY = ("1", "L", "LA", "La", *_SIXTEEN)
_DEEP = ("I", "F")
_BLOCK = 512
_MOST_PIXELS = 1 << 26


def read_images(
    files: Sequence[Path], asked: Asked, called: Callable[[int], str], notes: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
    """Pictures (M, H, W, channels) uint8, (n,) where each file's lies, (n,) true where it is bad, and a digest.

    ``called(i)`` names file and row in complaints; what the user should know goes to ``notes``.
    """
    seen = [_glance(file) for file in files]
    bad = np.array([isinstance(s, str) for s in seen], bool)
    for i in np.flatnonzero(bad).tolist():
        asked.bad.say(f"{called(i)} cannot be read as a picture: {seen[i]}")
    good = [i for i, s in enumerate(seen) if not isinstance(s, str)]
    if not good:
        raise HeadcountError(f"none of the {len(files)} pictures can be read; the first: {called(0)}")
    shape = _shape({i: s for i, s in enumerate(seen) if not isinstance(s, str)}, asked, called)
    if asked.side is None:  # nobody asked for another size, so that it may be a mistake
        notes += _resized([(called(i), s) for i, s in enumerate(seen) if not isinstance(s, str)], shape)
    readable = [files[i] for i in good]
    blocks = [readable[i : i + _BLOCK] for i in range(0, len(readable), _BLOCK)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:

        def fill(k: int) -> Part:
            done = list(threads.map(lambda file: _decoded(file, shape), blocks[k]))
            wrong = {i: why for i, (_, _, why) in enumerate(done) if why}
            if wrong and not asked.bad.skip:  # no need to decode the rest
                first = next(iter(wrong))
                asked.bad.say(f"{called(good[k * _BLOCK + first])} cannot be read as a picture: {wrong[first]}")
            return Part(np.stack([a for a, _, _ in done]), _digest(d for _, d, _ in done), wrong)

        array, parts = flat(
            [len(b) for b in blocks], shape, np.uint8, fill, asked.cache, lambda: key(readable, ["images", shape])
        )
    for k, part in enumerate(parts):
        for row, why in part.bad.items():
            i = good[k * _BLOCK + row]
            asked.bad.say(f"{called(i)} cannot be read as a picture: {why}")
            bad[i] = True
    place = np.zeros(len(files), np.int64)
    place[good] = np.arange(len(good))
    return array, place, bad, _digest(p.digest for p in parts)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _glance(file: Path) -> tuple[int, int, bool] | str:
    """(height, width, grey) from the header alone, or what is wrong."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(file) as picture:
                width, height, mode = *picture.size, picture.mode
    except Exception as e:  # Pillow's readers raise whatever they stumble over
        return f"{type(e).__name__}: {e}" if not isinstance(e, OSError) else e.strerror or "not a picture, or damaged"
    if mode in _DEEP:
        return f"it has 32 bits per pixel ({mode}); convert it to 8 or 16 bits"
    if width * height > _MOST_PIXELS:
        return f"it has {width}x{height} pixels; cut it into tiles first"
    return height, width, mode in _GREY


def _shape(seen: dict[int, tuple[int, int, bool]], asked: Asked, called: Callable[[int], str]) -> tuple[int, int, int]:
    if asked.learned is not None and asked.learned.kind == "images":
        height, width, channels = asked.learned.shape
        return height, width, channels
    channels = 1 if all(grey for _, _, grey in seen.values()) else 3
    if asked.side is not None:
        return asked.side, asked.side, channels
    first = next(iter(seen))
    height, width, _ = seen[first]
    for i, (h, w, _) in seen.items():
        if (h, w) != (height, width):
            sizes = f"{called(first)} is {width}x{height}, {called(i)} is {w}x{h}"
            raise HeadcountError(f"pictures of several sizes: {sizes}; give a side to resize them to, such as side=64")
    return height, width, channels


def _resized(seen: list[tuple[str, tuple[int, int, bool]]], shape: tuple[int, int, int]) -> list[str]:
    """What to say of new pictures that are not of the model's size."""
    height, width, _ = shape
    other = [(name, w, h) for name, (h, w, _) in seen if (h, w) != (height, width)]
    if not other:
        return []
    name, w, h = other[0]
    many = f"{len(other):,} of {len(seen):,} pictures are resized to the model's {width}x{height}"
    return [f"{many}; the first, {name}, is {w}x{h}"]


def _decoded(file: Path, shape: tuple[int, int, int]) -> tuple[np.ndarray, str, str]:
    """(H, W, channels), the digest of the file, and what is wrong if anything is."""
    height, width, channels = shape
    try:
        raw = file.read_bytes()
        with Image.open(io.BytesIO(raw)) as picture:
            if picture.mode in _SIXTEEN:
                picture = Image.fromarray((np.asarray(picture).astype(np.uint16) >> 8).astype(np.uint8))
            made = picture.convert("L" if channels == 1 else "RGB")
            if made.size != (width, height):
                made = made.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(made, dtype=np.uint8).reshape(shape), hashlib.sha256(raw).hexdigest(), ""
    except Exception as e:  # as above
        return np.zeros(shape, np.uint8), "", f"{e}"

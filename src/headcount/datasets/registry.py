"""The data sets: digits, the paper's four, generated stand-ins, or a user's .npz, each as one Source.

A named source is downloaded and converted once; afterwards loading it maps a file (milliseconds, no copy of an image).
"""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headcount.bags import Pool
from headcount.datasets import cache as data_cache, parsers
from headcount.datasets.cache import Remote, cache_folder
from headcount.errors import HeadcountError, check_choice

# The paper normalises all four of its data sets with the constants of CIFAR-100.
_MEAN = (0.5071, 0.4865, 0.4409)
_STD = (0.2673, 0.2564, 0.2762)


@dataclass(frozen=True, eq=False)
class Source:
    """M labelled instances.

    >>> load_source("digits")
    Source(digits: 1797 images of 8x8x1, 10 classes)
    """

    name: str
    data: np.ndarray  # images (M, H, W, channels) uint8, or features (M, D) float32
    truth: np.ndarray  # (M,) int64
    classes: tuple[str, ...]
    checksum: str  # of data and truth: part of a run's key
    note: str = ""  # where the data come from, if not from their publishers; printed in reports
    mean: tuple[float, ...] | None = None  # None: estimated from the training bags
    std: tuple[float, ...] | None = None

    @property
    def kind(self) -> str:
        """``images`` or ``features``."""
        return "images" if self.data.dtype == np.uint8 else "features"

    def pool(self) -> Pool:
        """The instances as a pool, to be addressed by bags."""
        return Pool(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        size = f"{len(self)} {self.kind} of {'x'.join(map(str, self.data.shape[1:]))}"
        return f"Source({self.name}: {size}, {len(self.classes)} classes{'; ' * bool(self.note)}{self.note})"


@dataclass(frozen=True)
class SourceInfo:
    """A named source before it is loaded: its expected size and classes, and how to obtain it."""

    count: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    parse: Callable[[Sequence[Path]], parsers.Arrays] | None  # None: it cannot be downloaded, only imported
    files: tuple[Remote, ...] = ()  # none, and parse: it is part of a package we depend on, or generated, and is not cached
    sha256: str | None = None  # of the images' bytes, where it is known
    note: str = ""

    @property
    def is_cached(self) -> bool:
        """Whether it is kept in the cache, as are the paper's data sets and what replaces them."""
        return bool(self.files) or self.parse is None


_TEN = tuple("0123456789")
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_MEDMNIST = "https://zenodo.org/records/10519652/files"
_OCT = ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal")

SOURCES: dict[str, SourceInfo] = {
    "digits": SourceInfo(1_797, (8, 8, 1), _TEN, parsers.parse_digits),
    "cifar10": SourceInfo(
        60_000, (32, 32, 3), ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        parsers.parse_cifar10,
        (Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),),
        sha256="0ac3ab5c78edb36ac68f69e287fd8f957b2d4f820b80e5fa9bd05c810fc0d95d",
    ),
    "svhn": SourceInfo(
        99_289, (32, 32, 3), _TEN, parsers.parse_svhn,
        (Remote(f"{_SVHN}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
         Remote(f"{_SVHN}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3")),
    ),
    "path": SourceInfo(
        97_176, (28, 28, 3),
        ("adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
         "cancer-associated stroma", "colorectal adenocarcinoma epithelium"),
        parsers.parse_medmnist, (Remote(f"{_MEDMNIST}/pathmnist.npz?download=1", "a8b06965200029087d5bd730944a56c1"),),
    ),
    "oct": SourceInfo(
        98_477, (28, 28, 3), _OCT,
        parsers.parse_medmnist, (Remote(f"{_MEDMNIST}/octmnist.npz?download=1", "c68d92d5b585d8d81f7112f81e2d0842"),),
    ),
    "oct-originals": SourceInfo(
        46_453, (28, 28, 3), _OCT, None, sha256="2e31c09070d62190a57a6f7b0621720c52e6e4d1c9c0bc61e99d14fd7e23dbce",
        note="46,453 of OCT2017's originals, scaled to 28 x 28; not OCTMNIST",
    ),
    **{
        f"standin{n}": SourceInfo(parsers.N_SYNTHETIC, (8, 8, 1), _TEN[:n], functools.partial(parsers.generate_synthetic, n_classes=n), note="generated stand-in")
        for n in (10, 9, 4)
    },
}  # fmt: skip


def load_source(name_or_path: str | Path, cache: str | Path | None = None) -> Source:
    """A data set by name, downloaded on first use, or from an .npz file. Loading again in the same process is free.

    Parameters
    ----------
    name_or_path : str or path
        digits, cifar10, svhn, path, oct, oct-originals, or an .npz file with ``images`` or ``features``, and ``labels``.
    cache : path, optional
        Cache folder; default: $HEADCOUNT_DATA, else ~/.cache/headcount.
    """
    name, path = str(name_or_path), Path(name_or_path).expanduser()
    if name not in SOURCES and path.is_file():
        stat = path.stat()
        return _load_npz(path.absolute(), stat.st_mtime_ns, stat.st_size)
    if name not in SOURCES and path.suffix == ".npz":
        raise HeadcountError(f"no file {name}; give an .npz that exists, or one of {', '.join(SOURCES)}")
    return _load_named(check_choice("source", name, [*SOURCES, "FILE.npz"]), cache_folder(cache))


def source_checksum(name_or_path: str | Path, cache: str | Path | None = None) -> str:
    """The source's checksum; for a source in the cache this reads a few hundred bytes."""
    name = str(name_or_path)
    folder = cache_folder(cache) / name
    if name in SOURCES and SOURCES[name].is_cached and folder.exists():
        return data_cache.read_metadata(folder)["checksum"]
    return load_source(name_or_path, cache).checksum


def is_available(name: str, cache: str | Path | None = None) -> bool:
    """Whether a named source can be loaded without a download or conversion."""
    info = SOURCES[check_choice("source", name, SOURCES)]
    return not info.is_cached or (cache_folder(cache) / name).exists()


def import_npz(name: str, file: str | Path, cache: str | Path | None = None, note: str = "") -> Source:
    """Put an official source obtained elsewhere into the cache: 'images' and 'labels', train rows before test rows."""
    info = SOURCES[check_choice("source to import", name, [name for name, info in SOURCES.items() if info.is_cached])]
    path = Path(file).expanduser()
    images, labels, classes, split = parsers.read_npz(path)
    images = parsers.to_rgb(images) if images.ndim == 4 else images
    if classes is not None and len(classes) != len(info.classes):
        raise HeadcountError(f"{path} names {len(classes)} classes; {name} has {len(info.classes)}")
    is_per_row = split is not None and split.shape == labels.shape and split.dtype.kind in "iub"
    if split is not None and (not is_per_row or (split[:-1] > split[1:]).any()):
        raise HeadcountError(f"{path}: 'split' must be 0 (train) or 1 (test) for each row, all train rows first")
    _check_arrays(name, info, images, labels, str(path))
    note = note or info.note
    if not note and info.sha256 is None:
        note = f"imported from {path.name}, not compared with the official files"
    with data_cache.cache_lock(cache_folder(cache)):
        data_cache.write_source(cache_folder(cache) / name, images, labels, info.classes, note)
    _load_named.cache_clear()
    return load_source(name, cache)


@functools.cache
def _load_named(name: str, cache: Path) -> Source:
    info, folder = SOURCES[name], cache / name
    if not info.is_cached:
        assert info.parse is not None
        images, labels = info.parse(())
        _check_arrays(name, info, images, labels, name)
        return Source(name, images, labels, info.classes, data_cache.data_checksum(images, labels), info.note)
    if not folder.exists():
        if info.parse is None:
            advice = f"import it: headcount data import {name} FILE.npz"
            raise HeadcountError(f"{name} ({info.note}) is not in {cache} and cannot be downloaded; {advice}")
        with data_cache.cache_lock(cache):
            if not folder.exists():  # another process may have prepared it meanwhile
                paths = [data_cache.fetch(r.url, cache / "downloads" / r.file, r.md5, name) for r in info.files]
                images, labels = info.parse(paths)
                _check_arrays(name, info, images, labels, ", ".join(map(str, paths)))
                data_cache.write_source(folder, images, labels, info.classes, note="")
    images, labels, metadata = data_cache.read_source(folder)
    if images.shape != (info.count, *info.shape):
        raise HeadcountError(f"{folder} holds {images.shape}, not {name}; delete it and prepare the source again")
    return Source(name, images, labels, info.classes, metadata["checksum"], metadata["note"], _MEAN, _STD)


@functools.lru_cache(maxsize=8)
def _load_npz(path: Path, modified: int, size: int) -> Source:
    """``modified`` and ``size`` are part of the cache's key, so that a file that has changed is read again."""
    data, truth, classes, _ = parsers.read_npz(path)
    classes = classes or tuple(str(k) for k in range(int(truth.max()) + 1))
    return Source(path.name, data, truth, classes, data_cache.data_checksum(data, truth))


def _check_arrays(name: str, info: SourceInfo, images: np.ndarray, labels: np.ndarray, origin: str) -> None:
    """The counts of the paper's table, every class present, and the exact bytes where their hash is known."""
    if images.dtype != np.uint8 or images.shape != (info.count, *info.shape):
        expected = f"uint8 {(info.count, *info.shape)}"
        raise HeadcountError(f"{origin} is not {name}: it holds {images.dtype} {images.shape}, not {expected}")
    if not np.array_equal(present := np.unique(labels), np.arange(len(info.classes))):
        expected = f"0 to {len(info.classes) - 1}, each at least once"
        raise HeadcountError(f"{origin} is not {name}: its labels are {present.tolist()[:12]}, not {expected}")
    if info.sha256 and hashlib.sha256(images.data).hexdigest() != info.sha256:
        raise HeadcountError(f"{origin} is not {name}: its pixels differ from the official ones, or are in another order")

"""Where instances come from: digits, the paper's four sets, or a person's .npz, each as one Source.

A named source is fetched and converted once; afterwards loading it maps a file (milliseconds, no copy of a picture).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from headcount.bags import Pool
from headcount.datasets import cache as caches
from headcount.datasets import parsers, synthetic
from headcount.datasets.download import Remote, fetch
from headcount.errors import HeadcountError, check_choice

ChannelValues = tuple[float, ...]

# The paper normalises all four of its sets with the constants of CIFAR-100.
_MEAN: ChannelValues = (0.5071, 0.4865, 0.4409)
_STD: ChannelValues = (0.2673, 0.2564, 0.2762)


@dataclass(frozen=True, eq=False)
class Source:
    """M labelled instances.

    >>> load("digits")
    Source(digits: 1797 images of 8x8x1, 10 classes)
    """

    name: str
    data: np.ndarray  # images (M, H, W, channels) uint8, or features (M, D) float32
    truth: np.ndarray  # (M,) int64
    classes: tuple[str, ...]
    checksum: str  # of data and truth: part of a run's key
    note: str = ""  # where the data comes from, if not from its publishers; printed in reports
    mean: ChannelValues | None = None  # None: learned on the training bags
    std: ChannelValues | None = None
    content: str = "images"  # what it shows, which decides the augmentations that leave a label true

    @property
    def kind(self) -> str:
        return "images" if self.data.dtype == np.uint8 else "features"

    def pool(self) -> Pool:
        return Pool(self.data)

    def __len__(self) -> int:
        return len(self.data)

    def __repr__(self) -> str:
        what = f"{len(self)} {self.kind} of {'x'.join(map(str, self.data.shape[1:]))}"
        return f"Source({self.name}: {what}, {len(self.classes)} classes{'; ' * bool(self.note)}{self.note})"


@dataclass(frozen=True)
class SourceInfo:
    """What is known of a named source before opening it: what must come out, and how to get it."""

    count: int
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    content: str
    parse: Callable[[Sequence[Path]], parsers.Arrays]
    files: tuple[Remote, ...] = ()  # none: it comes with a package we depend on, and is not cached
    mean: ChannelValues | None = None
    std: ChannelValues | None = None
    sha256: str | None = None  # of the images' bytes, where it is known
    note: str = ""


_TEN = tuple("0123456789")
_SVHN = "http://ufldl.stanford.edu/housenumbers"
_MEDMNIST = "https://zenodo.org/records/10519652/files"

SOURCES: dict[str, SourceInfo] = {
    "digits": SourceInfo(1_797, (8, 8, 1), _TEN, "digits", parsers.parse_digits),
    "cifar10": SourceInfo(
        count=60_000,
        shape=(32, 32, 3),
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        content="natural",
        parse=parsers.parse_cifar10,
        files=(
            Remote("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "c32a1d4ab5d03f1284b67883e8d87530"),
        ),
        mean=_MEAN,
        std=_STD,
        sha256="0ac3ab5c78edb36ac68f69e287fd8f957b2d4f820b80e5fa9bd05c810fc0d95d",
    ),
    "svhn": SourceInfo(
        count=99_289,
        shape=(32, 32, 3),
        classes=_TEN,
        content="digits",
        parse=parsers.parse_svhn,
        files=(
            Remote(f"{_SVHN}/train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
            Remote(f"{_SVHN}/test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
        ),
        mean=_MEAN,
        std=_STD,
    ),
    "path": SourceInfo(
        count=97_176,
        shape=(28, 28, 3),
        classes=(
            "adipose", "background", "debris", "lymphocytes", "mucus", "smooth muscle", "normal colon mucosa",
            "cancer-associated stroma", "colorectal adenocarcinoma epithelium",
        ),
        content="tissue",
        parse=parsers.parse_medmnist,
        files=(Remote(f"{_MEDMNIST}/pathmnist.npz?download=1", "a8b06965200029087d5bd730944a56c1"),),
        mean=_MEAN,
        std=_STD,
    ),
    "oct": SourceInfo(
        count=98_477,
        shape=(28, 28, 3),
        classes=("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
        content="retina",
        parse=parsers.parse_medmnist,
        files=(Remote(f"{_MEDMNIST}/octmnist.npz?download=1", "c68d92d5b585d8d81f7112f81e2d0842"),),
        mean=_MEAN,
        std=_STD,
    ),
    **{
        f"standin{n}": SourceInfo(synthetic.N_INSTANCES, (8, 8, 1), _TEN[:n], "images", synthetic.synthetic_images(n), note="generated stand-in")
        for n in (10, 9, 4)
    },
}  # fmt: skip


def load_source(name_or_path: str | Path, cache: str | Path | None = None) -> Source:
    """A source by its name, fetched on first use, or from an .npz file. The second time in a process is free."""
    given, path = str(name_or_path), Path(name_or_path).expanduser()
    if given not in SOURCES and path.is_file():
        stat = path.stat()
        return _load_npz(path.absolute(), stat.st_mtime_ns, stat.st_size)
    if given not in SOURCES and path.suffix == ".npz":
        raise HeadcountError(f"no file {given}; give an .npz that exists, or one of {', '.join(SOURCES)}")
    return _load_named(check_choice("source", given, [*SOURCES, "FILE.npz"]), caches.cache_folder(cache))


def source_checksum(name_or_path: str | Path, cache: str | Path | None = None) -> str:
    """The source's checksum; for a source in the cache it reads a few hundred bytes."""
    folder = caches.cache_folder(cache) / str(name_or_path)
    if str(name_or_path) in SOURCES and SOURCES[str(name_or_path)].files and folder.exists():
        return caches.read_metadata(folder)["checksum"]
    return load_source(name_or_path, cache).checksum


def is_available(name: str, cache: str | Path | None = None) -> bool:
    """Whether a named source can be loaded without fetching or converting anything."""
    entry = SOURCES[check_choice("source", name, SOURCES)]
    return not entry.files or (caches.cache_folder(cache) / name).exists()


def import_npz(name: str, file: str | Path, cache: str | Path | None = None, note: str = "") -> Source:
    """Bring an official source that was had elsewhere: 'images' and 'labels', train rows before test rows."""
    there = [known for known, entry in SOURCES.items() if entry.files]
    entry = SOURCES[check_choice("source to import", name, there)]
    path = Path(file).expanduser()
    images, labels, classes, split = parsers.read_npz(path)
    if images.ndim == 4:
        images = parsers.to_rgb(images)
    if classes is not None and len(classes) != len(entry.classes):
        raise HeadcountError(f"{path} names {len(classes)} classes; {name} has {len(entry.classes)}")
    if split is not None and not (split.shape == labels.shape and split.dtype.kind in "iub" and _sorted(split)):
        raise HeadcountError(f"{path}: 'split' must say 0 (train) or 1 (test) for each row, all train rows first")
    _check_arrays(name, entry, images, labels, str(path))
    if not note and entry.sha256 is None:
        note = f"imported from {path.name}, not compared with the official files"
    with caches.cache_lock(caches.cache_folder(cache)):
        caches.write_source(caches.cache_folder(cache) / name, images, labels, entry.classes, note)
    _load_named.cache_clear()
    return load_source(name, cache)


def _sorted(split: np.ndarray) -> bool:
    return bool((split[:-1] <= split[1:]).all())


@functools.cache
def _load_named(name: str, cache: Path) -> Source:
    entry, folder = SOURCES[name], cache / name
    if not entry.files:
        images, labels = entry.parse(())
        _check_arrays(name, entry, images, labels, name)
        said = {"checksum": caches.data_checksum(images, labels), "note": entry.note}
    else:
        if not folder.exists():
            with caches.cache_lock(cache):
                if not folder.exists():  # nobody else prepared it while we waited
                    _download_and_convert(name, entry, cache)
        images, labels, said = caches.read_source(folder)
        _check_cached_shape(name, entry, images, folder)
    return Source(
        name, images, labels, entry.classes, said["checksum"], said["note"], entry.mean, entry.std, entry.content
    )


@functools.lru_cache(maxsize=8)
def _load_npz(path: Path, changed: int, size: int) -> Source:
    """``changed`` and ``size`` are there so that a file written anew is read anew."""
    data, truth, classes, _ = parsers.read_npz(path)
    classes = classes or tuple(str(k) for k in range(int(truth.max()) + 1))
    views = "images" if data.ndim == 4 else "features"
    return Source(path.name, data, truth, classes, caches.data_checksum(data, truth), content=views)


def _download_and_convert(name: str, entry: SourceInfo, cache: Path) -> None:
    """Official files -> the canonical cache."""
    paths = [fetch(remote.url, cache / "downloads" / remote.file, remote.md5, name) for remote in entry.files]
    images, labels = entry.parse(paths)
    _check_arrays(name, entry, images, labels, ", ".join(map(str, paths)))
    caches.write_source(cache / name, images, labels, entry.classes, note="")


def _check_arrays(name: str, entry: SourceInfo, images: np.ndarray, labels: np.ndarray, origin: str) -> None:
    """The counts of the paper's table, every class there, and the very bytes where we know them."""
    if images.dtype != np.uint8 or images.shape != (entry.count, *entry.shape):
        want = f"uint8 {(entry.count, *entry.shape)}"
        raise HeadcountError(f"{origin} is not {name}: it holds {images.dtype} {images.shape}, not {want}")
    seen = np.unique(labels)
    if not np.array_equal(seen, np.arange(len(entry.classes))):
        want = f"0 to {len(entry.classes) - 1}, each at least once"
        raise HeadcountError(f"{origin} is not {name}: its labels are {seen.tolist()[:12]}, not {want}")
    if entry.sha256 and hashlib.sha256(images.data).hexdigest() != entry.sha256:
        raise HeadcountError(
            f"{origin} is not {name}: its pixels differ from the official ones, or lie in another order"
        )


def _check_cached_shape(name: str, entry: SourceInfo, images: np.ndarray, folder: Path) -> None:
    if images.shape != (entry.count, *entry.shape):
        raise HeadcountError(f"{folder} holds {images.shape}, not {name}; delete it and prepare the source again")

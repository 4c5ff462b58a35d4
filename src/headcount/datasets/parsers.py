"""Files in, arrays out: the four official formats as their publishers wrote them, and the .npz a person brings.

Each reader takes paths and returns images (M, H, W, channels) uint8 and class numbers (M,) int64, the official train
part before the test part. Nothing here unpickles anything.
"""

from __future__ import annotations

import tarfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from headcount.errors import HeadcountError

Arrays = tuple[np.ndarray, np.ndarray]

MAX_CLASSES = 10_000  # beyond it the labels are surely identifiers, and would become as many outputs


def parse_digits(files: Sequence[Path] = ()) -> Arrays:
    """The 1,797 digits that come with scikit-learn, 8 x 8 gray; inks 0..16 stretched over 0..255.

    Their file is read as it lies there: to import the library for it would take longer than the demo's first training.
    """
    found = find_spec("sklearn")
    file = Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz" if found and found.origin else None
    if file and file.exists():
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
        inks, labels = table[:, :-1], table[:, -1]
    else:  # a release that keeps it elsewhere
        from sklearn.datasets import load_digits

        inks, labels = load_digits(return_X_y=True)
    images = np.round(inks.reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8)
    return images, labels.astype(np.int64)


def parse_cifar10(files: Sequence[Path]) -> Arrays:
    """The binary archive: records of one label byte and 3 x 32 x 32 bytes, plane by plane."""
    wanted = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    batches: dict[str, np.ndarray] = {}
    with explain_read_errors(files[0]), tarfile.open(files[0], "r:gz") as tar:
        for member in tar:  # in the archive's own order, so that it is unpacked once
            name = member.name.rsplit("/", 1)[-1]
            if name in wanted and (f := tar.extractfile(member)):
                batches[name] = np.frombuffer(f.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        records = np.concatenate([batches[name] for name in wanted])
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int64)


def parse_svhn(files: Sequence[Path]) -> Arrays:
    """Two .mat files with X (32, 32, 3, n) and y (n, 1), where the digit 0 is called 10."""
    from scipy.io import loadmat

    images, labels = [], []
    for path in files:
        with explain_read_errors(path):
            mat = loadmat(path, variable_names=["X", "y"])
            images.append(mat["X"].transpose(3, 0, 1, 2))
            labels.append(mat["y"].reshape(-1).astype(np.int64) % 10)
    return np.concatenate(images), np.concatenate(labels)


def parse_medmnist(files: Sequence[Path]) -> Arrays:
    """A MedMNIST .npz: train then test. The paper leaves the official validation part unused, and so do we."""
    with explain_read_errors(files[0]), files[0].open("rb") as f, np.load(f, allow_pickle=False) as npz:
        images = np.concatenate([npz["train_images"], npz["test_images"]])
        labels = np.concatenate([npz["train_labels"], npz["test_labels"]])
    return to_rgb(images), labels.reshape(-1).astype(np.int64)


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Gray pictures get their channel three times; pictures in colour come back as they are."""
    if images.ndim == 3:
        images = images[..., None]
    return np.repeat(images, 3, axis=-1) if images.shape[-1] == 1 else images


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None, np.ndarray | None]:
    """A person's .npz -> data, class numbers, class names if given, split if given; all checked."""
    want = "an .npz with 'images' or 'features', and 'labels'"
    with explain_read_errors(path, want), path.open("rb") as f:  # opened here: np.load leaves a broken zip open
        if not f.peek(6).startswith((b"PK", b"\x93NUMPY")):  # numpy would take it for a pickle, and say so
            raise HeadcountError(f"{path} is no .npz file; give {want}")
        npz = np.load(f, allow_pickle=False)
        if isinstance(npz, np.ndarray):
            raise HeadcountError(f"{path} is a single array; give {want}")
        with npz:
            found = {key: npz[key] for key in npz.files if key in _KEYS}
    data_key = _first(path, found, "images", "features", "x", "X")
    data = _data(path, data_key, found[data_key])
    truth = _labels(path, found[_first(path, found, "labels", "y")], len(data))
    names = next((found[key] for key in ("class_names", "classes") if key in found), None)
    return data, truth, _names(path, names, truth), found.get("split")


_KEYS = ("images", "features", "x", "X", "labels", "y", "class_names", "classes", "split")


def _first(path: Path, found: dict[str, np.ndarray], *keys: str) -> str:
    for key in keys:
        if key in found:
            return key
    raise HeadcountError(f"{path} has no {' or '.join(map(repr, keys))}; it has {', '.join(found) or 'nothing known'}")


def _data(path: Path, key: str, data: np.ndarray) -> np.ndarray:
    """Images as uint8 (M, H, W, channels), features as float32 (M, D), finite."""
    kind = "images" if data.dtype == np.uint8 and data.ndim in (3, 4) else "features"
    fits = kind == "images" or (data.ndim == 2 and data.dtype.kind in "fiub")
    if not fits or key not in (kind, "x", "X"):
        want = "images as uint8 (count, height, width, channels), features as numbers (count, dimension)"
        raise HeadcountError(f"{path}: {key!r} is {data.dtype} of shape {data.shape}; give {want}")
    if 0 in data.shape:
        raise HeadcountError(f"{path}: {key!r} is empty, of shape {data.shape}")
    if kind == "images":
        data = data if data.ndim == 4 else data[..., None]
        if data.shape[1] in (1, 3) and data.shape[3] not in (1, 3):
            raise HeadcountError(f"{path}: {key!r} has its channels first, {data.shape}; put them last (0, 2, 3, 1)")
        return np.ascontiguousarray(data)
    with np.errstate(over="ignore"):  # what does not fit is infinite, and reported as such below
        data = np.ascontiguousarray(data, dtype=np.float32)
    bad = np.argwhere(~np.isfinite(data))
    if len(bad):
        row, column = bad[0]
        raise HeadcountError(
            f"{path}: row {row} of {key!r} has {data[row, column]} in column {column}; drop the row or fill it in"
        )
    return data


def _labels(path: Path, labels: np.ndarray, count: int) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) != count:
        raise HeadcountError(f"{path}: {count} rows but labels of shape {labels.shape}; give one class number per row")
    if labels.dtype.kind not in "iu":
        raise HeadcountError(f"{path}: labels are {labels.dtype}, such as {labels[0]!s}; give whole numbers from 0")
    for row in (int(labels.argmin()), int(labels.argmax())):
        if not 0 <= labels[row] < MAX_CLASSES:
            raise HeadcountError(f"{path}: row {row} has label {labels[row]}; number the classes 0, 1, 2, ...")
    return labels.astype(np.int64)


def _names(path: Path, names: np.ndarray | None, truth: np.ndarray) -> tuple[str, ...] | None:
    if names is None:
        return None
    with explain_read_errors(path, "class names as text"):
        classes = tuple(names.reshape(-1).astype(str).tolist())
    if len(classes) <= truth.max() or len(set(classes)) < len(classes):
        raise HeadcountError(
            f"{path}: {len(classes)} class names for labels up to {truth.max()}; give each class its own"
        )
    return classes


@contextmanager
def explain_read_errors(path: Path, expected: str = "the official file") -> Generator[None]:
    """A damaged file makes its reader raise almost anything; the person gets one line that names the file."""
    try:
        yield
    except HeadcountError:
        raise
    except Exception as e:
        raise HeadcountError(f"cannot read {path}: {e or type(e).__name__}; give {expected}") from None

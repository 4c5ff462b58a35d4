"""Parsers: the four official formats as their publishers wrote them, generated stand-ins, and a user's .npz.

A parser returns images (M, H, W, channels) uint8 and class numbers (M,) int64, the train part first. Nothing here uses pickle.
"""

import tarfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from headcount.bags import Pool
from headcount.errors import HeadcountError
from headcount.loading import explain_read_errors, open_npz

Arrays = tuple[np.ndarray, np.ndarray]

MAX_CLASSES = 10_000  # more are probably identifiers, and would each become an output
N_SYNTHETIC = 1_500
_OFFICIAL = "the official file"


def parse_digits(files: Sequence[Path] = ()) -> Arrays:
    """The 1,797 digits that come with scikit-learn, 8 x 8 gray; intensities 0..16 scaled to 0..255. Their file is read
    directly: importing the library for it would take longer than the demo's first training."""
    library = find_spec("sklearn")
    file = Path(library.origin).parent / "datasets" / "data" / "digits.csv.gz" if library and library.origin else None
    if file and file.exists():
        table = np.loadtxt(file, delimiter=",", dtype=np.uint8)
    else:  # a release that keeps it elsewhere
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True))
    return np.round(table[:, :-1].reshape(-1, 8, 8, 1) * (255 / 16)).astype(np.uint8), table[:, -1].astype(np.int64)


def parse_cifar10(files: Sequence[Path]) -> Arrays:
    """The binary archive: records of one label byte and 3 x 32 x 32 bytes, channel by channel."""
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    batches: dict[str, np.ndarray] = {}
    with explain_read_errors(files[0], _OFFICIAL), tarfile.open(files[0], "r:gz") as tar:
        for member in tar:  # in the archive's own order, so that it is decompressed once
            name = member.name.rsplit("/", 1)[-1]
            if name in names and (f := tar.extractfile(member)):
                batches[name] = np.frombuffer(f.read(), np.uint8).reshape(-1, 1 + 3 * 32 * 32)
        records = np.concatenate([batches[name] for name in names])
    images = records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(images), records[:, 0].astype(np.int64)


def parse_svhn(files: Sequence[Path]) -> Arrays:
    """Two .mat files with X (32, 32, 3, n) and y (n, 1), in which the digit 0 has label 10."""
    from scipy.io import loadmat

    images, labels = [], []
    for path in files:
        with explain_read_errors(path, _OFFICIAL):
            mat = loadmat(path, variable_names=["X", "y"])
            images.append(mat["X"].transpose(3, 0, 1, 2))
            labels.append(mat["y"].reshape(-1).astype(np.int64) % 10)
    return np.concatenate(images), np.concatenate(labels)


def parse_medmnist(files: Sequence[Path]) -> Arrays:
    """A MedMNIST .npz: train then test. Like the paper, we do not use the official validation part."""
    with open_npz(files[0], _OFFICIAL) as npz:
        images = np.concatenate([npz["train_images"], npz["test_images"]])
        labels = np.concatenate([npz["train_labels"], npz["test_labels"]])
    return to_rgb(images), labels.reshape(-1).astype(np.int64)


def generate_synthetic(files: Sequence[Path] = (), *, n_classes: int) -> Arrays:
    """Images for testing the pipeline when a real data set is not available, without files. An instance is its class's random
    pattern, shifted and with noise; always the same images, not meant for comparing methods."""
    rng = np.random.default_rng(n_classes)
    patterns = rng.random((n_classes, 8, 8)) < 0.4
    labels = rng.permutation(np.arange(N_SYNTHETIC) % n_classes)
    shifted = [np.roll(patterns[c], rng.integers(-1, 2, 2), (0, 1)) for c in labels]
    gray = 60 + 130 * np.stack(shifted) + rng.normal(0, 40, (N_SYNTHETIC, 8, 8))
    return np.clip(np.rint(gray), 0, 255).astype(np.uint8)[..., None], labels.astype(np.int64)


def to_rgb(images: np.ndarray) -> np.ndarray:
    """Repeat the channel of gray images three times; colour images are returned unchanged."""
    images = images[..., None] if images.ndim == 3 else images
    return np.repeat(images, 3, axis=-1) if images.shape[-1] == 1 else images


_DATA_KEYS, _LABEL_KEYS, _NAME_KEYS = ("images", "features", "x", "X"), ("labels", "y"), ("class_names", "classes")


def read_npz(path: Path) -> tuple[np.ndarray, np.ndarray, tuple[str, ...] | None, np.ndarray | None]:
    """A user's .npz -> data (images uint8 (M, H, W, channels) or features float32 (M, D)), class numbers, class names if given,
    split if given; all checked."""
    with open_npz(path, "an .npz with 'images' or 'features', and 'labels'") as npz:
        arrays = {key: npz[key] for key in npz.files if key in (*_DATA_KEYS, *_LABEL_KEYS, *_NAME_KEYS, "split")}
    data_key, label_key, name_key = (next((k for k in ks if k in arrays), "") for ks in (_DATA_KEYS, _LABEL_KEYS, _NAME_KEYS))
    for key, keys in ((data_key, _DATA_KEYS), (label_key, _LABEL_KEYS)):
        if not key:
            has = ", ".join(arrays) or "no known array"
            raise HeadcountError(f"{path} has no {' or '.join(map(repr, keys))}; it has {has}")
    data, labels, what = arrays[data_key], arrays[label_key], f"{path}: {data_key!r}"
    if 0 in data.shape:
        raise HeadcountError(f"{what} is empty, of shape {data.shape}")
    try:
        pool = Pool(data)
    except HeadcountError as e:
        raise HeadcountError(f"{what}: {e}") from None
    if data_key not in (pool.kind, "x", "X"):
        raise HeadcountError(f"{what} is {data.dtype} of shape {data.shape}; such data are called {pool.kind!r}")
    if pool.kind == "images" and pool.shape[0] in (1, 3) and pool.shape[2] not in (1, 3):
        raise HeadcountError(f"{what} has its channels first, {data.shape}; put them last (0, 2, 3, 1)")
    data = np.ascontiguousarray(pool.data.numpy(), np.uint8 if pool.kind == "images" else np.float32)
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels
    if labels.ndim != 1 or len(labels) != len(data):
        raise HeadcountError(f"{path}: {len(data)} rows but labels of shape {labels.shape}; give one class number per row")
    if labels.dtype.kind not in "iu":
        raise HeadcountError(f"{path}: labels are {labels.dtype}, such as {labels[0]!s}; give whole numbers from 0")
    for row in (int(labels.argmin()), int(labels.argmax())):
        if not 0 <= labels[row] < MAX_CLASSES:
            raise HeadcountError(f"{path}: row {row} has label {labels[row]}; number the classes 0, 1, 2, ...")
    classes = None
    if name_key:
        with explain_read_errors(path, "class names as text"):
            classes = tuple(arrays[name_key].reshape(-1).astype(str).tolist())
        if len(classes) <= labels.max() or len(set(classes)) < len(classes):
            counts = f"{len(classes)} class names for labels up to {labels.max()}"
            raise HeadcountError(f"{path}: {counts}; give each class its own name")
    return data, labels.astype(np.int64), classes, arrays.get("split")

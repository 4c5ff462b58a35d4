"""Prints: a number for each bag, made of its instances, by which the bag is met again in any file, order and format.

The print is of what a model is asked about (pictures as bytes, features as float32), not of names: names are given twice, and
a bag that comes back under another name was trained on all the same. Nothing of an instance can be read from it.

    >>> import numpy as np
    >>> from headcount.bags import Bags, Pool
    >>> pool = Pool(np.arange(6, dtype=np.float32)[:, None])
    >>> one = Bags.of(pool, index=[0, 1, 2, 3, 4, 5], sizes=[2, 4], labels=[0, 1], classes=["a", "b"])
    >>> two = Bags.of(pool, index=[5, 4, 3, 2, 0], sizes=[4, 1], labels=[0, 1], classes=["a", "b"])
    >>> (prints(one)[:, None] == prints(two)).tolist()
    [[False, False], [True, False]]
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags.bags import Bags
from headcount.bags.pool import MAX_RESIDENT_BYTES

_CHUNK_WORDS = 1 << 20  # of four bytes, in work at once
_SAMPLE_SIZE = 256  # instances that stand for a large pool


def bag_hashes(bags: Bags) -> np.ndarray:
    """(B,) uint64. Instances are mixed one by one and added up, so their order in the bag does not matter."""
    hashes = np.zeros(len(bags), np.uint64)
    each = max(1, int(np.prod(bags.pool.shape)) // (4 if bags.pool.kind == "images" else 1))
    rows = max(1, _CHUNK_WORDS // each)
    for index, bag in zip(bags.index.split(rows), bags.bag.split(rows), strict=True):
        np.add.at(hashes, bag.cpu().numpy(), _hash_words(_words(bags.pool.take(index))))
    return _mix_bits(hashes + bags.sizes.cpu().numpy().astype(np.uint64))


def fingerprint(bags: Bags) -> str:
    """Of bags as a training meets them: which instances stand where, with which labels, weights and removals, and what they
    are. A pool that is large, or far, is not read through for that: some instances, spread over it, stand for all."""
    digest = hashlib.sha256(repr((bags.classes, bags.pool.shape, str(bags.pool.data.dtype))).encode())
    for name in ("index", "offsets", "target", "weight", "counted", "known", "removed"):
        if (value := getattr(bags, name)) is not None:
            digest.update(name.encode())
            digest.update(tensor_bytes(value))
    rows = bags.index.unique()
    each = max(1, int(np.prod(bags.pool.shape)) * bags.pool.data.element_size())
    if bags.pool.on_disk or len(rows) * each > MAX_RESIDENT_BYTES:
        rows = rows[
            torch.linspace(0, len(rows) - 1, min(_SAMPLE_SIZE, len(rows)), dtype=torch.float64).long().to(rows.device)
        ]
    for some in rows.split(max(1, 4 * _CHUNK_WORDS // each)):
        digest.update(tensor_bytes(bags.pool.take(some)))
    return digest.hexdigest()


def tensor_bytes(x: Tensor) -> memoryview:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _words(x: Tensor) -> np.ndarray:
    """(n, W) uint32 of n instances."""
    x = x.cpu().flatten(1)
    if x.dtype == torch.uint8:
        return np.pad(x.numpy(), ((0, 0), (0, -x.shape[1] % 4))).view(np.uint32)
    return (x.float() + 0.0).contiguous().numpy().view(np.uint32)  # + 0: there is one zero, not two


def _hash_words(words: np.ndarray) -> np.ndarray:
    """(n,) uint64: a sum of the words, each times a number of its own; these never change, or no bag would be met again."""
    keys = np.random.PCG64(20_231).random_raw(words.shape[1]) | np.uint64(1)
    return _mix_bits((words.astype(np.uint64) * keys).sum(1, dtype=np.uint64))


def _mix_bits(h: np.ndarray) -> np.ndarray:
    """Every bit of the number to every other (splitmix64), so that sums of them tell bags apart."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def hashes_to_hex(hashes: np.ndarray) -> str:
    """As JSON takes them, sorted: the order of the bags is nobody's business."""
    return np.unique(hashes).astype(">u8").tobytes().hex()


def hashes_from_hex(text: Any) -> np.ndarray:
    """Back from a file that may be anybody's: what is no list of prints is none.

    >>> read(written(np.array([7, 3], np.uint64))).tolist(), read(None).tolist(), read("x").tolist()
    ([3, 7], [], [])
    """
    try:
        return np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    except (TypeError, ValueError):
        return np.zeros(0, np.uint64)

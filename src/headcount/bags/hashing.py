"""Hashes of bags, by which a bag is recognised in any file, order and format.

A hash depends on what a model sees of the instances (images as bytes, features as float32) and not on names, which are not
unique: a bag under another name was trained on all the same. No instance can be recovered from it.

    >>> import numpy as np
    >>> from headcount.bags import Bags, Pool
    >>> pool = Pool(np.arange(6, dtype=np.float32)[:, None])
    >>> first = Bags.of(pool, index=[0, 1, 2, 3, 4, 5], sizes=[2, 4], labels=[0, 1], classes=["a", "b"])
    >>> second = Bags.of(pool, index=[5, 4, 3, 2, 0], sizes=[4, 1], labels=[0, 1], classes=["a", "b"])
    >>> (bag_hashes(first)[:, None] == bag_hashes(second)).tolist()
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

CHUNK_WORDS = 1 << 20  # words of four bytes hashed at a time
SAMPLE_SIZE = 256  # instances that represent a large pool in a fingerprint


def bag_hashes(bags: Bags, chunk_words: int = CHUNK_WORDS) -> np.ndarray:
    """(B,) uint64. The hashes of a bag's instances are added up, so their order does not matter."""
    hashes = np.zeros(len(bags), np.uint64)
    words = max(1, int(np.prod(bags.pool.shape)) // (4 if bags.pool.kind == "images" else 1))
    rows = max(1, chunk_words // words)
    for index, bag in zip(bags.index.split(rows), bags.bag.split(rows), strict=True):
        np.add.at(hashes, bag.cpu().numpy(), _hash_words(_to_words(bags.pool.take(index))))
    return _mix_bits(hashes + bags.sizes.cpu().numpy().astype(np.uint64))


def fingerprint(bags: Bags, sample_size: int = SAMPLE_SIZE) -> str:
    """A hash of everything that training uses of these bags: addresses, labels, weights, removals and instances.

    A pool that is large, or on disk, is not read as a whole: ``sample_size`` instances, spread over it, represent it.
    """
    digest = hashlib.sha256(repr((bags.classes, bags.pool.shape, str(bags.pool.data.dtype))).encode())
    for name in ("index", "offsets", "target", "weight", "counted", "known", "removed"):
        if (value := getattr(bags, name)) is not None:
            digest.update(name.encode())
            digest.update(tensor_bytes(value))
    rows = bags.index.unique()
    instance_bytes = max(1, int(np.prod(bags.pool.shape)) * bags.pool.data.element_size())
    if bags.pool.on_disk or len(rows) * instance_bytes > MAX_RESIDENT_BYTES:
        sample = torch.linspace(0, len(rows) - 1, min(sample_size, len(rows)), dtype=torch.float64)
        rows = rows[sample.long().to(rows.device)]
    for chunk in rows.split(max(1, 4 * CHUNK_WORDS // instance_bytes)):
        digest.update(tensor_bytes(bags.pool.take(chunk)))
    return digest.hexdigest()


def tensor_bytes(x: Tensor) -> memoryview:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _to_words(x: Tensor) -> np.ndarray:
    """(n, W) uint32 of n instances."""
    x = x.cpu().flatten(1)
    if x.dtype == torch.uint8:
        return np.pad(x.numpy(), ((0, 0), (0, -x.shape[1] % 4))).view(np.uint32)
    return (x.float() + 0.0).contiguous().numpy().view(np.uint32)  # + 0 turns -0 into 0


def _hash_words(words: np.ndarray) -> np.ndarray:
    """(n,) uint64: the sum of the words, each times a key. The keys must never change: saved hashes would not match."""
    keys = np.random.PCG64(20_231).random_raw(words.shape[1]) | np.uint64(1)
    return _mix_bits((words.astype(np.uint64) * keys).sum(1, dtype=np.uint64))


def _mix_bits(h: np.ndarray) -> np.ndarray:
    """Every bit influences every other (splitmix64), so that sums of hashes distinguish bags."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def hashes_to_hex(hashes: np.ndarray) -> str:
    """Hashes as JSON text; sorted, so the order of the bags is not disclosed."""
    return np.unique(hashes).astype(">u8").tobytes().hex()


def hashes_from_hex(text: Any) -> np.ndarray:
    """Read hashes from an untrusted file; what is not a list of hashes gives none.

    >>> hashes_from_hex(hashes_to_hex(np.array([7, 3], np.uint64))).tolist(), hashes_from_hex(None).tolist()
    ([3, 7], [])
    """
    try:
        return np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    except (TypeError, ValueError):
        return np.zeros(0, np.uint64)

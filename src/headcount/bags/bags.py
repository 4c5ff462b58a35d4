"""Bags: groups of addresses into one pool, what is known about each group, and hashes by which bags are recognised.

A bag's ``target`` is a row over the classes: one-hot for a plain label, shares for a soft or tied one, zeros if the bag has no
label. So the loss of every kind of label is -sum(target * log p).

``truth`` (the classes of instances, for scoring) is kept apart from ``known`` (instance labels given as supervision). Training
refuses bags that carry truth: call :meth:`Bags.blind` first.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from headcount.bags import validation
from headcount.bags.pool import MAX_RESIDENT_BYTES, Pool
from headcount.bags.segments import Segments
from headcount.errors import HeadcountError, check_choice

CHUNK_WORDS = 1 << 20  # words of four bytes hashed at a time
SAMPLE_SIZE = 256  # instances that represent a large pool in a fingerprint


@dataclass(frozen=True, eq=False)
class Bags:
    """B bags over N addressed instances of a pool of M. Create them by :meth:`Bags.of`.

    Examples
    --------
    >>> import numpy as np
    >>> pool = Pool(np.eye(6, dtype=np.float32))
    >>> bags = Bags.of(pool, sizes=[2, 4], labels=[0, 1], classes=["cat", "dog"])
    >>> bags
    Bags(2 bags, 6 instances, 2 classes)
    >>> bags.take([1]).index
    tensor([2, 3, 4, 5])
    """

    pool: Pool
    index: Tensor  # (N,) addresses into the pool
    offsets: Tensor  # (B+1,)
    target: Tensor  # (B, C)
    classes: tuple[str, ...]
    weight: Tensor | None = None  # (N,) how many votes an instance has
    counted: Tensor | None = None  # (C,) classes that can win; background cannot
    group: tuple[str, ...] | None = None  # (B,) patient, site, county: never split between folds
    names: tuple[str, ...] | None = None  # (B,)
    known: Tensor | None = None  # (N,) instance labels given as supervision, -1 where unknown
    truth: Tensor | None = None  # (N,) instance labels for scoring only, -1 where unknown
    votes: Tensor | None = None  # (B, C) how many votes were counted for each class, zeros for a bag without counts
    removed: Tensor | None = None  # (N,) not counted, but still part of the network's batch
    label_noise: float = 0.0  # probability with which a label was replaced by one at random (majority/label_noise.py)

    @classmethod
    def of(
        cls,
        pool: Pool,
        *,
        labels: Any,
        classes: Sequence[str] | int,
        index: Any = None,
        sizes: Any = None,
        offsets: Any = None,
        **extras: Any,
    ) -> Self:
        """Create bags from lists or arrays, which are checked once.

        Parameters
        ----------
        pool
            The instances.
        labels
            (B,) class numbers, -1 for an unlabelled bag; or (B, C) votes or shares.
        classes
            The names of the classes, or their number.
        index
            (N,) addresses into the pool, bag after bag; by default every instance once, in order.
        sizes, offsets
            (B,) the number of instances of each bag, or (B+1,) where each begins and ends: one of the two.
        **extras
            Any of ``weight``, ``counted``, ``group``, ``names``, ``known``, ``truth``, ``removed``, ``label_noise`` and ``votes``:
            (B, C) counts of the instances (or of a sample, or of more people), which methods use beside the shares of ``labels``.
        """
        names = validation.check_class_names(classes)
        addresses = validation.check_addresses(range(len(pool)) if index is None else index, len(pool))
        bag_names, n = extras.get("names"), len(addresses)
        ends = validation.check_offsets(sizes, offsets, n, bag_names)
        target = validation.check_target(labels, len(ends) - 1, len(names), bag_names)

        def check_per_bag(key: str, given: Any) -> tuple[str, ...]:
            if len(given := tuple(map(str, given))) != len(target):
                raise HeadcountError(f"{key} has {len(given)} entries for {len(target)} bags; give one per bag")
            return given

        checks = {
            "known": lambda given: validation.check_instance_labels("known", given, n, len(names)),
            "truth": lambda given: validation.check_instance_labels("truth", given, n, len(names)),
            "removed": lambda given: validation.check_per_instance("removed", given, n).bool(),
            "weight": lambda given: validation.check_weights(given, n),
            "counted": lambda given: validation.check_counted(given, names, target, bag_names),
            "votes": lambda given: validation.check_votes(given, target, bag_names),
            "group": lambda given: check_per_bag("group", given),
            "names": lambda given: check_per_bag("names", given),
            "label_noise": validation.check_noise,
        }
        for key in extras:
            check_choice("field of bags", key, checks)
        extras = {key: checks[key](given) for key, given in extras.items() if given is not None}
        bags = cls(pool, addresses, ends, target, names, **extras)
        validation.check_not_empty(bags.segments().total_weight(), bags.names)
        return bags

    @property
    def sizes(self) -> Tensor:
        """(B,) the number of instances, removed ones included."""
        return self.offsets.diff()

    @property
    def labelled(self) -> Tensor:
        """(B,) true where a bag has a label."""
        return self.target.sum(1) > 0

    @property
    def label_names(self) -> tuple[str | None, ...]:
        """(B,) the label as text: for a tie all winners, as in "a|b"; None for an unlabelled bag."""
        most = self.target.amax(1, keepdim=True)
        rows = ((self.target >= most - 1e-6) & (most > 0)).tolist()
        names = ("|".join(c for c, won in zip(self.classes, row, strict=True) if won) for row in rows)
        return tuple(name or None for name in names)

    @property
    def label(self) -> Tensor:
        """(B,) the class of the largest target (the lowest on ties), -1 for an unlabelled bag."""
        return torch.where(self.labelled, self.target.argmax(1), -1)

    @property
    def bag(self) -> Tensor:
        """(N,) the bag of each instance."""
        return torch.arange(len(self), device=self.offsets.device).repeat_interleave(self.sizes)

    def segments(self) -> Segments:
        """The bag of each instance, for per-bag arithmetic: with weights, without removed instances."""
        s = Segments.from_sizes(self.sizes).with_weight(self.weight)
        return s if self.removed is None else s.without(self.removed)

    def __len__(self) -> int:
        return len(self.target)

    def __repr__(self) -> str:
        removed = "" if self.removed is None else f", {int(self.removed.sum())} removed"
        truth = ", with truth" if self.truth is not None else ""
        return f"Bags({len(self)} bags, {len(self.index)} instances, {len(self.classes)} classes{removed}{truth})"

    def take(self, which: Any) -> Self:
        """These bags (numbers, or a mask over all bags), in this order, over the same pool."""
        which = validation.check_bag_numbers(which, len(self)).to(self.offsets.device)
        group, names = (None if v is None else tuple(v[b] for b in which.tolist()) for v in (self.group, self.names))
        votes = None if self.votes is None else self.votes[which]
        fields = {"target": self.target[which], "group": group, "names": names, "votes": votes}
        rows = self.instances_of(which)
        return replace(self, offsets=pad(self.sizes[which].cumsum(0), (1, 0)), **self._per_instance(rows), **fields)

    def ranges(self, max_instances: int) -> list[range]:
        """Consecutive bags of at most this many instances together; a larger bag is a range of its own.

        >>> import numpy as np
        >>> Bags.of(Pool(np.zeros((19, 2))), sizes=[3, 4, 2, 9, 1], labels=[0] * 5, classes=2).ranges(7)
        [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]
        """
        ranges, start, ends = [], 0, self.offsets.tolist()
        for b in range(1, len(self) + 1):
            if b == len(self) or ends[b + 1] - ends[start] > max_instances:
                ranges.append(range(start, b))
                start = b
        return ranges

    def without(self, removed: Any) -> Self:
        """Do not count these instances (a mask over the N). What was removed before stays removed."""
        mask = validation.check_per_instance("removed", removed, len(self.index)).to(torch.bool).to(self.index.device)
        bags = replace(self, removed=mask if self.removed is None else mask | self.removed)
        validation.check_not_empty(bags.segments().total_weight(), bags.names)
        return bags

    def drop_removed(self) -> Self:
        """The same bags without the removed instances, so that the network does not see them either."""
        if self.removed is None:
            return self
        return replace(self.keep_instances(torch.nonzero(~self.removed)[:, 0]), removed=None)

    def keep_instances(self, rows: Tensor) -> Self:
        """The same bags with these instances only, given by their numbers in ascending order."""
        sizes = torch.bincount(self.bag[rows], minlength=len(self))
        return replace(self, offsets=pad(sizes.cumsum(0), (1, 0)), **self._per_instance(rows))

    def blind(self) -> Self:
        """The same bags without the truth: what training may see."""
        return replace(self, truth=None)

    def to(self, device: torch.device | str) -> Self:
        """Pool, addresses and targets on a device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, pool=self.pool.to(device), **moved)

    def instances_of(self, which: Tensor) -> Tensor:
        """The numbers (of N) of the instances of these bags (n,), bag after bag."""
        sizes = self.sizes[which]
        shift, total = self.offsets[:-1][which] - sizes.cumsum(0) + sizes, int(sizes.sum())
        return torch.arange(total, device=sizes.device) + shift.repeat_interleave(sizes, output_size=total)

    def _per_instance(self, rows: Tensor) -> dict[str, Any]:
        names = ("index", "weight", "known", "truth", "removed")
        return {name: None if (v := getattr(self, name)) is None else v[rows] for name in names}


def bag_hashes(bags: Bags, chunk_words: int = CHUNK_WORDS) -> np.ndarray:
    """(B,) uint64, by which a bag is recognised in any file, order and format, under any name. A hash depends on what a model
    sees of the instances (images as bytes, features as float32), not on their order: the hashes of a bag's instances are added
    up. No instance can be recovered from it."""
    hashes = np.zeros(len(bags), np.uint64)
    words = max(1, int(np.prod(bags.pool.shape)) // (4 if bags.pool.kind == "images" else 1))
    rows = max(1, chunk_words // words)
    for index, bag in zip(bags.index.split(rows), bags.bag.split(rows), strict=True):
        x = bags.pool.take(index).cpu().flatten(1)
        if x.dtype == torch.uint8:
            x = np.pad(x.numpy(), ((0, 0), (0, -x.shape[1] % 4))).view(np.uint32)
        else:
            x = (x.float() + 0.0).contiguous().numpy().view(np.uint32)  # + 0 turns -0 into 0
        # each word times its key; the keys must never change: saved hashes would not match
        keys = np.random.PCG64(20_231).random_raw(x.shape[1]) | np.uint64(1)
        np.add.at(hashes, bag.cpu().numpy(), _mix_bits((x.astype(np.uint64) * keys).sum(1, dtype=np.uint64)))
    return _mix_bits(hashes + bags.sizes.cpu().numpy().astype(np.uint64))


def fingerprint(bags: Bags, sample_size: int = SAMPLE_SIZE) -> str:
    """A hash of everything that training uses of these bags: addresses, labels, weights, removals and instances. A pool that is
    large, or on disk, is not read as a whole: ``sample_size`` instances, spread over it, represent it."""
    digest = hashlib.sha256(repr((bags.classes, bags.pool.shape, str(bags.pool.data.dtype))).encode())
    for name in ("index", "offsets", "target", "weight", "counted", "known", "removed", "votes"):
        if (value := getattr(bags, name)) is not None:
            digest.update(name.encode())
            digest.update(tensor_bytes(value))
    if bags.label_noise:
        digest.update(f"label_noise {bags.label_noise}".encode())
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


def _mix_bits(h: np.ndarray) -> np.ndarray:
    """Every bit influences every other (splitmix64), so that sums of hashes distinguish bags."""
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


def hashes_to_hex(hashes: np.ndarray) -> str:
    """Hashes as JSON text; sorted, so the order of the bags is not disclosed."""
    return np.unique(hashes).astype(">u8").tobytes().hex()


def hashes_from_hex(text: Any) -> np.ndarray:
    """Read hashes from an untrusted file; what is not a list of hashes gives none."""
    try:
        return np.frombuffer(bytes.fromhex(text), ">u8").astype(np.uint64)
    except (TypeError, ValueError):
        return np.zeros(0, np.uint64)

"""Bags: groups of addresses into one pool, with what is known of each group.

A bag's ``target`` is a row over the classes: one-hot for a plain label, shares for a soft or tied one, zeros when the bag
has no label. With that, the loss of every kind of label is the same -sum(target * log p).

``truth`` (the instances' own classes, for scoring) is kept apart from ``known`` (instance labels given as supervision):
training refuses bags that carry truth. Call :meth:`Bags.blind` first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headcount.bags.pool import Pool
from headcount.bags.segments import Segments
from headcount.errors import HeadcountError


@dataclass(frozen=True, eq=False)
class Bags:
    """B bags over N addressed instances of a pool of M.

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
    weight: Tensor | None = None  # (N,) votes of an instance
    counted: Tensor | None = None  # (C,) classes that can win; background cannot
    group: tuple[str, ...] | None = None  # (B,) patient, site, county: never split over folds
    names: tuple[str, ...] | None = None  # (B,)
    known: Tensor | None = None  # (N,) instance labels given as supervision, -1 where unknown
    truth: Tensor | None = None  # (N,) instance labels for scoring only, -1 where unknown
    removed: Tensor | None = None  # (N,) taken out of the count, still seen by the network

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
    ) -> Bags:
        """The door: plain lists or arrays in, everything checked once, and trusted ever after.

        ``labels``: (B,) class numbers with -1 for an unlabelled bag, or (B, C) votes or shares.
        """
        names = tuple(str(i) for i in range(classes)) if isinstance(classes, int) else tuple(map(str, classes))
        if len(set(names)) < len(names):
            raise HeadcountError(f"two classes have one name: {', '.join(names)}; give each its own")
        addresses = _addresses(range(len(pool)) if index is None else index, len(pool))
        ends = _offsets(sizes, offsets, len(addresses), extras.get("names"))
        target = _target(labels, len(ends) - 1, len(names), extras.get("names"))
        for key in ("known", "truth"):
            if extras.get(key) is not None:
                extras[key] = _instance_labels(key, extras[key], len(addresses), len(names))
        for key, dtype in (("weight", torch.float32), ("removed", torch.bool)):
            if extras.get(key) is not None:
                extras[key] = _per_instance(key, extras[key], len(addresses)).to(dtype)
        if extras.get("counted") is not None:
            extras["counted"] = _counted(extras["counted"], names, target, extras.get("names"))
        for key in ("group", "names"):
            if extras.get(key) is not None:
                extras[key] = tuple(map(str, extras[key]))
                if len(extras[key]) != len(target):
                    raise HeadcountError(
                        f"{key} has {len(extras[key])} entries for {len(target)} bags; give one per bag"
                    )
        bags = cls(pool, addresses, ends, target, names, **extras)
        if bags.weight is not None and (not bool(torch.isfinite(bags.weight).all()) or bool((bags.weight < 0).any())):
            row = int((~(bags.weight >= 0) | ~torch.isfinite(bags.weight)).nonzero()[0])
            raise HeadcountError(
                f"instance {row} has weight {float(bags.weight[row])}; weights are finite and not negative"
            )
        _nobody_empty(bags)
        return bags

    # -- asking -------------------------------------------------------------------------------------------------------

    @property
    def sizes(self) -> Tensor:
        """(B,) addressed instances, removed ones included."""
        return self.offsets.diff()

    @property
    def winners(self) -> tuple[str | None, ...]:
        """(B,) the label as a person would write it: a tie names all who won, as in "a|b"; None where there is none."""
        most = self.target.amax(1, keepdim=True)
        rows = ((self.target >= most - 1e-6) & (most > 0)).tolist()
        names = ("|".join(c for c, won in zip(self.classes, row, strict=True) if won) for row in rows)
        return tuple(name or None for name in names)

    @property
    def label(self) -> Tensor:
        """(B,) the class of the largest target (the lowest on ties), -1 for an unlabelled bag."""
        best = self.target.argmax(1)
        return torch.where(self.target.sum(1) > 0, best, torch.full_like(best, -1))

    @property
    def bag(self) -> Tensor:
        """(N,) the bag each instance stands in."""
        return torch.arange(len(self), device=self.offsets.device).repeat_interleave(self.sizes)

    def segments(self) -> Segments:
        s = Segments.from_sizes(self.sizes).weighted(self.weight)
        return s if self.removed is None else s.without(self.removed)

    def __len__(self) -> int:
        return len(self.target)

    def __repr__(self) -> str:
        gone = "" if self.removed is None else f", {int(self.removed.sum())} removed"
        seen = ", with truth" if self.truth is not None else ""
        return f"Bags({len(self)} bags, {len(self.index)} instances, {len(self.classes)} classes{gone}{seen})"

    # -- varying ------------------------------------------------------------------------------------------------------

    def take(self, which: Any) -> Bags:
        """These bags (their numbers, or a mask over all of them), in this order, over the same pool."""
        which = _which(which, len(self)).to(self.offsets.device)
        rows = self._rows(which)
        sizes = self.sizes[which]
        picked = {k: None if (v := getattr(self, k)) is None else v[rows] for k in _PER_INSTANCE}
        per_bag = {
            k: None if (v := getattr(self, k)) is None else tuple(v[int(i)] for i in which) for k in ("group", "names")
        }
        return replace(
            self, offsets=_ends(sizes), target=self.target[which], index=self.index[rows], **picked, **per_bag
        )

    def without(self, removed: Any) -> Bags:
        """Take instances (a mask over the N) out of the count. What was removed before stays removed."""
        mask = _per_instance("removed", removed, len(self.index)).to(torch.bool).to(self.index.device)
        bags = replace(self, removed=mask if self.removed is None else mask | self.removed)
        _nobody_empty(bags)
        return bags

    def dropped(self) -> Bags:
        """Really leave the removed instances out, so that the network does not see them either."""
        if self.removed is None:
            return self
        rows = (~self.removed).nonzero().flatten()
        picked = {k: None if (v := getattr(self, k)) is None else v[rows] for k in _PER_INSTANCE}
        sizes = torch.bincount(self.bag[rows], minlength=len(self))
        return replace(self, offsets=_ends(sizes), index=self.index[rows], **{**picked, "removed": None})

    def blind(self) -> Bags:
        """The same bags with the truth taken away: what training may see."""
        return replace(self, truth=None)

    def to(self, device: torch.device | str) -> Bags:
        """Pool, addresses and targets on a device."""
        moved = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, pool=self.pool.to(device), **moved)

    def _rows(self, which: Tensor) -> Tensor:
        """The instances of these bags, bag after bag."""
        sizes = self.sizes[which]
        within = torch.arange(int(sizes.sum()), device=sizes.device) - _ends(sizes)[:-1].repeat_interleave(sizes)
        return self.offsets[:-1][which].repeat_interleave(sizes) + within


_PER_INSTANCE = ("weight", "known", "truth", "removed")


# -- checks at the door -------------------------------------------------------------------------------------------------


def _ends(sizes: Tensor) -> Tensor:
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


def _called(bag: int, names: Any) -> str:
    return f"bag {bag} ({names[bag]})" if names is not None and bag < len(names) else f"bag {bag}"


def _array(what: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError):
        raise HeadcountError(f"{what} must be a flat list of numbers, got {type(given).__name__}") from None


def _integers(what: str, given: Any) -> np.ndarray:
    a = _array(what, given)
    if a.size == 0:
        a = a.astype(np.int64)
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise HeadcountError(f"{what} must be a flat list of whole numbers, got {a.dtype} of shape {a.shape}")
    return a


def _which(given: Any, bags: int) -> Tensor:
    """(n,) numbers of bags."""
    a = _array("bags to take", given)
    if a.dtype == bool and a.shape == (bags,):
        return torch.from_numpy(np.flatnonzero(a))
    if a.dtype == bool:
        raise HeadcountError(f"a mask over {bags} bags has so many values, got {a.size} of shape {a.shape}")
    a = _integers("bags to take", a)
    if ((a < 0) | (a >= bags)).any():
        raise HeadcountError(f"bags are numbered 0 to {bags - 1}, asked for {a.tolist()[:8]}")
    return torch.from_numpy(a.astype(np.int64))


def _addresses(given: Any, pool: int) -> Tensor:
    a = _integers("addresses", given)
    bad = np.flatnonzero((a < 0) | (a >= pool))  # before the cast: a uint64 beyond 2^63 would come out negative
    if len(bad):
        raise HeadcountError(f"address {a[bad[0]]} at row {bad[0]} points outside the pool of {pool} instances")
    return torch.from_numpy(a.astype(np.int64))


def _offsets(sizes: Any, offsets: Any, instances: int, names: Any) -> Tensor:
    if (sizes is None) == (offsets is None):
        raise HeadcountError("give either sizes or offsets of the bags")
    if offsets is None:
        ends = np.concatenate([[0], np.cumsum(_integers("sizes", sizes).astype(np.int64))])
    else:
        ends = _integers("offsets", offsets).astype(np.int64)
        if len(ends) == 0 or ends[0] != 0:
            raise HeadcountError(f"offsets start at 0 and end at the number of instances, got {ends[:3].tolist()}...")
    steps = np.diff(ends)
    if (steps < 0).any():
        b = int(np.flatnonzero(steps < 0)[0])
        raise HeadcountError(f"offsets must increase: {_called(b, names)} runs from {ends[b]} to {ends[b + 1]}")
    if (steps == 0).any():
        raise HeadcountError(f"{_called(int(np.flatnonzero(steps == 0)[0]), names)} is empty; a bag needs an instance")
    if ends[-1] != instances:
        raise HeadcountError(f"the bags hold {ends[-1]} instances, {instances} addresses were given")
    return torch.from_numpy(ends)


def _target(given: Any, bags: int, classes: int, names: Any) -> Tensor:
    if classes < 2:
        raise HeadcountError(f"a majority needs at least two classes, got {classes}")
    try:
        y = np.atleast_1d(_array("labels", given))
    except HeadcountError:
        y = np.array(None)
    if y.dtype.kind not in "biuf":
        raise HeadcountError("labels are class numbers, one per bag, or votes (bags, classes), all of one length")
    if len(y) != bags:
        raise HeadcountError(f"{len(y)} labels for {bags} bags; give one per bag (-1 for an unlabelled bag)")
    if y.ndim == 2:
        if y.shape[1] != classes:
            raise HeadcountError(f"votes need one column per class: {classes} classes, {y.shape[1]} columns")
        votes = torch.from_numpy(y.astype(np.float64))
        bad = (~torch.isfinite(votes) | (votes < 0)).any(1).nonzero().flatten()
        if len(bad):
            raise HeadcountError(
                f"votes of {_called(int(bad[0]), names)} are {votes[bad[0]].tolist()}; they must be finite, >= 0"
            )
        total = votes.sum(1, keepdim=True)
        return torch.where(total > 0, votes / total, 0.0).float()
    if y.ndim != 1 or y.dtype.kind == "f":
        raise HeadcountError(
            f"labels are whole numbers, one per bag, or votes (bags, classes); got {y.dtype} of shape {y.shape}"
        )
    bad = np.flatnonzero((y < -1) | (y >= classes))  # in numpy: torch takes -1 for 255 where labels are uint8
    if len(bad):
        b = int(bad[0])
        raise HeadcountError(
            f"label {int(y[b])} of {_called(b, names)} is out of range; classes are 0 to {classes - 1}"
        )
    label = torch.from_numpy(y.astype(np.int64))
    return torch.nn.functional.one_hot(label.clamp_min(0), classes).float() * (label >= 0)[:, None]


def _per_instance(what: str, given: Any, instances: int) -> Tensor:
    v = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    if v.shape != (instances,):
        raise HeadcountError(
            f"{what} has shape {tuple(v.shape)} for {instances} instances; give one value per instance"
        )
    return v


def _instance_labels(what: str, given: Any, instances: int, classes: int) -> Tensor:
    v = _per_instance(what, given, instances)
    if v.is_floating_point() or v.is_complex():
        raise HeadcountError(f"{what} holds class numbers, got {v.dtype}; give whole numbers, -1 where unknown")
    v = v.long()
    bad = ((v < -1) | (v >= classes)).nonzero().flatten()
    if len(bad):
        raise HeadcountError(
            f"{what} {int(v[bad[0]])} of instance {int(bad[0])} is out of range (0 to {classes - 1}, or -1)"
        )
    return v


def _counted(given: Any, classes: tuple[str, ...], target: Tensor, names: Any) -> Tensor:
    v = torch.as_tensor(np.asarray(given))
    if v.dtype != torch.bool or v.shape != (len(classes),) or int(v.sum()) < 2:
        raise HeadcountError(f"counted is one true or false per class ({len(classes)}), at least two true")
    odd = (target[:, ~v] > 0).any(1).nonzero().flatten()
    if len(odd):
        won = classes[int(target[odd[0]].masked_fill(v, 0).argmax())]
        raise HeadcountError(f"{_called(int(odd[0]), names)} is labelled {won!r}, a class that is not counted")
    return v


def _nobody_empty(bags: Bags) -> None:
    empty = (bags.segments().total() == 0).nonzero().flatten()
    if len(empty):
        raise HeadcountError(f"{_called(int(empty[0]), bags.names)} has no instance left to count; keep at least one")

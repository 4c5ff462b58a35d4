"""Validation of what :class:`Bags` are made from: lists or arrays are checked once, and trusted afterwards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from headcount.errors import HeadcountError, to_python_scalar

if TYPE_CHECKING:
    from headcount.bags.bags import Bags


def check_class_names(given: Iterable[str] | int) -> tuple[str, ...]:
    """The names of the classes, given by name or by number."""
    given = to_python_scalar(given)
    names = tuple(str(i) for i in range(given)) if isinstance(given, int) else tuple(map(str, given))
    if len(set(names)) < len(names):
        raise HeadcountError(f"class names must be unique, got {', '.join(names)}")
    return names


def describe_bag(bag: int, names: Any) -> str:
    """A bag's number, and its name if it has one, for error messages."""
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


def check_bag_numbers(given: Any, bags: int) -> Tensor:
    """(n,) numbers of bags."""
    a = _array("bags to take", given)
    if a.dtype == bool and a.shape == (bags,):
        return torch.from_numpy(np.flatnonzero(a))
    if a.dtype == bool:
        raise HeadcountError(f"a mask over {bags} bags needs {bags} values, got {a.size} of shape {a.shape}")
    a = _integers("bags to take", a)
    if ((a < 0) | (a >= bags)).any():
        raise HeadcountError(f"bags are numbered 0 to {bags - 1}, asked for {a.tolist()[:8]}")
    return torch.from_numpy(a.astype(np.int64))


def check_addresses(given: Any, pool: int) -> Tensor:
    """(N,) addresses into a pool."""
    a = _integers("addresses", given)
    bad = np.flatnonzero((a < 0) | (a >= pool))  # before the cast: a uint64 beyond 2^63 would come out negative
    if len(bad):
        raise HeadcountError(f"address {a[bad[0]]} at row {bad[0]} points outside the pool of {pool} instances")
    return torch.from_numpy(a.astype(np.int64))


def check_offsets(sizes: Any, offsets: Any, instances: int, names: Any) -> Tensor:
    """(B+1,) where each bag begins and ends, from sizes or offsets."""
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
        raise HeadcountError(f"offsets must increase: {describe_bag(b, names)} runs from {ends[b]} to {ends[b + 1]}")
    if (steps == 0).any():
        raise HeadcountError(
            f"{describe_bag(int(np.flatnonzero(steps == 0)[0]), names)} is empty; a bag needs an instance"
        )
    if ends[-1] != instances:
        raise HeadcountError(f"the bags hold {ends[-1]} instances, {instances} addresses were given")
    return torch.from_numpy(ends)


def check_target(given: Any, bags: int, classes: int, names: Any) -> Tensor:
    """(B, C) class numbers as one-hot rows, votes as shares; a row of zeros has no label."""
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
                f"votes of {describe_bag(int(bad[0]), names)} are {votes[bad[0]].tolist()}; they must be finite, >= 0"
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
            f"label {int(y[b])} of {describe_bag(b, names)} is out of range; classes are 0 to {classes - 1}"
        )
    label = torch.from_numpy(y.astype(np.int64))
    return torch.nn.functional.one_hot(label.clamp_min(0), classes).float() * (label >= 0)[:, None]


def check_per_instance(what: str, given: Any, instances: int) -> Tensor:
    """One value per instance."""
    try:
        v = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    except (TypeError, ValueError):
        raise HeadcountError(f"{what} must be numbers, one per instance, got {type(given).__name__}") from None
    if v.shape != (instances,):
        raise HeadcountError(
            f"{what} has shape {tuple(v.shape)} for {instances} instances; give one value per instance"
        )
    return v


def check_weights(given: Any, instances: int) -> Tensor:
    """(N,) finite, non-negative weights."""
    v = check_per_instance("weight", given, instances).float()
    wrong = (~(v >= 0) | ~torch.isfinite(v)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise HeadcountError(f"instance {row} has weight {float(v[row])}; weights are finite and not negative")
    return v


def check_instance_labels(what: str, given: Any, instances: int, classes: int) -> Tensor:
    """(N,) class numbers, -1 where unknown."""
    v = check_per_instance(what, given, instances)
    if v.is_floating_point() or v.is_complex():
        raise HeadcountError(f"{what} holds class numbers, got {v.dtype}; give whole numbers, -1 where unknown")
    v = v.long()
    bad = ((v < -1) | (v >= classes)).nonzero().flatten()
    if len(bad):
        raise HeadcountError(
            f"{what} {int(v[bad[0]])} of instance {int(bad[0])} is out of range (0 to {classes - 1}, or -1)"
        )
    return v


def check_counted(given: Any, classes: tuple[str, ...], target: Tensor, names: Any) -> Tensor:
    """(C,) the classes that can win; no bag may be labelled otherwise."""
    v = torch.as_tensor(np.asarray(given))
    if v.dtype != torch.bool or v.shape != (len(classes),) or int(v.sum()) < 2:
        raise HeadcountError(f"counted is one true or false per class ({len(classes)}), at least two true")
    invalid = (target[:, ~v] > 0).any(1).nonzero().flatten()
    if len(invalid):
        won = classes[int(target[invalid[0]].masked_fill(v, 0).argmax())]
        raise HeadcountError(f"{describe_bag(int(invalid[0]), names)} is labelled {won!r}, a class that is not counted")
    return v


def check_not_empty(bags: Bags) -> None:
    """Every bag must count at least one instance."""
    empty = (bags.segments().total_weight() == 0).nonzero().flatten()
    if len(empty):
        raise HeadcountError(
            f"{describe_bag(int(empty[0]), bags.names)} has no instance left to count; keep at least one"
        )

"""Validation of what :class:`Bags` are made from: lists or arrays are checked once, and trusted afterwards."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from headcount.errors import HeadcountError, check_number, to_python_scalar


def check_class_names(given: Iterable[str] | int) -> tuple[str, ...]:
    given = to_python_scalar(given)
    names = tuple(map(str, range(given) if isinstance(given, int) else given))
    if len(set(names)) < len(names):
        raise HeadcountError(f"class names must be unique, got {', '.join(names)}")
    return names


def check_bag_numbers(given: Any, bags: int) -> Tensor:
    a = _array("bags to take", given)
    if a.dtype == bool and a.shape != (bags,):
        raise HeadcountError(f"a mask over {bags} bags needs {bags} values, got {a.size} of shape {a.shape}")
    a = np.flatnonzero(a) if a.dtype == bool else _integers("bags to take", a)
    if ((a < 0) | (a >= bags)).any():
        raise HeadcountError(f"bags are numbered 0 to {bags - 1}, asked for {a.tolist()[:8]}")
    return torch.from_numpy(a.astype(np.int64))


def check_addresses(given: Any, pool: int) -> Tensor:
    a = _integers("addresses", given)
    if (row := _first((a < 0) | (a >= pool))) is not None:  # before the cast, in which a large uint64 becomes negative
        raise HeadcountError(f"address {a[row]} at row {row} points outside the pool of {pool} instances")
    return torch.from_numpy(a.astype(np.int64))


def check_offsets(sizes: Any, offsets: Any, instances: int, names: Any) -> Tensor:
    if (sizes is None) == (offsets is None):
        raise HeadcountError("give either sizes or offsets of the bags")
    if offsets is None:
        ends = np.concatenate([[0], np.cumsum(_integers("sizes", sizes).astype(np.int64))])
    else:
        ends = _integers("offsets", offsets).astype(np.int64)
        if len(ends) == 0 or ends[0] != 0:
            raise HeadcountError(f"offsets start at 0 and end at the number of instances, got {ends[:3].tolist()}...")
    if (b := _first(np.diff(ends) < 0)) is not None:
        raise HeadcountError(f"offsets must increase: {_name(b, names)} runs from {ends[b]} to {ends[b + 1]}")
    if (b := _first(np.diff(ends) == 0)) is not None:
        raise HeadcountError(f"{_name(b, names)} is empty; a bag needs an instance")
    if ends[-1] != instances:
        raise HeadcountError(f"the bags hold {ends[-1]} instances, {instances} addresses were given")
    return torch.from_numpy(ends)


def check_target(given: Any, bags: int, classes: int, names: Any) -> Tensor:
    """(B, C) class numbers become one-hot rows, votes become shares; a bag without a label has a row of zeros."""
    if classes < 2:
        raise HeadcountError(f"a majority needs at least two classes, got {classes}")
    y = np.atleast_1d(_array("labels", given))
    if len(y) != bags:
        raise HeadcountError(f"{len(y)} labels for {bags} bags; give one per bag (-1 for an unlabelled bag)")
    if y.ndim == 2 and y.dtype.kind in "biuf":
        votes = torch.from_numpy(y.astype(np.float64))
        if votes.shape[1] != classes:
            raise HeadcountError(f"votes need one column per class: {classes} classes, {votes.shape[1]} columns")
        if (b := _first((~votes.isfinite() | (votes < 0)).any(1))) is not None:
            raise HeadcountError(f"votes of {_name(b, names)} are {votes[b].tolist()}; they must be finite, >= 0")
        total = votes.sum(1, keepdim=True)
        return torch.where(total > 0, votes / total, 0.0).float()
    if y.ndim != 1 or y.dtype.kind not in "biu":
        given = f"got {y.dtype} of shape {y.shape}"
        raise HeadcountError(f"labels are whole numbers, one per bag, or votes (bags, classes); {given}")
    if (b := _first((y < -1) | (y >= classes))) is not None:  # in numpy: torch takes -1 for 255 where labels are uint8
        raise HeadcountError(f"label {int(y[b])} of {_name(b, names)} is out of range; classes are 0 to {classes - 1}")
    label = torch.from_numpy(y.astype(np.int64))
    return one_hot(label.clamp_min(0), classes).float() * (label >= 0)[:, None]


def find_counts(votes: np.ndarray, sizes: np.ndarray) -> np.ndarray | None:
    """The votes (B, C) if they are counts: whole numbers; neither a single vote for each bag, which is a label, nor 100 for each,
    which are percentages unless all bags (B,) have that size."""
    n = votes.sum(1)
    labelled = n > 0
    percentages = (n[labelled] == 100).all() and (sizes[labelled] != 100).any()
    return votes if (votes == np.round(votes)).all() and (n > 1).any() and not percentages else None


def check_votes(given: Any, target: Tensor, names: Any) -> Tensor:
    """(B, C) float64 counts: whole numbers, and only for bags with a label."""
    votes = torch.from_numpy(_array("votes", given).astype(np.float64))
    if votes.shape != target.shape:
        raise HeadcountError(f"votes are one count per bag and class {tuple(target.shape)}, got shape {tuple(votes.shape)}")
    wrong = ~((votes >= 0) & (votes == votes.round()) & votes.isfinite()) | ((votes > 0) & (target.sum(1, keepdim=True) == 0))
    if (b := _first(wrong.any(1))) is not None:
        problem = f"votes of {_name(b, names)} are {votes[b].tolist()} with label {target[b].tolist()}"
        raise HeadcountError(f"{problem}; they are whole numbers >= 0, of bags that have a label")
    return votes


def check_per_instance(what: str, given: Any, instances: int) -> Tensor:
    try:
        v = given if isinstance(given, Tensor) else torch.as_tensor(np.asarray(given))
    except (TypeError, ValueError):
        raise HeadcountError(f"{what} must be numbers, one per instance, got {type(given).__name__}") from None
    if v.shape != (instances,):
        shape = tuple(v.shape)
        raise HeadcountError(f"{what} has shape {shape} for {instances} instances; give one value per instance")
    return v


def check_weights(given: Any, instances: int) -> Tensor:
    v = check_per_instance("weight", given, instances).float()
    if (row := _first(~(v >= 0) | ~torch.isfinite(v))) is not None:
        raise HeadcountError(f"instance {row} has weight {float(v[row])}; weights are finite and not negative")
    return v


def check_instance_labels(what: str, given: Any, instances: int, classes: int) -> Tensor:
    v = check_per_instance(what, given, instances)
    if v.is_floating_point() or v.is_complex():
        raise HeadcountError(f"{what} holds class numbers, got {v.dtype}; give whole numbers, -1 where unknown")
    v = v.long()
    if (row := _first((v < -1) | (v >= classes))) is not None:
        raise HeadcountError(f"{what} {int(v[row])} of instance {row} is out of range (0 to {classes - 1}, or -1)")
    return v


def check_counted(given: Any, classes: tuple[str, ...], target: Tensor, names: Any) -> Tensor:
    v = torch.as_tensor(np.asarray(given))
    if v.dtype != torch.bool or v.shape != (len(classes),) or int(v.sum()) < 2:
        raise HeadcountError(f"counted is one true or false per class ({len(classes)}), at least two true")
    if (b := _first((target[:, ~v] > 0).any(1))) is not None:
        label = classes[int(target[b].masked_fill(v, 0).argmax())]
        raise HeadcountError(f"{_name(b, names)} is labelled {label!r}, a class that is not counted")
    return v


def check_noise(given: Any) -> float:
    """The probability that a label was replaced; if every one was, the labels would say nothing."""
    return check_number("label_noise", given, 0, 0.99, integer=False)


def check_not_empty(total_weight: Tensor, names: Any) -> None:
    if (b := _first(total_weight == 0)) is not None:
        raise HeadcountError(f"{_name(b, names)} has no instance left to count; keep at least one")


def _array(what: str, given: Any) -> np.ndarray:
    try:
        return np.asarray(given.detach().cpu() if isinstance(given, Tensor) else given)
    except (TypeError, ValueError):
        raise HeadcountError(f"{what} must be a flat list of numbers, got {type(given).__name__}") from None


def _integers(what: str, given: Any) -> np.ndarray:
    a = _array(what, given)
    a = a if a.size else a.astype(np.int64)
    if a.ndim != 1 or a.dtype.kind not in "iu":
        raise HeadcountError(f"{what} must be a flat list of whole numbers, got {a.dtype} of shape {a.shape}")
    return a


def _first(mask: np.ndarray | Tensor) -> int | None:
    rows = mask.nonzero()[0] if isinstance(mask, np.ndarray) else mask.nonzero().flatten()
    return int(rows[0]) if len(rows) else None


def _name(bag: int, names: Any) -> str:
    return f"bag {bag} ({names[bag]})" if names is not None and bag < len(names) else f"bag {bag}"

"""From n input rows to bags: grouped without a loop, bags in order of first appearance, rows in their order inside."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from headcount.bags import Bags, Pool
from headcount.data.columns import Columns
from headcount.data.learned import Learned
from headcount.data.read.found import Asked, Found, said_alike, some
from headcount.data.read.targets import add_class, targets
from headcount.data.values import again
from headcount.errors import HeadcountError


@dataclass(frozen=True, eq=False)
class Reading:
    """What was read: N instances of ``inputs`` input rows, in B bags."""

    kind: str  # images, features, table or text
    columns: Columns  # how raw instances become numbers
    content: Any  # raw instances: an array (M, ...) or a pyarrow table of M rows
    laid: Bags  # the bags, over the content; for a table over a blank pool until the preparation is learned
    rows: np.ndarray  # (N,) input row of each instance, in the order of the bags
    inputs: int  # input rows, those left out included
    ids: pa.Table  # (inputs) the user's own columns, in input order: predictions join back here
    coords: np.ndarray | None  # (N, 2)
    tiles: np.ndarray | None  # (N,) side of the tile that stands at the coordinates, NaN where unknown
    described: list[str]  # what was understood, line by line
    skipped: list[str]  # with skip_bad: each file or row left out, and why
    fingerprint: str  # sha256 of what was read
    instances: str  # sha256 of the instances alone, whoever labels them

    @property
    def whose(self) -> str | None:
        """sha256 of the bags' names and sizes: the same bags in another format have the same; None if nobody named them."""
        names = self.laid.names or ()
        if names == tuple(map(str, range(len(names)))):
            return None
        said = sorted(zip(names, self.laid.sizes.tolist(), strict=True))
        return hashlib.sha256(json.dumps(said).encode("utf-8", "backslashreplace")).hexdigest()

    def learn(self, bags: Any = None) -> Learned:
        """The preparation, learned on the instances of these bags only (a list of numbers or a mask; None: all)."""
        if not self.columns.fields:
            return self.columns.learn(None)
        return self.columns.learn(self.content, (self.laid if bags is None else self.laid.take(bags)).index.numpy())

    def bags(self, learned: Learned | None = None) -> Bags:
        """The bags over their features. A table's or a text's preparation has to be learned first, on training bags."""
        if not self.columns.fields:
            return self.laid
        if learned is None:
            raise HeadcountError(
                "a table becomes features by what was learned: bags(learned=reading.learn(training_bags))"
            )
        return replace(self.laid, pool=Pool(learned.apply(self.content), trusted=True))

    def spread(self, values: Any, blank: Any) -> np.ndarray:
        """(N, ...) per instance -> (inputs, ...) per input row, ``blank`` for rows that were left out."""
        values = np.asarray(values)
        out = np.full((self.inputs, *values.shape[1:]), blank, dtype=values.dtype)
        out[self.rows] = values
        return out

    def __repr__(self) -> str:
        return (
            f"Reading({self.kind}: {len(self.laid)} bags, {len(self.rows)} instances, {len(self.laid.classes)} classes)"
        )


def as_read(given: Any) -> Reading:
    """What was read; anything else is somebody's data, and still to be read."""
    if not isinstance(given, Reading):
        raise HeadcountError(
            f"this takes what headcount.read gives, got {type(given).__name__}; read it first: read(data, ...)"
        )
    return given


def lay(found: Found, asked: Asked) -> Reading:
    """The common end of every reader."""
    listed, asked = asked.classes is not None, replace(asked, classes=asked.classes or found.classes)
    _fits(found, asked.learned)
    _has_use(found, asked)
    target, classes, tied = targets(found.said, asked, found.names, found.where)
    content, address = _kept(found)
    here = np.flatnonzero((found.bag >= 0) & ~np.append(tied, True)[found.bag])
    if not len(here):
        why = f": {asked.bad.said[0]}" if asked.bad.said else ""
        raise HeadcountError(f"{found.where} leaves no instance to read{why}")
    rows = here[np.argsort(found.bag[here], kind="stable")]
    held, sizes = np.unique(found.bag[rows], return_counts=True)  # bags that lost all their rows are gone
    notes = [*_unvoted(found, asked), *_left_out(found, target, tied, held)]
    notes += [] if listed else said_alike(classes)  # who lists them means them
    target = target[held]
    if asked.miss_labels(found.truth is not None and bool((found.truth[0] >= 0).any())) and not target.any():
        raise HeadcountError(f"{found.where}: no bag has a label ({found.said.source}); at least one is needed")
    extras = _extras(found, asked, rows, classes)
    group = found.group or found.said.group
    pool = _pool(content, found)
    try:
        laid = Bags.of(
            pool, index=address[rows], sizes=sizes, labels=target, classes=classes,
            names=[found.names[b] for b in held], group=None if group is None else [group[b] for b in held], **extras,
        )  # fmt: skip
    except HeadcountError as e:
        raise HeadcountError(f"{found.where}: {e}") from None
    return Reading(
        kind=found.kind, columns=found.columns, content=content, laid=laid, rows=rows, inputs=len(found.bag), ids=found.ids,
        coords=None if found.coords is None else found.coords[rows],
        tiles=None if found.tiles is None else found.tiles[rows],
        described=[found.how, *_described(laid, found, asked), *found.notes, *found.said.notes, *notes],
        skipped=asked.bad.said, fingerprint=_fingerprint(found, laid),
        instances=hashlib.sha256(f"{found.kind} {found.digest}".encode()).hexdigest(),
    )  # fmt: skip


def _left_out(found: Found, target: np.ndarray, tied: np.ndarray, held: np.ndarray) -> list[str]:
    """What to say of bags that lost their label, or themselves."""
    gone = ~tied
    gone[held] = False
    unknown = np.zeros(len(tied), bool) if found.said.code is None else (found.said.code >= 0) & ~target.any(1)
    why = {
        "have a label that is no class": unknown,  # only where labels are not needed
        "left out for a tie": tied,
        "left out, nothing in them could be read": gone,
    }
    return [
        f"{int(which.sum()):,} bags {said}: {some([found.names[b] for b in np.flatnonzero(which)])}"
        for said, which in why.items()
        if which.any()
    ]


def _unvoted(found: Found, asked: Asked) -> list[str]:
    """Classes that nobody could vote for: perhaps a column was forgotten."""
    lacks = [c for c in asked.classes or () if c not in (*found.said.values, *asked.uncounted)]
    return [f"no column of votes for {some(lacks)}: taken as none"] if lacks and found.said.votes is not None else []


def _has_use(found: Found, asked: Asked) -> None:
    if asked.side is not None and found.kind != "images":
        raise HeadcountError(f"side={asked.side} is for pictures, and {found.where} holds none; leave it out")
    if asked.tile is not None and found.coords is None:
        raise HeadcountError(f"tile={asked.tile:g} is for coordinates, and {found.where} has none; leave it out")


def _fits(found: Found, model: Learned | None) -> None:
    if model is not None and (found.kind != model.kind or (not model.fields and model.shape != found.columns.shape)):
        shape = f"{found.kind} of shape {found.columns.shape}"
        raise HeadcountError(f"{found.where} holds {shape}, the model takes {model.kind} of {model.shape}")
    if (twice := again(found.names)) is not None:
        raise HeadcountError(f"{found.where} has two bags called {twice!r}; give each its own name")


def _kept(found: Found) -> tuple[Any, np.ndarray]:
    """The content without the rows that were left out (they may hold anything), and (n,) where each row lies in it."""
    good = found.bag >= 0
    if found.checked or good.all():  # a mapped cache stays as it is: what it left out is zeros
        return found.content, np.arange(len(good)) if found.address is None else found.address
    content = found.content
    return content.filter(pa.array(good)) if isinstance(content, pa.Table) else content[good], np.cumsum(good) - 1


def _pool(content: Any, found: Found) -> Pool:
    if isinstance(content, pa.Table):  # stands in until there are features
        return Pool(np.broadcast_to(np.zeros((1, 1), np.float32), (content.num_rows, 1)))
    return Pool(content, trusted=found.checked)


def _extras(found: Found, asked: Asked, rows: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if found.weight is not None:
        extras["weight"] = found.weight[rows].astype(np.float32)
    if asked.uncounted:
        extras["counted"] = [c not in asked.uncounted for c in classes]
    for what in ("truth", "known"):
        if (given := getattr(found, what)) is not None:
            code, values = given
            to = np.array([classes.index(v) if v in classes else -2 for v in values] + [-1])[code]
            lost = np.flatnonzero((to == -2) & (found.bag >= 0))
            if len(lost) and asked.need_labels:
                word = values[code[lost[0]]]
                there = f"{', '.join(classes)}; {add_class(asked)}{'' if asked.learned else ' or uncounted='}"
                raise HeadcountError(f"{found.where} row {lost[0] + 1}: {what} {word!r} is none of the classes {there}")
            if len(lost):
                found.notes.append(f"{len(lost):,} instances have a {what} that is no class")
            extras[what] = np.maximum(to, -1)[rows]
    return extras


def _described(laid: Bags, found: Found, asked: Asked) -> list[str]:
    sizes = laid.sizes.numpy()
    said = [
        f"{len(laid):,} bags of {sizes.min():,} to {sizes.max():,} instances (median {np.median(sizes):,.0f}), "
        f"{len(laid.index):,} instances in all"
    ]
    label = laid.label.numpy()
    count = np.bincount(label[label >= 0], minlength=len(laid.classes))
    told = [f"{c} ({n:,} bag{'s' * (n != 1)})" for c, n in zip(laid.classes, count.tolist(), strict=True)]
    shown = ", ".join((told if count.any() else laid.classes)[:20])
    more = f" and {len(laid.classes) - 20} more" if len(laid.classes) > 20 else ""
    source = f"from {found.said.source}" if count.any() else "to choose from, no bag has a label"
    said.append(f"{len(laid.classes)} classes {source}: {shown}{more}")
    soft = int(((laid.target > 0).sum(1) > 1).sum())
    if soft:
        said.append(f"{soft:,} bags have a soft label")
    none = np.flatnonzero(label < 0)
    if 0 < len(none) < len(label):
        names = laid.names or ()
        have = "bag has" if len(none) == 1 else "bags have"
        said.append(f"{len(none):,} {have} no label: {some([names[b] for b in none], 4)}")
    if asked.uncounted:
        said.append(f"never counted: {', '.join(asked.uncounted)}")
    if laid.group is not None:
        said.append(f"{len(set(laid.group)):,} groups")
        lone = [name for name, group in zip(laid.names or (), laid.group, strict=False) if group == f"only {name}"]
        if lone:
            said.append(f"of these, {len(lone):,} for bags that name none, one each: {some(lone, 4)}")
    for what, there in (("truth, for scoring only", laid.truth), ("known class, as supervision", laid.known)):
        if there is not None:
            said.append(f"{int((there >= 0).sum()):,} instances have a {what}")
    return said


def _fingerprint(found: Found, laid: Bags) -> str:
    digest = hashlib.sha256(found.digest.encode())
    said = [found.kind, found.said.digest, laid.classes, laid.names, laid.group]
    digest.update(json.dumps(said).encode("utf-8", "backslashreplace"))
    for part in (laid.index, laid.offsets, laid.target, laid.weight, laid.known, laid.truth, laid.counted):
        digest.update(b"-" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

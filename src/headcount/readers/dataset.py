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
from headcount.errors import HeadcountError
from headcount.readers.columns import FeatureSchema
from headcount.readers.preprocessing import Preprocessor
from headcount.readers.raw_data import RawData, ReadOptions, preview, warn_similar_classes
from headcount.readers.targets import build_targets, class_hint
from headcount.readers.values import first_duplicate


@dataclass(frozen=True, eq=False)
class BagDataset:
    """What was read: N instances of ``inputs`` input rows, in B bags."""

    kind: str  # images, features, table or text
    schema: FeatureSchema  # how raw instances become numbers
    content: Any  # raw instances: an array (M, ...) or a pyarrow table of M rows
    bags: Bags  # the bags, over the content; for a table over a blank pool until the preparation is learned
    rows: np.ndarray  # (N,) input row of each instance, in the order of the bags
    n_rows: int  # input rows, those left out included
    ids: pa.Table  # (inputs) the user's own columns, in input order: predictions join back here
    coords: np.ndarray | None  # (N, 2)
    tile_sizes: np.ndarray | None  # (N,) side of the tile that stands at the coordinates, NaN where unknown
    description: list[str]  # what was understood, line by line
    skipped: list[str]  # with skip_bad: each file or row left out, and why
    fingerprint: str  # sha256 of what was read
    instances_hash: str  # sha256 of the instances alone, whoever labels them

    def fit_preprocessor(self, bags: Any = None) -> Preprocessor:
        """The preparation, learned on the instances of these bags only (a list of numbers or a mask; None: all)."""
        if not self.schema.fields:
            return self.schema.fit(None)
        return self.schema.fit(self.content, (self.bags if bags is None else self.bags.take(bags)).index.numpy())

    def to_bags(self, preprocessor: Preprocessor | None = None) -> Bags:
        """The bags over their features. A table's or a text's preparation has to be learned first, on training bags."""
        if not self.schema.fields:
            return self.bags
        if preprocessor is None:
            raise HeadcountError(
                "a table becomes features by what was learned: bags(learned=reading.learn(training_bags))"
            )
        return replace(self.bags, pool=Pool(preprocessor.transform(self.content), trusted=True))

    def broadcast(self, values: Any, blank: Any) -> np.ndarray:
        """(N, ...) per instance -> (inputs, ...) per input row, ``blank`` for rows that were left out."""
        values = np.asarray(values)
        out = np.full((self.n_rows, *values.shape[1:]), blank, dtype=values.dtype)
        out[self.rows] = values
        return out

    def __repr__(self) -> str:
        return (
            f"Reading({self.kind}: {len(self.bags)} bags, {len(self.rows)} instances, {len(self.bags.classes)} classes)"
        )


def check_dataset(dataset: Any) -> BagDataset:
    """What was read; anything else is somebody's data, and still to be read."""
    if not isinstance(dataset, BagDataset):
        raise HeadcountError(
            f"this takes what headcount.read gives, got {type(dataset).__name__}; read it first: read(data, ...)"
        )
    return dataset


def assemble(raw: RawData, options: ReadOptions) -> BagDataset:
    """The common end of every reader."""
    classes_given, options = options.classes is not None, replace(options, classes=options.classes or raw.classes)
    _check_fits_model(raw, options.preprocessor)
    _check_options_used(raw, options)
    target, classes, tied = build_targets(raw.labels, options, raw.names, raw.origin)
    content, address = _drop_excluded_rows(raw)
    kept_rows = np.flatnonzero((raw.bag >= 0) & ~np.append(tied, True)[raw.bag])
    if not len(kept_rows):
        why = f": {options.errors.messages[0]}" if options.errors.messages else ""
        raise HeadcountError(f"{raw.origin} leaves no instance to read{why}")
    rows = kept_rows[np.argsort(raw.bag[kept_rows], kind="stable")]
    kept_bags, sizes = np.unique(raw.bag[rows], return_counts=True)  # bags that lost all their rows are gone
    notes = [*_classes_without_votes(raw, options), *_dropped_bags(raw, target, tied, kept_bags)]
    notes += [] if classes_given else warn_similar_classes(classes)  # who lists them means them
    target = target[kept_bags]
    if options.requires_labels(raw.truth is not None and bool((raw.truth[0] >= 0).any())) and not target.any():
        raise HeadcountError(f"{raw.origin}: no bag has a label ({raw.labels.source}); at least one is needed")
    extras = _extras(raw, options, rows, classes)
    group = raw.group or raw.labels.group
    pool = _pool(content, raw)
    try:
        bags = Bags.of(
            pool, index=address[rows], sizes=sizes, labels=target, classes=classes,
            names=[raw.names[b] for b in kept_bags], group=None if group is None else [group[b] for b in kept_bags], **extras,
        )  # fmt: skip
    except HeadcountError as e:
        raise HeadcountError(f"{raw.origin}: {e}") from None
    return BagDataset(
        kind=raw.kind, schema=raw.schema, content=content, bags=bags, rows=rows, n_rows=len(raw.bag), ids=raw.ids,
        coords=None if raw.coords is None else raw.coords[rows],
        tile_sizes=None if raw.tile_sizes is None else raw.tile_sizes[rows],
        description=[raw.summary, *_describe(bags, raw, options), *raw.notes, *raw.labels.notes, *notes],
        skipped=options.errors.messages, fingerprint=_fingerprint(raw, bags),
        instances_hash=hashlib.sha256(f"{raw.kind} {raw.digest}".encode()).hexdigest(),
    )  # fmt: skip


def _dropped_bags(raw: RawData, target: np.ndarray, tied: np.ndarray, kept_bags: np.ndarray) -> list[str]:
    """What to say of bags that lost their label, or themselves."""
    unreadable = ~tied
    unreadable[kept_bags] = False
    unknown = np.zeros(len(tied), bool) if raw.labels.codes is None else (raw.labels.codes >= 0) & ~target.any(1)
    why = {
        "have a label that is no class": unknown,  # only where labels are not needed
        "left out for a tie": tied,
        "left out, nothing in them could be read": unreadable,
    }
    return [
        f"{int(which.sum()):,} bags {said}: {preview([raw.names[b] for b in np.flatnonzero(which)])}"
        for said, which in why.items()
        if which.any()
    ]


def _classes_without_votes(raw: RawData, options: ReadOptions) -> list[str]:
    """Classes that nobody could vote for: perhaps a column was forgotten."""
    lacks = [c for c in options.classes or () if c not in (*raw.labels.values, *options.uncounted)]
    return [f"no column of votes for {preview(lacks)}: taken as none"] if lacks and raw.labels.votes is not None else []


def _check_options_used(raw: RawData, options: ReadOptions) -> None:
    if options.side is not None and raw.kind != "images":
        raise HeadcountError(f"side={options.side} is for pictures, and {raw.origin} holds none; leave it out")
    if options.tile is not None and raw.coords is None:
        raise HeadcountError(f"tile={options.tile:g} is for coordinates, and {raw.origin} has none; leave it out")


def _check_fits_model(raw: RawData, preprocessor: Preprocessor | None) -> None:
    if preprocessor is not None and (
        raw.kind != preprocessor.kind or (not preprocessor.fields and preprocessor.shape != raw.schema.shape)
    ):
        shape = f"{raw.kind} of shape {raw.schema.shape}"
        raise HeadcountError(f"{raw.origin} holds {shape}, the model takes {preprocessor.kind} of {preprocessor.shape}")
    if (twice := first_duplicate(raw.names)) is not None:
        raise HeadcountError(f"{raw.origin} has two bags called {twice!r}; give each its own name")


def _drop_excluded_rows(raw: RawData) -> tuple[Any, np.ndarray]:
    """The content without the rows that were left out (they may hold anything), and (n,) where each row lies in it."""
    good = raw.bag >= 0
    if raw.all_finite or good.all():  # a mapped cache stays as it is: what it left out is zeros
        return raw.content, np.arange(len(good)) if raw.address is None else raw.address
    content = raw.content
    return content.filter(pa.array(good)) if isinstance(content, pa.Table) else content[good], np.cumsum(good) - 1


def _pool(content: Any, raw: RawData) -> Pool:
    if isinstance(content, pa.Table):  # stands in until there are features
        return Pool(np.broadcast_to(np.zeros((1, 1), np.float32), (content.num_rows, 1)))
    return Pool(content, trusted=raw.all_finite)


def _extras(raw: RawData, options: ReadOptions, rows: np.ndarray, classes: Sequence[str]) -> dict[str, Any]:
    extras: dict[str, Any] = {}
    if raw.weight is not None:
        extras["weight"] = raw.weight[rows].astype(np.float32)
    if options.uncounted:
        extras["counted"] = [c not in options.uncounted for c in classes]
    for what in ("truth", "known"):
        if (given := getattr(raw, what)) is not None:
            code, values = given
            to = np.array([classes.index(v) if v in classes else -2 for v in values] + [-1])[code]
            lost = np.flatnonzero((to == -2) & (raw.bag >= 0))
            if len(lost) and options.need_labels:
                word = values[code[lost[0]]]
                there = f"{', '.join(classes)}; {class_hint(options)}{'' if options.preprocessor else ' or uncounted='}"
                raise HeadcountError(f"{raw.origin} row {lost[0] + 1}: {what} {word!r} is none of the classes {there}")
            if len(lost):
                raw.notes.append(f"{len(lost):,} instances have a {what} that is no class")
            extras[what] = np.maximum(to, -1)[rows]
    return extras


def _describe(bags: Bags, raw: RawData, options: ReadOptions) -> list[str]:
    sizes = bags.sizes.numpy()
    lines = [
        f"{len(bags):,} bags of {sizes.min():,} to {sizes.max():,} instances (median {np.median(sizes):,.0f}), "
        f"{len(bags.index):,} instances in all"
    ]
    label = bags.label.numpy()
    count = np.bincount(label[label >= 0], minlength=len(bags.classes))
    class_counts = [f"{c} ({n:,} bag{'s' * (n != 1)})" for c, n in zip(bags.classes, count.tolist(), strict=True)]
    shown = ", ".join((class_counts if count.any() else bags.classes)[:20])
    more = f" and {len(bags.classes) - 20} more" if len(bags.classes) > 20 else ""
    source = f"from {raw.labels.source}" if count.any() else "to choose from, no bag has a label"
    lines.append(f"{len(bags.classes)} classes {source}: {shown}{more}")
    soft = int(((bags.target > 0).sum(1) > 1).sum())
    if soft:
        lines.append(f"{soft:,} bags have a soft label")
    none = np.flatnonzero(label < 0)
    if 0 < len(none) < len(label):
        names = bags.names or ()
        have = "bag has" if len(none) == 1 else "bags have"
        lines.append(f"{len(none):,} {have} no label: {preview([names[b] for b in none], 4)}")
    if options.uncounted:
        lines.append(f"never counted: {', '.join(options.uncounted)}")
    if bags.group is not None:
        lines.append(f"{len(set(bags.group)):,} groups")
        lone = [name for name, group in zip(bags.names or (), bags.group, strict=False) if group == f"only {name}"]
        if lone:
            lines.append(f"of these, {len(lone):,} for bags that name none, one each: {preview(lone, 4)}")
    for what, there in (("truth, for scoring only", bags.truth), ("known class, as supervision", bags.known)):
        if there is not None:
            lines.append(f"{int((there >= 0).sum()):,} instances have a {what}")
    return lines


def _fingerprint(raw: RawData, bags: Bags) -> str:
    digest = hashlib.sha256(raw.digest.encode())
    metadata = [raw.kind, raw.labels.digest, bags.classes, bags.names, bags.group]
    digest.update(json.dumps(metadata).encode("utf-8", "backslashreplace"))
    for part in (bags.index, bags.offsets, bags.target, bags.weight, bags.known, bags.truth, bags.counted):
        digest.update(b"-" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

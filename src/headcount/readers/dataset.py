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
from headcount.readers.preprocessing import FeatureSchema, Preprocessor
from headcount.readers.raw_data import RawData, ReadOptions, note_similar_classes
from headcount.readers.targets import build_targets, class_advice
from headcount.readers.values import first_duplicate, preview


@dataclass(frozen=True, eq=False)
class BagDataset:
    """What :func:`headcount.read` returns: N instances in B bags, from ``n_rows`` input rows.

    Parameters
    ----------
    kind
        images, features, table or text.
    schema
        How raw instances become numbers.
    content
        Raw instances: an array (M, ...) or a pyarrow table of M rows.
    bags
        The bags over the content; those of a table hold no features yet, see :meth:`to_bags`.
    rows
        (N,) the input row of each instance, in the order of the bags.
    n_rows
        Input rows, including those that were left out.
    ids
        The user's own columns, one row per input row: predictions are joined to them.
    coords, tile_sizes
        (N, 2) coordinates, and (N,) the side of the tile at the coordinates, NaN where unknown.
    description
        What was understood, line by line.
    skipped
        With ``skip_bad``: each file or row that was left out, and why.
    fingerprint, instances_hash
        sha256 of all that was read, and of the instances without their labels.
    """

    kind: str
    schema: FeatureSchema
    content: Any
    bags: Bags
    rows: np.ndarray
    n_rows: int
    ids: pa.Table
    coords: np.ndarray | None
    tile_sizes: np.ndarray | None
    description: list[str]
    skipped: list[str]
    fingerprint: str
    instances_hash: str

    def fit_preprocessor(self, bags: Any = None) -> Preprocessor:
        """Fit the preprocessing to the instances of these bags only (a list of numbers or a mask; None: all)."""
        if not self.schema.fields:
            return self.schema.fit(None)
        return self.schema.fit(self.content, (self.bags if bags is None else self.bags.take(bags)).index.numpy())

    def to_bags(self, preprocessor: Preprocessor | None = None) -> Bags:
        """The bags over their features. Tables and texts need a preprocessor, fitted to training bags."""
        if not self.schema.fields:
            return self.bags
        if preprocessor is None:
            advice = "to_bags(dataset.fit_preprocessor(training_bags))"
            raise HeadcountError(f"a {self.kind} becomes features by a fitted preprocessor: {advice}")
        return replace(self.bags, pool=Pool(preprocessor.transform(self.content), trusted=True))

    def broadcast(self, values: Any, blank: Any) -> np.ndarray:
        """(N, ...) per instance -> (n_rows, ...) per input row, ``blank`` for rows that were left out."""
        values = np.asarray(values)
        out = np.full((self.n_rows, *values.shape[1:]), blank, dtype=values.dtype)
        out[self.rows] = values
        return out

    def __repr__(self) -> str:
        counts = f"{len(self.bags)} bags, {len(self.rows)} instances, {len(self.bags.classes)} classes"
        return f"BagDataset({self.kind}: {counts})"


def check_dataset(dataset: Any) -> BagDataset:
    """Refuse data that have not been read."""
    if not isinstance(dataset, BagDataset):
        problem = f"this takes what headcount.read returns, got {type(dataset).__name__}"
        raise HeadcountError(f"{problem}; read it first: read(data, ...)")
    return dataset


def assemble(raw: RawData, options: ReadOptions) -> BagDataset:
    """The last step of every reader."""
    classes_given, options = options.classes is not None, replace(options, classes=options.classes or raw.classes)
    _check_fits_model(raw, options.preprocessor)
    _check_options_used(raw, options)
    target, classes, tied = build_targets(raw.labels, options, raw.names, raw.origin)
    content, address = _without_excluded_rows(raw)
    included = np.flatnonzero((raw.bag >= 0) & ~np.append(tied, True)[raw.bag])
    if not len(included):
        why = f": {options.errors.messages[0]}" if options.errors.messages else ""
        raise HeadcountError(f"{raw.origin} leaves no instance to read{why}")
    rows = included[np.argsort(raw.bag[included], kind="stable")]
    kept, sizes = np.unique(raw.bag[rows], return_counts=True)  # bags that have any row left
    notes = [*_note_missing_votes(raw, options), *_note_dropped_bags(raw, target, tied, kept)]
    notes += [] if classes_given else note_similar_classes(classes)  # a user who lists them knows
    target = target[kept]
    has_truth = raw.truth is not None and bool((raw.truth[0] >= 0).any())
    if options.requires_labels(has_truth) and not target.any():
        raise HeadcountError(f"{raw.origin}: no bag has a label ({raw.labels.source}); at least one is needed")
    group = raw.group or raw.labels.group
    codes = {"truth": _class_codes(raw, raw.truth, "truth", options, classes)}
    codes["known"] = _class_codes(raw, raw.known, "known", options, classes)
    try:
        bags = Bags.of(
            _pool(content, raw), index=address[rows], sizes=sizes, labels=target, classes=classes,
            names=[raw.names[b] for b in kept], group=None if group is None else [group[b] for b in kept],
            weight=None if raw.weight is None else raw.weight[rows].astype(np.float32),
            counted=[c not in options.uncounted for c in classes] if options.uncounted else None,
            **{key: code[rows] for key, code in codes.items() if code is not None},
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


def _check_fits_model(raw: RawData, model: Preprocessor | None) -> None:
    if model is not None and (raw.kind != model.kind or (not model.fields and model.shape != raw.schema.shape)):
        held = f"{raw.kind} of shape {raw.schema.shape}"
        raise HeadcountError(f"{raw.origin} holds {held}, the model takes {model.kind} of {model.shape}")
    if (duplicate := first_duplicate(raw.names)) is not None:
        raise HeadcountError(f"{raw.origin} has two bags called {duplicate!r}; give each its own name")


def _check_options_used(raw: RawData, options: ReadOptions) -> None:
    if options.side is not None and raw.kind != "images":
        raise HeadcountError(f"side={options.side} is for images, and {raw.origin} holds none; leave it out")
    if options.tile is not None and raw.coords is None:
        raise HeadcountError(f"tile={options.tile:g} is for coordinates, and {raw.origin} has none; leave it out")


def _without_excluded_rows(raw: RawData) -> tuple[Any, np.ndarray]:
    """The content without excluded rows, which may hold anything, and (n,) the position of each row in it."""
    included = raw.bag >= 0
    if raw.all_finite or included.all():  # a mapped cache stays as it is: excluded rows are zeros there
        return raw.content, np.arange(len(included)) if raw.address is None else raw.address
    is_table = isinstance(raw.content, pa.Table)
    content = raw.content.filter(pa.array(included)) if is_table else raw.content[included]
    return content, np.cumsum(included) - 1


def _pool(content: Any, raw: RawData) -> Pool:
    if isinstance(content, pa.Table):  # blank until there are features
        return Pool(np.broadcast_to(np.zeros((1, 1), np.float32), (content.num_rows, 1)))
    return Pool(content, trusted=raw.all_finite)


def _class_codes(
    raw: RawData, given: tuple[np.ndarray, list[str]] | None, key: str, options: ReadOptions, classes: Sequence[str]
) -> np.ndarray | None:
    """(n,) class numbers of instances, -1 where unknown."""
    if given is None:
        return None
    codes, values = given
    numbers = np.array([classes.index(v) if v in classes else -2 for v in values] + [-1])[codes]
    invalid = np.flatnonzero((numbers == -2) & (raw.bag >= 0))
    if len(invalid) and options.need_labels:
        value = values[codes[invalid[0]]]
        advice = f"{class_advice(options)}{'' if options.preprocessor else ' or uncounted='}"
        problem = f"{key} {value!r} is none of the classes {', '.join(classes)}"
        raise HeadcountError(f"{raw.origin} row {invalid[0] + 1}: {problem}; {advice}")
    if len(invalid):
        raw.notes.append(f"{len(invalid):,} instances have a {key} that is no class")
    return np.maximum(numbers, -1)


# -- what was understood --------------------------------------------------------------------------------------------------


def _note_dropped_bags(raw: RawData, target: np.ndarray, tied: np.ndarray, kept: np.ndarray) -> list[str]:
    """Lines on bags that lost their label, or all their instances."""
    unreadable = ~tied
    unreadable[kept] = False
    unknown = np.zeros(len(tied), bool) if raw.labels.codes is None else (raw.labels.codes >= 0) & ~target.any(1)
    reasons = {
        "have a label that is no class": unknown,  # possible only where labels are not needed
        "left out for a tie": tied,
        "left out, nothing in them could be read": unreadable,
    }
    return [
        f"{int(mask.sum()):,} bags {reason}: {preview([raw.names[b] for b in np.flatnonzero(mask)])}"
        for reason, mask in reasons.items()
        if mask.any()
    ]


def _note_missing_votes(raw: RawData, options: ReadOptions) -> list[str]:
    """A line on classes without a column of votes: perhaps one was forgotten."""
    missing = [c for c in options.classes or () if c not in (*raw.labels.values, *options.uncounted)]
    has_votes = raw.labels.votes is not None
    return [f"no column of votes for {preview(missing)}: taken as none"] if missing and has_votes else []


def _describe(bags: Bags, raw: RawData, options: ReadOptions) -> list[str]:
    sizes, label, names = bags.sizes.numpy(), bags.label.numpy(), bags.names or ()
    lines = [
        f"{len(bags):,} bags of {sizes.min():,} to {sizes.max():,} instances (median {np.median(sizes):,.0f}), "
        f"{len(bags.index):,} instances in all"
    ]
    count = np.bincount(label[label >= 0], minlength=len(bags.classes))
    counted = [f"{c} ({n:,} bag{'s' * (n != 1)})" for c, n in zip(bags.classes, count.tolist(), strict=True)]
    shown = ", ".join((counted if count.any() else bags.classes)[:20])
    more = f" and {len(bags.classes) - 20} more" if len(bags.classes) > 20 else ""
    source = f"from {raw.labels.source}" if count.any() else "to choose from, no bag has a label"
    lines.append(f"{len(bags.classes)} classes {source}: {shown}{more}")
    if soft := int(((bags.target > 0).sum(1) > 1).sum()):
        lines.append(f"{soft:,} bags have a soft label")
    unlabelled = np.flatnonzero(label < 0)
    if 0 < len(unlabelled) < len(label):
        have = "bag has" if len(unlabelled) == 1 else "bags have"
        lines.append(f"{len(unlabelled):,} {have} no label: {preview([names[b] for b in unlabelled], 4)}")
    if options.uncounted:
        lines.append(f"never counted: {', '.join(options.uncounted)}")
    if bags.group is not None:
        lines.append(f"{len(set(bags.group)):,} groups")
        alone = [name for name, group in zip(names, bags.group, strict=False) if group == f"only {name}"]
        if alone:
            lines.append(f"of these, {len(alone):,} for bags that name none, one each: {preview(alone, 4)}")
    for what, classes in (("truth, for scoring only", bags.truth), ("known class, as supervision", bags.known)):
        if classes is not None:
            lines.append(f"{int((classes >= 0).sum()):,} instances have a {what}")
    return lines


def _fingerprint(raw: RawData, bags: Bags) -> str:
    digest = hashlib.sha256(raw.digest.encode())
    metadata = [raw.kind, raw.labels.digest, bags.classes, bags.names, bags.group]
    digest.update(json.dumps(metadata).encode("utf-8", "backslashreplace"))
    for part in (bags.index, bags.offsets, bags.target, bags.weight, bags.known, bags.truth, bags.counted):
        digest.update(b"-" if part is None else part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

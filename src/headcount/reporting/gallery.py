"""A few test bags, looked at one by one: every instance with its picture, what was said of it, and how surely.

The bags are the one said best, the one in the middle and the one said worst. Votes for one class stand together, the bag's
own class first, so that the count can be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from headcount.datasets import registry
from headcount.datasets.registry import Source
from headcount.errors import HeadcountError
from headcount.experiments.records import Record
from headcount.reporting.instance_view import picture_uri

LoadSource = Callable[[str], Source]
_SHOWN = 64  # instances of a bag; the paper's bags are that large
_SIDE = 64  # pixels of a picture in the page; larger ones are scaled down
_NEEDED = ("test_index", "test_offsets", "test_label", "test_bag_said", "test_truth", "test_said", "test_confidence")


@dataclass(frozen=True)
class GalleryInstance:
    """One instance: what was said, how surely, and the truth where it is known."""

    predicted: str
    confidence: str
    truth: str
    wrong: bool
    picture: str  # a data URI, or empty for features


@dataclass(frozen=True)
class GalleryVotes:
    """The instances of a bag that were said to be of one class."""

    name: str
    count: int
    instances: tuple[GalleryInstance, ...]


@dataclass(frozen=True)
class GalleryBag:
    """One bag as the page shows it."""

    rank: str
    number: int
    label: str
    predicted: str
    correct: bool
    size: int
    shown: int
    n_correct: int
    n_known: int
    true_share: float
    predicted_share: float
    votes: tuple[GalleryVotes, ...]


@dataclass(frozen=True)
class Gallery:
    """The bags of one record, or the one line that says why there are none."""

    method: str
    fold: int
    key: str
    kind: str
    tile: int  # the width of a picture on the page: a whole multiple of its pixels, if it is small
    pixelated: bool  # small pictures show their pixels
    bags: tuple[GalleryBag, ...]
    missing_reason: str = ""


def cached_source(name: str) -> Source:
    """A source that is already here: a report must not start a download."""
    if name in registry.SOURCES and not registry.is_available(name):
        raise HeadcountError(f"{name} is not prepared here")
    return registry.load_source(name)


def build_gallery(
    record: Record, method: str, load_source: LoadSource = cached_source, budget: int = 1 << 20
) -> Gallery:
    """Three test bags of a record in at most ``budget`` bytes of pictures; it explains itself rather than fail."""
    nothing = Gallery(method, record.recipe.fold, record.key, "", 0, False, ())
    arrays = record.arrays()
    if any(name not in arrays for name in _NEEDED):
        return replace(nothing, missing_reason="the run's arrays were not kept beside its record")
    try:
        source = load_source(record.recipe.source)
    except (HeadcountError, OSError) as e:
        return replace(nothing, missing_reason=str(e))
    if source.checksum != record.data["data"]["checksum"]:
        return replace(
            nothing,
            missing_reason=f"the {record.recipe.source} found here is not the one the run saw (checksums differ)",
        )
    for colours in (0, 128, 32):  # fewer colours a picture before fewer bags
        bags = tuple(_bag_view(rank, i, arrays, source, colours) for rank, i in _picked(arrays))
        if sum(len(t.picture) for b in bags for v in b.votes for t in v.instances) <= budget:
            side = max(source.data.shape[1:3]) if source.kind == "images" else _SIDE
            tile = side * max(1, round(56 / side)) if side < 48 else 64
            return replace(nothing, kind=source.kind, tile=tile, pixelated=side < 48, bags=bags)
    return replace(
        nothing, missing_reason="its pictures would make the page too heavy; report on fewer records at a time"
    )


def _picked(arrays: dict[str, np.ndarray]) -> Iterator[tuple[str, int]]:
    """The bags with the most, the median and the fewest instances said right, by share; fewer if there are fewer bags."""
    offsets, truth = arrays["test_offsets"], arrays["test_truth"]
    bag = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    known = np.bincount(bag[truth >= 0], minlength=len(offsets) - 1)
    hits = np.bincount(bag[(truth == arrays["test_said"]) & (truth >= 0)], minlength=len(offsets) - 1)
    order = np.argsort(-hits / np.maximum(known, 1), kind="stable")
    spots = {0: "Best read", len(order) // 2: "In the middle", len(order) - 1: "Worst read"}
    return ((rank, int(order[i])) for i, rank in sorted(spots.items()))


def _bag_view(rank: str, i: int, arrays: dict[str, np.ndarray], source: Source, colours: int) -> GalleryBag:
    here = slice(int(arrays["test_offsets"][i]), int(arrays["test_offsets"][i + 1]))
    truth, said = arrays["test_truth"][here].astype(int), arrays["test_said"][here].astype(int)
    label, bag_said = int(arrays["test_label"][i]), int(arrays["test_bag_said"][i])
    known = int((truth >= 0).sum())
    return GalleryBag(
        rank=rank,
        number=i,
        label=_name(source, label),
        predicted=_name(source, bag_said),
        correct=bag_said == label,
        size=len(said),
        shown=min(len(said), _SHOWN),
        n_correct=int(((said == truth) & (truth >= 0)).sum()),
        n_known=known,
        true_share=float((truth == label).sum() / max(known, 1)),
        predicted_share=float((said == label).mean()),
        votes=tuple(_votes(arrays, here, label, source, colours)),
    )


def _votes(
    arrays: dict[str, np.ndarray], here: slice, label: int, source: Source, colours: int
) -> Iterator[GalleryVotes]:
    """The bag's class first, then by votes; inside, the surest first."""
    said, sure = arrays["test_said"][here].astype(int), arrays["test_confidence"][here]
    counts = np.bincount(said, minlength=len(source.classes))
    shown = np.arange(len(said)) < _SHOWN
    for k in sorted(np.flatnonzero(counts), key=lambda k: (k != label, -counts[k], k)):
        members = np.flatnonzero((said == k) & shown)
        tiles = (
            _tile(arrays, here.start + j, source, colours) for j in members[np.argsort(-sure[members], kind="stable")]
        )
        yield GalleryVotes(_name(source, int(k)), int(counts[k]), tuple(tiles))


def _tile(arrays: dict[str, np.ndarray], j: int, source: Source, colours: int) -> GalleryInstance:
    said, truth = int(arrays["test_said"][j]), int(arrays["test_truth"][j])
    picture = picture_uri(source.data[int(arrays["test_index"][j])], _SIDE, colours) if source.kind == "images" else ""
    confidence = f"{100 * float(arrays['test_confidence'][j]):.0f} %"
    return GalleryInstance(_name(source, said), confidence, _name(source, truth), truth >= 0 and said != truth, picture)


def _name(source: Source, k: int) -> str:
    return source.classes[k] if 0 <= k < len(source.classes) else "unknown"

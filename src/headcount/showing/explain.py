"""Why a bag has its label, and what a class looks like to the model: one page, readable offline.

An instance's *vote* for a class is its part of the mean of the bag's probabilities: the votes of a class add up to that mean.
The *share* is another number, the one ``predict --bags`` writes: what the instances make likely together
(:meth:`Fitted.shares`), which is that mean only for a model that does not know how alike bags are.

Typical instances of a class are the surest of it, doubtful ones those whose two likeliest classes are closest.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from headcount.data.read import Reading
from headcount.errors import HeadcountError
from headcount.judging import metrics
from headcount.judging.answers import Said
from headcount.showing.looks import Look, look
from headcount.showing.pages import page

_BAGS = 6  # shown when none is named
_VOTERS = 12
_EACH = 12  # typical and doubtful instances of a class
_CLASSES = 40


class Voter(NamedTuple):
    look: Look
    said: str
    sure: float
    vote: float  # its part of the mean probability of the class it stands under


class Share(NamedTuple):
    name: str
    share: float
    low: float
    high: float
    chance: float  # of being the majority


@dataclass(frozen=True)
class BagView:
    name: str
    size: int
    label: str  # as given, all winners of a tie, or nothing
    said: str
    right: bool
    chance: float
    shares: tuple[Share, ...]
    own: tuple[Voter, ...]  # the strongest votes for what was said
    voted: float  # all votes for what was said: the mean of its probabilities
    carried: float  # the part of them that these carry
    rival: str
    against: tuple[Voter, ...]


class ClassView(NamedTuple):
    name: str
    count: int
    typical: tuple[Voter, ...]
    doubtful: tuple[Voter, ...]


def named_bags(reading: Reading, named: Sequence[str]) -> list[int]:
    """The bags of these names; a name that is not there is refused."""
    place = {name: b for b, name in enumerate(reading.laid.names or ())}
    for name in named:
        if name not in place:
            near = difflib.get_close_matches(name, list(place), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"the first is {next(iter(place))!r}"
            raise HeadcountError(f"no bag {name!r} among {len(place):,}; {hint}")
    return [place[name] for name in dict.fromkeys(named)]


def worth_a_look(reading: Reading, said: Said) -> list[int]:
    """A few bags: said otherwise than labelled first, then the least sure."""
    target = reading.laid.target.numpy()
    wrong = target.any(1) & ~metrics.right_bags(target, said.bag_said)
    return np.lexsort((said.bag.max(1), ~wrong))[:_BAGS].tolist()


def explained(reading: Reading, said: Said, bags: Sequence[int], title: str, model: str) -> str:
    """The page about these bags, or about a few if none is named."""
    label = reading.laid.label.numpy()
    count = np.bincount(said.said, minlength=len(said.classes))
    shown = np.argsort(-count, kind="stable")[:_CLASSES]
    return page(
        "explain.html",
        title=title,
        model=model,
        bags=[_bag(reading, said, b) for b in bags or worth_a_look(reading, said)],
        classes=[_class(reading, said, int(k), int(count[k])) for k in sorted(shown.tolist())],
        hidden=len(said.classes) - len(shown),
        counts={"bags": len(label), "instances": len(reading.rows), "labelled": int((label >= 0).sum())},
        named=bool(bags),
    )


def _bag(reading: Reading, said: Said, b: int) -> BagView:
    laid = reading.laid
    ends = laid.offsets
    here = np.arange(int(ends[b]), int(ends[b + 1]))
    weight = np.ones(len(here)) if laid.weight is None else laid.weight[here].numpy().astype(float)
    vote = said.p[here] * (weight / max(weight.sum(), 1e-12))[:, None]  # (n, C): adds up to the mean
    order = np.argsort(-said.bag[b], kind="stable")
    won, rival = int(order[0]), int(order[1])
    (label,) = laid.take([b]).winners
    best, worst = (np.argsort(-vote[:, k], kind="stable")[:_VOTERS] for k in (won, rival))
    voters = lambda which, k: tuple(_voter(reading, said, int(here[j]), float(vote[j, k])) for j in which)  # noqa: E731
    return BagView(
        name=(laid.names or ())[b],
        size=len(here),
        label=label or "",
        said=said.classes[won],
        right=bool(metrics.right_bags(laid.target[b : b + 1].numpy(), order[:1])[0]),
        chance=float(said.bag[b, won]),
        shares=tuple(
            Share(said.classes[k], *(float(a[b, k]) for a in (said.share, said.low, said.high, said.bag)))
            for k in np.argsort(-said.share[b], kind="stable")[:8].tolist()
        ),
        own=voters(best, won),
        voted=float(vote[:, won].sum()),
        carried=float(vote[best, won].sum() / max(vote[:, won].sum(), 1e-12)),
        rival=said.classes[rival],
        against=voters([j for j in worst if said.p[here[j]].argmax() != won], rival),
    )


def _voter(reading: Reading, said: Said, i: int, vote: float) -> Voter:
    k = int(said.p[i].argmax())
    return Voter(look(reading, i), said.classes[k], float(said.p[i, k]), vote)


def _class(reading: Reading, said: Said, k: int, count: int) -> ClassView:
    mine = np.flatnonzero(said.said == k)
    p = said.p[mine]
    two = np.partition(p, -2, axis=1)[:, -2] if len(mine) else np.zeros(0)
    typical = mine[np.argsort(-p[:, k], kind="stable")[:_EACH]]
    doubtful = mine[np.argsort(p[:, k] - two, kind="stable")[:_EACH]]
    views = lambda which: tuple(_voter(reading, said, int(i), 0.0) for i in which)  # noqa: E731
    return ClassView(said.classes[k], count, views(typical), views(doubtful))

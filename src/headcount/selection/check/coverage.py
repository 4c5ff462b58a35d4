"""Coverage: who wins how many bags, and how the bags are. Counted from bags and labels; no truth, no features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headcount.bags import Bags
from headcount.inference.evaluate import has_votes
from headcount.majority import transition_em


@dataclass(frozen=True)
class Coverage:
    """What the bags are. ``won`` counts a tied bag for the first of its winners."""

    classes: tuple[str, ...]
    won: tuple[int, ...]  # bags of each class
    won_weight: tuple[float, ...]  # the same with votes and ties shared out
    never_win: tuple[str, ...]  # classes that could win a bag and never do
    counted: tuple[bool, ...]  # classes that can win
    bags: int
    labelled: int
    tied: int
    votes: bool  # labels are shares
    instances: int
    sizes: tuple[int, float, int]  # least, median, most
    effective_size: float  # at which bags filled by lot lean as these would (majority/transition_em.py)
    singles: int  # bags of one instance
    known: int  # instances whose class is given as supervision
    groups: int | None
    single_group: tuple[str, ...]  # classes won in one group only, where there are several

    @classmethod
    def from_bags(cls, bags: Bags) -> Coverage:
        target, label, sizes = bags.target.numpy(), bags.label.numpy(), bags.sizes.numpy()
        top = target.max(1)
        crown = (target >= top[:, None] - 1e-6) & (top > 0)[:, None]
        tied = crown.sum(1) > 1
        counted = (True,) * len(bags.classes) if bags.counted is None else tuple(bags.counted.tolist())
        groups = None if bags.group is None else np.array(bags.group)
        many = groups is not None and len(set(bags.group or ())) > 1
        lone = (
            c
            for k, c in enumerate(bags.classes)
            if groups is not None and many and (label == k).sum() > 1 and len(set(groups[label == k])) == 1
        )
        never = (c for c, on, won in zip(bags.classes, counted, crown.any(0).tolist(), strict=True) if on and not won)
        return cls(
            classes=bags.classes,
            won=tuple(np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist()),
            won_weight=tuple(target.astype(np.float64).sum(0).tolist()),
            never_win=tuple(never),
            counted=counted,
            bags=len(bags),
            labelled=int((label >= 0).sum()),
            tied=int(tied.sum()),
            votes=has_votes(bags),
            instances=len(bags.index),
            sizes=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
            effective_size=transition_em.effective_bag_size(bags.segments(), bags.target),
            singles=int((sizes == 1).sum()),
            known=0 if bags.known is None else int((bags.known >= 0).sum()),
            groups=None if groups is None else len(set(groups)),
            single_group=tuple(lone),
        )

    @property
    def labelled_classes(self) -> np.ndarray:
        """(C,) classes that some label speaks of."""
        return np.array(self.won_weight) > 0

    @property
    def unlabelled_classes(self) -> tuple[str, ...]:
        """Classes that could win and of which no label speaks: where there are votes, fewer than those that never win."""
        return tuple(c for c, m, on in zip(self.classes, self.won_weight, self.counted, strict=True) if on and not m)

    def to_json(self) -> dict[str, Any]:
        least, median, most = self.sizes
        return {
            "bags": self.bags, "labelled": self.labelled, "unlabelled": self.bags - self.labelled, "tied": self.tied,
            "votes": self.votes, "won": dict(zip(self.classes, self.won, strict=True)), "never_win": list(self.never_win),
            "uncounted": [c for c, on in zip(self.classes, self.counted, strict=True) if not on],
            "instances": self.instances, "sizes": {"least": least, "median": median, "most": most},
            "bags_of_one": self.singles, "known_instances": self.known, "groups": self.groups,
            "won_in_one_group_only": list(self.single_group),
        }  # fmt: skip

    def lines(self) -> list[str]:
        won = ", ".join(f"{c}: {n:,}" for c, n in zip(self.classes, self.won, strict=True) if n)
        least, median, most = self.sizes
        said = [f"bags won: {won or 'none'}"]
        if self.never_win:
            said.append(f"never the majority: {', '.join(self.never_win)}")
        apart = {"without a label": self.bags - self.labelled, "tied": self.tied, "of one instance": self.singles}
        said += [f"{n:,} of {self.bags:,} bags {'is' if n == 1 else 'are'} {what}" for what, n in apart.items() if n]
        said.append(f"sizes: {least:,} to {most:,} instances, median {median:,.0f}")
        if self.groups is not None:
            said.append(f"groups: {self.groups:,}")
        return said


def mean_winner_share(bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """(C,) the mean share of the winner in bags with votes won by each class, and its standard error; NaN where none is."""
    top, label = bags.target.double().numpy().max(1), bags.label.numpy()
    mine = [top[label == c] for c in range(len(bags.classes))]
    return (
        np.array([v.mean() if len(v) else np.nan for v in mine]),
        np.array([v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else np.nan for v in mine]),
    )

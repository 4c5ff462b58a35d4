"""Coverage: how many bags each class wins, and what the bags look like. Counted from bags and labels, without features or truth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headcount.bags import Bags
from headcount.inference.evaluate import has_votes
from headcount.majority import transition_em


@dataclass(frozen=True)
class Coverage:
    """Counts over a set of bags. ``won`` counts a tied bag for the first of its winners."""

    classes: tuple[str, ...]
    won: tuple[int, ...]  # bags of each class
    won_weight: tuple[float, ...]  # the same with votes and ties shared among the classes
    never_win: tuple[str, ...]  # classes that could win a bag and never do
    counted: tuple[bool, ...]  # classes that can win
    bags: int
    labelled: int
    tied: int
    votes: bool  # labels are shares
    instances: int
    sizes: tuple[int, float, int]  # minimum, median, maximum
    effective_size: float  # size at which random bags have majorities like these (majority/transition_em.py)
    singles: int  # bags of one instance
    known: int  # instances whose class is given as supervision
    groups: int | None
    single_group: tuple[str, ...]  # classes that win in one group only, where there are several groups

    @classmethod
    def from_bags(cls, bags: Bags) -> Coverage:
        """Count."""
        target, label, sizes = bags.target.numpy(), bags.label.numpy(), bags.sizes.numpy()
        top = target.max(1)
        winners = (target >= top[:, None] - 1e-6) & (top > 0)[:, None]
        counted = (True,) * len(bags.classes) if bags.counted is None else tuple(bags.counted.tolist())
        wins = winners.any(0).tolist()
        return cls(
            classes=bags.classes,
            won=tuple(np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist()),
            won_weight=tuple(target.astype(np.float64).sum(0).tolist()),
            never_win=tuple(c for c, can, does in zip(bags.classes, counted, wins, strict=True) if can and not does),
            counted=counted,
            bags=len(bags),
            labelled=int((label >= 0).sum()),
            tied=int((winners.sum(1) > 1).sum()),
            votes=has_votes(bags),
            instances=len(bags.index),
            sizes=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
            effective_size=transition_em.effective_bag_size(bags.segments(), bags.target),
            singles=int((sizes == 1).sum()),
            known=0 if bags.known is None else int((bags.known >= 0).sum()),
            groups=None if bags.group is None else len(set(bags.group)),
            single_group=_single_group_classes(bags, label),
        )

    @property
    def labelled_classes(self) -> np.ndarray:
        """(C,) True for each class that some label gives weight to."""
        return np.array(self.won_weight) > 0

    @property
    def unlabelled_classes(self) -> tuple[str, ...]:
        """Classes that could win and get no weight from any label. With votes they are fewer than those that never win."""
        rows = zip(self.classes, self.won_weight, self.counted, strict=True)
        return tuple(c for c, weight, can_win in rows if can_win and not weight)

    def to_json(self) -> dict[str, Any]:
        """The counts as plain JSON."""
        least, median, most = self.sizes
        return {
            "bags": self.bags, "labelled": self.labelled, "unlabelled": self.bags - self.labelled, "tied": self.tied,
            "votes": self.votes, "won": dict(zip(self.classes, self.won, strict=True)), "never_win": list(self.never_win),
            "uncounted": [c for c, can_win in zip(self.classes, self.counted, strict=True) if not can_win],
            "instances": self.instances, "sizes": {"least": least, "median": median, "most": most},
            "bags_of_one": self.singles, "known_instances": self.known, "groups": self.groups,
            "won_in_one_group_only": list(self.single_group),
        }  # fmt: skip

    def lines(self) -> list[str]:
        """The counts as lines of text."""
        won = ", ".join(f"{c}: {n:,}" for c, n in zip(self.classes, self.won, strict=True) if n)
        least, median, most = self.sizes
        lines = [f"bags won: {won or 'none'}"]
        if self.never_win:
            lines.append(f"never the majority: {', '.join(self.never_win)}")
        special = {"without a label": self.bags - self.labelled, "tied": self.tied, "of one instance": self.singles}
        lines += [f"{n:,} of {self.bags:,} bags {'is' if n == 1 else 'are'} {what}" for what, n in special.items() if n]
        lines.append(f"sizes: {least:,} to {most:,} instances, median {median:,.0f}")
        if self.groups is not None:
            lines.append(f"groups: {self.groups:,}")
        return lines


def _single_group_classes(bags: Bags, label: np.ndarray) -> tuple[str, ...]:
    """Classes that win several bags, all of one group, where there are several groups."""
    if bags.group is None or len(set(bags.group)) < 2:
        return ()
    groups = np.array(bags.group)
    return tuple(
        c for k, c in enumerate(bags.classes) if (label == k).sum() > 1 and len(set(groups[label == k].tolist())) == 1
    )


def mean_winner_share(bags: Bags) -> tuple[np.ndarray, np.ndarray]:
    """(C,) mean share of the winner over the bags with votes that each class wins, and its standard error; NaN without bags."""
    top, label = bags.target.double().numpy().max(1), bags.label.numpy()
    shares = [top[label == c] for c in range(len(bags.classes))]
    return (
        np.array([v.mean() if len(v) else np.nan for v in shares]),
        np.array([v.std(ddof=1) / np.sqrt(len(v)) if len(v) > 1 else np.nan for v in shares]),
    )

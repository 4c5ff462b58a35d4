"""What bags and labels are, counted; and the verdict and the advice of a check, in plain sentences with numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from headcount.bags import Bags
from headcount.inference.evaluate import has_votes
from headcount.majority import transition
from headcount.selection.learnability import SUFFICIENT_BAGS, Learnability

FEW_BAGS, FEW_BAGS_PER_CLASS = 20, 5  # with fewer labelled bags, a signal that was not found may still be there
MIN_BAGS = 8  # with fewer labelled bags the verdict is never "good"
STABLE_DISAGREEMENT = 0.02  # below this disagreement between folds, more of the same bags would change little


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
    effective_size: float  # size at which random bags have majorities like these (majority/transition.py)
    singles: int  # bags of one instance
    known: int  # instances whose class is given as supervision
    groups: int | None
    single_group: tuple[str, ...]  # classes that win in one group only, where there are several groups

    @classmethod
    def from_bags(cls, bags: Bags) -> Coverage:
        target, label, sizes = bags.target.numpy(), bags.label.numpy(), bags.sizes.numpy()
        top = target.max(1)
        winners = (target >= top[:, None] - 1e-6) & (top > 0)[:, None]
        counted = (True,) * len(bags.classes) if bags.counted is None else tuple(bags.counted.tolist())
        wins = winners.any(0).tolist()
        return cls(
            classes=bags.classes, won=tuple(np.bincount(label[label >= 0], minlength=len(bags.classes)).tolist()),
            won_weight=tuple(target.astype(np.float64).sum(0).tolist()),
            never_win=tuple(c for c, can, does in zip(bags.classes, counted, wins, strict=True) if can and not does),
            counted=counted, bags=len(bags), labelled=int((label >= 0).sum()), tied=int((winners.sum(1) > 1).sum()),
            votes=has_votes(bags), instances=len(bags.index), singles=int((sizes == 1).sum()),
            sizes=(int(sizes.min()), float(np.median(sizes)), int(sizes.max())),
            effective_size=transition.effective_bag_size(bags.segments(), bags.target),
            known=0 if bags.known is None else int((bags.known >= 0).sum()),
            groups=None if bags.group is None else len(set(bags.group)), single_group=_single_group_classes(bags, label),
        )  # fmt: skip

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
    return tuple(c for k, c in enumerate(bags.classes) if (label == k).sum() > 1 and len(set(groups[label == k].tolist())) == 1)


def verdict(coverage: Coverage, learnability: Learnability | None, downscaled: bool) -> tuple[str, str]:
    """yes, perhaps or no, and the reason. ``downscaled``: images were reduced; a network can use their detail."""
    if learnability is None:
        if int(coverage.labelled_classes.sum()) < 2:
            return "no", "the labels name fewer than two classes, so there is nothing to tell apart"
        few = "all bags are in one group" if coverage.groups == 1 else "there are too few bags, or groups of bags"
        return "perhaps", f"{few}, so none can be held out, and nothing can be estimated"
    chance, (low, high), (gain, error) = 1 / len(coverage.classes), learnability.accuracy, learnability.gain
    if not learnability.is_significant:
        failure = "the features do not predict the labels of held-out bags clearly better than guessing"
        if coverage.labelled < max(FEW_BAGS, FEW_BAGS_PER_CLASS * len(coverage.classes)):
            return "perhaps", f"{failure}, but {coverage.labelled} labelled bags are too few to decide"
        if downscaled:
            return "perhaps", f"{failure} from reduced images; a network can use their full detail"
        if gain > error:
            return "perhaps", f"{failure}: more bags would decide"
        return "no", f"{failure}: they show nothing of the classes, or the majorities are too slight"
    if coverage.unlabelled_classes:
        names = ", ".join(coverage.unlabelled_classes)
        return "perhaps", f"no bag has the label {names}, so such instances can be recognised only by exclusion"
    if coverage.labelled < MIN_BAGS:
        return "perhaps", f"{coverage.labelled} labelled bags are too few for a reliable estimate"
    above_chance = 1 - chance
    if low >= chance + 0.4 * above_chance and (low + high) / 2 >= chance + 0.6 * above_chance:
        return "yes", "the features predict the labels of held-out bags, and there are enough bags to learn from"
    if high < chance + 0.25 * above_chance and not downscaled:
        return "no", "even with luck, single instances would be predicted hardly better than by guessing"
    return "perhaps", "the labels say little about single instances, or the bags are few, so the result is hard to foresee"


def advice(
    coverage: Coverage, learnability: Learnability | None, more_bags: dict[str, int], n_label_issues: int | None,
    examined_bags: int, downscaled: bool,
) -> list[str]:  # fmt: skip
    """Sentences, the most useful first."""
    lines = []
    if coverage.never_win:
        lines.append(
            f"bags labelled {', '.join(coverage.never_win)} would help most: without them the class is only guessed at"
        )
    if coverage.single_group:
        lines.append(
            f"all bags labelled {', '.join(coverage.single_group)} are in one group: what looks like the class may be the group"
        )
    if coverage.singles == coverage.bags:
        lines.append("every bag holds one instance: this is ordinary supervision")
    elif coverage.sizes[2] > coverage.instances / 2 and coverage.bags > 2:
        lines.append("one bag holds more than half of all instances and dominates training: split it if possible")
    if learnability is not None:
        if not learnability.is_significant:
            lines.append("check that each label belongs to its bag, and that the columns (or images) show the classes")
        lines += _bag_advice(coverage, learnability, more_bags)
        if n_label_issues and learnability.is_significant:
            lines.append(
                f"a linear model flags {n_label_issues:,} of the {examined_bags:,} labels examined: headcount issues "
                "uses forests, which may find others, and ranks all labels"
            )
    if downscaled:
        lines.append("images were reduced: a network may use more of their detail, so the upper end is left open")
    if coverage.known:
        lines.append(f"the {coverage.known:,} known classes of instances were not used here; training uses them")
    return lines


def _bag_advice(coverage: Coverage, learnability: Learnability, more_bags: dict[str, int]) -> list[str]:
    lines, classes = [], len(coverage.classes)
    needed = sorted(((n, c) for c, n in more_bags.items() if n), reverse=True)
    if learnability.is_significant and learnability.fold_disagreement < STABLE_DISAGREEMENT:
        agree = f"models fitted to different bags agree on {1 - learnability.fold_disagreement:.0%} of the instances"
        lines.append(f"{agree}: more bags like these would change little")
    elif needed:
        listed = ", ".join(f"{n:,} labelled {c!r}" for n, c in needed[:5])
        others = f" and of {len(needed) - 5} other classes" if len(needed) > 5 else ""
        lines.append(f"more bags would help, about {listed}{others}")
    share = float(np.nanmean(learnability.share))
    larger = (1 + share) / 2
    now, then = signal_from_share(share, classes), signal_from_share(larger, classes)
    if now < 0.5:
        worth = f"one bag would teach as much as {(then / max(now, 1e-2)) ** 2:.0f} do now"
        lines.append(
            f"larger majorities would help: if the label's class made up {larger:.0%} of a bag instead of {share:.0%}, {worth}"
        )
    size = max(1, round(coverage.effective_size))
    at_random = transition.random_majority_share(size, classes)
    if size >= 4 and share - at_random < 0.05:
        smaller = max(2, size // 4)
        lines.append(
            f"smaller bags would help: bags filled at random would have majorities of {at_random:.0%}, as slight as these, and "
            f"bags of {smaller} {transition.random_majority_share(smaller, classes):.0%}"
        )
    return lines


def bags_needed(coverage: Coverage, learnability: Learnability) -> dict[str, int]:
    """About how many more bags would help, for each class that can win."""
    shares = np.where(np.isnan(learnability.share), np.nanmean(learnability.share), learnability.share).tolist()
    rows = zip(coverage.classes, shares, coverage.won_weight, coverage.counted, strict=True)
    return {c: additional_bags(s, round(n), len(coverage.classes)) for c, s, n, can_win in rows if can_win}


def signal_from_share(share: float, classes: int) -> float:
    """From 0 (the label says nothing about an instance) to 1 (it is the instance's class)."""
    return min(1.0, max(0.0, (share - 1 / classes) / (1 - 1 / classes)))


def additional_bags(share: float, available: int, classes: int) -> int:
    """About how many more bags a class needs, at this majority share; 0 if it has enough. A bag is worth its signal squared.

    >>> [additional_bags(s, n, 10) for s, n in [(0.9, 2), (0.5, 2), (0.5, 20), (0.25, 2)]]
    [4, 19, 1, 142]
    """
    return max(0, math.ceil(SUFFICIENT_BAGS / max(signal_from_share(share, classes), 1e-2) ** 2) - available)

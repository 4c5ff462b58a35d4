"""Counsel: a verdict on bags in one word and a line, and what would help, in plain sentences with numbers."""

from __future__ import annotations

import numpy as np

from headcount.majority import transition_em
from headcount.selection.check.coverage import Coverage
from headcount.selection.check.learnability import Learnability, additional_bags, signal_strength

FEW_BAGS, FEW_BAGS_PER_CLASS = (
    20,
    5,
)  # labelled bags in all and for each class: with fewer, what was not found may still be there
MIN_BAGS = 8  # labelled bags, below which nothing is called good
STABLE_DISAGREEMENT = 0.02  # a dispute below which more of the same bags would change little


def verdict(coverage: Coverage, learnability: Learnability | None, downscaled: bool) -> tuple[str, str]:
    """good, hard or hopeless, and why. ``part_seen``: pictures were looked at in small, and a network sees more of them."""
    if learnability is None:
        if int(coverage.labelled_classes.sum()) < 2:
            return "hopeless", "the labels name fewer than two classes, so nothing tells one from another"
        if coverage.groups == 1:
            return "hard", "all bags are in one group, so none can be judged by others: nothing can be told"
        return "hard", "the bags, or their groups, are too few for any to be judged by others: nothing can be told"
    chance, (low, high), (gain, error) = 1 / len(coverage.classes), learnability.accuracy, learnability.gain
    if not learnability.is_significant:
        nothing = "the labels of held-out bags are not clearly foretold better than by chance"
        if coverage.labelled < max(FEW_BAGS, FEW_BAGS_PER_CLASS * len(coverage.classes)):
            return "hard", f"{nothing}, but {coverage.labelled} labelled bags are too few to tell"
        if downscaled:
            return "hard", f"{nothing} from pictures looked at in small; a network sees more of them"
        if gain > error:
            return "hard", f"{nothing}: more bags would tell"
        return "hopeless", f"{nothing}: the labels say nothing of these instances, or the majorities lead by nothing"
    if coverage.unlabelled_classes:
        names = ", ".join(coverage.unlabelled_classes)
        return (
            "hard",
            f"{names}: never the majority, so told only by what they are not (docs/explanation/theory.md, section 5)",
        )
    if coverage.labelled < MIN_BAGS:
        return "hard", f"{coverage.labelled} labelled bags are too few to be sure of anything"
    part = 1 - chance
    if low >= chance + 0.3 * part and (low + high) / 2 >= chance + 0.6 * part:
        return "good", "the labels tell of the instances, and there are bags enough to learn from"
    if high < chance + 0.25 * part and not downscaled:
        return "hopeless", "even the upper end of what to expect is near chance"
    return "hard", "the labels tell of the instances, but little, or the bags are few: expect a wide range"


def advice(
    coverage: Coverage,
    learnability: Learnability | None,
    more_bags: dict[str, int],
    n_label_issues: int | None,
    examined_bags: int,
    downscaled: bool,
) -> list[str]:
    """Sentences, the most useful first."""
    said = _coverage_advice(coverage)
    if learnability is not None:
        if not learnability.is_significant:
            said.append("see that the labels belong to these bags, and that the columns (or pictures) show the classes")
        said += _bag_advice(coverage, learnability, more_bags)
        if n_label_issues and learnability.is_significant:
            said.append(
                f"a quick look doubts {n_label_issues:,} of the {examined_bags:,} labels it saw: headcount issues asks forests instead, "
                "which may doubt others, and ranks all labels"
            )
    if downscaled:
        said.append("pictures were looked at in small: a network may see far more, so the upper end is left open")
    if coverage.known:
        said.append(f"the {coverage.known:,} known classes of instances were not used here; a training uses them")
    return said


def _coverage_advice(coverage: Coverage) -> list[str]:
    said = []
    if coverage.never_win:
        said.append(
            f"bags won by {', '.join(coverage.never_win)} would help most: what no label names is only guessed at"
        )
    if coverage.single_group:
        said.append(
            f"all bags won by {', '.join(coverage.single_group)} are of one group: what looks like the class may be the group; "
            "bags of other groups would tell"
        )
    if coverage.singles == coverage.bags:
        said.append("every bag holds one instance: this is ordinary supervision")
    elif coverage.sizes[2] > coverage.instances / 2 and coverage.bags > 2:
        said.append("one bag holds more than half of all instances, and weighs accordingly: part it if it can be")
    return said


def _bag_advice(coverage: Coverage, learnability: Learnability, more_bags: dict[str, int]) -> list[str]:
    said, classes = [], len(coverage.classes)
    wanted = sorted(((n, c) for c, n in more_bags.items() if n), reverse=True)
    if learnability.is_significant and learnability.fold_disagreement < STABLE_DISAGREEMENT:
        said.append(
            f"fits to other bags agree on {1 - learnability.fold_disagreement:.0%} of instances: more of the same would change little"
        )
    elif wanted:
        named = ", ".join(f"{n:,} of {c!r}" for n, c in wanted[:5])
        others = f" and of {len(wanted) - 5} other classes" if len(wanted) > 5 else ""
        said.append(f"more bags would help, about {named}{others}")
    share = float(np.nanmean(learnability.share))
    larger = (1 + share) / 2
    now, then = signal_strength(share, classes), signal_strength(larger, classes)
    if now < 0.5:
        times = (then / max(now, 1e-2)) ** 2
        said.append(
            f"larger majorities would help: at {larger:.0%} instead of {share:.0%} a bag is worth {times:.0f} times as many"
        )
    size = max(1, round(coverage.effective_size))
    least = transition_em.random_majority_share(size, classes)
    if size >= 4 and share - least < 0.05:
        half = max(2, size // 4)
        said.append(
            f"bags filled by lot would have majorities of {least:.0%}: smaller bags lean more, in bags of {half} even by lot "
            f"{transition_em.random_majority_share(half, classes):.0%}"
        )
    return said


def bags_wanted(coverage: Coverage, learnability: Learnability) -> dict[str, int]:
    """About how many more bags of each class that can win would help, by what its bags are worth."""
    common = float(np.nanmean(learnability.share))
    share = np.where(np.isnan(learnability.share), common, learnability.share)
    rows = zip(coverage.classes, share.tolist(), coverage.won_weight, coverage.counted, strict=True)
    return {c: additional_bags(s, round(n), len(coverage.classes)) for c, s, n, on in rows if on}

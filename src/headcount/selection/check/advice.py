"""The verdict of a check, in one word and one sentence, and advice on what would help, with numbers."""

from __future__ import annotations

import numpy as np

from headcount.majority import transition_em
from headcount.selection.check.coverage import Coverage
from headcount.selection.check.learnability import Learnability, additional_bags, signal_from_share

FEW_BAGS, FEW_BAGS_PER_CLASS = 20, 5  # with fewer labelled bags, a signal that was not found may still be there
MIN_BAGS = 8  # with fewer labelled bags the verdict is never "good"
STABLE_DISAGREEMENT = 0.02  # below this disagreement between folds, more of the same bags would change little


def verdict(coverage: Coverage, learnability: Learnability | None, downscaled: bool) -> tuple[str, str]:
    """good, hard or hopeless, and the reason. ``downscaled``: images were reduced; a network can use their detail."""
    if learnability is None:
        if int(coverage.labelled_classes.sum()) < 2:
            return "hopeless", "the labels name fewer than two classes, so there is nothing to distinguish"
        if coverage.groups == 1:
            return "hard", "all bags are in one group, so cross-validation is impossible and nothing can be estimated"
        return "hard", "too few bags, or groups of bags, for cross-validation: nothing can be estimated"
    chance, (low, high), (gain, error) = 1 / len(coverage.classes), learnability.accuracy, learnability.gain
    if not learnability.is_significant:
        failure = "the labels of held-out bags are not predicted clearly better than by chance"
        if coverage.labelled < max(FEW_BAGS, FEW_BAGS_PER_CLASS * len(coverage.classes)):
            return "hard", f"{failure}, but {coverage.labelled} labelled bags are too few to decide"
        if downscaled:
            return "hard", f"{failure} from reduced images; a network can use their full detail"
        if gain > error:
            return "hard", f"{failure}: more bags would decide"
        return "hopeless", f"{failure}: either the features carry no signal, or the majorities are too slight"
    if coverage.unlabelled_classes:
        names = ", ".join(coverage.unlabelled_classes)
        return (
            "hard",
            f"{names}: never the majority, so recognisable only by exclusion (docs/explanation/theory.md, section 5)",
        )
    if coverage.labelled < MIN_BAGS:
        return "hard", f"{coverage.labelled} labelled bags are too few for a reliable estimate"
    above_chance = 1 - chance
    if low >= chance + 0.3 * above_chance and (low + high) / 2 >= chance + 0.6 * above_chance:
        return "good", "the labels are informative about instances, and there are enough bags to learn from"
    if high < chance + 0.25 * above_chance and not downscaled:
        return "hopeless", "even the upper end of the expected accuracy is close to chance"
    return "hard", "the labels are only weakly informative about instances, or there are few bags: expect a wide range"


def advice(
    coverage: Coverage,
    learnability: Learnability | None,
    more_bags: dict[str, int],
    n_label_issues: int | None,
    examined_bags: int,
    downscaled: bool,
) -> list[str]:
    """Sentences, the most useful first."""
    lines = _coverage_advice(coverage)
    if learnability is not None:
        if not learnability.is_significant:
            lines.append("check that each label belongs to its bag, and that the columns (or images) show the classes")
        lines += _bag_advice(coverage, learnability, more_bags)
        if n_label_issues and learnability.is_significant:
            lines.append(
                f"the linear baseline flags {n_label_issues:,} of the {examined_bags:,} labels examined: headcount issues "
                "uses forests instead, which may flag others, and ranks all labels"
            )
    if downscaled:
        lines.append("images were reduced: a network may use more of their detail, so the upper end is left open")
    if coverage.known:
        lines.append(f"the {coverage.known:,} known classes of instances were not used here; training uses them")
    return lines


def _coverage_advice(coverage: Coverage) -> list[str]:
    lines = []
    if coverage.never_win:
        lines.append(
            f"bags won by {', '.join(coverage.never_win)} would help most: a class that no label names is only guessed at"
        )
    if coverage.single_group:
        lines.append(
            f"all bags won by {', '.join(coverage.single_group)} belong to one group: what looks like the class may be the "
            "group; bags of other groups would separate the two"
        )
    if coverage.singles == coverage.bags:
        lines.append("every bag holds one instance: this is ordinary supervision")
    elif coverage.sizes[2] > coverage.instances / 2 and coverage.bags > 2:
        lines.append("one bag holds more than half of all instances and dominates training: split it if possible")
    return lines


def _bag_advice(coverage: Coverage, learnability: Learnability, more_bags: dict[str, int]) -> list[str]:
    lines, classes = [], len(coverage.classes)
    needed = sorted(((n, c) for c, n in more_bags.items() if n), reverse=True)
    if learnability.is_significant and learnability.fold_disagreement < STABLE_DISAGREEMENT:
        agreement = 1 - learnability.fold_disagreement
        lines.append(
            f"fits to different folds agree on {agreement:.0%} of instances: more of the same bags would change little"
        )
    elif needed:
        listed = ", ".join(f"{n:,} of {c!r}" for n, c in needed[:5])
        others = f" and of {len(needed) - 5} other classes" if len(needed) > 5 else ""
        lines.append(f"more bags would help, about {listed}{others}")
    share = float(np.nanmean(learnability.share))
    larger = (1 + share) / 2
    now, then = signal_from_share(share, classes), signal_from_share(larger, classes)
    if now < 0.5:
        times = (then / max(now, 1e-2)) ** 2
        lines.append(
            f"larger majorities would help: at {larger:.0%} instead of {share:.0%} a bag is worth {times:.0f} times as many"
        )
    size = max(1, round(coverage.effective_size))
    at_random = transition_em.random_majority_share(size, classes)
    if size >= 4 and share - at_random < 0.05:
        smaller = max(2, size // 4)
        lines.append(
            f"bags filled at random would have majorities of {at_random:.0%}: smaller bags have larger ones, in bags of "
            f"{smaller} even at random {transition_em.random_majority_share(smaller, classes):.0%}"
        )
    return lines


def bags_needed(coverage: Coverage, learnability: Learnability) -> dict[str, int]:
    """About how many more bags would help, for each class that can win."""
    mean = float(np.nanmean(learnability.share))
    shares = np.where(np.isnan(learnability.share), mean, learnability.share).tolist()
    rows = zip(coverage.classes, shares, coverage.won_weight, coverage.counted, strict=True)
    return {c: additional_bags(s, round(n), len(coverage.classes)) for c, s, n, can_win in rows if can_win}

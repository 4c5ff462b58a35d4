"""Counsel: a verdict on bags in one word and a line, and what would help, in plain sentences with numbers."""

from __future__ import annotations

import numpy as np

from headcount.bags import steepness
from headcount.judging.coverage import Coverage
from headcount.judging.prospects import Prospect, more_bags, pull

FEW, FEW_EACH = 20, 5  # labelled bags in all and for each class: with fewer, what was not found may still be there
LEAST = 8  # labelled bags, below which nothing is called good
FIRM = 0.02  # a dispute below which more of the same bags would change little


def verdict(cover: Coverage, found: Prospect | None, part_seen: bool) -> tuple[str, str]:
    """good, hard or hopeless, and why. ``part_seen``: pictures were looked at in small, and a network sees more of them."""
    if found is None:
        if int(cover.heard.sum()) < 2:
            return "hopeless", "the labels name fewer than two classes, so nothing tells one from another"
        if cover.groups == 1:
            return "hard", "all bags are in one group, so none can be judged by others: nothing can be told"
        return "hard", "the bags, or their groups, are too few for any to be judged by others: nothing can be told"
    chance, (low, high), (gain, error) = 1 / len(cover.classes), found.accuracy, found.gain
    if not found.clear:
        nothing = "the labels of held-out bags are not clearly foretold better than by chance"
        if cover.labelled < max(FEW, FEW_EACH * len(cover.classes)):
            return "hard", f"{nothing}, but {cover.labelled} labelled bags are too few to tell"
        if part_seen:
            return "hard", f"{nothing} from pictures looked at in small; a network sees more of them"
        if gain > error:
            return "hard", f"{nothing}: more bags would tell"
        return "hopeless", f"{nothing}: the labels say nothing of these instances, or the majorities lead by nothing"
    if cover.silent:
        names = ", ".join(cover.silent)
        return "hard", f"{names}: never the majority, so told only by what they are not (docs/theory.md, section 5)"
    if cover.labelled < LEAST:
        return "hard", f"{cover.labelled} labelled bags are too few to be sure of anything"
    part = 1 - chance
    if low >= chance + 0.3 * part and (low + high) / 2 >= chance + 0.6 * part:
        return "good", "the labels tell of the instances, and there are bags enough to learn from"
    if high < chance + 0.25 * part and not part_seen:
        return "hopeless", "even the upper end of what to expect is near chance"
    return "hard", "the labels tell of the instances, but little, or the bags are few: expect a wide range"


def advice(
    cover: Coverage, found: Prospect | None, more: dict[str, int], doubted: int | None, looked: int, part_seen: bool
) -> list[str]:
    """Sentences, the most useful first."""
    said = _of_coverage(cover)
    if found is not None:
        if not found.clear:
            said.append("see that the labels belong to these bags, and that the columns (or pictures) show the classes")
        said += _of_bags(cover, found, more)
        if doubted and found.clear:
            said.append(
                f"a quick look doubts {doubted:,} of the {looked:,} labels it saw: headcount issues asks forests instead, "
                "which may doubt others, and ranks all labels"
            )
    if part_seen:
        said.append("pictures were looked at in small: a network may see far more, so the upper end is left open")
    if cover.known:
        said.append(f"the {cover.known:,} known classes of instances were not used here; a training uses them")
    return said


def _of_coverage(cover: Coverage) -> list[str]:
    said = []
    if cover.never:
        said.append(f"bags won by {', '.join(cover.never)} would help most: what no label names is only guessed at")
    if cover.lone:
        said.append(
            f"all bags won by {', '.join(cover.lone)} are of one group: what looks like the class may be the group; "
            "bags of other groups would tell"
        )
    if cover.singles == cover.bags:
        said.append("every bag holds one instance: this is ordinary supervision")
    elif cover.sizes[2] > cover.instances / 2 and cover.bags > 2:
        said.append("one bag holds more than half of all instances, and weighs accordingly: part it if it can be")
    return said


def _of_bags(cover: Coverage, found: Prospect, more: dict[str, int]) -> list[str]:
    said, classes = [], len(cover.classes)
    wanted = sorted(((n, c) for c, n in more.items() if n), reverse=True)
    if found.clear and found.dispute < FIRM:
        said.append(
            f"fits to other bags agree on {1 - found.dispute:.0%} of instances: more of the same would change little"
        )
    elif wanted:
        named = ", ".join(f"{n:,} of {c!r}" for n, c in wanted[:5])
        others = f" and of {len(wanted) - 5} other classes" if len(wanted) > 5 else ""
        said.append(f"more bags would help, about {named}{others}")
    share = float(np.nanmean(found.share))
    larger = (1 + share) / 2
    now, then = pull(share, classes), pull(larger, classes)
    if now < 0.5:
        times = (then / max(now, 1e-2)) ** 2
        said.append(
            f"larger majorities would help: at {larger:.0%} instead of {share:.0%} a bag is worth {times:.0f} times as many"
        )
    size = max(1, round(cover.size))
    least = steepness.least_share(size, classes)
    if size >= 4 and share - least < 0.05:
        half = max(2, size // 4)
        said.append(
            f"bags filled by lot would have majorities of {least:.0%}: smaller bags lean more, in bags of {half} even by lot "
            f"{steepness.least_share(half, classes):.0%}"
        )
    return said


def wanted(cover: Coverage, found: Prospect) -> dict[str, int]:
    """About how many more bags of each class that can win would help, by what its bags are worth."""
    common = float(np.nanmean(found.share))
    share = np.where(np.isnan(found.share), common, found.share)
    rows = zip(cover.classes, share.tolist(), cover.mass, cover.counted, strict=True)
    return {c: more_bags(s, round(n), len(cover.classes)) for c, s, n, on in rows if on}

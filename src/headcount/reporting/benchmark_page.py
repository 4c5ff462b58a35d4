"""The records of the benchmark as Markdown tables for the documentation, and as one HTML page."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from scipy import stats

from headcount.experiments.benchmark import BENCHMARK_METHODS, SCORES, TWINS, mean_and_error
from headcount.io import atomic_write
from headcount.reporting.plots import accuracy_dots
from headcount.reporting.render import PALETTE, inline_svg, render_template
from headcount.selection.methods import BASELINES

RIVALS = (*BASELINES, "commonest")  # what needs no method for majority labels
BenchmarkRecords = Sequence[dict[str, Any]]


def group_by_method(records: BenchmarkRecords, task: str) -> dict[str, list[dict[str, Any]]]:
    """The records of a task by method, in the order of BENCHMARK_METHODS."""
    groups = {m: [r for r in records if (r["task"], r["method"]) == (task, m)] for m in BENCHMARK_METHODS}
    return {method: group for method, group in groups.items() if group}


def method_title(method: str, records: BenchmarkRecords, seeds: int = 0) -> str:
    """As in the records; of the choice of ``fit`` also what it chose; and the number of seeds where it is less than ``seeds``."""
    names = [r["name"].removesuffix(", network") for r in records]
    counts = ", ".join(f"{n} {names.count(n)}" for n in sorted(set(names), key=lambda n: (-names.count(n), n)))
    title = f"fit: {counts}" if method == "auto" else names[0]
    return f"{title} ({len(records)} of {seeds} seeds)" if len(records) < seeds else title


def format_score(records: BenchmarkRecords, score: str) -> str:
    mean, error = mean_and_error(records, score)
    return "–" if math.isnan(mean) else f"{mean:.3f}" + ("" if math.isnan(error) else f" ± {error:.3f}")


def best_accuracy(groups: dict[str, list[dict[str, Any]]]) -> float:
    """Of the methods that learn from labels of bags and have all seeds."""
    seeds = max(map(len, groups.values()))
    return max(mean_and_error(g, "instance_accuracy")[0] for m, g in groups.items() if m not in TWINS and len(g) == seeds)


def compare_with_rivals(groups: dict[str, list[dict[str, Any]]], method: str) -> str:
    """A method beside the best rival, over the seeds of the method: the difference, and whether that is significant."""
    seeds = [r["seed"] for r in groups[method]]
    rivals = {m: [r for r in g if r["seed"] in seeds] for m, g in groups.items() if m in RIVALS}
    rivals = {m: g for m, g in rivals.items() if len(g) == len(seeds)}
    if not rivals:
        return ""
    rival = max(rivals, key=lambda m: mean_and_error(rivals[m], "instance_accuracy")[0])
    ours, theirs = (np.array([r["scores"]["instance_accuracy"] for r in g]) for g in (groups[method], rivals[rival]))
    difference, title = float((ours - theirs).mean()), method_title(rival, rivals[rival])
    verb = "gains" if difference > 0 else "loses"
    text = f"{'fit' if method == 'auto' else method} {verb} {100 * abs(difference):.1f} points against {title}"
    if len(ours) > 1 and np.ptp(ours - theirs):
        return f"{text} (p = {stats.ttest_rel(ours, theirs).pvalue:.2f}, paired over {len(ours)} seeds)"
    return f"{text} ({len(ours)} seed{'s' * (len(ours) > 1)})"


def markdown_tables(records: BenchmarkRecords) -> str:
    """A table of all scores for each task, and sentences on where the choice of ``fit``, tilt and the logistic regression by the vote gain and lose."""
    parts = []
    for task in dict.fromkeys(r["task"] for r in records):
        groups = group_by_method(records, task)
        first, best, seeds = next(iter(groups.values()))[0], best_accuracy(groups), max(map(len, groups.values()))
        data = first["data"]
        lines = [f"## {first['title']} (`{task}`)", "", *([f"{note[0].upper()}{note[1:]}."] if (note := first["note"]) else [])]
        lines += [
            f"Bags for training, validation and test: {data['train']}, {data['valid']}, {data['test']}; seeds: {seeds}.",
            "",
        ]
        lines += [f"| method | {' | '.join(SCORES.values())} |", "|---" * (1 + len(SCORES)) + "|"]
        for method, group in groups.items():
            cells = [format_score(group, score) for score in SCORES]
            if method not in TWINS and mean_and_error(group, "instance_accuracy")[0] == best:
                cells[0] = f"**{cells[0]}**"
            lines.append(f"| {method_title(method, group, seeds)} | {' | '.join(cells)} |")
        compared = [
            text
            for method in ("auto", "tilt", "vote_logistic")
            if method in groups and (text := compare_with_rivals(groups, method))
        ]
        parts.append("\n".join([*lines, *(["", f"Instance accuracy: {'; '.join(compared)}."] if compared else [])]))
    return "\n\n".join(parts)


def write_benchmark(records: BenchmarkRecords, page: Path) -> Path:
    """Write the page, which loads nothing, and return its path."""
    tasks = []
    for task in dict.fromkeys(r["task"] for r in records):
        groups = group_by_method(records, task)
        best, seeds = best_accuracy(groups), max(map(len, groups.values()))
        titles = {m: method_title(m, g, seeds) for m, g in groups.items()}
        accuracies = {titles[m]: [r["scores"]["instance_accuracy"] for r in g] for m, g in groups.items()}
        colours = {titles[m]: PALETTE[1 if m in TWINS else 7 if m in RIVALS else 0] for m in groups}
        lines = [
            SimpleNamespace(
                name=titles[m], twin=m in TWINS, cells=[format_score(g, s) for s in SCORES],
                best=m not in TWINS and mean_and_error(g, "instance_accuracy")[0] == best,
            )
            for m, g in groups.items()
        ]  # fmt: skip
        first = next(iter(groups.values()))[0]
        figure = inline_svg(accuracy_dots(accuracies, colours), task, f"Instance accuracy of every method, {first['title']}")
        tasks.append(SimpleNamespace(slug=task, first=first, lines=lines, figure=figure, seeds=seeds))
    text = render_template("benchmark.html", title="Benchmark on natural bags", tasks=tasks, scores=list(SCORES.values()))
    atomic_write(page, lambda f: f.write(text.encode()))
    return page

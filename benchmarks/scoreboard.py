"""What the lines reached: a summary made of records, and the summary as the tables of docs/explanation/tilt.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from lines import GROUPS, LINES, TRUE_SHARE, line

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record


def summary(folder: Path) -> dict[str, Any]:
    """Mean and deviation of instance accuracy over the folds of every line that has records; the best line on top."""
    found: dict[tuple[str, str, str], dict[int, Record]] = {}
    names: dict[Recipe, str] = {}
    for n, source, scenario, fold in product(LINES, ("cifar10", "svhn"), TRUE_SHARE, range(5)):
        names.setdefault(line(n, source, scenario, fold), n)
    for path in sorted(folder.glob("*.json")):
        if path.name != "summary.json" and (name := names.get((record := Record.read(path)).recipe)):
            r = record.recipe
            found.setdefault((name, r.source, r.scenario), {})[r.fold] = record
    said: dict[str, Any] = {}
    for (name, source, scenario), folds in sorted(found.items()):
        right = np.array([folds[f].scores["instance_accuracy"] for f in sorted(folds)])
        row: dict[str, Any] = {"mean": round(right.mean(), 5), "std": round(right.std(), 5), "folds": len(right)}
        if len(others := [folds[f].scores["instance_accuracy"] for f in sorted(folds) if f]) > 1:
            row |= {"mean_without_fold_0": round(np.mean(others), 5)}
        row["each"] = {str(f): round(float(folds[f].scores["instance_accuracy"]), 5) for f in sorted(folds)}
        row["minutes"] = round(np.mean([r.data["provenance"]["seconds"] for r in folds.values()]) / 60, 2)
        if found_tilts := [folds[f].data["tilt"] for f in sorted(folds) if "tilt" in folds[f].data]:
            keys = ("share", "true_share", "mix_error", "shares_error", "shares_error_in_context", "shares_inside")
            keys += ("shares_error_unlabelled", "shares_inside_unlabelled")  # which the first records lack
            means = {
                k: np.mean([t[k] for t in found_tilts], 0).round(5).tolist()
                for k in (*keys, "context_instance_accuracy")
                if all(k in t for t in found_tilts)
            }
            row |= {"in_context": means.pop("context_instance_accuracy"), "tilt": means}
            row["criteria"] = {str(f): folds[f].data["tilt"]["criterion"] for f in sorted(folds)}
        where = said if name == "best" else said.setdefault("lines", {}).setdefault(name, {})
        where.setdefault(source, {})[scenario] = row
    return said


def table(said: dict[str, Any]) -> str:
    """The summary as Markdown, in parts: lines of several folds, a column for every scenario; the changes of the recipe that
    were tried on fold 0, by the criterion; what the paper's stem does for whom; tilt and the Counting Network in trouble."""
    lines = {"best": said, **said.get("lines", {})}
    return "\n".join([*_folds(lines), *_ablation(lines), *_footing(lines), *_robust(lines)])


def _folds(lines: dict[str, Any]) -> Iterator[str]:
    for source in ("cifar10", "svhn"):
        here = {name: found[source] for name, found in lines.items() if source in found}
        here = {name: found for name, found in here.items() if any(row["folds"] > 1 for row in found.values())}
        here = {name: found for name, found in here.items() if name not in GROUPS["footing"]}  # theirs is below
        if not here:
            continue
        yield f"| {source} | {' | '.join(TRUE_SHARE)} |"
        yield "|---" * (1 + len(TRUE_SHARE)) + "|"
        for name, found in here.items():
            cells = (
                f"{row['mean']:.3f} ± {row['std']:.3f} ({row['folds']})" if (row := found.get(s)) else "missing"
                for s in TRUE_SHARE
            )
            yield f"| {name} | {' | '.join(cells)} |"
        yield ""


def _ablation(lines: dict[str, Any]) -> Iterator[str]:
    """Fold 0 of CIFAR-10: the criterion of the validation bags, which decides, and instances right, which do not."""
    rows: list[tuple[float, str]] = []
    for name in ("best", *GROUPS["ablation"]):
        found = lines.get(name, {}).get("cifar10", {})
        seen = [found.get(s, {}) for s in ("various", "small")]
        heard, right = ([one.get(what, {}).get("0") for one in seen] for what in ("criteria", "each"))
        if any(x is not None for x in right):
            total = sum(x if x is not None else math.inf for x in heard)
            cells = [
                format(x, ".3f") if x is not None and math.isfinite(x) else "missing" for x in (*heard, total, *right)
            ]
            rows.append((total, f"| {name} | {' | '.join(cells)} |"))
    if rows:
        yield "| changed | criterion, various | small | sum | right, various | small |"
        yield "|---|---|---|---|---|---|"
        yield from (text for _, text in sorted(rows, key=lambda row: row[0]))
        yield ""


def _footing(lines: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name in GROUPS["footing"]:
        if row := lines.get(name, {}).get("cifar10", {}).get("various"):
            how, _, who = name.removeprefix("paper's stem, ").partition(": ")
            right = f"{row['mean']:.3f}" + (f" ± {row['std']:.3f}" if row["folds"] > 1 else "")
            rows.append(f"| {how} | {who} | {right} | {row['folds']} |")
    if rows:
        yield from ("| paper's stem | method | right, various | folds |", "|---|---|---|---|", *rows, "")


def _robust(lines: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name in ("no trouble", *GROUPS["robust"]):
        pair = (
            lines.get(n, {}).get("cifar10", {}).get("various", {}).get("each", {}).get("0")
            for n in ("best" if name == "no trouble" else name, f"{name}, count")
        )
        cells = ["missing" if x is None else f"{x:.3f}" for x in pair]
        if cells != ["missing", "missing"]:
            rows.append(f"| {name} | {' | '.join(cells)} |")
    if rows:
        yield from ("| trouble | tilt | Counting Network |", "|---|---|---|", *rows, "")

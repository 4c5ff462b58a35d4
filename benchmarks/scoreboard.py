"""A summary of the records of tilt_recipes.py, and the summary as the tables of docs/explanation/tilt.md."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from tilt_recipes import GROUPS, RECIPES, TRUE_SHARE, recipe_for

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record

SOURCES = {"cifar10": "CIFAR-10", "svhn": "SVHN (re-cropped)"}


def summary(folder: Path) -> dict[str, Any]:
    """Mean and standard deviation of the instance accuracy over the folds of every row that has records; the best on top."""
    records: dict[tuple[str, str, str], dict[int, Record]] = {}
    names: dict[Recipe, str] = {}
    for n, source, scenario, fold in product(RECIPES, ("cifar10", "svhn"), TRUE_SHARE, range(5)):
        names.setdefault(recipe_for(n, source, scenario, fold), n)
    for path in sorted(folder.glob("*.json")):
        if path.name != "summary.json" and (name := names.get((record := Record.read(path)).recipe)):
            r = record.recipe
            records.setdefault((name, r.source, r.scenario), {})[r.fold] = record
    result: dict[str, Any] = {}
    for (name, source, scenario), folds in sorted(records.items()):
        accuracy = np.array([folds[f].scores["instance_accuracy"] for f in sorted(folds)])
        row: dict[str, Any] = {"mean": round(accuracy.mean(), 5), "std": round(accuracy.std(), 5), "folds": len(accuracy)}
        if len(others := [folds[f].scores["instance_accuracy"] for f in sorted(folds) if f]) > 1:
            row |= {"mean_without_fold_0": round(np.mean(others), 5)}
        row["each"] = {str(f): round(float(folds[f].scores["instance_accuracy"]), 5) for f in sorted(folds)}
        row["minutes"] = round(np.mean([r.data["provenance"]["seconds"] for r in folds.values()]) / 60, 2)
        if estimates := [folds[f].data["tilt"] for f in sorted(folds) if "tilt" in folds[f].data]:
            keys = ("share", "true_share", "mix_error", "shares_error", "shares_error_in_context", "shares_inside")
            keys += ("shares_error_unlabelled", "shares_inside_unlabelled")  # missing in the oldest records
            means = {
                k: np.mean([t[k] for t in estimates], 0).round(5).tolist()
                for k in (*keys, "context_instance_accuracy")
                if all(k in t for t in estimates)
            }
            row |= {"in_context": means.pop("context_instance_accuracy"), "tilt": means}
            row["criteria"] = {str(f): folds[f].data["tilt"]["criterion"] for f in sorted(folds)}
        rows = result if name == "best" else result.setdefault("lines", {}).setdefault(name, {})
        rows.setdefault(source, {})[scenario] = row
    return result


def table(results: dict[str, Any]) -> str:
    """The summary as Markdown: rows with several folds, a column per scenario; the changes to the recipe that were tried on
    fold 0, by the criterion; the paper's stem; tilt and the Counting Network on corrupted bags."""
    lines = {"best": results, **results.get("lines", {})}
    return "\n".join([*_folds(lines), *_ablation(lines), *_footing(lines), *_robust(lines)])


def _folds(lines: dict[str, Any]) -> Iterator[str]:
    for source in SOURCES:
        here = {name: cells[source] for name, cells in lines.items() if source in cells}
        here = {name: cells for name, cells in here.items() if any(row["folds"] > 1 for row in cells.values())}
        here = {name: cells for name, cells in here.items() if name not in GROUPS["footing"]}  # these are below
        if not here:
            continue
        yield f"| {SOURCES[source]} | {' | '.join(TRUE_SHARE)} |"
        yield "|---" * (1 + len(TRUE_SHARE)) + "|"
        for name, cells in here.items():
            shown = (
                f"{row['mean']:.3f} ± {row['std']:.3f} ({row['folds']})" if (row := cells.get(s)) else "missing"
                for s in TRUE_SHARE
            )
            yield f"| {name} | {' | '.join(shown)} |"
        yield ""


def _ablation(lines: dict[str, Any]) -> Iterator[str]:
    """Fold 0 of CIFAR-10: the criterion of the validation bags, which decides, and the instance accuracy, which does not."""
    rows: list[tuple[float, str]] = []
    for name in ("best", *GROUPS["ablation"]):
        cells = lines.get(name, {}).get("cifar10", {})
        scenarios = [cells.get(s, {}) for s in ("various", "small")]
        criteria, accuracy = ([row.get(key, {}).get("0") for row in scenarios] for key in ("criteria", "each"))
        if any(x is not None for x in accuracy):
            total = sum(x if x is not None else math.inf for x in criteria)
            cells = [
                format(x, ".3f") if x is not None and math.isfinite(x) else "missing" for x in (*criteria, total, *accuracy)
            ]
            rows.append((total, f"| {name} | {' | '.join(cells)} |"))
    if rows:
        yield "| changed | criterion, various | small | sum | instance accuracy, various | small |"
        yield "|---|---|---|---|---|---|"
        yield from (text for _, text in sorted(rows, key=lambda row: row[0]))
        yield ""


def _footing(lines: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name in GROUPS["footing"]:
        if row := lines.get(name, {}).get("cifar10", {}).get("various"):
            training, _, method = name.removeprefix("paper's stem, ").partition(": ")
            accuracy = f"{row['mean']:.3f}" + (f" ± {row['std']:.3f}" if row["folds"] > 1 else "")
            rows.append(f"| {training} | {method} | {accuracy} | {row['folds']} |")
    if rows:
        yield from ("| paper's stem | method | instance accuracy, various | folds |", "|---|---|---|---|", *rows, "")


def _robust(lines: dict[str, Any]) -> Iterator[str]:
    rows = []
    for name in ("not corrupted", *GROUPS["robust"]):
        pair = (
            lines.get(n, {}).get("cifar10", {}).get("various", {}).get("each", {}).get("0")
            for n in ("best" if name == "not corrupted" else name, f"{name}, count")
        )
        cells = ["missing" if x is None else f"{x:.3f}" for x in pair]
        if cells != ["missing", "missing"]:
            rows.append(f"| {name} | {' | '.join(cells)} |")
    if rows:
        yield from ("| corruption | tilt | Counting Network |", "|---|---|---|", *rows, "")

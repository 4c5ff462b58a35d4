"""Why the paper's trainings differ from fold to fold: their loss jumps, and the epoch that is kept comes after a jump.

    python benchmarks/jumps.py results/paper

Read from the loss curves in the records (sixty points each). A jump: the training loss is FACTOR times the least so far, and
above LEAST. A line for each method and removal; then how validation loss and instance accuracy go together over all runs of
these methods, fold by fold (the accuracy is looked at here alone: it chose nothing).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from headcount.experiments import records
from headcount.experiments.records import Record

FACTOR, LEAST = 5.0, 0.01
METHODS = ("Counting Network w/o Count", "Counting Network", "Counting Network + MPEM")


def first_jump(epochs: np.ndarray, train: np.ndarray) -> int | None:
    """The epoch at which the training loss first jumps."""
    jumped = (train[1:] > FACTOR * np.minimum.accumulate(train)[:-1]) & (train[1:] > LEAST)
    return int(epochs[1:][jumped][0]) if jumped.any() else None


def look(record: Record) -> dict[str, Any]:
    """When it was first seen to have jumped, whether the epoch kept comes after the last one that was quiet, and the least
    validation loss before the jump and of all."""
    fitted = record.data["fit"]
    epochs, train, valid = (np.array(fitted["curve"][name]) for name in ("epoch", "train", "valid"))
    jump = first_jump(epochs, train)
    return {
        "method": record.recipe.label,
        "removal": record.recipe.removal,
        "fold": record.recipe.fold,
        "jump": jump,
        "late": jump is not None and fitted["best_epoch"] > epochs[epochs < jump][-1],
        "before": float(valid[epochs < jump].min() if jump else valid.min()),
        "loss": fitted["valid_loss"],
        "right": record.scores["instance_accuracy"],
    }


def together(runs: list[dict[str, Any]]) -> float | None:
    """The correlation of validation loss and accuracy, the means of each fold taken away; None if no fold has two runs."""
    names, folds = ("loss", "right"), {r["fold"] for r in runs}
    if len(folds) == len(runs):
        return None
    means = {fold: [np.mean([r[n] for r in runs if r["fold"] == fold]) for n in names] for fold in folds}
    left = np.array([[r[n] - means[r["fold"]][i] for i, n in enumerate(names)] for r in runs])
    return float(np.corrcoef(left.T)[0, 1])


def _line(run: dict[str, Any]) -> tuple[int, float]:
    return METHODS.index(run["method"]), run["removal"]


def lines(runs: list[dict[str, Any]]) -> Iterable[str]:
    yield "| method | first jump, epoch | kept after it | validation loss before it | kept | right |"
    yield "|---|---|---|---|---|---|"
    for (which, removal), group in groupby(sorted(runs, key=_line), key=_line):
        some = list(group)
        spans = [[r[name] for r in some if r[name] is not None] for name in ("jump", "before", "loss", "right")]
        jump = f"{min(spans[0])} to {max(spans[0])}" if spans[0] else "none"
        before, loss, right = (f"{min(span):.3f} to {max(span):.3f}" for span in spans[1:])
        after = sum(r["late"] for r in some)
        name = METHODS[which] + (f", r = {removal:g}" if removal else "")
        yield f"| {name} | {jump} | {after} of {len(some)} | {before} | {loss} | {right} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various")
    args = parser.parse_args()
    found = [r for r in records.load_records(args.folder) if r.recipe.label in METHODS]
    here = [r for r in found if (r.recipe.source, r.recipe.scenario) == (args.source, args.scenario)]
    runs = [look(r) for r in here]
    print("\n".join(lines(runs)))
    for name, late in (("before any jump", False), ("after one", True)):
        if right := [r["right"] for r in runs if r["late"] == late]:
            print(f"kept {name}: {len(right)} of {len(runs)} runs, right {np.mean(right):.3f} ± {np.std(right):.3f}")
    if (both := together(runs)) is not None:
        print(f"correlation of validation loss and right, within folds: {both:.2f}")


if __name__ == "__main__":
    main()

"""Why the paper's trainings differ from fold to fold: their loss jumps, and the selected epoch comes after a jump.

    python benchmarks/loss_jumps.py results/paper

Computed from the loss curves in the records (sixty points each). A jump: the training loss is FACTOR times the minimum so far,
and above MIN_LOSS. One row for each method and removal; then the correlation of validation loss and instance accuracy over all
runs of these methods, within folds (the accuracy is used for this only: it selected nothing).
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

FACTOR, MIN_LOSS = 5.0, 0.01
METHODS = ("Counting Network w/o Count", "Counting Network", "Counting Network + MPEM")


def first_jump(epochs: np.ndarray, train: np.ndarray) -> int | None:
    """The epoch at which the training loss first jumps."""
    jumped = (train[1:] > FACTOR * np.minimum.accumulate(train)[:-1]) & (train[1:] > MIN_LOSS)
    return int(epochs[1:][jumped][0]) if jumped.any() else None


def summarize(record: Record) -> dict[str, Any]:
    """The first epoch after a jump, whether the selected epoch comes after the last one before it, and the lowest
    validation loss before the jump and overall."""
    fitted = record.data["fit"]
    epochs, train, valid = (np.array(fitted["curve"][name]) for name in ("epoch", "train", "valid"))
    jump = first_jump(epochs, train)
    return {
        "method": record.recipe.label,
        "removal": record.recipe.removal,
        "fold": record.recipe.fold,
        "jump": jump,
        "after_jump": jump is not None and fitted["best_epoch"] > epochs[epochs < jump][-1],
        "before": float(valid[epochs < jump].min() if jump else valid.min()),
        "loss": fitted["valid_loss"],
        "accuracy": record.scores["instance_accuracy"],
    }


def correlation_within_folds(runs: list[dict[str, Any]]) -> float | None:
    """The correlation of validation loss and accuracy after subtracting each fold's means; None if no fold has two runs."""
    names, folds = ("loss", "accuracy"), {r["fold"] for r in runs}
    if len(folds) == len(runs):
        return None
    means = {fold: [np.mean([r[n] for r in runs if r["fold"] == fold]) for n in names] for fold in folds}
    residuals = np.array([[r[n] - means[r["fold"]][i] for i, n in enumerate(names)] for r in runs])
    return float(np.corrcoef(residuals.T)[0, 1])


def _row_of(run: dict[str, Any]) -> tuple[int, float]:
    return METHODS.index(run["method"]), run["removal"]


def table(runs: list[dict[str, Any]]) -> Iterable[str]:
    yield "| method | first jump, epoch | selected after it | validation loss before it | at the selected epoch | instance accuracy |"
    yield "|---|---|---|---|---|---|"
    for (which, removal), group in groupby(sorted(runs, key=_row_of), key=_row_of):
        members = list(group)
        spans = [[r[name] for r in members if r[name] is not None] for name in ("jump", "before", "loss", "accuracy")]
        jump = f"{min(spans[0])} to {max(spans[0])}" if spans[0] else "none"
        before, loss, accuracy = (f"{min(span):.3f} to {max(span):.3f}" for span in spans[1:])
        n_after = sum(r["after_jump"] for r in members)
        name = METHODS[which] + (f", r = {removal:g}" if removal else "")
        yield f"| {name} | {jump} | {n_after} of {len(members)} | {before} | {loss} | {accuracy} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various")
    args = parser.parse_args()
    of_methods = [r for r in records.load_records(args.folder) if r.recipe.label in METHODS]
    selected = [r for r in of_methods if (r.recipe.source, r.recipe.scenario) == (args.source, args.scenario)]
    runs = [summarize(r) for r in selected]
    print("\n".join(table(runs)))
    for name, after_jump in (("before any jump", False), ("after one", True)):
        if accuracy := [r["accuracy"] for r in runs if r["after_jump"] == after_jump]:
            values = f"{np.mean(accuracy):.3f} ± {np.std(accuracy):.3f}"
            print(f"selected {name}: {len(accuracy)} of {len(runs)} runs, instance accuracy {values}")
    if (correlation := correlation_within_folds(runs)) is not None:
        print(f"correlation of validation loss and instance accuracy, within folds: {correlation:.2f}")


if __name__ == "__main__":
    main()

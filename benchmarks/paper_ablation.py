"""Reproduce the paper's ablation (table 4): one run after the other in one process.

    python benchmarks/paper_ablation.py --out results/paper --source cifar10 --scenario various --minutes 9
    python benchmarks/paper_ablation.py --out results/plain --precision tf32 --plain --only count      # without acceleration
    python benchmarks/paper_ablation.py --out results/paper --only mpem --removal 0.3                  # one r on all folds
    python benchmarks/paper_ablation.py --out results/seeds --only without --seed 1                    # another seed

Counting Network, without Count, Output+Mean (official and nll), then MPEM for every removal, five folds each, 1,500 epochs
of the paper's recipe in bf16 (--precision). No run is started after --minutes; the next call continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from run_missing import run_missing

from headcount.errors import check_choice
from headcount.experiments.recipe import Recipe
from headcount.experiments.scores import REMOVALS
from headcount.training import accel


def ablation_recipes(
    source: str, scenario: str, precision: str, epochs: int, only: str = "", removals: tuple[float, ...] = REMOVALS
) -> list[Recipe]:
    base = Recipe(source=source, scenario=scenario, precision=precision, epochs=epochs)
    methods = {
        "count": base,
        "without": base.replace(options={"t1": 1.0}),
        "nll": base.replace(head="output_mean", options={"form": "nll"}),
        "official": base.replace(head="output_mean"),
    }
    chosen = only.split(",") if only else [*methods, "mpem"]
    recipes = [method.replace(fold=fold) for name, method in methods.items() if name in chosen for fold in range(5)]
    return recipes + [base.replace(fold=f, removal=r) for f in range(5) for r in removals if "mpem" in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various")
    parser.add_argument("--precision", default="bf16")
    parser.add_argument("--epochs", type=int, default=1500)
    parser.add_argument("--only", default="", help="count, without, nll, official, mpem: some of them, with commas")
    parser.add_argument("--removal", default="", help="some of MPEM's r, with commas")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="neither compiled nor captured")
    parser.add_argument("--minutes", type=float, default=9.0)
    args = parser.parse_args()
    removals = tuple(float(check_choice("r", r, list(map(str, REMOVALS)))) for r in args.removal.split(",") if r) or REMOVALS
    recipes = (
        recipe.replace(seed=args.seed)
        for scenario in args.scenario.split(",")
        for recipe in ablation_recipes(args.source, scenario, args.precision, args.epochs, args.only, removals)
    )
    with without_acceleration() if args.plain else nullcontext():
        run_missing(((str(r), r) for r in recipes), args.out, args.minutes, compile="off" if args.plain else "auto")


@contextmanager
def without_acceleration() -> Iterator[None]:
    """Training steps as written in Python, without CUDA graphs and memory-layout changes."""
    before = accel.cuda_graph, accel.optimize_layout
    accel.cuda_graph, accel.optimize_layout = accel.run_as_is, lambda model, device, precision: None
    try:
        yield
    finally:
        accel.cuda_graph, accel.optimize_layout = before


if __name__ == "__main__":
    main()

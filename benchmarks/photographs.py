"""Tilt on photographs: the best recipe, its ablation, the paper's stem for several methods, and corrupted bags. For a GPU.

    python benchmarks/photographs.py --out results/tilt --minutes 9                      # best, CIFAR-10, 3 scenarios, 5 folds
    python benchmarks/photographs.py --out results/tilt --source svhn --minutes 9
    python benchmarks/photographs.py --out results/tilt --lines ablation --scenario various,small --fold 0
    python benchmarks/photographs.py --out results/tilt --lines "best,supervised twin" --fold 1
    python benchmarks/photographs.py --out results/tuning --fold 0 --try lr=0.2 --try "option.start=0.5 epochs=200"
    python benchmarks/photographs.py --out results/tuning --scenario various,small --fold 0 --tune --try lr=0.4 --try ...
    python benchmarks/photographs.py --list                                               # every row and its recipe
    python benchmarks/photographs.py --summary results/tilt                               # summary.json from the records
    python benchmarks/photographs.py --table results/tilt                                 # and the tables of the docs

Tuning uses the criterion on fold 0 of CIFAR-10, which needs no instance labels (for how earlier settings were chosen see
docs/explanation/tilt.md); the other folds and SVHN get the same recipe, without the mirror image for digits. Runs that have a
record are not repeated; no run is started that would exceed --minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from run_missing import run_missing
from scoreboard import summary, table
from tilt_recipes import RECIPES, parse_names, recipe_for, with_options

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.io import atomic_write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/tilt"))
    parser.add_argument("--lines", default="best", help="names of rows or groups, separated by commas or semicolons")
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various,small,large")
    parser.add_argument("--fold", default="0,1,2,3,4")
    parser.add_argument("--set", action="append", default=[], help="NAME=JSON for the recipe, option.NAME=JSON for the head")
    parser.add_argument("--try", action="append", default=[], dest="tries", help="as --set; a separate run for each --try")
    parser.add_argument("--tune", action="store_true", help="each --try on top of those before it that lowered the criterion")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.list:
        for name, recipe in RECIPES.items():
            print(f"{name:45} {recipe!r}")
        return
    if args.summary:
        text = json.dumps(summary(args.summary), indent=1) + "\n"
        atomic_write(args.summary / "summary.json", lambda f: f.write(text.encode()))
        return
    if args.table:
        print(table(summary(args.table)))
        return
    names = parse_names(args.lines)
    tries = [words.split() for words in args.tries]
    pairs = [(int(f), n) for f in args.fold.split(",") for n in names]

    def named_recipes(words: list[str]) -> list[tuple[str, Recipe]]:
        words = [*args.set, *words]
        return [
            (f"{n}, {scenario} {f} {' '.join(words)}", change(recipe_for(n, args.source, scenario, f), words))
            for (f, n), scenario in product(pairs, args.scenario.split(","))
        ]

    every = (pair for words in tries or [[]] for pair in named_recipes(words))
    named = tune(tries, named_recipes, args.out) if args.tune else every
    # no later run needs their arrays
    run_missing(named, args.out, args.minutes, after=lambda r: (args.out / f"{r.key}.npz").unlink(missing_ok=True))


def tune(
    tries: list[list[str]], named_recipes: Callable[[list[str]], list[tuple[str, Recipe]]], out: Path
) -> Iterator[tuple[str, Recipe]]:
    """A greedy search by the criterion of the validation bags: a change is kept if it lowers the sum over the runs on which it
    is tried. The kept changes are in ``chosen.txt``. No instance labels are used."""
    chosen: list[str] = []
    lowest = math.inf
    for words in [[], *tries]:
        runs = named_recipes([*chosen, *words])
        yield from runs  # run by the caller before the next is requested
        total = sum(criterion_of(r, out) for _, r in runs)
        print(f"{'kept' if total < lowest else 'dropped'}: {' '.join(words) or 'unchanged'}, {total:.4f}", flush=True)
        if total < lowest:
            chosen, lowest = [*chosen, *words], total
            text = " ".join(chosen).encode()
            atomic_write(out / "chosen.txt", lambda f, text=text: f.write(text))


def criterion_of(recipe: Recipe, out: Path) -> float:
    """The criterion of the validation bags of a run that has a record."""
    return Record.read(out / f"{recipe.key}.json").data["tilt"]["criterion"]


def change(recipe: Recipe, words: list[str]) -> Recipe:
    """The recipe with the changes given by --set."""
    for word in words:
        name, _, value = word.partition("=")
        option = name.removeprefix("option.")
        recipe = (
            with_options(recipe, **{option: json.loads(value)})
            if option != name
            else recipe.replace(**{name: json.loads(value)})
        )
    return recipe


if __name__ == "__main__":
    main()

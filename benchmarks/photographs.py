"""Tilt on photographs: the best recipe, its ablation, equal footing with the paper's methods, and robustness. For a GPU.

    python benchmarks/photographs.py --out results/tilt --minutes 9                      # best, CIFAR-10, 3 scenarios, 5 folds
    python benchmarks/photographs.py --out results/tilt --source svhn --minutes 9
    python benchmarks/photographs.py --out results/tilt --lines ablation --scenario various,small --fold 0
    python benchmarks/photographs.py --out results/tilt --lines "best,supervised twin" --fold 1
    python benchmarks/photographs.py --out results/tuning --fold 0 --try lr=0.2 --try "option.start=0.5 epochs=200"
    python benchmarks/photographs.py --out results/tuning --scenario various,small --fold 0 --tune --try lr=0.4 --try ...
    python benchmarks/photographs.py --list                                               # every line and its recipe
    python benchmarks/photographs.py --summary results/tilt                               # summary.json from the records
    python benchmarks/photographs.py --table results/tilt                                 # and the tables of the docs

Tuning looks at fold 0 of CIFAR-10 through the criterion, which needs no truth; the other folds and SVHN get
the recipe unchanged, but for the mirror image, which no digit survives. Runs that have a record are not run again; no run is
begun that would outlast the minutes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from campaign import campaign
from lines import LINES, but, line, names_of
from scoreboard import summary, table

from headcount.experiments.recipe import Recipe
from headcount.experiments.records import Record
from headcount.io import atomic_write


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/tilt"))
    parser.add_argument("--lines", default="best", help="names of lines or groups, with commas, or with semicolons")
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--scenario", default="various,small,large")
    parser.add_argument("--fold", default="0,1,2,3,4")
    parser.add_argument(
        "--set", action="append", default=[], help="NAME=JSON for the recipe, option.NAME=JSON for the head"
    )
    parser.add_argument(
        "--try", action="append", default=[], dest="tries", help="as --set; a run of its own for each --try"
    )
    parser.add_argument("--tune", action="store_true", help="each --try on top of those before it that helped")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--summary", type=Path)
    parser.add_argument("--table", type=Path)
    args = parser.parse_args()
    if args.list:
        for name, recipe in LINES.items():
            print(f"{name:45} {recipe!r}")
        return
    if args.summary:
        body = json.dumps(summary(args.summary), indent=1) + "\n"
        atomic_write(args.summary / "summary.json", lambda f: f.write(body.encode()))
        return
    if args.table:
        print(table(summary(args.table)))
        return
    names = names_of(args.lines)
    tries = [words.split() for words in args.tries]
    places = [(int(f), n) for f in args.fold.split(",") for n in names]

    def asked(words: list[str]) -> list[tuple[str, Recipe]]:
        words = [*args.set, *words]
        return [
            (f"{n}, {scenario} {f} {' '.join(words)}", changed(line(n, args.source, scenario, f), words))
            for (f, n), scenario in product(places, args.scenario.split(","))
        ]

    named = tuned(tries, asked, args.out) if args.tune else (one for words in tries or [[]] for one in asked(words))
    # nothing is built on the arrays of these
    campaign(named, args.out, args.minutes, after=lambda r: (args.out / f"{r.key}.npz").unlink(missing_ok=True))


def tuned(
    tries: list[list[str]], asked: Callable[[list[str]], list[tuple[str, Recipe]]], out: Path
) -> Iterator[tuple[str, Recipe]]:
    """A greedy search by the criterion of the validation bags: a change stays if it lowers the sum over the runs it is tried
    on. What stays is in ``chosen.txt``. No truth is looked at."""
    chosen: list[str] = []
    least = math.inf
    for words in [[], *tries]:
        runs = asked([*chosen, *words])
        yield from runs  # whoever asks for the next has run this one
        found = sum(criterion_of(r, out) for _, r in runs)
        print(f"{'kept' if found < least else 'left'}: {' '.join(words) or 'as it is'}, {found:.4f}", flush=True)
        if found < least:
            chosen, least = [*chosen, *words], found
            text = " ".join(chosen).encode()
            atomic_write(out / "chosen.txt", lambda f, text=text: f.write(text))


def criterion_of(recipe: Recipe, out: Path) -> float:
    """What the validation bags say of a run that has a record."""
    return Record.read(out / f"{recipe.key}.json").data["tilt"]["criterion"]


def changed(recipe: Recipe, words: list[str]) -> Recipe:
    """The recipe with what --set says."""
    for word in words:
        name, _, value = word.partition("=")
        own = name.removeprefix("option.")
        recipe = but(recipe, **{own: json.loads(value)}) if own != name else recipe.replace(**{name: json.loads(value)})
    return recipe


if __name__ == "__main__":
    main()

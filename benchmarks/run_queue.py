"""Run a queue of benchmark commands in one process: one start, one pool, one compilation, until a time limit.

    python benchmarks/run_queue.py benchmarks/queue.txt --minutes 25
    python benchmarks/run_queue.py benchmarks/queue.txt --list      # the number of missing runs of each line; nothing is run

A line of the file is a script of this folder and its arguments. Recipes that have a record are skipped, so the same file can be
used again, and by several processes at once (run_missing.py). Paths are relative to the current folder.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from importlib import import_module
from pathlib import Path

import run_missing

from headcount.experiments.recipe import Recipe

MIN_MINUTES = 0.4  # nothing is started with less time left


def read_queue(file: Path) -> list[list[str]]:
    return [words for text in file.read_text().splitlines() if (words := shlex.split(text, comments=True))]


def call(words: list[str]) -> None:
    """Call a script's main as from the command line."""
    script, before = import_module(words[0]), sys.argv
    sys.argv = [f"{words[0]}.py", *words[1:]]
    try:
        script.main()
    finally:
        sys.argv = before


def missing(words: list[str]) -> list[Recipe]:
    """The recipes of a line that have no record."""
    recipes: list[Recipe] = []
    script = import_module(words[0])
    script.run_missing = lambda named, out, *_, **__: recipes.extend(r for _, r in named if not run_missing.has_record(r, out))
    try:
        call(words)
    finally:
        script.run_missing = run_missing.run_missing
    return recipes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for words in read_queue(args.file):
        if args.list:
            print(f"{len(missing(words)):4} missing  {shlex.join(words)}")
        elif (minutes := (end - time.monotonic()) / 60) > MIN_MINUTES:
            call([*words, "--minutes", f"{minutes:.2f}"])


if __name__ == "__main__":
    main()

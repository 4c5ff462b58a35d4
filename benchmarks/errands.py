"""What is still to be run on a card, in one process: one start, one pool, one compilation, as long as the minutes last.

    python benchmarks/errands.py benchmarks/errands.txt --minutes 25
    python benchmarks/errands.py benchmarks/errands.txt --list      # how many runs of each line are missing; nothing is run

A line of the file is a script of this folder and its words. What has a record is passed over, so the same file can be given
again, and to several processes at once (campaign.py); results lie under the folder one stands in.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from importlib import import_module
from pathlib import Path

import campaign

from headcount.experiments.recipe import Recipe

LEAST = 0.4  # minutes: nothing is begun with less


def lines_of(file: Path) -> list[list[str]]:
    return [words for text in file.read_text().splitlines() if (words := shlex.split(text, comments=True))]


def call(words: list[str]) -> None:
    """A script as if it had been started with these words."""
    script, before = import_module(words[0]), sys.argv
    sys.argv = [f"{words[0]}.py", *words[1:]]
    try:
        script.main()
    finally:
        sys.argv = before


def missing(words: list[str]) -> list[Recipe]:
    """The runs of a line that have no record."""
    found: list[Recipe] = []
    script = import_module(words[0])
    script.campaign = lambda named, out, *_, **__: found.extend(r for _, r in named if not campaign.done(r, out))
    try:
        call(words)
    finally:
        script.campaign = campaign.campaign
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--list", action="store_true")
    args = parser.parse_args()
    end = time.monotonic() + 60 * args.minutes
    for words in lines_of(args.file):
        if args.list:
            print(f"{len(missing(words)):4} missing  {shlex.join(words)}")
        elif (left := (end - time.monotonic()) / 60) > LEAST:
            call([*words, "--minutes", f"{left:.2f}"])


if __name__ == "__main__":
    main()

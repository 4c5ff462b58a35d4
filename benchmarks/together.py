"""Several trainings at once on one card: do two or three in one process, each on a stream of its own, get more done?

    python benchmarks/together.py                # the paper's recipe and sizes, random pixels
    python benchmarks/together.py --small        # a laptop: that it runs, nothing more

Each training is warmed up and captured alone; then all run at the same time, a thread each. A line for each number of them:
epochs a second of all together, and how often that is what one alone reaches.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from threading import Thread
from typing import Any

import torch
from compare import PAPER, SMALL, made, ours

from headcount.training import speed


def beside(epoch: Callable[[], float], device: torch.device) -> Callable[[int], None]:
    """Epochs of a training on a stream of its own."""
    stream: Any = torch.cuda.Stream() if device.type == "cuda" else None

    def some(count: int) -> None:
        with torch.cuda.stream(stream) if stream else nullcontext():
            for _ in range(count):
                epoch()

    return some


def together(trainings: list[Callable[[int], None]], epochs: int) -> float:
    """Epochs a second of all of them."""
    threads = [Thread(target=one, args=(epochs,)) for one in trainings]
    begun = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(trainings) * epochs / (time.perf_counter() - begun)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    device = speed.device_for("auto")
    card = device.type == "cuda"
    bags = [b.to(device) for b in made(**(SMALL if args.small else PAPER))]
    width, precision, epochs = (8 if args.small else 64), ("bf16" if card else "tf32"), (60 if card else 3)
    trainings: list[Callable[[int], None]] = []
    alone = 0.0
    for number in range(1, args.most + 1):
        trainings.append(beside(ours(*bags, device, width, precision), device))
        trainings[-1](6)  # compile, warm up, capture: nothing else may run meanwhile
        rates = sorted(together(trainings, epochs) for _ in range(3))
        alone = alone or rates[1]
        row = {"trainings": number, "epochs_per_second": round(rates[1], 2), "times_one": round(rates[1] / alone, 3)}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()

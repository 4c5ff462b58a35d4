"""Several trainings at once on one card: do two, three or four get more done than one?

    python benchmarks/together.py                                   # in one process, each on a stream of its own
    python benchmarks/together.py --how processes --of tilt         # a process each; on a card under nvidia-cuda-mps-control -d
    python benchmarks/together.py --small                           # a laptop: that it runs, nothing more

The paper's recipe, or tilt's for photographs with all its terms, on random pixels. Each training is warmed up and captured,
then all run for the same seconds. A line for each number of them: epochs a second of all, and how often that is what one alone
reaches. ``--out FILE.json`` keeps the lines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import torch
from step import PHASES, build

from headcount.io import atomic_write
from headcount.training.accel import device as speed

Epoch = Callable[[], Any]


def training(of: str, small: bool) -> Epoch:
    """An epoch of a training that has compiled, warmed up and captured what it needs."""
    device = speed.resolve_device("auto")
    state = build(of, "bf16" if device.type == "cuda" else "fp32", "auto", device, (6, 3) if small else (400, 100))
    at = list(PHASES[of].values())[-1]

    def epoch() -> None:
        losses = state.train_epoch(at), state.valid_loss()
        float(losses[0]), float(losses[1])

    for _ in range(1 if small else 6):
        epoch()
    return epoch


def counted(epoch: Epoch, seconds: float) -> float:
    """Epochs a second."""
    begun, many = time.perf_counter(), 0
    while (passed := time.perf_counter() - begun) < seconds or not many:
        epoch()
        many += 1
    return many / passed if passed else 0.0


def on_streams(of: str, number: int, seconds: float, small: bool, made: list[Epoch]) -> float:
    """In threads of this process. What was made for a smaller number is used again: nothing else may run while one warms up."""
    made += [training(of, small) for _ in range(number - len(made))]
    rates: list[float] = []

    def run(epoch: Epoch) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext():
            rates.append(counted(epoch, seconds))

    threads = [Thread(target=run, args=(epoch,)) for epoch in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def in_processes(of: str, number: int, seconds: float, small: bool, turn: Any) -> float:
    """A process each, counted from when all are ready; one after the other compiles, so that none does it twice."""
    fresh = get_context("spawn")
    gate, told = fresh.Barrier(number), fresh.Queue()
    children = [fresh.Process(target=_child, args=(of, seconds, small, turn, gate, told)) for _ in range(number)]
    for child in children:
        child.start()
    rates = [told.get(timeout=300) for _ in children]
    for child in children:
        child.join()
    return sum(rates)


def _child(of: str, seconds: float, small: bool, turn: Any, gate: Barrier, told: Any) -> None:
    with turn:
        epoch = training(of, small)
    gate.wait()
    told.put(counted(epoch, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", default="streams", choices=["streams", "processes"])
    parser.add_argument("--of", default="paper", choices=list(PHASES))
    parser.add_argument("--numbers", default="1,2,3", help="of trainings, with commas, one first")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds, rows, made = (0.1 if args.small else args.seconds), [], []
    turn = get_context("spawn").Lock()
    for number in map(int, args.numbers.split(",")):
        if args.how == "streams":
            rate = on_streams(args.of, number, seconds, args.small, made)
        else:
            rate = in_processes(args.of, number, seconds, args.small, turn)
        times = round(rate / rows[0]["epochs_per_second"], 3) if rows else 1.0
        rows.append(
            {
                "of": args.of,
                "how": args.how,
                "trainings": number,
                "epochs_per_second": round(rate, 3),
                "times_one": times,
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        device = speed.device_name(speed.resolve_device("auto"))
        body = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        atomic_write(args.out, lambda f: f.write(body.encode()))


if __name__ == "__main__":
    main()

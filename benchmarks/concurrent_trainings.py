"""Several trainings at once on one GPU: are two, three or four faster in total than one?

    python benchmarks/concurrent_trainings.py                                   # in one process, each on its own stream
    python benchmarks/concurrent_trainings.py --how processes --of tilt         # one process each; on a GPU under nvidia-cuda-mps-control -d
    python benchmarks/concurrent_trainings.py --small                           # a laptop: only to check that it runs

The paper's recipe, or tilt's for photographs with all its terms, on random pixels. Each training is warmed up and captured,
then all run for the same time. A line for each number of trainings: epochs per second in total, and as a multiple of what one
reaches. ``--out FILE.json`` saves the lines.
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
from headcount.training import accel

Epoch = Callable[[], Any]


def training(of: str, small: bool) -> Epoch:
    """An epoch of a training that is compiled, warmed up and captured."""
    device = accel.resolve_device("auto")
    state = build(of, "bf16" if device.type == "cuda" else "fp32", "auto", device, (6, 3) if small else (400, 100))
    epoch_number = list(PHASES[of].values())[-1]

    def epoch() -> None:
        losses = state.train_epoch(epoch_number), state.valid_loss()
        float(losses[0]), float(losses[1])

    for _ in range(1 if small else 6):
        epoch()
    return epoch


def epochs_per_second(epoch: Epoch, seconds: float) -> float:
    started, count = time.perf_counter(), 0
    while (passed := time.perf_counter() - started) < seconds or not count:
        epoch()
        count += 1
    return count / passed if passed else 0.0


def on_streams(of: str, number: int, seconds: float, small: bool, trainings: list[Epoch]) -> float:
    """In threads of this process. Trainings prepared for a smaller number are reused: nothing else may run during a warm-up."""
    trainings += [training(of, small) for _ in range(number - len(trainings))]
    rates: list[float] = []

    def run(epoch: Epoch) -> None:
        with torch.cuda.stream(torch.cuda.Stream()) if torch.cuda.is_available() else nullcontext():
            rates.append(epochs_per_second(epoch, seconds))

    threads = [Thread(target=run, args=(epoch,)) for epoch in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates)


def in_processes(of: str, number: int, seconds: float, small: bool, turn: Any) -> float:
    """One process each, timed from when all are ready; they compile one after the other, so that the cache is used."""
    fresh = get_context("spawn")
    gate, rates_queue = fresh.Barrier(number), fresh.Queue()
    children = [fresh.Process(target=_child, args=(of, seconds, small, turn, gate, rates_queue)) for _ in range(number)]
    for child in children:
        child.start()
    rates = [rates_queue.get(timeout=300) for _ in children]
    for child in children:
        child.join()
    return sum(rates)


def _child(of: str, seconds: float, small: bool, turn: Any, gate: Barrier, rates_queue: Any) -> None:
    with turn:
        epoch = training(of, small)
    gate.wait()
    rates_queue.put(epochs_per_second(epoch, seconds))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", default="streams", choices=["streams", "processes"])
    parser.add_argument("--of", default="paper", choices=list(PHASES))
    parser.add_argument("--numbers", default="1,2,3", help="of trainings, with commas, one first")
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seconds, rows, trainings = (0.1 if args.small else args.seconds), [], []
    turn = get_context("spawn").Lock()
    for number in map(int, args.numbers.split(",")):
        if args.how == "streams":
            rate = on_streams(args.of, number, seconds, args.small, trainings)
        else:
            rate = in_processes(args.of, number, seconds, args.small, turn)
        times = round(rate / rows[0]["epochs_per_second"], 3) if rows else 1.0
        rows.append(
            {"of": args.of, "how": args.how, "trainings": number, "epochs_per_second": round(rate, 3), "times_one": times}
        )
        print(json.dumps(rows[-1]), flush=True)
    if args.out:
        device = accel.device_name(accel.resolve_device("auto"))
        body = json.dumps({"device": device, "torch": torch.__version__, "rows": rows}, indent=1) + "\n"
        atomic_write(args.out, lambda f: f.write(body.encode()))


if __name__ == "__main__":
    main()

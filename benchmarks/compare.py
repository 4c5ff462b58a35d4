"""Training time compared with a plain PyTorch loop and with the released code's way of reading images, and how ours scales.

    python benchmarks/compare.py --out benchmarks/results/h200.json     # a GPU: the paper's sizes, about 7 minutes
    python benchmarks/compare.py --small                                # a laptop: the same with few small images

Random pixels of CIFAR-10's size; 400 training and 100 validation bags of 64, ResNet18 with the paper's stem, Counting Network,
Adam, 64 bags a step; an epoch is training and validation. ``starts`` are two separate processes with a run of one epoch each,
and when each stage was reached; ``first_step_seconds`` is that of the second, which uses what the first has compiled.
``seconds_per_run`` is a process from its start to its record (1,500 epochs). Every stage is saved when it is done; called again
on the same machine with the same ``--out``, the script resumes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from plain import Pictures, PlainLoop, Tensors
from torch import nn

from headcount.bags import Bags, Pool
from headcount.experiments import run as runs
from headcount.experiments.recipe import Recipe
from headcount.io import atomic_write
from headcount.models.network import Model, ModelConfig
from headcount.training import accel
from headcount.training.trainer import Trainer

PAPER = {"bags": 400, "size": 64, "images": 60_000, "side": 32, "classes": 10}
SMALL = {"bags": 24, "size": 8, "images": 2_000, "side": 16, "classes": 10}
# Every step has STEP images in all sizes, so nothing is compiled again, and an epoch is a whole number of steps.
STEP = {"paper": 4096, "small": 128}
GROWTH = {
    "size": (16, 32, 64, 128, 256),
    "bags": (256, 512, 1024, 2048),
    "images": (6_000, 60_000, 600_000),
    "classes": (2, 10, 100),
}
GROWTH_SMALL = {"size": (8, 16, 32), "bags": (32, 64, 128), "images": (2_000, 20_000), "classes": (2, 10, 100)}


def random_bags(bags: int, size: int, images: int, side: int, classes: int, share: int = 4) -> tuple[Bags, Bags]:
    """Training bags, and a quarter (one in ``share``) as many for validation."""
    rng = np.random.default_rng(0)
    pool = Pool(rng.integers(0, 256, (images, side, side, 3), dtype=np.uint8))

    def draw(count: int) -> Bags:
        index = rng.integers(0, images, count * size)
        return Bags.of(pool, index=index, sizes=[size] * count, labels=rng.integers(0, classes, count), classes=classes)

    return draw(bags), draw(bags // share)


def network(train: Bags, width: int) -> Model:
    torch.manual_seed(0)
    options = () if width == 64 else (("width", width),)
    return Model(ModelConfig(train.pool.shape, train.classes, backbone_options=options))


def ours(train: Bags, valid: Bags, device: torch.device, width: int, precision: str, batch: int = 64) -> Callable[[], float]:
    recipe = Recipe(source="digits", precision=precision, batch_bags=batch)
    state = Trainer(network(train, width).to(device), train.to(device), valid.to(device), recipe.train_config)
    epoch = iter(range(1 << 30))

    def run_epoch() -> float:
        losses = state.train_epoch(next(epoch)), state.valid_loss()
        return float(losses[0]) + float(losses[1])

    return run_epoch


def plain(train: Bags, valid: Bags, device: torch.device, width: int, kind: type[Tensors], workers: int):
    model = network(train, width)
    layers = nn.Sequential(model.backbone, model.head.classifier).to(device)
    mean, std = model.normalize.mean, model.normalize.std
    return PlainLoop(layers, kind(train, mean, std), kind(valid, mean, std), 64, 3e-4, workers).epoch


def timed(epoch: Callable[[], float], warm: int, epochs: int) -> float:
    """Seconds per epoch: the median of three rounds. Every epoch ends with a number on the host."""
    for _ in range(warm):
        epoch()
    rounds = []
    for _ in range(3):
        started = time.perf_counter()
        for _ in range(epochs):
            epoch()
        rounds.append((time.perf_counter() - started) / epochs)
    return sorted(rounds)[1]


def ways(sizes: dict[str, int], device: torch.device, width: int, precision: str, workers: int) -> dict:
    """Seconds per epoch of ours, of a plain loop and of the released code's way, and the memory ours uses."""
    bags, gpu = random_bags(**sizes), device.type == "cuda"
    loops = {
        "ours": (ours(*bags, device, width, precision), 5, 30 if gpu else 3),
        "plain loop": (plain(*bags, device, width, Tensors, workers), 1, 2),
        "the released way": (plain(*bags, device, width, Pictures, workers), 1, 1),
    }
    seconds, peak = {}, None
    for name, (epoch, warm, epochs) in loops.items():
        seconds[name] = timed(epoch, warm, epochs)
        print(f"{name:20} {seconds[name]:9.4f} s per epoch  {seconds[name] / seconds['ours']:7.1f} times ours", flush=True)
        if name == "ours" and gpu:
            peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds_per_epoch": seconds["ours"],
        "ways": {name: {"seconds_per_epoch": s, "times_ours": s / seconds["ours"]} for name, s in seconds.items()},
        "peak_gib": peak,
    }


def starts(file: Path, precision: str, more: dict[str, int]) -> dict[str, float]:
    """A run of one epoch from the start of its process: with empty compilation caches, and again with those of the first."""
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as caches:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TRITON_CACHE_DIR": f"{caches}/triton",
            "PYTHONPYCACHEPREFIX": f"{caches}/python",  # packages may be installed without bytecode
            "PYTHONDONTWRITEBYTECODE": "",
        }
        for name in ("cold", "warm"):
            command = [sys.executable, __file__, "--first-step", json.dumps([str(file), precision, more])]
            started = time.perf_counter()
            with subprocess.Popen(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True) as child:
                for line in child.stdout or ():
                    seconds[f"{line.strip()}_{name}"] = time.perf_counter() - started
            if child.returncode:
                raise SystemExit(f"the process for the first step ended with {child.returncode}")
    names = {"first_step_seconds": "first_step_warm", "seconds_per_run_of_one_epoch": "record_warm"}
    return {**{name: seconds[stage] for name, stage in names.items()}, "starts": seconds}


def first_step(file: str, precision: str, more: dict[str, int]) -> None:
    """In a separate process: a run of one epoch that prints each stage it reaches."""
    print("imported", flush=True)
    recipe = Recipe(source=file, precision=precision, epochs=1, **more)
    runs.make_bags(recipe, accel.resolve_device("auto"))
    print("bags", flush=True)
    for name, stage in (("step", "first_step"), ("train_epoch", "first_training"), ("valid_loss", "first_epoch")):
        setattr(Trainer, name, _print_first(getattr(Trainer, name), stage))
    for module, name, stage in (
        (runs.loop, "train", "trained"),
        (runs.scores, "score_test", "predicted"),
        (runs, "predict_votes", "votes"),
    ):
        setattr(module, name, _print_first(getattr(module, name), stage))
    with tempfile.TemporaryDirectory() as out:
        runs.run(recipe, out)
        print("record", flush=True)
    os._exit(0)  # the libraries' exit handlers are not part of the run


def _print_first(function: Callable[..., Any], stage: str) -> Callable[..., Any]:
    """The same function, which prints the stage when its first result is there; a loss, when it is on the host."""
    first: list[Any] = []

    def wrapper(*args: Any, **options: Any) -> Any:
        result = function(*args, **options)
        if not first:
            first.append(float(result) if isinstance(result, torch.Tensor) else None)
            print(stage, flush=True)
        return result

    return wrapper


def whole_runs(file: Path, epochs: int, precision: str, more: dict[str, int]) -> dict[str, float]:
    """From process start to record, and a further run in a process that is warm."""
    recipe = Recipe(source=str(file), precision=precision, epochs=epochs, **more)
    words = [f"--set={name}={value}" for name, value in {**more, "precision": precision}.items()]
    with tempfile.TemporaryDirectory() as out:
        command = ["-m", "headcount", "run", "--source", str(file), "--epochs", str(epochs), "--out", out, *words]
        started = time.perf_counter()
        subprocess.run([sys.executable, *command], check=True, stdout=subprocess.DEVNULL)
        seconds = {"seconds_per_run": time.perf_counter() - started}
        runs.run(recipe.replace(epochs=2), out)
        started = time.perf_counter()
        runs.run(recipe.replace(fold=1), out)
        seconds["seconds_per_further_run"] = time.perf_counter() - started
    return seconds | {"runs_per_hour": 3600 / seconds["seconds_per_further_run"]}


def growth(device: torch.device, small: bool, width: int, precision: str, rows: list[dict]) -> Iterator[dict]:
    """The rows that are missing, one after the other."""
    base = {**SMALL, "bags": 64, "size": 16} if small else {**PAPER, "bags": 512}
    for name, values in (GROWTH_SMALL if small else GROWTH).items():
        for value in values:
            if any((row["varied"], row["value"]) == (name, value) for row in rows):
                continue
            sizes = {**base, name: value}
            _free_memory()
            batch = STEP["small" if small else "paper"] // sizes["size"]
            seconds = timed(ours(*random_bags(**sizes, share=2), device, width, precision, batch), 5, 2 if small else 10)
            n_images = sizes["bags"] * 3 // 2 * sizes["size"]
            yield {"varied": name, "value": value, "seconds_per_epoch": seconds, "images_per_second": n_images / seconds}


def _pixels(folder: str, images: int, side: int, classes: int, **_: int) -> Path:
    """A file with a source of random pixels."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (images, side, side, 3), dtype=np.uint8)
    np.savez(Path(folder) / "pixels.npz", images=pixels, labels=rng.integers(0, classes, images))
    return Path(folder) / "pixels.npz"


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--small", action="store_true", help="few small images: minutes on a laptop")
    parser.add_argument("--run-epochs", type=int, default=1500)
    parser.add_argument("--no-growth", action="store_true")
    parser.add_argument("--first-step", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.first_step:
        return first_step(*args.first_step)
    device = accel.resolve_device("auto")
    gpu = device.type == "cuda"
    precision, workers = ("bf16" if gpu else "tf32"), min(8, accel.n_cores())
    base, width = (SMALL, 8) if args.small else (PAPER, 64)
    result = {
        "device": accel.device_name(device),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "workers": workers,
        "sizes": base,
        "precision": precision,
        "run_epochs": args.run_epochs,
    }
    if args.out and args.out.exists():
        before = json.loads(args.out.read_text())
        if all(before.get(name) == value for name, value in result.items()):
            result = before

    def save(update: dict, row: dict | None = None) -> None:
        print(json.dumps(row or update), flush=True)
        result.update(update)
        if args.out:
            atomic_write(args.out, lambda f: f.write(json.dumps(result, indent=1).encode()))

    if "ways" not in result:
        save(ways(base, device, width, precision, workers))
    few = {"train_bags": 24, "valid_bags": 8, "test_bags": 8, "bag_size": 8} if args.small else {}
    with tempfile.TemporaryDirectory() as folder:
        file = _pixels(folder, **base)
        if "starts" not in result:
            save(starts(file, precision, few))
        if "runs_per_hour" not in result:
            save(whole_runs(file, args.run_epochs, precision, few))
    rows = list(result.get("growth", []))
    if not args.no_growth:
        for row in growth(device, args.small, width, precision, [*rows]):
            rows.append(row)
            save({"growth": rows}, row=row)


if __name__ == "__main__":
    main()

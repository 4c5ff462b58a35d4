"""What one epoch of a recipe costs, variant beside variant, on random pixels of CIFAR-10's size.

    python benchmarks/step.py [--out FILE.json] [--epochs 30] [--profile]     # the paper's recipe
    python benchmarks/step.py --of tilt                                       # tilt's for photographs
    python benchmarks/step.py --heads count,mctformer [--profile]             # steps of 64 bags, head by head
    python benchmarks/step.py --memory 6 --heads count,mctformer              # and what finished trainings leave behind

400 training and 100 validation bags of 64 images. The paper's: ResNet18 with its stem, Counting Network, Adam. Tilt's has three
phases (alone, taught, with the bag term), a line each.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import re
import time
from contextlib import contextmanager

import numpy as np
import torch
from tilt_recipes import BEST

from headcount.bags import Bags, Pool
from headcount.experiments.recipe import Recipe
from headcount.models.network import build_model
from headcount.training import accel, trainer

CLASSES, SIZE = 10, 64
OPTIMIZE_LAYOUT = accel.optimize_layout


def random_bags(pool: Pool, bags: int, rng: np.random.Generator) -> Bags:
    index = rng.integers(0, len(pool), bags * SIZE)
    return Bags.of(pool, index=index, sizes=[SIZE] * bags, labels=rng.integers(0, CLASSES, bags), classes=CLASSES)


@contextmanager
def patched(**changes):
    before = {name: getattr(accel, name) for name in changes}
    for name, value in changes.items():
        setattr(accel, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(accel, name, value)


RECIPES = {"paper": Recipe(), "tilt": BEST}
PHASES = {"paper": {"": 0}, "tilt": {"alone": 10, "taught": 40, "taught, bag term": 60}}  # and an epoch that lies in each


def build(
    of: str, precision: str, compile: str, device: torch.device, sizes: tuple[int, int] = (400, 100), **more
) -> trainer.Trainer:
    rng = np.random.default_rng(0)
    pool = Pool(rng.integers(0, 256, (60_000, 32, 32, 3), dtype=np.uint8)).to(device)
    bags = [random_bags(pool, n, rng).to(device) for n in sizes]
    recipe = RECIPES[of].replace(source="digits", precision=precision, **more)  # never loaded: the pixels are random
    return trainer.Trainer(
        build_model(recipe.model_config(bags[0]), bags[0], seed=recipe.seed).to(device), *bags, recipe.train_config, compile
    )


def measure(
    name: str, of: str, phase: str, epochs: int, precision: str, compile: str, device: torch.device, **changes
) -> tuple[dict, trainer.Trainer]:
    at = PHASES[of][phase]
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with patched(**changes):
        begun = time.monotonic()
        state = build(of, precision, compile, device)
        for turn in range(5):  # compile, warm up, capture
            first = state.train_epoch(at), state.valid_loss()
            float(first[1])
            if turn == 0:
                first_epoch = time.monotonic() - begun
        ready = time.monotonic() - begun
        rounds = []
        for _ in range(3):
            torch.cuda.synchronize()
            t = time.monotonic()
            for _ in range(epochs // 3):
                losses = state.train_epoch(at), state.valid_loss()
                float(losses[0]), float(losses[1])
            rounds.append((time.monotonic() - t) / (epochs // 3))
        t = time.monotonic()
        for _ in range(epochs // 3):
            float(state.train_epoch(at))
        alone = (time.monotonic() - t) / (epochs // 3)
    row = {
        "variant": f"{name}{phase and f': {phase}'}",
        "seconds_per_epoch": round(sorted(rounds)[1], 5),
        "training_alone": round(alone, 5),
        "first_epoch_seconds": round(first_epoch, 1),
        "ready_seconds": round(ready, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "loss": float(losses[0]),
    }
    print(json.dumps(row), flush=True)
    return row, state


class EightChannels(torch.nn.Conv2d):
    """A convolution on three channels and five empty ones: a number the matrix units like."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x, w = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, 8 - t.shape[1])) for t in (input, self.weight))
        return torch.nn.functional.conv2d(x, w, None, self.stride, self.padding)


def _padded(model: torch.nn.Module, device: torch.device, precision: str) -> None:
    OPTIMIZE_LAYOUT(model, device, precision)
    for m in model.modules():
        if isinstance(m, torch.nn.Conv2d) and m.in_channels == 3 and m.kernel_size == (3, 3):
            m.__class__ = EightChannels


def _searched(precision: str, device: torch.device) -> None:
    torch.backends.cudnn.benchmark = True


KINDS = {  # of kernels, by their names; the first that fits
    "convolutions forward": "fprop|convolve_common",
    "convolutions, gradient of the input": "dgrad",
    "convolutions, gradient of the weights": "wgrad|workspace",
    "the stem's operation": "^(convolve|merge_moments|correlate|max_pool|gradient)$|_stem",
    "matrix products": "nvjet|gemm",
    "batch-norms, ReLUs, additions": "triton",
    "optimizer": "multi_tensor",
    "copies, sums and the rest": "",
}


def profile(state: trainer.Trainer, at: int, rows: int = 60) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
        float(state.train_epoch(at))
    found = prof.key_averages()
    kinds: dict[str, float] = {}
    for event in found:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, event.key))
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3
    said = "\n".join(f"{kind:45} {ms:7.2f} ms" for kind, ms in sorted(kinds.items(), key=lambda pair: -pair[1]))
    return f"{found.table(sort_by='cuda_time_total', row_limit=rows, max_name_column_width=110)}\n{said}"


def milliseconds(step, epochs: int) -> float:
    """Of one call; the last result is waited for."""
    float(step(0))
    started = time.monotonic()
    for epoch in range(epochs):
        last = step(epoch)
    float(last)
    return (time.monotonic() - started) / epochs * 1e3


def head_steps(head: str, args: argparse.Namespace, device: torch.device) -> None:
    """Milliseconds of training and validation for 64 bags (WENO: for its two passes over them)."""
    train_steps, valid_steps = (7, 2) if device.type == "cuda" else (1, 1)
    begun, seconds = time.monotonic(), []
    sizes = 64 * train_steps, 64 * valid_steps
    state = build("paper", "bf16", args.compile, device, sizes, head=head, epochs=1)
    for _ in range(5 if device.type == "cuda" else 1):  # compile, warm up, capture
        for step in (lambda: state.train_epoch(0), state.valid_loss):
            float(step())
            seconds.append(round(time.monotonic() - begun, 1))
    epochs = args.epochs if device.type == "cuda" else 1
    row = {
        "head": head,
        "ms_per_training_step": round(milliseconds(state.train_epoch, epochs) / train_steps, 3),
        "ms_per_validation_step": round(milliseconds(lambda _: state.valid_loss(), epochs) / valid_steps, 3),
        "seconds_to_first_training_validation": seconds[:2],
        "seconds_to_captured": seconds[-1],
    }
    print(json.dumps(row), flush=True)
    if args.profile:
        print(profile(state, 0, 15), flush=True)


def memory(heads: list[str], runs: int, device: torch.device) -> None:
    """GiB of the card after each of several short trainings in this process, each with a last step of 16 bags."""
    for i in range(runs):
        state = build("paper", "bf16", "auto", device, head=heads[i % len(heads)], epochs=1)
        for _ in range(5):
            float(state.train_epoch(0)), float(state.valid_loss())
        del state
        gc.collect()
        free, total = torch.cuda.mem_get_info()
        kept = {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "card": total - free}
        print(json.dumps({"run": i + 1, "head": heads[i % len(heads)], **{k: round(v / 2**30, 3) for k, v in kept.items()}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--variants", default="", help="some of them, with semicolons")
    parser.add_argument("--of", default="paper", choices=list(RECIPES))
    parser.add_argument("--heads", default="", help="some of them, with commas")
    parser.add_argument("--memory", type=int, default=0, metavar="RUNS")
    parser.add_argument("--compile", default="auto", help="of --heads: auto, on, off")
    args = parser.parse_args()
    device = accel.resolve_device("auto")
    if args.memory:
        return memory(args.heads.split(",") if args.heads else ["count"], args.memory, device)
    if args.heads:
        for head in args.heads.split(","):
            head_steps(head, args, device)
        return
    plain = {"cuda_graph": lambda f, d: f}
    cudnn = {"PointConv": torch.nn.Conv2d}
    usual = {"optimize_layout": lambda model, device, precision: None}
    one = {**accel.COMBO_KERNELS, "triton.cooperative_reductions": True}
    layers = {
        "optimize_layout": lambda model, device, precision: OPTIMIZE_LAYOUT(model, device, "tf32")
    }  # no kernel of our own
    variants = {
        "plain tf32": ("tf32", "off", plain),
        "plain bf16": ("bf16", "off", plain),
        "captured bf16": ("bf16", "off", {}),
        "compiled, captured bf16": ("bf16", "on", {}),
        "compiled, captured bf16, usual convolutions": ("bf16", "on", usual),
        "compiled, captured bf16, the stem's layers": ("bf16", "on", layers),
        "compiled, captured bf16, 1x1 by cuDNN": ("bf16", "on", cudnn),
        "compiled, captured bf16, cuDNN's search": ("bf16", "on", {"set_tf32": _searched}),
        "compiled, captured bf16, kernels apart": ("bf16", "on", {"COMBO_KERNELS": {}}),
        "compiled, captured bf16, reductions in one": ("bf16", "on", {"COMBO_KERNELS": one}),
        "compiled, captured bf16, eight channels": ("bf16", "on", {"optimize_layout": _padded}),  # for tilt's network
        "compiled, captured tf32": ("tf32", "on", {}),
    }
    chosen = args.variants.split(";") if args.variants else list(variants)
    rows = []
    for name in chosen:
        precision, compile, changes = variants[name]
        accel.compile_function.cache_clear()
        torch._dynamo.reset()
        for phase, at in PHASES[args.of].items():
            try:
                row, state = measure(name, args.of, phase, args.epochs, precision, compile, device, **changes)
                rows.append(row)
                if args.profile and name == "compiled, captured bf16":
                    print(profile(state, at), flush=True)
            except Exception as e:
                print(name, phase, "FAILED", type(e).__name__, str(e)[:600], flush=True)
            finally:
                torch.backends.cudnn.benchmark = False
            state = None
    result = {
        "device": accel.device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rows": rows,
    }
    if args.out:
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)


if __name__ == "__main__":
    main()

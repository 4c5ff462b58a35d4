"""Is a training reproducible? The same recipe and seed twice in one process, and a fingerprint to compare with another process.

    python benchmarks/repeat.py                          # the paper's recipe and tilt's for photographs, random pixels
    python benchmarks/repeat.py --fixed cudnn            # deterministic convolutions
    python benchmarks/repeat.py --fixed compiler         # no kernel is chosen by timing
    python benchmarks/repeat.py --fixed cudnn,compiler
    python benchmarks/repeat.py --small                  # a laptop

A line for each recipe: the first epoch whose losses differ (or none), the largest difference of a weight at the end, the
fingerprint of the weights, seconds per epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any, cast

import torch
import torch._inductor.config
from compare import PAPER, SMALL, random_bags
from tilt_recipes import BEST

from headcount.bags import Bags
from headcount.bags.seeds import seed_for
from headcount.experiments.recipe import Recipe
from headcount.models.network import build_model
from headcount.training import accel
from headcount.training.trainer import Trainer


def train_once(recipe: Recipe, train: Bags, valid: Bags, device: torch.device) -> tuple[list[float], torch.Tensor, float]:
    """Losses of each epoch, all weights in one vector, and the median seconds per epoch."""
    state = Trainer(
        build_model(recipe.model_config(train), train, seed=recipe.seed).to(device),
        train.to(device),
        valid.to(device),
        recipe.train_config,
    )
    losses, seconds = [], []
    for epoch in range(recipe.epochs):
        started = time.perf_counter()
        torch.manual_seed(seed_for(recipe.seed, "noise", epoch))
        losses += [float(state.train_epoch(epoch)), float(state.valid_loss())]
        seconds.append(time.perf_counter() - started)
    weights = torch.cat([p.detach().flatten().float().cpu() for p in state.eval_model.parameters()])
    return losses, weights, sorted(seconds)[len(seconds) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--fixed", default="", help="cudnn, compiler, or both with a comma")
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    fixed = args.fixed.split(",") if args.fixed else []
    torch.backends.cudnn.deterministic = "cudnn" in fixed
    cast(Any, torch._inductor.config).deterministic = "compiler" in fixed
    device = accel.resolve_device("auto")
    precision = "bf16" if device.type == "cuda" else "fp32"
    train, valid = random_bags(**(SMALL if args.small else PAPER))
    width = {"backbone_options": {"width": 8}} if args.small else {}
    recipes = {"paper": Recipe(precision=precision), "tilt, photographs": BEST.replace(precision=precision)}
    for name, recipe in recipes.items():
        recipe = recipe.replace(source="digits", epochs=args.epochs, **width)  # never loaded: the pixels are random
        (first, weights, seconds), (again, others, _) = (train_once(recipe, train, valid, device) for _ in range(2))
        different = [i // 2 + 1 for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
        line = {
            "recipe": name,
            "fixed": fixed,
            "differs_from_epoch": different[0] if different else None,
            "largest_difference": float((weights - others).abs().max()),
            "fingerprint": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12],
            "seconds_per_epoch": round(seconds, 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

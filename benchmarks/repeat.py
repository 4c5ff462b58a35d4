"""Does a training repeat itself? The same recipe and seed twice in one process, and a fingerprint to hold against another's.

    python benchmarks/repeat.py                          # the paper's recipe and tilt's for photographs, random pixels
    python benchmarks/repeat.py --fixed cudnn            # convolutions that add in a fixed order
    python benchmarks/repeat.py --fixed compiler         # nothing is chosen by a stopwatch when kernels are made
    python benchmarks/repeat.py --fixed cudnn,compiler
    python benchmarks/repeat.py --small                  # a laptop

A line for each recipe: the epoch whose losses first differ (none: they never do), the largest difference of a weight at the
end, the fingerprint of the weights, seconds of an epoch.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any, cast

import torch
import torch._inductor.config
from compare import PAPER, SMALL, made
from lines import BEST

from headcount.bags import Bags
from headcount.experiments.recipe import Recipe
from headcount.models.network import build_model
from headcount.seeds import seed_for
from headcount.training.accel import device as speed
from headcount.training.trainer import Trainer


def trained(recipe: Recipe, train: Bags, valid: Bags, device: torch.device) -> tuple[list[float], torch.Tensor, float]:
    """Losses of each epoch, all weights in a row, and the median seconds of an epoch."""
    state = Trainer(
        build_model(recipe.model_config(train), train, seed=recipe.seed).to(device),
        train.to(device),
        valid.to(device),
        recipe.train_config,
    )
    losses, seconds = [], []
    for epoch in range(recipe.epochs):
        begun = time.perf_counter()
        torch.manual_seed(seed_for(recipe.seed, "noise", epoch))
        losses += [float(state.train_epoch(epoch)), float(state.valid_loss())]
        seconds.append(time.perf_counter() - begun)
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
    device = speed.resolve_device("auto")
    precision = "bf16" if device.type == "cuda" else "fp32"
    train, valid = made(**(SMALL if args.small else PAPER))
    width = {"backbone_options": {"width": 8}} if args.small else {}
    recipes = {"paper": Recipe(precision=precision), "tilt, photographs": BEST.replace(precision=precision)}
    for name, recipe in recipes.items():
        recipe = recipe.replace(source="digits", epochs=args.epochs, **width)  # never loaded: the pixels are random
        (first, weights, seconds), (again, others, _) = (trained(recipe, train, valid, device) for _ in range(2))
        apart = [i // 2 + 1 for i, (a, b) in enumerate(zip(first, again, strict=True)) if a != b]
        line = {
            "recipe": name,
            "fixed": fixed,
            "differs_from_epoch": apart[0] if apart else None,
            "largest_difference": float((weights - others).abs().max()),
            "fingerprint": hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:12],
            "seconds_per_epoch": round(seconds, 4),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

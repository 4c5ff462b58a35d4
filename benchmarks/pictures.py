"""Which network ``headcount fit`` should use for small pictures: its recipe with each, on real ones of half the side.

    export HEADCOUNT_DATA=... OMP_NUM_THREADS=1                                            # one core each, half an hour
    python benchmarks/pictures.py --source cifar10 --out benchmarks/results/pictures-cifar10.json
    python benchmarks/pictures.py --source svhn --out benchmarks/results/pictures-svhn.json

Fold 0, Various, 160 / 40 / 40 bags of 24 pictures of 16x16, 40 epochs, one seed. The criterion of the held-out bags needs no
truth and is what ``fit`` itself goes by; instances right are those of the test bags.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path

import torch

from headcount.bags import Bags, Pool
from headcount.experiments.recipe import Recipe
from headcount.experiments.run import make_bags
from headcount.io import atomic_write
from headcount.majority.calibration import evaluate_criterion
from headcount.models.predictions import predict
from headcount.selection.methods import Method, NetworkOptions, network_configs

TRIED = {
    "quick, a share for each label": ("quick", {"form": "class"}),
    "resnet18": ("resnet18", {"form": "full"}),
    "quick": ("quick", {"form": "full"}),
    "quick, one share for all labels": ("quick", {"form": "one"}),
}


def halved(bags: Bags) -> Bags:
    """The same bags of pictures of half the side: means of four pixels."""
    used, index = bags.index.unique(return_inverse=True)
    x = bags.pool.data[used].float()
    n, height, width, channels = x.shape
    x = x.view(n, height // 2, 2, width // 2, 2, channels).mean((2, 4)).round().to(torch.uint8)
    return replace(bags, pool=Pool(x), index=index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default="cifar10")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    recipe = Recipe(source=args.source, train_bags=160, valid_bags=40, test_bags=40, bag_size=24)
    parts = {name: halved(bags) for name, bags in make_bags(recipe, torch.device("cpu")).items()}
    train, valid, test = parts["train"].blind(), parts["valid"].blind(), parts["test"]
    rows = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    for name, (backbone, options) in TRIED.items():
        if name in rows:
            continue
        begun = time.monotonic()
        chosen = NetworkOptions(backbone, epochs=args.epochs, options=options)
        body = Method("tilt", "Tilt", *network_configs("tilt", train, chosen)).fit(train, valid).estimator
        seconds = time.monotonic() - begun
        found = evaluate_criterion(predict(body, valid).instance.softmax(1), valid)
        right = (predict(body, test).instance.argmax(1) == test.truth).float().mean()
        rows[name] = {"criterion": round(found.loss, 4), "right": round(float(right), 4), "seconds": round(seconds)}
        print(name, rows[name], flush=True)
        if args.out:
            body_text = json.dumps(rows, indent=1) + "\n"
            atomic_write(args.out, lambda f, text=body_text: f.write(text.encode()))


if __name__ == "__main__":
    main()

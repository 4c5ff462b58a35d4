"""Training on bags of features: our loader and heads beside ABMIL of torchmil, and beside a plain padded one, written below as
anybody would.

    pip install torchmil==1.0.2   # in an environment of its own; without it there is only the plain one
    python benchmarks/abmil.py [--bags 1000] [--repeats 5] [--heads attention,additive] [--out benchmarks/results/abmil.json]

1,000 bags of 100 to 400 instances with 512 features, two classes, one thread, Adam; epochs of training (batches, forward, loss,
backward, step) at 1, 8 and 64 bags per batch, ours and the others in turn. torchmil's model and batches are timed in a bare loop
and in its own Trainer, which computes metrics in every step. Prints the median over the repeats of bags per second of CPU time.
``--profile`` prints instead where the time of a step of one bag goes, beside what no implementation can do without.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import headcount as hc
from headcount.bags import Bags, Pool
from headcount.training.trainer import Trainer

DIM, CLASSES, SIZES = 512, 2, (100, 400)


class PlainABMIL(nn.Module):
    """Ilse et al., ICML 2018, on padded bags (B, L, D) and their mask (B, L)."""

    def __init__(self, dim: int, classes: int, width: int = 128) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, 1))
        self.classifier = nn.Linear(dim, classes)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        score = self.attention(x)[..., 0].masked_fill(~mask, -torch.inf)
        return self.classifier(torch.bmm(score.softmax(1)[:, None], x)[:, 0])


def collate(items: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    bags, labels = zip(*items, strict=True)
    sizes = torch.tensor([len(bag) for bag in bags])
    return pad_sequence(bags, batch_first=True), torch.arange(int(sizes.max())) < sizes[:, None], torch.tensor(labels)


def padded_epoch(model: nn.Module, batches: Iterable[Any], loss_of: Callable[[Any], Tensor]) -> Callable[[], float]:
    """A function that trains an epoch and returns its mean loss."""
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def epoch() -> float:
        losses = []
        for batch in batches:
            loss = loss_of(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return epoch


def plain_epoch(bags: Bags, batch: int) -> Callable[[], float]:
    model = PlainABMIL(DIM, CLASSES)
    items: Any = list(zip(bags.pool.data.split(bags.sizes.tolist()), bags.label.tolist(), strict=True))
    loader = DataLoader(items, batch, shuffle=True, collate_fn=collate)
    return padded_epoch(model, loader, lambda b: nn.functional.cross_entropy(model(b[0], b[1]), b[2]))


def torchmil_epoch(bags: Bags, batch: int, whole: bool = False) -> Callable[[], float]:
    """torchmil's model and batches; ``whole``: and its Trainer, which computes metrics in every step."""
    from torchmil.data import collate_fn  # ty: ignore[unresolved-import]
    from torchmil.models import ABMIL  # ty: ignore[unresolved-import]
    from torchmil.utils import Trainer as TorchmilTrainer  # ty: ignore[unresolved-import]

    model = ABMIL((DIM,))
    pairs = zip(bags.pool.data.split(bags.sizes.tolist()), bags.label.float(), strict=True)
    items: Any = [{"X": x, "Y": label} for x, label in pairs]
    loader = DataLoader(items, batch, shuffle=True, collate_fn=collate_fn)
    if whole:
        adam = torch.optim.Adam(model.parameters(), 1e-3)
        trainer = TorchmilTrainer(model, adam, device="cpu", disable_pbar=True, verbose=False)
        return lambda: trainer._shared_loop(loader, mode="train")["train/loss"]

    def loss_of(b: Any) -> Tensor:
        (loss,) = model.compute_loss(b["Y"], b["X"], b["mask"])[1].values()
        return loss

    return padded_epoch(model, loader, loss_of)


def our_trainer(bags: Bags, batch: int, head: str) -> Trainer:
    config = hc.ModelConfig.for_bags(bags, backbone="linear", head=head)
    model = hc.build_model(
        config, bags, mean=torch.zeros(DIM), std=torch.ones(DIM)
    )  # the plain one does not standardise either
    config = hc.TrainConfig(epochs=1000, batch_bags=batch, views="none", lr=1e-3, schedule="constant")
    return Trainer(model, bags, bags.take([0]), config, "off")


def our_epoch(bags: Bags, batch: int, head: str) -> Callable[[], float]:
    trainer, numbers = our_trainer(bags, batch, head), iter(range(1000))
    return lambda: float(trainer.train_epoch(next(numbers)))


def profile(bags: Bags, epochs: int) -> dict[str, float]:
    """Microseconds of CPU time of the parts of a step of one bag, each the tenth percentile over all steps: a busy machine is slower,
    never faster."""
    trainer = our_trainer(bags, 1, "attention")
    trainer.model.train()
    head, (sweep,), plain = trainer.head, trainer.passes(0), PlainABMIL(DIM, CLASSES)
    adam, times = torch.optim.Adam(plain.parameters(), 1e-3), dict[str, list[int]]()
    data, started = bags.pool.data.split(bags.sizes.tolist()), 0

    def lap(name: str) -> None:
        nonlocal started
        now = time.process_time_ns()
        times.setdefault(name, []).append(now - started)
        started = time.process_time_ns()

    for ids in trainer.train_loader.shuffled("bags", 0, 0) * epochs:
        started = time.process_time_ns()
        x, batch = trainer.train_loader.batch(ids)
        lap("ours: batch")
        output = head(trainer.features(trainer.model, x), batch.segments)
        lap("ours: forward")
        loss = head.loss(output, batch)
        trainer.model.zero_grad(set_to_none=True)
        lap("ours: loss")
        loss.backward()
        lap("ours: backward")
        trainer.optimizer_step(sweep)
        lap("ours: optimizer")
        x, label = data[int(ids)], bags.label[ids]
        loss = nn.functional.cross_entropy(plain(x[None], torch.ones(1, len(x), dtype=torch.bool)), label)
        adam.zero_grad()
        lap("plain: batch, forward, loss")
        loss.backward()
        lap("plain: backward")
        adam.step()
        lap("plain: optimizer")
        with torch.no_grad():
            hidden = torch.addmm(plain.attention[0].bias, x, plain.attention[0].weight.t())
            lap("needed: projection")
            hidden = hidden.tanh()
            lap("needed: tanh")
            hidden.t() @ x
            lap("needed: gradient of the projection")
    return {name: round(float(np.percentile(values, 10)) / 1000, 1) for name, values in times.items()}


def make_bags(count: int) -> Bags:
    g = np.random.default_rng(0)
    sizes, labels = g.integers(*SIZES, count, endpoint=True), g.integers(0, CLASSES, count)
    x = g.standard_normal((int(sizes.sum()), DIM), dtype=np.float32)
    x[:, 0] += 0.5 * np.repeat(labels, sizes)
    return Bags.of(Pool(x), sizes=sizes.tolist(), labels=labels, classes=CLASSES)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bags", type=int, default=1000)
    parser.add_argument("--batches", default="1,8,64")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--heads", default="attention")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, help="a JSON file with the figures")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bags, results = make_bags(args.bags), []
    if args.profile:
        parts = profile(bags, args.repeats)
        for name, microseconds in parts.items():
            print(f"{name:36} {microseconds:7.1f}")
        if args.out:
            args.out.write_text(
                json.dumps({"bags": args.bags, "torch": torch.__version__, "microseconds": parts}, indent=1) + "\n"
            )
        return
    others = {"plain": plain_epoch}
    if find_spec("torchmil"):
        others |= {"torchmil": torchmil_epoch, "torchmil with its Trainer": partial(torchmil_epoch, whole=True)}
    print("| head | bags per batch | | bags/s | ours is faster by | loss |\n|---|---|---|---|---|---|")
    for head in args.heads.split(","):
        for batch in map(int, args.batches.split(",")):
            torch.manual_seed(0)
            epochs = {name: make(bags, batch) for name, make in others.items()}
            epochs["ours"] = our_epoch(bags, batch, head)
            seconds: dict[str, list[float]] = {name: [] for name in epochs}
            losses = {}
            for repeat in range(args.repeats + 1):
                for name, epoch in epochs.items():  # in turn, so that a busy machine is as busy for all
                    started = time.process_time()
                    losses[name] = epoch()
                    if repeat:  # the first is a warm-up
                        seconds[name].append(time.process_time() - started)
            rate = {name: args.bags / statistics.median(values) for name, values in seconds.items()}
            for name, value in rate.items():
                ratio = rate["ours"] / value
                print(f"| {head} | {batch} | {name} | {value:,.0f} | {ratio:.2f} | {losses[name]:.3f} |", flush=True)
            ratios = {name: round(rate["ours"] / value, 3) for name, value in rate.items() if name != "ours"}
            per_second = {name: round(value, 1) for name, value in rate.items()}
            results.append({"head": head, "batch": batch, "bags_per_second": per_second, "ours_beside": ratios})
    if args.out:
        about = {"bags": args.bags, "repeats": args.repeats, "torch": torch.__version__, "machine": platform.machine()}
        args.out.write_text(json.dumps(about | {"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()

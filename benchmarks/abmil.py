"""Training on bags of features: our loader and heads beside a plain padded ABMIL, written below as anybody would.

    python benchmarks/abmil.py [--bags 1000] [--repeats 3] [--heads attention,additive]

1,000 bags of 100 to 400 instances with 512 features, two classes, one thread, Adam; epochs of training (batches, forward, loss,
backward, step) at 1, 8 and 64 bags per batch, ours and the plain one in turn. Prints the median over the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import time

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


def plain_epoch(bags: Bags, batch: int):
    """A function that trains an epoch and returns its mean loss."""
    model = PlainABMIL(DIM, CLASSES)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    items = list(zip(bags.pool.data.split(bags.sizes.tolist()), bags.label.tolist(), strict=True))
    loader = DataLoader(items, batch, shuffle=True, collate_fn=collate)

    def epoch() -> float:
        losses = []
        for x, mask, label in loader:
            loss = nn.functional.cross_entropy(model(x, mask), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return float(torch.stack(losses).mean())

    return epoch


def our_epoch(bags: Bags, batch: int, head: str):
    config = hc.ModelConfig.for_bags(bags, backbone="linear", head=head)
    model = hc.build_model(
        config, bags, mean=torch.zeros(DIM), std=torch.ones(DIM)
    )  # the plain one does not standardise either
    config = hc.TrainConfig(epochs=1000, batch_bags=batch, views="none", lr=1e-3, schedule="constant")
    trainer, numbers = Trainer(model, bags, bags.take([0]), config, "off"), iter(range(1000))
    return lambda: float(trainer.train_epoch(next(numbers)))


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--heads", default="attention")
    args = parser.parse_args()
    torch.set_num_threads(1)
    bags = make_bags(args.bags)
    print(
        "| head | bags per batch | plain, bags/s | ours, bags/s | ours / plain | loss, plain and ours |\n|---|---|---|---|---|---|"
    )
    for head in args.heads.split(","):
        for batch in map(int, args.batches.split(",")):
            torch.manual_seed(0)
            epochs = {"plain": plain_epoch(bags, batch), "ours": our_epoch(bags, batch, head)}
            seconds: dict[str, list[float]] = {name: [] for name in epochs}
            losses = {}
            for repeat in range(args.repeats + 1):
                for name, epoch in epochs.items():  # in turn, so that a busy machine is as busy for both
                    started = time.process_time()
                    losses[name] = epoch()
                    if repeat:  # the first is a warm-up
                        seconds[name].append(time.process_time() - started)
            plain, ours = (args.bags / statistics.median(seconds[name]) for name in ("plain", "ours"))
            print(
                f"| {head} | {batch} | {plain:,.0f} | {ours:,.0f} | {ours / plain:.2f} | "
                f"{losses['plain']:.3f}, {losses['ours']:.3f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

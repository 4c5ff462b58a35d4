"""What a head costs beside the backbone: time and memory of one training step, for every head.

    python benchmarks/heads.py [--bags 4] [--device cpu]

Bags of 64 instances, features of 512, ten classes; the backbone is ResNet18 with the paper's stem on 32x32 images, timed
in the same run. Prints the table of docs/reference/heads.md.
"""

from __future__ import annotations

import argparse
import gc
import time

import torch

from headcount.bags import Segments
from headcount.models.backbones import ResNet18
from headcount.models.heads import HEADS, Batch, build_head
from headcount.training import accel

SIZE, DIM, CLASSES = 64, 512, 10


def median_seconds(step, device: torch.device, repeats: int) -> float:
    """Of one call, after a warm-up, with the device at rest."""
    times = []
    for i in range(repeats + 1):
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        if i:
            times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def saved_bytes(step) -> int:
    """What autograd keeps between forward and backward: the memory a head adds to a training step."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        step(backward=False)
    return sum(kept.values())


def head_step(name: str, bags: int, device: torch.device):
    head = build_head(name, DIM, CLASSES, {})
    h = torch.randn(bags * SIZE, DIM, device=device).relu().requires_grad_()
    segments = Segments.from_sizes([SIZE] * bags, device=device)
    label = torch.arange(bags, device=device)
    target = torch.eye(CLASSES, device=device)[label % CLASSES]
    head.setup(segments, target)
    head.to(device).train()
    batch = Batch(
        segments=segments,
        target=target,
        bag=label,
        position=torch.arange(bags * SIZE, device=device),
        known=torch.zeros(bags * SIZE, dtype=torch.int64, device=device),
        epoch=torch.zeros((), dtype=torch.int64, device=device),
    )

    def step(backward: bool = True) -> None:
        loss = head.loss(head(h, segments), batch, None)
        if backward:
            loss.backward()

    return step, sum(p.numel() for p in head.parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bags", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    device = accel.resolve_device(args.device)
    backbone = ResNet18(3).to(device).train()
    x = torch.randn(args.bags * SIZE, 3, 32, 32, device=device).to(memory_format=torch.channels_last)

    def whole(backward: bool = True) -> None:
        loss = backbone(x).sum()
        if backward:
            loss.backward()

    base, base_bytes = median_seconds(whole, device, args.repeats), saved_bytes(whole)
    print(f"{args.bags} bags of {SIZE}, forward and backward, {accel.device_name(device)}, torch {torch.__version__}\n")
    print("| head | parameters | ms per bag | of the backbone | MiB kept per bag |\n|---|---|---|---|---|")
    per_bag = base / args.bags * 1e3
    kept = base_bytes / args.bags / 2**20
    print(f"| (ResNet18) | {sum(p.numel() for p in backbone.parameters()):,} | {per_bag:.2f} | 100 % | {kept:.2f} |")
    for name in HEADS:
        gc.collect()
        step, parameters = head_step(name, args.bags, device)
        seconds, held = median_seconds(step, device, args.repeats), saved_bytes(step)
        share, each = seconds / base, seconds / args.bags * 1e3
        print(f"| {name} | {parameters:,} | {each:.2f} | {share:.1%} | {held / args.bags / 2**20:.2f} |", flush=True)


if __name__ == "__main__":
    main()

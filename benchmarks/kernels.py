"""The kernels of training/kernels.py, one by one, on a GPU: microseconds for each configuration.

    python benchmarks/kernels.py

64 bags of 64 images of 32x32. The settings in training/stem.py are the fastest found by this; beside them what cuDNN takes
for the convolution alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F
from triton.testing import do_bench

from headcount.training import kernels, stem
from headcount.training.stem import KernelConfig

n, K = 4096, 64
HALF = {"device": "cuda", "dtype": torch.bfloat16}


def calls() -> dict[str, tuple[Callable[[KernelConfig], object], list[KernelConfig]]]:
    """Each kernel as a function of its configuration, and the configurations to try."""
    torch.manual_seed(0)
    rows, pitch, stride, Y, X, P, Q = stem.StemSizes.of(3, 32, 32)
    x, w = torch.randn(n, rows * pitch, **HALF), torch.randn(2 * K, stem.TAPS, **HALF)
    y, pooled, grad = (torch.randn(n * places, K, **HALF) for places in (Y * X, P * Q, P * Q))
    winner = torch.randint(0, 10, grad.shape, device="cuda", dtype=torch.uint8)
    moments, partial_moments = torch.rand(4, K, device="cuda"), torch.empty(3, 1024, 2 * K, device="cuda")
    sums, total = torch.empty(512, 2 * K, stem.TAPS, device="cuda"), torch.empty(512, K, device="cuda")
    pairs, windows, layout = n * Y * Q, len(grad), (rows, pitch, stride, Y, X, Q, K, stem.TAPS, stem.SPAN)

    def convolve(config: KernelConfig) -> None:
        parts, steps = config.partition(pairs, x.device)
        kernels.convolve[(parts,)](x, w, y, *partial_moments, pairs, steps, True, *layout, **config.settings)

    def correlate(config: KernelConfig) -> None:
        parts, steps = config.partition(pairs, x.device)
        kernels.correlate[(parts,)](x, y, sums, pairs, steps, *layout, **config.settings)

    def merge_moments(config: KernelConfig) -> None:
        kernels.merge_moments[(K // config.tile,)](
            *partial_moments, moments[0], moments[1], 1e-5, moments, 528, n * Y * X, K, 1024, config.tile, **config.settings
        )

    def max_pool(config: KernelConfig) -> None:
        parts = (-(-windows // config.tile),)
        kernels.max_pool[parts](y, moments, pooled, winner, windows, Y, X, P, Q, K, **config.settings)

    def gradient(config: KernelConfig) -> None:
        parts, steps = config.partition(windows, x.device)
        own = (rows, pitch, stride, Y, P, Q, K, stem.TAPS, stem.SPAN)
        kernels.gradient[(parts,)](grad, winner, x, sums, total, windows, steps, *own, **config.settings)

    return {
        "CONVOLVE": (
            convolve,
            [
                KernelConfig(64, 8, 1, 2),
                KernelConfig(64, 8, 2, 1),
                KernelConfig(64, 8, 3, 1),
                KernelConfig(128, 8, 1, 1),
                KernelConfig(64, 4, 1, 2),
            ],
        ),
        "CORRELATE": (
            correlate,
            [
                KernelConfig(64, 8, 2, 1),
                KernelConfig(64, 8, 3, 1),
                KernelConfig(32, 8, 3, 1),
                KernelConfig(32, 8, 4, 1),
                KernelConfig(128, 8, 1, 1),
            ],
        ),
        "MERGE_MOMENTS": (merge_moments, [KernelConfig(channels, warps, 1, 1) for channels in (4, 8, 16) for warps in (4, 8)]),
        "MAX_POOL": (max_pool, [KernelConfig(16, 4, 1, 1), KernelConfig(32, 8, 1, 1)]),
        "GRADIENT": (
            gradient,
            [*(KernelConfig(32, 8, stages, 1) for stages in (1, 2, 3)), KernelConfig(16, 8, 2, 1), KernelConfig(16, 8, 3, 1)],
        ),
    }


def main() -> None:
    blocks, weight = torch.randn(n, 19, 19, 16, **HALF), torch.randn(K, 4, 4, 16, **HALF)
    blocks, weight = (t.permute(0, 3, 1, 2) for t in (blocks, weight))
    print(f"cuDNN, convolution alone, 4x4 on blocks: {1e3 * do_bench(lambda: F.conv2d(blocks, weight)):.1f} us")
    for name, (kernel, configs) in calls().items():
        found = []
        for config in configs:
            try:
                found.append((1e3 * do_bench(lambda: kernel(config), warmup=5, rep=20), config))  # noqa: B023
            except Exception as e:
                print(name, config, type(e).__name__, str(e).splitlines()[0][:80])
        for us, config in sorted(found):
            print(f"{us:7.1f} us  {name} = KernelConfig({', '.join(map(str, config))})", flush=True)


if __name__ == "__main__":
    main()

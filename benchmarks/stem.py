"""The stem's kernels, one by one, on a card: microseconds for each number of warps and size of tile.

    python benchmarks/stem.py

64 bags of 64 images of 32x32. The settings in training/stem.py are the fastest found by this.
"""

from __future__ import annotations

import torch
import triton
from triton.testing import do_bench

from headcount.training import kernels

n, Y, X, P, Q, K = 4096, 16, 16, 8, 8, 64


def main() -> None:
    torch.manual_seed(0)
    y = torch.randn(n * Y * X, K, device="cuda", dtype=torch.bfloat16)
    grad, pooled, top = torch.randn(3, n * P * Q, K, device="cuda", dtype=torch.bfloat16)
    dy, winner = torch.empty_like(y), torch.empty(n * P * Q, K, device="cuda", dtype=torch.uint8)
    x = torch.randn(n, (Y + 3) * (X + 3) * 16, device="cuda", dtype=torch.bfloat16)
    line = torch.rand(4, K, device="cuda") + 0.5
    sums = torch.empty(2, 1024, K, device="cuda")
    spread = torch.empty(1024, K, device="cuda")
    count = torch.empty(1024, device="cuda")
    M, small = len(y), len(top)

    def grid(places: int, tile: int, parts: int) -> tuple[int, int]:
        tiles = triton.cdiv(places, tile)
        step = triton.cdiv(tiles, parts)
        return triton.cdiv(tiles, step), step

    def moments(tile: int, warps: int, parts: int) -> None:
        programs, step = grid(M, tile, parts)
        kernels.moments[(programs,)](y, sums[0], spread, count, M, step, K, tile, num_warps=warps)

    def pool(tile: int, warps: int, _: int) -> None:
        programs = (triton.cdiv(small, tile),)
        kernels.pool[programs](y, line, pooled, top, winner, small, Y, X, P, Q, K, tile, num_warps=warps)

    def added(tile: int, warps: int, parts: int) -> None:
        programs, step = grid(small, tile, parts)
        kernels.sums[(programs,)](grad, top, line, 1e-5, sums[0], sums[1], small, step, K, tile, num_warps=warps)

    def dealt(tile: int, warps: int, _: int) -> None:
        programs = (triton.cdiv(small, tile),)
        kernels.dealt[programs](
            y, grad, winner, line, line[0], line[1], 1e-5, dy, small, M, Y, X, P, Q, K, tile, num_warps=warps
        )

    def weights(tile: int, warps: int, parts: int) -> None:
        out = torch.empty(parts, K, 256, device="cuda")
        steps = triton.cdiv(triton.cdiv(M, tile), parts)
        kernels.weights[(parts,)](x, dy, out, M, steps, X + 3, Y, X, K, 64, tile, num_warps=warps, num_stages=3)

    pool(64, 4, 0)  # winners that stand somewhere
    for kernel, tiles, parts in (
        (moments, (64, 128, 256), (256, 512, 1024)),
        (pool, (16, 32, 64), (0,)),
        (added, (32, 64, 128), (256, 512, 1024)),
        (dealt, (16, 32, 64), (0,)),
        (weights, (32, 64, 128), (132, 264)),
    ):
        found = []
        for tile in tiles:
            for warps in (2, 4, 8):
                for p in parts:
                    try:
                        found.append((1e3 * do_bench(lambda: kernel(tile, warps, p), warmup=5, rep=20), tile, warps, p))  # noqa: B023
                    except Exception as e:
                        print(kernel.__name__, tile, warps, p, type(e).__name__)
        for us, tile, warps, p in sorted(found)[:4]:
            print(f"{kernel.__name__:8} {us:7.1f} us  tile {tile:4} warps {warps} parts {p}", flush=True)


if __name__ == "__main__":
    main()

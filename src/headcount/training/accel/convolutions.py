"""Exact rewrites of convolutions: the same function of the same weights, faster for small images."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.errors import HeadcountWarning
from headcount.training.accel import stem


class TinyMapConv(nn.Conv2d):
    """A 3x3 convolution (padding 1) that is a matrix product where the map is 1x1 or 2x2: the taps on padding are left out.

    The same function with the same weights; at 32x32 pixels it saves eight ninths of ResNet18's layer4 and five ninths of
    layer3. Other maps take the ordinary convolution.
    """

    def forward(self, input: Tensor) -> Tensor:
        side, stride = input.shape[2], self.stride[0]
        if side != input.shape[3] or side > 2:
            return super().forward(input)
        # (n, positions * inputs) and (outputs, 3, 3, inputs): free in channels-last, and the gradient has the layout of the weight
        flat, w = input.permute(0, 2, 3, 1).flatten(1), self.weight.permute(0, 2, 3, 1)
        if side == 1:
            taps, out = w[:, 1, 1], 1
        elif stride == 2:
            taps, out = w[:, 1:, 1:].flatten(1), 1
        else:
            rows = [w[:, 1 - y : 3 - y, 1 - z : 3 - z].flatten(1) for y in (0, 1) for z in (0, 1)]
            taps, out = torch.cat(rows), 2
        return F.linear(flat, taps).unflatten(1, (out, out, self.out_channels)).permute(0, 3, 1, 2)


class PointConv(nn.Conv2d):
    """A 1x1 convolution as a matrix product over the positions of its stride."""

    def forward(self, input: Tensor) -> Tensor:
        positions = input[:, :, :: self.stride[0], :: self.stride[1]].permute(0, 2, 3, 1)
        return F.linear(positions, self.weight[:, :, 0, 0]).permute(0, 3, 1, 2)


class StemConv(nn.Conv2d):
    """The 7x7 stride-2 convolution on three channels, as a 4x4 stride-1 convolution on twelve.

    Each 2x2 block of pixels becomes a position with four times the channels, padded to sixteen, which suits the tensor cores.
    The same function of the same weights, in a quarter of cuDNN's time (docs/explanation/speed.md).
    """

    def forward(self, input: Tensor) -> Tensor:
        _, channels, height, width = input.shape
        if height % 2 or width % 2 or channels > 4:
            return super().forward(input)
        return F.conv2d(_in_blocks(input), _weight_in_blocks(self.weight))


def _in_blocks(x: Tensor) -> Tensor:
    """(n, channels, H, W) -> (n, 16, H/2 + 3, W/2 + 3): each 2x2 block of pixels one position, padded for the convolution."""
    n, channels, height, width = x.shape
    blocks = x.permute(0, 2, 3, 1).reshape(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    return F.pad(blocks.flatten(3), (0, 16 - 4 * channels, 2, 1, 2, 1)).permute(0, 3, 1, 2)


def _weight_in_blocks(weight: Tensor) -> Tensor:
    """(K, channels, 7, 7) -> (K, 16, 4, 4): 8x8 taps, the first row and column zero, in 4x4 blocks."""
    w = F.pad(weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3)
    return F.pad(w, (0, 16 - w.shape[3])).permute(0, 3, 1, 2)


@lru_cache
def stem_runs(device: torch.device) -> bool:
    """Tried once on a few images, with a warning where the kernels do not run (too little shared memory, an old Triton)."""
    try:
        stem.self_test(device)
    except Exception as e:
        reason = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        warnings.warn(f"the stem runs layer by layer, its kernels do not run here ({reason})", HeadcountWarning, stacklevel=2)
        return False
    return True


def optimize_layout(model: nn.Module, device: torch.device, precision: str) -> None:
    """Convolutions with channels-last weights, as the images already are, and the rewrites above, in place. Weights, names and
    results stay."""
    for m in model.modules():
        if device.type == "cuda" and precision == "bf16" and stem.can_fuse(m) and stem_runs(device):
            m.__class__ = stem.FusedStem
        if type(m) is nn.Conv2d and m.bias is None and m.groups == 1:
            m.weight.data = m.weight.data.contiguous(memory_format=torch.channels_last)
            if m.kernel_size == (3, 3) and m.padding == (1, 1):
                m.__class__ = TinyMapConv
            if device.type == "cuda" and m.kernel_size == (1, 1) and m.padding == (0, 0):
                m.__class__ = PointConv
            if device.type == "cuda" and m.kernel_size == (7, 7) and m.padding == (3, 3) and m.stride == (2, 2):
                m.__class__ = StemConv

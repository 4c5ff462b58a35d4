"""Everything that only makes it fast, and decides no meaning: device, precision, compilation, CUDA graphs, threads.

What was gained on one H200 (Counting Network, 64 bags of 64, see docs/explanation/speed.md): the step is bound by memory traffic and
many small kernels, not by arithmetic. So the pool stays on the card, the step is compiled (fewer passes over memory),
captured (no launches), and convolutions on maps of 1x1 and 2x2 are written as the matrix products they are.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.errors import HeadcountError, HeadcountWarning, check_choice
from headcount.training.accel import stem
from headcount.training.distributed import local_rank

COMPILE = ("auto", "on", "off")
COMBO_KERNELS = {"combo_kernels": True}  # of the compiler: small kernels that need not wait for each other become one


def resolve_device(name: str = "auto") -> torch.device:
    """``auto`` is the first GPU if there is one (of several processes at one training each has its own), else the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise HeadcountError(f"no device {name!r}; give auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise HeadcountError(f"device {name} is not one headcount runs on; give auto, cpu, cuda or cuda:1")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise HeadcountError(f"device {name} was asked for, but torch sees no GPU here; give cpu, or auto")
    if device.type == "cuda":
        device = torch.device("cuda", local_rank() if device.index is None else device.index)
        if device.index >= torch.cuda.device_count():
            raise HeadcountError(
                f"device {name} was asked for, there are {torch.cuda.device_count()} GPUs, from cuda:0"
            )
    return device


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"


@contextmanager
def autocast(precision: str, device: torch.device) -> Iterator[None]:
    """``tf32``: float32 with TF32 convolutions where the card has them, the reference. ``fp32``: none of that.
    ``bf16``: bfloat16 where autocast thinks it safe; votes are still counted in float32."""
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False):
        yield


def set_tf32(precision: str, device: torch.device) -> None:
    """Let convolutions use TF32, or not. A setting of the process, so it is made once per training."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


def n_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int = 1) -> int:
    """Cores for each of several processes: more threads than cores is slower than fewer (two by two: half the speed)."""
    return max(1, n_cores() // processes)


# -- the step, faster -------------------------------------------------------------------------------------------------------

StepFunction = Callable[[Tensor], Tensor]


class CUDAGraphed:
    """A function of one tensor as CUDA graphs, one for each length of it. Called exactly like the function.

    The first calls run as they are: they are real steps, and they warm up what capture must not see (library handles,
    compilation, the optimizer's state). Capture itself executes nothing.
    """

    def __init__(self, function: StepFunction, warm: int = 3) -> None:
        self.function, self.warm = function, warm
        self.calls: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.stream = torch.cuda.Stream()

    def __call__(self, which: Tensor) -> Tensor:
        n = len(which)
        if n not in self.graphs:
            self.calls[n] = self.calls.get(n, 0) + 1
            if self.calls[n] <= self.warm:
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    out = self.function(which)
                torch.cuda.current_stream().wait_stream(self.stream)
                return out
            still, graph = which.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream):
                out = self.function(still)
            self.graphs[n] = graph, still, out
        graph, still, out = self.graphs[n]
        still.copy_(which)
        graph.replay()
        return out.clone()


def cuda_graph(function: StepFunction, device: torch.device) -> StepFunction:
    """The same function, captured where that is possible."""
    return CUDAGraphed(function) if device.type == "cuda" else function


def compile_function(function: Callable[..., Any], compile: str, device: torch.device) -> Callable[..., Any]:
    """The same function, compiled: on a GPU by default, on the CPU only when asked (it gains nothing there).

    If compilation fails, the function runs as it is, and a warning says so once in this process.
    """
    check_choice("compile", compile, COMPILE)
    if compile == "off" or (compile == "auto" and device.type != "cuda"):
        return function
    settings = cast(Any, torch._dynamo.config)
    settings.recompile_limit = 64  # one for each length of batch, training and validation, and kind of model
    return CompiledFunction(function, COMBO_KERNELS if device.type == "cuda" else {})


class CompiledFunction:
    """A function that is compiled when first called, first with the options; or runs as it is from when that has failed."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, bool]) -> None:
        self.function, self.failed = function, False
        known = set(torch._inductor.list_options()) if options else set()  # another torch may have none of them
        self.options: dict[str, Any] | None = {name: on for name, on in options.items() if name in known} or None
        self.compiled = torch.compile(function, dynamic=False, options=self.options)

    def __call__(self, *args: Any) -> Any:
        while not self.failed:
            try:
                return self.compiled(*args)
            except Exception as e:
                why = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
                if self.options:
                    message = f"not compiled with {', '.join(self.options)} ({why}); compiling without"
                    self.options, self.compiled = None, torch.compile(self.function, dynamic=False)
                else:
                    self.failed, message = True, f"not compiled ({why}); running as it is, which is slower"
                warnings.warn(message, HeadcountWarning, stacklevel=2)
        return self.function(*args)


# -- exact rewrites of convolutions on tiny maps ----------------------------------------------------------------------------


class TinyMapConv(nn.Conv2d):
    """A 3x3 convolution (padding 1) that is a matrix product where the map is 1x1 or 2x2: the taps on padding are left out.

    The same function with the same weights; at 32x32 pixels it saves eight ninths of ResNet18's layer4 and five ninths of
    layer3. Maps of another size take the ordinary way.
    """

    def forward(self, input: Tensor) -> Tensor:
        side, stride = input.shape[2], self.stride[0]
        if side != input.shape[3] or side > 2:
            return super().forward(input)
        # (n, places * inputs) and (outputs, 3, 3, inputs): free in channels-last, and so the gradient is laid out as the weight
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
    """A 1x1 convolution as the matrix product it is, on the places its stride visits."""

    def forward(self, input: Tensor) -> Tensor:
        places = input[:, :, :: self.stride[0], :: self.stride[1]].permute(0, 2, 3, 1)
        return F.linear(places, self.weight[:, :, 0, 0]).permute(0, 3, 1, 2)


class StemConv(nn.Conv2d):
    """The 7x7 stride-2 convolution on three channels, as a 4x4 stride-1 one on twelve: each 2x2 block of pixels becomes a
    place with four times the channels, padded to sixteen, a number the matrix units like. The same function, same weights;
    cuDNN takes a quarter of the time for it (docs/explanation/speed.md).
    """

    def forward(self, input: Tensor) -> Tensor:
        _, channels, height, width = input.shape
        if height % 2 or width % 2 or channels > 4:
            return super().forward(input)
        return F.conv2d(_in_blocks(input), _weight_in_blocks(self.weight))


def _in_blocks(x: Tensor) -> Tensor:
    """(n, channels, H, W) -> (n, 16, H/2 + 3, W/2 + 3): each 2x2 block of pixels one place, padded for the convolution."""
    n, channels, height, width = x.shape
    blocks = x.permute(0, 2, 3, 1).reshape(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
    return F.pad(blocks.flatten(3), (0, 16 - 4 * channels, 2, 1, 2, 1)).permute(0, 3, 1, 2)


def _weight_in_blocks(weight: Tensor) -> Tensor:
    """(K, channels, 7, 7) -> (K, 16, 4, 4): eight taps a side, the first of them zero, in four blocks of two."""
    w = F.pad(weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 2, 4, 3, 5, 1).flatten(3)
    return F.pad(w, (0, 16 - w.shape[3])).permute(0, 3, 1, 2)


@lru_cache
def _stem_runs(device: torch.device) -> bool:
    """Tried once, on a few images: a card that cannot run the kernels (too little shared memory, an old Triton) is told so."""
    try:
        stem.self_test(device)
    except Exception as e:
        why = f"{type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
        warnings.warn(
            f"the stem runs layer by layer, its kernels do not run here ({why})", HeadcountWarning, stacklevel=2
        )
        return False
    return True


def optimize_layout(model: nn.Module, device: torch.device, precision: str) -> None:
    """Lay a model out for speed: convolutions channels-last, as the images already are, and the short ways above.
    Weights, names and results stay."""
    for m in model.modules():
        if device.type == "cuda" and precision == "bf16" and stem.can_fuse(m) and _stem_runs(device):
            m.__class__ = stem.FusedStem
        if type(m) is nn.Conv2d and m.bias is None and m.groups == 1:
            m.weight.data = m.weight.data.contiguous(memory_format=torch.channels_last)
            if m.kernel_size == (3, 3) and m.padding == (1, 1):
                m.__class__ = TinyMapConv
            if device.type == "cuda" and m.kernel_size == (1, 1) and m.padding == (0, 0):
                m.__class__ = PointConv
            if device.type == "cuda" and m.kernel_size == (7, 7) and m.padding == (3, 3) and m.stride == (2, 2):
                m.__class__ = StemConv

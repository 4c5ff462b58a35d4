"""What only makes training faster, and changes no result: devices, precision, compilation, CUDA graphs, rewritten layers.

On an H200 the step is bound by memory traffic and by many small kernels, not by arithmetic (docs/explanation/speed.md). So the
pool stays on the GPU, the step is compiled (fewer passes over memory) and captured (no launches), and convolutions on maps of
1x1 and 2x2 are written as matrix products.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from typing import Any, cast

import torch
from threadpoolctl import threadpool_limits
from torch import Tensor, nn
from torch.nn import functional as F

from headcount.bags.segments import without_autocast
from headcount.errors import HeadcountError, HeadcountWarning, check_choice, check_number
from headcount.training import stem
from headcount.training.distributed import Step, local_rank

COMPILE = ("auto", "on", "off")
COMBO_KERNELS = {"combo_kernels": True}  # an option of the compiler: independent small kernels are combined


def resolve_device(name: str = "auto") -> torch.device:
    """``auto`` is the first GPU if there is one (each process of torchrun has its own), else the CPU."""
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except (RuntimeError, TypeError):
        raise HeadcountError(f"no device {name!r}; give auto, cpu, cuda or cuda:1") from None
    if device.type == "cpu":
        return device
    if device.type != "cuda":
        raise HeadcountError(f"device {name} is not supported; give auto, cpu, cuda or cuda:1")
    if not torch.cuda.is_available():
        raise HeadcountError(f"device {name} was given, but torch sees no GPU here; give cpu, or auto")
    device = torch.device("cuda", local_rank() if device.index is None else device.index)
    if device.index >= torch.cuda.device_count():
        raise HeadcountError(f"device {name} was given, there are {torch.cuda.device_count()} GPUs, from cuda:0")
    return device


def device_name(device: torch.device) -> str:
    threads = torch.get_num_threads()
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {threads} thread{'s' * (threads != 1)}"


@contextmanager
def limit_threads(n_jobs: int | None) -> Iterator[None]:
    """At most this many threads of PyTorch and of the numerical libraries; -1: as many as processors; None: nothing changes."""
    if n_jobs is None:
        yield
        return
    before, processors = torch.get_num_threads(), os.cpu_count() or 1
    n_threads = check_number("n_jobs", n_jobs, -processors, 1 << 16, integer=True)
    n_threads = max(1, n_threads if n_threads >= 0 else processors + 1 + n_threads)
    torch.set_num_threads(n_threads)
    try:
        with threadpool_limits(n_threads):
            yield
    finally:
        torch.set_num_threads(before)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """``bf16``: bfloat16 where autocast considers it safe; votes are still counted in float32."""
    if precision == "bf16":
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)
    return without_autocast(device.type)


def set_tf32(precision: str, device: torch.device) -> None:
    """Allow TF32 in convolutions, or not. A setting of the process, made once per training."""
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = precision != "fp32"


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_process(processes: int = 1) -> int:
    """Threads for each of several processes: more threads than cores are slower than fewer (two processes: half the speed)."""
    return max(1, n_cores() // processes)


class CUDAGraphed:
    """A function of one tensor as CUDA graphs, one for each length of the tensor. Called like the function. The first calls run
    as they are: they are real steps, and warm up what a capture must not include (library handles, compilation, the state of
    the optimizer). The capture itself executes nothing."""

    def __init__(self, function: Step, device: torch.device, warmup_calls: int = 3) -> None:
        self.function, self.warmup_calls = function, warmup_calls
        self.calls: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.stream, self.pool = _capture_stream(device), torch.cuda.graph_pool_handle()  # never two at once: they share memory

    def __call__(self, ids: Tensor) -> Tensor:
        n = len(ids)
        if n not in self.graphs:
            self.calls[n] = self.calls.get(n, 0) + 1
            if self.calls[n] <= self.warmup_calls:
                self.stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self.stream):
                    output = self.function(ids)
                torch.cuda.current_stream().wait_stream(self.stream)
                return output
            static_ids, graph = ids.clone(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, self.pool, self.stream):
                output = self.function(static_ids)
            self.graphs[n] = graph, static_ids, output
        graph, static_ids, output = self.graphs[n]
        static_ids.copy_(ids)
        graph.replay()
        return output.clone()


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for the process, because each stream keeps a workspace for matrix products."""
    return torch.cuda.Stream(device)


def cuda_graph(function: Step, device: torch.device) -> Step:
    """The same function, captured where that is possible."""
    return CUDAGraphed(function, device) if device.type == "cuda" else function


@lru_cache
def compile_function(function: Callable[..., Tensor], compile: str, device_type: str) -> Callable[..., Tensor]:
    """The same function, compiled: on a GPU by default, on the CPU only on request (it is no faster there). If compilation
    fails, the function runs uncompiled, with one warning per process. Compiled once: trainings with the same shapes share it."""
    if check_choice("compile", compile, COMPILE) == "off" or (compile == "auto" and device_type != "cuda"):
        return function
    cast(Any, torch._dynamo.config).recompile_limit = 64  # each length of batch, training and validation, and kind of model
    return CompiledFunction(function, COMBO_KERNELS if device_type == "cuda" else {})


class CompiledFunction:
    """A function that is compiled on its first call: with the options, or without, or not at all if that fails."""

    def __init__(self, function: Callable[..., Tensor], options: Mapping[str, bool]) -> None:
        self.function, self.failed = function, False
        known = set(torch._inductor.list_options()) if options else set()  # other versions of torch may not have them
        self.options: dict[str, bool] | None = {name: on for name, on in options.items() if name in known} or None
        self.compiled = torch.compile(function, dynamic=False, options=cast(Any, self.options))

    def __call__(self, *args: Any) -> Tensor:
        while not self.failed:
            try:
                return self.compiled(*args)
            except Exception as e:
                reason = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
                if self.options:
                    message = f"not compiled with {', '.join(self.options)} ({reason}); compiling without"
                    self.options, self.compiled = None, torch.compile(self.function, dynamic=False)
                else:
                    self.failed, message = True, f"not compiled ({reason}); running uncompiled, which is slower"
                warnings.warn(message, HeadcountWarning, stacklevel=2)
        return self.function(*args)


class TinyMapConv(nn.Conv2d):
    """A 3x3 convolution (padding 1) that is a matrix product where the map is 1x1 or 2x2, without the taps on padding: at 32x32
    pixels it saves eight ninths of ResNet18's layer4 and five ninths of layer3."""

    def forward(self, input: Tensor) -> Tensor:
        side, stride = input.shape[2], self.stride[0]
        if side != input.shape[3] or side > 2:
            return super().forward(input)
        # free in channels-last, and the gradient has the layout of the weight
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
    """The 7x7 stride-2 convolution on three channels, as a 4x4 stride-1 convolution on twelve: each 2x2 block of pixels becomes a
    position with four times the channels, padded to sixteen, which suits the tensor cores. A quarter of cuDNN's time."""

    def forward(self, input: Tensor) -> Tensor:
        n, channels, height, width = input.shape
        if height % 2 or width % 2 or channels > 4:
            return super().forward(input)
        spare = 16 - 4 * channels
        x = input.permute(0, 2, 3, 1).reshape(n, height // 2, 2, width // 2, 2, channels).permute(0, 1, 3, 2, 4, 5)
        x = F.pad(x.flatten(3), (0, spare, 2, 1, 2, 1)).permute(0, 3, 1, 2)  # (n, 16, H/2 + 3, W/2 + 3)
        # 8x8 taps, the first row and column zero, in 4x4 blocks
        w = F.pad(self.weight, (1, 0, 1, 0)).unflatten(3, (4, 2)).unflatten(2, (4, 2)).permute(0, 2, 4, 3, 5, 1)
        return F.conv2d(x, F.pad(w.flatten(3), (0, spare)).permute(0, 3, 1, 2))


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
            size, padding, on_gpu = m.kernel_size, m.padding, device.type == "cuda"
            if (size, padding) == ((3, 3), (1, 1)):
                m.__class__ = TinyMapConv
            elif on_gpu and (size, padding) == ((1, 1), (0, 0)):
                m.__class__ = PointConv
            elif on_gpu and (size, padding, m.stride) == ((7, 7), (3, 3), (2, 2)):
                m.__class__ = StemConv

"""The step, compiled and captured: fewer passes over memory, and no launches of single kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from headcount.errors import HeadcountWarning, check_choice

COMPILE = ("auto", "on", "off")
COMBO_KERNELS = {"combo_kernels": True}  # an option of the compiler: independent small kernels are combined
StepFunction = Callable[[Tensor], Tensor]


class CUDAGraphed:
    """A function of one tensor as CUDA graphs, one for each length of the tensor. Called like the function.

    The first calls run as they are: they are real steps, and warm up what a capture must not include (library handles,
    compilation, the state of the optimizer). The capture itself executes nothing.
    """

    def __init__(self, function: StepFunction, warmup_calls: int = 3) -> None:
        self.function, self.warmup_calls = function, warmup_calls
        self.calls: dict[int, int] = {}
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self.stream = torch.cuda.Stream()

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
            with torch.cuda.graph(graph, stream=self.stream):
                output = self.function(static_ids)
            self.graphs[n] = graph, static_ids, output
        graph, static_ids, output = self.graphs[n]
        static_ids.copy_(ids)
        graph.replay()
        return output.clone()


def cuda_graph(function: StepFunction, device: torch.device) -> StepFunction:
    """The same function, captured where that is possible."""
    return CUDAGraphed(function) if device.type == "cuda" else function


def run_as_is(function: StepFunction, device: torch.device) -> StepFunction:
    """In place of :func:`cuda_graph` for steps that differ from call to call."""
    return function


def compile_function(function: Callable[..., Tensor], compile: str, device: torch.device) -> Callable[..., Tensor]:
    """The same function, compiled: on a GPU by default, on the CPU only on request (it is no faster there).

    If compilation fails, the function runs uncompiled, with one warning per process.
    """
    check_choice("compile", compile, COMPILE)
    if compile == "off" or (compile == "auto" and device.type != "cuda"):
        return function
    settings = cast(Any, torch._dynamo.config)
    settings.recompile_limit = 64  # one for each length of batch, training and validation, and kind of model
    return CompiledFunction(function, COMBO_KERNELS if device.type == "cuda" else {})


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

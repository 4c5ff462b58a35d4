"""What only makes training faster, and changes no result: devices, precision, compilation, CUDA graphs, rewritten layers.

On an H200 the step is bound by memory traffic and by many small kernels, not by arithmetic (docs/explanation/speed.md). So the
pool stays on the GPU, the step is compiled (fewer passes over memory) and captured (no launches), and convolutions on maps of
1x1 and 2x2 are written as matrix products.
"""

from headcount.training.accel.compilation import COMPILE, CompiledFunction, compile_function, cuda_graph, run_as_is
from headcount.training.accel.convolutions import optimize_layout
from headcount.training.accel.device import autocast, device_name, n_cores, resolve_device, set_tf32, threads_per_process

__all__ = [
    "COMPILE",
    "CompiledFunction",
    "autocast",
    "compile_function",
    "cuda_graph",
    "device_name",
    "n_cores",
    "optimize_layout",
    "resolve_device",
    "run_as_is",
    "set_tf32",
    "threads_per_process",
]

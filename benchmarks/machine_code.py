"""The machine code of the stem's kernels for a GPU, without one: registers, spills, and the instructions of their loops.

    TRITON_INTERPRET=0 python benchmarks/machine_code.py

Triton compiles for a GPU that is not present, and its package disassembles the result. The kernels are bound by the instructions they
issue as much as by memory, so what shortens a loop here shortens its time there (docs/explanation/speed.md). 64 bags of 64 images of 32x32.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from headcount.training import kernels, stem
from headcount.training.stem import KernelConfig

CARD = GPUTarget("cuda", 90, 32)  # Hopper
KINDS = {"*bf16": "x w y grad pooled", "*u8": "winner", "*fp32": "mean spread count moments out total"}
SHOWN = ("SHFL", "LDG", "LDGSTS", "STS", "LDS", "LDSM", "HGMMA", "STG", "BAR", "STL", "LDL")
INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([A-Z][A-Z0-9_]*)[^;\n]*?(0x[0-9a-f]+)?\s*;", re.M)


def compile_kernel(kernel: Any, config: KernelConfig, constants: dict[str, Any]) -> bytes:
    kinds = {name: kind for kind, names in KINDS.items() for name in names.split()}
    fixed = {name: value for name, value in constants.items() if name in kernel.arg_names} | {"TILE": config.tile}
    signature = {n: "constexpr" if n in fixed else kinds.get(n, "i32") for n in kernel.arg_names}
    places = {name: (i,) for i, name in enumerate(kernel.arg_names)}
    whole = [n for n, kind in signature.items() if kind.startswith("*") or n in ("pairs", "windows")]
    aligned = {places[n]: [["tt.divisibility", 16]] for n in whole}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in fixed.items()}, aligned)
    return triton.compile(source, target=CARD, options={k: v for k, v in config.settings.items() if k != "TILE"}).asm["cubin"]


def disassemble(binary: bytes, how: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([tool, how, file.name], capture_output=True, text=True, check=True).stdout


def loops(code: str) -> list[Counter]:
    """The instructions between each jump back of some length and where it leads."""
    found = [(int(at, 16), name, to and int(to, 16)) for at, name, to in INSTRUCTION.findall(code)]
    back = [(to, at) for at, name, to in found if name == "BRA" and to and at - to > 16 * 40]
    return [Counter(name for at, name, _ in found if first <= at <= last) for first, last in back]


def main() -> None:
    rows, pitch, stride, Y, X, P, Q = stem.StemSizes.of(3, 32, 32)
    constants = {
        "ROWS": rows, "PITCH": pitch, "STRIDE": stride, "Y": Y, "X": X, "P": P, "Q": Q, "K": 64,
        "TAPS": stem.TAPS, "SPAN": stem.SPAN, "LEARNS": True,
    }  # fmt: skip
    configs = {"convolve": stem.CONVOLVE, "correlate": stem.CORRELATE, "max_pool": stem.MAX_POOL, "gradient": stem.GRADIENT}
    print(f"Triton {triton.__version__}")
    for name, config in configs.items():
        binary = compile_kernel(getattr(kernels, name), config, constants)
        used = dict(re.findall(r"(REG|STACK):(\d+)", disassemble(binary, "-res-usage")))
        print(f"{name}: {config}, {used['REG']} registers, {used['STACK']} bytes spilled")
        for count in loops(disassemble(binary, "-sass")):
            shown = ", ".join(f"{count[kind]} {kind}" for kind in SHOWN if count[kind])
            print(f"    a loop of {count.total()} instructions: {shown}")


if __name__ == "__main__":
    main()

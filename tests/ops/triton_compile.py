"""Compile a group of the Triton kernels for a GPU architecture and print the resources of each as JSON.

    python tests/ops/triton_compile.py 90 lookups

No GPU is needed. Loads and stores are instructions of the compiled code for global memory, by the bytes of one lane.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stdout
from typing import Any

import dense_kernels
import linear_kernels
import sparse_kernels
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

GROUPS = {**sparse_kernels.GROUPS, **dense_kernels.GROUPS, **linear_kernels.GROUPS}
"""Functions that return the kernels of a group: (kernel, types) by name. `types` has the type of each argument, or the
value of a constant or of one of `OPTIONS`, and "architecture", the lowest one for this kernel. Other names are
ignored. The type of a tuple, which may be named, has those of its members."""
OPTIONS = {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False, "maxnreg": None}
"""Options of the compiler and their defaults."""
# ld.global.L1::evict_last.v4.b32 moves 4 x 32 bits.
ACCESS = r"\b(ld|st)\.global(?:\.[a-zA-Z_]\S*?)??(?:\.v(\d))?\.[a-z]+(\d+)\b"
ASYNC_COPY = r"\bcp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], 0x(\w+)"
ARITHMETIC = r"\b(fma\.\w+\.(?:ftz\.)?f32|(?:div|sqrt)\.\w+(?:\.ftz)?\.f32|(?:mma\.sync|wgmma\.mma_async)\.)"


def compiled(kernel: Any, types: dict[str, Any], architecture: int) -> dict[str, Any]:
    """Compile a kernel and return its resources."""
    types = {name: kind for name, kind in types.items() if name in kernel.arg_names or name in OPTIONS}
    options = {name: types.pop(name, default) for name, default in OPTIONS.items()}
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def describe(path: tuple[int, ...], kind: Any) -> Any:
        if isinstance(kind, tuple) and not kernel.params[path[0]].is_constexpr:
            members = [describe((*path, index), member) for index, member in enumerate(kind)]
            return type(kind)(*members) if hasattr(kind, "_fields") else tuple(members)
        if not isinstance(kind, str):
            constants[path] = kind
            return "constexpr"
        if kind.startswith("*"):
            attributes[path] = [["tt.divisibility", 16]]
        return kind

    for index, name in enumerate(kernel.arg_names):
        signature[name] = describe((index,), types.get(name))
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    # The log of the assembler has the registers. It is printed only if the kernel is compiled.
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), redirect_stdout(log):
        knobs.nvidia.dump_ptxas_log = knobs.compilation.always_compile = True
        built = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert built.asm["cubin"]
    return {
        **count_instructions(built.asm["ptx"]),
        "registers": logged(log.getvalue(), r"Used (\d+) registers"),
        "spilled_bytes": logged(log.getvalue(), r"(\d+) bytes spill (?:stores|loads)"),
        "shared_bytes": built.metadata.shared,
        "wide_loads_in_flight": count_wide_destinations(built.asm["cubin"]),
    }


def count_instructions(ptx: str) -> dict[str, dict[str, int]]:
    """Return the number of loads and stores by bytes, and of arithmetic instructions that round or use tensor cores."""
    counts: dict[str, Counter[str]] = {"ld": Counter(), "st": Counter()}
    for kind, vector, bits in re.findall(ACCESS, ptx):
        counts[kind][str(int(vector or 1) * int(bits) // 8)] += 1
    counts["ld"].update(str(int(size, 16)) for size in re.findall(ASYNC_COPY, ptx))
    arithmetic = Counter(name.rstrip(".") for name in re.findall(ARITHMETIC, ptx))
    return {"loads": dict(counts["ld"]), "stores": dict(counts["st"]), "arithmetic": dict(arithmetic)}


def count_wide_destinations(cubin: bytes) -> int:
    """Return the number of different registers that receive 16 bytes: the maximum number of such loads in flight."""
    # The assembler may let a load wait until the result of an earlier one was used, and reuse its register.
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        sass = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(set(re.findall(r"\bLDG\.E\S*\.128\S* (R\d+)", sass)))


def logged(log: str, pattern: str) -> int:
    """Return the sum of a number in the log of the assembler."""
    numbers = re.findall(pattern, log)
    assert numbers, f"no {pattern!r} in the log of ptxas: {log}"
    return sum(map(int, numbers))


if __name__ == "__main__":
    architecture = int(sys.argv[1])
    kernels = {
        name: compiled(kernel, types, architecture)
        for name, (kernel, types) in GROUPS[sys.argv[2]]().items()
        if types.get("architecture", architecture) <= architecture
    }
    print(json.dumps(kernels))

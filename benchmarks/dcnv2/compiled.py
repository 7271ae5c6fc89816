"""Compile launched kernels for an H100 or H200, and print the widths of their loads and stores as JSON.

Reads a JSON list of `Signature` from the standard input. No GPU is needed. tests/ops must be importable.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from common.processes import script_environment
from record import ROOT

from dcnv2.requests import Signature

ARCHITECTURE = 90
UPDATE_MODULE = "meseta.ops.row_update.triton_source"
"""Module that generates the kernel of a row update."""


def widest_accesses(signatures: Sequence[Signature], optimizer: str) -> list[tuple[int, int]]:
    """Return the bytes that a lane loads and stores with the widest instructions of each kernel.

    Kernels are compiled in a process without Triton's interpreter. `optimizer` is that of the row update.
    """
    paths = [str(ROOT / "tests" / "ops"), str(ROOT / "tests"), str(ROOT / "src")]
    variables = script_environment()
    variables["PYTHONPATH"] = os.pathsep.join([*paths, variables["PYTHONPATH"]])
    variables.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "dcnv2.compiled", optimizer]
    done = subprocess.run(
        command, input=json.dumps(signatures), env=variables, check=True, stdout=subprocess.PIPE, text=True
    )
    return [(loads, stores) for loads, stores in json.loads(done.stdout)]


def find_kernel(one: Signature, optimizer: str) -> Any:
    """Return the kernel of a signature."""
    if one.module != UPDATE_MODULE:
        return getattr(import_module(one.module), one.name)
    from meseta.ops.row_program.program import trace
    from meseta.ops.row_update.triton_source import update_kernel
    from meseta.optim import make_row_optimizer
    from meseta.spec import OptimizerSpec

    program = trace(make_row_optimizer(OptimizerSpec(name=optimizer, lr=0.1)))  # type: ignore[arg-type]
    instructions = tuple(map(tuple, program.fused_update.instructions.tolist()))
    return update_kernel(instructions, tuple(kind == "row" for kind in program.state_kinds))


def decode(value: Any) -> Any:
    """Return an argument of a signature as Triton's compiler takes it."""
    import triton.language as tl

    if isinstance(value, list):
        return tuple(map(decode, value))
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        return tl.dtype(value["dtype"])
    members, (module, _, name) = map(decode, value["members"]), value["tuple"].partition(":")
    return getattr(import_module(module), name)(*members) if name else tuple(members)


def compile_kernel(one: Signature, optimizer: str) -> tuple[int, int]:
    """Return the bytes of the widest load and store of a lane."""
    from triton_compile import compiled

    types = {name: decode(value) for name, value in one.arguments.items()}
    resources = compiled(find_kernel(one, optimizer), types, ARCHITECTURE)
    loads, stores = (max(map(int, resources[kind]), default=0) for kind in ("loads", "stores"))
    return loads, stores


if __name__ == "__main__":
    print(json.dumps([compile_kernel(Signature(*fields), sys.argv[1]) for fields in json.load(sys.stdin)]))

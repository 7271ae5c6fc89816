"""Probe process that loads torch, the compiled core and other packages. Each stage prints two lines of JSON.

    {"begin": "torch"}
    {"end": "torch", "fact": {"version": "2.13.0", ...}}      or  {"fact": {"error": "ImportError: ..."}}

A stage without its second line has killed or blocked the process.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meseta.errors import MesetaError
from meseta.measure.doctor.child_processes import run_children
from meseta.measure.doctor.packages import MODULES
from meseta.system.environment_variables import environ

ProbeResult = Mapping[str, Any]
"""Result of a stage. If the stage failed, the key `error` has the message, and `error_class` the class of the exception
if there is one. If torch does not load, stages that need it are not run and have `error` and `skipped`."""
PROBE_TIMEOUT_S = 120.0
HUGEPAGE_TEST_BYTES = 64 << 20
"""Size of the tensor with which the share of 2 MB pages is measured."""
# Neither a cached kernel nor Triton's interpreter would test the compiler.
ENVIRONMENT = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_INTERPRET": "0"}
TORCH_UNAVAILABLE = "not tried, since torch does not load"


def run_probes(limit_s: float = PROBE_TIMEOUT_S) -> dict[str, ProbeResult]:
    """Run all stages in child processes of at most `limit_s` seconds, and return results by stage. If one kills its
    process, a new one runs the rest."""
    facts: dict[str, ProbeResult] = {}
    while left := [stage for stage in PROBES if stage not in facts]:
        try:
            [child] = run_children(__name__, [ENVIRONMENT], limit_s, left)
        except OSError as error:
            return facts | {stage: {"error": f"no process could be started: {error}"} for stage in left}
        begun = None
        for message in child.messages("begin", "end"):
            begun = message.get("begin")
            if "end" in message:
                facts[message["end"]] = message["fact"]
        # A process that failed before its first stage would fail again, so all remaining stages get the error.
        for stage in [begun] if begun else left if child.exit_code != 0 else []:
            facts.setdefault(stage, {"error": child.reason})
        if "error" in facts.get("torch", {}):
            facts |= {stage: {"error": TORCH_UNAVAILABLE, "skipped": True} for stage in TORCH_PROBES}
    return facts


def main(stages: Sequence[str]) -> None:
    """Run `stages` in this process. Output of libraries is redirected to standard error."""
    warnings.filterwarnings("ignore")
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        print(json.dumps(message), file=replies, flush=True)

    for stage in stages:
        say(begin=stage)
        try:
            fact: ProbeResult = PROBES[stage]()
        except Exception as error:  # Report any exception to the parent.
            # The text, for users, names MesetaError for all its subclasses. Programs read the exact class.
            name = MesetaError.__name__ if isinstance(error, MesetaError) else type(error).__name__
            text = f"{name}: {' '.join(str(error).split())}"[:500]
            fact = {"error": text, "error_class": type(error).__name__}
        say(end=stage, fact=fact)


def _torch() -> ProbeResult:
    import torch

    return {
        "version": torch.__version__,
        "num_threads": torch.get_num_threads(),
        "omp_num_threads": environ.get("OMP_NUM_THREADS"),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }


def _processor() -> ProbeResult:
    from meseta.ops import core

    return {"instruction_set": core.instruction_set(), "best": core.best_instruction_set()}


def _core() -> ProbeResult:
    from meseta.ops import core

    chosen = core.instruction_set()
    core.load_openmp()
    # Imported directly, because its ImportError has more detail than the MesetaError of `core.core`.
    importlib.import_module(core.MODULES[chosen])
    return {"instruction_set": chosen}


def _io_uring() -> ProbeResult:
    from meseta.ops.row_file.engine import io_uring_unavailable_reason

    return {"why_not": io_uring_unavailable_reason()}


def _pages() -> ProbeResult:
    """Measure the share of a large tensor that is on 2 MB pages."""
    import torch

    from meseta.ops.memory import empty
    from meseta.system.kernel import KernelFiles

    def huge() -> int | None:
        return KernelFiles().read_bytes_field("proc/self/smaps_rollup", "AnonHugePages")

    before = huge()
    tensor = empty((HUGEPAGE_TEST_BYTES,), torch.uint8, keep=False).fill_(1)
    after = huge()
    share = None if before is None or after is None else min((after - before) / tensor.numel(), 1.0)
    return {"huge_share": share}


def _gpu() -> ProbeResult:
    import torch

    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        one = torch.ones(1, device=torch.device("cuda", index))
        if (one + one).item() != 2.0:
            raise RuntimeError(f"GPU {index} computes 1 + 1 = {(one + one).item()}")
        free, total = torch.cuda.mem_get_info(index)
        devices.append({"name": torch.cuda.get_device_name(index), "total_bytes": total, "free_bytes": free})
    return {"devices": devices}


def _nccl() -> ProbeResult:
    import torch

    if not hasattr(torch._C, "_nccl_version"):
        return {"version": None}
    return {"version": ".".join(str(part) for part in torch.cuda.nccl.version())}


def _triton() -> ProbeResult:
    """Compile a kernel of Meseta. Also runs it if there is a GPU."""
    import torch
    import triton

    from meseta.ops import triton_shared

    if torch.cuda.is_available():
        cell = torch.zeros(triton_shared.padded_address_count(1), dtype=torch.int64, device="cuda")
        triton_shared.write_addresses(cell, [cell])
        if cell[0].item() != cell.data_ptr():
            raise RuntimeError("a compiled kernel wrote a wrong number")
        return {"version": triton.__version__, "target": "this GPU"}
    kernel = triton_shared._write_addresses
    signature = dict.fromkeys(kernel.arg_names, "*i64")
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    triton.compile(triton.compiler.ASTSource(fn=kernel, signature=signature), target=target)
    return {"version": triton.__version__, "target": None}


def _import_probe(module: str) -> Callable[[], ProbeResult]:
    def load() -> ProbeResult:
        importlib.import_module(module)
        return {}

    return load


PROBES: dict[str, Callable[[], ProbeResult]] = {
    "torch": _torch,
    "processor": _processor,
    "core": _core,
    "io_uring": _io_uring,
    "pages": _pages,
    "gpu": _gpu,
    "nccl": _nccl,
    "triton": _triton,
    **{f"import {module}": _import_probe(module) for module in MODULES.values() if module != "torch"},
}
TORCH_PROBES = ("processor", "core", "io_uring", "pages", "gpu", "nccl", "triton")


if __name__ == "__main__":
    main(sys.argv[1:])

"""Loading of the compiled core, with the build that matches the instruction set of the processor."""

from __future__ import annotations

import ctypes
import importlib
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from meseta.spec import MesetaError, suggest
from meseta.system.environment_variables import environ

MODULES = {"avx512": "meseta._C_avx512", "avx2": "meseta._C_avx2", "baseline": "meseta._C"}
# All modules are built from the same sources and return bitwise identical results. Order: fastest first.


class InstructionSetError(MesetaError):
    """Value of MESETA_ISA that is unknown, or that this processor does not support."""


@cache
def core() -> ModuleType:
    """Return the compiled core for the instruction set of this machine.

    The environment variable `MESETA_ISA` selects another one: avx512, avx2 or baseline. Raises MesetaError if the core
    was not built. References and GPU kernels do not need it.
    """
    return _load(MODULES[instruction_set()])


def baseline_core() -> ModuleType:
    """Return the compiled core for any processor, which does not need torch. Raises MesetaError if it was not built."""
    return _load(MODULES["baseline"])


def _load(name: str) -> ModuleType:
    load_openmp()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MesetaError(
            f"the compiled core {name} is missing ({error}); build it with `pip install .` in the project's folder"
        ) from None


@cache
def load_openmp() -> None:
    """Load the OpenMP runtime that torch uses, even if torch is not imported, so that both share its threads.

    Does nothing except on Linux. Raises MesetaError if no runtime can be loaded.
    """
    # The core needs functions of GNU's runtime but is linked to no library. Torch wheels contain that runtime under
    # varying file names. A second copy would have threads that torch's settings do not affect.
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    spec = find_spec("torch")
    packages = Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else Path()
    # A torch without its own runtime uses the one of the system.
    beside_torch = [*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")]
    failures = []
    for library in [*map(str, beside_torch), "libgomp.so.1"]:
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            failures.append(str(error))
    raise MesetaError(
        "the compiled core needs GNU's OpenMP runtime, but it can be loaded neither from torch nor from the system "
        f"({'; '.join(failures)}); install torch again with pip, or libgomp1 with the system's package manager"
    )


def instruction_set() -> str:
    """Return `MESETA_ISA` or the best instruction set. Raises InstructionSetError if it is unknown or unsupported."""
    best = best_instruction_set()
    chosen = environ.get("MESETA_ISA", best)
    if chosen not in MODULES:
        raise InstructionSetError(f"MESETA_ISA={chosen!r} is unknown; {suggest(chosen, MODULES)}")
    if list(MODULES).index(chosen) < list(MODULES).index(best):
        raise InstructionSetError(f"MESETA_ISA={chosen!r}: this processor runs {best!r} at most; unset MESETA_ISA")
    return chosen


def best_instruction_set() -> str:
    """Return the best instruction set of this processor: 'avx512', 'avx2' or 'baseline'."""
    import torch  # Not at the top: readers of text formats load the baseline core in processes without torch.

    return {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability(), "baseline")

"""The compiled core, loaded at its first use with torch's OpenMP runtime, and named when it is missing."""

from __future__ import annotations

import ctypes
import importlib
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from meseta.machine.environment_variables import environ
from meseta.spec import MesetaError, suggest

MODULES = {"avx512": "meseta._C_avx512", "avx2": "meseta._C_avx2", "baseline": "meseta._C"}
"""One module per instruction set, all from the same sources and with the same results, the fastest first."""


class InstructionSetError(MesetaError):
    """Value of MESETA_ISA that is unknown, or that this processor does not support."""


@cache
def core() -> ModuleType:
    """The compiled core for this machine's instruction set; MESETA_ISA=avx512, avx2 or baseline chooses another.

    Raises MesetaError where it was not built (the references and GPUs work without it).
    """
    return _load(MODULES[instruction_set()])


def baseline_core() -> ModuleType:
    """The compiled core for any processor, for processes that never load torch. Raises MesetaError as `core` does."""
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
    """Load the OpenMP runtime that torch brings, whether or not torch is loaded, so that both share its threads.

    On Linux the core needs the functions of GNU's runtime and names no library: torch's wheels carry it under several
    file names, and a second one would have threads that torch's settings do not reach. Where torch brings none, it
    takes the system's, and so do we. Raises MesetaError where there is none.
    """
    if sys.platform != "linux" or hasattr(ctypes.CDLL(None), "GOMP_parallel"):
        return
    spec = find_spec("torch")
    packages = Path(spec.origin).parents[1] if spec is not None and spec.origin is not None else Path()
    beside_torch = [*packages.glob("torch/lib/libgomp*.so*"), *packages.glob("torch.libs/libgomp*.so*")]
    failures = []
    for library in [*map(str, beside_torch), "libgomp.so.1"]:
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError as error:
            failures.append(str(error))
    raise MesetaError(
        f"the compiled core needs GNU's OpenMP runtime, which torch brings or the system has; "
        f"neither loads ({'; '.join(failures)}): install torch again with pip, or libgomp1 with the system's packages"
    )


def instruction_set() -> str:
    """'avx512', 'avx2' or 'baseline': what MESETA_ISA says, else the best that this processor runs."""
    best = best_instruction_set()
    chosen = environ.get("MESETA_ISA", best)
    if chosen not in MODULES:
        raise InstructionSetError(f"MESETA_ISA={chosen!r} is unknown; {suggest(chosen, MODULES)}")
    if list(MODULES).index(chosen) < list(MODULES).index(best):
        raise InstructionSetError(f"MESETA_ISA={chosen!r}: this processor runs {best!r} at most; unset MESETA_ISA")
    return chosen


def best_instruction_set() -> str:
    """'avx512', 'avx2' or 'baseline': the best that this processor runs."""
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(_cpu_capability(), "baseline")


def _cpu_capability() -> str:
    import torch  # here alone: readers of text load the baseline in processes without it

    return torch.backends.cpu.get_cpu_capability()

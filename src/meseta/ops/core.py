"""The compiled core, loaded at its first use and named when it is missing."""

from __future__ import annotations

import importlib
import os
from functools import cache
from types import ModuleType

import torch  # first, so that both share one OpenMP runtime

from meseta.spec import MesetaError, nearest

MODULES = {"avx512": "meseta._C_avx512", "avx2": "meseta._C_avx2", "baseline": "meseta._C"}
"""One module per instruction set, all from the same sources and with the same results, the fastest first."""


@cache
def core() -> ModuleType:
    """The compiled core for this machine's instruction set; MESETA_ISA=avx512, avx2 or baseline chooses another.

    Raises MesetaError where it was not built (the references and GPUs work without it).
    """
    name = MODULES[instruction_set()]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MesetaError(
            f"the compiled core {name} is missing ({error}); build it with `pip install .` in the project's folder"
        ) from None


def instruction_set() -> str:
    """'avx512', 'avx2' or 'baseline': what MESETA_ISA says, else the best that this processor runs."""
    best = best_instruction_set()
    chosen = os.environ.get("MESETA_ISA", best)
    if chosen not in MODULES:
        raise MesetaError(f"MESETA_ISA={chosen!r} is unknown; {nearest(chosen, MODULES)}")
    if list(MODULES).index(chosen) < list(MODULES).index(best):
        raise MesetaError(f"MESETA_ISA={chosen!r}: this processor runs {best!r} at most; unset MESETA_ISA")
    return chosen


def best_instruction_set() -> str:
    """'avx512', 'avx2' or 'baseline': the best that this processor runs."""
    return {"AVX512": "avx512", "AVX2": "avx2"}.get(_capability(), "baseline")


def _capability() -> str:
    return torch.backends.cpu.get_cpu_capability()

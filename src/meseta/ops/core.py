"""The compiled core, loaded at its first use and named when it is missing."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch  # noqa: F401  (first, so that both share one OpenMP runtime)

from meseta.spec import MesetaError


@cache
def core() -> ModuleType:
    """`meseta._C`; raises MesetaError where it was not built (the references and GPUs work without it)."""
    try:
        import meseta._C as compiled
    except ImportError as error:
        raise MesetaError(
            f"the compiled core meseta._C is missing ({error}); build it with `pip install .` in the project's folder"
        ) from None
    return compiled

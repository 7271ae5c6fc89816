"""The type that a config's dense part computes in. No torch here: `meseta plan` starts at once."""

from __future__ import annotations

from meseta.config.models import MODEL_NAMES
from meseta.config.run import RunConfig
from meseta.machine.processors import this_processor
from meseta.spec.tables import DenseDtype


def dense_dtype(config: RunConfig, pays: bool | None = None) -> DenseDtype:
    """What dense.dtype names. 'auto' is bfloat16 where that `pays` (None: where this processor multiplies it), but
    float32 for models of the user's own and for float64 rows, whose dense part has a type of its own."""
    if config.dense.dtype != "auto":
        return config.dense.dtype
    if config.model.name not in MODEL_NAMES or config.embedding.dtype == "float64":
        return "float32"
    pays = this_processor().why_no_bfloat16() is None if pays is None else pays
    return "bfloat16" if pays else "float32"

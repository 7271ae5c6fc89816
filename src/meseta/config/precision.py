"""The type that a config's dense part computes in. No torch here: `meseta plan` starts at once."""

from __future__ import annotations

from meseta.config.models import MODEL_NAMES
from meseta.config.run import RunConfig
from meseta.machine.processors import read_processor
from meseta.spec.tables import DenseDtype


def dense_dtype(config: RunConfig, is_fast: bool | None = None) -> DenseDtype:
    """What dense.dtype names. 'auto' is bfloat16 where that `is_fast` (None: where this processor multiplies it), but
    float32 for models of the user's own and for float64 rows, whose dense part has a type of its own."""
    if config.dense.dtype != "auto":
        return config.dense.dtype
    if config.model.name not in MODEL_NAMES or config.embedding.dtype == "float64":
        return "float32"
    is_fast = read_processor().bfloat16_unavailable_reason() is None if is_fast is None else is_fast
    return "bfloat16" if is_fast else "float32"

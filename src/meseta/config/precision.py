"""Data type in which the dense part of a model is computed."""

# This module must not import torch, so that `meseta plan` starts quickly.

from __future__ import annotations

from meseta.config.models import MODEL_NAMES
from meseta.config.run import RunConfig
from meseta.spec.tables import DenseDtype
from meseta.system.processors import read_processor


def dense_dtype(config: RunConfig, is_fast: bool | None = None) -> DenseDtype:
    """Return the data type of the dense part.

    'auto' selects bfloat16 if `is_fast`, by default if this processor has bfloat16 instructions. For custom models and
    float64 tables, 'auto' selects float32.
    """
    if config.dense.dtype != "auto":
        return config.dense.dtype
    if config.model.name not in MODEL_NAMES or config.embedding.dtype == "float64":
        return "float32"
    is_fast = read_processor().bfloat16_unavailable_reason() is None if is_fast is None else is_fast
    return "bfloat16" if is_fast else "float32"

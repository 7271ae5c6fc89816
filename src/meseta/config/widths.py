"""Shapes that follow from the model section of a config. Imports no torch."""

from __future__ import annotations

from meseta.config.model import ModelConfig

WITH_FIRST_ORDER = frozenset({"fm", "deepfm", "wide_deep", "xdeepfm"})
"""Models whose tables have a column more than `embedding_dim`, the weight of the id in a sum."""


def wanted_embedding_dim(config: ModelConfig) -> int:
    """Columns that every table must have for this model."""
    if config.name == "logistic_regression":
        return 1
    return config.embedding_dim + (config.name in WITH_FIRST_ORDER)

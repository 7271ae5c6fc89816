"""Shapes that follow from the model section of a config. No torch here: a plan needs them without a model."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meseta.config.run import ModelConfig

WITH_FIRST_ORDER = frozenset({"fm", "deepfm", "wide_deep", "xdeepfm"})
"""Models whose tables have a column more than `embedding_dim`, the weight of the id in a sum."""


def wanted_embedding_dim(config: ModelConfig) -> int:
    """Columns that every table must have for this model."""
    if config.name == "logistic_regression":
        return 1
    return config.embedding_dim + (config.name in WITH_FIRST_ORDER)


def mlp_weights(config: ModelConfig, num_dense: int, num_tables: int, num_tasks: int = 1) -> int:
    """Weights and biases of a model's MLPs, and of the crosses of dlrm_dcnv2: what its dense part computes with most.

    0 for models without any, and for a model of one's own.
    """
    dim, name = config.embedding_dim, config.name
    everything = num_tables * dim + num_dense
    if name in ("dlrm", "dlrm_dcnv2"):
        bottom = _mlp((num_dense, *config.bottom_mlp, dim)) if num_dense else 0
        vectors = num_tables + bool(num_dense)
        if name == "dlrm_dcnv2":
            width, rank = vectors * dim, config.cross_low_rank
            return bottom + config.cross_layers * (2 * width * rank + width) + _mlp((width, *config.top_mlp, 1))
        dots = vectors * (vectors - 1) // 2 + dim * bool(num_dense)
        width = dots if config.interaction == "dot" else vectors * dim
        return bottom + _mlp((width, *config.top_mlp, 1))
    if name in ("wide_deep", "deepfm", "xdeepfm", "autoint"):
        return _mlp((everything, *config.deep_mlp, 1)) if config.deep_mlp else 0
    if name == "mmoe":
        experts = config.num_experts * _mlp((everything, *config.expert_mlp))
        towers = num_tasks * _mlp((config.expert_mlp[-1], *config.tower_mlp, 1))
        return experts + num_tasks * everything * config.num_experts + towers
    return 0


def _mlp(widths: Sequence[int]) -> int:
    return sum((before + 1) * after for before, after in pairwise(widths))

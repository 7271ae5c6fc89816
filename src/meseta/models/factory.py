"""From the model section of a config to a model."""

from __future__ import annotations

from torch import nn

from meseta.config import ModelConfig
from meseta.models.dlrm import DLRM
from meseta.models.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.layers import DenseDtype
from meseta.models.logistic_regression import LogisticRegression


def wanted_embedding_dim(config: ModelConfig) -> int:
    """Columns that every table must have for this model."""
    return 1 if config.name == "logistic_regression" else config.embedding_dim


def make_model(
    config: ModelConfig, embeddings: nn.Module, num_dense: int, seed: int, dtype: DenseDtype = "float32"
) -> nn.Module:
    """The model that `config` names, on the CPU in float32; its tables stay under `model.embeddings`.

    `dtype` is the type of the dense part's activations; logistic_regression, which has none, does without. The weights
    are a function of (seed, parameter name, shape) alone. Raises MesetaError as the constructors do.
    """
    if config.name == "logistic_regression":
        return LogisticRegression(embeddings, num_dense=num_dense)
    bottom_mlp = (*config.bottom_mlp, config.embedding_dim)
    if config.name == "dlrm":
        return DLRM(
            embeddings,
            num_dense=num_dense,
            bottom_mlp=bottom_mlp,
            top_mlp=config.top_mlp,
            interaction=config.interaction,
            dtype=dtype,
            seed=seed,
        )
    model = DLRMDCNv2(
        embeddings,
        num_dense=num_dense,
        bottom_mlp=bottom_mlp,
        top_mlp=config.top_mlp,
        cross_layers=config.cross_layers,
        cross_low_rank=config.cross_low_rank,
        seed=seed,
    )
    model.dtype = dtype
    return model

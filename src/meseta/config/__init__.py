"""Typed config of a run. Importing it does not import torch."""

from meseta.config.embedding import EmbeddingConfig, ScheduleConfig, TableConfig
from meseta.config.load import load_config, read_config_document, set_default, validate_document
from meseta.config.models import ModelConfig
from meseta.config.run import (
    CheckpointConfig,
    DataConfig,
    DenseConfig,
    DenseOptimizerConfig,
    EarlyStoppingConfig,
    MetricsConfig,
    PlannerConfig,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DenseConfig",
    "DenseOptimizerConfig",
    "EarlyStoppingConfig",
    "EmbeddingConfig",
    "MetricsConfig",
    "ModelConfig",
    "PlannerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TableConfig",
    "TrainConfig",
    "load_config",
    "read_config_document",
    "set_default",
    "validate_document",
]

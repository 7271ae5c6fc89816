"""Typed configs of a run. No torch here."""

from meseta.config.load import load_config
from meseta.config.run import (
    CheckpointConfig,
    DataConfig,
    DenseConfig,
    DenseOptimizerConfig,
    EarlyStoppingConfig,
    EmbeddingConfig,
    ModelConfig,
    RunConfig,
    ScheduleConfig,
    TableConfig,
    TrainConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DenseConfig",
    "DenseOptimizerConfig",
    "EarlyStoppingConfig",
    "EmbeddingConfig",
    "ModelConfig",
    "RunConfig",
    "ScheduleConfig",
    "TableConfig",
    "TrainConfig",
    "load_config",
]

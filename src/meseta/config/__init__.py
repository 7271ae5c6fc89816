"""Typed configs of a run. No torch here."""

from meseta.config.load import check_document, load_config, read_document, set_default
from meseta.config.run import (
    CheckpointConfig,
    DataConfig,
    DenseConfig,
    DenseOptimizerConfig,
    EarlyStoppingConfig,
    EmbeddingConfig,
    MetricsConfig,
    ModelConfig,
    PlannerConfig,
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
    "MetricsConfig",
    "ModelConfig",
    "PlannerConfig",
    "RunConfig",
    "ScheduleConfig",
    "TableConfig",
    "TrainConfig",
    "check_document",
    "load_config",
    "read_document",
    "set_default",
]

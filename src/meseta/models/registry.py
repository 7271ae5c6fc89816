"""Every model of this package: its section of a config, and what builds it. One entry per model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meseta.config.models import ModelConfig
from meseta.config.models.classic import (
    AutoIntConfig,
    DeepFMConfig,
    DLRMConfig,
    DLRMDCNv2Config,
    FMConfig,
    LogisticRegressionConfig,
    MMoEConfig,
    WideDeepConfig,
    XDeepFMConfig,
)
from meseta.models.base import ModelRequest, ScoringModel
from meseta.models.ranking.autoint import make_autoint
from meseta.models.ranking.dlrm import make_dlrm
from meseta.models.ranking.dlrm_dcnv2 import make_dlrm_dcnv2
from meseta.models.ranking.fm import make_deepfm, make_fm
from meseta.models.ranking.logistic_regression import make_logistic_regression
from meseta.models.ranking.mmoe import make_mmoe
from meseta.models.ranking.wide_deep import make_wide_deep
from meseta.models.ranking.xdeepfm import make_xdeepfm


@dataclass(frozen=True)
class ModelEntry:
    """One model."""

    build: Callable[[Any, ModelRequest], ScoringModel]
    """Of an object of the section's class."""
    predicts_all_labels: bool = False
    """Whether its logits are [B, T]; those of all others are [B], of one label."""


MODELS: dict[type[ModelConfig], ModelEntry] = {
    AutoIntConfig: ModelEntry(make_autoint),
    DLRMConfig: ModelEntry(make_dlrm),
    DLRMDCNv2Config: ModelEntry(make_dlrm_dcnv2),
    FMConfig: ModelEntry(make_fm),
    DeepFMConfig: ModelEntry(make_deepfm),
    LogisticRegressionConfig: ModelEntry(make_logistic_regression),
    MMoEConfig: ModelEntry(make_mmoe, predicts_all_labels=True),
    WideDeepConfig: ModelEntry(make_wide_deep),
    XDeepFMConfig: ModelEntry(make_xdeepfm),
}
"""By the class of its section of a config."""

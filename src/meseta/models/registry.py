"""Registry of the models of this package, by the class of their config section."""

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
from meseta.config.models.interactions import (
    DCNv2Config,
    DHENConfig,
    FinalMLPConfig,
    FinalNetConfig,
    GDCNConfig,
    MaskNetConfig,
    WukongConfig,
)
from meseta.models.base import ModelBuildArgs, ScoringModel
from meseta.models.interactions.dcnv2 import make_dcnv2
from meseta.models.interactions.dhen import make_dhen
from meseta.models.interactions.final import make_final
from meseta.models.interactions.finalmlp import make_finalmlp
from meseta.models.interactions.gdcn import make_gdcn
from meseta.models.interactions.masknet import make_masknet
from meseta.models.interactions.wukong import make_wukong
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
    """Registered model."""

    build: Callable[[Any, ModelBuildArgs], ScoringModel]
    """Constructor that takes an object of the config section's class."""
    predicts_all_labels: bool = False
    """Whether logits have the shape [B, T]. Other models predict one label, with logits of shape [B]."""


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
    DCNv2Config: ModelEntry(make_dcnv2),
    DHENConfig: ModelEntry(make_dhen),
    FinalMLPConfig: ModelEntry(make_finalmlp),
    FinalNetConfig: ModelEntry(make_final),
    GDCNConfig: ModelEntry(make_gdcn),
    MaskNetConfig: ModelEntry(make_masknet),
    WukongConfig: ModelEntry(make_wukong),
}

"""Registry of the models of this package, by the class of their config section."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from meseta.config.models import CustomModelConfig, LayeredModelConfig, ModelConfig, model_sections
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
from meseta.models.carry import RESET_HINT
from meseta.models.columns import InputColumns, describe_changes
from meseta.models.custom import make_custom_model
from meseta.models.interactions.deep_cross import make_dcnv2, make_gdcn
from meseta.models.interactions.dhen import make_dhen
from meseta.models.interactions.final import make_final
from meseta.models.interactions.finalmlp import make_finalmlp
from meseta.models.interactions.masknet import make_masknet
from meseta.models.interactions.wukong import make_wukong
from meseta.models.layers import HiddenLayers, MLPOptions, ModelBuildArgs, ScoringModel
from meseta.models.ranking.autoint import make_autoint
from meseta.models.ranking.dlrm import make_dlrm
from meseta.models.ranking.dlrm_dcnv2 import make_dlrm_dcnv2
from meseta.models.ranking.fm import make_deepfm, make_fm
from meseta.models.ranking.linear import make_logistic_regression, make_wide_deep
from meseta.models.ranking.mmoe import make_mmoe
from meseta.models.ranking.xdeepfm import make_xdeepfm
from meseta.spec import MesetaError
from meseta.spec.tables import DenseDtype


@dataclass(frozen=True)
class ModelEntry:
    """Registered model."""

    build: Callable[[Any, ModelBuildArgs], ScoringModel]
    """Constructor that takes an object of the config section's class."""
    predicts_all_labels: bool = False
    """Whether logits have the shape [B, T]. Other models predict one label, with logits of shape [B]."""
    can_change_columns: bool = False


MODELS: dict[type[ModelConfig], ModelEntry] = {
    AutoIntConfig: ModelEntry(make_autoint),
    DLRMConfig: ModelEntry(make_dlrm, can_change_columns=True),
    DLRMDCNv2Config: ModelEntry(make_dlrm_dcnv2, can_change_columns=True),
    FMConfig: ModelEntry(make_fm, can_change_columns=True),
    DeepFMConfig: ModelEntry(make_deepfm, can_change_columns=True),
    LogisticRegressionConfig: ModelEntry(make_logistic_regression, can_change_columns=True),
    MMoEConfig: ModelEntry(make_mmoe, predicts_all_labels=True, can_change_columns=True),
    WideDeepConfig: ModelEntry(make_wide_deep, can_change_columns=True),
    XDeepFMConfig: ModelEntry(make_xdeepfm),
    DCNv2Config: ModelEntry(make_dcnv2, can_change_columns=True),
    DHENConfig: ModelEntry(make_dhen),
    FinalMLPConfig: ModelEntry(make_finalmlp),
    FinalNetConfig: ModelEntry(make_final),
    GDCNConfig: ModelEntry(make_gdcn),
    MaskNetConfig: ModelEntry(make_masknet),
    WukongConfig: ModelEntry(make_wukong),
}


def make_model(
    config: ModelConfig,
    embeddings: nn.Module,
    num_dense: int,
    seed: int,
    dtype: DenseDtype = "float32",
    labels: Sequence[str] = ("label",),
) -> nn.Module:
    """Create the model of a config section on the CPU, with a float32 dense part. `model.embeddings` holds the tables.

    Initial weights of a parameter depend only on the seed, its name and its shape. `make_custom_model` creates custom
    models.

    Args:
        config: Config section of the model.
        embeddings: Module with `tables` and `features`.
        num_dense: Number of dense inputs.
        seed: Seed of the initial weights.
        dtype: Data type of MLP activations.
        labels: Names of the labels to predict.

    Raises MesetaError if the model cannot predict all labels, or an option has no effect on it, and as the constructors
    do.
    """
    if isinstance(config, CustomModelConfig):
        if dtype != "float32":
            raise MesetaError(
                f"model.name {config.name!r}: dense.dtype {dtype!r} applies only to models of this package; a custom "
                "model chooses its dtype itself, for example from model.options"
            )
        return make_custom_model(
            config.name, embeddings, num_dense=num_dense, labels=labels, seed=seed, options=config.options
        )
    entry = MODELS[type(config)]
    if len(labels) > 1 and not entry.predicts_all_labels:
        several = (name for name, section in model_sections().items() if MODELS[section].predicts_all_labels)
        raise MesetaError(
            f"model.name {config.name!r} predicts one label, but the data have {len(labels)} ({', '.join(labels)}); "
            f"choose one, as in data.labels=[{labels[0]}], or a model for several: {', '.join(several)}"
        )
    hidden = config if isinstance(config, LayeredModelConfig) else LayeredModelConfig()
    options = MLPOptions(dtype=dtype, dropout=hidden.dropout, batch_norm=hidden.batch_norm, seed=seed)
    model = entry.build(config, ModelBuildArgs(embeddings, num_dense, len(labels), seed, options))
    num_hidden = sum(part.num_hidden for part in model.modules() if isinstance(part, HiddenLayers))
    if not num_hidden and (options.dropout or options.batch_norm):
        raise MesetaError(
            f"model.name {config.name!r} has no hidden layers, so model.dropout and model.batch_norm have no effect; "
            "remove them, or add hidden layers to its MLPs"
        )
    return model


def check_columns(config: ModelConfig, before: InputColumns, now: InputColumns) -> None:
    """Raise MesetaError if the columns differ and the model cannot change them."""
    changes = describe_changes(before, now)
    entry = MODELS.get(type(config))
    if changes and not (entry and entry.can_change_columns):
        able = (name for name, section in model_sections().items() if MODELS[section].can_change_columns)
        raise MesetaError(
            f"model.name {config.name!r} cannot change its columns ({changes}); {RESET_HINT}; models that can: "
            f"{', '.join(able)}"
        )

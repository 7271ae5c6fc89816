"""Creation of models from the model section of a config."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meseta.config import ModelConfig
from meseta.config.models import CustomModelConfig, LayeredModelConfig, model_sections
from meseta.models.base import ModelBuildArgs
from meseta.models.custom import make_custom_model
from meseta.models.layers import HiddenLayers, MLPOptions
from meseta.models.registry import MODELS
from meseta.spec import MesetaError
from meseta.spec.tables import DenseDtype


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

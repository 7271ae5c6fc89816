"""From the model section of a config to a model."""

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
    """The model that `config` names, on the CPU in float32; its tables stay under `model.embeddings`.

    `dtype` is the type of the dense part's activations; models that have no MLP do without. The weights are a function
    of (seed, parameter name, shape) alone. Raises MesetaError where several labels meet a model that predicts one,
    as the constructors do, and as `make_custom_model` does for a name that is an import path.
    """
    if isinstance(config, CustomModelConfig):
        if dtype != "float32":
            raise MesetaError(
                f"model.name {config.name!r}: dense.dtype {dtype!r} is for the models of this package; a model of your "
                "own decides by itself, for example by model.options"
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
            f"model.name {config.name!r} has no hidden layer here, so that model.dropout and model.batch_norm change "
            "nothing; leave them out, or give its MLPs hidden layers"
        )
    return model

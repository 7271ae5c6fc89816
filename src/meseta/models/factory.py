"""From the model section of a config to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meseta.config import ModelConfig
from meseta.models.autoint import AutoInt
from meseta.models.dlrm import DLRM
from meseta.models.dlrm_dcnv2 import DLRMDCNv2
from meseta.models.fm import FM, DeepFM
from meseta.models.layers import MLP, MLPOptions
from meseta.models.logistic_regression import LogisticRegression
from meseta.models.mmoe import MMoE
from meseta.models.own import make_own_model
from meseta.models.wide_deep import WideDeep
from meseta.models.xdeepfm import XDeepFM
from meseta.spec import MesetaError
from meseta.spec.tables import DenseDtype

MULTI_TASK = frozenset({"mmoe"})
"""Models that predict every label; all others predict one."""


@dataclass(frozen=True)
class _ModelRequest:
    """What `make_model` is asked for."""

    config: ModelConfig
    embeddings: nn.Module
    num_dense: int
    num_tasks: int
    seed: int
    options: MLPOptions


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
    as the constructors do, and as `make_own_model` does for a name that is an import path.
    """
    if ":" in config.name:
        _check_left_alone(config, dtype)
        return make_own_model(
            config.name, embeddings, num_dense=num_dense, labels=labels, seed=seed, options=config.options
        )
    if len(labels) > 1 and config.name not in MULTI_TASK:
        names = ", ".join(labels)
        raise MesetaError(
            f"model.name {config.name!r} predicts one label, but the data have {len(labels)} ({names}); choose one, as "
            f"in data.labels=[{labels[0]}], or a model for several: {', '.join(sorted(MULTI_TASK))}"
        )
    options = MLPOptions(dtype=dtype, dropout=config.dropout, batch_norm=config.batch_norm, seed=seed)
    model = _BUILDERS[config.name](_ModelRequest(config, embeddings, num_dense, len(labels), seed, options))
    hidden = sum(part.num_hidden for part in model.modules() if isinstance(part, MLP))
    if not hidden and (config.dropout or config.batch_norm):
        raise MesetaError(
            f"model.name {config.name!r} has no hidden layer here, so that model.dropout and model.batch_norm change "
            "nothing; leave them out, or give its MLPs hidden layers"
        )
    return model


def _check_left_alone(config: ModelConfig, dtype: DenseDtype) -> None:
    """Raise MesetaError for settings of this package's MLPs, which a model of the user's own has not."""
    for name, value, default in (
        ("dense.dtype", dtype, "float32"),
        ("model.dropout", config.dropout, 0.0),
        ("model.batch_norm", config.batch_norm, False),
    ):
        if value != default:
            raise MesetaError(
                f"model.name {config.name!r}: {name} {value!r} is for the models of this package; a model of your own "
                "decides by itself, for example by model.options"
            )


def _logistic_regression(request: _ModelRequest) -> nn.Module:
    return LogisticRegression(request.embeddings, num_dense=request.num_dense)


def _dlrm(request: _ModelRequest) -> nn.Module:
    return DLRM(
        request.embeddings,
        num_dense=request.num_dense,
        bottom_mlp=(*request.config.bottom_mlp, request.config.embedding_dim),
        top_mlp=request.config.top_mlp,
        interaction=request.config.interaction,
        options=request.options,
        seed=request.seed,
    )


def _dlrm_dcnv2(request: _ModelRequest) -> nn.Module:
    return DLRMDCNv2(
        request.embeddings,
        num_dense=request.num_dense,
        bottom_mlp=(*request.config.bottom_mlp, request.config.embedding_dim),
        top_mlp=request.config.top_mlp,
        cross=(request.config.cross_layers, request.config.cross_low_rank),
        options=request.options,
        seed=request.seed,
    )


def _fm(request: _ModelRequest) -> nn.Module:
    return FM(request.embeddings, num_dense=request.num_dense, seed=request.seed)


def _deepfm(request: _ModelRequest) -> nn.Module:
    return DeepFM(
        request.embeddings,
        num_dense=request.num_dense,
        deep_mlp=request.config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )


def _wide_deep(request: _ModelRequest) -> nn.Module:
    return WideDeep(
        request.embeddings,
        num_dense=request.num_dense,
        deep_mlp=request.config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )


def _xdeepfm(request: _ModelRequest) -> nn.Module:
    return XDeepFM(
        request.embeddings,
        num_dense=request.num_dense,
        cin_layers=request.config.cin_layers,
        deep_mlp=request.config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )


def _autoint(request: _ModelRequest) -> nn.Module:
    return AutoInt(
        request.embeddings,
        num_dense=request.num_dense,
        attention=(request.config.attention_layers, request.config.attention_heads, request.config.attention_dim),
        deep_mlp=request.config.deep_mlp,
        options=request.options,
        seed=request.seed,
    )


def _mmoe(request: _ModelRequest) -> nn.Module:
    return MMoE(
        request.embeddings,
        num_dense=request.num_dense,
        num_tasks=request.num_tasks,
        experts=(request.config.expert_mlp,) * request.config.num_experts,
        tower_mlp=request.config.tower_mlp,
        options=request.options,
        seed=request.seed,
    )


_BUILDERS: Mapping[str, Callable[[_ModelRequest], nn.Module]] = {
    "logistic_regression": _logistic_regression,
    "fm": _fm,
    "wide_deep": _wide_deep,
    "deepfm": _deepfm,
    "xdeepfm": _xdeepfm,
    "autoint": _autoint,
    "dlrm": _dlrm,
    "dlrm_dcnv2": _dlrm_dcnv2,
    "mmoe": _mmoe,
}

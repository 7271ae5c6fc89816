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
class _Wanted:
    """What `make_model` was asked for."""

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
    model = _BUILDERS[config.name](_Wanted(config, embeddings, num_dense, len(labels), seed, options))
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


def _logistic_regression(w: _Wanted) -> nn.Module:
    return LogisticRegression(w.embeddings, num_dense=w.num_dense)


def _dlrm(w: _Wanted) -> nn.Module:
    return DLRM(
        w.embeddings,
        num_dense=w.num_dense,
        bottom_mlp=(*w.config.bottom_mlp, w.config.embedding_dim),
        top_mlp=w.config.top_mlp,
        interaction=w.config.interaction,
        options=w.options,
        seed=w.seed,
    )


def _dlrm_dcnv2(w: _Wanted) -> nn.Module:
    return DLRMDCNv2(
        w.embeddings,
        num_dense=w.num_dense,
        bottom_mlp=(*w.config.bottom_mlp, w.config.embedding_dim),
        top_mlp=w.config.top_mlp,
        cross=(w.config.cross_layers, w.config.cross_low_rank),
        options=w.options,
        seed=w.seed,
    )


def _fm(w: _Wanted) -> nn.Module:
    return FM(w.embeddings, num_dense=w.num_dense, seed=w.seed)


def _deepfm(w: _Wanted) -> nn.Module:
    return DeepFM(w.embeddings, num_dense=w.num_dense, deep_mlp=w.config.deep_mlp, options=w.options, seed=w.seed)


def _wide_deep(w: _Wanted) -> nn.Module:
    return WideDeep(w.embeddings, num_dense=w.num_dense, deep_mlp=w.config.deep_mlp, options=w.options, seed=w.seed)


def _xdeepfm(w: _Wanted) -> nn.Module:
    return XDeepFM(
        w.embeddings,
        num_dense=w.num_dense,
        cin_layers=w.config.cin_layers,
        deep_mlp=w.config.deep_mlp,
        options=w.options,
        seed=w.seed,
    )


def _autoint(w: _Wanted) -> nn.Module:
    return AutoInt(
        w.embeddings,
        num_dense=w.num_dense,
        attention=(w.config.attention_layers, w.config.attention_heads, w.config.attention_dim),
        deep_mlp=w.config.deep_mlp,
        options=w.options,
        seed=w.seed,
    )


def _mmoe(w: _Wanted) -> nn.Module:
    return MMoE(
        w.embeddings,
        num_dense=w.num_dense,
        num_tasks=w.num_tasks,
        experts=(w.config.expert_mlp,) * w.config.num_experts,
        tower_mlp=w.config.tower_mlp,
        options=w.options,
        seed=w.seed,
    )


_BUILDERS: Mapping[str, Callable[[_Wanted], nn.Module]] = {
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

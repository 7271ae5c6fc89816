"""Specs of all row optimizers and their options. Most tests run on each entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from meseta.spec import OptimizerSpec

DIM = 20


def _spec(name: str, **constants: Any) -> OptimizerSpec:
    lr = {} if name == "frozen" else {"lr": 0.1}
    return OptimizerSpec(name=name, **{**lr, **constants})


SPECS = {
    "sgd": _spec("sgd"),
    "sgd-momentum": _spec("sgd", momentum=0.9),
    "adagrad": _spec("adagrad", eps=1e-6, initial_accumulator=0.2),
    "adagrad-from-zero": _spec("adagrad"),
    "rowwise_adagrad": _spec("rowwise_adagrad", eps=1e-6, initial_accumulator=0.2),
    "rowwise_adagrad-from-zero": _spec("rowwise_adagrad"),
    "adam": _spec("adam", eps=1e-6, beta1=0.8, beta2=0.95),
    "adamw": _spec("adamw", eps=1e-6, beta1=0.8, beta2=0.95, weight_decay=0.1),
    "rowwise_adam": _spec("rowwise_adam", eps=1e-6, beta1=0.8, beta2=0.95),
    "lamb": _spec("lamb", eps=1e-6, beta1=0.8, beta2=0.95),
    "lamb-decay": _spec("lamb", eps=1e-6, weight_decay=0.1),
    "rowwise_lamb": _spec("rowwise_lamb", eps=1e-6, beta1=0.8, beta2=0.95, weight_decay=0.1),
    "lars": _spec("lars", trust_coefficient=0.1),
    "lars-momentum": _spec("lars", trust_coefficient=0.1, momentum=0.9, weight_decay=0.1),
    "ftrl": _spec("ftrl"),
    "ftrl-penalties": _spec("ftrl", l1=0.3, l2=0.2, beta=0.5, initial_accumulator=0.1),
    "rmsprop": _spec("rmsprop"),
    "rmsprop-momentum": _spec("rmsprop", momentum=0.9, alpha=0.9, eps=1e-6),
    "frozen": _spec("frozen"),
    "sgd-coupled": _spec("sgd", momentum=0.9, weight_decay=0.1),
    "adagrad-coupled": _spec("adagrad", weight_decay=0.1, eps=1e-6),
    "rowwise_adagrad-coupled": _spec("rowwise_adagrad", weight_decay=0.1, initial_accumulator=0.2),
    "adam-coupled": _spec("adam", weight_decay=0.1),
    "rmsprop-coupled": _spec("rmsprop", weight_decay=0.1, momentum=0.5, eps=1e-6),
    "rowwise_adagrad-decoupled": _spec("rowwise_adagrad", weight_decay=0.1, weight_decay_mode="decoupled"),
    "sgd-l1": _spec("sgd", l1=0.2),
    "rowwise_adagrad-l1": _spec("rowwise_adagrad", l1=0.2, weight_decay=0.1, initial_accumulator=0.2),
    "sgd-clip_value": _spec("sgd", clip_value=0.5),
    "sgd-clip_norm": _spec("sgd", clip_norm=2.0),
    "rowwise_lamb-all": _spec("rowwise_lamb", clip_norm=2.0, clip_value=0.9, weight_decay=0.1),
    "rowwise_adagrad-all": _spec("rowwise_adagrad", clip_norm=2.0, clip_value=0.9, weight_decay=0.1),
}
every = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)

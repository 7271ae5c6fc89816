"""Optimizers of the dense parameters: torch.optim, in forms whose bits do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from meseta.config import DenseOptimizerConfig


def make_dense_optimizer(config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The torch optimizer that `config` names, with torch's own constants where the config has none.

    All are torch's fused forms: elementwise, without atomics, and on a CPU up to ten times faster than the plain ones.
    Adagrad is fused on CPUs only, which is where torch has it.
    """
    parameters = list(parameters)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    if config.name == "adam":
        return torch.optim.Adam(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    if config.name == "adamw":
        return torch.optim.AdamW(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    return torch.optim.Adagrad(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=on_cpu)

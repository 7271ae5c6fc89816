"""Optimizers of the dense parameters: torch.optim and LAMB, with bits that do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from meseta.config import DenseOptimizerConfig
from meseta.optim.clip import OverParts
from meseta.optim.lamb import Lamb


def make_dense_optimizer(
    config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter], over_parts: OverParts | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `config` names, with torch's own constants where the config has none.

    Those of torch are its fused forms: elementwise, without atomics, and on a CPU up to ten times faster than the plain
    ones. Adagrad is fused on CPUs only, which is where torch has it. Parameters that are cut over ranks are a group of
    their own, since torch takes no list of both kinds; LAMB adds up their norms by `over_parts`.
    """
    given = list(parameters)
    cut = [parameter for parameter in given if hasattr(parameter, "to_local")]
    whole = [parameter for parameter in given if not hasattr(parameter, "to_local")]
    groups = [{"params": group} for group in (cut, whole) if group]
    is_fused = not cut  # of SGD and Adagrad torch has no fused form for parts
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        form = {"fused": True} if is_fused else {"foreach": False}
        return torch.optim.SGD(groups, momentum=config.momentum, **form, **common)
    if config.eps is not None:
        common["eps"] = config.eps
    if config.name == "adagrad":
        on_cpu = all(parameter.device.type == "cpu" for parameter in given)
        return torch.optim.Adagrad(groups, fused=on_cpu and is_fused, foreach=None if is_fused else False, **common)
    common["betas"] = (config.beta1, config.beta2)
    if config.name == "adam":
        return torch.optim.Adam(groups, fused=True, **common)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **common)
    return Lamb(groups, over_parts=over_parts, **common)

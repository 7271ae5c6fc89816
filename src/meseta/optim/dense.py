"""Optimizers of the dense parameters: torch.optim and LAMB, with bits that do not depend on the number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meseta.config import DenseOptimizerConfig
from meseta.optim.clip import SumOverRanks, to_local
from meseta.optim.lamb import Lamb


def make_dense_optimizer(
    config: DenseOptimizerConfig, parameters: Iterable[nn.Parameter], sum_over_ranks: SumOverRanks | None = None
) -> torch.optim.Optimizer:
    """The optimizer that `config` names, with torch's own constants where the config has none.

    Those of torch are its fused forms: elementwise, without atomics, and on a CPU up to ten times faster than the plain
    ones. Adagrad is fused on CPUs only, which is where torch has it. Parameters that are cut over ranks are a group of
    their own, since torch takes no list of both kinds; LAMB adds up their norms by `sum_over_ranks`.
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
    return Lamb(groups, sum_over_ranks=sum_over_ranks, **common)


def dense_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that it steps."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_if_finite(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> Callable[[], None]:
    """Step, but where `found_inf`, one float32 beside the parameters, is 1 and not 0: there parameters, moments and
    counts of steps keep their bits. No wait for the device.

    What is returned undoes what the host alone keeps of a step: moments that were not there before it, and counts that
    lie on the CPU. It is to be called where the host learns that `found_inf` was 1.

    torch's fused forms read such a number themselves, as torch.amp.GradScaler gives it. Of others, which step
    all the same, everything is copied before, and put back by the device.
    """
    parameters = dense_parameters(optimizer)
    fresh = [parameter for parameter in parameters if not optimizer.state.get(parameter)]

    def forget_fresh() -> None:
        for parameter in fresh:
            optimizer.state.pop(parameter, None)

    is_fused = all(group.get("fused") for group in optimizer.param_groups)
    if is_fused and not any(hasattr(parameter, "to_local") for parameter in parameters):
        optimizer.found_inf = found_inf  # type: ignore[attr-defined]
        try:
            optimizer.step()
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
        return forget_fresh
    lasting = [to_local(parameter.detach()) for parameter in parameters]
    for parameter in parameters:
        moments = optimizer.state.get(parameter, {}).values()
        lasting += [to_local(moment) for moment in moments if isinstance(moment, Tensor)]
    before = [tensor.clone() for tensor in lasting]
    optimizer.step()
    on_host: list[tuple[Tensor, Tensor]] = []
    for tensor, former in zip(lasting, before, strict=True):
        if tensor.device == found_inf.device:
            tensor.copy_(torch.where(found_inf == 0, tensor, former))
        else:
            on_host.append((tensor, former))

    def undo() -> None:
        forget_fresh()
        for tensor, former in on_host:
            tensor.copy_(former)

    return undo

"""Optimizers of the dense parameters: those of torch.optim and LAMB."""

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
    """Create the optimizer of `config`. Constants missing in `config` have torch's defaults.

    All are bitwise identical for any number of threads. LAMB sums the norms of sharded parameters by `sum_over_ranks`.
    """
    # Fused optimizers are elementwise without atomics, and up to ten times faster on a CPU than the plain ones. Torch
    # has a fused Adagrad for CPUs only. Sharded parameters are a separate group, because torch accepts no list of both
    # kinds.
    all_parameters = list(parameters)
    cut = [parameter for parameter in all_parameters if hasattr(parameter, "to_local")]
    whole = [parameter for parameter in all_parameters if not hasattr(parameter, "to_local")]
    groups = [{"params": group} for group in (cut, whole) if group]
    is_fused = not cut  # Torch has no fused SGD and Adagrad for sharded parameters.
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    if config.name == "sgd":
        form = {"fused": True} if is_fused else {"foreach": False}
        return torch.optim.SGD(groups, momentum=config.momentum, **form, **common)
    if config.eps is not None:
        common["eps"] = config.eps
    if config.name == "adagrad":
        on_cpu = all(parameter.device.type == "cpu" for parameter in all_parameters)
        return torch.optim.Adagrad(groups, fused=on_cpu and is_fused, foreach=None if is_fused else False, **common)
    common["betas"] = (config.beta1, config.beta2)
    if config.name == "adam":
        return torch.optim.Adam(groups, fused=True, **common)
    if config.name == "adamw":
        return torch.optim.AdamW(groups, fused=True, **common)
    return Lamb(groups, sum_over_ranks=sum_over_ranks, **common)


def dense_parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return all parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step_if_finite(optimizer: torch.optim.Optimizer, found_inf: Tensor) -> Callable[[], None]:
    """Run an optimizer step unless `found_inf`, a device scalar (float32), is nonzero. There is no host sync.

    If it is nonzero, parameters, moments and step counts keep their bits. The returned function undoes the changes that
    only the host can undo: moments created by this step, and step counts on the CPU. Call it once the host knows that
    `found_inf` was nonzero.
    """
    # Fused optimizers read `found_inf` themselves, as with torch.amp.GradScaler. Other optimizers always step, so their
    # tensors are copied before and restored on the device.
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

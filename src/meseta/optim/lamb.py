"""LAMB optimizer for dense parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from meseta.optim.clip import SumOverRanks, global_norm


class Lamb(torch.optim.Optimizer):
    """LAMB (arXiv 1904.00962, algorithm 2): Adam's direction, scaled to the norm of each parameter tensor.

    The ratio of norms is not transformed (phi is the identity). It is 1 if a norm is 0, as in the authors' code.
    """

    # direction = Adam's mean / (root + eps) + weight_decay * parameter
    # parameter -= lr * |parameter| / |direction| * direction

    def __init__(
        self,
        params: Iterable[nn.Parameter] | Iterable[dict[str, Any]],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        sum_over_ranks: SumOverRanks | None = None,
    ) -> None:
        """Create the optimizer. `sum_over_ranks` sums squared norms of parameters that are sharded over ranks."""
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        self._sum_over_ranks = sum_over_ranks

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient. `closure` is called first, as in torch.optim."""
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step = int(state["step"])
        mean = state["exp_avg"].mul_(beta1).add_(gradient, alpha=1 - beta1)
        square = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = (mean / (1 - beta1**step)).div_(root)
        if group["weight_decay"]:
            direction.add_(parameter, alpha=group["weight_decay"])
        of_parameter, of_direction = (global_norm([t], self._sum_over_ranks) for t in (parameter, direction))
        quotient = of_parameter / of_direction if of_parameter > 0 and of_direction > 0 else 1.0
        parameter.add_(direction, alpha=-group["lr"] * quotient)

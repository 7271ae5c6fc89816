"""Average of dense parameters over steps, by the functions of torch.optim.swa_utils."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from meseta.optim.dense import to_local
from meseta.spec.average import AverageSpec


class DenseAverage:
    """Average of the parameters of a model. Each rank averages its shards of sharded parameters."""

    @torch.no_grad()
    def __init__(self, average: AverageSpec, model: nn.Module) -> None:
        self.average = average
        self.parameters = dict(model.named_parameters())
        self.averages = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        """Averages by the name of the parameter. Before the first averaged step, their content is not used."""
        is_ema = average.kind == "ema"
        self._update = get_ema_multi_avg_fn(average.decay) if is_ema else get_swa_multi_avg_fn()

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Add the parameters after `step` steps."""
        num_averaged = self.average.num_averaged(step)
        if not num_averaged:
            return
        current, averages = self._local(self.parameters), self._local(self.averages)
        if num_averaged == 1:
            torch._foreach_copy_(averages, current)
        else:
            self._update(averages, current, num_averaged - 1)

    @torch.no_grad()
    def reset(self) -> None:
        """Set the averages to the parameters."""
        torch._foreach_copy_(self._local(self.averages), self._local(self.parameters))

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the parameters and their averages."""
        for parameter, average in zip(self._local(self.parameters), self._local(self.averages), strict=True):
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)

    @staticmethod
    def _local(tensors: Mapping[str, Tensor]) -> list[Tensor]:
        return [to_local(tensor.detach()) for tensor in tensors.values()]

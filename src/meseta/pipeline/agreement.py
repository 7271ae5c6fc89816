"""The loss of a global batch: each rank's sum, and what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from meseta.comm import Totals, World
from meseta.data.batch import Batch
from meseta.ops.sums import total
from meseta.spec import MesetaError


class NonFiniteLoss(MesetaError):
    """The loss of a global batch is no number; raised on all ranks before any update."""


@dataclass(eq=False)
class Agreement:
    """The sum of the losses of all ranks, on its way."""

    whole: Totals
    """Of the global batch."""
    wait: Callable[[], Tensor]
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def begin(world: World, whole: Totals, loss_sum: float, votes: Sequence[float]) -> Agreement:
        """Begin to add this rank's `loss_sum` and `votes` to those of the others, in float64."""
        mine = torch.tensor([loss_sum, *votes], dtype=torch.float64, device=world.device)
        return Agreement(whole, world.start_sum_of_few(mine, "agree"))

    def check(self) -> list[float]:
        """Wait for the sums of the loss and of the votes; raises NonFiniteLoss where the loss is no number."""
        if self._sums is None:
            self._sums = self.wait().tolist()
        loss_sum, weight = self._sums[0], self.whole.weight
        if not (math.isfinite(loss_sum) and math.isfinite(weight)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return self._sums


def totals_of(batch: Batch) -> Totals:
    """Of the samples of one rank, before they are cut into micro-batches."""
    weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    return Totals(batch.batch_size, batch.num_padding, weight)


def loss_sum(logits: Tensor, batch: Batch, task_weights: Tensor | None) -> Tensor:
    """The sum over this rank's samples, and over tasks: sum of w_i * l_i, where w_i is the weight of a sample (1 where
    the batch has none) and l_i the binary cross-entropy, each task's times its weight.

    Raises MesetaError for logits of another shape than the labels.
    """
    label = batch.label.to(logits.dtype)
    if label.shape != logits.shape:
        raise MesetaError(
            f"the model gives logits {list(logits.shape)} for labels {list(label.shape)}; the outputs of the model "
            "must be one per label of the dataset"
        )
    factor = None if task_weights is None else task_weights.to(logits.dtype)
    if batch.weight is not None:
        weight = batch.weight.to(logits.dtype).view(-1, *[1] * (label.dim() - 1))
        factor = weight if factor is None else weight * factor
    return total(functional.binary_cross_entropy_with_logits(logits, label, factor, reduction="none"))

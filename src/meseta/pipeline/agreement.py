"""The loss of a global batch: each rank's sum, and what all ranks agree on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.data.batch import Batch
from meseta.embedding.batch_context import no_op
from meseta.jagged.shapes import Float
from meseta.ops.device_constants import AsyncHostCopy, copy_to_device
from meseta.ops.sums import total
from meseta.spec import MesetaError


class NonFiniteLoss(MesetaError):
    """The loss of a global batch is no number; raised on all ranks before any update."""


class LateNonFiniteLoss(NonFiniteLoss):
    """That of the step before the one under way, or of the last one between steps: the device has known it in time, and
    updated nothing."""


@dataclass(eq=False)
class LossAgreement:
    """The sum of the losses of all ranks, on its way."""

    global_totals: BatchTotals
    """Of the global batch."""
    wait: Callable[[], Tensor]
    term_names: tuple[str, ...] = ()
    """Of the terms of the loss, whose sums stand behind it."""
    _copy: AsyncHostCopy | None = field(default=None, init=False)
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def start(
        world: World, whole: BatchTotals, losses: Tensor, votes: Sequence[float], names: tuple[str, ...] = ()
    ) -> LossAgreement:
        """Begin to add this rank's `losses`, float64 sums of the loss and of its terms, which have `names`, and `votes`
        to those of the others."""
        mine = torch.cat([losses, copy_to_device(votes, torch.float64, world.device)])
        return LossAgreement(whole, world.start_all_reduce_small(mine, "agree"), names)

    def found_inf(self) -> Float[Tensor, ""]:
        """float32 on the device: 1 where `check` will raise NonFiniteLoss, else 0. Waits on the device alone; a copy of
        the sums is then on its way to the host, for `check`."""
        sums = self.wait()
        self._copy = AsyncHostCopy(sums)
        return (~sums[0].isfinite() | (not math.isfinite(self.global_totals.weight))).float()

    def check(self) -> list[float]:
        """Wait for the sums of the loss, of its terms and of the votes; raises NonFiniteLoss where the loss is no
        number."""
        if self._sums is None:
            self._sums = (self.wait() if self._copy is None else self._copy.read()).tolist()
        loss_sum, weight = self._sums[0], self.global_totals.weight
        if not (math.isfinite(loss_sum) and math.isfinite(weight)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return self._sums

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch; 0 where all weights are 0. Waits and raises as `check` does."""
        return self.check()[0] / (self.global_totals.weight or 1.0)

    @property
    def terms(self) -> dict[str, float]:
        """Weighted means over the global batch of the terms of the loss, by name. Waits and raises as `check` does."""
        return {
            name: one / (self.global_totals.weight or 1.0)
            for name, one in zip(self.term_names, self.check()[1:], strict=False)
        }

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums of the votes. Waits and raises as `check` does."""
        return tuple(self.check()[1 + len(self.term_names) :])


@dataclass(eq=False)
class DeferredLossCheck:
    """A step of which the host does not know yet whether its loss is a number; its update has begun."""

    agreement: LossAgreement
    found_inf: Float[Tensor, ""]
    """The same on the device, see `Agreement.found_inf`."""
    batch: Batch | None
    """What it was of."""
    step: int
    """Steps of the tables before it."""
    undo: Callable[[], None] = no_op
    """Puts back what of its update the host has done, where the device has done nothing."""

    def votes(self) -> tuple[float, ...]:
        """Those of the step. Raises LateNonFiniteLoss where its loss is no number."""
        try:
            return self.agreement.votes
        except NonFiniteLoss as error:
            self.undo()
            raise LateNonFiniteLoss(error.reason, remedy=error.remedy) from None


def make_batch_totals(batch: Batch) -> BatchTotals:
    """Of the samples of one rank, before they are cut into micro-batches. A sample without any known label weighs 0."""
    if batch.label_mask_2d is None:
        weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    else:
        weight = _sum_weights(batch, batch.label_mask_2d.any(1))
    return BatchTotals(batch.batch_size, batch.num_padding, weight)


def known_label_weights(batch: Batch) -> list[float]:
    """Sum of the weights of the samples whose label is known, for each of T tasks, over the samples of one rank."""
    assert batch.label_mask_2d is not None
    return [_sum_weights(batch, known) for known in batch.label_mask_2d.unbind(1)]


def _sum_weights(batch: Batch, is_counted: Tensor) -> float:
    """Sum of the weights of some samples [B], in the order in which all of them are added."""
    return float(total(is_counted.double() if batch.weight is None else batch.weight.double() * is_counted))


def start_task_factors(world: World, batch: Batch | None, num_tasks: int) -> Callable[[float], Float[Tensor, " T"]]:
    """Begin to add up the weights of the known labels of a global batch, and return what gives the factor of each task.

    A factor is W / W_t: W is the weight of all samples, and W_t the weight of those whose label of task t is known.
    A loss that is divided by W then becomes the mean over known labels. The factor of a task without known labels is 0.
    If all labels are known, the factors are exactly 1. The result waits for the other ranks once, and is called with W.

    Args:
        world: all ranks; every rank calls this for the same batches in the same order.
        batch: this rank's slice; None if it could not be read.
        num_tasks: T.
    """
    known = [0.0] * num_tasks if batch is None else known_label_weights(batch)
    wait = world.start_all_reduce_small(copy_to_device(known, torch.float64, world.device), "label weights")
    sums: list[Tensor] = []

    def factors(weight: float) -> Tensor:
        if not sums:
            sums.append(wait())
        return torch.where(sums[0] > 0, weight / sums[0], 0.0)

    return factors

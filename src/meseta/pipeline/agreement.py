"""Sum of the loss over all ranks, and the checks that depend on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import no_op
from meseta.ops.device_constants import AsyncHostCopy, copy_to_device
from meseta.ops.sums import total
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError


class NonFiniteLoss(MesetaError):
    """Non-finite loss of a global batch. Raised on all ranks before any update."""


class LateNonFiniteLoss(NonFiniteLoss):
    """Non-finite loss that the host detects one step late. The device has skipped the update."""


@dataclass(eq=False)
class LossAgreement:
    """Asynchronous sum of losses and votes over all ranks."""

    global_totals: BatchTotals
    wait: Callable[[], Tensor]
    term_names: tuple[str, ...] = ()
    _copy: AsyncHostCopy | None = field(default=None, init=False)
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def start(
        world: World, whole: BatchTotals, losses: Tensor, votes: Sequence[float], names: tuple[str, ...] = ()
    ) -> LossAgreement:
        """Start the all-reduce of float64 `losses`, the local sums of the loss and its terms, and local `votes`.

        `whole` has the totals of the global batch, and `names` the names of the terms.
        """
        local_sums = torch.cat([losses, copy_to_device(votes, torch.float64, world.device)])
        return LossAgreement(whole, world.start_all_reduce_small(local_sums, "agree"), names)

    def found_inf(self) -> Float[Tensor, ""]:
        """Return a float32 device scalar, 1 if `check` will raise NonFiniteLoss, else 0. The host does not wait."""
        sums = self.wait()
        # `check` reads this copy.
        self._copy = AsyncHostCopy(sums)
        return (~sums[0].isfinite() | (not math.isfinite(self.global_totals.weight))).float()

    def check(self) -> list[float]:
        """Wait for the sums of the loss, its terms and the votes. Raises NonFiniteLoss."""
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
        """Weighted mean over the global batch, or 0 if all weights are 0. Waits and raises as `check` does."""
        return self.check()[0] / (self.global_totals.weight or 1.0)

    @property
    def terms(self) -> dict[str, float]:
        """Weighted means of the loss terms over the global batch. Waits and raises as `check` does."""
        return {
            name: one / (self.global_totals.weight or 1.0)
            for name, one in zip(self.term_names, self.check()[1:], strict=False)
        }

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums of the votes over all ranks. Waits and raises as `check` does."""
        return tuple(self.check()[1 + len(self.term_names) :])


@dataclass(eq=False)
class DeferredLossCheck:
    """Check of a loss that the host completes one step later. The update of its step has already started."""

    agreement: LossAgreement
    found_inf: Float[Tensor, ""]
    batch: Batch | None
    step: int
    """Step counter of the tables before the step."""
    undo: Callable[[], None] = no_op
    """Function that reverts the part of the update that ran on the host, if the device has skipped the rest."""

    def votes(self) -> tuple[float, ...]:
        """Return the votes of the step. Raises LateNonFiniteLoss if its loss is not finite."""
        try:
            return self.agreement.votes
        except NonFiniteLoss as error:
            self.undo()
            raise LateNonFiniteLoss(error.reason, remedy=error.remedy) from None


def make_batch_totals(batch: Batch) -> BatchTotals:
    """Return the totals of a rank's slice. A sample without any known label has the weight 0."""
    if batch.label_mask_2d is None:
        weight = float(batch.batch_size if batch.weight is None else total(batch.weight.double()))
    else:
        weight = _sum_weights(batch, batch.label_mask_2d.any(1))
    return BatchTotals(batch.batch_size, batch.num_padding, weight)


def known_label_weights(batch: Batch) -> list[float]:
    """Return the total weight of a rank's samples whose label is known, for each of T tasks."""
    assert batch.label_mask_2d is not None
    return [_sum_weights(batch, is_known) for is_known in batch.label_mask_2d.unbind(1)]


def _sum_weights(batch: Batch, is_counted: Tensor) -> float:
    # Sum in the same order as over all samples, so that the results are equal if all are selected.
    return float(total(is_counted.double() if batch.weight is None else batch.weight.double() * is_counted))


def start_task_factors(world: World, batch: Batch | None, num_tasks: int) -> Callable[[float], Float[Tensor, " T"]]:
    """Start summing the weights of known labels over all ranks. Return a function from W to the factors of the tasks.

    The factor of task t is W / W_t, or 0 for a task without known labels. W is the weight of all samples in the global
    batch, and W_t that of the samples whose label of task t is known. The first call of the function waits for the
    other ranks. All ranks call this for the same batches in the same order. `batch` is `None` if it could not be read.
    """
    known_weights = [0.0] * num_tasks if batch is None else known_label_weights(batch)
    wait = world.start_all_reduce_small(copy_to_device(known_weights, torch.float64, world.device), "label weights")
    sums: list[Tensor] = []

    def factors(weight: float) -> Tensor:
        if not sums:
            sums.append(wait())
        # A loss that is divided by W becomes the mean over known labels. If all are known, the factor is exactly 1.
        return torch.where(sums[0] > 0, weight / sums[0], 0.0)

    return factors

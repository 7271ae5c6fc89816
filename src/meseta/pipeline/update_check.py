"""Check of the loss of a step over all ranks, before any row or weight is updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import BatchContext, no_op
from meseta.ops.common import AsyncHostCopy, copy_to_device
from meseta.optim.dense import step_if_finite
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes


class NonFiniteLoss(MesetaError):
    """Non-finite loss of a global batch. Raised on all ranks before any update."""


class LateNonFiniteLoss(NonFiniteLoss):
    """Non-finite loss that the host detects one step late. The device has skipped the update."""

    def __init__(self, error: NonFiniteLoss, batch: Batch | None, step: int) -> None:
        super().__init__(error.reason, remedy=error.remedy)
        self.batch = batch
        self.step = step
        """Number of updates before the skipped one."""


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
        """Start the all-reduce of `votes` and float64 `losses`, the local sums of the loss and of the terms `names`."""
        local_sums = torch.cat([losses, copy_to_device(votes, torch.float64, world.device)])
        return LossAgreement(whole, world.start_all_reduce_small(local_sums, "agree"), names)

    def found_inf(self) -> Float[Tensor, ""]:
        """Return a float32 device scalar, 1 if `check` will raise NonFiniteLoss, else 0."""
        sums = self.wait()
        # `check` reads this copy, so that the host does not wait.
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
        """Weighted mean over the global batch, or 0 if all weights are 0. Raises NonFiniteLoss."""
        return self.check()[0] / (self.global_totals.weight or 1.0)

    @property
    def terms(self) -> dict[str, float]:
        """Weighted means over the global batch. Raises NonFiniteLoss."""
        return {
            name: one / (self.global_totals.weight or 1.0)
            for name, one in zip(self.term_names, self.check()[1:], strict=False)
        }

    @property
    def votes(self) -> tuple[float, ...]:
        """Sums over all ranks. Raises NonFiniteLoss."""
        return tuple(self.check()[1 + len(self.term_names) :])


@dataclass(eq=False)
class _PendingCheck:
    agreement: LossAgreement
    found_inf: Float[Tensor, ""]
    batch: Batch | None
    step: int
    undo_host_update: Callable[[], None] = no_op


class UpdateCheck:
    """Check of each step's loss. If it is deferred, the host does not wait for the device.

    The device then skips the update after a non-finite loss, and `resolve` raises LateNonFiniteLoss in the next step.
    """

    def __init__(
        self, world: World, stage_times: StageTimes, term_names: tuple[str, ...], *, overlaps_backward: bool
    ) -> None:
        self.is_deferred = world.device.type != "cpu"
        """Set it before the first step."""
        self._world, self._stage_times, self._term_names = world, stage_times, term_names
        self._overlaps_backward = overlaps_backward
        self._pending: _PendingCheck | None = None
        self._votes: tuple[float, ...] = ()

    def start(self, context: BatchContext[Any], local_losses: Tensor, votes: Sequence[float]) -> LossAgreement:
        """Start the sums over all ranks. No row is updated before they are known. Raises NonFiniteLoss."""
        assert context.global_totals is not None
        with self._stage_times.stage("agree"):
            agreement = LossAgreement.start(self._world, context.global_totals, local_losses, votes, self._term_names)
        if not self._overlaps_backward:
            self._guard_update(agreement, context)
        context.pre_update_hook = partial(self._guard_update, agreement, context)
        return agreement

    def _guard_update(self, agreement: LossAgreement, context: BatchContext[Any]) -> None:
        # After a non-finite loss, an error on the host or a flag on the device prevents the update of rows.
        with self._stage_times.stage("agree"):
            if not self.is_deferred:
                agreement.check()
            elif context.found_inf is None:
                context.found_inf = agreement.found_inf()

    def finish(self, agreement: LossAgreement, context: BatchContext[Any], batch: Batch | None, step: int) -> None:
        """Complete the check after the backward pass, or leave it to `resolve`. Raises NonFiniteLoss."""
        self._guard_update(agreement, context)
        if context.found_inf is None:
            self._votes = agreement.votes
        else:
            self._pending = _PendingCheck(agreement, context.found_inf, batch, step)

    def resolve(self) -> None:
        """Complete a deferred check of the previous step. Raises LateNonFiniteLoss."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            with self._stage_times.stage("agree"):
                self._votes = pending.agreement.votes
        except NonFiniteLoss as error:
            # The device has skipped its part of the update.
            pending.undo_host_update()
            raise LateNonFiniteLoss(error, pending.batch, pending.step) from None

    def pop_votes(self) -> tuple[float, ...]:
        """Return the votes of the last completed check, once."""
        votes, self._votes = self._votes, ()
        return votes

    def step_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Run an optimizer step unless the loss is not finite."""
        if self._pending is None:
            optimizer.step()
        else:
            self._pending.undo_host_update = step_if_finite(optimizer, self._pending.found_inf)

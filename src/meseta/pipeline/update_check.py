"""Check of the loss of a step over all ranks, before any row or weight is updated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import BatchContext, OutOfRangeIds, RejectedId, no_op
from meseta.ops.common import AsyncHostCopy, copy_to_device
from meseta.ops.step_scalars import StepScalars
from meseta.ops.step_verdict import REJECTED_ID, StepReport, VerdictMemory, record_verdict
from meseta.optim.dense import keep_former, step_if_finite
from meseta.pipeline.lookahead import MicroBatch, QueuedBatch, micro_batch_error_context
from meseta.pipeline.losses import LateNonFiniteLoss, NonFiniteLoss, SkippedUpdate
from meseta.sparse.shapes import Float, Int
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes


@dataclass(eq=False)
class LossAgreement:
    """Asynchronous sum of losses and votes over all ranks."""

    global_totals: BatchTotals
    wait: Callable[[], Tensor]
    term_names: tuple[str, ...] = ()
    host_votes: tuple[float, ...] = ()
    """Votes of a single rank. They are not copied to the device."""
    rejected_ids: Sequence[Sequence[RejectedId]] = ()
    """`BatchContext.rejected_ids` of each micro-batch."""
    report: Int[Tensor, " words"] | None = None
    """Result of `record_verdict` on the device. `None` if the host checks the sums."""
    num_out_of_range: Int[Tensor, " F"] | None = field(default=None, init=False)
    """Number of out-of-range ids per feature in the report, after `check`. `None` if the report has none."""
    _report_copy: AsyncHostCopy | None = field(default=None, init=False)
    _sums: list[float] | None = field(default=None, init=False)

    @staticmethod
    def start(
        world: World, whole: BatchTotals, losses: Tensor, votes: Sequence[float], names: tuple[str, ...] = ()
    ) -> LossAgreement:
        """Start the all-reduce of `votes` and float64 `losses`, the local sums of the loss and of the terms `names`."""
        if world.size == 1:
            return LossAgreement(whole, lambda: losses, names, tuple(votes))
        local_sums = torch.cat([losses, copy_to_device(votes, torch.float64, world.device)])
        return LossAgreement(whole, world.start_all_reduce_small(local_sums, "agree"), names)

    @staticmethod
    def of_report(
        whole: BatchTotals,
        report: Int[Tensor, " words"],
        rejected_ids: Sequence[Sequence[RejectedId]],
        names: tuple[str, ...],
        votes: Sequence[float],
    ) -> LossAgreement:
        """Start to copy the report of a step of one rank, which a CUDA graph has made."""
        agreement = LossAgreement(whole, lambda: report, names, tuple(votes), rejected_ids, report)
        agreement.start_report_copy()
        return agreement

    def record_verdict(self, memory: VerdictMemory) -> None:
        """Set the flags in `memory` if `check` will raise an error. The host does not wait."""
        if self.report is None:
            id_reports = [report for of_part in self.rejected_ids for _, report in of_part]
            self.report = record_verdict(memory, self.wait(), id_reports)
        if not math.isfinite(self.global_totals.weight):
            memory.set_flags(found_inf=True)

    def start_report_copy(self) -> None:
        """Start to copy the report, which `check` reads, to the host."""
        assert self.report is not None
        self._report_copy = AsyncHostCopy(self.report)

    def check(self) -> list[float]:
        """Wait for the sums of the loss, its terms and the votes. Raises NonFiniteLoss, and MesetaError for a rejected
        id."""
        if self._sums is None:
            self._sums = self.wait().tolist() if self._report_copy is None else self._read_report(self._report_copy)
        loss_sum, weight = self._sums[0], self.global_totals.weight
        if not (math.isfinite(loss_sum) and math.isfinite(weight)):
            raise NonFiniteLoss(
                f"the loss is {loss_sum / (weight or 1.0)}, and nothing was updated; look for NaN or huge values "
                "in the dense inputs, or lower the learning rates"
            )
        return self._sums

    def _read_report(self, copy: AsyncHostCopy) -> list[float]:
        groups = [group for of_part in self.rejected_ids for group, _ in of_part]
        report = StepReport.from_words(copy.read().numpy(), [len(group.features) for group in groups])
        if report.verdict & REJECTED_ID:
            places = iter(report.rejected)
            for index, of_part in enumerate(self.rejected_ids):
                with micro_batch_error_context(index, len(self.rejected_ids)):
                    for group, _ in of_part:
                        group.raise_rejected(next(places))
        if groups:
            counts = np.zeros(1 + max(index for group in groups for index in group.feature_indices), np.int64)
            for group, num_outside in zip(groups, report.num_outside, strict=True):
                counts[list(group.feature_indices)] += num_outside
            self.num_out_of_range = torch.from_numpy(counts)
        return report.sums

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
        return self.host_votes + tuple(self.check()[1 + len(self.term_names) :])


@dataclass(eq=False)
class DeferredCheck:
    """Check of a step that the host completes in the next step."""

    agreement: LossAgreement
    batch: Batch | None
    step: int
    """Number of updates before this step."""
    out_of_range_ids: OutOfRangeIds
    """Counter to which a completed check adds the out-of-range ids."""
    num_out_of_range: Int[Tensor, " F"] | None = None
    """Number of out-of-range ids per feature, unless the report has them."""
    undo_host_update: Callable[[], None] = no_op

    def complete(self) -> tuple[float, ...]:
        """Return the votes, and count the out-of-range ids. Raises SkippedUpdate."""
        try:
            votes = self.agreement.votes
        except MesetaError as error:
            # The device has skipped its part of the update.
            self.undo_host_update()
            kind = LateNonFiniteLoss if isinstance(error, NonFiniteLoss) else SkippedUpdate
            raise kind(error.reason, remedy=error.remedy) from None
        reported = self.agreement.num_out_of_range
        counts = self.num_out_of_range if reported is None else reported
        if counts is not None:
            self.out_of_range_ids.add(counts)
        return votes


class UpdateCheck:
    """Check of the loss of each step, and in one process of the ids. If it is deferred, the host does not wait.

    The device then skips the update after a non-finite loss or a rejected id, and `resolve` raises SkippedUpdate in
    the next step.
    """

    def __init__(
        self, world: World, stage_times: StageTimes, term_names: tuple[str, ...], *, overlaps_backward: bool
    ) -> None:
        self.is_deferred = world.device.type != "cpu"
        """Set it before the first step."""
        self.skipped: DeferredCheck | None = None
        """Check for which `resolve` raised an error."""
        self._world, self._stage_times, self.term_names = world, stage_times, term_names
        self._overlaps_backward = overlaps_backward
        self.pending: DeferredCheck | None = None
        """Check that the next call of `resolve` completes."""
        self._copies_reports = True
        self._votes: tuple[float, ...] = ()

    @cached_property
    def memory(self) -> VerdictMemory:
        """Memory whose flags are set from a refused step until `resolve` has raised its error."""
        return VerdictMemory.create(self._world.device)

    @cached_property
    def found_inf(self) -> Float[Tensor, ""]:
        """Device scalar (float32). It is 1 from a refused step until `resolve` has raised its error, else 0."""
        return self.memory.flags[0]

    def start(
        self,
        micro_batches: Sequence[MicroBatch],
        local_losses: Tensor,
        votes: Sequence[float],
        report: Int[Tensor, " words"] | None = None,
    ) -> LossAgreement:
        """Start the sums over all ranks. No row is updated before they are known. Raises NonFiniteLoss.

        `report` is the result of `record_verdict` if the kernel of the loss has made it.
        """
        context = micro_batches[-1].context
        assert context.global_totals is not None
        with self._stage_times.stage("agree"):
            agreement = LossAgreement.start(self._world, context.global_totals, local_losses, votes, self.term_names)
            agreement.rejected_ids = [part.context.rejected_ids for part in micro_batches]
            agreement.report = report
        if not self._overlaps_backward:
            self._guard_update(agreement, context)
        context.pre_update_hook = partial(self._guard_update, agreement, context)
        return agreement

    def _guard_update(self, agreement: LossAgreement, context: BatchContext[Any]) -> None:
        # An error on the host or a flag on the device prevents the update of rows.
        with self._stage_times.stage("agree"):
            if not self.is_deferred:
                agreement.check()
            elif context.found_inf is None:
                context.found_inf = self.found_inf
                agreement.record_verdict(self.memory)
                if self._copies_reports:
                    agreement.start_report_copy()

    def finish(self, agreement: LossAgreement, queued: QueuedBatch, step: int) -> None:
        """Complete the check after the backward pass, or leave it to `resolve`. Raises NonFiniteLoss.

        `step` is the number of updates before this step.
        """
        context = queued.micro_batches[-1].context
        self._guard_update(agreement, context)
        if context.found_inf is None:
            self._votes = agreement.votes
            return
        counts = [cast(Tensor, part.context.num_out_of_range) for part in queued.micro_batches]
        unreported = None if any(agreement.rejected_ids) else sum(counts[1:], counts[0])
        self.pending = DeferredCheck(agreement, queued.batch, step, context.out_of_range_ids, unreported)

    def resolve(self) -> None:
        """Complete a deferred check of the previous step. Raises SkippedUpdate."""
        self.skipped, self.pending = self.pending, None
        if self.skipped is not None:
            with self._stage_times.stage("agree"):
                try:
                    self._votes = self.skipped.complete()
                except SkippedUpdate:
                    self.memory.set_flags(found_inf=False)
                    raise
            self.skipped = None

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Context manager in which a step is captured in a CUDA graph. It leaves the checks of other steps alone."""
        before = self.pending, self._votes
        self.pending, self._copies_reports = None, False
        try:
            yield
        finally:
            self._copies_reports = True
            self.pending, self._votes = before

    def pop_votes(self) -> tuple[float, ...]:
        """Return the votes of the last completed check, once."""
        votes, self._votes = self._votes, ()
        return votes

    def step_optimizer(self, optimizer: torch.optim.Optimizer, scalars: StepScalars | None) -> None:
        """Run an optimizer step unless the update is skipped. `scalars` are the numbers of the step on a GPU."""
        if self.pending is None:
            optimizer.step()
        else:
            self.pending.undo_host_update = step_if_finite(optimizer, self.memory.flags, scalars)


def find_running_stats(model: Any) -> list[Tensor]:
    """Return the running statistics of a model's normalization layers, which a refused step must not change."""
    names = ("running_mean", "running_var", "num_batches_tracked")
    buffers = model.named_buffers() if hasattr(model, "named_buffers") else ()
    return [buffer for name, buffer in buffers if name.rpartition(".")[2] in names]


@contextmanager
def keep_running_stats(running_stats: Sequence[Tensor], found_inf: Float[Tensor, ""] | None) -> Iterator[None]:
    """Context manager that restores running statistics if `found_inf`, a device scalar, is nonzero."""
    former = [] if found_inf is None else [buffer.clone() for buffer in running_stats]
    yield
    for buffer, before in zip(running_stats, former, strict=False):
        keep_former(buffer, before, cast(Tensor, found_inf))

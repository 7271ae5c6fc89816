"""Training pipeline. The stages of a step are copy, input_dist, lookup, dense forward, agreement, backward and
update."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meseta.comm import DenseGradients, World, retain_until_exit
from meseta.comm.dense import fsdp_parameter_error_context
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import BatchContext
from meseta.models.layers import find_dense_forward, select_score_input
from meseta.ops.allocator import keep_freed_memory
from meseta.optim.dense import GradientClipper, dense_parameters, step_if_finite
from meseta.pipeline.device_copy import DeviceCopier, PackedBatch, PackedPart
from meseta.pipeline.losses import (
    BatchLosses,
    DeferredLossCheck,
    LateNonFiniteLoss,
    LossAgreement,
    Model,
    make_batch_totals,
    micro_batch_error_context,
    split_batch,
    start_task_factors,
)
from meseta.pipeline.prefetch import PrefetchedEmbeddings
from meseta.sparse.shapes import Float
from meseta.spec import MesetaError
from meseta.spec.stages import Overlap
from meseta.telemetry.span import DeviceClock, StageTimes


@dataclass(frozen=True)
class StepResult:
    """Result of one training step."""

    agreement: LossAgreement = field(repr=False)
    num_samples: int
    """Number of samples in the global batch, without padding."""
    logits: Float[Tensor, " B_local *T"]
    """Logits of this rank's slice, computed before the update."""
    batch: Batch
    """The batch that produced `logits`."""
    votes: tuple[float, ...] = ()
    """Sums of the votes over all ranks. On a GPU they are those of the previous step, empty in the first."""

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch, or 0 if all weights are 0. Waits for a GPU. Raises NonFiniteLoss."""
        return self.agreement.loss


@dataclass(eq=False)
class _MicroBatch:
    batch: Batch | None
    """Micro-batch on its device. `None` if reading failed."""
    context: BatchContext[Any]

    @property
    def device_batch(self) -> Batch:
        # A failure of reading was raised before.
        assert self.batch is not None
        return self.batch


@dataclass(eq=False)
class QueuedBatch:
    """Batch that was read, possibly ahead of its step."""

    batch: Batch | None
    """`None` if reading failed."""
    error: Exception | None = None
    """Exception raised while reading."""
    deferred_error: MesetaError | None = None
    """Error that all ranks detected before the step of the batch, which raises it."""
    packed: Sequence[PackedPart] = ()
    """Packed micro-batches. Empty if none are packed, or after their copies are started."""
    pending_copies: list[Callable[[], Batch]] = field(default_factory=list)
    """Functions that return each micro-batch on the device. Empty until its copies are started."""
    micro_batches: list[_MicroBatch] = field(default_factory=list)
    """Empty until the input_dist of the batch is started."""
    task_factors: Callable[[float], Tensor] | None = None
    """Result of `start_task_factors`. `None` if all labels are known."""


class Pipeline:
    """Training pipeline. Each rank provides its slice of the same global batches.

    The loss is sum(w_i * l_i) / sum(w_i) over the samples of the global batch. w_i is the weight of a sample, by
    default 1. l_i is its binary cross-entropy, summed over tasks, plus the loss terms of the model (see
    `meseta.pipeline.losses`). The mean of each task is over samples with a known label. A batch with total weight 0
    changes nothing, and does not count as a step of any optimizer.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        world: World,
        *,
        task_weights: Sequence[float] | None = None,
        clip: GradientClipper | None = None,
        accumulate_steps: int = 1,
        overlap: Collection[Overlap] = (),
    ) -> None:
        """Create a pipeline.

        Args:
            model: Model, whose tables are updated inside the backward pass.
            optimizer: Optimizer of the dense parameters.
            world: All ranks.
            task_weights: Factors of the task losses, in the order of the labels. `None` means 1.
            clip: Clipper of the dense gradients.
            accumulate_steps: Number of micro-batches, which limit memory. All optimizers step after the last one.
            overlap: Transfers to overlap with computation. They do not change any result.
        """
        self.model = model
        self.optimizer = optimizer
        # The world of sharded tables knows the hosts of their plan.
        self.world = getattr(model.embeddings, "world", world)
        weights = None if task_weights is None else torch.tensor(task_weights, device=world.device)
        self._losses = BatchLosses(model, weights, accumulate_steps)
        self.clip = clip
        self.accumulate_steps = accumulate_steps
        self.num_masked_tasks = 0
        """Number of tasks if batches have a mask of known labels, else 0. Set it before the first step."""
        self.overlap = frozenset(overlap)
        self.uses_stale_embeddings = False
        """Whether each batch is looked up before the update of the previous batch. Set it before the first step."""
        self.prefetched_embeddings: PrefetchedEmbeddings | None = None
        """Embeddings of the next batch if it was looked up before this loop. The next step uses them."""
        # With a deferred check, the device itself skips the update after a non-finite loss.
        self.defers_loss_check = world.device.type != "cpu"
        """Whether the host learns loss and votes in the next step or in `synchronize`. Set it before the first step."""
        self._deferred_check: DeferredLossCheck | None = None
        # Votes that no `StepResult` has returned yet.
        self._resolved_votes: tuple[float, ...] = ()
        is_gpu = world.device.type == "cuda"
        new_event = partial(torch.cuda.Event, enable_timing=True)
        clock = DeviceClock(new_event, torch.cuda.current_stream, torch.cuda.synchronize) if is_gpu else None
        self.stage_times = StageTimes(clock)
        self.device_copier = DeviceCopier(world.device, self.stage_times) if is_gpu else None
        """Copies batches to the GPU during the previous step. `None` copies each batch in its step."""
        self.batch: Batch | None = None
        """Current batch, or the last one after a step."""
        self._forward_dense = find_dense_forward(model)
        self._dense_gradients: DenseGradients | None = getattr(model, "dense_gradients", None)
        if self._dense_gradients is not None:
            self._dense_gradients.overlaps_update = "dense" in self.overlap
        # Batches read ahead of their steps.
        self._queue: deque[QueuedBatch] = deque()
        self._has_pending_dense_update = False
        # Steps reuse the memory that earlier steps have freed.
        if world.device.type == "cpu":
            keep_freed_memory()

    def __call__(self, batch: Batch, *, lr_factor: float | None = None, votes: Sequence[float] = ()) -> StepResult:
        """Train on a single batch. All updates are applied when the call returns, which waits for a GPU.

        Args:
            batch: Slice of this rank.
            lr_factor: Factor of the tables' learning rates. `None` uses that of the collection.
            votes: Numbers to sum over ranks together with the loss. Their number must be equal on all ranks.

        Raises NonFiniteLoss on all ranks before any update, and MesetaError if an id is outside its table.
        """
        [step] = self.steps(iter([batch]), schedule=lambda: lr_factor, votes=lambda: votes)
        if self.defers_loss_check:
            step, self._resolved_votes = replace(step, votes=self._resolved_votes), ()
        return step

    def steps(
        self,
        batches: Iterator[Batch | PackedBatch],
        *,
        schedule: Callable[[], float | None] = lambda: None,
        votes: Callable[[], Sequence[float]] = tuple,
    ) -> Generator[StepResult, None, None]:
        """Train on batches and yield the result of each step.

        A result is yielded when the rows are updated, or on a GPU when their update has started. `synchronize` waits
        for all updates. An error in a batch, or in reading it, is raised in its step on all ranks. On a GPU, a
        non-finite loss raises LateNonFiniteLoss in the next step, or in `synchronize`. Leaving the loop early drops all
        open batches. All ranks must leave it after the same step.

        Args:
            batches: Slices of this rank, packed or not. All ranks must have the same number.
            schedule: Called in each step after all previous updates. It sets the learning rates of `optimizer`, and
                returns the factor of the tables' learning rates, or `None` for that of the collection.
            votes: Called in each step for the votes, see `__call__`.
        """
        self.stage_times.begin_step()
        coming = self._read(batches)
        try:
            while coming is not None:
                self.batch = coming.batch
                with self.world.transfers.track_step():
                    step = self._train_step(coming, batches, schedule, votes)
                coming = None  # Free the batch before waiting for the next one.
                yield step
                self.stage_times.begin_step()
                del step
                coming = self._queue.popleft() if self._queue else None if self._queue_size else self._read(batches)
        except (GeneratorExit, LateNonFiniteLoss):  # All ranks leave at the same step.
            for begun in (coming, *self._queue):
                for part in [] if begun is None else begun.micro_batches:
                    self.model.embeddings.drop(part.context)
            raise
        except BaseException:
            # The transport may still use the memory of open batches.
            retain_until_exit((coming, *self._queue))
            raise
        finally:
            self._queue.clear()
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all updates of the last step are applied. Call it before reading weights.

        Raises LateNonFiniteLoss if the loss of that step was not finite.
        """
        self._finish_dense_update()
        self._resolve_deferred_loss()

    def _resolve_deferred_loss(self) -> None:
        """Complete the deferred loss check of the previous step. Raises LateNonFiniteLoss."""
        pending_check, self._deferred_check = self._deferred_check, None
        if pending_check is None:
            return
        try:
            with self.stage_times.stage("agree"):
                self._resolved_votes = pending_check.votes()
        except LateNonFiniteLoss:
            # Restore the state before the step.
            self.model.embeddings.step, self.batch = pending_check.step, pending_check.batch
            raise

    def _finish_dense_update(self) -> None:
        if not self._has_pending_dense_update:
            return
        self._has_pending_dense_update = False
        with self.stage_times.stage("dense_update"):
            if self._dense_gradients is not None:
                self._dense_gradients.finish()
            # A clipper that includes rows has already run in the backward pass.
            if self.clip is not None and not self.clip.includes_rows:
                # The host reads the norm and raises an error if it is not finite, so check the loss first.
                if self.clip.norm is not None:
                    self._resolve_deferred_loss()
                self.clip(dense_parameters(self.optimizer))
            if self._deferred_check is None:
                self.optimizer.step()
            else:
                self._deferred_check.undo = step_if_finite(self.optimizer, self._deferred_check.found_inf)

    def snapshot_prefetched(self) -> PrefetchedEmbeddings | None:
        """Return the prefetched embeddings of the next batch on rank 0, and each rank's slice on others, or `None`.

        Call it between two steps. Collective. Later loops start with these embeddings.
        """
        coming = self._queue[0] if self._queue else None
        if (
            self.uses_stale_embeddings
            and self.prefetched_embeddings is None
            and coming
            and coming.batch is not None
            and coming.deferred_error is None
        ):
            embeddings = [self.model.embeddings.wait_for_embeddings(part.context)[0] for part in coming.micro_batches]
            self.prefetched_embeddings = PrefetchedEmbeddings.gather(self.world, coming.batch, torch.cat(embeddings))
        return self.prefetched_embeddings

    @property
    def _prefetches_ids(self) -> bool:
        return self.uses_stale_embeddings or "ids" in self.overlap or self.model.embeddings.lookahead > 0

    @property
    def _queue_size(self) -> int:
        if self._prefetches_ids or self.device_copier is not None:
            return max(self.model.embeddings.lookahead, 1)
        return 0

    def _read(self, batches: Iterator[Batch | PackedBatch]) -> QueuedBatch | None:
        try:
            with self.stage_times.stage("data"):
                batch = next(batches)
                if isinstance(batch, PackedBatch):
                    return QueuedBatch(batch.batch, packed=batch.parts)
                return QueuedBatch(batch)
        except StopIteration:
            return None
        except Exception as error:
            return QueuedBatch(None, error)

    def _start_copy(self, coming: QueuedBatch) -> None:
        if coming.batch is None or coming.pending_copies:
            return
        with self.stage_times.stage("copy"):
            if self.device_copier is None:
                parts = split_batch(coming.batch, self.accumulate_steps)
                coming.pending_copies = [partial(part.to, self.world.device, non_blocking=True) for part in parts]
            else:
                packed = coming.packed or split_batch(coming.batch, self.accumulate_steps)
                coming.pending_copies = [self.device_copier.start(part) for part in packed]
                coming.packed = ()

    def _start_input_dist(self, coming: QueuedBatch) -> None:
        batch, error, start = coming.batch, coming.error, self.model.embeddings.start_input_dist
        if self.num_masked_tasks:
            coming.task_factors = start_task_factors(self.world, batch, self.num_masked_tasks)
        if batch is None:
            assert error is not None
            coming.micro_batches = [_MicroBatch(None, start(error)) for _ in range(self.accumulate_steps)]
            return
        self._start_copy(coming)
        totals, place = make_batch_totals(batch), 0
        for index, take in enumerate(coming.pending_copies):
            with self.stage_times.stage("copy"):
                on_device = take()
            is_part = index < self.accumulate_steps - 1
            with self.stage_times.stage("input_dist"):
                flight = start(
                    on_device.sparse,
                    local_totals=totals,
                    accumulates_gradients=is_part,
                    stage_timer=self.stage_times.stage,
                )
            flight.slice_offset, flight.overlaps_gradient_dist = place, "gradients" in self.overlap
            coming.micro_batches.append(_MicroBatch(on_device, flight))
            place += on_device.batch_size
        coming.pending_copies.clear()

    def _use_prefetched_embeddings(self, prefetched: PrefetchedEmbeddings, coming: QueuedBatch) -> None:
        for part in coming.micro_batches:
            self._input_dist(part)
        assert coming.batch is not None
        embeddings = prefetched.local_slice(self.world, coming.batch)
        for part in coming.micro_batches:
            part.context.embeddings = [embeddings[part.context.slice_offset :][: part.device_batch.batch_size]]

    def _fill_queue(self, batches: Iterator[Batch | PackedBatch]) -> None:
        # All ranks stop at a batch that cannot be trained.
        while len(self._queue) < self._queue_size:
            if self._queue:
                self._for_each_queued(self._input_dist)
                if self._queue[-1].batch is None or self._queue[-1].deferred_error is not None:
                    return
            if (coming := self._read(batches)) is None:
                return
            self._queue.append(coming)
            if self._prefetches_ids and (coming.batch is not None or self.world.size > 1):
                try:
                    self._start_input_dist(coming)
                except MesetaError as error:
                    coming.deferred_error = error
            else:
                self._start_copy(coming)

    def _for_each_queued(self, carry_on: Callable[[_MicroBatch], object], count: int | None = None) -> None:
        """Call `carry_on` with each micro-batch of the first `count` queued batches, or of all."""
        for coming in list(self._queue)[:count]:
            if coming.deferred_error is None:
                try:
                    for part in coming.micro_batches:
                        carry_on(part)
                except MesetaError as error:
                    # The step of the batch raises it.
                    coming.deferred_error = error

    def _prefetch_rows(self, parts: Sequence[_MicroBatch]) -> None:
        # The current batch comes first, then the queued ones, until the cache is full.
        if self.model.embeddings.lookahead:
            with self.stage_times.stage("lookup"):
                for part in (*parts, *(part for coming in self._queue for part in coming.micro_batches)):
                    if part.context.stage == "started" or not self.model.embeddings.prefetch(part.context):
                        break

    def _lookup_queued(self, step: int, part: _MicroBatch) -> None:
        part.context.step = step
        self._lookup(part)

    def _input_dist(self, part: _MicroBatch) -> None:
        # The batch may have been exchanged ahead of its step.
        if part.context.stage == "started":
            with self.stage_times.stage("input_dist"):
                self.model.embeddings.input_dist(part.context)

    def _lookup(self, part: _MicroBatch) -> None:
        self._input_dist(part)
        if part.context.stage == "exchanged":
            with self.stage_times.stage("lookup"):
                self.model.embeddings.lookup(part.context)

    def _train_step(
        self,
        coming: QueuedBatch,
        batches: Iterator[Batch | PackedBatch],
        schedule: Callable[[], float | None],
        votes: Callable[[], Sequence[float]],
    ) -> StepResult:
        prefetched, self.prefetched_embeddings = self.prefetched_embeddings, None
        if not coming.micro_batches:
            self._start_input_dist(coming)
            if prefetched is not None:
                self._use_prefetched_embeddings(prefetched, coming)
        if coming.deferred_error is not None:
            raise coming.deferred_error
        parts, logits, former_step = coming.micro_batches, list[Tensor](), self.model.embeddings.step
        local_losses: Tensor | None = None
        try:
            for index, part in enumerate(parts):
                is_last = index == len(parts) - 1
                with micro_batch_error_context(index, len(parts)):
                    self._lookup(part)
                    # The input_dist of later batches runs during the rest of this step.
                    if index == 0:
                        self._fill_queue(batches)
                    if "embeddings" in self.overlap:
                        self.model.embeddings.start_second_hop(part.context)
                    if index == 0:
                        self._finish_dense_update()
                        lr_factor = schedule()
                        for other in parts:
                            other.context.lr_factor = lr_factor
                    scores, summed, sums = self._score(coming, part, None if is_last else parts[index + 1])
                    local_losses = sums if local_losses is None else local_losses + sums
                    logits.append(scores.detach())
                    if index == 0:
                        self._for_each_queued(lambda ahead: self.model.embeddings.start_second_hop(ahead.context))
                        self._prefetch_rows(parts)
                        if self.uses_stale_embeddings:
                            self._for_each_queued(partial(self._lookup_queued, self._num_steps_after(part)), count=1)
                    agreement = self._start_agreement(part, local_losses, votes()) if is_last else None
                    self._backward(part, summed, is_first=index == 0)
        finally:
            self.model.embeddings.discard_accumulated()
        assert agreement is not None
        self._record_agreement(agreement, coming, former_step)
        whole = agreement.global_totals
        self._has_pending_dense_update = whole.weight > 0
        if "dense" not in self.overlap:
            self._finish_dense_update()
        self.stage_times.end_step()
        votes_heard, self._resolved_votes = self._resolved_votes, ()
        return StepResult(
            agreement=agreement,
            num_samples=whole.num_samples - whole.num_padding,
            logits=torch.cat(logits),
            batch=cast(Batch, coming.batch),
            votes=votes_heard,
        )

    def _record_agreement(self, agreement: LossAgreement, coming: QueuedBatch, former_step: int) -> None:
        flight = coming.micro_batches[-1].context
        self._set_update_guard(agreement, flight)
        if flight.found_inf is None:
            self._resolved_votes = agreement.votes
        else:
            # `_resolve_deferred_loss` records the votes later.
            self._deferred_check = DeferredLossCheck(agreement, flight.found_inf, coming.batch, former_step)

    def _num_steps_after(self, part: _MicroBatch) -> int:
        assert part.context.global_totals is not None and part.context.batch_slice is not None
        return part.context.batch_slice.step + (part.context.global_totals.weight > 0)

    def _score(
        self, coming: QueuedBatch, part: _MicroBatch, following: _MicroBatch | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (logits, loss, sums of losses) of a micro-batch. Starts the lookup of `following` meanwhile."""
        embeddings, stage, batch = self.model.embeddings, self.stage_times.stage, part.device_batch
        hides = "embeddings" in self.overlap
        with embeddings.active_batch(part.context):
            dense: Any = batch.dense
            if hides and self._forward_dense is not None:
                with stage("dense_forward"), fsdp_parameter_error_context():
                    dense = self._forward_dense(dense)
            with stage("lookup"):
                pooled = select_score_input(self.model, embeddings.output_dist(part.context))
            self._for_each_queued(self._input_dist)
            # The host has just waited for id counts, so this check hardly waits.
            self._resolve_deferred_loss()
            if hides and following is not None:
                self._lookup(following)
            with stage("dense_forward"), fsdp_parameter_error_context():
                assert part.context.global_totals is not None
                factors = (
                    None if coming.task_factors is None else coming.task_factors(part.context.global_totals.weight)
                )
                return self._losses(dense, pooled, batch, part.context, factors)

    def _start_agreement(self, part: _MicroBatch, local_losses: Tensor, votes: Sequence[float]) -> LossAgreement:
        assert part.context.global_totals is not None
        with self.stage_times.stage("agree"):
            agreement = LossAgreement.start(
                self.world, part.context.global_totals, local_losses, votes, self._losses.term_names
            )
        if "agree" not in self.overlap:
            self._set_update_guard(agreement, part.context)
        # No row is updated before the agreement.
        part.context.pre_update_hook = partial(self._set_update_guard, agreement, part.context)
        return agreement

    def _set_update_guard(self, agreement: LossAgreement, flight: BatchContext[Any]) -> None:
        # After a non-finite loss, an error on the host or a flag on the device prevents the update of rows.
        with self.stage_times.stage("agree"):
            if not self.defers_loss_check:
                agreement.check()
            elif flight.found_inf is None:
                flight.found_inf = agreement.found_inf()

    def _backward(self, part: _MicroBatch, summed: Tensor, *, is_first: bool) -> None:
        flight = part.context
        assert flight.global_totals is not None
        weight, num_samples = flight.global_totals.weight, sum(flight.batch_size_per_rank)
        if not weight > 0:
            return
        with self.model.embeddings.active_batch(flight), self.stage_times.stage("backward"):
            if is_first:
                self.optimizer.zero_grad(set_to_none=True)
            # Tables and dense gradients scale the loss by B_local / B_global, so it is finally divided by the total
            # weight. Without weights, the divisor is exactly the local batch size.
            if self.clip is not None and self.clip.includes_rows:
                # Clip at the end of the backward pass, when all gradients are available.
                flight.overlaps_gradient_dist, flight.clip = True, partial(self.clip, dense_parameters(self.optimizer))
            divisor = part.device_batch.batch_size * weight / max(num_samples, 1)
            (summed / (divisor or 1.0)).backward()

"""Training pipeline. The stages of a step are copy, input_dist, lookup, dense forward, agreement, backward and
update."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meseta.comm import BatchTotals, DenseGradients, World, retain_until_exit
from meseta.comm.dense import fsdp_parameter_error_context
from meseta.data.read.batch import Batch
from meseta.embedding.batch_context import no_op
from meseta.models.layers import find_dense_forward, select_score_input
from meseta.ops.allocator import keep_freed_memory
from meseta.ops.cross_entropy import StepLoss, cross_entropy_step
from meseta.ops.step_scalars import StepNumbers, StepScalars
from meseta.optim.dense import GradientClipper, dense_parameters
from meseta.optim.dense_average import DenseAverage
from meseta.pipeline.clipping import clip_over_ranks
from meseta.pipeline.device_copy import DeviceCopier, PackedBatch, PendingCopy, StaticPart
from meseta.pipeline.lookahead import LookaheadQueue, MicroBatch, QueuedBatch
from meseta.pipeline.losses import BatchLosses, LossKernel, Model, SkippedUpdate, inverse_divisor, loss_divisor
from meseta.pipeline.prefetch import PrefetchedEmbeddings
from meseta.pipeline.step_graph import (
    CapturedStep,
    StepGraphs,
    find_eager_reason,
    graph_signature,
    record_external_event,
)
from meseta.pipeline.update_check import (
    DeferredCheck,
    LossAgreement,
    UpdateCheck,
    find_running_stats,
    keep_running_stats,
)
from meseta.sparse.shapes import Float
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
            clip: Clipper of the dense gradients, and of the rows if it includes them. Its exchange is set here.
            accumulate_steps: Number of micro-batches, which limit memory. All optimizers step after the last one.
            overlap: Transfers to overlap with computation. They do not change any result.
        """
        self.model = model
        self.optimizer = optimizer
        # The world of sharded tables knows the hosts of their plan.
        self.world = getattr(model.embeddings, "world", world)
        weights = None if task_weights is None else torch.tensor(task_weights, device=world.device)
        self._losses = BatchLosses(model, weights, accumulate_steps)
        self.clip = clip if clip is None else clip_over_ranks(clip, self.world)
        self.accumulate_steps = accumulate_steps
        self.num_masked_tasks = 0
        """Number of tasks if batches have a mask of known labels, else 0. Set it before the first step."""
        self.overlap = frozenset(overlap)
        self.uses_stale_embeddings = False
        """Whether each batch is looked up before the update of the previous batch. Set it before the first step."""
        self.prefetched_embeddings: PrefetchedEmbeddings | None = None
        """Embeddings of the next batch if it was looked up before this loop. The next step uses them."""
        self.dense_average: DenseAverage | None = None
        """Average of the dense parameters, updated after each step. Set it before the first step."""
        is_gpu = world.device.type == "cuda"
        new_event = partial(torch.cuda.Event, enable_timing=True)
        clock = DeviceClock(new_event, torch.cuda.current_stream, torch.cuda.synchronize) if is_gpu else None
        self.stage_times = StageTimes(clock)
        self.device_copier = DeviceCopier(world.device, self.stage_times, accumulate_steps) if is_gpu else None
        """Copies batches to the GPU during the previous step. `None` copies each batch in its step."""
        self.update_check = UpdateCheck(
            self.world, self.stage_times, self._losses.term_names, overlaps_backward="agree" in self.overlap
        )
        self.scalars = StepScalars(world.device) if is_gpu else None
        """Numbers of the current step on a GPU."""
        self.graphs = StepGraphs() if is_gpu else None
        """CUDA graphs of steps, which do not change any result. `None` runs each step eagerly. New modes, frozen
        parameters or optimizer constants take effect in the next loop."""
        self.batch: Batch | None = None
        """Current batch, or the last one after a step."""
        self._dense_forward = find_dense_forward(model)
        self._dense_gradients: DenseGradients | None = getattr(model, "dense_gradients", None)
        if self._dense_gradients is not None:
            self._dense_gradients.overlaps_update = "dense" in self.overlap
        self._queue: LookaheadQueue | None = None
        self._has_pending_dense_update = False
        self._divisor, self._inverse_divisor = 1.0, torch.ones((), device=world.device)
        self._is_capturing = False
        self._running_stats = find_running_stats(model)
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
        return replace(step, votes=self.update_check.pop_votes()) if self.update_check.is_deferred else step

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
        if self.graphs is not None:
            reason = self.graphs.reason or self._find_eager_reason()
            self.graphs.begin_loop(reason, None if reason else graph_signature(self.model, self.optimizer))
        queue = self._queue = self._make_queue(batches, self.device_copier)
        try:
            self.stage_times.begin_step()
            while (queued := queue.pop()) is not None:
                self.batch = queued.batch
                with self.world.transfers.track_step():
                    captured = self._find_captured(queue, queued)
                    if captured is None:
                        with nullcontext() if self.graphs is None else self.graphs.watch_waits():
                            step = self._train_step(queue, queued, schedule, votes)
                    else:
                        step = self._replay_step(captured, queue, queued, schedule, votes)
                    self.stage_times.end_step()
                queue.current = queued = None  # Free the batch before waiting for the next one.
                yield step
                self.stage_times.begin_step()
                del step
        except (GeneratorExit, SkippedUpdate):  # All ranks leave at the same step.
            queue.drop()
            raise
        except BaseException:
            # The transport may still use the memory of open batches.
            retain_until_exit(queue.open_batches)
            self._drop_graphs()
            raise
        finally:
            self._queue = None
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all updates of the last step are applied. Call it before reading weights.

        Raises LateNonFiniteLoss if the loss of that step was not finite.
        """
        self._finish_dense_update()
        self._resolve_check()

    def snapshot_prefetched(self) -> PrefetchedEmbeddings | None:
        """Return the prefetched embeddings of the next batch on rank 0, and each rank's slice on others, or `None`.

        Call it between two steps. Collective. Later loops start with these embeddings.
        """
        queued = None if self._queue is None else self._queue.next
        if self.uses_stale_embeddings and self.prefetched_embeddings is None and queued and queued.can_be_trained:
            embeddings = [self.model.embeddings.wait_for_embeddings(part.context)[0] for part in queued.micro_batches]
            batch = cast(Batch, queued.batch)
            self.prefetched_embeddings = PrefetchedEmbeddings.gather(self.world, batch, torch.cat(embeddings))
        return self.prefetched_embeddings

    def _train_step(
        self,
        queue: LookaheadQueue,
        queued: QueuedBatch,
        schedule: Callable[[], float | None],
        votes: Callable[[], Sequence[float]],
    ) -> StepResult:
        embeddings, check, hides_embeddings = self.model.embeddings, self.update_check, "embeddings" in self.overlap
        logits, losses, step = list[Tensor](), list[Tensor](), embeddings.step
        self._start_input_dist(queue, queued)
        micro_batches = queued.micro_batches
        try:
            for part in micro_batches:
                with part.error_context():
                    queue.run_lookup(part)
                    if part.is_first:
                        queue.fill()  # The queued batches are exchanged during the rest of this step.
                    if hides_embeddings:
                        embeddings.start_second_hop(part.context)
                    if part.is_first:
                        self._finish_dense_update()  # of the previous step
                        lr_factor = schedule()
                        for other in micro_batches:
                            other.context.lr_factor = lr_factor
                            # Set before `output_dist`, which otherwise starts a sort that no update uses.
                            if self.clip is not None and self.clip.includes_rows:
                                other.context.clip = partial(self._clip_with_rows, self.clip)
                        self._write_scalars(lr_factor, part.context.global_totals, part.context.batch_size_per_rank)
                    with embeddings.active_batch(part.context):
                        dense = self._forward_dense(part) if hides_embeddings else part.device_batch.dense
                        pooled = self._output_dist(part)
                        queue.input_dist()
                        self._resolve_check()  # The host has just waited for id counts, so this hardly waits.
                        if hides_embeddings and not part.is_last:
                            queue.run_lookup(micro_batches[part.index + 1])
                        part_logits, loss, loss_sums = self._score(queued, part, dense, pooled)
                        del dense, pooled  # The autograd graph keeps what the backward pass needs.
                    logits.append(part_logits.detach())
                    losses.append(loss_sums)
                    if part.is_first:
                        queue.start_second_hop()
                        queue.prefetch_rows()
                        if self.uses_stale_embeddings:
                            queue.lookup_next(self._num_steps_after(part))
                    if part.is_last:
                        report = loss.report if isinstance(loss, StepLoss) else None
                        agreement = check.start(micro_batches, sum(losses[1:], losses[0]), votes(), report)
                    self._backward(part, part_logits, loss)
        finally:
            embeddings.discard_accumulated()
        check.finish(agreement, queued, step)
        totals = agreement.global_totals
        self._has_pending_dense_update = totals.weight > 0
        if "dense" not in self.overlap:
            self._finish_dense_update()
        return StepResult(
            agreement=agreement,
            num_samples=totals.num_samples - totals.num_padding,
            logits=torch.cat(logits) if len(logits) > 1 else logits[0],
            batch=cast(Batch, queued.batch),
            votes=check.pop_votes(),
        )

    def _start_input_dist(self, queue: LookaheadQueue, queued: QueuedBatch) -> None:
        # An earlier step may have started it.
        prefetched, self.prefetched_embeddings = self.prefetched_embeddings, None
        if not queued.micro_batches:
            queue.start_input_dist(queued)
            if prefetched is not None:
                self._use_prefetched_embeddings(queue, queued, prefetched)
        if queued.deferred_error is not None:
            raise queued.deferred_error

    def _use_prefetched_embeddings(
        self, queue: LookaheadQueue, queued: QueuedBatch, prefetched: PrefetchedEmbeddings
    ) -> None:
        for part in queued.micro_batches:
            queue.run_input_dist(part)
        embeddings = prefetched.local_slice(self.world, cast(Batch, queued.batch))
        for part in queued.micro_batches:
            part.context.embeddings = [embeddings[part.context.slice_offset :][: part.device_batch.batch_size]]

    def _num_steps_after(self, part: MicroBatch) -> int:
        assert part.context.global_totals is not None and part.context.batch_slice is not None
        return part.context.batch_slice.step + (part.context.global_totals.weight > 0)

    def _forward_dense(self, part: MicroBatch) -> Any:
        if self._dense_forward is None:
            return part.device_batch.dense
        with self.stage_times.stage("dense_forward"), fsdp_parameter_error_context():
            return self._dense_forward(part.device_batch.dense)

    def _output_dist(self, part: MicroBatch) -> Any:
        with self.stage_times.stage("lookup"):
            return select_score_input(self.model, self.model.embeddings.output_dist(part.context))

    def _score(
        self, queued: QueuedBatch, part: MicroBatch, dense: Any, pooled: Any
    ) -> tuple[Tensor, Tensor | StepLoss, Tensor]:
        totals, factors = part.context.global_totals, queued.task_factors
        assert totals is not None
        with self.stage_times.stage("dense_forward"), fsdp_parameter_error_context():
            task_factors = None if factors is None else factors(totals.weight)
            loss_kernel = self._find_loss_kernel(part)
            return self._losses(dense, pooled, part.device_batch, part.context, task_factors, loss_kernel)

    def _find_loss_kernel(self, part: MicroBatch) -> LossKernel | None:
        """Return the function that computes the loss, its gradient and the verdict together, if one kernel can."""
        reports = [report for _, report in part.context.rejected_ids]
        # In other cases, the loss is a sum over terms, micro-batches or ranks.
        if self.scalars is None or self._losses.term_names or not part.num_parts == self.world.size == 1:
            return None
        if not self.update_check.is_deferred or len(reports) > 1:
            return None
        [report] = reports or [torch.zeros(2, dtype=torch.int64, device=self.world.device)]
        scale = self._device_scale(torch.float64)
        return partial(cross_entropy_step, scale=scale, memory=self.update_check.memory, report=report)

    def _backward(self, part: MicroBatch, logits: Tensor, loss: Tensor | StepLoss) -> None:
        context = part.context
        assert context.global_totals is not None
        weight, num_samples = context.global_totals.weight, sum(context.batch_size_per_rank)
        if not weight > 0:
            return
        with self.model.embeddings.active_batch(context), self.stage_times.stage("backward"):
            if part.is_first:
                self.optimizer.zero_grad(set_to_none=True)
            divisor = loss_divisor(part.device_batch.batch_size, weight, num_samples)
            with keep_running_stats(self._running_stats, context.found_inf):
                if isinstance(loss, StepLoss):
                    logits.backward(loss.gradient)
                else:
                    loss.backward(self._loss_gradient(loss, divisor, part.num_parts))
            context.finish_update()

    def _clip_with_rows(self, clip: GradientClipper, rows: Sequence[Tensor], replicated: Sequence[Tensor]) -> float:
        if self._dense_gradients is not None:
            self._dense_gradients.finish()
        return clip(dense_parameters(self.optimizer), rows, replicated)

    def _loss_gradient(self, loss: Tensor, divisor: float, num_parts: int) -> Tensor:
        if self.scalars is not None and num_parts == 1:
            dtype = torch.float64 if loss.dtype == torch.float64 else torch.float32
            return self._device_scale(dtype).to(loss.dtype)
        # The same in each step of full batches without weights, so that it is computed once.
        if divisor != self._divisor or self._inverse_divisor.dtype != loss.dtype:
            self._divisor, self._inverse_divisor = divisor, torch.ones_like(loss) / divisor
        return self._inverse_divisor

    def _device_scale(self, dtype: torch.dtype) -> Tensor:
        """Return 1 / divisor of the step, float32 or float64, on the device."""
        assert self.scalars is not None
        return self.scalars.view(("divisor", dtype), dtype, partial(inverse_divisor, dtype))[0]

    def _finish_dense_update(self) -> None:
        if not self._has_pending_dense_update:
            return
        self._has_pending_dense_update = False
        with self.stage_times.stage("dense_update"):
            if self._dense_gradients is not None:
                self._dense_gradients.finish()
            # A clipper that includes rows has already run before the update of the rows.
            if self.clip is not None and not self.clip.includes_rows:
                # The host reads the norm and raises an error if it is not finite, so check the loss first.
                if self.clip.norm is not None:
                    self._resolve_check()
                self.clip(dense_parameters(self.optimizer))
            self.update_check.step_optimizer(self.optimizer, self.scalars)
            self._update_average()

    def _update_average(self) -> None:
        if self.dense_average is not None and not self._is_capturing:
            self.dense_average.update(self.model.embeddings.step)

    def _write_scalars(self, lr_factor: float | None, totals: BatchTotals | None, sizes: Sequence[int]) -> None:
        if self.scalars is None or self._is_capturing:
            return
        assert totals is not None
        embeddings = self.model.embeddings
        factor = embeddings.lr_factor if lr_factor is None else lr_factor
        divisor = loss_divisor(sizes[self.world.rank], totals.weight, sum(sizes))
        self.scalars.write(StepNumbers(embeddings.step, factor, divisor))

    def _find_eager_reason(self) -> str | None:
        if self.device_copier is None:
            return "batches that are copied in their step"
        if self.num_masked_tasks:
            return "missing labels"
        if self.uses_stale_embeddings:
            return "stale embeddings"
        args = self.model, self.model.embeddings, self.optimizer, self.clip, self.world, self.accumulate_steps
        return find_eager_reason(*args)

    def _find_captured(self, queue: LookaheadQueue, queued: QueuedBatch) -> CapturedStep | None:
        if self.graphs is None or queued.batch is None:
            return None
        if self.graphs.reason is not None:
            self.graphs.eager_reasons[self.graphs.reason] += 1
            return None
        queue.start_copy(queued)
        [copy, *_] = queued.pending_copies
        assert isinstance(copy, PendingCopy)
        captured = self.graphs.find(copy, self._capture_step, is_recorded=self.stage_times.is_recording)
        queue.pads_ids = self.graphs.reason is None
        return captured

    def _capture_step(self, copy: PendingCopy, is_timed: bool) -> CapturedStep:
        """Capture the step of a batch without running it. Raises MesetaError or RuntimeError if it is not possible."""
        assert self.graphs is not None
        self._finish_dense_update()
        embeddings, layout, batch = self.model.embeddings, copy.part.layout, copy.part.batch
        buffer = copy.wait_buffer().clone()
        queue, queued = self._make_queue(iter(()), None), QueuedBatch(batch)
        queued.pending_copies = [StaticPart(buffer, layout, batch, copy.totals)]
        mark = record_external_event if is_timed else no_op
        self._is_capturing = True
        try:
            with (
                embeddings.uncounted(),
                self.update_check.capturing(),
                self.stage_times.capture(mark) as stages,
                self.graphs.capturing() as graph,
            ):
                queue.start_input_dist(queued)
                step = self._train_step(queue, queued, lambda: None, tuple)
                self._finish_dense_update()
        finally:
            self._is_capturing, self._has_pending_dense_update = False, False
        report = step.agreement.report
        assert report is not None
        return CapturedStep(
            graph=graph,
            buffer=buffer,
            batch=queued.micro_batches[0].device_batch,
            logits=step.logits,
            report=report,
            rejected_ids=step.agreement.rejected_ids,
            stages=stages if is_timed else None,
        )

    def _replay_step(
        self,
        captured: CapturedStep,
        queue: LookaheadQueue,
        queued: QueuedBatch,
        schedule: Callable[[], float | None],
        votes: Callable[[], Sequence[float]],
    ) -> StepResult:
        assert self.graphs is not None
        embeddings, check, [copy] = self.model.embeddings, self.update_check, queued.pending_copies
        assert isinstance(copy, PendingCopy)
        step, totals = embeddings.step, copy.totals
        self._finish_dense_update()  # of an eager step
        self._write_scalars(schedule(), totals, (totals.num_samples,))
        captured.replay(copy.wait_buffer())
        if captured.stages is not None:
            self.stage_times.add_replay(captured.stages, self.graphs.pop_num_timed())
        agreement = LossAgreement.of_report(totals, captured.report, captured.rejected_ids, check.term_names, votes())
        embeddings.count_replayed_step()
        self._update_average()
        # The next replay overwrites the results, so they are copied.
        logits = captured.logits.clone()
        queue.fill()
        # If the previous step was refused, the device has skipped this one too, and it is dropped.
        self._resolve_check()
        check.pending = DeferredCheck(agreement, queued.batch, step, embeddings.out_of_range_ids)
        return StepResult(
            agreement=agreement,
            num_samples=totals.num_samples - totals.num_padding,
            logits=logits,
            batch=cast(Batch, queued.batch),
            votes=check.pop_votes(),
        )

    def _make_queue(self, batches: Iterator[Batch | PackedBatch], device_copier: DeviceCopier | None) -> LookaheadQueue:
        uses_graphs = self.graphs is not None and self.graphs.reason is None
        return LookaheadQueue(
            batches=batches,
            embeddings=self.model.embeddings,
            world=self.world,
            stage_times=self.stage_times,
            accumulate_steps=self.accumulate_steps,
            num_masked_tasks=self.num_masked_tasks,
            # A graph contains the whole step, so that no part of it can run earlier.
            exchanges_ids=self.uses_stale_embeddings or ("ids" in self.overlap and not uses_graphs),
            overlaps_gradient_dist="gradients" in self.overlap,
            defers_id_check=self.update_check.is_deferred,
            device_copier=device_copier,
            pads_ids=uses_graphs,
            scalars=self.scalars,
        )

    def _resolve_check(self) -> None:
        try:
            self.update_check.resolve()
        except SkippedUpdate:
            # Restore the state before the skipped step.
            skipped = cast(DeferredCheck, self.update_check.skipped)
            self.batch = skipped.batch
            self.model.embeddings.step = skipped.step
            self._drop_graphs()
            raise

    def _drop_graphs(self) -> None:
        # A refused first step leaves no moments, and graphs must not contain their addresses or create them.
        if self.graphs is not None:
            self.graphs.drop()

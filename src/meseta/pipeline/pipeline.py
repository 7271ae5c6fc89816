"""Batches in, steps out: copy, input_dist, lookup, dense forward, agreement on the loss, backward, update; what travels
goes on while something is computed, where `meseta.spec.stages` lists it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from meseta.comm import DenseGradients, World, retain_until_exit
from meseta.comm.dense_shards import fsdp_parameter_error_context
from meseta.data.batch import Batch
from meseta.embedding.batch_context import BatchContext
from meseta.jagged.shapes import Float
from meseta.models.base import find_dense_forward, select_score_input
from meseta.ops.allocator import keep_freed_memory
from meseta.optim.clip import GradientClipper
from meseta.optim.dense import dense_parameters, step_if_finite
from meseta.pipeline.agreement import (
    DeferredLossCheck,
    LateNonFiniteLoss,
    LossAgreement,
    make_batch_totals,
    start_task_factors,
)
from meseta.pipeline.device_copy import DeviceCopier
from meseta.pipeline.losses import BatchLosses
from meseta.pipeline.micro_batches import micro_batch_error_context, split_batch
from meseta.pipeline.model import Model
from meseta.pipeline.prefetched_embeddings import PrefetchedEmbeddings
from meseta.spec import MesetaError
from meseta.spec.stages import Overlap
from meseta.telemetry.span import DeviceClock, StageTimes


@dataclass(frozen=True)
class StepResult:
    """What is left of a step."""

    agreement: LossAgreement = field(repr=False)
    """What all ranks have agreed on, with the terms of the loss that the model names."""
    num_samples: int
    """Samples of the global batch, without those that only fill it up."""
    logits: Float[Tensor, " B_local *T"]
    """This rank's predictions, made before the update."""
    batch: Batch
    """What they are of."""
    votes: tuple[float, ...] = ()
    """Sums over all ranks of what each gave; on a GPU those of the step before, and none in the first."""

    @property
    def loss(self) -> float:
        """Weighted mean over the global batch; 0 where all weights are 0. On a GPU, which is waited for, raises
        NonFiniteLoss where it is no number."""
        return self.agreement.loss


@dataclass(eq=False)
class _MicroBatch:
    """A micro-batch on its way."""

    batch: Batch | None
    """On its device; None where it could not be read."""
    context: BatchContext[Any]

    @property
    def device_batch(self) -> Batch:
        """The samples; a batch that could not be read has raised before."""
        assert self.batch is not None
        return self.batch


@dataclass(eq=False)
class QueuedBatch:
    """A batch that was read."""

    batch: Batch | None
    """None where it could not be read."""
    error: Exception | None = None
    """Why."""
    deferred_error: MesetaError | None = None
    """What all ranks were told is wrong with it before its step has come, which raises it."""
    pending_copies: list[Callable[[], Batch]] = field(default_factory=list)
    """Gives each micro-batch on the device; empty until copies are begun."""
    micro_batches: list[_MicroBatch] = field(default_factory=list)
    """Empty until it is begun."""
    task_factors: Callable[[float], Tensor] | None = None
    """Factors of the tasks, see `start_task_factors`; `None` until it is begun, or if all labels are known."""


class Pipeline:
    """Trains on batches one after the other; every rank gives its slice of the same global batches.

    The loss is sum(w_i * l_i) / sum(w_i) over the samples of the global batch, where w_i is the weight of a sample (1
    where the batch has none) and l_i the binary cross-entropy, summed over tasks, and what the model adds to it, see
    meseta.pipeline.losses. If labels may be missing, the mean of each task is over the samples whose label is known. A
    batch whose weights add up to 0 changes nothing, and counts as no step of any optimizer.
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
        """`optimizer` holds the dense parameters; the tables step inside the backward pass. `task_weights` multiply
        the losses of the tasks, in the order of the labels; None: all 1. `clip` limits the dense gradients.
        With `accumulate_steps` k each rank takes its slice in k parts, forward and back one after the other, and every
        optimizer steps once after the last: the memory of activations is that of a part. `overlap` says what travels
        while something is computed; it changes no bit.

        On a CPU this process keeps the memory that its steps free, see meseta.ops.allocator.
        """
        self.model = model
        self.optimizer = optimizer
        # That of sharded tables knows the hosts of their plan.
        self.world = getattr(model.embeddings, "world", world)
        weights = None if task_weights is None else torch.tensor(task_weights, device=world.device)
        self._losses = BatchLosses(model, weights, accumulate_steps)
        self.clip = clip
        self.accumulate_steps = accumulate_steps
        self.num_masked_tasks = 0
        """Number of tasks if batches have a mask of known labels, else 0; to be set before the first step."""
        self.overlap = frozenset(overlap)
        self.uses_stale_embeddings = False
        """Whether every batch is looked up before the update of the one before moves a row, so that answers too travel
        a batch ahead; to be set before the first step."""
        self.prefetched_embeddings: PrefetchedEmbeddings | None = None
        """Answers of the batch to come, which it takes, where it was looked up before this loop."""
        self.defers_loss_check = world.device.type != "cpu"
        """Whether the device itself keeps all as it is where a loss is no number, while the host learns of it, and of
        the votes, in the next step or in `synchronize`; to be set before the first step."""
        self._deferred_check: DeferredLossCheck | None = None
        self._resolved_votes: tuple[float, ...] = ()
        """Votes that no step has given out yet."""
        is_gpu = world.device.type == "cuda"
        self.stage_times = StageTimes(_make_device_clock() if is_gpu else None)
        self.device_copier = DeviceCopier(world.device, self.stage_times) if is_gpu else None
        """Copy each batch to the device while the one before is computed; None: each is copied when its step comes."""
        self.batch: Batch | None = None
        """The one that is trained, or was trained last."""
        self._forward_dense = find_dense_forward(model)
        self._dense_gradients: DenseGradients | None = getattr(model, "dense_gradients", None)
        if self._dense_gradients is not None:
            self._dense_gradients.overlaps_update = "dense" in self.overlap
        self._queue: deque[QueuedBatch] = deque()
        """Batches that were read before their steps."""
        self._has_pending_dense_update = False
        """Whether the dense update of the last step is still to come."""
        if world.device.type == "cpu":
            keep_freed_memory()

    def __call__(self, batch: Batch, *, lr_factor: float | None = None, votes: Sequence[float] = ()) -> StepResult:
        """Train on one batch alone, with all updates in place when it returns.

        `lr_factor` multiplies the learning rates of the tables; None: as their collection says when they are updated.
        `votes` are numbers that travel with the loss and are summed over ranks; as many on every rank. On a GPU it is
        waited for.

        Raises NonFiniteLoss on all ranks, before any update, when the loss is not finite, and MesetaError for ids
        outside their table.
        """
        [step] = self.steps(iter([batch]), schedule=lambda: lr_factor, votes=lambda: votes)
        if self.defers_loss_check:
            step, self._resolved_votes = replace(step, votes=self._resolved_votes), ()
        return step

    def steps(
        self,
        batches: Iterator[Batch],
        *,
        schedule: Callable[[], float | None] = lambda: None,
        votes: Callable[[], Sequence[float]] = tuple,
    ) -> Generator[StepResult, None, None]:
        """Train on one batch after the other; what is wrong with one, or keeps a rank from reading it, is raised at its
        step, on all ranks.

        A step is given out when its rows have moved, on a GPU when their update has begun; `synchronize` puts all else
        in place. Leaving the loop early closes what is open; every rank must leave it after the same step. On a GPU a
        loss that is no number is raised in the step behind it, or by `synchronize`, as LateNonFiniteLoss.

        Args:
            batches: as many on every rank.
            schedule: called in each step when the updates before it are in place: sets the rates of `optimizer`, and
                returns what multiplies those of tables; None: as their collection says.
            votes: called in each step for what `__call__` takes under this name.
        """
        self.stage_times.begin_step()
        coming = self._read(batches)
        try:
            while coming is not None:
                self.batch = coming.batch
                with self.world.transfers.track_step():
                    step = self._train_step(coming, batches, schedule, votes)
                coming = None  # nothing holds a batch while the next one is waited for
                yield step
                self.stage_times.begin_step()
                del step
                coming = self._queue.popleft() if self._queue else None if self._queue_size else self._read(batches)
        except (GeneratorExit, LateNonFiniteLoss):  # all ranks leave alike
            for begun in (coming, *self._queue):
                for part in [] if begun is None else begun.micro_batches:
                    self.model.embeddings.drop(part.context)
            raise
        except BaseException:
            retain_until_exit((coming, *self._queue))
            raise
        finally:
            self._queue.clear()
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until every update of the last step is in place: before weights are looked at. Raises LateNonFiniteLoss
        where there is none, since its loss is no number."""
        self._finish_dense_update()
        self._resolve_deferred_loss()

    def _resolve_deferred_loss(self) -> None:
        """What all ranks agreed on in the step before; where its loss is no number, raises, and all is as before it."""
        unheard, self._deferred_check = self._deferred_check, None
        if unheard is None:
            return
        try:
            with self.stage_times.stage("agree"):
                self._resolved_votes = unheard.votes()
        except LateNonFiniteLoss:
            self.model.embeddings.step, self.batch = unheard.step, unheard.batch
            raise

    def _finish_dense_update(self) -> None:
        """Step the dense part, where that is still to come."""
        if not self._has_pending_dense_update:
            return
        self._has_pending_dense_update = False
        with self.stage_times.stage("dense_update"):
            if self._dense_gradients is not None:
                self._dense_gradients.finish()
            if self.clip is not None and not self.clip.includes_rows:  # else it was called in the backward pass
                if self.clip.norm is not None:  # which the host reads, and refuses where it is no number
                    self._resolve_deferred_loss()
                self.clip(dense_parameters(self.optimizer))
            if self._deferred_check is None:
                self.optimizer.step()
            else:
                self._deferred_check.undo = step_if_finite(self.optimizer, self._deferred_check.found_inf)

    def snapshot_prefetched(self) -> PrefetchedEmbeddings | None:
        """Between two steps, the answers of the batch to come that were looked up before the last update, on rank 0 of
        all ranks; None where there are none. Later loops begin with them. Collective."""
        coming = self._queue[0] if self._queue else None
        if (
            self.uses_stale_embeddings
            and self.prefetched_embeddings is None
            and coming
            and coming.batch is not None
            and coming.deferred_error is None
        ):
            answers = [self.model.embeddings.wait_for_embeddings(part.context)[0] for part in coming.micro_batches]
            self.prefetched_embeddings = PrefetchedEmbeddings.gather(self.world, coming.batch, torch.cat(answers))
        return self.prefetched_embeddings

    @property
    def _prefetches_ids(self) -> bool:
        return self.uses_stale_embeddings or "ids" in self.overlap or self.model.embeddings.lookahead > 0

    @property
    def _queue_size(self) -> int:
        """Batches that are read before their steps."""
        if self._prefetches_ids or self.device_copier is not None:
            return max(self.model.embeddings.lookahead, 1)
        return 0

    def _read(self, batches: Iterator[Batch]) -> QueuedBatch | None:
        """The next batch; None at their end."""
        try:
            with self.stage_times.stage("data"):
                return QueuedBatch(next(batches))
        except StopIteration:
            return None
        except Exception as error:
            return QueuedBatch(None, error)

    def _start_copy(self, coming: QueuedBatch) -> None:
        """Begin to copy a batch to its device, where that was not done before."""
        if coming.batch is None or coming.pending_copies:
            return
        with self.stage_times.stage("copy"):
            for part in split_batch(coming.batch, self.accumulate_steps):
                now = partial(part.to, self.world.device, non_blocking=True)
                coming.pending_copies.append(now if self.device_copier is None else self.device_copier.start(part))

    def _start_input_dist(self, coming: QueuedBatch) -> None:
        """Copy a batch to its device, and begin to tell the owners of rows how many ids come to them."""
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

    def _use_prefetched_embeddings(self, carried: PrefetchedEmbeddings, coming: QueuedBatch) -> None:
        """Give a batch the answers of an earlier lookup."""
        for part in coming.micro_batches:
            self._input_dist(part)
        assert coming.batch is not None
        answers = carried.local_slice(self.world, coming.batch)
        for part in coming.micro_batches:
            part.context.embeddings = [answers[part.context.slice_offset :][: part.device_batch.batch_size]]

    def _fill_queue(self, batches: Iterator[Batch]) -> None:
        """Read batches ahead, where ids, rows or copies travel ahead. All ranks stop at one that cannot be trained."""
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
        """Carry on with the first ones ahead; None: with all. What is wrong with one is raised at its step."""
        for coming in list(self._queue)[:count]:
            if coming.deferred_error is None:
                try:
                    for part in coming.micro_batches:
                        carry_on(part)
                except MesetaError as error:
                    coming.deferred_error = error

    def _prefetch_rows(self, parts: Sequence[_MicroBatch]) -> None:
        """Begin to bring the rows of the batch in hand and of those ahead, in their order, as far as there is room."""
        if self.model.embeddings.lookahead:
            with self.stage_times.stage("lookup"):
                for part in (*parts, *(part for coming in self._queue for part in coming.micro_batches)):
                    if part.context.stage == "started" or not self.model.embeddings.prefetch(part.context):
                        break

    def _lookup_queued(self, step: int, part: _MicroBatch) -> None:
        """Look up a batch whose step comes after `step` others, of which one is under way."""
        part.context.step = step
        self._lookup(part)

    def _input_dist(self, part: _MicroBatch) -> None:
        """Begin to send ids to the owners of rows, where that was not done before."""
        if part.context.stage == "started":
            with self.stage_times.stage("input_dist"):
                self.model.embeddings.input_dist(part.context)

    def _lookup(self, part: _MicroBatch) -> None:
        """Begin to send rows and bags to the ranks of the samples, likewise."""
        self._input_dist(part)
        if part.context.stage == "exchanged":
            with self.stage_times.stage("lookup"):
                self.model.embeddings.lookup(part.context)

    def _train_step(
        self,
        coming: QueuedBatch,
        batches: Iterator[Batch],
        schedule: Callable[[], float | None],
        votes: Callable[[], Sequence[float]],
    ) -> StepResult:
        """One step; the batch after it is begun on the way where ids travel ahead."""
        carried, self.prefetched_embeddings = self.prefetched_embeddings, None
        if not coming.micro_batches:
            self._start_input_dist(coming)
            if carried is not None:
                self._use_prefetched_embeddings(carried, coming)
        if coming.deferred_error is not None:
            raise coming.deferred_error
        parts, logits, former_step = coming.micro_batches, list[Tensor](), self.model.embeddings.step
        local_losses: Tensor | None = None
        try:
            for index, part in enumerate(parts):
                is_last = index == len(parts) - 1
                with micro_batch_error_context(index, len(parts)):
                    self._lookup(part)
                    if index == 0:
                        self._fill_queue(batches)
                    if "embeddings" in self.overlap:
                        self.model.embeddings.start_second_hop(part.context)
                    if index == 0:
                        self._finish_dense_update()
                        self._set_lr_factor(parts, schedule())
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
        """The votes of a step, where the host waits for them; else it is told later, see `_hear`."""
        flight = coming.micro_batches[-1].context
        self._set_update_guard(agreement, flight)
        if flight.found_inf is None:
            self._resolved_votes = agreement.votes
        else:
            self._deferred_check = DeferredLossCheck(agreement, flight.found_inf, coming.batch, former_step)

    def _num_steps_after(self, part: _MicroBatch) -> int:
        """Steps trained when the one of a batch that was looked up is over."""
        assert part.context.global_totals is not None and part.context.batch_slice is not None
        return part.context.batch_slice.step + (part.context.global_totals.weight > 0)

    def _set_lr_factor(self, parts: Sequence[_MicroBatch], lr_factor: float | None) -> None:
        for part in parts:
            part.context.lr_factor = lr_factor

    def _score(
        self, coming: QueuedBatch, part: _MicroBatch, following: _MicroBatch | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of a micro-batch and sums of its losses, see BatchLosses; `following` is looked up meanwhile."""
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
            self._resolve_deferred_loss()  # behind the counts, for which the host has waited
            if hides and following is not None:
                self._lookup(following)
            with stage("dense_forward"), fsdp_parameter_error_context():
                assert part.context.global_totals is not None
                factors = (
                    None if coming.task_factors is None else coming.task_factors(part.context.global_totals.weight)
                )
                return self._losses(dense, pooled, batch, part.context, factors)

    def _start_agreement(self, part: _MicroBatch, local_losses: Tensor, votes: Sequence[float]) -> LossAgreement:
        """Begin to agree on the loss of a global batch, of which this is the last part; nothing moves before that."""
        assert part.context.global_totals is not None
        with self.stage_times.stage("agree"):
            agreement = LossAgreement.start(
                self.world, part.context.global_totals, local_losses, votes, self._losses.term_names
            )
        if "agree" not in self.overlap:
            self._set_update_guard(agreement, part.context)
        part.context.pre_update_hook = partial(self._set_update_guard, agreement, part.context)
        return agreement

    def _set_update_guard(self, agreement: LossAgreement, flight: BatchContext[Any]) -> None:
        """Tell a flight whether its rows may move: the host, or the device alone."""
        with self.stage_times.stage("agree"):
            if not self.defers_loss_check:
                agreement.check()
            elif flight.found_inf is None:
                flight.found_inf = agreement.found_inf()

    def _backward(self, part: _MicroBatch, summed: Tensor, *, is_first: bool) -> None:
        """Gradients of a micro-batch; the last one's update of rows."""
        flight = part.context
        assert flight.global_totals is not None
        weight, num_samples = flight.global_totals.weight, sum(flight.batch_size_per_rank)
        if not weight > 0:
            return
        with self.model.embeddings.active_batch(flight), self.stage_times.stage("backward"):
            if is_first:
                self.optimizer.zero_grad(set_to_none=True)
            # The tables and the dense gradients weigh this by B_local / B_global, so that it is divided by the sum of
            # weights in the end. Without weights the divisor is the local batch size, to the bit.
            if (
                self.clip is not None and self.clip.includes_rows
            ):  # at the end of the pass, when all gradients are there
                flight.overlaps_gradient_dist, flight.clip = True, partial(self.clip, dense_parameters(self.optimizer))
            divisor = part.device_batch.batch_size * weight / max(num_samples, 1)
            (summed / (divisor or 1.0)).backward()


def _make_device_clock() -> DeviceClock:
    """Of this rank's GPU."""
    new_event = partial(torch.cuda.Event, enable_timing=True)
    return DeviceClock(new_event, torch.cuda.current_stream, torch.cuda.synchronize)

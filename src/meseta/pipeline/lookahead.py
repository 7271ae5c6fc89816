"""Look-ahead queue of a training loop. Copies, exchanges and lookups of queued batches overlap with earlier steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from meseta.comm import World
from meseta.data.read.batch import Batch, split_batch
from meseta.embedding.base import BaseEmbeddingCollection
from meseta.embedding.batch_context import BatchContext
from meseta.ops.step_scalars import StepScalars
from meseta.pipeline.device_copy import DeviceCopier, HostPart, PackedBatch, PackedPart, PendingCopy, StaticPart
from meseta.pipeline.losses import SkippedUpdate, make_batch_totals, start_task_factors
from meseta.spec import MesetaError
from meseta.telemetry.span import StageTimes


@dataclass(eq=False)
class MicroBatch:
    """Part of a batch, from its `input_dist` to its backward pass."""

    index: int
    num_parts: int
    context: BatchContext[Any]
    batch: Batch | None
    """Micro-batch on its device. `None` if reading failed."""

    @property
    def device_batch(self) -> Batch:
        # A failure of reading was raised before.
        assert self.batch is not None
        return self.batch

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_parts - 1

    def error_context(self) -> AbstractContextManager[None]:
        """See `micro_batch_error_context`."""
        return micro_batch_error_context(self.index, self.num_parts)


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
    """Packed micro-batches, until their copies are started."""
    pending_copies: Sequence[PendingCopy | StaticPart | HostPart] = ()
    """Micro-batches on their way to the device, until their `input_dist` is started."""
    micro_batches: list[MicroBatch] = field(default_factory=list)
    """Empty until the `input_dist` of the batch is started."""
    task_factors: Callable[[float], Tensor] | None = None
    """Result of `start_task_factors`. `None` if all labels are known."""

    @property
    def can_be_trained(self) -> bool:
        return self.batch is not None and self.deferred_error is None


@dataclass(eq=False, kw_only=True)
class LookaheadQueue:
    """Batches of one training loop, in order. All ranks call the same methods in the same order."""

    batches: Iterator[Batch | PackedBatch]
    embeddings: BaseEmbeddingCollection[Any]
    world: World
    stage_times: StageTimes
    accumulate_steps: int
    num_masked_tasks: int
    """Number of tasks if batches have a mask of known labels, else 0."""
    exchanges_ids: bool
    """Whether the ids of a batch are exchanged during the previous step."""
    overlaps_gradient_dist: bool
    defers_id_check: bool
    device_copier: DeviceCopier | None
    """`None` copies each batch in its step."""
    pads_ids: bool = False
    """Whether ids are padded to the capacity of their layout, as in a CUDA graph."""
    scalars: StepScalars | None = None
    """Numbers of the step on a GPU."""
    current: QueuedBatch | None = field(default=None, init=False)
    _waiting: deque[QueuedBatch] = field(default_factory=deque, init=False)
    _has_ended: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._starts_input_dist = self.exchanges_ids or self.embeddings.lookahead > 0
        is_read_ahead = self._starts_input_dist or self.device_copier is not None
        self._size = max(self.embeddings.lookahead, 1) if is_read_ahead else 0

    @property
    def next(self) -> QueuedBatch | None:
        """Batch of the next step. `None` if it was not read yet."""
        return self._waiting[0] if self._waiting else None

    @property
    def open_batches(self) -> list[QueuedBatch]:
        return [*([] if self.current is None else [self.current]), *self._waiting]

    def pop(self) -> QueuedBatch | None:
        """Make the next batch the current one and return it. `None` at the end."""
        self.current = self._waiting.popleft() if self._waiting else self._read()
        return self.current

    def _read(self) -> QueuedBatch | None:
        if self._has_ended:
            return None
        try:
            with self.stage_times.stage("data"):
                batch = next(self.batches)
                if isinstance(batch, PackedBatch):
                    return QueuedBatch(batch.batch, packed=batch.parts)
                return QueuedBatch(batch)
        except StopIteration:
            self._has_ended = True
            return None
        except Exception as error:
            return QueuedBatch(None, error)

    def fill(self) -> None:
        """Read batches until the queue is full, and start their copies and exchanges."""
        # All ranks stop at a batch that cannot be trained.
        while len(self._waiting) < self._size:
            if self._waiting:
                self.input_dist()
                if not self._waiting[-1].can_be_trained:
                    return
            if (queued := self._read()) is None:
                return
            self._waiting.append(queued)
            if self._starts_input_dist and (queued.batch is not None or self.world.size > 1):
                try:
                    self.start_input_dist(queued)
                except MesetaError as error:
                    queued.deferred_error = error
            else:
                self.start_copy(queued)

    def start_copy(self, queued: QueuedBatch) -> None:
        """Start to copy the micro-batches of a batch to the device, unless it was done before."""
        if queued.batch is None or queued.pending_copies:
            return
        with self.stage_times.stage("copy"):
            if self.device_copier is None:
                totals, device = make_batch_totals(queued.batch), self.world.device
                parts = split_batch(queued.batch, self.accumulate_steps)
                queued.pending_copies = [HostPart(part, totals, device) for part in parts]
            else:
                packed = queued.packed or self.device_copier.packer.pack(queued.batch).parts
                queued.pending_copies = [self.device_copier.start(part) for part in packed]
                queued.packed = ()

    def start_input_dist(self, queued: QueuedBatch) -> None:
        """Copy the micro-batches of a batch to the device and start their `input_dist`."""
        batch, error, start = queued.batch, queued.error, self.embeddings.start_input_dist
        if self.num_masked_tasks:
            queued.task_factors = start_task_factors(self.world, batch, self.num_masked_tasks)
        count = self.accumulate_steps
        if batch is None:
            assert error is not None
            queued.micro_batches = [MicroBatch(index, count, start(error), None) for index in range(count)]
            return
        self.start_copy(queued)
        offset = 0
        for index, copy in enumerate(queued.pending_copies):
            with self.stage_times.stage("copy"):
                on_device = copy.wait(padded=self.pads_ids)
            with self.stage_times.stage("input_dist"):
                context = start(
                    on_device.sparse,
                    local_totals=copy.totals,
                    accumulates_gradients=index < count - 1,
                    stage_timer=self.stage_times.stage,
                )
            context.slice_offset, context.overlaps_gradient_dist = offset, self.overlaps_gradient_dist
            context.defers_id_check, context.scalars = self.defers_id_check, self.scalars
            queued.micro_batches.append(MicroBatch(index, count, context, on_device))
            offset += on_device.batch_size
        queued.pending_copies = ()

    def input_dist(self) -> None:
        """Complete the `input_dist` of all queued batches."""
        self._for_each_waiting(self.run_input_dist)

    def start_second_hop(self) -> None:
        self._for_each_waiting(lambda part: self.embeddings.start_second_hop(part.context))

    def lookup_next(self, step: int) -> None:
        """Look up the next batch before the update of the current one. `step` is the number of updates before it."""

        def run(part: MicroBatch) -> None:
            part.context.step = step
            self.run_lookup(part)

        self._for_each_waiting(run, count=1)

    def _for_each_waiting(self, run: Callable[[MicroBatch], object], count: int | None = None) -> None:
        for queued in list(self._waiting)[:count]:
            if queued.deferred_error is None:
                try:
                    for part in queued.micro_batches:
                        run(part)
                except MesetaError as error:
                    # The step of the batch raises it.
                    queued.deferred_error = error

    def prefetch_rows(self) -> None:
        """Prefetch offloaded rows, in the order of the batches, until the cache is full."""
        if self.embeddings.lookahead:
            with self.stage_times.stage("lookup"):
                for part in (part for queued in self.open_batches for part in queued.micro_batches):
                    if part.context.stage == "started" or not self.embeddings.prefetch(part.context):
                        break

    def run_input_dist(self, part: MicroBatch) -> None:
        # It may have been completed ahead of its step.
        if part.context.stage == "started":
            with self.stage_times.stage("input_dist"):
                self.embeddings.input_dist(part.context)

    def run_lookup(self, part: MicroBatch) -> None:
        # It may have been looked up ahead of its step.
        self.run_input_dist(part)
        if part.context.stage == "exchanged":
            with self.stage_times.stage("lookup"):
                self.embeddings.lookup(part.context)

    def drop(self) -> None:
        """Drop all open batches."""
        for queued in self.open_batches:
            for part in queued.micro_batches:
                self.embeddings.drop(part.context)


@contextmanager
def micro_batch_error_context(index: int, num_parts: int) -> Iterator[None]:
    """Context manager that prefixes errors with the index of the micro-batch that raised them.

    Errors deferred from the previous step pass through unchanged.
    """
    try:
        yield
    except SkippedUpdate:
        raise
    except MesetaError as error:
        if num_parts == 1:
            raise
        raise error.with_prefix(f"micro-batch {index + 1} of {num_parts}: ") from None

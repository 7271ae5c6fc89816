"""What the unsharded and the sharded collection share: the specs, the step, and the node in the autograd graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.comm import BatchSlice, BatchTotals, World
from meseta.embedding.accumulate import GradientSegment
from meseta.embedding.batch_context import (
    BatchContext,
    ExhaustedInput,
    GroupStateT,
    OutOfRangeIds,
    StageTimer,
    no_op,
    null_timer,
)
from meseta.embedding.feature_group import group_features
from meseta.jagged import Embeddings, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.jagged.shapes import Int
from meseta.machine.ranks import print_note
from meseta.ops.device_constants import device_constant
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_program.optimizer import compute_dtype
from meseta.ops.row_update import TableRows
from meseta.spec import FeatureSpec, MesetaError, Plan, TableSpec, check_features
from meseta.spec.tiers import OFFLOADED_TIERS, StorageOptions
from meseta.storage import CacheCapacityError, Lease, TableStorage, TieredShard
from meseta.telemetry.row_traffic import RowTraffic

NO_BACKWARD = -1
"""What torch says where no backward pass runs."""


class OptimizerInBackward(torch.autograd.Function):
    """Returns `embeddings` in the forward pass and runs `update` in the backward pass. Tables have no gradient tensor,
    and autograd does not see them.

    `update` returns the gradient of each tensor of `weights`, the weights of ids, or None for it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        answers: Sequence[Tensor],
        update: Callable[..., Sequence[Tensor | None]],
        *weights: Tensor | None,
    ) -> Any:
        ctx.update = update
        return tuple(answers)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.update(*gradients)


class BaseEmbeddingCollection(nn.Module, ABC, Generic[GroupStateT]):
    """Tables, the features that read them, and how far they have learned. Tables are not nn.Parameters.

    What belongs to one batch is in its Flight; the module knows which one is in hand.
    """

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], seed: int) -> None:
        super().__init__()
        check_features(tables, features)
        if not features:
            raise MesetaError("a collection needs at least one feature; give FeatureSpec(name=..., table=...)")
        dtypes = {table.dtype for table in tables}
        if len(dtypes) != 1:
            raise MesetaError(f"tables of one collection must have one dtype, got {sorted(dtypes) or 'no table'}")
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.seed = seed
        self.dtype = compute_dtype(getattr(torch, dtypes.pop()))
        """Type of what a lookup returns: float32, or float64 for float64 tables."""
        self.step = 0
        """Backward passes so far, the global step of bias correction."""
        self.lr_factor = 1.0
        """What a schedule multiplies every table's learning rate by, where a batch brings no factor of its own."""
        self.num_clamped: Tensor | None = None
        """[1]: numbers that were too large for fp16 on their way to other ranks so far; None where none travel so."""
        self._out_of_range_ids = OutOfRangeIds()
        self._active_batch: BatchContext[GroupStateT] | None = None
        self._last_slice: BatchSlice | None = None
        """Of the batch that was finished last."""
        self._num_started = 0
        self._acquired_rows: tuple[TableRows, ...] | None = None
        """What operators were told of last, of each shard; None before any."""
        self._last_backward: tuple[int, BatchSlice | None] = (NO_BACKWARD, None)
        """Number of the last backward pass, and the slice of its batch."""
        self._is_accumulating = False
        self._last_backward_accumulates = NO_BACKWARD, False
        """Number of the last backward pass that came to the tables, and whether its gradients wait for the next."""
        self.accumulated_dense: list[Tensor] = []
        """What backward passes of `accumulate_gradients` have left of dense gradients."""
        self._accumulated_segments: list[Callable[[], Sequence[GradientSegment]]] = []
        """Of each backward pass of `accumulate_gradients`: a segment per group, which may still be on its way."""
        self._has_warned_of_capacity = False
        self._accumulated_leases: list[Lease] = []
        """Of these passes, whose rows move with the next."""
        self._tables_by_name = {table.name: table for table in self.tables}
        self.groups = group_features(self.features, self._tables_by_name)
        """Features by batch size; the first ones are those that the loss is the mean over."""
        # An input that requires grad makes autograd call `update`; it is not a parameter and holds nothing.
        self._anchor = torch.zeros(0, requires_grad=True)

    @property
    def num_ranks(self) -> int:
        """Over which the tables lie."""
        return 1

    @property
    @abstractmethod
    def shards(self) -> Sequence[TableStorage]:
        """The pieces of tables on this rank."""

    @abstractmethod
    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        """Make what operators are told of the rows of each shard, where others were lent before."""

    def _acquire_lease(
        self, flight: BatchContext[GroupStateT], looked_up: Sequence[tuple[int, Tensor]] = ()
    ) -> list[Tensor]:
        """Borrow all rows until the backward pass of a batch is over. `looked_up` are rows that it looks up, each with
        the index of its shard; returned is where they lie in what is lent."""
        far = [(index, rows) for index, rows in looked_up if index in self._offloaded_shards]
        flight.lease = Lease(self.shards, far, read_only=not torch.is_grad_enabled())
        rows = flight.lease.rows
        if self._acquired_rows is None or any(
            lent is not former for lent, former in zip(rows, self._acquired_rows, strict=True)
        ):
            self._acquired_rows = rows
            self._bind_rows(rows)
        places = iter(flight.lease.slots)
        return [next(places).to(rows) if index in self._offloaded_shards else rows for index, rows in looked_up]

    def _set_plan(self, plan: Plan, storage: StorageOptions) -> None:
        """Note where the rows are to lie, and what room there is for those that lie near."""
        tiers = {shard.tier for entry in plan.tables for shard in entry.shards}
        self.plan = plan
        """Which ranks hold which rows, and where."""
        self.storage = storage
        """Room for rows of tiers 'cached' and 'disk'."""
        self.has_offloaded_rows = bool(tiers.intersection(OFFLOADED_TIERS))
        """Whether rows of any rank are lent only while a batch needs them."""
        self.lookahead = storage.resolve_lookahead(tiers)
        """Batches whose rows are to be brought before their turn."""

    def prefetch(self, flight: BatchContext[GroupStateT]) -> bool:
        """Begin to bring the rows of a batch whose ids were handed on, where they lie far, while others are trained.
        False where there is no room yet, which is said once; `look_up` brings them then."""
        if not self.lookahead or flight.stage != "exchanged":
            return True
        try:
            self._begin_fetch(flight)
        except MesetaError as error:
            if isinstance(error, CacheCapacityError) and not self._has_warned_of_capacity:
                self._has_warned_of_capacity = True
                few = f"rows of fewer than {self.lookahead} batches are brought ahead (storage.lookahead)"
                print_note(f"{few}, since {error}", all_ranks=True)
            return False
        return True

    @property
    def row_traffic(self) -> dict[str, RowTraffic]:
        """Of tables whose rows lie far, so far, in the pieces of this rank."""
        traffic: dict[str, RowTraffic] = {}
        for shard in self.shards:
            if isinstance(shard, TieredShard):
                traffic[shard.spec.name] = traffic.get(shard.spec.name, RowTraffic()) + shard.traffic
        return traffic

    def _begin_fetch(self, flight: BatchContext[GroupStateT]) -> None:
        """Borrow rows of a batch, if any lie far here. Raises MesetaError where there is no room for them."""

    @cached_property
    def _offloaded_shards(self) -> frozenset[int]:
        """Shards, by index, whose rows are lent only while a batch needs them."""
        return frozenset(index for index, shard in enumerate(self.shards) if shard.is_offloaded)

    def forward(self, sparse: KeyedJaggedTensor | BatchContext[GroupStateT]) -> Embeddings:
        """Rows for the ids of this rank's slice (of a batch that may hold other features too), or for a batch that was
        exchanged: pooled [B, sum of D] and unpooled [nnz_f, D]."""
        return self.output_dist(
            self.input_dist(self.start_input_dist(sparse)) if isinstance(sparse, KeyedJaggedTensor) else sparse
        )

    @abstractmethod
    def _start_input_dist(
        self, flight: BatchContext[GroupStateT], kjt: KeyedJaggedTensor | ExhaustedInput | Exception
    ) -> None:
        """Give a batch its parts."""

    def start_input_dist(
        self,
        kjt: KeyedJaggedTensor | ExhaustedInput | Exception,
        *,
        step: int | None = None,
        lr_factor: float | None = None,
        local_totals: BatchTotals | None = None,
        accumulates_gradients: bool | None = None,
        stage_timer: StageTimer = null_timer,
        out_of_range_ids: OutOfRangeIds | None = None,
    ) -> BatchContext[GroupStateT]:
        """Check the ids, begin to send their counts to the owners of rows. No host sync, unless ids are dropped.

        `kjt` may be what kept this rank from having a batch: in one process it is raised here, else by `exchange`, on
        all ranks and as a MesetaError; or that there is none any more, which all ranks know from `exchange` on. The
        options are those of Flight; what is not given follows from the collection when it is needed. `out_of_range_ids`
        counts the ids outside their table of this batch instead of the collection.
        """
        flight: BatchContext[GroupStateT] = BatchContext(
            index=self._num_started,
            step=step,
            lr_factor=lr_factor,
            local_totals=local_totals,
            accumulates_gradients=accumulates_gradients,
            stage_timer=stage_timer,
            out_of_range_ids=self._out_of_range_ids if out_of_range_ids is None else out_of_range_ids,
        )
        self._start_input_dist(flight, kjt)
        self._num_started += 1
        return flight

    @abstractmethod
    def input_dist(self, flight: BatchContext[GroupStateT]) -> BatchContext[GroupStateT]:
        """Read the counts, agree on errors, begin to send the ids; raises MesetaError for those that are refused."""

    @abstractmethod
    def lookup(self, flight: BatchContext[GroupStateT]) -> BatchContext[GroupStateT]:
        """Look up the rows as they are now, and begin to bring rows or bags to the ranks of the samples."""

    def start_second_hop(self, flight: BatchContext[GroupStateT]) -> None:
        """Where ids, or rows and bags, take two levels between hosts, begin the second; `look_up` and `finish` else do
        it. Collective."""

    def output_dist(self, flight: BatchContext[GroupStateT]) -> Embeddings:
        """Wait for the rows or bags of this rank's samples, after looking them up where that was not done before."""
        if flight.stage == "exchanged":
            self.lookup(flight)
        flight.enter_stage("finished", after="looked up")
        with flight.drop_on_error():
            if flight.output_dist_callback is not no_op:
                self.start_second_hop(flight)
                flight.output_dist_callback()
            if flight.num_out_of_range is not None:
                flight.out_of_range_ids.add(flight.num_out_of_range)
            return self._output_dist(flight)

    @abstractmethod
    def _output_dist(self, flight: BatchContext[GroupStateT]) -> Embeddings:
        """The same."""

    def wait_for_embeddings(self, flight: BatchContext[GroupStateT]) -> Sequence[Tensor]:
        """Those of a batch that was looked up, which is not finished by that: see Flight."""
        if flight.embeddings is None:
            with torch.no_grad():
                flight.embeddings = self._assemble_embeddings(flight)
        return flight.embeddings

    @abstractmethod
    def _assemble_embeddings(self, flight: BatchContext[GroupStateT]) -> Sequence[Tensor]:
        """Wait for them."""

    def drop(self, flight: BatchContext[GroupStateT]) -> None:
        """Give up a batch that is not finished, when what it has under way is there."""
        flight.drop()

    @contextmanager
    def active_batch(self, flight: BatchContext[GroupStateT]) -> Iterator[None]:
        """While this is entered, `batch_slice` and `local_share` are those of `flight`: for its forward and backward
        pass, where several batches are open."""
        before, self._active_batch = self._active_batch, flight
        try:
            yield
        finally:
            self._active_batch = before

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Where samples lie in the global batch: those of the backward pass that runs, else those of the batch in hand,
        else those of the batch that was finished last; None before any."""
        backward = torch._C._current_graph_task_id()
        if backward != NO_BACKWARD and backward == self._last_backward[0]:
            return self._last_backward[1]
        batch_slice = self._last_slice if self._active_batch is None else self._active_batch.batch_slice
        if backward != NO_BACKWARD:
            self._last_backward = backward, batch_slice
        return batch_slice

    @property
    def num_out_of_range(self) -> Int[Tensor, " F"] | None:
        """Ids outside their table so far, per feature (after policies drop, clamp and hash); None before any batch was
        finished."""
        return self._out_of_range_ids.counts

    def set_resume_state(self, step: int, num_outside: Int[Tensor, " F"] | None) -> None:
        """Count on from where a saved run stood: its backward passes, and its ids outside their table."""
        self.step = step
        if num_outside is not None:
            self._out_of_range_ids.counts = num_outside

    def _set_batch_slice(
        self, flight: BatchContext[GroupStateT], world: World, sizes: tuple[int, ...], totals: Sequence[BatchTotals]
    ) -> None:
        """Note where samples lie: `sizes` are those of each rank, of its `totals` in the global batch."""
        step = self.step if flight.step is None else flight.step
        first = sum(own.num_samples for own in totals[: world.rank]) + flight.slice_offset
        flight.batch_slice = BatchSlice(world=world, step=step, batch_size_per_rank=sizes, offset=first)
        self._last_slice = flight.batch_slice

    @abstractmethod
    def _start_gradient_dist(
        self, flight: BatchContext[GroupStateT], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Begin to bring the gradients of what the lookup of a batch returned to its rows. Returns the gradients of the
        weights of ids, and what steps the rows, or keeps their gradients for the last part of the batch."""

    def _run_backward(self, flight: BatchContext[GroupStateT], *gradients: Tensor) -> Sequence[Tensor | None]:
        """What autograd calls; with the update, here or when the pass ends, the batch is over."""
        self._start_backward(flight)
        with flight.drop_on_error():
            of_weights, update = self._start_gradient_dist(flight, *gradients)
        if flight.overlaps_gradient_dist:
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._finish_backward, flight, update))
        else:
            self._finish_backward(flight, update)
        return of_weights

    def _finish_backward(self, flight: BatchContext[GroupStateT], update: Callable[[], None]) -> None:
        waits = self._accumulates_gradients(flight)
        try:
            update()
        finally:
            if waits and flight.lease is not None:
                self._accumulated_leases.append(flight.lease)
                flight.lease = None
            else:
                flight.release()
                self._release_accumulated_leases()

    def _start_backward(self, flight: BatchContext[GroupStateT]) -> None:
        """Note whose backward pass runs; raises MesetaError where dense gradients have been weighed as another's."""
        flight.enter_stage("used", after="finished")
        backward, weighed = torch._C._current_graph_task_id(), self._last_backward
        if (
            weighed[0] == backward
            and weighed[1] is not None
            and weighed[1].batch_size_per_rank != flight.batch_size_per_rank
        ):
            raise MesetaError(
                f"a backward pass goes through a batch whose ranks have {list(flight.batch_size_per_rank)} samples, "
                f"and has weighed "
                f"gradients by {list(weighed[1].batch_size_per_rank)}; run the passes of batches one by one, each in "
                "embeddings.active_batch(flight)"
            )
        self._last_backward = backward, flight.batch_slice
        self._last_backward_accumulates = backward, self._accumulates_gradients(flight)

    @property
    def accumulates_gradients(self) -> bool:
        """Whether gradients of the backward pass that runs wait for those of the next."""
        backward, is_part = self._last_backward_accumulates
        if backward == torch._C._current_graph_task_id():
            return is_part
        return self._is_accumulating if self._active_batch is None else self._accumulates_gradients(self._active_batch)

    @contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        """Backward passes inside move no row: their gradients are kept, and the next pass outside adds them to its own
        and steps each touched row once, as one pass over all the samples would.

            for part in parts[:-1]:
                with embeddings.accumulating():
                    (loss_of(part) / len(parts)).backward()
            (loss_of(parts[-1]) / len(parts)).backward()

        Kept are ids and the upstream gradients of bags: of n samples, n * (sum of D of the pooled features) numbers,
        and D for each id that is not pooled. On several ranks all must enter and leave alike.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def discard_accumulated(self) -> None:
        """Drop what `accumulate_gradients` has kept, where its step is not to be taken."""
        self._discard_row_gradients()
        self._release_accumulated_leases()
        self.accumulated_dense.clear()

    def _discard_row_gradients(self) -> None:
        """The same of the gradients of rows."""
        self._accumulated_segments.clear()

    def _release_accumulated_leases(self) -> None:
        leases, self._accumulated_leases = self._accumulated_leases, []
        for lease in leases:
            lease.release()

    def lr(self, flight: BatchContext[GroupStateT], table: TableSpec) -> float:
        """Learning rate of a table in the update of a batch."""
        return table.optimizer.lr * (self.lr_factor if flight.lr_factor is None else flight.lr_factor)

    def _accumulates_gradients(self, flight: BatchContext[GroupStateT]) -> bool:
        """Whether the gradients of a batch wait for those of the next."""
        return self._is_accumulating if flight.accumulates_gradients is None else flight.accumulates_gradients

    def check_ids(self, kjt: KeyedJaggedTensor) -> list[CheckedIds]:
        """Select each group's features, check weights, and apply the id policies."""
        return [group.check_ids(kjt) for group in self.groups]

    def _empty_ids(self, device: torch.device) -> KeyedJaggedTensor:
        """Ids of all features, of no sample."""
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        weights = nothing.to(self.dtype) if any(group.is_weighted for group in self.groups) else None
        return KeyedJaggedTensor(tuple(feature.name for feature in self.features), nothing, nothing, weights)

    def count_out_of_range(self, checked: Sequence[CheckedIds]) -> Int[Tensor, " F"]:
        """Ids outside their table, per feature in the order of the collection."""
        if len(checked) == 1:
            return checked[0].num_outside
        counts = torch.cat([of_group.num_outside for of_group in checked])
        order = device_constant(tuple(f for group in self.groups for f in group.feature_indices), counts.device)
        return torch.empty_like(counts).index_copy_(0, order, counts)

    def _make_embeddings(
        self, flight: BatchContext[GroupStateT], ids: Sequence[KeyedJaggedTensor], found: Sequence[Tensor]
    ) -> Embeddings:
        """Names for the outputs, group after group: pooled [B, sum of D] and the rows of each feature that is not
        pooled [nnz_f, D]. The rows of a lookup that has no way back are given back."""
        if not torch.is_grad_enabled():
            flight.release()
        keyed: list[KeyedTensor] = []
        rows: dict[str, JaggedTensor] = {}
        for group, own, (pooled, *single) in zip(self.groups, ids, self.split_by_group(found), strict=True):
            keyed.append(group.to_keyed_tensor(pooled))
            rows |= group.to_jagged_tensors(own, single)
        others = {group.batch_name: matrix for group, matrix in zip(self.groups[1:], keyed[1:], strict=True)}
        return Embeddings(pooled=keyed[0], rows=rows, pooled_by_batch=others)

    def split_by_group(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Of each group: its part of what a lookup returned or its gradients, pooled, then one per unpooled feature."""
        stops = list(accumulate((1 + len(group.unpooled_features) for group in self.groups), initial=0))
        return [tensors[a:b] for a, b in pairwise(stops)]

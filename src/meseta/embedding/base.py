"""Base class of the unsharded and the sharded collection, and the autograd function of a lookup."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import Any, Generic

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meseta.comm import BatchSlice, BatchTotals, World
from meseta.embedding.averages import RowAverages
from meseta.embedding.batch_context import (
    BatchContext,
    ExhaustedInput,
    GroupStateT,
    OutOfRangeIds,
    StageTimer,
    group_features,
    no_op,
    null_timer,
)
from meseta.embedding.input_dist import OwnedIds
from meseta.embedding.sort_ahead import SortAhead
from meseta.embedding.update import (
    FusedShards,
    GatherStats,
    GradientSegment,
    RowGradient,
    step_shards,
    sum_gradients,
    update_rows,
)
from meseta.ops.common import device_constant
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_program.optimizer import Hyper, compute_dtype
from meseta.ops.row_update import Bags, FeatureGradient, TableRows
from meseta.sparse import Embeddings, JaggedTensor, KeyedJaggedTensor, KeyedTensor
from meseta.sparse.shapes import Int
from meseta.spec import FeatureSpec, MesetaError, Plan, TableSpec, check_features
from meseta.spec.tiers import OFFLOADED_TIERS, StorageOptions
from meseta.storage import CacheCapacityError, Lease, TableStorage, TieredShard, fetch_rows
from meseta.system.ranks import print_note
from meseta.telemetry.row_traffic import RowTraffic

NO_BACKWARD = -1
"""Task id that torch returns if no backward pass is running."""


class OptimizerInBackward(torch.autograd.Function):
    """Autograd function that returns `embeddings` in the forward pass and calls `update` in the backward pass.

    `update` returns the gradient of each tensor in `weights` (weights of ids), or `None` for it.
    """

    # Tables have no gradient tensors, and autograd does not track them. `update` updates their rows.

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        embeddings: Sequence[Tensor],
        update: Callable[..., Sequence[Tensor | None]],
        *weights: Tensor | None,
    ) -> Any:
        ctx.update = update
        return tuple(embeddings)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.update(*gradients)


class BaseEmbeddingCollection(nn.Module, ABC, Generic[GroupStateT]):
    """Embedding tables and the features that look them up. Tables are not `nn.Parameter`s."""

    # The state of one batch is in its `BatchContext`. The collection only stores which batch is active.

    def __init__(self, tables: Sequence[TableSpec], features: Sequence[FeatureSpec], seed: int) -> None:
        super().__init__()
        check_features(tables, features)
        if not features:
            raise MesetaError("a collection requires at least one feature; add FeatureSpec(name=..., table=...)")
        dtypes = {table.dtype for table in tables}
        if len(dtypes) != 1:
            raise MesetaError(f"tables of a collection must have one dtype, got {sorted(dtypes) or 'no table'}")
        if len({table.average for table in tables}) != 1:
            raise MesetaError("tables of a collection must have one average; set the same for all tables")
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.seed = seed
        self.dtype = compute_dtype(getattr(torch, dtypes.pop()))
        """Dtype of looked-up embeddings: float32, or float64 for float64 tables."""
        self.step = 0
        """Number of completed updates. It is the step of bias correction."""
        self.lr_factor = 1.0
        """Factor of the learning rates of all tables. A batch may have another factor."""
        self.num_clamped: Tensor | None = None
        """Total number [1] of values that overflowed fp16 in exchanges, or `None` if no exchange uses fp16."""
        self.out_of_range_ids = OutOfRangeIds()
        self.lookups: Sequence[Any] = ()
        """Lookup of each feature group."""
        self._averages: RowAverages | None = None
        self._active_batch: BatchContext[GroupStateT] | None = None
        self._last_slice: BatchSlice | None = None
        """Slice of the batch that was looked up last."""
        self._num_started = 0
        self._fused_shards: tuple[FusedShards, ...] = ()
        """Shards updated without data of other ranks."""
        self._acquired_rows: tuple[TableRows, ...] | None = None
        """Rows of each shard that operators use. `None` before the first lookup."""
        self._last_backward: tuple[int, BatchSlice | None] = (NO_BACKWARD, None)
        """Task id of the last backward pass, and the slice of its batch."""
        self._is_accumulating = False
        self._last_backward_accumulates = NO_BACKWARD, False
        """Task id of the last backward pass that reached the tables, and whether its gradients are accumulated."""
        self.accumulated_dense: list[Tensor] = []
        self._accumulated_segments: list[Callable[[], Sequence[GradientSegment]]] = []
        """Functions that return the row gradients of a backward pass, one segment per group. They may wait."""
        self._has_warned_of_capacity = False
        self._accumulated_leases: list[Lease] = []
        """Leases of the accumulated backward passes. Their rows are updated with the next pass."""
        self._tables_by_name = {table.name: table for table in self.tables}
        self.groups = group_features(self.features, self._tables_by_name)
        """Feature groups. The first group has the samples over which the loss is averaged."""
        # autograd calls `update` because this empty input requires a gradient.
        self._anchor = torch.zeros(0, requires_grad=True)

    @property
    def num_ranks(self) -> int:
        """Number of ranks over which the tables are sharded."""
        return 1

    @property
    def emulates_rounding(self) -> bool:
        return False

    @property
    @abstractmethod
    def shards(self) -> Sequence[TableStorage]:
        """Shards of tables on this rank."""

    @abstractmethod
    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        """Prepare operators for the rows of each shard, after a lease returned other tensors than before."""

    def _acquire_lease(
        self, flight: BatchContext[GroupStateT], looked_up: Sequence[tuple[int, Tensor]] = ()
    ) -> list[Tensor]:
        """Acquire rows, by pairs (shard index, rows) in `looked_up`, until the batch's backward pass ends. Returns
        their indices in the acquired tensors."""
        offloaded = [(index, rows) for index, rows in looked_up if index in self._offloaded_shards]
        fetch = fetch_rows(self.shards, offloaded, read_only=not torch.is_grad_enabled()) if offloaded else None
        flight.lease = Lease(self.shards, fetch)
        rows = flight.lease.rows
        if self._acquired_rows is None or any(
            current is not previous for current, previous in zip(rows, self._acquired_rows, strict=True)
        ):
            self._acquired_rows = rows
            self._bind_rows(rows)
        slots = iter(flight.lease.slots)
        return [next(slots).to(rows) if index in self._offloaded_shards else rows for index, rows in looked_up]

    def _set_plan(self, plan: Plan, storage: StorageOptions) -> None:
        tiers = {shard.tier for entry in plan.tables for shard in entry.shards}
        self.plan = plan
        self.storage = storage
        self.has_offloaded_rows = bool(tiers.intersection(OFFLOADED_TIERS))
        """Whether any rank has offloaded shards, whose rows are acquired for one batch at a time."""
        self.lookahead = storage.resolve_lookahead(tiers)

    def prefetch(self, flight: BatchContext[GroupStateT]) -> bool:
        """Start to fetch the offloaded rows of a batch after its `input_dist`, while other batches are trained.

        Returns False if the cache has no room yet. `lookup` fetches the rows then. The first time, a note is printed.
        """
        # Between input_dist and lookup, the ids of a batch are known and its rows are not fetched yet.
        if not self.lookahead or flight.stage != "exchanged":
            return True
        try:
            self._begin_fetch(flight)
        except MesetaError as error:
            if isinstance(error, CacheCapacityError) and not self._has_warned_of_capacity:
                self._has_warned_of_capacity = True
                notice = f"fewer than {self.lookahead} batches are prefetched (storage.lookahead)"
                print_note(f"{notice}, since {error}", all_ranks=True)
            return False
        return True

    @property
    def row_traffic(self) -> dict[str, RowTraffic]:
        """Row traffic of offloaded tables on this rank, by table."""
        traffic: dict[str, RowTraffic] = {}
        for shard in self.shards:
            if isinstance(shard, TieredShard):
                traffic[shard.spec.name] = traffic.get(shard.spec.name, RowTraffic()) + shard.traffic
        return traffic

    def _begin_fetch(self, flight: BatchContext[GroupStateT]) -> None:
        pass  # A collection without offloaded shards fetches nothing.

    @cached_property
    def _offloaded_shards(self) -> frozenset[int]:
        return frozenset(index for index, shard in enumerate(self.shards) if shard.is_offloaded)

    def forward(self, sparse: KeyedJaggedTensor | BatchContext[GroupStateT]) -> Embeddings:
        """Return the embeddings of this rank's slice: pooled [B, sum of D] and unpooled [nnz_f, D].

        `sparse` may hold features that the collection does not have. It may also be a batch after `input_dist`.
        """
        return self.output_dist(
            self.input_dist(self.start_input_dist(sparse)) if isinstance(sparse, KeyedJaggedTensor) else sparse
        )

    @abstractmethod
    def _start_input_dist(
        self, flight: BatchContext[GroupStateT], kjt: KeyedJaggedTensor | ExhaustedInput | Exception
    ) -> None:
        """Initialize the group states of a batch."""

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
        """Check the ids and start to send their counts to the owners of the rows. Returns the batch in stage 'started'.

        Waits for a GPU only if ids are dropped.

        `kjt` has the ids of this rank's slice. An exception is raised here in one process, and otherwise by
        `input_dist` on all ranks as a MesetaError. An `ExhaustedInput` means that this rank has no batch left, which
        all ranks know after `input_dist`.

        The other parameters are fields of `BatchContext`. By default, the collection determines `step` later, and
        `out_of_range_ids` is its counter.
        """
        flight: BatchContext[GroupStateT] = BatchContext(
            index=self._num_started,
            step=step,
            lr_factor=lr_factor,
            local_totals=local_totals,
            accumulates_gradients=accumulates_gradients,
            stage_timer=stage_timer,
            out_of_range_ids=self.out_of_range_ids if out_of_range_ids is None else out_of_range_ids,
        )
        self._start_input_dist(flight, kjt)
        self._num_started += 1
        return flight

    @abstractmethod
    def input_dist(self, flight: BatchContext[GroupStateT]) -> BatchContext[GroupStateT]:
        """Wait for the counts, and start to send the ids. Raises MesetaError on all ranks if any has invalid ids."""

    @abstractmethod
    def lookup(self, flight: BatchContext[GroupStateT]) -> BatchContext[GroupStateT]:
        """Look up the current rows, and start to send embeddings to the ranks of the samples."""

    def start_second_hop(self, flight: BatchContext[GroupStateT]) -> None:
        """Start the second hop of a hierarchical exchange, else left to `lookup` and `output_dist`. Collective."""

    def output_dist(self, flight: BatchContext[GroupStateT]) -> Embeddings:
        """Wait for the embeddings of this rank's samples. Calls `lookup` if it was not called before."""
        if flight.stage == "exchanged":
            self.lookup(flight)
        flight.enter_stage("finished", after="looked up")
        with flight.drop_on_error():
            # The second hop starts first, so that embeddings are in flight during the callback.
            if flight.output_dist_callback is not no_op:
                self.start_second_hop(flight)
                flight.output_dist_callback()
            if flight.num_out_of_range is not None and not flight.defers_id_check:
                flight.out_of_range_ids.add(flight.num_out_of_range)
            embeddings = self._output_dist(flight)
            self._start_sort(flight)
        return embeddings

    @abstractmethod
    def _output_dist(self, flight: BatchContext[GroupStateT]) -> Embeddings:
        """Implement `output_dist` after the checks."""

    def _start_sort(self, flight: BatchContext[GroupStateT]) -> None:
        """Start to sort the ids on a GPU, if the update has no other ids."""
        # Only one group has the same ids in the update. Accumulated batches are merged.
        if not torch.is_grad_enabled() or len(flight.group_states) > 1 or self.has_offloaded_rows:
            return
        if flight.clip is not None or self._accumulated_segments or self._accumulates_gradients(flight):
            return
        bags = self._bags(flight.group_states[0])
        groups = [f.group for f in self._fused_shards if f.spec.optimizer.stepped_rows == "touched"]
        if groups and bags.ids.is_cuda:
            flight.sort_ahead = SortAhead.start(self._sort_stream, groups, bags)

    @cached_property
    def _sort_stream(self) -> Any:
        return torch.cuda.Stream(self.shards[0].device)

    @abstractmethod
    def _bags(self, state: GroupStateT) -> Bags:
        """Return the bags that the update of a batch with one feature group reads."""

    def _step_fused(self, flight: BatchContext[GroupStateT], bags: Bags, gradients: Sequence[Tensor]) -> None:
        """Update the shards that need no data of other ranks."""
        sort, step = flight.pop_sort(), self.step + 1
        for fused in self._fused_shards:
            sorted_ids = None if sort is None else sort.select(fused.group, bags)
            rate = self.lr(flight, fused.spec)
            step_shards(fused, rate, step, bags, gradients, flight.found_inf, flight.scalars, sorted_ids)

    def _clip_gradients(
        self,
        flight: BatchContext[GroupStateT],
        places: Sequence[FeatureGradient],
        owned: OwnedIds,
        gradients: Sequence[Tensor],
        replicated: Sequence[Tensor] = (),
    ) -> tuple[dict[int, RowGradient], float]:
        """Return (clipped gradients by shard index, factor). The caller must scale `replicated`, those of replicated
        rows."""
        assert flight.lease is not None
        assert flight.clip is not None
        trained = [place for place in places if self.shards[place.table].spec.optimizer.name != "frozen"]
        sums = sum_gradients(self.shards, flight.lease.rows, trained, owned, gradients)
        # With a nonzero flag no row is updated. The deferred check of the loss reports the error.
        is_refused = flight.found_inf is not None and bool(flight.found_inf.item())
        factor = 1.0 if is_refused else flight.clip([sums[i].gradient for i in sums], replicated)
        if factor != 1.0:
            for row_gradient in sums.values():
                row_gradient.gradient.mul_(factor)
        return sums, factor

    def _update_rows(
        self,
        flight: BatchContext[GroupStateT],
        sums: Mapping[int, RowGradient],
        gather_stats: GatherStats = list,
        num_exchanges: int = 0,
    ) -> None:
        assert flight.lease is not None
        used, rows = [self.shards[i] for i in sums], [flight.lease.rows[i] for i in sums]
        hypers = [Hyper(self.lr(flight, s.spec), self.step + 1, s.spec.embedding_dim) for s in used]
        update_rows(used, rows, [*sums.values()], hypers, gather_stats, num_exchanges, flight.found_inf)

    def wait_for_embeddings(self, flight: BatchContext[GroupStateT]) -> Sequence[Tensor]:
        """Wait for the embeddings of a batch after `lookup`. The stage of the batch does not change."""
        if flight.embeddings is None:
            with torch.no_grad():
                flight.embeddings = self._assemble_embeddings(flight)
        return flight.embeddings

    @abstractmethod
    def _assemble_embeddings(self, flight: BatchContext[GroupStateT]) -> Sequence[Tensor]:
        """Wait for the received data and return the embeddings, group by group."""

    def drop(self, flight: BatchContext[GroupStateT]) -> None:
        """Drop an unfinished batch after its exchanges in flight are complete."""
        flight.drop()

    @contextmanager
    def active_batch(self, flight: BatchContext[GroupStateT]) -> Iterator[None]:
        """Context manager that makes `flight` the active batch, to which `batch_slice` and `local_share` refer.

        Required for the forward and backward pass of a batch if several batches are in flight.
        """
        before, self._active_batch = self._active_batch, flight
        try:
            yield
        finally:
            self._active_batch = before

    @property
    def batch_slice(self) -> BatchSlice | None:
        """Slice of the batch of the current backward pass, or else of the active batch, or else of the last lookup.
        `None` before the first lookup."""
        backward = torch._C._current_graph_task_id()
        if backward != NO_BACKWARD and backward == self._last_backward[0]:
            return self._last_backward[1]
        batch_slice = self._last_slice if self._active_batch is None else self._active_batch.batch_slice
        if backward != NO_BACKWARD:
            self._last_backward = backward, batch_slice
        return batch_slice

    @property
    def num_out_of_range(self) -> Int[Tensor, " F"] | None:
        """Total out-of-range ids per feature with policy drop, clamp or hash. `None` before the first batch."""
        return self.out_of_range_ids.counts

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Context manager in which lookups return averages of rows, if tables have an average. Rows do not change."""
        average, before = self.tables[0].average, self._averages
        self._set_averages(None if average is None else RowAverages(average, self.step))
        try:
            yield
        finally:
            self._set_averages(before)

    def _set_averages(self, averages: RowAverages | None) -> None:
        self._averages = averages
        for look in self.lookups:
            look.averages = averages

    def set_resume_state(self, step: int, num_outside: Int[Tensor, " F"] | None) -> None:
        """Set the number of updates and of out-of-range ids, for example of a saved run."""
        self.step = step
        self.out_of_range_ids.counts = num_outside

    def count_replayed_step(self) -> None:
        """Count a batch that a CUDA graph has trained."""
        self.step += 1
        self._num_started += 1

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Context manager whose batches and updates are not counted."""
        before = self.step, self._num_started, self._last_slice
        try:
            yield
        finally:
            self.step, self._num_started, self._last_slice = before

    def _set_batch_slice(
        self, flight: BatchContext[GroupStateT], world: World, sizes: tuple[int, ...], totals: Sequence[BatchTotals]
    ) -> None:
        step = self.step if flight.step is None else flight.step
        first = sum(rank_totals.num_samples for rank_totals in totals[: world.rank]) + flight.slice_offset
        flight.batch_slice = BatchSlice(
            world=world, step=step, batch_size_per_rank=sizes, offset=first, scalars=flight.scalars
        )
        self._last_slice = flight.batch_slice

    @abstractmethod
    def _start_gradient_dist(
        self, flight: BatchContext[GroupStateT], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Start to send the gradients of a lookup to the owners of its rows.

        Returns (gradients of the weights of ids, update). `update` updates the rows, or keeps their gradients for the
        last micro-batch.
        """

    def _run_backward(self, flight: BatchContext[GroupStateT], *gradients: Tensor) -> Sequence[Tensor | None]:
        # autograd calls this method. The update ends the batch, either here or at the end of the pass.
        self._start_backward(flight)
        with flight.drop_on_error():
            weight_gradients, update = self._start_gradient_dist(flight, *gradients)
        finish = partial(self._finish_backward, flight, update)
        if flight.clip is not None:
            flight.deferred_update = finish
        elif flight.overlaps_gradient_dist:
            torch.autograd.Variable._execution_engine.queue_callback(finish)
        else:
            finish()
        return weight_gradients

    def _finish_backward(self, flight: BatchContext[GroupStateT], update: Callable[[], None]) -> None:
        accumulates = self._accumulates_gradients(flight)
        try:
            update()
        finally:
            flight.pop_sort()
            # Rows of accumulated passes are updated with the last micro-batch, and must stay in the cache until then.
            if accumulates and flight.lease is not None:
                self._accumulated_leases.append(flight.lease)
                flight.lease = None
            else:
                flight.release()
                self._release_accumulated_leases()

    def _start_backward(self, flight: BatchContext[GroupStateT]) -> None:
        """Store the batch of the backward pass. Raises MesetaError if gradients were weighted for another batch."""
        flight.enter_stage("used", after="finished")
        # If dense gradients were reduced earlier in this pass, they were weighted for the batch of `last_backward`.
        backward, last_backward = torch._C._current_graph_task_id(), self._last_backward
        if (
            last_backward[0] == backward
            and last_backward[1] is not None
            and last_backward[1].batch_size_per_rank != flight.batch_size_per_rank
        ):
            raise MesetaError(
                f"a backward pass reached a batch of {list(flight.batch_size_per_rank)} samples per rank after it "
                f"weighted dense gradients for {list(last_backward[1].batch_size_per_rank)}; run one backward pass per "
                "batch, each in embeddings.active_batch(flight)"
            )
        self._last_backward = backward, flight.batch_slice
        self._last_backward_accumulates = backward, self._accumulates_gradients(flight)

    @property
    def accumulates_gradients(self) -> bool:
        """Whether the gradients of the current backward pass are kept for a later one."""
        backward, is_part = self._last_backward_accumulates
        if backward == torch._C._current_graph_task_id():
            return is_part
        return self._is_accumulating if self._active_batch is None else self._accumulates_gradients(self._active_batch)

    @contextmanager
    def accumulate_gradients(self) -> Iterator[None]:
        """Context manager in which backward passes keep their gradients and update no row.

        The next pass outside adds the kept gradients to its own, and updates each touched row once. The result equals
        that of one pass over all samples:

            for part in parts[:-1]:
                with embeddings.accumulate_gradients():
                    (loss_of(part) / len(parts)).backward()
            (loss_of(parts[-1]) / len(parts)).backward()

        Kept are the ids, and the gradients of bags [n, sum of D of the pooled features] and of unpooled rows [ids, D].
        All ranks must enter and leave at the same points.
        """
        before, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = before

    def discard_accumulated(self) -> None:
        """Drop the gradients kept by `accumulate_gradients`, and release their rows. Use it to skip a step."""
        self._discard_row_gradients()
        self._release_accumulated_leases()
        self.accumulated_dense.clear()

    def _discard_row_gradients(self) -> None:
        self._accumulated_segments.clear()

    def _release_accumulated_leases(self) -> None:
        leases, self._accumulated_leases = self._accumulated_leases, []
        for lease in leases:
            lease.release()

    def lr(self, flight: BatchContext[GroupStateT], table: TableSpec) -> float:
        return table.optimizer.lr * (self.lr_factor if flight.lr_factor is None else flight.lr_factor)

    def _accumulates_gradients(self, flight: BatchContext[GroupStateT]) -> bool:
        return self._is_accumulating if flight.accumulates_gradients is None else flight.accumulates_gradients

    def check_ids(self, kjt: KeyedJaggedTensor) -> list[CheckedIds]:
        """Return the ids of each group after checks of weights and batch sizes, with id policies applied."""
        return [group.check_ids(kjt) for group in self.groups]

    def _empty_ids(self, device: torch.device) -> KeyedJaggedTensor:
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        weights = nothing.to(self.dtype) if any(group.is_weighted for group in self.groups) else None
        return KeyedJaggedTensor(tuple(feature.name for feature in self.features), nothing, nothing, weights)

    def count_out_of_range(self, checked: Sequence[CheckedIds]) -> Int[Tensor, " F"]:
        """Return the number of out-of-range ids per feature, in the order of the collection."""
        if len(checked) == 1:
            return checked[0].num_outside
        counts = torch.cat([group_ids.num_outside for group_ids in checked])
        order = device_constant(tuple(f for group in self.groups for f in group.feature_indices), counts.device)
        return torch.empty_like(counts).index_copy_(0, order, counts)

    def _make_embeddings(
        self, flight: BatchContext[GroupStateT], ids: Sequence[KeyedJaggedTensor], embeddings: Sequence[Tensor]
    ) -> Embeddings:
        """Name the embeddings of all groups. Without a backward pass, the batch releases its rows."""
        if not torch.is_grad_enabled():
            flight.release()
        keyed: list[KeyedTensor] = []
        rows: dict[str, JaggedTensor] = {}
        for group, group_ids, (pooled, *unpooled) in zip(
            self.groups, ids, self.split_by_group(embeddings), strict=True
        ):
            keyed.append(KeyedTensor(keys=group.pooled_names, dims=group.pooled_dims, values=pooled))
            for feature, values in zip(group.unpooled_features, unpooled, strict=True):
                rows[feature.name] = JaggedTensor(values=values, lengths=group_ids[feature.name].lengths)
        pooled_by_batch = {group.batch_name: matrix for group, matrix in zip(self.groups[1:], keyed[1:], strict=True)}
        return Embeddings(pooled=keyed[0], rows=rows, pooled_by_batch=pooled_by_batch)

    def split_by_group(self, tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
        """Split the outputs or gradients of a lookup by group. Each part has pooled data, then one tensor per unpooled
        feature."""
        stops = list(accumulate((1 + len(group.unpooled_features) for group in self.groups), initial=0))
        return [tensors[a:b] for a, b in pairwise(stops)]

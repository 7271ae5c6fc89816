"""Sharded embedding collection: stages of a distributed lookup, and updates of the rows of this rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from meseta.comm import BatchTotals, PendingCollective, World, retain_until_exit
from meseta.comm.sums import SumCodec
from meseta.embedding.base import BaseEmbeddingCollection, OptimizerInBackward
from meseta.embedding.batch_context import BatchContext, ExhaustedInput, StageTimer
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.input_dist import InputDist, OwnedIds, PendingCounts
from meseta.embedding.replicas import ReplicatedRows
from meseta.embedding.routes import gradient_exponent
from meseta.embedding.sharded_lookup import GradientDist, OutputDist, ShardedLookup, gather_column_stats
from meseta.embedding.update import (
    GradientSegment,
    RowGradient,
    group_shards,
    merge_backward_passes,
    sum_gradients,
)
from meseta.ops.codec import HalfRange
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_update import Bags, FeatureGradient, TableRows
from meseta.optim import make_row_optimizer
from meseta.sparse import Embeddings, KeyedJaggedTensor
from meseta.spec import MesetaError, Plan, Shard
from meseta.spec.codecs import DIRECTIONS, Communication, Direction
from meseta.spec.tiers import StorageOptions
from meseta.spec.transfer import MAX_INT32
from meseta.storage import TableStorage, make_storages


@dataclass(eq=False)
class GroupState:
    """State of one feature group in a batch. Each field is set by its stage."""

    lookup: ShardedLookup
    pending_counts: PendingCounts
    input_dist: InputDist = field(init=False)
    owned_ids: OwnedIds = field(init=False)
    output_dist: OutputDist | None = field(init=False, default=None)
    gradients: Sequence[Tensor] = field(init=False)
    """Gradients of bags [B_local, sum of D], then of the rows of each unpooled feature, before they are sent."""


class ShardedEmbeddingBagCollection(BaseEmbeddingCollection[GroupState]):
    """Embedding collection whose tables are sharded over ranks by a plan.

    `forward` calls `start_input_dist`, `input_dist`, `lookup` and `output_dist`. A pipeline calls these itself. Each
    rank passes its contiguous slice of the global batch, and receives the embeddings of that slice. Gradients must be
    those of the mean loss over the slice. They are scaled by B_local / B_global here. All ranks must call forward and
    backward in the same order.
    """

    def __init__(
        self,
        source: EmbeddingBagCollection,
        plan: Plan,
        world: World,
        comm: Communication | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        """Allocate the shards of this rank for the tables of `source`.

        `comm` has the codecs of exchanges, and `storage` the memory limits for offloaded rows. Raises MesetaError if
        `plan` does not fit the tables or `world`.
        """
        super().__init__(source.tables, source.features, source.seed)
        plan.check(self.tables)
        comm = comm or Communication()
        comm.check_dtype(self.tables[0].dtype)
        self.comm = comm
        if any(comm.codec(direction).name == "fp16" for direction in DIRECTIONS):
            self.num_clamped = torch.zeros(1, dtype=torch.int64, device=world.device)
        if plan.num_ranks != world.size:
            raise MesetaError(f"plan: requires {plan.num_ranks} ranks, but this run has {world.size}; make a new plan")
        storage = storage or StorageOptions()
        plan.check_storage(storage)
        self._set_plan(plan, storage)
        self.world = world
        pieces = [(table, shard) for table in self.tables for shard in plan[table.name].shards]
        pieces = [(table, shard) for table, shard in pieces if world.rank in shard.ranks]
        self._shards = make_storages(pieces, seed=self.seed, device=world.device, options=storage)
        self.lookups = tuple(
            ShardedLookup(group, self.tables, plan, self.dtype, world, comm, self.num_clamped) for group in self.groups
        )
        stages = [
            len(make_row_optimizer(t.optimizer).row_stats)
            for t in self.tables
            if len({s.columns for s in plan[t.name].shards}) > 1
        ]
        self.num_stat_exchanges = max(stages, default=0)
        """Number of exchanges of row statistics per step, equal on all ranks. Optimizers of column shards need them."""
        self.replicas = ReplicatedRows(self.lookups, self.shards, plan, world)
        self._accumulated_replica_segments: list[list[GradientSegment]] = []

    @property
    def num_ranks(self) -> int:
        return self.world.size

    @property
    def shards(self) -> tuple[TableStorage, ...]:
        return self._shards

    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        by_shard = {shard.shard: shard_rows for shard, shard_rows in zip(self.shards, rows, strict=True)}
        for look in self.lookups:
            look.bind_rows(by_shard)
        self.replicas.bind_rows(by_shard)
        layout = [place for place in self._gradient_layout if place.table not in self._staged_shards]
        self._fused_shards = group_shards(self.shards, rows, layout)

    def _start_input_dist(
        self, flight: BatchContext[GroupState], kjt: KeyedJaggedTensor | ExhaustedInput | Exception
    ) -> None:
        # Waits for a GPU only if ids are dropped.
        checked: Sequence[CheckedIds | MesetaError]
        try:
            if isinstance(kjt, Exception):
                raise kjt if isinstance(kjt, MesetaError) else MesetaError(repr(kjt))
            ids = self._empty_ids(self.world.device) if isinstance(kjt, ExhaustedInput) else kjt
            self._check_supported(ids)
            checked = accepted = self.check_ids(ids)
            flight.num_out_of_range = self.count_out_of_range(accepted)
            if isinstance(kjt, ExhaustedInput):
                checked = [replace(group_ids, first_error=kjt.to_header(self.world.device)) for group_ids in accepted]
        # If only this rank raised the error, the other ranks would wait for it.
        except MesetaError as error:
            checked = [error] * len(self.lookups)
        size = 0 if isinstance(checked[0], MesetaError) else checked[0].kjt.batch_size
        totals = flight.local_totals or BatchTotals(size, 0, float(size))
        started = [
            look.start_input_dist(group_ids, flight.batch_tag, totals)
            for look, group_ids in zip(self.lookups, checked, strict=True)
        ]
        flight.group_states = tuple(
            GroupState(look, group_ids) for look, group_ids in zip(self.lookups, started, strict=True)
        )

    def _check_supported(self, kjt: KeyedJaggedTensor) -> None:
        if kjt.values.numel() > MAX_INT32:
            raise MesetaError(
                f"the batch must have at most {MAX_INT32} ids per rank, got {kjt.values.numel()}; use a smaller batch"
            )
        if any(group.is_weighted for group in self.groups) and kjt.weights is not None and kjt.weights.requires_grad:
            raise MesetaError(
                "the weights of the batch require a gradient, which a sharded lookup does not send back; detach them, "
                "or set pooling='none' and multiply the returned rows by the weights"
            )

    @property
    def local_share(self) -> float:
        batch_slice = self.batch_slice
        return 1.0 / self.world.size if batch_slice is None else batch_slice.local_share

    def input_dist(self, flight: BatchContext[GroupState]) -> BatchContext[GroupState]:
        flight.enter_stage("exchanged", after="started")
        with flight.drop_on_error():
            for state in flight.group_states:
                state.input_dist = state.lookup.input_dist(state.pending_counts)
                del state.pending_counts
            exchanged = flight.group_states[0].input_dist
            flight.global_totals = BatchTotals.sum_over_ranks(exchanged.totals_per_rank, self.world.ranks_per_host)
            flight.exhausted_ranks = exchanged.exhausted_ranks
        return flight

    def drop(self, flight: BatchContext[GroupState]) -> None:
        for state in flight.group_states:
            if flight.stage == "started":
                state.pending_counts.pending.wait()
            elif flight.stage == "exchanged":
                state.input_dist.wait()
        if flight.stage == "looked up":
            self.wait_for_embeddings(flight)
        super().drop(flight)

    def lookup(self, flight: BatchContext[GroupState]) -> BatchContext[GroupState]:
        flight.enter_stage("looked up", after="exchanged")
        with flight.drop_on_error():
            exchanged = flight.group_states[0].input_dist
            self._set_batch_slice(flight, self.world, exchanged.batch_size_per_rank, exchanged.totals_per_rank)
            if flight.lease is None:
                self._wait_for_ids(flight)
            if self.has_offloaded_rows:
                self._fetch_offloaded(flight)
            else:
                self._acquire_lease(flight)
            is_evaluation = not torch.is_grad_enabled()
            with torch.no_grad():
                for state in flight.group_states if flight.embeddings is None else ():
                    state.output_dist = state.lookup.lookup(
                        state.input_dist, state.owned_ids, is_evaluation=is_evaluation
                    )
        return flight

    def _wait_for_ids(self, flight: BatchContext[GroupState]) -> None:
        for state in flight.group_states:
            state.owned_ids = state.lookup.wait_for_ids(state.input_dist)

    def _begin_fetch(self, flight: BatchContext[GroupState]) -> None:
        if self._offloaded_shards and flight.lease is None:
            self._wait_for_ids(flight)
            self._acquire_rows(flight)

    def _acquire_rows(self, flight: BatchContext[GroupState]) -> None:
        if flight.lease is not None:
            return
        looked_up = []
        for state in flight.group_states:
            route_ids = zip(state.lookup.routes, state.owned_ids.ids_by_route(), strict=True)
            looked_up += [(self._shard_index[route.shard], rows) for route, rows in route_ids]
        slots = iter(self._acquire_lease(flight, looked_up))
        for state in flight.group_states:
            state.owned_ids = state.owned_ids.with_slots([next(slots) for _ in state.lookup.routes])

    def _fetch_offloaded(self, flight: BatchContext[GroupState]) -> None:
        """Acquire offloaded rows and wait for them. If any rank fails, all ranks raise its error. Collective."""
        problem = None
        try:
            self._acquire_rows(flight)
            assert flight.lease is not None
            flight.lease.wait()
        except MesetaError as error:
            problem = error
        # The other ranks would wait for the embeddings of a rank that failed here.
        failures = torch.tensor([0.0 if problem is None else 1.0])
        if self.world.all_reduce_small(failures.to(self.world.device), "agree").item():
            self.world.raise_on_all_ranks(problem)

    @cached_property
    def _shard_index(self) -> dict[Shard, int]:
        return {storage.shard: index for index, storage in enumerate(self.shards)}

    def start_second_hop(self, flight: BatchContext[GroupState]) -> None:
        is_exchanged = flight.stage == "exchanged"
        with flight.stage_timer("input_dist" if is_exchanged else "output_dist"):
            for state in flight.group_states:
                if is_exchanged:
                    state.lookup.forward_ids_within_host(state.input_dist)
                elif state.output_dist is not None:
                    state.lookup.start_second_hop(state.input_dist, state.output_dist)

    def _assemble_embeddings(self, flight: BatchContext[GroupState]) -> Sequence[Tensor]:
        each = [
            state.lookup.output_dist(state.input_dist, state.output_dist)
            for state in flight.group_states
            if state.output_dist is not None
        ]
        for state in flight.group_states:
            state.output_dist = None
        return [tensor for group_outputs in each for tensor in group_outputs]

    def _output_dist(self, flight: BatchContext[GroupState]) -> Embeddings:
        with flight.stage_timer("output_dist"):
            self.wait_for_embeddings(flight)
            update = partial(self._run_backward, flight)
            outputs = OptimizerInBackward.apply(self._anchor, flight.pop_embeddings(), update)
        return self._make_embeddings(flight, [state.input_dist.ids for state in flight.group_states], outputs)

    def _bags(self, state: GroupState) -> Bags:
        return state.owned_ids.bags

    def _start_gradient_dist(
        self, flight: BatchContext[GroupState], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        assert flight.batch_slice is not None
        states, share = flight.pop_group_states(), flight.batch_slice.local_share
        for state, (bag_gradient, *row_gradients) in zip(states, self.split_by_group(gradients), strict=True):
            state.gradients = [
                state.lookup.group.to_sum_gradient(bag_gradient, state.input_dist.ids.lengths),
                *row_gradients,
            ]
        with flight.stage_timer("gradient_dist"):
            sent = [
                state.lookup.start_gradient_dist(state.input_dist, state.gradients, flight.batch_slice, self.seed)
                for state in states
            ]
        take = partial(self._finish_gradient_dist, states, sent, flight.stage_timer)
        if not self._accumulates_gradients(flight):
            return (), partial(self._update, flight, self._start_replica_update(states, share), take)
        self._accumulate_replica_gradients(states, share)
        # Without overlap, the gradients are received here.
        self._accumulated_segments.append(take if flight.overlaps_gradient_dist else partial(list, take()))
        return (), lambda: None

    def _update(
        self,
        flight: BatchContext[GroupState],
        replicated: PendingCollective | None,
        take: Callable[[], list[GradientSegment]],
    ) -> None:
        received = [*(get_segments() for get_segments in self._accumulated_segments), take()]
        flight.pre_update_hook()
        with flight.stage_timer("table_update"):
            whole, row_gradients = merge_backward_passes(received)
            self._discard_row_gradients()
            if flight.clip is not None:
                self._update_clipped(flight, replicated, whole, row_gradients)
            else:
                self._step_fused(flight, whole.bags, row_gradients)
                self._update_staged(flight, whole, row_gradients)
                if replicated is not None:
                    self.replicas.finish_sum(replicated)
                    self.replicas.update(partial(self.lr, flight), self.step + 1, flight.found_inf)
        self.step += 1

    def _update_clipped(
        self,
        flight: BatchContext[GroupState],
        replicated: PendingCollective | None,
        whole: OwnedIds,
        row_gradients: Sequence[Tensor],
    ) -> None:
        # The norm includes all gradients, so no row moves before the sums of all tables have arrived.
        of_replicas = () if replicated is None else self.replicas.finish_sum(replicated)
        sums, factor = self._clip_gradients(flight, self._gradient_layout, whole, row_gradients, of_replicas)
        self._update_rows(flight, {i: sums[i] for i in sums if i not in self._staged_shards})
        self._exchange_and_update(flight, {i: sums[i] for i in sums if i in self._staged_shards})
        if replicated is not None:
            self.replicas.update(partial(self.lr, flight), self.step + 1, flight.found_inf, factor)

    def _finish_gradient_dist(
        self, states: Sequence[GroupState], sent: Sequence[GradientDist], stage_timer: StageTimer
    ) -> list[GradientSegment]:
        with stage_timer("gradient_dist"):
            each = zip(states, sent, strict=True)
            return [
                state.lookup.finish_gradient_dist(state.input_dist, state.owned_ids, pending) for state, pending in each
            ]

    def _replica_segments(self, states: Sequence[GroupState], scale: float = 1.0) -> list[GradientSegment]:
        segments = []
        for state in states:
            scaled = state.gradients if scale == 1.0 else [gradient * scale for gradient in state.gradients]
            segments.append(state.lookup.replicated_segment(state.input_dist, scaled))
        return [segment for segment in segments if segment is not None]

    def _start_replica_update(self, states: Sequence[GroupState], share: float) -> PendingCollective | None:
        if not self.replicas.has_trained_tables:
            return None
        exponent = gradient_exponent(states[0].input_dist.num_samples)
        make_coding = self.make_sum_codec("backward", "replicas", exponent)
        if not self._accumulated_replica_segments:
            return self.replicas.start_update(
                *merge_backward_passes([self._replica_segments(states)]), share, make_coding
            )
        self._accumulate_replica_gradients(states, share)
        return self.replicas.start_update(*merge_backward_passes(self._accumulated_replica_segments), 1.0, make_coding)

    def make_sum_codec(self, direction: Direction, name: str, exponent: int) -> Callable[[int], SumCodec] | None:
        """Return a function that creates the codec of a sum for a number of elements, or `None` without one. Rounding
        depends on the active batch's step."""
        codec = self.comm.codec(direction)
        if codec.is_lossless:
            return None

        def make(num_coded: int) -> SumCodec:
            step = self.step if self.batch_slice is None else self.batch_slice.step
            return SumCodec(codec, num_coded, (self.seed, step, name), HalfRange(exponent, self.num_clamped))

        return make

    def _accumulate_replica_gradients(self, states: Sequence[GroupState], share: float) -> None:
        # Gradients are weighted here, because `share` may differ between micro-batches.
        if self.replicas.has_trained_tables:
            self._accumulated_replica_segments.append(self._replica_segments(states, share))

    def discard_accumulated(self) -> None:
        if self._accumulated_segments:
            # The transport may still write to the buffers of pending exchanges.
            retain_until_exit(list(self._accumulated_segments))
        super().discard_accumulated()

    def _discard_row_gradients(self) -> None:
        super()._discard_row_gradients()
        self._accumulated_replica_segments.clear()

    @cached_property
    def _gradient_layout(self) -> tuple[FeatureGradient, ...]:
        places_by_feature: dict[int, list[FeatureGradient]] = {}
        position = matrix = 0
        for look in self.lookups:
            places_by_feature |= look.gradient_layout(self._shard_index, position, matrix)
            position += len(look.routes)
            matrix += 2 + len(look.routes) - look.routing.host_reduced[self.world.rank].stop
        return tuple(place for feature in sorted(places_by_feature) for place in places_by_feature[feature])

    @cached_property
    def _staged_shards(self) -> frozenset[int]:
        return frozenset(
            index
            for index, shard in enumerate(self.shards)
            if shard.optimizer.row_stats and shard.shard.num_columns < shard.spec.embedding_dim
        )

    def _update_staged(self, flight: BatchContext[GroupState], owned: OwnedIds, gradients: Sequence[Tensor]) -> None:
        if not self.num_stat_exchanges:
            return
        assert flight.lease is not None
        places = [place for place in self._gradient_layout if place.table in self._staged_shards]
        self._exchange_and_update(flight, sum_gradients(self.shards, flight.lease.rows, places, owned, gradients))

    def _exchange_and_update(self, flight: BatchContext[GroupState], sums: Mapping[int, RowGradient]) -> None:
        gather = partial(gather_column_stats, self.plan, self.world, self.dtype, [self.shards[i] for i in sums])
        self._update_rows(flight, sums, gather, self.num_stat_exchanges)

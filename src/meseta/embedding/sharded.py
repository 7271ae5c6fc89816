"""The sharded embedding: start, exchange, finish, and the step of the rows that a rank holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor

from meseta.comm import BatchTotals, PendingCollective, World, retain_until_exit
from meseta.comm.sum_codec import SumCodec
from meseta.embedding.accumulate import GradientSegment, merge_backward_passes
from meseta.embedding.base import BaseEmbeddingCollection, OptimizerInBackward
from meseta.embedding.batch_context import BatchContext, ExhaustedInput, StageTimer
from meseta.embedding.collection import EmbeddingBagCollection
from meseta.embedding.gradient_dist import GradientDist, gather_column_stats
from meseta.embedding.input_dist import InputDist, OwnedIds, PendingCounts
from meseta.embedding.message_format import gradient_exponent
from meseta.embedding.replicas import ReplicatedRows
from meseta.embedding.sharded_lookup import OutputDist, ShardedLookup
from meseta.embedding.update import group_shards, step_shards, sum_gradients, update_rows
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.ops.codec import HalfRange
from meseta.ops.id_policy import CheckedIds
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.optim import make_row_optimizer
from meseta.spec import MesetaError, Plan, Shard
from meseta.spec.codecs import DIRECTIONS, Communication, Direction
from meseta.spec.tiers import StorageOptions
from meseta.spec.transfer import MAX_INT32
from meseta.storage import TableStorage, make_storages


@dataclass(eq=False)
class GroupState:
    """What one group of features has of a batch under way; each field is there once its stage has been."""

    lookup: ShardedLookup
    pending_counts: PendingCounts
    input_dist: InputDist = field(init=False)
    owned_ids: OwnedIds = field(init=False)
    output_dist: OutputDist | None = field(init=False, default=None)
    """None where none are on the way."""
    gradients: Sequence[Tensor] = field(init=False)
    """Of the bags [B_local, sum of D] and of the rows of each unpooled feature, before they travel."""


class ShardedEmbeddingBagCollection(BaseEmbeddingCollection[GroupState]):
    """An EmbeddingBagCollection whose tables lie on the ranks that a plan names.

    `forward` is `finish(look_up(exchange(start(kjt))))`; a pipeline calls these itself. Every rank gives its contiguous
    slice of the global batch and gets the embeddings of that slice. Gradients are of the local mean of the loss: they
    are scaled by B_local / B_global here. All ranks must call forward and backward in the same order.
    """

    def __init__(
        self,
        source: EmbeddingBagCollection,
        plan: Plan,
        world: World,
        comm: Communication | None = None,
        storage: StorageOptions | None = None,
    ) -> None:
        """Allocate this rank's shards of `source`'s tables; the plan must fit the tables and the world. `comm` says how
        ranks write what they send; which way it takes is the plan's. `storage` has room for rows that lie far."""
        super().__init__(source.tables, source.features, source.seed)
        plan.check(self.tables)
        comm = comm or Communication()
        comm.check_dtype(self.tables[0].dtype)
        self.comm = comm
        """How ranks write what they send."""
        if any(comm.codec(direction).name == "fp16" for direction in DIRECTIONS):
            self.num_clamped = torch.zeros(1, dtype=torch.int64, device=world.device)
        if plan.num_ranks != world.size:
            raise MesetaError(f"plan: it is for {plan.num_ranks} ranks, but this run has {world.size}; make a new plan")
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
        """One per group of features."""
        stages = [
            len(make_row_optimizer(t.optimizer).row_stats)
            for t in self.tables
            if len({s.columns for s in plan[t.name].shards}) > 1
        ]
        self.num_stat_exchanges = max(stages, default=0)
        """Stages of sums over rows that lie in column shards: every rank exchanges so many times per step."""
        self.replicas = ReplicatedRows(self.lookups, self.shards, plan, world)
        self._accumulated_replica_segments: list[list[GradientSegment]] = []

    @property
    def num_ranks(self) -> int:
        return self.world.size

    @property
    def shards(self) -> tuple[TableStorage, ...]:
        """The pieces of tables on this rank."""
        return self._shards

    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        by_shard = {shard.shard: lent for shard, lent in zip(self.shards, rows, strict=True)}
        for look in self.lookups:
            look.bind_rows(by_shard)
        self.replicas.bind_rows(by_shard)
        places = [place for place in self._gradient_layout if place.table not in self._staged_shards]
        self._fused_shards = group_shards(self.shards, rows, places)
        """Shards that need nothing from other ranks."""

    def _start_input_dist(
        self, flight: BatchContext[GroupState], kjt: KeyedJaggedTensor | ExhaustedInput | Exception
    ) -> None:
        """Sort the ids by owner, begin the exchange of counts. No host sync, unless ids are dropped."""
        checked: Sequence[CheckedIds | MesetaError]
        try:
            if isinstance(kjt, Exception):
                raise kjt if isinstance(kjt, MesetaError) else MesetaError(repr(kjt))
            ids = self._empty_ids(self.world.device) if isinstance(kjt, ExhaustedInput) else kjt
            self._check_supported(ids)
            checked = accepted = self.check_ids(ids)
            flight.num_out_of_range = self.count_out_of_range(accepted)
            if isinstance(kjt, ExhaustedInput):
                checked = [replace(own, first_error=kjt.to_header(self.world.device)) for own in accepted]
        except MesetaError as error:  # Raised here alone, it would leave the other ranks waiting.
            checked = [error] * len(self.lookups)
        size = 0 if isinstance(checked[0], MesetaError) else checked[0].kjt.batch_size
        totals = flight.local_totals or BatchTotals(size, 0, float(size))
        started = [
            look.start_input_dist(own, flight.batch_tag, totals)
            for look, own in zip(self.lookups, checked, strict=True)
        ]
        flight.group_states = tuple(GroupState(look, own) for look, own in zip(self.lookups, started, strict=True))

    def _check_supported(self, kjt: KeyedJaggedTensor) -> None:
        """Raise MesetaError for a batch that cannot be looked up here."""
        if kjt.values.numel() > MAX_INT32:
            raise MesetaError(
                f"the batch has {kjt.values.numel()} ids on one rank, at most {MAX_INT32} can be; cut it up"
            )
        if any(group.is_weighted for group in self.groups) and kjt.weights is not None and kjt.weights.requires_grad:
            raise MesetaError(
                "the weights of the batch require a gradient, which a sharded lookup does not send back; detach them, "
                "or set pooling='none' and apply them to the returned rows"
            )

    @property
    def local_share(self) -> float:
        """B_local / B_global of the batch in hand, see `batch_slice`."""
        batch_slice = self.batch_slice
        return 1.0 / self.world.size if batch_slice is None else batch_slice.local_share

    def input_dist(self, flight: BatchContext[GroupState]) -> BatchContext[GroupState]:
        """Read the counts, agree on errors, begin the exchange of lengths and ids."""
        flight.enter_stage("exchanged", after="started")
        with flight.drop_on_error():
            for leg in flight.group_states:
                leg.input_dist = leg.lookup.input_dist(leg.pending_counts)
                del leg.pending_counts
            exchanged = flight.group_states[0].input_dist
            flight.global_totals = BatchTotals.sum_over_ranks(exchanged.totals_per_rank, self.world.ranks_per_host)
            flight.exhausted_ranks = exchanged.exhausted_ranks
        return flight

    def drop(self, flight: BatchContext[GroupState]) -> None:
        for leg in flight.group_states:
            if flight.stage == "started":
                leg.pending_counts.pending.wait()
            elif flight.stage == "exchanged":
                leg.input_dist.wait()
        if flight.stage == "looked up":
            self.wait_for_embeddings(flight)
        super().drop(flight)

    def lookup(self, flight: BatchContext[GroupState]) -> BatchContext[GroupState]:
        """Look up what this rank owns, begin to return it to the ranks that asked."""
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
                for leg in flight.group_states if flight.embeddings is None else ():
                    leg.output_dist = leg.lookup.lookup(leg.input_dist, leg.owned_ids, is_evaluation=is_evaluation)
        return flight

    def _wait_for_ids(self, flight: BatchContext[GroupState]) -> None:
        """Wait for the ids that this rank looks up."""
        for leg in flight.group_states:
            leg.owned_ids = leg.lookup.wait_for_ids(leg.input_dist)

    def _begin_fetch(self, flight: BatchContext[GroupState]) -> None:
        if self._offloaded_shards and flight.lease is None:
            self._wait_for_ids(flight)
            self._acquire_rows(flight)

    def _acquire_rows(self, flight: BatchContext[GroupState]) -> None:
        """Borrow rows where ids become the places of their rows, unless that was done before."""
        if flight.lease is not None:
            return
        looked_up = []
        for leg in flight.group_states:
            of_routes = zip(leg.lookup.routes, leg.owned_ids.ids_by_route(), strict=True)
            looked_up += [(self._shard_index[route.shard], rows) for route, rows in of_routes]
        places = iter(self._acquire_lease(flight, looked_up))
        for leg in flight.group_states:
            leg.owned_ids = leg.owned_ids.with_slots([next(places) for _ in leg.lookup.routes])

    def _fetch_offloaded(self, flight: BatchContext[GroupState]) -> None:
        """The same, and wait for them. What keeps a rank from having its rows is raised on all. Collective."""
        problem = None
        try:
            self._acquire_rows(flight)
            assert flight.lease is not None
            flight.lease.wait()
        except MesetaError as error:
            problem = error
        failures = torch.tensor([0.0 if problem is None else 1.0])
        if self.world.all_reduce_small(failures.to(self.world.device), "agree").item():
            self.world.raise_on_all_ranks(problem)

    @cached_property
    def _shard_index(self) -> dict[Shard, int]:
        """Index of each."""
        return {storage.shard: index for index, storage in enumerate(self.shards)}

    def start_second_hop(self, flight: BatchContext[GroupState]) -> None:
        is_exchanged = flight.stage == "exchanged"
        with flight.stage_timer("input_dist" if is_exchanged else "output_dist"):
            for leg in flight.group_states:
                if is_exchanged:
                    leg.lookup.forward_ids_within_host(leg.input_dist)
                elif leg.output_dist is not None:
                    leg.lookup.start_second_hop(leg.input_dist, leg.output_dist)

    def _assemble_embeddings(self, flight: BatchContext[GroupState]) -> Sequence[Tensor]:
        """Put what all ranks have answered together."""
        each = [
            leg.lookup.output_dist(leg.input_dist, leg.output_dist)
            for leg in flight.group_states
            if leg.output_dist is not None
        ]
        for leg in flight.group_states:
            leg.output_dist = None
        return [tensor for of_group in each for tensor in of_group]

    def _output_dist(self, flight: BatchContext[GroupState]) -> Embeddings:
        with flight.stage_timer("output_dist"):
            self.wait_for_embeddings(flight)
            update = partial(self._run_backward, flight)
            found = OptimizerInBackward.apply(self._anchor, flight.pop_embeddings(), update)
        return self._make_embeddings(flight, [leg.input_dist.ids for leg in flight.group_states], found)

    def _start_gradient_dist(
        self, flight: BatchContext[GroupState], *gradients: Tensor
    ) -> tuple[Sequence[Tensor | None], Callable[[], None]]:
        """Begin to send upstream gradients to the owners of the rows."""
        assert flight.batch_slice is not None
        legs, share = flight.pop_group_states(), flight.batch_slice.local_share
        for leg, (of_bags, *of_rows) in zip(legs, self.split_by_group(gradients), strict=True):
            leg.gradients = [leg.lookup.group.to_sum_gradient(of_bags, leg.input_dist.ids.lengths), *of_rows]
        with flight.stage_timer("gradient_dist"):
            sent = [
                leg.lookup.start_gradient_dist(leg.input_dist, leg.gradients, flight.batch_slice, self.seed)
                for leg in legs
            ]
        take = partial(self._finish_gradient_dist, legs, sent, flight.stage_timer)
        if not self._accumulates_gradients(flight):
            return (), partial(self._update, flight, self._start_replica_update(legs, share), take)
        self._accumulate_replica_gradients(legs, share)
        self._accumulated_segments.append(take if flight.overlaps_gradient_dist else partial(list, take()))
        return (), lambda: None

    def _update(
        self,
        flight: BatchContext[GroupState],
        replicated: PendingCollective | None,
        take: Callable[[], list[GradientSegment]],
    ) -> None:
        """Step every shard once, by what came for it."""
        received = [*(kept() for kept in self._accumulated_segments), take()]
        flight.pre_update_hook()
        with flight.stage_timer("table_update"):
            whole, moved = merge_backward_passes(received)
            self._discard_row_gradients()
            for fused in self._fused_shards:
                step_shards(fused, self.lr(flight, fused.spec), self.step + 1, whole.bags, moved, flight.found_inf)
            self._update_staged(flight, whole, moved)
            self.replicas.finish_update(replicated, partial(self.lr, flight), self.step + 1, flight.found_inf)
        self.step += 1

    def _finish_gradient_dist(
        self, legs: Sequence[GroupState], sent: Sequence[GradientDist], stage_timer: StageTimer
    ) -> list[GradientSegment]:
        """What came to the rows of this rank."""
        with stage_timer("gradient_dist"):
            each = zip(legs, sent, strict=True)
            return [leg.lookup.finish_gradient_dist(leg.input_dist, leg.owned_ids, pending) for leg, pending in each]

    def _replica_segments(self, legs: Sequence[GroupState], scale: float = 1.0) -> list[GradientSegment]:
        """What this rank's samples give to rows that every rank holds, of the groups that read such, times `scale`."""
        found = []
        for leg in legs:
            scaled = leg.gradients if scale == 1.0 else [gradient * scale for gradient in leg.gradients]
            found.append(leg.lookup.replicated_segment(leg.input_dist, scaled))
        return [segment for segment in found if segment is not None]

    def _start_replica_update(self, legs: Sequence[GroupState], share: float) -> PendingCollective | None:
        """Begin to add up what the rows get that every rank holds."""
        if not self.replicas.has_trained_tables:
            return None
        exponent = gradient_exponent(legs[0].input_dist.num_samples)
        make_coding = self.make_sum_codec("backward", "replicas", exponent)
        if not self._accumulated_replica_segments:
            return self.replicas.start_update(
                *merge_backward_passes([self._replica_segments(legs)]), share, make_coding
            )
        self._accumulate_replica_gradients(legs, share)
        return self.replicas.start_update(*merge_backward_passes(self._accumulated_replica_segments), 1.0, make_coding)

    def make_sum_codec(self, direction: Direction, name: str, exponent: int) -> Callable[[int], SumCodec] | None:
        """What tells how so many numbers of a sum cross hosts in the step of the batch in hand; None: as they are."""
        codec = self.comm.codec(direction)
        if codec.is_lossless:
            return None

        def make(num_coded: int) -> SumCodec:
            step = self.step if self.batch_slice is None else self.batch_slice.step
            return SumCodec(codec, num_coded, (self.seed, step, name), HalfRange(exponent, self.num_clamped))

        return make

    def _accumulate_replica_gradients(self, legs: Sequence[GroupState], share: float) -> None:
        """Keep what the replicas get from this rank's samples; micro-batches may differ in `share`."""
        if self.replicas.has_trained_tables:
            self._accumulated_replica_segments.append(self._replica_segments(legs, share))

    def discard_accumulated(self) -> None:
        if self._accumulated_segments:
            retain_until_exit(list(self._accumulated_segments))
        super().discard_accumulated()

    def _discard_row_gradients(self) -> None:
        super()._discard_row_gradients()
        self._accumulated_replica_segments.clear()

    @cached_property
    def _gradient_layout(self) -> tuple[FeatureGradient, ...]:
        """Where the gradient of each route comes, ordered by feature as in one process."""
        found: dict[int, list[FeatureGradient]] = {}
        position = matrix = 0
        for look in self.lookups:
            found |= look.gradient_layout(self._shard_index, position, matrix)
            position += len(look.routes)
            matrix += 2 + len(look.routes) - look.routing.host_reduced[self.world.rank].stop
        return tuple(place for at in sorted(found) for place in found[at])

    @cached_property
    def _staged_shards(self) -> frozenset[int]:
        """Shards that hold some columns of rows whose optimizer needs sums over whole rows."""
        return frozenset(
            index
            for index, shard in enumerate(self.shards)
            if shard.optimizer.row_stats and shard.shard.num_columns < shard.spec.embedding_dim
        )

    def _update_staged(self, flight: BatchContext[GroupState], owned: OwnedIds, gradients: Sequence[Tensor]) -> None:
        """Step column shards; ranks exchange the statistics of rows between the stages."""
        if not self.num_stat_exchanges:
            return
        assert flight.lease is not None
        places = [at for at in self._gradient_layout if at.table in self._staged_shards]
        sums = sum_gradients(self.shards, flight.lease.rows, places, owned, gradients)
        used = [self.shards[i] for i in sums]
        hypers = [Hyper(self.lr(flight, s.spec), self.step + 1, s.spec.embedding_dim) for s in used]
        gather = partial(gather_column_stats, self.plan, self.world, self.dtype, used)
        rows = [flight.lease.rows[i] for i in sums]
        update_rows(used, rows, list(sums.values()), hypers, gather, self.num_stat_exchanges, flight.found_inf)

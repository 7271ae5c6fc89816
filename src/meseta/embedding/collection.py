"""Embedding collection in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.embedding.averages import RowAverages, look_up_rows
from meseta.embedding.base import BaseEmbeddingCollection, OptimizerInBackward
from meseta.embedding.batch_context import BatchContext, ExhaustedInput, FeatureGroup, raise_rejected_id
from meseta.embedding.routes import GradientRounding, MessageFormat, gradient_exponent
from meseta.embedding.update import (
    GradientSegment,
    group_shards,
    local_bags,
    local_segment,
    merge_backward_passes,
)
from meseta.ops.codec import HalfRange
from meseta.ops.id_policy import NO_ERROR, CheckedIds
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_update import Bags, FeatureGradient, TableRows
from meseta.ops.weight_gradient import weight_gradient
from meseta.sparse import Embeddings, KeyedJaggedTensor
from meseta.spec import Communication, FeatureSpec, MesetaError, Plan, Shard, ShardingType, TablePlan, TableSpec
from meseta.spec.tiers import HBM, StorageOptions
from meseta.storage import TableStorage, make_storages


class LocalLookup:
    """Lookup of one feature group whose tables are completely in this process."""

    def __init__(self, group: FeatureGroup, rows: Mapping[str, TableRows], dtype: torch.dtype) -> None:
        """Create the lookup, given the rows of each table."""
        self.group = group
        self.averages: RowAverages | None = None
        """Averages to look up in place of rows."""
        self._dtype = dtype
        pooled = group.pooled_features
        self._pooled_rows = [rows[f.table] for f in pooled]
        self._pooled_tables = LookupGroup(
            tuple(table.weight for table in self._pooled_rows),
            tuple(f.weighted for f in pooled),
            tuple(f.pooling == "mean" for f in pooled),
        )
        self._unpooled_rows = [rows[f.table] for f in group.unpooled_features]

    def __call__(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """Return pooled embeddings [B, sum of D], then the rows of each unpooled feature."""
        if self.group.pooled_features:
            bags = ids.select(self.group.pooled_names)
            if self.averages is None:
                pooled = lookup_group(self._pooled_tables, bags.values, bags.offsets, bags.weights)
            else:
                tables = self._pooled_rows, self._pooled_tables
                pooled = self.averages.pool(*tables, bags.values, bags.offsets, bags.weights)
        else:
            pooled = torch.empty(ids.batch_size, 0, dtype=self._dtype, device=ids.values.device)
        if not self._unpooled_rows:
            return [pooled]
        single = ids.select([f.name for f in self.group.unpooled_features])
        return [pooled, *look_up_rows(self.averages, self._unpooled_rows, single.values, single.key_offsets)]

    def segment(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor], step: int) -> GradientSegment:
        """Return the segment of a batch, given its ids and the gradients of its embeddings."""
        bag_gradient, *row_gradients = gradients
        return local_segment(
            ids, (self.group.to_sum_gradient(bag_gradient, ids.lengths), *row_gradients), self.group.unpooled_indices
        )

    def weight_gradient(self, ids: KeyedJaggedTensor, pooled: Tensor) -> Tensor | None:
        """Return the gradient [nnz] of the weights of ids, or `None` if they need none. Uses the looked-up rows."""
        if ids.weights is None or not ids.weights.requires_grad:
            return None
        bags = ids.select(self.group.pooled_names)
        tables = self._pooled_tables
        bag_weight_gradients = weight_gradient(
            tables.tables, bags.values, bags.offsets, pooled, tables.weighted, tables.mean
        )
        whole = torch.zeros_like(ids.weights)
        sizes = [b - a for a, b in pairwise(bags.key_offsets)]
        for f, part in zip(self.group.pooled_names, bag_weight_gradients.split(sizes), strict=True):
            first = ids.key_offsets[ids.keys.index(f)]
            whole[first : first + part.numel()] = part
        return whole


@dataclass(frozen=True)
class EmulatedRounding:
    """Rounding that emulates a run on several ranks."""

    comm: Communication
    replicated_tables: frozenset[str]
    """Tables that are replicated on all ranks, so that their rows are not encoded."""


class RoundedLookup(LocalLookup):
    """Lookup that rounds data as several ranks do in exchanges, as a reference for them."""

    def __init__(
        self,
        group: FeatureGroup,
        table_rows: Mapping[str, TableRows],
        dtype: torch.dtype,
        rounds: EmulatedRounding,
        seed: int,
    ) -> None:
        super().__init__(group, table_rows, dtype)
        # Ranks send sums and divide them later.
        self._pooled_tables = replace(self._pooled_tables, mean=(False,) * len(group.pooled_features))
        self._comm, self._seed = rounds.comm, seed
        self._is_sent = [
            f.table not in rounds.replicated_tables for f in (*group.pooled_features, *group.unpooled_features)
        ]

    def __call__(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        pooled, *rows = super().__call__(ids)
        message_format = MessageFormat(self._dtype, pooled.device, self._comm.codec("forward"))
        exact_by_feature = pooled.split(self.group.pooled_dims, dim=1)
        bags, single = self._is_sent[: len(exact_by_feature)], self._is_sent[len(exact_by_feature) :]
        sent = message_format.round_trip(pooled, self.group.pooled_dims).split(self.group.pooled_dims, dim=1)
        each_bag = zip(sent, exact_by_feature, bags, strict=True)
        sums = torch.cat([pooled[:, :0], *(values if is_sent else exact for values, exact, is_sent in each_bag)], dim=1)
        lengths = ids.lengths.view(len(self.group.features), -1)
        each = zip(rows, single, strict=True)
        rounded = [
            message_format.round_trip(values, (values.shape[1],)) if is_sent else values for values, is_sent in each
        ]
        return [self.group.divide_means(sums, lengths), *rounded]

    def segment(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor], step: int) -> GradientSegment:
        bag_gradient, *row_gradients = gradients
        half = HalfRange(gradient_exponent(ids.batch_size))
        message_format = MessageFormat(self._dtype, bag_gradient.device, self._comm.codec("backward"), half_range=half)
        names = tuple(feature.name for feature in self.group.features)
        draw = GradientRounding(self._seed, step, names, 0, ids.lengths) if message_format.codec.scale_bytes else None
        features = [f for f in range(len(names)) if f not in self.group.unpooled_indices]
        rounding = None if draw is None else draw.bag_rounding([(f, 0) for f in features])
        sums = self.group.to_sum_gradient(bag_gradient, ids.lengths)
        rounded = [message_format.round_trip(sums, self.group.pooled_dims, rounding)]
        for f, gradient in zip(self.group.unpooled_indices, row_gradients, strict=True):
            rounding = None if draw is None else draw.row_rounding(f, 0, draw.row_positions(f))
            rounded.append(message_format.round_trip(gradient, (gradient.shape[1],), rounding))
        return local_segment(ids, rounded, self.group.unpooled_indices)


def _unsharded_plan(table: TableSpec, pieces: Sequence[Shard] = ()) -> TablePlan:
    """Return a plan of one shard on rank 0 with the tier of `pieces`. Raises MesetaError if their tiers differ."""
    tiers = sorted({piece.tier for piece in pieces}) or [HBM]
    if len(tiers) > 1:
        raise MesetaError(
            f"plan: table {table.name!r} must have one tier in one process, got {', '.join(tiers)}; use one tier for "
            "all of its rows"
        )
    cache_rows = [piece.cache_rows for piece in pieces if piece.cache_rows is not None]
    whole = Shard(
        table=table.name,
        rows=(0, table.num_embeddings),
        columns=(0, table.embedding_dim),
        ranks=(0,),
        tier=tiers[0],
        cache_rows=min(sum(cache_rows), table.num_embeddings) if cache_rows else None,
    )
    return TablePlan(table=table.name, sharding=ShardingType.TABLE_WISE, shards=(whole,))


class EmbeddingBagCollection(BaseEmbeddingCollection[CheckedIds]):
    """Embedding tables whose rows are updated inside `loss.backward()`, once per touched row.

        tables = [TableSpec(name="item", num_embeddings=1000, embedding_dim=16)]
        features = [FeatureSpec(name="clicked", table="item"), FeatureSpec(name="shown", table="item", pooling="mean")]
        embeddings = EmbeddingBagCollection(tables, features)
        out = embeddings(kjt)          # out.pooled.values [B, 32], out["shown"] [B, 16]

    Memory is allocated at the first use. A collection that is larger than this machine can therefore be created and
    then sharded with `meseta.shard`. Raises MesetaError for inconsistent specs and for invalid ids.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        *,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__(tables, features, seed)
        self.device = torch.device(device)
        self._rounding = EmulatedRounding(Communication(), frozenset())
        self._set_plan(
            Plan(num_ranks=1, tables=tuple(_unsharded_plan(table) for table in self.tables)), StorageOptions()
        )

    @cached_property
    def shards(self) -> tuple[TableStorage, ...]:
        """Storage of each table, in the order of the tables. Allocated at the first access."""
        pieces = [(table, self.plan[table.name].shards[0]) for table in self.tables]
        return make_storages(pieces, seed=self.seed, device=self.device, options=self.storage)

    def apply_plan(self, plan: Plan, storage: StorageOptions | None = None) -> None:
        """Move the rows to the tiers of a plan. All shards of a table become one.

        Call before the first use of the rows. Raises MesetaError if the rows are in use, the plan does not fit the
        tables, or `storage` does not allow it.
        """
        plan.check(self.tables)
        storage = storage or StorageOptions()
        plan.check_storage(storage)
        # One process has all rows, so each table becomes one shard.
        whole = Plan(
            num_ranks=1, tables=tuple(_unsharded_plan(table, plan[table.name].shards) for table in self.tables)
        )
        if whole != self.plan and "shards" in self.__dict__:
            raise MesetaError("meseta.shard: the rows of these tables are in use; call it before the first batch")
        self._set_plan(whole, storage)

    @property
    def local_share(self) -> float:
        """Share of this rank in the samples of the active batch."""
        return 1.0

    def _start_input_dist(
        self, flight: BatchContext[CheckedIds], kjt: KeyedJaggedTensor | ExhaustedInput | Exception
    ) -> None:
        if isinstance(kjt, Exception):
            raise kjt
        if isinstance(kjt, ExhaustedInput):
            flight.exhausted_ranks, kjt = {0: kjt}, self._empty_ids(self.device)
        flight.group_states = tuple(self.check_ids(kjt))
        flight.num_out_of_range = self.count_out_of_range(flight.group_states)

    def input_dist(self, flight: BatchContext[CheckedIds]) -> BatchContext[CheckedIds]:
        """Raise MesetaError for invalid ids, unless the batch defers it. One process has no exchange."""
        flight.enter_stage("exchanged", after="started")
        with flight.drop_on_error():
            flight.rejected_ids = tuple(
                (group, group_ids.report)
                for group, group_ids in zip(self.groups, flight.group_states, strict=True)
                if group_ids.first_error is not NO_ERROR
            )
            if not flight.defers_id_check:
                raise_rejected_id(flight.rejected_ids)
                flight.rejected_ids = ()
            batch_size = flight.group_states[0].kjt.batch_size
            flight.global_totals = flight.local_totals or BatchTotals(batch_size, 0, float(batch_size))
        return flight

    def lookup(self, flight: BatchContext[CheckedIds]) -> BatchContext[CheckedIds]:
        flight.enter_stage("looked up", after="exchanged")
        assert flight.global_totals is not None
        sizes = (flight.group_states[0].kjt.batch_size,)
        self._set_batch_slice(flight, World.single(self.device), sizes, [flight.global_totals])
        if self._offloaded_shards:
            self._acquire_rows(flight)
            assert flight.lease is not None
            flight.lease.wait()
        else:
            self._acquire_lease(flight)
        self.wait_for_embeddings(flight)
        return flight

    def _begin_fetch(self, flight: BatchContext[CheckedIds]) -> None:
        self._acquire_rows(flight)

    def _acquire_rows(self, flight: BatchContext[CheckedIds]) -> None:
        if flight.lease is not None:
            return
        looked_up = []
        for group, group_ids in zip(self.groups, flight.group_states, strict=True):
            ids = group_ids.kjt.values.split([b - a for a, b in pairwise(group_ids.kjt.key_offsets)])
            looked_up += [(self._shard_index[f.table], rows) for f, rows in zip(group.features, ids, strict=True)]
        slots = iter(self._acquire_lease(flight, looked_up))
        parts = []
        for group, group_ids in zip(self.groups, flight.group_states, strict=True):
            values = torch.cat([next(slots) for _ in group.features])
            parts.append(replace(group_ids, kjt=group_ids.kjt.with_values(values)))
        flight.group_states = tuple(parts)

    @cached_property
    def _shard_index(self) -> dict[str, int]:
        return {shard.spec.name: index for index, shard in enumerate(self.shards)}

    def _assemble_embeddings(self, flight: BatchContext[CheckedIds]) -> Sequence[Tensor]:
        each = zip(self.lookups, flight.group_states, strict=True)
        return [tensor for lookup, group_ids in each for tensor in lookup(group_ids.kjt)]

    def _output_dist(self, flight: BatchContext[CheckedIds]) -> Embeddings:
        ids = [group_ids.kjt for group_ids in flight.group_states]
        embeddings, update = flight.pop_embeddings(), partial(self._run_backward, flight)
        outputs = OptimizerInBackward.apply(self._anchor, embeddings, update, *(group_ids.weights for group_ids in ids))
        return self._make_embeddings(flight, ids, outputs)

    def _bags(self, state: CheckedIds) -> Bags:
        return local_bags(state.kjt)

    def emulate_rounding(self, comm: Communication, at_home: Iterable[str] = ()) -> None:
        """Round data in training as several ranks with `comm` do before sending it.

        This applies to embeddings except of the replicated tables `at_home`, and to all gradients. Sums over ranks,
        such as those of replicas, are not rounded.
        """
        comm.check_dtype(self.tables[0].dtype)
        self._rounding, self._acquired_rows = EmulatedRounding(comm, frozenset(at_home)), None

    @property
    def emulates_rounding(self) -> bool:
        return not self._rounding.comm.is_lossless

    def _make_lookup(self, group: FeatureGroup, rows: Mapping[str, TableRows]) -> LocalLookup:
        if self._rounding.comm.is_lossless:
            return LocalLookup(group, rows, self.dtype)
        return RoundedLookup(group, rows, self.dtype, self._rounding, self.seed)

    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        rows_by_table = {shard.spec.name: shard_rows for shard, shard_rows in zip(self.shards, rows, strict=True)}
        self.lookups = tuple(self._make_lookup(group, rows_by_table) for group in self.groups)
        self._set_averages(self._averages)
        self._fused_shards = group_shards(self.shards, rows, self._gradient_layout)

    @cached_property
    def _gradient_layout(self) -> list[FeatureGradient]:
        # The gradients of the pooled features of a group form one matrix. Each unpooled feature has its own matrix.
        layout, position, matrix = {}, 0, 0
        for group in self.groups:
            pooled, column = matrix, 0
            for feature_index, feature, width in zip(group.feature_indices, group.features, group.dims, strict=True):
                shard = self._shard_index[feature.table]
                if feature.pooling == "none":
                    matrix += 1
                    layout[feature_index] = FeatureGradient(position, shard, matrix, per_id=True)
                else:
                    layout[feature_index] = FeatureGradient(position, shard, pooled, column, weighted=feature.weighted)
                    column += width
                position += 1
            matrix += 1
        return [layout[feature_index] for feature_index in sorted(layout)]

    def _start_gradient_dist(
        self, flight: BatchContext[CheckedIds], *gradients: Tensor
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        ids = [group_ids.kjt for group_ids in flight.pop_group_states()]
        lookups = list(zip(self.lookups, ids, self.split_by_group(gradients), strict=True))
        weight_gradients = [lookup.weight_gradient(group_ids, pooled) for lookup, group_ids, (pooled, *_) in lookups]
        assert flight.batch_slice is not None
        step = flight.batch_slice.step
        segments = [
            lookup.segment(group_ids, output_gradients, step) for lookup, group_ids, output_gradients in lookups
        ]
        self._accumulated_segments.append(lambda: segments)
        return weight_gradients, (lambda: None) if self._accumulates_gradients(flight) else partial(
            self._update, flight
        )

    def _update(self, flight: BatchContext[CheckedIds]) -> None:
        with flight.stage_timer("table_update"):
            whole, moved = merge_backward_passes([get_segments() for get_segments in self._accumulated_segments])
            self._discard_row_gradients()
            if flight.clip is not None:
                sums, _ = self._clip_gradients(flight, self._gradient_layout, whole, moved)
                self._update_rows(flight, sums)
            else:
                self._step_fused(flight, whole.bags, moved)
        self.step += 1

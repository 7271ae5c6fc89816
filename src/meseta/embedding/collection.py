"""EmbeddingBagCollection: all tables in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, World
from meseta.embedding.accumulate import GradientSegment, local_segment, merge_backward_passes
from meseta.embedding.base import BaseEmbeddingCollection, OptimizerInBackward
from meseta.embedding.batch_context import BatchContext, Clip, ExhaustedInput
from meseta.embedding.feature_group import FeatureGroup
from meseta.embedding.input_dist import OwnedIds
from meseta.embedding.message_format import GradientRounding, MessageFormat, gradient_exponent
from meseta.embedding.update import group_shards, step_shards, sum_gradients, update_rows
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.ops.codec import HalfRange
from meseta.ops.id_policy import NO_ERROR, CheckedIds
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_program.optimizer import Hyper
from meseta.ops.row_update import FeatureGradient, TableRows
from meseta.ops.weight_gradient import weight_gradient
from meseta.spec import Communication, FeatureSpec, MesetaError, Plan, Shard, ShardingType, TablePlan, TableSpec
from meseta.spec.tiers import HBM, StorageOptions
from meseta.storage import TableStorage, make_storages


class LocalLookup:
    """The features of one group, all of whose tables are whole and here."""

    def __init__(self, group: FeatureGroup, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        """`weights` holds the rows of each table."""
        self.group = group
        self._dtype = dtype
        pooled = group.pooled_features
        self._pooled_tables = LookupGroup(
            tuple(weights[f.table] for f in pooled),
            tuple(f.weighted for f in pooled),
            tuple(f.pooling == "mean" for f in pooled),
        )
        self._unpooled_tables = [weights[f.table] for f in group.unpooled_features]

    def __call__(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """[pooled [B, sum of D], rows of each unpooled feature ...]."""
        if self.group.pooled_features:
            bags = ids.select(self.group.pooled_names)
            pooled = lookup_group(self._pooled_tables, bags.values, bags.offsets, bags.weights)
        else:
            pooled = torch.empty(ids.batch_size, 0, dtype=self._dtype, device=ids.values.device)
        if not self._unpooled_tables:
            return [pooled]
        single = ids.select([f.name for f in self.group.unpooled_features])
        return [pooled, *row_lookup(self._unpooled_tables, single.values, single.key_offsets)]

    def segment(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor], step: int) -> GradientSegment:
        """Ids and what their rows receive in a step, for the gradients of what a lookup returned."""
        of_bags, *of_rows = gradients
        return local_segment(
            ids, (self.group.to_sum_gradient(of_bags, ids.lengths), *of_rows), self.group.unpooled_indices
        )

    def weight_gradient(self, ids: KeyedJaggedTensor, pooled: Tensor) -> Tensor | None:
        """[nnz] in the order of `ids`, by the rows as they were looked up; None where nobody asks for it."""
        if ids.weights is None or not ids.weights.requires_grad:
            return None
        bags = ids.select(self.group.pooled_names)
        tables = self._pooled_tables
        own = weight_gradient(tables.tables, bags.values, bags.offsets, pooled, tables.weighted, tables.mean)
        whole = torch.zeros_like(ids.weights)
        sizes = [b - a for a, b in pairwise(bags.key_offsets)]
        for f, part in zip(self.group.pooled_names, own.split(sizes), strict=True):
            start = ids.key_offsets[ids.keys.index(f)]
            whole[start : start + part.numel()] = part
        return whole


@dataclass(frozen=True)
class EmulatedRounding:
    """What one process rounds as several ranks do."""

    comm: Communication
    replicated_tables: frozenset[str]
    """Tables that every rank holds whole, whose rows do not travel."""


class RoundedLookup(LocalLookup):
    """The same, rounded where several ranks round what they send, so that they can be held against it."""

    def __init__(
        self,
        group: FeatureGroup,
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
        rounds: EmulatedRounding,
        seed: int,
    ) -> None:
        super().__init__(group, weights, dtype)
        self._pooled_tables = replace(self._pooled_tables, mean=(False,) * len(group.pooled_features))  # sums travel
        self._comm, self._seed = rounds.comm, seed
        self._is_sent = [
            f.table not in rounds.replicated_tables for f in (*group.pooled_features, *group.unpooled_features)
        ]

    def __call__(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        pooled, *rows = super().__call__(ids)
        wire = MessageFormat(self._dtype, pooled.device, self._comm.codec("forward"))
        of_features = pooled.split(self.group.pooled_dims, dim=1)
        bags, single = self._is_sent[: len(of_features)], self._is_sent[len(of_features) :]
        sent = wire.round_trip(pooled, self.group.pooled_dims).split(self.group.pooled_dims, dim=1)
        each_bag = zip(sent, of_features, bags, strict=True)
        sums = torch.cat([pooled[:, :0], *(one if travels else exact for one, exact, travels in each_bag)], dim=1)
        lengths = ids.lengths.view(len(self.group.features), -1)
        each = zip(rows, single, strict=True)
        rounded = [wire.round_trip(one, (one.shape[1],)) if travels else one for one, travels in each]
        return [self.group.divide_means(sums, lengths), *rounded]

    def segment(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor], step: int) -> GradientSegment:
        of_bags, *of_rows = gradients
        half = HalfRange(gradient_exponent(ids.batch_size))
        wire = MessageFormat(self._dtype, of_bags.device, self._comm.codec("backward"), half_range=half)
        names = tuple(feature.name for feature in self.group.features)
        draw = GradientRounding(self._seed, step, names, 0, ids.lengths) if wire.codec.scale_bytes else None
        features = [f for f in range(len(names)) if f not in self.group.unpooled_indices]
        rounding = None if draw is None else draw.bag_rounding([(f, 0) for f in features])
        sums = self.group.to_sum_gradient(of_bags, ids.lengths)
        rounded = [wire.round_trip(sums, self.group.pooled_dims, rounding)]
        for f, gradient in zip(self.group.unpooled_indices, of_rows, strict=True):
            rounding = None if draw is None else draw.row_rounding(f, 0, draw.row_positions(f))
            rounded.append(wire.round_trip(gradient, (gradient.shape[1],), rounding))
        return local_segment(ids, rounded, self.group.unpooled_indices)


def _unsharded_plan(table: TableSpec, pieces: Sequence[Shard] = ()) -> TablePlan:
    """A table in one piece on rank 0, in the tier of its pieces. Raises MesetaError where they have several."""
    tiers = sorted({piece.tier for piece in pieces}) or [HBM]
    if len(tiers) > 1:
        raise MesetaError(
            f"plan: table {table.name!r} has rows in tiers {', '.join(tiers)}, and lies in one piece in one process; "
            "name one tier for all of it"
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
    """Embedding tables whose rows learn inside `loss.backward()`, one optimizer step per touched row.

        tables = [TableSpec(name="item", num_embeddings=1000, embedding_dim=16)]
        features = [FeatureSpec(name="clicked", table="item"), FeatureSpec(name="shown", table="item", pooling="mean")]
        embeddings = EmbeddingBagCollection(tables, features)
        out = embeddings(kjt)          # out.pooled.values [B, 32], out["shown"] [B, 16]

    Memory is taken at the first use, so a collection larger than this machine can be built and then sharded with
    `meseta.shard`. Raises MesetaError for specs that do not fit together and for ids outside their table.
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
        """One whole shard per table, in the order of the tables."""
        pieces = [(table, self.plan[table.name].shards[0]) for table in self.tables]
        return make_storages(pieces, seed=self.seed, device=self.device, options=self.storage)

    def apply_plan(self, plan: Plan, storage: StorageOptions | None = None) -> None:
        """Put the rows into the tiers of a plan, before they are used; the pieces of a table are one here.

        Raises MesetaError where the plan does not fit the tables, or `storage` has no room for it.
        """
        plan.check(self.tables)
        storage = storage or StorageOptions()
        plan.check_storage(storage)
        whole = Plan(
            num_ranks=1, tables=tuple(_unsharded_plan(table, plan[table.name].shards) for table in self.tables)
        )
        if whole != self.plan and "shards" in self.__dict__:
            raise MesetaError("meseta.shard: the rows of these tables are in use; place them before the first batch")
        self._set_plan(whole, storage)

    @property
    def local_share(self) -> float:
        """B_local / B_global of the batch in hand."""
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
        """Nothing travels in one process; refused ids raise here."""
        flight.enter_stage("exchanged", after="started")
        with flight.drop_on_error():
            for group, own in zip(self.groups, flight.group_states, strict=True):
                if own.first_error is not NO_ERROR:
                    feature, sample, row = own.first_error.tolist()
                    if feature >= 0:
                        raise group.out_of_range_error(feature, sample, row)
            batch_size = flight.group_states[0].kjt.batch_size
            flight.global_totals = flight.local_totals or BatchTotals(batch_size, 0, float(batch_size))
        return flight

    def lookup(self, flight: BatchContext[CheckedIds]) -> BatchContext[CheckedIds]:
        """Borrow the rows, and look up."""
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
        """Borrow rows where ids become the places of their rows, unless that was done before."""
        if flight.lease is not None:
            return
        looked_up = []
        for group, own in zip(self.groups, flight.group_states, strict=True):
            ids = own.kjt.values.split([b - a for a, b in pairwise(own.kjt.key_offsets)])
            looked_up += [(self._shard_index[f.table], rows) for f, rows in zip(group.features, ids, strict=True)]
        places = iter(self._acquire_lease(flight, looked_up))
        parts = []
        for group, own in zip(self.groups, flight.group_states, strict=True):
            values = torch.cat([next(places) for _ in group.features])
            parts.append(replace(own, kjt=own.kjt.with_values(values)))
        flight.group_states = tuple(parts)

    @cached_property
    def _shard_index(self) -> dict[str, int]:
        """Index of each table's."""
        return {shard.spec.name: index for index, shard in enumerate(self.shards)}

    def _assemble_embeddings(self, flight: BatchContext[CheckedIds]) -> Sequence[Tensor]:
        each = zip(self._lookups, flight.group_states, strict=True)
        return [tensor for lookup, own in each for tensor in lookup(own.kjt)]

    def _output_dist(self, flight: BatchContext[CheckedIds]) -> Embeddings:
        ids = [own.kjt for own in flight.group_states]
        answers, update = flight.pop_embeddings(), partial(self._run_backward, flight)
        found = OptimizerInBackward.apply(self._anchor, answers, update, *(own.weights for own in ids))
        return self._make_embeddings(flight, ids, found)

    def emulate_rounding(self, comm: Communication, at_home: Iterable[str] = ()) -> None:
        """Round in training what several ranks under `comm` round before they send it: bags and rows, but of the tables
        `at_home`, and the gradients of all. What ranks add up, as those of replicas, is not rounded so."""
        comm.check_dtype(self.tables[0].dtype)
        self._rounding, self._acquired_rows = EmulatedRounding(comm, frozenset(at_home)), None

    def _make_lookup(self, group: FeatureGroup, weights: Mapping[str, Tensor]) -> LocalLookup:
        if self._rounding.comm.is_lossless:
            return LocalLookup(group, weights, self.dtype)
        return RoundedLookup(group, weights, self.dtype, self._rounding, self.seed)

    def _bind_rows(self, rows: Sequence[TableRows]) -> None:
        weights = {shard.spec.name: lent.weight for shard, lent in zip(self.shards, rows, strict=True)}
        self._lookups = tuple(self._make_lookup(group, weights) for group in self.groups)
        """One per group."""
        self._fused_shards = group_shards(self.shards, rows, self._gradient_layout)

    @cached_property
    def _gradient_layout(self) -> list[FeatureGradient]:
        """Of each group, gradients of pooled features come side by side in a matrix, others one by one."""
        places, position, matrix = {}, 0, 0
        for group in self.groups:
            pooled, column = matrix, 0
            for at, feature, width in zip(group.feature_indices, group.features, group.dims, strict=True):
                shard = self._shard_index[feature.table]
                if feature.pooling == "none":
                    matrix += 1
                    places[at] = FeatureGradient(position, shard, matrix, per_id=True)
                else:
                    places[at] = FeatureGradient(position, shard, pooled, column, weighted=feature.weighted)
                    column += width
                position += 1
            matrix += 1
        return [places[at] for at in sorted(places)]

    def _start_gradient_dist(
        self, flight: BatchContext[CheckedIds], *gradients: Tensor
    ) -> tuple[list[Tensor | None], Callable[[], None]]:
        ids = [own.kjt for own in flight.pop_group_states()]
        given = list(zip(self._lookups, ids, self.split_by_group(gradients), strict=True))
        of_weights = [lookup.weight_gradient(own, pooled) for lookup, own, (pooled, *_) in given]
        assert flight.batch_slice is not None
        step = flight.batch_slice.step
        segments = [lookup.segment(own, moved, step) for lookup, own, moved in given]
        self._accumulated_segments.append(lambda: segments)
        return of_weights, (lambda: None) if self._accumulates_gradients(flight) else partial(self._update, flight)

    def _update(self, flight: BatchContext[CheckedIds]) -> None:
        """Add up what each row gets, and step its optimizer."""
        with flight.stage_timer("table_update"):
            whole, moved = merge_backward_passes([kept() for kept in self._accumulated_segments])
            self._discard_row_gradients()
            if flight.clip is not None:
                self._update_clipped(flight, flight.clip, whole, moved)
            else:
                for fused in self._fused_shards:
                    step_shards(fused, self.lr(flight, fused.spec), self.step + 1, whole.bags, moved, flight.found_inf)
        self.step += 1

    def _update_clipped(
        self, flight: BatchContext[CheckedIds], clip: Clip, whole: OwnedIds, moved: Sequence[Tensor]
    ) -> None:
        """The same by gradients that are added up first, since `clip` takes their norm over all rows."""
        assert flight.lease is not None
        places = [at for at in self._gradient_layout if self.shards[at.table].spec.optimizer.name != "frozen"]
        sums = sum_gradients(self.shards, flight.lease.rows, places, whole, moved)
        is_refused = flight.found_inf is not None and bool(flight.found_inf.item())  # no row moves, as is told later
        factor = 1.0 if is_refused else clip([own.gradient for own in sums.values()])
        used, rows = [self.shards[i] for i in sums], [flight.lease.rows[i] for i in sums]
        hypers = [Hyper(self.lr(flight, s.spec), self.step + 1, s.spec.embedding_dim) for s in used]
        scaled = [own if factor == 1.0 else replace(own, gradient=own.gradient * factor) for own in sums.values()]
        update_rows(used, rows, scaled, hypers, found_inf=flight.found_inf)

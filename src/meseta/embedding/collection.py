"""EmbeddingBagCollection: all tables in one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from meseta.comm import BatchSlice, World
from meseta.embedding.accumulate import join, local_segment
from meseta.embedding.base import Collection, UpdateInBackward
from meseta.embedding.update import FusedShards, group_shards, step_shards
from meseta.jagged import Embeddings, KeyedJaggedTensor
from meseta.ops.id_policy import NO_ERROR, CheckedIds
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_update import Bags, FeatureGradient
from meseta.ops.weight_gradient import weight_gradient
from meseta.optim import make_row_optimizer
from meseta.spec import FeatureSpec, Plan, Shard, ShardingType, TablePlan, TableSpec
from meseta.storage import TableShard


class EmbeddingBagCollection(Collection):
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

    @cached_property
    def plan(self) -> Plan:
        """Every table whole on rank 0."""
        whole = [
            Shard(table=t.name, rows=(0, t.num_embeddings), columns=(0, t.embedding_dim), ranks=(0,))
            for t in self.tables
        ]
        return Plan(
            num_ranks=1,
            tables=tuple(
                TablePlan(table=shard.table, sharding=ShardingType.TABLE_WISE, shards=(shard,)) for shard in whole
            ),
        )

    @cached_property
    def shards(self) -> tuple[TableShard, ...]:
        """One whole shard per table, in the order of the tables."""
        return tuple(
            TableShard.create(
                table,
                self.plan[table.name].shards[0],
                make_row_optimizer(table.optimizer),
                seed=self.seed,
                device=self.device,
            )
            for table in self.tables
        )

    @property
    def local_share(self) -> float:
        """B_local / B_global."""
        return 1.0

    def forward(self, sparse: KeyedJaggedTensor | CheckedIds) -> Embeddings:
        """Rows for the ids (of a batch that may hold other features too): pooled [B, sum of D] and unpooled [nnz_f,
        D]."""
        return self.finish(sparse if isinstance(sparse, CheckedIds) else self.exchange(self.start(sparse)))

    def start(self, kjt: KeyedJaggedTensor) -> CheckedIds:
        """Apply the id policies. The sharded collection has the same three stages."""
        return self.check_ids(kjt)

    def exchange(self, x: CheckedIds) -> CheckedIds:
        """Nothing travels in one process; refused ids raise here."""
        if x.first_error is not NO_ERROR:
            feature, sample, row = x.first_error.tolist()
            if feature >= 0:
                raise self.refuse(feature, sample, row)
        return x

    def finish(self, x: CheckedIds) -> Embeddings:
        """Look up and pool."""
        ids = x.kjt
        self.batch_slice = BatchSlice(
            world=World.single(self.device), step=self.step, sizes=(ids.batch_size,), first=self.first_sample
        )
        pooled, *rows = UpdateInBackward.apply(
            self._anchor,
            ids.weights,
            lambda: self._lookup(ids),
            lambda *gradients: self._update(ids, gradients),
        )
        return self.embeddings(ids, pooled, rows)

    @cached_property
    def _pooled_tables(self) -> LookupGroup:
        """Of the pooled features."""
        return LookupGroup(
            tuple(self._weight[f.table] for f in self.pooled_features),
            tuple(f.weighted for f in self.pooled_features),
            tuple(f.pooling == "mean" for f in self.pooled_features),
        )

    @cached_property
    def _weight(self) -> dict[str, Tensor]:
        """Rows of each table."""
        return {shard.spec.name: shard.weight for shard in self.shards}

    def _lookup(self, ids: KeyedJaggedTensor) -> list[Tensor]:
        """[pooled [B, sum of D], rows of each unpooled feature ...]."""
        batch_size = ids.batch_size  # raises where features differ in it
        if self.pooled_features:
            bags = ids.select(self._pooled_names)
            pooled = lookup_group(self._pooled_tables, bags.values, bags.offsets, bags.weights)
        else:
            pooled = torch.empty(batch_size, 0, dtype=self.dtype, device=ids.values.device)
        if not self.row_features:
            return [pooled]
        single = ids.select([f.name for f in self.row_features])
        tables = [self._weight[f.table] for f in self.row_features]
        return [pooled, *row_lookup(tables, single.values, single.key_offsets)]

    @cached_property
    def _fused(self) -> tuple[FusedShards, ...]:
        """All shards. Gradients of pooled features come side by side in matrix 0, those of the others one by one."""
        shard_of = {shard.spec.name: index for index, shard in enumerate(self.shards)}
        places, column, matrix = [], 0, 0
        for position, feature in enumerate(self.features):
            shard = shard_of[feature.table]
            if feature.pooling == "none":
                matrix += 1
                places.append(FeatureGradient(position, shard, matrix, per_id=True))
            else:
                places.append(FeatureGradient(position, shard, 0, column, weighted=feature.weighted))
                column += self._table[feature.table].embedding_dim
        return group_shards(self.shards, places)

    def _update(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor]) -> Tensor | None:
        """Add up what each row gets, and step its optimizer. Returns the gradient of the weights where it is asked."""
        pooled, *rows = gradients
        of_weights = (
            self._weight_gradient(ids, pooled) if ids.weights is not None and ids.weights.requires_grad else None
        )
        if any(self._pooled_tables.mean if self.pooled_features else ()):
            pooled = self.divide_means(pooled.clone(), ids.lengths.view(len(self.features), -1))
        bags, moved = Bags(ids.values, ids.offsets, ids.batch_size, ids.weights), (pooled, *rows)
        if self._is_accumulating or self._kept:
            self._kept.append(local_segment(ids, moved, self._unpooled))
            if self._is_accumulating:
                return of_weights
            whole = join(self._kept)
            self.forget_kept()
            bags, moved = whole.ids.bags, whole.gradients
        for fused in self._fused:
            step_shards(fused, self.lr(fused.spec), self.step + 1, bags, moved)
        self.step += 1
        return of_weights

    def _weight_gradient(self, ids: KeyedJaggedTensor, pooled: Tensor) -> Tensor:
        """[nnz] in the order of `ids`, by the rows as they were looked up."""
        assert ids.weights is not None
        bags, tables = ids.select(self._pooled_names), self._pooled_tables
        own = weight_gradient(tables.tables, bags.values, bags.offsets, pooled, tables.weighted, tables.mean)
        whole = torch.zeros_like(ids.weights)
        for f, part in zip(self._pooled_names, own.split([b - a for a, b in pairwise(bags.key_offsets)]), strict=True):
            start = ids.key_offsets[ids.keys.index(f)]
            whole[start : start + part.numel()] = part
        return whole

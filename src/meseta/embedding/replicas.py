"""Tables that every rank holds whole: looked up at home, their gradients added over ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm import Pending, World
from meseta.embedding.routes import Routing
from meseta.embedding.update import FusedShards, group_shards
from meseta.jagged import KeyedJaggedTensor
from meseta.ops.jagged import permute
from meseta.ops.pooled_lookup import LookupGroup, lookup_group
from meseta.ops.row_lookup import row_lookup
from meseta.ops.row_optimizer import Hyper, RowOptimizer, RowState, Value, Values, compute_dtype, row_state
from meseta.ops.row_update import Bags, FeatureGradient, TableRows, UpdateGroup, row_update
from meseta.spec import FeatureSpec, TableSpec
from meseta.storage import TableShard


def _init(weight: Tensor) -> RowState:
    return {"ranks": row_state(weight)}


def _add(rows: Value, gradient: Value, state: Values, stats: Values, hyper: Hyper) -> tuple[Value, Values]:
    return rows + gradient, {"ranks": state["ranks"] + 1}


SUM = RowOptimizer(name="sum", init=_init, update=_add)
"""Adds gradients up instead of learning, and counts the ranks whose batches have the row."""


@dataclass(frozen=True)
class Sums:
    """Gradients of replicas, added over the samples of one rank and then over ranks, in one buffer."""

    buffer: Tensor
    """[gradients of all rows | ranks that touched each]; kept from step to step."""
    gradients: list[Tensor]
    """[rows, D] of each table."""
    ranks: list[Tensor]
    """[rows] of each table."""
    group: UpdateGroup
    """Adds to them."""


class Replicas:
    """The replicated part of a sharded collection."""

    def __init__(
        self, features: Sequence[FeatureSpec], routing: Routing, shards: Sequence[TableShard], world: World
    ) -> None:
        """`shards` holds, among others, the replicas."""
        self.features = features
        self.routing = routing
        self.world = world
        replicated = {features[f].table for f in routing.replicated}
        self.shards = {shard.spec.name: shard for shard in shards if shard.spec.name in replicated}

    def lookup(self, ids: KeyedJaggedTensor) -> Tensor | None:
        """[B, columns of the pooled features side by side]; None where there are none."""
        own = self.routing.pooled_replicas
        if not own:
            return None
        bags = permute(ids, [self.features[f].name for f in own])
        return lookup_group(self._pooled_tables, bags.values, bags.offsets, bags.weights)

    @cached_property
    def _pooled_tables(self) -> LookupGroup:
        """Of the pooled features."""
        own = [self.features[f] for f in self.routing.pooled_replicas]
        return LookupGroup(tuple(self.shards[f.table].weight for f in own), tuple(f.weighted for f in own))

    def rows(self, ids: KeyedJaggedTensor, feature: int) -> Tensor:
        """[nnz_f, D] of a feature that is not pooled."""
        spec = self.features[feature]
        values = ids[spec.name].values
        return row_lookup([self.shards[spec.table].weight], values, [0, values.numel()])[0]

    def start_update(self, ids: KeyedJaggedTensor, gradients: Sequence[Tensor], share: float) -> Pending | None:
        """Add up what each row gets from this rank's samples, times `share`, and begin to add over ranks.

        `gradients` are those of what a lookup returned; None where nothing learns."""
        sums = self._sums
        if sums is None:
            return None
        sums.buffer.zero_()
        own = permute(ids, [self.features[f].name for f in self._learning])
        bags = Bags(own.values, own.offsets, own.batch_size, own.weights)
        row_update(sums.group, 1.0, 1, bags, gradients)
        sums.buffer[: -sum(own.numel() for own in sums.ranks)] *= share
        return self.world.start_all_reduce(sums.buffer)

    def finish_update(self, pending: Pending | None, lr: Callable[[TableSpec], float], step: int) -> None:
        """Wait for the sums of all ranks, and step each replica alike."""
        sums = self._sums
        if pending is None or sums is None:
            return
        pending.wait()
        for name, own in zip(self._tables, sums.ranks, strict=True):
            if self.shards[name].spec.optimizer.stepped_rows == "all":
                own.fill_(1)
        touched = torch.cat(sums.ranks).nonzero().squeeze(1)
        first_rows = list(accumulate((own.numel() for own in sums.ranks), initial=0))
        bounds = torch.searchsorted(touched, torch.tensor(first_rows, device=touched.device))
        stops = bounds.tolist()
        rows = [touched[a:b] - first for (a, b), first in zip(pairwise(stops), first_rows, strict=False)]
        gradients = [total[own] for total, own in zip(sums.gradients, rows, strict=True)]
        bags = Bags(torch.cat(rows), bounds, 1)
        for fused in self._fused:
            row_update(fused.group, lr(fused.spec), step, bags, gradients)

    @property
    def learn(self) -> bool:
        """Whether a table is replicated that is not frozen."""
        return bool(self._learning)

    @cached_property
    def _learning(self) -> tuple[int, ...]:
        """Features whose replicas learn."""
        return tuple(
            f for f in self.routing.replicated if self.shards[self.features[f].table].spec.optimizer.name != "frozen"
        )

    @cached_property
    def _tables(self) -> list[str]:
        """Names of the replicas that learn, in the order of the features."""
        return list(dict.fromkeys(self.features[f].table for f in self._learning))

    @cached_property
    def _fused(self) -> tuple[FusedShards, ...]:
        """The replicas; what each touched row gets is one row of the table's own matrix."""
        places = [FeatureGradient(index, index, index, per_id=True) for index in range(len(self._tables))]
        return group_shards([self.shards[name] for name in self._tables], places)

    @cached_property
    def _sums(self) -> Sums | None:
        if not self._learning:
            return None
        shards = [self.shards[name] for name in self._tables]
        shapes = [shard.weight.shape for shard in shards]
        sizes = [*(shape.numel() for shape in shapes), *(shape[0] for shape in shapes)]
        buffer = torch.zeros(sum(sizes), dtype=compute_dtype(shards[0].weight.dtype), device=self.world.device)
        pieces = buffer.split(sizes)
        gradients = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        ranks = list(pieces[len(shapes) :])
        group = UpdateGroup(
            optimizer=SUM,
            tables=tuple(TableRows(total, {"ranks": own}) for total, own in zip(gradients, ranks, strict=True)),
            embedding_dims=tuple(shape[1] for shape in shapes),
            features=tuple(self._gradient_of(position, f) for position, f in enumerate(self._learning)),
        )
        return Sums(buffer, gradients, ranks, group)

    def _gradient_of(self, position: int, feature: int) -> FeatureGradient:
        """Where the gradient of a feature lies in what `start_update` is given."""
        spec, table = self.features[feature], self._tables.index(self.features[feature].table)
        if spec.pooling == "none":
            unpooled = [f for f, other in enumerate(self.features) if other.pooling == "none"]
            return FeatureGradient(position, table, 1 + unpooled.index(feature), per_id=True)
        return FeatureGradient(position, table, 0, self.routing.out_columns[feature], weighted=spec.weighted)

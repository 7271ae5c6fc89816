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
    """The replicated part of a sharded collection: whole tables, and the hot rows of others."""

    def __init__(
        self, features: Sequence[FeatureSpec], routing: Routing, shards: Sequence[TableShard], world: World
    ) -> None:
        """`shards` holds, among others, the replicas."""
        self.features = [features[route.feature] for route in routing.home]
        self.routing = routing
        self.world = world
        held = {shard.shard: shard for shard in shards}
        self.shards = {route.shard.table: held[route.shard] for route in routing.home}

    def lookup(self, home: KeyedJaggedTensor | None) -> Tensor | None:
        """[B, columns of the pooled features side by side] of ids that stay at home; None where there are none."""
        num_pooled = len(self.routing.pooled_home)
        if home is None or not num_pooled:
            return None
        bags = home.select(home.keys[:num_pooled])
        return lookup_group(self._pooled_tables, bags.values, bags.offsets, bags.weights)

    @cached_property
    def _pooled_tables(self) -> LookupGroup:
        """Of the pooled features."""
        own = self.features[: len(self.routing.pooled_home)]
        return LookupGroup(tuple(self.shards[f.table].weight for f in own), tuple(f.weighted for f in own))

    def rows(self, home: KeyedJaggedTensor, feature: FeatureSpec) -> Tensor:
        """[nnz_f, D] of the ids at home of a feature that is not pooled."""
        values = home[feature.name].values
        return row_lookup([self.shards[feature.table].weight], values, [0, values.numel()])[0]

    def start_update(self, home: KeyedJaggedTensor, gradients: Sequence[Tensor], share: float) -> Pending | None:
        """Add up what each row gets from this rank's samples, times `share`, and begin to add over ranks.

        `gradients` are that of what a lookup returned, and one for the ids at home of each feature that is not pooled.
        None where nothing learns."""
        sums = self._sums
        if sums is None:
            return None
        sums.buffer.zero_()
        bags = Bags(home.values, home.offsets, home.batch_size, home.weights)
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
        """Features, by their place at home, whose replicas learn."""
        return tuple(n for n, f in enumerate(self.features) if self.shards[f.table].spec.optimizer.name != "frozen")

    @cached_property
    def _tables(self) -> list[str]:
        """Names of the replicas that learn, in the order of the features at home."""
        return list(dict.fromkeys(self.features[n].table for n in self._learning))

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
            features=tuple(self._gradient_of(n) for n in self._learning),
        )
        return Sums(buffer, gradients, ranks, group)

    def _gradient_of(self, position: int) -> FeatureGradient:
        """Where the gradient of a feature lies in what `start_update` is given."""
        feature, num_pooled = self.features[position], len(self.routing.pooled_home)
        table = self._tables.index(feature.table)
        if position >= num_pooled:
            return FeatureGradient(position, table, 1 + position - num_pooled, per_id=True)
        column = self.routing.out_columns[self.routing.home[position].feature]
        return FeatureGradient(position, table, 0, column, weighted=feature.weighted)

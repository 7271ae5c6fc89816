"""What travels when ids go to their owners, and the way there: sorted, packed, unpacked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, PendingCollective
from meseta.embedding.batch_context import ExhaustedInput
from meseta.embedding.routes import BucketKey, RouteRange, Routing
from meseta.jagged import KeyedJaggedTensor
from meseta.jagged.shapes import Int
from meseta.ops.bucketize import Buckets, bucketize_features
from meseta.ops.jagged import lengths_to_offsets, permute, permute_segments
from meseta.ops.row_update import Bags
from meseta.ops.unique import unique
from meseta.spec import MesetaError


@dataclass(frozen=True)
class PendingCounts:
    """The exchange of counts is in flight."""

    batch_tag: int
    """Tells the batch from others, alike on all ranks."""
    ids: KeyedJaggedTensor
    """Valid ids of all features."""
    buckets: Buckets | None
    """Ids of the features whose tables are cut by rows, sorted by row range."""
    local_counts: Int[Tensor, " n"]
    """What this rank has to say: batch size, ids of each feature, first refused id, ids of each row range of the
    features that are cut."""
    pending: PendingCollective
    distinct_rows: DistinctRows | None = None
    """Of features that are not pooled, where each row is asked for once; else None."""
    error: MesetaError | None = None
    """Why this rank cannot take part; `exchange` raises it on all ranks."""


@dataclass(frozen=True)
class DistinctRows:
    """What features that are not pooled ask for, each row once, ascending."""

    rows: dict[int, Int[Tensor, " U"]]
    """By feature."""
    inverse: dict[int, Int[Tensor, " nnz"]]
    """By feature: which of them each id of the batch is."""
    counts: Int[Tensor, " n"]
    """How many are in each of `Routing.row_buckets`."""

    @staticmethod
    def from_batch(ids: KeyedJaggedTensor, routing: Routing) -> DistinctRows | None:
        """Of a batch; None where no feature asks so. On a GPU the host waits: their number depends on the ids."""
        if not routing.row_buckets:
            return None
        features = sorted({f for f, _ in routing.row_buckets})
        asked = permute(ids, [ids.keys[f] for f in features])
        found = unique(asked.values, asked.key_offsets)
        stops, sizes = found.bounds.tolist(), [b - a for a, b in pairwise(asked.key_offsets)]
        rows = dict(zip(features, (found.rows[a:b] for a, b in pairwise(stops)), strict=True))
        inverse = zip(features, found.inverse.split(sizes), stops, strict=False)
        cuts = [rows[f].new_tensor(routing.range_bounds[f]) for f in features]
        counts = [torch.searchsorted(rows[f], own).diff() for f, own in zip(features, cuts, strict=True)]
        return DistinctRows(rows, {f: places - first for f, places, first in inverse}, torch.cat(counts))


@dataclass(frozen=True)
class RouteCounts:
    """How many ids, or rows, there are on each route; tuples are by route of an owner."""

    requested: Mapping[int, tuple[int, ...]]
    """By owner: what this rank asks of it."""
    served: Mapping[int, tuple[int, ...]]
    """By rank: what it asks of this one."""
    forwarded: Mapping[int, Mapping[int, tuple[int, ...]]]
    """By rank whose ids and rows pass through this one, by owner: what it asks of it. With two levels these are twins,
    and owners of this host; else this rank alone, and all owners."""

    def forwarded_to(self, owner: int) -> dict[int, tuple[int, ...]]:
        """By rank: what it asks of an owner by way of this one."""
        return {rank: by_owner[owner] for rank, by_owner in self.forwarded.items()}


@dataclass(eq=False)
class InputDist:
    """The counts are known, and the exchange of lengths and ids is in flight."""

    batch_tag: int
    """As in `PendingCounts`."""
    ids: KeyedJaggedTensor
    replicated_ids: KeyedJaggedTensor | None
    """Ids of rows that every rank holds, by feature of the routes that stay at home; None where there are none."""
    bucketize_permute: dict[int, Int[Tensor, " nnz"]]
    """Of unpooled features that are cut by rows: where each sorted id stood among the ids of its feature."""
    distinct_rows: DistinctRows | None
    """As in `PendingCounts`."""
    batch_size_per_rank: tuple[int, ...]
    """Samples of each rank; their sum is the global batch, or a micro-batch of it."""
    totals_per_rank: tuple[BatchTotals, ...]
    """Of the samples of each rank in the global batch."""
    exhausted_ranks: Mapping[int, ExhaustedInput]
    """Ranks that have no batch left."""
    ids_per_route: RouteCounts
    """Ids on each route."""
    rows_per_route: RouteCounts
    """Rows that come back on each route that is not pooled: of each id, or where `distinct` is there, once."""
    range_counts: list[list[int]]
    """Ids of the local slice per feature and row range."""
    pending_ids: PendingCollective
    pending_weights: PendingCollective | None
    second_hop: tuple[PendingCollective, PendingCollective | None] | None = None
    """The same on their second level, once that is under way."""

    @property
    def last_hop(self) -> tuple[PendingCollective, PendingCollective | None]:
        """Lengths and ids, and weights, on the level that is under way."""
        return self.second_hop or (self.pending_ids, self.pending_weights)

    @property
    def num_samples(self) -> int:
        return sum(self.batch_size_per_rank)

    def wait(self) -> None:
        """Until lengths, ids and weights are there."""
        payload, weights = self.last_hop
        payload.wait()
        if weights is not None:
            weights.wait()


@dataclass(frozen=True)
class OwnedIds:
    """Ids of the global batch that this rank looks up, one route after the other."""

    bags: Bags
    """Ids of each route, ordered by (global sample, position)."""
    lengths: Int[Tensor, " routes_times_B"]
    """Ids per global sample of each route."""
    sizes: tuple[int, ...]
    """Ids of each route."""
    rows: Int[Tensor, " nnz"] | None = None
    """Row of each id, where ids are the places of their rows; None: ids are rows."""

    def with_slots(self, places: Sequence[Int[Tensor, " n"]]) -> OwnedIds:
        """The same, by route, with the places of the rows as ids."""
        ids = torch.cat([self.bags.ids[:0], *places])
        return replace(self, bags=replace(self.bags, ids=ids), rows=self.bags.ids)

    def ids_by_route(self) -> tuple[Tensor, ...]:
        """By route."""
        return self.bags.ids.split(self.sizes)

    def route_bags(self, routes: RouteRange) -> Bags:
        """Of consecutive routes."""
        n = self.bags.num_samples
        offsets = self.bags.offsets[routes.first * n : routes.stop * n + 1]
        return Bags(self.bags.ids, offsets, n, self.bags.weights)


def bucketize_features_by_row(ids: KeyedJaggedTensor, routing: Routing) -> Buckets | None:
    """Ids of the features that are cut by rows, sorted by row range; None where no feature is."""
    if not routing.row_sharded_features:
        return None
    own = permute(ids, [ids.keys[f] for f in routing.row_sharded_features])
    return bucketize_features(own.values, own.lengths, [routing.range_bounds[f] for f in routing.row_sharded_features])


@dataclass(frozen=True)
class BucketizedIds:
    """What the local slice has for each (feature, row range)."""

    ids: dict[BucketKey, Tensor]
    """Rows, counted from the first of their range."""
    lengths: dict[BucketKey, Tensor]
    """Ids per sample."""
    weights: dict[BucketKey, Tensor]
    """One per id; empty where the batch has none."""

    @staticmethod
    def from_counts(
        x: PendingCounts, routing: Routing, range_counts: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> BucketizedIds:
        """Ids and lengths as numbers of `dtype`: what is whole, and what was sorted by row range."""
        sizes = [b - a for a, b in pairwise(x.ids.key_offsets)]
        whole = [(f, 0) for f in range(len(sizes))]
        ids = dict(zip(whole, x.ids.values.to(dtype).split(sizes), strict=True))
        lengths = dict(zip(whole, x.ids.lengths.to(dtype).view(len(sizes), -1), strict=True))
        weights = {} if x.ids.weights is None else dict(zip(whole, x.ids.weights.split(sizes), strict=True))
        if x.buckets is not None:
            slots = [(f, n) for f in routing.row_sharded_features for n in range(len(range_counts[f]))]
            counts = [n for f in routing.row_sharded_features for n in range_counts[f]]
            if weights:
                sorted_weights = torch.cat([weights[f, 0] for f in routing.row_sharded_features])[x.buckets.order]
                weights |= zip(slots, sorted_weights.split(counts), strict=True)
            ids |= zip(slots, x.buckets.ids.to(dtype).split(counts), strict=True)
            lengths |= zip(slots, x.buckets.lengths.to(dtype), strict=True)
        return BucketizedIds(ids, lengths, weights)

    def pack_ids(self, sent: Sequence[Sequence[BucketKey]], dtype: torch.dtype, device: torch.device) -> Tensor:
        """For each rank: the lengths of all slots that are `sent` to it, then their ids."""
        parts = [numbers[slot] for slots in sent for numbers in (self.lengths, self.ids) for slot in slots]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)

    def pack_weights(self, sent: Sequence[Sequence[BucketKey]], dtype: torch.dtype, device: torch.device) -> Tensor:
        """One weight for each id that `pack_ids` packs."""
        parts = [self.weights[slot] for slots in sent for slot in slots]
        return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype, device=device)

    def replicated_ids(self, routing: Routing, ids: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """The ids of `ids` that stay at home; None where no table is replicated."""
        if not routing.replicated:
            return None
        keys = tuple(ids.keys[r.feature] for r in routing.replicated)
        if all(len(routing.range_bounds[r.feature]) == 2 for r in routing.replicated):
            return permute(ids, keys)
        weights = torch.cat([self.weights[r.bucket] for r in routing.replicated]) if self.weights else None
        return KeyedJaggedTensor(
            keys=keys,
            values=torch.cat([self.ids[r.bucket] for r in routing.replicated]),
            lengths=torch.cat([self.lengths[r.bucket] for r in routing.replicated]),
            weights=weights,
            batch_sizes=(ids.batch_size,) * len(keys),
        )


def bucketize_permutes(x: PendingCounts, routing: Routing) -> dict[int, Tensor]:
    """For each unpooled feature that is cut by rows: where each sorted id stood among the ids of the feature."""
    if x.buckets is None:
        return {}
    sizes = [x.ids.key_offsets[f + 1] - x.ids.key_offsets[f] for f in routing.row_sharded_features]
    found = zip(routing.row_sharded_features, x.buckets.order.split(sizes), accumulate(sizes, initial=0), strict=False)
    return {f: own - first for f, own, first in found if f not in routing.output_columns}


def unpack_ids(
    x: InputDist, num_routes: int, arrival: Sequence[int], payload: Tensor, weights: Tensor | None
) -> OwnedIds:
    """From (rank, lengths | ids) and (rank, weights), ranks in the order of `arrival`, to one list per route in the
    order of global samples."""
    k, counts = num_routes, [x.ids_per_route.served[r] for r in arrival]
    places = [arrival.index(rank) for rank in range(len(x.batch_size_per_rank))]
    sizes = [s for r, n in zip(arrival, counts, strict=True) for s in (*[x.batch_size_per_rank[r]] * k, *n)]
    by_route = [2 * k * at + first + route for first in (0, k) for route in range(k) for at in places]
    both = permute_segments(payload, sizes, by_route)
    lengths, ids = both[: k * x.num_samples], both[k * x.num_samples :]
    if weights is not None:
        by_route = [k * at + route for route in range(k) for at in places]
        weights = permute_segments(weights, [number for n in counts for number in n], by_route)
    bags = Bags(ids, lengths_to_offsets(lengths), x.num_samples, weights)
    return OwnedIds(bags=bags, lengths=lengths, sizes=tuple(sum(n[route] for n in counts) for route in range(k)))

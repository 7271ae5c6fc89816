"""Data of the input_dist stage: ids sorted by row range, packed for their owners, and unpacked by the owners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from meseta.comm import BatchTotals, PendingCollective
from meseta.embedding.batch_context import ExhaustedInput
from meseta.embedding.routes import BucketKey, RouteRange, Routing
from meseta.ops.bucketize import Buckets, bucketize_features
from meseta.ops.jagged import lengths_to_offsets, permute, permute_segments
from meseta.ops.row_update import Bags
from meseta.ops.unique import unique
from meseta.sparse import KeyedJaggedTensor
from meseta.sparse.shapes import Int
from meseta.spec import MesetaError


@dataclass(frozen=True)
class PendingCounts:
    """Local ids and the exchange of their counts in flight."""

    batch_tag: int
    """Tag that identifies the batch and is equal on all ranks."""
    ids: KeyedJaggedTensor
    buckets: Buckets | None
    """Ids of row-sharded features, sorted by row range."""
    local_counts: Int[Tensor, " n"]
    """Counts of this rank, see `CountsExchange`."""
    pending: PendingCollective
    distinct_rows: DistinctRows | None = None
    """Distinct rows of unpooled features, if each row is requested once."""
    error: MesetaError | None = None
    """Error that prevents this rank from taking part. `input_dist` raises it on all ranks."""


@dataclass(frozen=True)
class DistinctRows:
    """Distinct rows of unpooled features, in ascending order. Each row is requested once."""

    rows: dict[int, Int[Tensor, " U"]]
    inverse: dict[int, Int[Tensor, " nnz"]]
    """Index of each id of the batch within the distinct rows of its feature."""
    counts: Int[Tensor, " n"]
    """Number of rows in each bucket of `Routing.row_buckets`."""

    @staticmethod
    def from_batch(ids: KeyedJaggedTensor, routing: Routing) -> DistinctRows | None:
        """Return the distinct rows of a batch, or `None` if no feature requires them."""
        # On a GPU this waits, because the number of distinct rows depends on the ids.
        if not routing.row_buckets:
            return None
        features = sorted({f for f, _ in routing.row_buckets})
        selected = permute(ids, [ids.keys[f] for f in features])
        distinct = unique(selected.values, selected.key_offsets)
        stops, sizes = distinct.bounds.tolist(), [b - a for a, b in pairwise(selected.key_offsets)]
        rows = dict(zip(features, (distinct.rows[a:b] for a, b in pairwise(stops)), strict=True))
        inverse = zip(features, distinct.inverse.split(sizes), stops, strict=False)
        cuts = [rows[f].new_tensor(routing.range_bounds[f]) for f in features]
        counts = [torch.searchsorted(rows[f], bounds).diff() for f, bounds in zip(features, cuts, strict=True)]
        return DistinctRows(rows, {f: places - first for f, places, first in inverse}, torch.cat(counts))


@dataclass(frozen=True)
class RouteCounts:
    """Numbers of ids or rows per route, as one tuple per owner."""

    requested: Mapping[int, tuple[int, ...]]
    """Counts that this rank requests, by owner."""
    served: Mapping[int, tuple[int, ...]]
    """Counts that other ranks request from this rank, by rank."""
    forwarded: Mapping[int, Mapping[int, tuple[int, ...]]]
    """Counts that pass through this rank, by requesting rank and owner. In a flat exchange these are the requests of
    this rank. In a hierarchical exchange, cross-host peers send requests for owners in this host."""

    def forwarded_to(self, owner: int) -> dict[int, tuple[int, ...]]:
        """Return the counts that each rank requests from `owner` through this rank."""
        return {rank: by_owner[owner] for rank, by_owner in self.forwarded.items()}


@dataclass(eq=False)
class InputDist:
    """Known counts of a batch, and the exchange of its lengths and ids in flight."""

    batch_tag: int
    """Tag that identifies the batch and is equal on all ranks."""
    ids: KeyedJaggedTensor
    replicated_ids: KeyedJaggedTensor | None
    """Ids of replicated rows, by feature. `None` if no table is replicated."""
    bucketize_permute: dict[int, Int[Tensor, " nnz"]]
    """Original position of each sorted id within the ids of its feature, for unpooled row-sharded features."""
    distinct_rows: DistinctRows | None
    """Distinct rows of unpooled features, if each row is requested once."""
    batch_size_per_rank: tuple[int, ...]
    totals_per_rank: tuple[BatchTotals, ...]
    exhausted_ranks: Mapping[int, ExhaustedInput]
    ids_per_route: RouteCounts
    rows_per_route: RouteCounts
    """Number of rows that unpooled routes return. It differs from the number of ids if each distinct row is requested
    once."""
    range_counts: list[list[int]]
    pending_ids: PendingCollective
    pending_weights: PendingCollective | None
    second_hop: tuple[PendingCollective, PendingCollective | None] | None = None
    """Second hop of ids and weights, or `None` before its start or in a flat exchange."""

    @property
    def last_hop(self) -> tuple[PendingCollective, PendingCollective | None]:
        """The last hop in flight, as (lengths and ids, weights)."""
        return self.second_hop or (self.pending_ids, self.pending_weights)

    @property
    def num_samples(self) -> int:
        return sum(self.batch_size_per_rank)

    def wait(self) -> None:
        payload, weights = self.last_hop
        payload.wait()
        if weights is not None:
            weights.wait()


@dataclass(frozen=True)
class OwnedIds:
    """Ids of the global batch that this rank looks up, ordered by route."""

    bags: Bags
    """Ids of each route, ordered by (global sample, position)."""
    lengths: Int[Tensor, " routes_times_B"]
    sizes: tuple[int, ...]
    """Number of ids of each route. Empty if only the device knows them, see `KeyedJaggedTensor.is_padded`."""
    rows: Int[Tensor, " nnz"] | None = None
    """Row of each id, if the ids are cache slots. `None` if the ids are rows."""

    def with_slots(self, places: Sequence[Int[Tensor, " n"]]) -> OwnedIds:
        """Return a copy with cache slots as ids, given the slots of each route."""
        ids = torch.cat([self.bags.ids[:0], *places])
        return replace(self, bags=replace(self.bags, ids=ids), rows=self.bags.ids)

    def ids_by_route(self) -> tuple[Tensor, ...]:
        return self.bags.ids.split(self.sizes)

    def route_bags(self, routes: RouteRange) -> Bags:
        n = self.bags.num_samples
        offsets = self.bags.offsets[routes.first * n : routes.stop * n + 1]
        return Bags(self.bags.ids, offsets, n, self.bags.weights)


def bucketize_features_by_row(ids: KeyedJaggedTensor, routing: Routing) -> Buckets | None:
    """Sort the ids of row-sharded features by row range. Returns `None` if there are no such features."""
    if not routing.row_sharded_features:
        return None
    selected = permute(ids, [ids.keys[f] for f in routing.row_sharded_features])
    return bucketize_features(
        selected.values, selected.lengths, [routing.range_bounds[f] for f in routing.row_sharded_features]
    )


@dataclass(frozen=True)
class BucketizedIds:
    """Local ids by (feature, row range)."""

    ids: dict[BucketKey, Tensor]
    """Rows relative to the first row of their range."""
    lengths: dict[BucketKey, Tensor]
    weights: dict[BucketKey, Tensor]
    """Weight of each id. Empty if the batch has no weights."""

    @staticmethod
    def from_counts(
        x: PendingCounts, routing: Routing, range_counts: Sequence[Sequence[int]], dtype: torch.dtype
    ) -> BucketizedIds:
        """Collect ids and lengths of `dtype` for whole features and for row ranges, given the size of each range."""
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
        """Pack lengths and then ids of the buckets for each rank, ordered by rank."""
        parts = [numbers[slot] for slots in sent for numbers in (self.lengths, self.ids) for slot in slots]
        return torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)

    def pack_weights(self, sent: Sequence[Sequence[BucketKey]], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Pack one weight per id in the order of `pack_ids`."""
        parts = [self.weights[slot] for slots in sent for slot in slots]
        return torch.cat(parts).to(dtype) if parts else torch.empty(0, dtype=dtype, device=device)

    def replicated_ids(self, routing: Routing, ids: KeyedJaggedTensor) -> KeyedJaggedTensor | None:
        """Return the ids of replicated rows, or `None` if no table is replicated."""
        if not routing.replicated:
            return None
        keys = tuple(ids.keys[r.feature] for r in routing.replicated)
        # Whole tables are replicated, so their ids are not selected by row range.
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
    """Return the original position of each sorted id within its feature, for unpooled row-sharded features."""
    if x.buckets is None:
        return {}
    sizes = [x.ids.key_offsets[f + 1] - x.ids.key_offsets[f] for f in routing.row_sharded_features]
    orders = zip(routing.row_sharded_features, x.buckets.order.split(sizes), accumulate(sizes, initial=0), strict=False)
    return {f: order - first for f, order, first in orders if f not in routing.output_columns}


def unpack_ids(
    x: InputDist, num_routes: int, arrival: Sequence[int], payload: Tensor, weights: Tensor | None
) -> OwnedIds:
    """Unpack received ids into one list per route, ordered by global sample.

    `arrival` has the ranks in the order of their data in `payload` (lengths and then ids) and `weights`, and
    `num_routes` counts the routes that this rank serves.
    """
    k, counts = num_routes, [x.ids_per_route.served[r] for r in arrival]
    places = [arrival.index(rank) for rank in range(len(x.batch_size_per_rank))]
    sizes = [s for r, n in zip(arrival, counts, strict=True) for s in (*[x.batch_size_per_rank[r]] * k, *n)]
    by_route = [2 * k * place + first + route for first in (0, k) for route in range(k) for place in places]
    both = permute_segments(payload, sizes, by_route)
    lengths, ids = both[: k * x.num_samples], both[k * x.num_samples :]
    if weights is not None:
        by_route = [k * place + route for route in range(k) for place in places]
        weights = permute_segments(weights, [number for n in counts for number in n], by_route)
    bags = Bags(ids, lengths_to_offsets(lengths), x.num_samples, weights)
    return OwnedIds(bags=bags, lengths=lengths, sizes=tuple(sum(n[route] for n in counts) for route in range(k)))
